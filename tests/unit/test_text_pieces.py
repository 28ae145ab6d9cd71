"""Progress read from a stored text: as many records as tokens allow, each about its own stretch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from tests.synthetic_runs import make_run
from traces.text_pieces import with_text_progress


def _run(text: str, output_tokens: int) -> DecodeRun:
    run = make_run(prompt="q", prompt_id="q", natural_tokens=output_tokens)
    return replace(run, text=text, progress=None, progress_stride=None)


def test_a_token_for_every_word() -> None:
    text = " ".join(["one"] * 8 + ["wait"] * 8) + "\n" * 3 + "so " * 7
    run = with_text_progress(_run(text, 24), 8)
    assert run.progress_stride == 8 and run.progress is not None and len(run.progress) == 3
    calm, doubt, rest = run.progress
    assert np.isnan(calm.mean_entropy) and np.isnan(calm.mean_logprob)
    assert (calm.hesitation_rate, doubt.hesitation_rate) == (0.0, 1.0)
    assert (calm.newline_rate, doubt.newline_rate, rest.newline_rate) == (0.0, 0.0, 0.125)
    assert calm.repetition > 0.5 and calm.in_thinking == 0.0


@pytest.mark.parametrize("output_tokens", [5, 16, 100, 199])
def test_records_follow_the_token_count_whatever_the_words(output_tokens: int) -> None:
    """Fewer words than tokens, or more: the stretches are spread evenly, none is past the end."""
    text = "wait " * 20 + "fine " * 20
    run = with_text_progress(_run(text, output_tokens), 4)
    assert run.progress is not None and len(run.progress) == output_tokens // 4
    rates = [record.hesitation_rate for record in run.progress]
    if output_tokens >= 40:  # every word has a token of its own: none is lost, none counted twice
        assert 4 * sum(rates) == 20.0
    half = len(rates) // 2
    assert max(rates[: half + 1]) > 0.0 and max(rates[half + 1 :], default=0.0) == 0.0


def test_thinking_ends_where_its_text_ends() -> None:
    thinking, answer = "a b c d e f g h ", "i j k l m n o p"
    run = with_text_progress(_run(thinking + answer, 16), 2, len(thinking))
    assert run.progress is not None
    assert [record.in_thinking for record in run.progress] == [1.0] * 4 + [0.0] * 4


def test_no_text_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="has no text"):
        with_text_progress(_run("", 8), 4)
