"""A bounded pool of daemon threads whose results come back in the order they end.

The standard executor joins its threads when the interpreter leaves, so that one hanging request
would hold Ctrl-C up for its whole timeout. These threads die with the process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
_Ended = tuple[int, T | None, BaseException | None]


def run_bounded(tasks: Sequence[Callable[[int], T]], size: int) -> Iterator[tuple[int, T]]:
    """Run at most ``size`` tasks at once; yield (index, result) as they end.

    A task is given the number of tasks in flight when it starts, itself included. The first
    exception of a task is raised here, after the results that were there before it; tasks that
    had not started then never do.
    """
    waiting = iter(range(len(tasks)))
    ended: queue.SimpleQueue[_Ended[T]] = queue.SimpleQueue()
    lock, stopped = threading.Lock(), threading.Event()
    in_flight = 0

    def work() -> None:
        nonlocal in_flight
        while True:
            with lock:
                index = None if stopped.is_set() else next(waiting, None)
                if index is None:
                    return
                in_flight += 1
                concurrency = in_flight
            try:
                result, error = tasks[index](concurrency), None
            except BaseException as caught:  # it belongs to the thread that waits below
                result, error = None, caught
                stopped.set()
            with lock:
                in_flight -= 1
            ended.put((index, result, error))

    for _ in range(min(size, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in tasks:
            index, result, error = ended.get()
            if error is not None:
                raise error
            yield index, result  # type: ignore[misc]  # None only beside an error
    finally:
        stopped.set()
