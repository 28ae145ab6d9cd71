"""Looks at fixed numbers of seeds: what stops, what is said, and what it does to the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from contracts.randomness import keyed_generator
from eval.intervals import look_alphas
from eval.multiplicity import max_t
from eval.stored import load_study, store_study
from eval.study import run_study
from eval.study_compare import compare_studies
from eval.study_looks import look_text, run_until_clear, undecided
from eval.study_summary import PARTS, grid_rows
from eval.verdicts import judge
from preemptbench.cli import cli
from preemptbench.study_text import study_object, study_text
from tests.unit.test_study import CONFIG, source_in

TWO_RULES = replace(CONFIG, policies=("lifo", "young(0.5)"), signals=())


def test_a_clear_result_stops_at_the_first_look(tmp_path: Path) -> None:
    # everything lies inside a margin of 99 points, so the first look decides
    config = replace(TWO_RULES, looks=(3, 5), num_seeds=5, margin_pp=99.0)
    notes: list[str] = []
    study = run_until_clear(
        config, [source_in(tmp_path)], tmp_path / "out", num_jobs=1, on_note=notes.append
    )
    assert study.seeds == (0, 1, 2) and study.config.looks == (3, 5) and not notes
    assert "look 1 of 2" in study_text(study) and "every rule has a verdict" in study_text(study)
    assert study_object(study)["alpha"] == look_alphas((3, 5))[0] == study.config.alpha
    store_study(study, tmp_path / "out", "a command")
    assert load_study(tmp_path / "out").study.config == study.config


def test_an_open_result_goes_on_to_the_last_look_and_equals_a_plain_study(tmp_path: Path) -> None:
    # three or four seeds can show no difference: the least p of 4 is an eighth
    config = replace(TWO_RULES, looks=(3, 4), num_seeds=4, margin_pp=1e-6)
    source, notes = source_in(tmp_path), []
    study = run_until_clear(config, [source], tmp_path / "out", num_jobs=1, on_note=notes.append)
    assert study.seeds == (0, 1, 2, 3)
    assert len(notes) == 1 and "look 1 of 2, 3 seeds" in notes[0] and "4 seeds next" in notes[0]
    assert look_text(study.config).endswith("the last look")
    plain = run_study(
        replace(config, looks=()), [source], tmp_path / "plain", num_jobs=1, on_note=notes.append
    )
    for part in PARTS:
        ours, theirs = grid_rows(study, part), grid_rows(plain, part)
        assert [row.within for row in ours] == [row.within for row in theirs]
        assert [row.verdict.p_value for row in ours] == [row.verdict.p_value for row in theirs]
    assert {rule for _, rule in undecided(study)} == {("young(0.5)", "none")}
    for one, place in ((study, tmp_path / "out"), (plain, tmp_path / "plain")):
        store_study(one, place, "a command")
    both = compare_studies(load_study(tmp_path / "out"), load_study(tmp_path / "plain"))
    assert not both.differs and len(both.cells) == 4
    assert {cell.difference.mean for cell in both.cells if cell.difference} == {0.0}


@pytest.mark.parametrize(("looks", "num_seeds"), [((4, 3), 3), ((3, 5), 4), ((1, 3), 3)])
def test_looks_that_cannot_be(looks: tuple[int, ...], num_seeds: int) -> None:
    with pytest.raises(InvalidInput, match="looks are"):
        replace(CONFIG, looks=looks, num_seeds=num_seeds)


def test_the_option_says_what_it_wants() -> None:
    both = CliRunner().invoke(cli, ["study", "--looks", "3,5", "--seeds", "5"])
    assert both.exit_code == 2 and "do not go together" in both.output
    words = CliRunner().invoke(cli, ["study", "--looks", "three"])
    assert words.exit_code == 2 and "not a list such as 8,12,20" in words.output


def test_stopping_at_fixed_looks_keeps_the_family_wise_error() -> None:
    """No rule differs from LIFO; an error is any "better" or "worse" at any look, so that it does
    not matter when one stops. Rules share LIFO's noise, so their differences correlate, as in a
    study. The bound is 5 % plus three standard errors of 600 simulations; looking as often at 5 %
    each passes it."""
    looks, num_rules, count = (6, 12, 20), 4, 600
    levels = look_alphas(looks)
    errors = naive = 0
    for number in range(count):
        noise = keyed_generator(number, "looks-null").standard_normal((looks[-1], num_rules + 1))
        differences = noise[:, 1:] - noise[:, :1]
        least = [max_t(differences[:num_seeds]).min() for num_seeds in looks]
        for num_seeds, level, p in zip(looks, levels, least, strict=True):
            word = judge(differences[:num_seeds, 0], p, 1e-9, num_tests=num_rules, alpha=level).word
            assert (word != "inconclusive") == (p <= level)
        errors += any(p <= level for p, level in zip(least, levels, strict=True))
        naive += any(p <= 0.05 for p in least)
    bound = 0.05 + 3 * np.sqrt(0.05 * 0.95 / count)
    assert errors / count <= bound < naive / count
