"""One call over many tasks through joblib; what workers warn of is heard where the work began."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any


def through(
    stage: str,
    call: Callable[..., Any],
    tasks: Sequence[Sequence[Any]],
    num_jobs: int,
    on_task: Callable[[str, int, int], None],
    on_note: Callable[[str], None],
) -> list[Any]:
    """Run ``call`` on the arguments of every task with joblib; return its answers in any order.

    ``on_task`` hears the stage, how many of its tasks are done, and how many there are; ``on_note``
    hears each warning of a worker once.
    """
    from joblib import Parallel, delayed

    try:
        workers = Parallel(n_jobs=num_jobs, return_as="generator_unordered")
    except ValueError:  # Ray's backend hands all answers over at the end
        workers = Parallel(n_jobs=num_jobs)
    on_task(stage, 0, len(tasks))
    answers: list[Any] = []
    heard: set[str] = set()
    for answer, said in workers(delayed(_listened)(call, task) for task in tasks):
        answers.append(answer)
        for text in said:
            if text not in heard:
                heard.add(text)
                on_note(text)
        on_task(stage, len(answers), len(tasks))
    return answers


def _listened(call: Callable[..., Any], task: Sequence[Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the answer and the texts of the warnings; in a thread, where catching them would
    silence other threads, they go their own way."""
    if threading.current_thread() is not threading.main_thread():
        return call(*task), ()
    with warnings.catch_warnings(record=True) as caught:
        answer = call(*task)
    return answer, tuple(dict.fromkeys(str(warning.message) for warning in caught))
