"""Deadline classes: who is due when, scored at their own deadlines; what wrong input is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from eval.cells import read_cells
from eval.matrix import prepare_seed, run_cell, source_runs
from eval.matrix_config import MatrixConfig, Pressure
from eval.outcomes import score_breach
from eval.signal_sources import SignalSource
from preemptbench.cli import cli
from serving_sim.config import EngineConfig
from tests.synthetic_runs import synthetic_runs
from traces.arrivals import build_workload
from traces.deadlines import DeadlineClass, parse_deadline_class, with_deadline_classes
from traces.runlog import write_runs

CLASSES = (DeadlineClass("chat", 0.3, 1.0), DeadlineClass("batch", 0.7, 20.0))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MatrixConfig:
    path = tmp_path_factory.mktemp("classes") / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=20, repeats=2, seed=3, cap_tokens=200), path, {})
    return MatrixConfig(
        runs=path,
        policies=("lifo",),
        signals=(SignalSource("none"),),
        pressures=(Pressure("tight", 60),),
        engine=EngineConfig(num_blocks=60),
        profile="rtx4090-llama-3.1-8b",
        rate_per_s=20.0,
        num_warmup=10,
        num_tagged=80,
        deadline_classes=CLASSES,
    )


def test_everybody_is_scored_at_the_deadline_of_its_class(config: MatrixConfig) -> None:
    assert config.watched_s == 20.0
    inputs = prepare_seed(config, source_runs(config), 0)
    cell, result = run_cell(config, inputs, config.pressures[0], "lifo", "none", 0)
    tagged = [r for r in result.records if r.cohort == "tagged"]
    assert {r.deadline_s for r in tagged} == {1.0, 20.0}
    assert all(r.deadline_seen is None for r in tagged)
    late = {1.0: 0, 20.0: 0}
    counts = {1.0: 0, 20.0: 0}
    for one in tagged:
        assert one.deadline_s is not None and one.end_s is not None
        counts[one.deadline_s] += 1
        late[one.deadline_s] += one.end_s - one.arrival_s > one.deadline_s
    assert cell.score.breach == pytest.approx(sum(late.values()) / len(tagged))
    assert cell.breach_by_class == pytest.approx(tuple(late[d] / counts[d] for d in (1.0, 20.0)))
    assert 0 < cell.breach_by_class[0] > cell.breach_by_class[1]
    assert cell.service.goodput_per_s == pytest.approx(
        cell.service.offered_per_s * (1 - cell.score.breach)
    )


def test_classes_change_scores_and_nothing_else(config: MatrixConfig) -> None:
    plain = replace(config, deadline_classes=(), deadline_s=20.0)
    results = []
    for one in (config, plain):
        inputs = prepare_seed(one, source_runs(one), 1)
        results.append(run_cell(one, inputs, one.pressures[0], "lifo", "none", 1)[1])
    assert [replace(r, deadline_s=None) for r in results[0].records] == [
        replace(r, deadline_s=None) for r in results[1].records
    ]
    assert score_breach(results[0].records, 20.0) == score_breach(results[1].records, 20.0)


def test_shares_are_met_and_a_class_is_drawn_by_request(config: MatrixConfig) -> None:
    runs = source_runs(config)
    made = build_workload(
        runs,
        rate_per_s=5.0,
        num_warmup=0,
        num_tagged=4000,
        num_filler=0,
        seed=1,
        deadline_s=None,
        name="made",
    )
    first = with_deadline_classes(made, CLASSES, 7)
    # 4,000 draws: 4 standard errors are 3 points
    assert np.mean(first.deadline_s == 1.0) == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(first.deadline_s, with_deadline_classes(made, CLASSES, 7).deadline_s)
    assert not np.array_equal(first.deadline_s, with_deadline_classes(made, CLASSES, 8).deadline_s)
    assert with_deadline_classes(made, (), 7) is made


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ((DeadlineClass("a", 0.5, 1.0),), "add up to 0.5"),
        ((DeadlineClass("a", 0.5, 1.0), DeadlineClass("a", 0.5, 2.0)), "share a name"),
        ((DeadlineClass("a", 0.5, 1.0), DeadlineClass("b", 0.5, 1.0)), "share a deadline"),
    ],
)
def test_classes_that_do_not_go_together(
    config: MatrixConfig, classes: tuple[DeadlineClass, ...], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        replace(config, deadline_classes=classes)


def test_classes_are_read_from_text() -> None:
    assert parse_deadline_class("chat=0.3:60") == DeadlineClass("chat", 0.3, 60.0)
    for bad in ("chat", "chat=0.3", "=0.3:60", "chat=x:60"):
        with pytest.raises(InvalidInput, match="NAME=SHARE:SECONDS"):
            parse_deadline_class(bad)
    with pytest.raises(InvalidInput, match="share of 2"):
        parse_deadline_class("chat=2:60")
    with pytest.raises(InvalidInput, match="finite seconds"):
        parse_deadline_class("chat=0.3:inf")


def test_a_request_must_be_watched_as_long_as_the_longest_class(config: MatrixConfig) -> None:
    with pytest.raises(InvalidInput, match=r"observe_s is 5.0 s, below the deadline of 20.0"):
        replace(config, observe_s=5.0)


def test_the_command_line_takes_classes(tmp_path: Path) -> None:
    args = ["simulate", "--policy", "fifo", "--seeds", "2", "--tagged", "30", "--blocks", "150"]
    args += ["--jobs", "1", "--out", str(tmp_path), "--json"]
    classes = ["--deadline-class", "chat=0.5:2", "--deadline-class", "batch=0.5:8"]
    said = CliRunner().invoke(cli, [*args, *classes])
    assert said.exit_code == 0, said.output
    cells = [c for path in sorted(tmp_path.glob("cells/*.parquet")) for c in read_cells(path)]
    assert len(cells) == 2 * 2
    for cell in cells:
        chat, batch = cell.breach_by_class
        assert min(chat, batch) <= cell.score.breach <= max(chat, batch)
    wrong = CliRunner().invoke(cli, [*args, *classes[:2]])
    assert "add up to 0.5: make it 1" in str(wrong.exception)
