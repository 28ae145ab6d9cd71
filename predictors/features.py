"""The columns a predictor may read of a request at an age: prompt, age, progress so far.

Everything here is knowable while the request runs: a row at age t reads ``progress.seen(t)`` and
nothing behind it. What is absent (no prompt text, no progress yet) is NaN, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
_NUM_RECORD_FIELDS = len(ProgressRecord._fields)
_NEWLINE = ProgressRecord._fields.index("newline_rate")


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
    prompt_end = len(AGE_FEATURES) + len(PROMPT_FEATURES)
    for request, rows in rows_by_request(requests):
        prompt = _prompt_row(request)
        out[rows, len(AGE_FEATURES) : prompt_end] = prompt
        if request.progress is not None:
            named = np.expm1(prompt[PROMPT_FEATURES.index("log_largest_number")])
            out[rows, prompt_end:] = _progress_rows(request.progress, ages[rows], named)
    return out


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


def _prompt_row(request: SignalRequest) -> FloatArray:
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


def _progress_rows(track: ProgressTrack, ages: IntArray, named: float) -> FloatArray:
    """Return the PROGRESS_FEATURES (n, …) of one run at ``ages``; NaN before the first record.

    ``named`` is the largest number in the prompt. Row i reads the first ``ages[i] // stride``
    records only; the running sums of a longer track have the same prefix.
    """
    closed = np.minimum(ages // track.stride, len(track.values))
    out = np.full((len(ages), len(PROGRESS_FEATURES)), np.nan)
    some = closed > 0
    count = closed[some]
    last = track.values[count - 1]
    sums = np.cumsum(track.values[: closed.max(initial=0)], axis=0)
    mean = sums[count - 1] / count[:, None]
    newlines = mean[:, _NEWLINE] * count * track.stride
    derived = (last[:, 0] - mean[:, 0], last[:, 1] - mean[:, 1], count, newlines, named - newlines)
    out[some, :_NUM_RECORD_FIELDS] = last
    out[some, _NUM_RECORD_FIELDS : 2 * _NUM_RECORD_FIELDS] = mean
    out[some, 2 * _NUM_RECORD_FIELDS :] = np.column_stack(derived)
    return out
