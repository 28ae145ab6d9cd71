"""The bundled run log is what its data card says it is, and keeps the rules of any run log."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from contracts.loops import LOOP_COPIES
from oracles.prompts import read_prompts
from traces.bundled import bundled_prompts, bundled_runs, bundled_runs_512
from traces.describe import describe_runs
from traces.runlog import read_runs
from traces.tables import read_manifest
from traces.validate import validate_runs

_CARDS = (Path(__file__).parents[2] / "traces" / "data" / "README.md").read_text(encoding="utf-8")
CARD, _, CARD_512 = _CARDS.partition("# smollm2-everyday-512")


def test_card_and_log_agree() -> None:
    log = read_runs(bundled_runs())
    (summary,) = describe_runs(log)
    assert summary.identical_share is not None
    assert summary.identical_ended_share is not None
    assert f"{summary.num_runs:,} temperature-zero runs" in CARD
    assert f"**{summary.capped_share:.1%}".replace("%", " %") in CARD
    assert f"{summary.identical_share:.1%}".replace("%", " %") in CARD
    assert f"{summary.identical_ended_share:.1%}".replace("%", " %") in CARD
    assert f"{int(log.output_tokens.sum()):,} output tokens" in CARD
    quantiles = f"{summary.length_p10:.0f}, {summary.length_p50:.0f}, {summary.length_p90:.0f}"
    assert f"percentile: {quantiles}; mean {summary.length_mean:.1f}" in CARD


def test_log_is_valid_complete_and_small() -> None:
    """The law beside the golden: every prompt of the set, K runs of each, all rules kept."""
    validate_runs(bundled_runs())
    log = read_runs(bundled_runs())
    prompts = read_prompts(bundled_prompts())
    pairs = {(run.prompt_id, run.repeat) for run in log}
    assert pairs == {(prompt.prompt_id, repeat) for prompt in prompts for repeat in range(5)}
    assert {run.prompt for run in log} == {prompt.prompt for prompt in prompts}
    assert len({run.batch_size for run in log}) == 5
    assert bundled_runs().stat().st_size <= 3_000_000


def test_card_and_long_log_agree() -> None:
    short = {(run.prompt_id, run.repeat): run for run in read_runs(bundled_runs())}
    log = read_runs(bundled_runs_512())
    (summary,) = describe_runs(log)
    assert summary.identical_share is not None
    assert summary.identical_ended_share is not None
    assert f"{summary.num_runs:,} runs of the same model" in CARD_512
    assert f"**{summary.capped_share:.1%}".replace("%", " %") in CARD_512
    assert f"{summary.identical_share:.1%}".replace("%", " %") in CARD_512
    assert f"{summary.identical_ended_share:.1%}".replace("%", " %") in CARD_512
    assert f"{int(log.output_tokens.sum()):,} output tokens" in CARD_512
    quantiles = f"{summary.length_p10:.0f}, {summary.length_p50:.0f}, {summary.length_p90:.0f}"
    assert f"percentile: {quantiles}; mean {summary.length_mean:.1f}" in CARD_512
    reasons = Counter(run.finish_reason for run in log)
    cut = reasons["loop"] + reasons["length"]
    assert f"**{reasons['loop']} of the {cut} cut runs repeat themselves" in CARD_512
    cut_before = [run for run in log if short[run.prompt_id, run.repeat].event_observed is False]
    became = Counter(run.finish_reason for run in cut_before)
    told = " ".join(CARD_512.split())
    assert f"Of the {len(cut_before)} runs" in told
    assert (
        f"{became['stop']} ended before 512, {became['loop']} loop, {became['length']} were cut"
    ) in told


def test_long_log_is_valid_complete_and_small() -> None:
    """The laws: every prompt twice, each reason as its rule says, and loops visible in the text."""
    validate_runs(bundled_runs_512())
    log = list(read_runs(bundled_runs_512()))
    prompts = read_prompts(bundled_prompts())
    pairs = [(run.prompt_id, run.repeat) for run in log]
    assert sorted(pairs) == sorted((p.prompt_id, repeat) for p in prompts for repeat in range(2))
    assert {run.max_new_tokens for run in log} == {512}
    for run in log:
        if run.finish_reason == "loop":
            assert run.output_tokens == 512
            assert run.text is not None
            assert run.text.count(run.text[-24:]) >= LOOP_COPIES - 1
    assert bundled_runs_512().stat().st_size <= 300_000
    manifest = read_manifest(bundled_runs_512())
    assert manifest is not None
    assert manifest["collection"]["repeats"] == 2


def test_manifest_names_versions_and_matches_the_file() -> None:
    manifest = read_manifest(bundled_runs())  # compares the sha256 of the file
    assert manifest is not None
    assert re.match(r"\d+\.\d+", manifest["collection"]["engine_version"])
    assert manifest["collection"]["model"].endswith("SmolLM2-135M-Instruct")


def test_datasets_loads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(bundled_runs()), split="train", cache_dir=str(tmp_path)
    )
    assert loaded.num_rows == 1080
    assert loaded[0]["finish_reason"] in ("stop", "length")
