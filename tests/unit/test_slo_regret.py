"""SLO regret: one decision is changed, LIFO decides before and after, and breaches are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from eval.matrix import prepare_seed
from eval.matrix_config import MatrixConfig
from eval.outcomes import score_breach
from eval.replay import Script, replay
from eval.slo_regret import (
    MAX_CANDIDATES,
    SloReport,
    _case,
    _choices,
    _moments,
    slo_cell,
    slo_regret,
    slo_text,
)
from oracles.empirical import Clairvoyant
from predictors.age_km import AgeKmSettings
from preemptbench.cli_train import score
from preemptbench.demo import demo_matrix
from serving_sim.engine import simulate
from serving_sim.policies import get_policy
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=20, repeats=3, seed=2, cap_tokens=120)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> MatrixConfig:
    path = tmp_path_factory.mktemp("runs") / "runs.parquet"
    write_runs(RUNS, path, {})
    config = replace(demo_matrix(path, {}, num_seeds=2), num_warmup=20, num_tagged=40)
    return slo_cell(config, RUNS, 1.1)


@pytest.fixture(scope="module")
def report(cell: MatrixConfig) -> SloReport:
    return slo_regret(cell, RUNS, [Clairvoyant(RUNS)], num_moments=5)


def test_a_replay_that_keeps_lifos_victim_is_the_lifo_run(cell: MatrixConfig) -> None:
    inputs = prepare_seed(cell, RUNS, 0)
    case = _case(cell, inputs, 0)
    moments = _moments(case)
    lifo = replay(case, Script("lifo"))
    engine = simulate(
        inputs.workload, case.config, case.profile, get_policy("lifo"), seed=0
    )  # the readable engine says the same of the whole run
    assert lifo.breach == score_breach(engine.records, cell.deadline_s).breach
    assert {m.decision: tuple(m.views.request_id.tolist()) for m in moments} == {
        at: running for at, running in enumerate(lifo.running) if len(running) > 1
    }
    for moment in moments[:: max(1, len(moments) // 5)]:
        chosen = _choices(moment, inputs.requests, [Clairvoyant(RUNS)])
        assert chosen["lifo"] == lifo.victims[moment.decision]
        kept = replay(case, Script("lifo", changes={moment.decision: chosen["lifo"]}))
        assert kept == lifo
        other = replay(case, Script("lifo", changes={moment.decision: chosen["fifo"]}))
        assert other.victims[moment.decision] == chosen["fifo"]
        assert other.victims[: moment.decision] == lifo.victims[: moment.decision]
        left = inputs.workload.output_tokens[moment.views.request_id]
        left = left - moment.views.generated_tokens
        longest = moment.views.request_id.tolist().index(chosen["clairvoyant"])
        assert left[longest] == left.max()


def test_regret_is_that_of_the_best_candidate(cell: MatrixConfig, report: SloReport) -> None:
    assert [row.signal for row in report.rows] == ["lifo", "fifo", "random", "clairvoyant"]
    assert report.num_moments == 10 and report.num_seeds == 2
    assert report.num_moments * 2 <= report.num_replays <= report.num_moments * MAX_CANDIDATES
    assert report.rows[0].minus_lifo == (0.0, 0.0, 0.0)
    for row in report.rows:
        value, low, high = row.regret
        assert 0 <= low <= value <= high
        assert value <= report.spread
        assert row.minus_lifo[0] == pytest.approx(value - report.rows[0].regret[0])
        assert (row.best == 1.0) == (value == 0.0)
    assert report.spread > 0  # there is something to choose, or the rest shows nothing
    assert slo_regret(cell, RUNS, [Clairvoyant(RUNS)], num_moments=5) == report
    assert "worst minus best" in slo_text(report)


def test_what_cannot_be_replayed_is_said(cell: MatrixConfig) -> None:
    roomy = replace(cell, pressures=(replace(cell.pressures[0], num_blocks=5000),), num_seeds=1)
    with pytest.raises(InvalidInput, match="raise the pressure"):
        slo_regret(roomy, RUNS, [])
    with pytest.raises(InvalidInput, match="stands twice"):
        slo_regret(cell, RUNS, [Clairvoyant(RUNS), Clairvoyant(RUNS)])
    with pytest.raises(InvalidInput, match="above 0"):
        slo_cell(cell, RUNS, 0.0)
    with pytest.raises(InvalidInput, match="no runs"):
        slo_cell(cell, [], 1.0)


def test_the_verb(cell: MatrixConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preemptbench.cli_details.SLO_SEEDS", 2)
    monkeypatch.setattr("preemptbench.cli_details.SLO_TAGGED", 30)
    AgeKmSettings().fit(training_set(RUNS[:30])).save_pretrained(tmp_path)
    args = ["--checkpoint", str(tmp_path), "--runs", str(cell.runs), "--slo-regret", "--json",
            "--pressure", "1.2"]  # fmt: skip
    found = json.loads(CliRunner().invoke(score, args, catch_exceptions=False).stdout)
    names = [row["signal"] for row in found["rows"]]
    assert names[:4] == ["lifo", "fifo", "random", "age-km"] and names[-1] == "clairvoyant"
    assert np.isfinite(found["rows"][3]["regret"]).all()
