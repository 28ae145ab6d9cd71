"""The README's table is what ``make demo`` prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Rates are compared at the printed digit, give or take: on another processor the last bit of a
# trained signal may differ and turn single victims of 6,000 requests (0.017 pp each).
TOLERANCE_PP = 0.15


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d", text)]


def _readme_rows() -> dict[str, list[list[float]]]:
    """Return label -> the numbers of its four cells."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [cells for cells in table if len(cells) == 5 and "%" in cells[1]]
    return {re.split(r" \(|: ", cells[0])[0]: list(map(_numbers, cells[1:])) for cells in rows}


def test_the_table_is_that_of_the_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "preemptbench", "demo", "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=500,
    )
    found = {}
    for row in json.loads(done.stdout)["rows"]:
        label = row["policy"] if row["signal"] == "none" else f"{row['policy']} / {row['signal']}"
        d = row["difference"]
        numbers = [100 * row["breach"], *([] if d is None else [d["mean"], d["low"], d["high"]])]
        found[label, row["pressure"]] = numbers
    written = _readme_rows()
    assert len(written) == 10
    for label, cells in written.items():
        for pressure, (breach, difference) in zip(
            ("medium", "overload"), (cells[:2], cells[2:]), strict=True
        ):
            stated = [*breach, *difference]
            assert stated == pytest.approx(found[label, pressure], abs=TOLERANCE_PP), label
    assert len(found) == 51
