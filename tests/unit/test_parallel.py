"""Warnings of workers reach whoever began the work, once each and in whatever backend."""

from __future__ import annotations

import threading
import warnings

import joblib
import pytest

from eval.parallel import through


def warned(number: int) -> int:
    warnings.warn(f"beyond the range, for {number % 2}", stacklevel=1)
    return number


@pytest.mark.parametrize(("backend", "num_jobs"), [("loky", 2), ("loky", 1), ("sequential", 1)])
def test_each_warning_is_heard_once(
    backend: str, num_jobs: int, capfd: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    seen: list[tuple[str, int, int]] = []
    with joblib.parallel_config(backend=backend):
        answers = through(
            "stage", warned, [(n,) for n in range(6)], num_jobs,
            lambda *report: seen.append(report), notes.append,
        )  # fmt: skip
    assert sorted(answers) == list(range(6))
    assert sorted(notes) == ["beyond the range, for 0", "beyond the range, for 1"]
    assert seen == [("stage", done, 6) for done in range(7)]
    assert "UserWarning" not in capfd.readouterr().err


def test_threads_leave_the_filters_as_they_were() -> None:
    before = warnings.showwarning
    with (
        pytest.warns(UserWarning, match="beyond the range"),
        joblib.parallel_config(backend="threading"),
    ):
        through("stage", warned, [(n,) for n in range(8)], 4, lambda *_: None, print)
    assert warnings.showwarning is before
    assert threading.current_thread() is threading.main_thread()
