"""Text tables that line up, and figures that are whole, repeatable and of a known kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from contracts.errors import InvalidInput
from contracts.text_table import aligned
from eval.report_rows import Estimate
from eval.save_figure import save_figure


def test_columns_line_up_on_their_side() -> None:
    rows = [["name", "n", "why"], ["a", "1,000", "x"], ["longer", "2", "yy"]]
    assert aligned(rows, left={0, 2}).splitlines() == [
        "name        n  why",
        "a       1,000  x",
        "longer      2  yy",
    ]
    assert aligned([["a", "b"]]) == "a  b" and aligned([]) == ""


def test_an_estimate_as_text() -> None:
    nan = float("nan")
    assert str(Estimate(0.12345, -1.0, 2.0)) == "0.123 [-1.000, 2.000]"
    assert str(Estimate(123.45, 100.0, 200.0)) == "123.5 [100.0, 200.0]"
    assert str(Estimate(0.5, nan, nan)) == "0.500" and str(Estimate(nan, nan, nan)) == "-"


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_figure_has_the_same_bytes_twice(tmp_path: Path, name: str) -> None:
    def draw(folder: str) -> bytes:
        figure = Figure()
        figure.subplots().plot([1, 2], label="é")
        path = save_figure(figure, tmp_path / folder / name)
        assert [part.name for part in path.parent.iterdir()] == [name]
        return path.read_bytes()

    assert draw("one") == draw("two")


def test_a_figure_of_another_kind_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"must end in \.svg or \.png"):
        save_figure(Figure(), tmp_path / "new" / "a.jpg")
    assert not list(tmp_path.iterdir())
