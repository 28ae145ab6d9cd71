"""A progress bar on stderr for work that reports (done, total)."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Bar:
    """A tqdm bar that appears with the first report; a context manager, so it always closes."""

    def __init__(self, unit: str, label: str = "") -> None:
        self.done = self.total = 0
        self._unit, self._label = unit, label
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show ``done`` of ``total`` units, with a note beside the time left."""
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=done, unit=self._unit, desc=self._label or None, leave=False
            )
        self.done, self.total = done, total
        self._bar.total = total  # work may grow while it is done
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first report."""
        return float(self._bar.format_dict["elapsed"]) if self._bar is not None else 0.0


class StageBars:
    """One bar after another: a context manager that takes (stage, done, total)."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._stage: str | None = None
        self._bar = Bar(unit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def update(self, stage: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` units of ``stage``."""
        if stage != self._stage:
            self._bar.__exit__(None, None, None)
            self._stage, self._bar = stage, Bar(self._unit, stage)
        self._bar.update(done, total)
