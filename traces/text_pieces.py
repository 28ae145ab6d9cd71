"""Progress from a stored text: what an imported run shows when only its text was kept.

Token borders, entropies and log-probabilities are lost. Words and signs stand in for tokens,
spread evenly over the run's token count, and go through the one tracker of progress signals
(contracts.progress); entropy and log-probability are NaN. A border is off by how much denser or
looser the text is there than on average, and never passes the run's end.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import replace

from contracts.errors import InvalidInput
from contracts.progress import ProgressTracker, is_hesitation
from contracts.runs import DecodeRun

_PIECE = re.compile(r"[^\S\n]*(?:\w+|[^\w\s])|\n\s*")
_CLOSE, _CONTINUED = -1, -2  # token ids that no piece has


def with_text_progress(run: DecodeRun, stride: int, thinking_chars: int = 0) -> DecodeRun:
    """Return ``run`` with progress records every ``stride`` tokens, read from its text.

    The first ``thinking_chars`` characters are the thinking. Raises InvalidInput without a text.
    """
    if not run.text:
        raise InvalidInput(f"run {run.run_id!r} has no text to read progress from")
    nan = float("nan")
    tracker = ProgressTracker(stride, think_close=_CLOSE, starts_thinking=thinking_chars > 0)
    found = list(_PIECE.finditer(run.text))
    last, open_chars = -1, thinking_chars
    for number in range(run.output_tokens):
        # the pieces of this token: several share one, or a long one goes on over several
        upto = (number + 1) * len(found) // run.output_tokens - 1
        group = found[last + 1 : upto + 1]
        if not group:
            tracker.update(_CONTINUED, "", nan, nan)
            continue
        pieces = [match.group() for match in group]
        piece = next((part for part in pieces if is_hesitation(part)), "".join(pieces))
        closes = open_chars > 0 and group[-1].end() > open_chars
        if closes:
            open_chars = 0
        token = _CLOSE if closes else zlib.crc32("".join(pieces).encode("utf-8", "surrogatepass"))
        tracker.update(token, piece, nan, nan)
        last = upto
    return replace(run, progress_stride=stride, progress=tuple(tracker.records))
