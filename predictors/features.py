"""The columns a predictor may read of a request at an age: prompt, age, progress so far.

Everything here is knowable while the request runs: a row at age t reads ``progress.seen(t)`` and
nothing behind it. What is absent (no prompt text, no progress yet) is NaN, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray, IntArray
from contracts.runs import ProgressRecord
from contracts.signals import ProgressTrack, SignalRequest

_CUES = {
    "cue_terse": r"\b(only|yes or no|one word|single word|true or false)\b",
    "cue_short": r"\b(short|brief|briefly|concise|one[- ]sentence|one line|simple|simply)\b",
    "cue_long": r"\b(detailed|long|thorough|comprehensive|essay|in depth|every|all)\b",
    "cue_list": r"\b(list|name|enumerate|one per line|items|examples|reasons)\b",
    "cue_steps": r"\b(steps?|step[- ]by[- ]step|numbered|instructions)\b",
    "cue_explain": r"\b(explain|describe|why|how|discuss|compare|prove|derive)\b",
    "cue_write": r"\b(story|poem|dialogue|email|letter|article|speech|song)\b",
    "cue_rewrite": r"\b(rewrite|translate|summari[sz]e|correct|rephrase|shorten)\b",
    "cue_repeat": r"\b(repeat|times|count|again)\b",
    "cue_code": r"```|\b(code|function|program|python|java|javascript|c\+\+|sql|regex|script)\b",
    "unit_words": r"\bwords\b",
    "unit_sentences": r"\bsentences?\b",
    "unit_lines": r"\b(lines?|rows?|verses?)\b",
}
_CUE_PATTERNS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in _CUES.values())
_NUMBER_WORDS = {
    word: number
    for number, word in enumerate(
        "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen twenty".split(),
        start=2,
    )
}
_NUMBER = re.compile(r"\d{1,9}|\b(?:" + "|".join(_NUMBER_WORDS) + r")\b", re.IGNORECASE)
_QUOTED = re.compile(r"['\"“‘](.+?)['\"”’](?!\w)", re.DOTALL)

AGE_FEATURES = ("age", "log_age")
PROMPT_FEATURES = (
    "prompt_tokens", "prompt_chars", "prompt_words", "prompt_lines", "prompt_digits",
    "prompt_quoted_chars", "prompt_numbers", "log_largest_number", "is_question", *_CUES,
)  # fmt: skip
PROGRESS_FEATURES = (
    *(f"last_{name}" for name in ProgressRecord._fields),
    *(f"mean_{name}" for name in ProgressRecord._fields),
    "entropy_trend", "logprob_trend", "num_records", "num_newlines", "newlines_short_of_number",
)  # fmt: skip
FEATURE_NAMES = AGE_FEATURES + PROMPT_FEATURES + PROGRESS_FEATURES
PROGRESS_START = len(AGE_FEATURES) + len(PROMPT_FEATURES)
_NUM_RECORD_FIELDS = len(ProgressRecord._fields)
_NEWLINE = ProgressRecord._fields.index("newline_rate")


@dataclass(frozen=True, slots=True, eq=False)
class TrackSummary(ProgressTrack):
    """What the columns below need of a track, in constant space: ``values`` (1, 6) is the last
    record, ``sums`` (6,) the sum of all ``num_records``. It answers for the age it was taken at."""

    sums: FloatArray
    num_records: int

    def seen(self, age: int) -> FloatArray:
        """Refuse: single records are gone."""
        raise InvalidInput(
            f"the records up to age {age} were summed up as they came: a family that reads single "
            "records cannot answer from a summary"
        )


def feature_columns(names: Sequence[str]) -> IntArray:
    """Return where ``names`` stand in :data:`FEATURE_NAMES`; raises UnknownName, InvalidInput."""
    for name in names:
        if name not in FEATURE_NAMES:
            raise unknown_name("feature", name, FEATURE_NAMES)
    if len(set(names)) != len(names):
        raise InvalidInput(f"features {', '.join(names)} name one column twice: list each once")
    return np.array([FEATURE_NAMES.index(name) for name in names], dtype=np.int64)


def feature_matrix(requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
    """Return float64 (n, len(FEATURE_NAMES)): one row for each (request, age) pair.

    A request that stands in many rows (a grid asks for every age) is read once.
    """
    out = np.full((len(requests), len(FEATURE_NAMES)), np.nan)
    out[:, 0] = ages
    out[:, 1] = np.log1p(ages)
    prompt_end = PROGRESS_START
    for request, rows in rows_by_request(requests):
        prompt = prompt_row(request)
        out[rows, len(AGE_FEATURES) : prompt_end] = prompt
        if request.progress is not None:
            out[rows, prompt_end:] = _progress_rows(
                request.progress, ages[rows], largest_number(prompt)
            )
    return out


def largest_number(prompt: FloatArray) -> FloatArray:
    """Return the largest number that prompts (…, len(PROMPT_FEATURES)) name; NaN for none."""
    return np.asarray(np.expm1(prompt[..., PROMPT_FEATURES.index("log_largest_number")]))


def rows_by_request(requests: Sequence[SignalRequest]) -> list[tuple[SignalRequest, IntArray]]:
    """Return each distinct request object with the rows it stands in."""
    first_seen: dict[int, int] = {}
    owner = np.array(
        [first_seen.setdefault(id(request), len(first_seen)) for request in requests],
        dtype=np.int64,
    )
    if not owner.size:
        return []
    order = np.argsort(owner, kind="stable")
    cuts = np.flatnonzero(np.diff(owner[order])) + 1
    return [(requests[int(rows[0])], rows) for rows in np.split(order, cuts)]


def prompt_row(request: SignalRequest) -> FloatArray:
    """Return the PROMPT_FEATURES of one request."""
    text = request.prompt
    if text is None:
        return np.array([request.prompt_tokens] + [np.nan] * (len(PROMPT_FEATURES) - 1))
    numbers = [_number(found) for found in _NUMBER.findall(text)]
    return np.array(
        [
            request.prompt_tokens,
            len(text),
            len(text.split()),
            text.count("\n") + 1,
            sum(character.isdigit() for character in text),
            sum(len(quoted) for quoted in _QUOTED.findall(text)),
            len(numbers),
            np.log1p(max(numbers)) if numbers else np.nan,
            "?" in text,
            *(pattern.search(text) is not None for pattern in _CUE_PATTERNS),
        ],
        dtype=np.float64,
    )


def _number(found: str) -> int:
    return int(found) if found.isdecimal() else _NUMBER_WORDS[found.lower()]


def _progress_rows(track: ProgressTrack, ages: IntArray, named: FloatArray) -> FloatArray:
    """Return the PROGRESS_FEATURES (n, …) of one run at ``ages``; NaN before the first record.

    ``named`` is the largest number in the prompt. Row i reads the first ``ages[i] // stride``
    records only; the running sums of a longer track have the same prefix.
    """
    out = np.full((len(ages), len(PROGRESS_FEATURES)), np.nan)
    if isinstance(track, TrackSummary):
        if track.num_records:
            count = np.full(len(ages), track.num_records)
            sums = np.tile(track.sums, (len(ages), 1))
            out[:] = progress_features(track.values, sums, count, track.stride, named)
        return out
    closed = np.minimum(ages // track.stride, len(track.values))
    some = closed > 0
    count = closed[some]
    sums = np.cumsum(track.values[: closed.max(initial=0)], axis=0)
    last = track.values[count - 1]
    out[some] = progress_features(last, sums[count - 1], count, track.stride, named)
    return out


def progress_features(
    last: FloatArray, sums: FloatArray, count: IntArray, stride: int, named: FloatArray
) -> FloatArray:
    """Return the PROGRESS_FEATURES (n, …) of runs with ``count`` (n,) >= 1 records that add up to
    ``sums`` (n, 6), the last of which is ``last`` (n, 6)."""
    mean = sums / count[:, None]
    newlines = mean[:, _NEWLINE] * count * stride
    trends = mean[:, :2] - last[:, :2]
    out = np.empty((len(count), len(PROGRESS_FEATURES)))
    out[:, :_NUM_RECORD_FIELDS] = last
    out[:, _NUM_RECORD_FIELDS : 2 * _NUM_RECORD_FIELDS] = mean
    out[:, 2 * _NUM_RECORD_FIELDS :] = np.column_stack((-trends, count, newlines, named - newlines))
    return out
