"""A profile from a request log: the truth that made a log comes back; what is no log is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from contracts.randomness import keyed_generator
from contracts.records import COHORTS
from eval.log_profile import context_share_of, fit_from_log
from eval.recorded_run import read_recorded_run
from eval.validation import replay, report
from preemptbench.cli import cli
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.models import MODELS
from serving_sim.profile import AffineProfile, StepProfile, StepWork, load_profile
from tests.unit.test_validation import MODEL, RUNS
from traces.workload import Workload

TRUTH = AffineProfile("truth", 0.008, 4e-5, 3e-8)
CONFIG = EngineConfig(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=512)


def some_workload(count: int = 60) -> Workload:
    """Return requests that keep an engine busy, with a pause in the middle."""
    rng = keyed_generator(1, "log-workload")
    arrival_s = np.cumsum(rng.exponential(0.15, count))
    arrival_s[count // 2 :] += 20.0
    output = rng.integers(5, 300, count)
    return Workload(
        name="log",
        request_ids=tuple(f"r{i:03}" for i in range(count)),
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=rng.integers(10, 900, count),
        output_tokens=output,
        max_tokens=output,
        priority=np.zeros(count, dtype=np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.full(count, COHORTS.index("tagged"), dtype=np.int64),
        capped=np.zeros(count, dtype=bool),
    )


def times_of(workload: Workload, profile: StepProfile) -> tuple[np.ndarray, np.ndarray]:
    """Return (first token, end) seconds of each request on an engine with these step times."""
    records = simulate(workload, CONFIG, profile).records
    columns = [[r.first_token_s, r.end_s] for r in records]
    first_token_s, end_s = np.array(columns, dtype=np.float64).T
    return first_token_s, end_s


def steps() -> list[StepWork]:
    """Return steps like those of the log."""
    rng = keyed_generator(2, "log-steps")
    found = []
    for _ in range(200):
        decodes, chunk = int(rng.integers(1, 32)), int(rng.integers(2, 480))
        prefill = chunk if rng.random() < 0.2 else 0
        mean = int(rng.integers(50, 1000))
        found.append(StepWork(prefill, prefill, decodes, decodes * mean, decodes + (prefill > 0)))
    return found


def test_an_affine_truth_comes_back() -> None:
    workload = some_workload()
    first_token_s, end_s = times_of(workload, TRUTH)
    found = fit_from_log(workload, CONFIG, first_token_s, end_s, "est")
    errors = [abs(found.profile.step_s(w) / TRUTH.step_s(w) - 1.0) for w in steps()]
    # half-way rounds leave a factor 2^-7 of the first guess's error, which is below 100 %
    assert np.median(errors) < 0.01
    assert found.held_out_mean_error < 0.01
    assert found.num_held_out + found.num_fitted == len(workload)


def test_tables_come_back_as_far_as_three_numbers_can_say() -> None:
    """The fit is affine and the truth is not: its own misfit is 4 % at the median (see docs)."""
    truth = load_profile("rtx4090-llama-3.1-8b-tp1")
    workload = some_workload()
    first_token_s, end_s = times_of(workload, truth)
    found = fit_from_log(workload, CONFIG, first_token_s, end_s, "est")
    errors = [abs(found.profile.step_s(w) / truth.step_s(w) - 1.0) for w in steps()]
    assert np.median(errors) < 0.05
    assert found.held_out_mean_error < 0.03


def test_bytes_tie_the_cost_of_context_where_the_log_cannot_tell() -> None:
    """The truth's share is the one that is given: the ratio of the two costs is exact."""
    workload = some_workload()
    first_token_s, end_s = times_of(workload, TRUTH)
    share = TRUTH.per_context_token_s / TRUTH.fixed_s
    found = fit_from_log(workload, CONFIG, first_token_s, end_s, "est", context_share=share)
    tied = found.profile.per_context_token_s / found.profile.fixed_s
    # half-way rounds: the first guess had another ratio, of which 2^-7 may be left
    assert tied == pytest.approx(share, rel=0.02)
    assert found.held_out_mean_error < 0.01
    llama = MODELS["Llama-3.1-8B"]
    assert context_share_of(llama) == pytest.approx(131_072 / 16.06e9, rel=1e-3)


def test_what_is_no_log_is_refused() -> None:
    workload = some_workload()
    first_token_s, end_s = times_of(workload, TRUTH)
    with pytest.raises(InvalidInput, match="holds 10 requests; at least 20"):
        fit_from_log(some_workload(10), CONFIG, first_token_s[:10], end_s[:10], "est")
    with pytest.raises(InvalidInput, match=r"request 'r000'.*times must be in that order"):
        fit_from_log(workload, CONFIG, end_s, first_token_s, "est")
    with pytest.raises(InvalidInput, match="two tokens at different times"):
        fit_from_log(workload, CONFIG, first_token_s, first_token_s, "est")


def write_log(path: Path) -> Path:
    """Write the log of an engine that is as fast as TRUTH."""
    workload = some_workload()
    first_token_s, end_s = times_of(workload, TRUTH)
    rows = [
        {
            "request_id": name, "input_toks": int(prompt), "output_toks": int(output),
            "queued_ts": float(queued), "first_token_ts": float(first), "last_token_ts": float(end),
        }
        for name, prompt, output, queued, first, end in zip(
            workload.request_ids, workload.prompt_tokens, workload.output_tokens,
            workload.arrival_s + 100.0, first_token_s + 100.0, end_s + 100.0, strict=True,
        )
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_command_writes_a_profile_that_loads(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "requests.jsonl"), tmp_path / "mine.json"
    arguments = [
        "profiles", "fit", "--from", str(log), "--seqs", "32", "--batched-tokens", "512",
        "--out", str(out), "--model", "owner/M", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(cli, [*arguments, "--blocks", "600"])
    assert done.exit_code == 0, done.output
    profile = load_profile(out)
    assert isinstance(profile, AffineProfile)
    assert profile.name == "mine"
    assert profile.model == "owner/M"
    assert "off at the median" in profile.source
    assert profile.fixed_s == pytest.approx(TRUTH.fixed_s, rel=0.03)
    refused = CliRunner().invoke(cli, arguments)
    assert "give --blocks" in str(refused.exception)


def test_profiles_are_listed_and_shown_and_blocks_are_counted(tmp_path: Path) -> None:
    def ask(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["profiles", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    listed = json.loads(ask("--json"))["profiles"]
    by_name = {fact["name"]: fact for fact in listed}
    surface = by_name["h200-qwen3-32b-tp2"]
    assert surface["errors"]["decode"]["p99"] <= 0.1
    assert surface["range"]["decodes"] == 512
    assert by_name["rtx4090-llama-3.1-8b"]["form"] == "affine"
    assert all(fact["source"] and fact["licence"] for fact in listed)
    assert all(name in ask() for name in by_name)
    assert json.loads(ask("show", "h200-qwen3-32b-tp2", "--json")) == surface
    assert "kv bytes per token" in ask("show", "h200-qwen3-32b-tp2")
    assert "fixed" not in ask("show", "rtx4090-llama-3.1-8b")
    card = ("--memory-gib", "23.516", "--batched-tokens", "2048")
    assert json.loads(ask("blocks", "Llama-3.1-8B", *card, "--json"))["blocks"] == 2588
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert "blocks               2588" in ask("blocks", str(path), *card)
    refused = CliRunner().invoke(cli, ["profiles", "blocks", "Qwen3-32B", "--memory-gib", "24"])
    assert "the model does not fit" in str(refused.exception)


@pytest.mark.data
def test_the_log_of_a_real_engine_gives_its_times_back(public_data: Path) -> None:
    """300 requests of a real vLLM: the estimate replays them as well as measured tables do."""
    run = read_recorded_run(public_data / RUNS / "RTX4090" / MODEL)
    found = fit_from_log(run.workload, run.config, run.first_token_s, run.end_s, "est")
    outcome = report(run, found.profile, replay(run, found.profile))
    assert abs(outcome.makespan_error) < 0.01
    assert found.held_out_mean_error < 0.02
