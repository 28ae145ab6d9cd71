"""The exported graph answers as the checkpoint does; what ONNX cannot say is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput, MissingDependency
from contracts.signals import signal_request
from predictors.age_km import AgeKmSettings
from predictors.boosting import BoostingSettings
from predictors.features import feature_matrix
from predictors.gbm_hazard import GbmHazard, GbmHazardSettings
from predictors.onnx_export import export_onnx
from preemptbench.cli_checkpoint import card, export
from tests.synthetic_runs import synthetic_runs
from training.calibrate import cross_calibrate
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=40)
_HAVE = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
needs_onnx = pytest.mark.skipif(
    not _HAVE, reason="onnx or onnxruntime is not installed: pip install 'preemptbench[onnx]'"
)


@pytest.fixture(scope="module")
def predictor() -> GbmHazard:
    return GbmHazardSettings(boosting=BoostingSettings(num_trees=60)).fit(training_set(RUNS))


@needs_onnx
def test_parity_in_onnxruntime(predictor: GbmHazard, tmp_path: Path) -> None:
    """Features in float32 on both sides (that is what the graph takes); 1e-5 is the bar, float32
    sums of 60 trees stay a decade below. Prompts and progress are absent in half the rows."""
    import onnxruntime

    settings = GbmHazardSettings(boosting=BoostingSettings(num_trees=60))
    calibrated = cross_calibrate(predictor, RUNS, settings, num_folds=2)
    path = tmp_path / "model.onnx"
    export_onnx(calibrated, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    requests = [signal_request(run) for run in RUNS for _ in range(4)]
    ages = np.tile([0, 7, 40, 150], len(RUNS))
    rows = feature_matrix(requests, ages).astype(np.float32)
    rows[::2, 2:] = np.where(np.arange(rows.shape[1] - 2) % 3 == 0, np.nan, rows[::2, 2:])
    (ours,) = session.run(None, {"features": rows})
    expected = predictor.survival_of(rows.astype(np.float64))
    assert np.abs(ours - expected).max() <= 1e-5
    meta = session.get_modelmeta().custom_metadata_map
    assert json.loads(meta["edges_tokens"]) == predictor.edges.tolist()
    assert json.loads(meta["features"])[0] == "age" and "asked" in json.loads(meta["calibration"])


def test_other_families_and_a_missing_package(
    predictor: GbmHazard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _HAVE:
        with pytest.raises(InvalidInput, match="only 'gbm-hazard' can"):
            export_onnx(AgeKmSettings().fit(training_set(RUNS)), tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependency, match=r"preemptbench\[onnx\]"):
        export_onnx(predictor, tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()


def test_the_verbs_card_and_export(predictor: GbmHazard, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    predictor.save_pretrained(folder, [{"signal": "lifo", "log_mae": None}])
    written = (folder / "README.md").read_text()
    shown = CliRunner().invoke(card, [str(folder)], catch_exceptions=False)
    assert shown.stdout == written and "## Calibration by age" in shown.stdout
    (folder / "README.md").write_text("lost")
    CliRunner().invoke(card, [str(folder), "--write"], catch_exceptions=False)
    assert (folder / "README.md").read_text() == written
    as_json = CliRunner().invoke(card, [str(folder), "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout)["family"] == "gbm-hazard"
    if _HAVE:
        out = tmp_path / "model.onnx"
        done = CliRunner().invoke(export, [str(folder), "--out", str(out)], catch_exceptions=False)
        assert out.stat().st_size > 1000 and str(out) in done.stderr
        again = CliRunner().invoke(export, [str(folder), "--out", str(out)])
        assert isinstance(again.exception, InvalidInput)
