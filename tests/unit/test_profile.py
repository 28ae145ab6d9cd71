"""Step-time profiles: the sum, the file format, the bundled one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, UnknownName
from serving_sim.config import EngineConfig
from serving_sim.profile import (
    AffineProfile,
    StepProfile,
    StepWork,
    list_profiles,
    load_profile,
    save_profile,
    single_stream_s,
)

PROFILE = AffineProfile("test", 0.5, 0.25, 0.125, 2.0)
BUNDLED = "rtx4090-llama-3.1-8b"


def test_a_step_costs_the_sum_of_its_terms() -> None:
    work = StepWork(
        prefill_tokens=8, prefill_context_tokens=8, num_decodes=2, decode_context_tokens=24,
        num_requests=3,
    )  # fmt: skip
    assert PROFILE.step_s(work) == 0.5 + 0.25 * 10 + 0.125 * 32 + 2.0 * 3
    assert PROFILE.prefill_s_per_token == 0.25
    assert isinstance(PROFILE, StepProfile)


def test_alone_means_chunked_prefill_then_one_token_a_step() -> None:
    config = EngineConfig(num_blocks=2, max_num_batched_tokens=4)
    chunks = [(4, 4), (2, 6), (1, 7), (1, 8)]  # (tokens, context): prompt 6, output 3
    expected = sum(0.5 + 0.25 * tokens + 0.125 * context + 2.0 for tokens, context in chunks)
    assert single_stream_s(6, 3, config, PROFILE) == expected


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    bundled = load_profile(BUNDLED)
    for profile in (PROFILE, bundled):
        save_profile(profile, tmp_path / "p.json")
        assert load_profile(tmp_path / "p.json") == profile
        assert load_profile(str(tmp_path / "p.json")) == profile


def test_the_bundled_profile_says_where_it_comes_from() -> None:
    assert BUNDLED in list_profiles()
    profile = load_profile(BUNDLED)
    assert "MIT" in profile.licence
    assert "LLMServingSim" in profile.source
    assert profile.fit is not None
    assert profile.fit.num_held_out > 500
    assert 0.0 < profile.fit.decode_median_error < 0.10


def test_the_bundled_profile_reads_the_weights_once_a_step() -> None:
    """16.1 GB of bf16 weights at 1,008 GB/s take 15.9 ms; a token's KV is 128 KiB, 0.13 us."""
    profile = load_profile(BUNDLED)
    assert profile.fixed_s == pytest.approx(0.0159, rel=0.05)
    assert profile.per_context_token_s == pytest.approx(1.3e-7, rel=0.2)


def test_an_unknown_profile_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{BUNDLED}'"):
        load_profile("rtx4090-llama")
    with pytest.raises(InvalidInput, match="does not exist"):
        load_profile("none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed": 1.0}, "unknown profile key .* 'fixed': did you mean 'fixed_s'"),
        ({"fit": {"num_fited": 1}}, "did you mean 'num_fitted'"),
        ({"fit": {"num_fitted": 1}}, "is incomplete"),
        ({"fixed_s": -1.0}, "fixed_s is -1.0; give seconds >= 0"),
        ({"per_token_s": "fast"}, "per_token_s is 'fast'"),
        ({"fixed_s": 0.0, "per_token_s": 0.0}, "time would stand still"),
    ],
)
def test_a_bad_profile_says_what_is_wrong(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = {"name": "x", "fixed_s": 0.1, "per_token_s": 0.1, "per_context_token_s": 0.0}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(good | change), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        load_profile(path)


@pytest.mark.parametrize("text", ["", "[1]", '{"name": "x"}', "[" * 100_000])
def test_a_damaged_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"bad\.json"):
        load_profile(path)
