"""score --details: known signals get known rows, intervals are ordered, mismatches are said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from eval.mismatch import matched_name
from eval.signal_report import ReportRow, report_signals
from eval.signal_report_text import report_text
from oracles.empirical import Clairvoyant
from predictors.age_km import AgeKmSettings
from predictors.registry import load_predictor
from preemptbench.cli_train import score
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs
from training.calibrate import cross_calibrate
from training.evaluate import LeaveOneOut
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=48)
TRAIN, TEST = RUNS[:72], RUNS[72:]


class _Youngest:
    """Answers so that the youngest is picked: LIFO's choice as a signal."""

    name, source_run_ids, clairvoyant = "youngest", frozenset[str](), False

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        return np.maximum(1.0, 1000.0 - ages)


@pytest.fixture(scope="module")
def rows() -> dict[str, ReportRow]:
    settings = AgeKmSettings()
    floor = cross_calibrate(settings.fit(training_set(TRAIN)), TRAIN, settings, num_folds=2)
    signals = (
        ("floor", floor), ("signal", _Youngest()), ("ceiling", LeaveOneOut(TEST)),
        ("ceiling", Clairvoyant(TEST)),
    )  # fmt: skip
    return {row.signal: row for row in report_signals(TEST, signals, num_bootstraps=40)}


def test_the_truth_is_perfect_and_lifos_choice_is_lifo(rows: dict[str, ReportRow]) -> None:
    truth = rows["clairvoyant"].metrics
    for name, best in (("regret_length", 0.0), ("log_mae", 0.0), ("concordance", 1.0),
                       ("ndcg", 1.0), ("top1", 1.0), ("tau_b", 1.0)):  # fmt: skip
        assert truth[name].value == pytest.approx(best), name
    # served length cannot tell a run that ended at the cap from one that was cut there
    assert truth["harrell_c"].value > 0.999 and truth["uno_c"].value > 0.999
    assert rows["clairvoyant"].coverage == () and "crps" not in truth
    same = rows["youngest"].metrics["regret_length_minus_lifo"]
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    assert truth["regret_length_minus_lifo"].high < 0.0
    assert rows["lifo"].metrics["regret_recompute"].value < 0.1  # the youngest has the least KV
    assert rows["lifo"].metrics["concordance"].value + rows["fifo"].metrics[
        "concordance"
    ].value == pytest.approx(1.0)


def test_intervals_and_skill(rows: dict[str, ReportRow]) -> None:
    for row in rows.values():
        for name, estimate in row.metrics.items():
            if not np.isnan(estimate.low):
                assert estimate.low <= estimate.high, name
    oracle = next(row for name, row in rows.items() if name.startswith("oracle"))
    inside = oracle.metrics["log_mae"]
    assert inside.low < inside.value < inside.high
    assert rows["age-km"].metrics["skill"].value == 0.0 < oracle.metrics["skill"].value
    assert oracle.metrics["crps"].value < rows["age-km"].metrics["crps"].value
    # rows beyond every other run of the prompt exist, and are harder for the oracle than others
    assert oracle.metrics["log_mae_exhausted"].value > oracle.metrics["log_mae"].value


def test_two_signals_of_one_name_keep_their_own_rows() -> None:
    settings = AgeKmSettings()
    few, many = (settings.fit(training_set(part)) for part in (TRAIN[:3], TRAIN))
    both = report_signals(TEST, [("floor", few), ("signal", many)], num_bootstraps=2)[3:]
    alone = report_signals(TEST, [("signal", many)], num_bootstraps=2)[3]
    assert both[0].metrics["log_mae"] != both[1].metrics["log_mae"] == alone.metrics["log_mae"]
    assert both[1].by_age == alone.by_age
    assert both[0].metrics["skill"].value == 0.0 != both[1].metrics["skill"].value


def test_log_mae_equals_scikit_learn(rows: dict[str, ReportRow]) -> None:
    from sklearn.metrics import mean_absolute_error

    each = []
    for run in TEST:
        ages = np.arange(0, run.output_tokens, 8)
        truth = np.log1p(run.output_tokens - ages)
        each.append(mean_absolute_error(truth, np.log1p(np.maximum(1.0, 1000.0 - ages))))
    assert rows["youngest"].metrics["log_mae"].value == pytest.approx(np.mean(each))


def test_the_text_has_every_table(rows: dict[str, ReportRow]) -> None:
    text = report_text(list(rows.values()))
    for part in ("regret minus LIFO", "Coverage of rows", "by age", "by family", "central 90 %"):
        assert part in text
    assert text.count("youngest") == 5  # no distribution, no coverage
    with pytest.raises(InvalidInput, match="need as many"):
        report_signals(TEST[:3], ())


def test_the_verb_prints_details_and_refuses_another_model(tmp_path: Path) -> None:
    log, other = tmp_path / "runs.parquet", tmp_path / "other.parquet"
    write_runs(RUNS, log)
    write_runs([replace(run, model="else/model") for run in RUNS], other)
    settings = AgeKmSettings()
    predictor = settings.fit(training_set(TRAIN))
    predictor.save_pretrained(tmp_path / "ck")
    args = ["--checkpoint", str(tmp_path / "ck"), "--runs", str(log), "--details", "--json",
            "--figures", str(tmp_path / "figures")]  # fmt: skip
    result = CliRunner().invoke(score, args, catch_exceptions=False)
    rows = json.loads(result.stdout)["rows"]
    assert [row["role"] for row in rows] == ["floor"] * 4 + ["signal", "ceiling"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "error-by-age.png", "reliability.png",
    }  # fmt: skip
    args = ["--checkpoint", str(tmp_path / "ck"), "--runs", str(other)]
    with pytest.raises(InvalidInput, match="trained on synthetic/model, these runs are of mod"):
        CliRunner().invoke(score, args, catch_exceptions=False)
    allowed = CliRunner().invoke(score, [*args, "--allow-mismatch"], catch_exceptions=False)
    assert "age-km (trained on synthetic/model)" in allowed.stdout
    loaded = load_predictor(tmp_path / "ck")
    strange = [replace(RUNS[0], tokenizer_sha256="f" * 64)]
    with pytest.raises(InvalidInput, match="tokenizer ffffffffffff"):
        matched_name([loaded], strange, allow_mismatch=False)
