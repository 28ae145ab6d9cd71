"""Agreement of repeats, the ceiling it sets, and the learning curve in K."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun, make_request_key, sha256_text
from eval.agreement import ceiling, measure_agreement, write_agreement_figure
from eval.oracle_curve import curve_table, learning_curve, write_curve_figure
from eval.signal_quality import held_out, score_signal
from oracles.empirical import EmpiricalOracle
from oracles.run_table import run_table
from preemptbench.cli import cli
from tests.synthetic_runs import make_run, synthetic_runs
from traces.runlog import write_runs

RUNS = synthetic_runs(num_prompts=60, repeats=9, seed=6, cap_tokens=3000)


def _repeats(prompt: str, lengths: list[int], texts: list[str] | None = None) -> list[DecodeRun]:
    runs = [
        make_run(prompt=prompt, prompt_id=prompt, natural_tokens=tokens, repeat=i, cap_tokens=100)
        for i, tokens in enumerate(lengths)
    ]
    if texts is None:
        return runs
    told = zip(runs, texts, strict=True)
    return [replace(run, text=text, text_sha256=sha256_text(text)) for run, text in told]


def test_agreement_counts_what_it_says() -> None:
    runs = [
        *_repeats("same", [10, 10, 10], ["abc", "abc", "abc"]),
        *_repeats("one length, two texts", [10, 10], ["abcd", "abXd"]),
        *_repeats("two lengths", [10, 20, 30], ["xyz", "xyzxyz", "xyQ"]),
        *_repeats("cut", [50, 200]),
        *_repeats("alone", [7]),
    ]
    found, spread = measure_agreement(runs)
    assert (found.num_runs, found.num_requests) == (10, 4)
    assert found.runs_per_request == (2, 2.5, 3)
    assert found.identical_share == 0.25
    assert found.one_length_share == 0.5
    assert found.num_divergences == 2
    assert found.divergence_chars_p50 == 2.0
    assert found.divergence_share_p50 == pytest.approx((2 / 4 + 2 / 3) / 2)
    assert found.cut_share == pytest.approx(0.1)
    assert sorted((spread.longest / spread.shortest).tolist()) == [1.0, 1.0, 2.0, 3.0]
    assert found.cv_p50 == pytest.approx((0.0 + np.std([50, 100], ddof=1) / 75) / 2)
    with pytest.raises(InvalidInput, match="ran once"):
        measure_agreement(runs[-1:])
    with pytest.raises(InvalidInput, match="ran once"):
        ceiling(runs[-1:])


def test_the_ceiling_is_the_mean_score_of_the_runs_left_out() -> None:
    runs = synthetic_runs(num_prompts=30, repeats=3)
    scores = []
    for repeat in range(3):
        truth = [run for run in runs if run.repeat == repeat]
        others = [run for run in runs if run.repeat != repeat]
        # split_truth puts each truth where its request first stands: by prompt, as here
        scores.append(score_signal(EmpiricalOracle(others), held_out(truth, seed=repeat)))
    found = ceiling(runs, num_draws=9)
    assert found.signal == "oracle-2 (ceiling)"
    assert found.log_mae == pytest.approx(np.mean([score.log_mae for score in scores]))
    assert found.victim_regret == pytest.approx(np.mean([s.victim_regret for s in scores]))


def test_more_runs_never_hurt_much_and_endless_does() -> None:
    points = learning_curve(RUNS, (1, 2, 8), num_draws=4)
    assert [p.k for p in points] == [1, 2, 8]
    error = [p.quality.log_mae for p in points]
    assert error[0] > error[1] > error[2]
    for point in points:
        assert point.endless.victim_regret > point.quality.victim_regret
        assert point.outlived_strictly <= point.outlived_by_chance
        # 240 draws of probability 1/(K+1): four standard errors are below 0.13
        assert point.outlived_by_chance == pytest.approx(1 / (point.k + 1), abs=0.13)
    assert curve_table(points).count("\n") == 3
    for ks, said in (((0, 1), "K is 0"), ((), "K is 0"), ((9,), "at most 9")):
        with pytest.raises(InvalidInput, match=said):
            learning_curve(RUNS, ks)


def test_pictures_are_written(tmp_path: Path) -> None:
    _, spread = measure_agreement(RUNS)
    points = learning_curve(RUNS, (1, 2), num_draws=1)
    for path in (
        write_agreement_figure(spread, "synthetic", tmp_path / "a" / "agreement.png"),
        write_curve_figure(points, "synthetic", tmp_path / "curve.svg"),
    ):
        assert path.stat().st_size > 5000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    write_runs(synthetic_runs(num_prompts=30, repeats=3), tmp_path / "runs.parquet")
    return tmp_path / "runs.parquet"


def _json(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_verbs_of_the_oracle(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "oracle"
    built = _json("oracle", "build", str(log), "--out", str(out))
    assert (built["name"], built["mode"], built["runs"]) == ("oracle-3", "deployment", 90)
    again = CliRunner().invoke(cli, ["oracle", "build", str(log), "--out", str(out)])
    assert "is not empty" in str(again.exception)
    exact = ["oracle", "build", str(log), "--out", str(tmp_path / "exact"), "--mode", "exact"]
    assert "differ in length or text" in str(CliRunner().invoke(cli, exact).exception)
    figure = tmp_path / "agreement.svg"
    told = _json("oracle", "agreement", str(log), "--figure", str(figure))
    assert figure.is_file() and told["num_requests"] == 30
    assert told["divergence_chars_p50"] is None
    rows = _json("oracle", "ladder", str(log), "--base", "oracle-2", "--rung", "noise(1)")["rows"]
    assert isinstance(rows, list)
    assert [row["signal"] for row in rows] == ["oracle-2", "oracle-2 | noise(1)"]
    for words in (["agreement"], ["ladder", "--rung", "anti"]):
        text = CliRunner().invoke(cli, ["oracle", words[0], str(log), *words[1:]])
        assert text.exit_code == 0 and "log_mae" in text.stdout


def test_a_saved_oracle_and_a_degraded_one_run_in_the_matrix(log: Path, tmp_path: Path) -> None:
    rest = tmp_path / "rest.parquet"
    hot = [replace(run, temperature=0.5) for run in synthetic_runs(num_prompts=30, repeats=3)]
    write_runs([replace(run, run_id=f"other {run.run_id}") for run in hot], rest)
    _json("oracle", "build", str(rest), "--out", str(tmp_path / "built"))
    told = _json(
        "simulate", "--runs", str(log), "--policy", "longest-remaining", "--seeds", "2",
        "--tagged", "10", "--blocks", "60", "--jobs", "1", "--out", str(tmp_path / "out"),
        "--signal", f"built={tmp_path / 'built'}", "--signal", "clairvoyant|noise(0.5)",
    )  # fmt: skip
    assert isinstance(told["rows"], list)
    names = [row["signal"] for row in told["rows"]]
    # the log behind it was sampled, and every result says so
    assert names == ["none", "built (sampled)", "clairvoyant | noise(0.5)"]


def _temp0(folder: Path) -> Iterator[DecodeRun]:
    """The temperature-zero runs of vllm-ltr-optimization, straight from the public table."""
    import pyarrow.parquet as pq

    table = pq.read_table(
        folder / "reasoning_lengths" / "lengths.parquet",
        columns=["model", "benchmark", "prompt_id", "sample_idx", "output_tokens", "max_tokens"],
        filters=[("source", "=", "vllm-ltr-temp0")],
    ).to_pydict()
    sample = make_run(prompt="p", prompt_id="p", natural_tokens=1)
    for model, benchmark, prompt_id, index, tokens, cap in zip(*table.values(), strict=True):
        sha = sha256_text(f"{benchmark}\x1f{prompt_id}")
        key = make_request_key(
            model=model, prompt_sha256=sha, chat_template_sha256="unknown", temperature=0.0,
            max_new_tokens=cap, dtype="unknown",
        )  # fmt: skip
        yield replace(
            sample, run_id=f"{key}-{index}", request_key=key, repeat=index, prompt_id=prompt_id,
            prompt_sha256=sha, prompt=None, benchmark=benchmark, family=benchmark, model=model,
            max_new_tokens=cap, output_tokens=tokens, batch_invariant=False,
            finish_reason="stop", event_observed=True, progress=None, progress_stride=None,
        )  # fmt: skip


@pytest.mark.data
def test_208_thousand_temperature_zero_runs(public_data: Path) -> None:
    runs = list(_temp0(public_data))
    found, _ = measure_agreement(runs)
    assert (found.num_runs, found.num_requests) == (208_408, 2075)
    assert found.runs_per_request == (83, 99.0, 132)
    # as ../shared/data/README.md states them
    assert found.identical_share == pytest.approx(0.44, abs=0.005)
    assert found.ratio_p50 == pytest.approx(1.02, abs=0.005)
    assert found.ratio_p90 == pytest.approx(1.86, abs=0.005)
    assert found.ratio_p99 == pytest.approx(3.87, abs=0.005)
    points = learning_curve(runs, (1, 4, 16), num_draws=1)
    # the shares the issue states; 2,075 draws leave a standard error below 0.008
    for point, strict in zip(points, (0.13, 0.05, 0.01), strict=True):
        assert point.outlived_strictly == pytest.approx(strict, abs=0.02)
        assert point.outlived_by_chance == pytest.approx(1 / (point.k + 1), abs=0.03)
        assert point.endless.victim_regret > point.quality.victim_regret
    assert points[0].quality.log_mae > points[1].quality.log_mae > points[2].quality.log_mae
    assert EmpiricalOracle(run_table(runs)).name == "oracle-132"
