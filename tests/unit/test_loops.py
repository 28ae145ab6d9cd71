"""The loop rule: fires on every true period, on nothing that merely looks repetitive."""

from __future__ import annotations

import random
import re

import pytest

from contracts.loops import (
    LOOP_COPIES,
    LOOP_MAX_PERIOD_TOKENS,
    LOOP_MIN_TOKENS,
    LoopDetector,
    loop_period,
)


def _slow_period(ids: list[int]) -> int | None:
    """The rule as a sentence: the shortest period that the tail has kept for long enough."""
    for period in range(1, LOOP_MAX_PERIOD_TOKENS + 1):
        kept = 0
        while kept + period < len(ids) and ids[-1 - kept] == ids[-1 - kept - period]:
            kept += 1
        if kept >= max(LOOP_MIN_TOKENS, (LOOP_COPIES - 1) * period):
            return period
    return None


def _tokens(text: str) -> list[int]:
    """Words and runs of signs, the space before them included: the grain of a BPE tokenizer."""
    pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)
    number = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return [number[piece] for piece in pieces]


def test_streaming_equals_the_sentence() -> None:
    rng = random.Random(7)
    fired = 0
    for _ in range(200):
        before = [rng.randrange(4) for _ in range(rng.randrange(1500))]
        block = [rng.randrange(4) for _ in range(rng.randint(1, LOOP_MAX_PERIOD_TOKENS + 12))]
        ids = before + (block * 40)[: rng.randrange(700)]
        detector = LoopDetector()
        for token in ids:
            detector.update(token)
        assert loop_period(ids) == detector.period_tokens == _slow_period(ids)
        fired += loop_period(ids) is not None
    assert 50 < fired < 150, "both answers must occur"


@pytest.mark.parametrize(
    ("block", "copies"),
    [
        ("the ", 110),
        ("I think that the answer is 4. Wait, let me check. ", 12),
        ("So x = 2 and y = 3.\nTherefore x + y = 5.\n\n", 9),
        ("<br />\n", 50),
        ("a b a b c ", 25),
    ],
)
def test_a_block_repeated_without_end_is_a_loop(block: str, copies: int) -> None:
    assert loop_period(_tokens("Once upon a time. " + (block * copies).rstrip())) is not None


_TABLE = "| city | people |\n| --- | --- |\n" + "".join(
    f"| town {i} | {i * 137 % 1000} |\n" for i in range(60)
)
_CODE = "".join(f"    if key == {i}:\n        return values[{i * 3 % 7}]\n" for i in range(60))
_CODE_PLAIN = (
    "def main():\n    total = 0\n    for row in rows:\n        for cell in row:\n            total"
    " += cell\n    return total\n\n\ndef test():\n    assert main() == 0\n"
)
_STEPS = "".join(f"{i}. Take the next number and add one to it.\n" for i in range(1, 60))
_FIZZ = "".join(
    ("Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0) or str(i)) + "\n" for i in range(1, 101)
)
_ZEROS = "[" + "0, " * 40 + "0]"
_RULE = "| a | b |\n|" + " --- |" * 20


@pytest.mark.parametrize(
    "text",
    [_TABLE, _CODE, _CODE_PLAIN, _STEPS, _FIZZ, _ZEROS, _RULE, "=" * 80 + "\n", "ha " * 20 + "!"],
    ids="table code plain-code steps fizzbuzz zeros rule line laughter".split(),
)
def test_tables_code_and_enumerations_are_no_loops(text: str) -> None:
    """At no moment on the way, not only at the end: a run may be stopped early."""
    detector = LoopDetector()
    for token in _tokens(text):
        detector.update(token)
        assert detector.period_tokens is None


def test_leaving_a_loop_is_noticed_at_once() -> None:
    detector = LoopDetector()
    for token in [1, 2, 3] * 60:
        detector.update(token)
    assert detector.period_tokens == 3
    detector.update(9)
    assert detector.period_tokens is None


def test_what_the_rule_lets_pass() -> None:
    """Its bounds, stated: a period beyond the longest, and too few copies."""
    long_block = list(range(LOOP_MAX_PERIOD_TOKENS + 1))
    assert loop_period(long_block * 10) is None
    block = list(range(100))
    assert loop_period(block * (LOOP_COPIES - 1)) is None
    assert loop_period(block * LOOP_COPIES) == 100
