"""Checkpoint folders: equal to the bit after a round trip, refused when anything is off."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from contracts.errors import CheckpointError, InvalidInput, MissingDependency, UnknownName
from contracts.signals import signal_request
from predictors.age_km import AgeKm
from predictors.base import Predictor
from predictors.checkpoint import CONFIG_FILE, TENSOR_FILE, push_to_hub
from predictors.features import FEATURE_NAMES
from predictors.gbm_hazard import GbmHazard
from predictors.log_t import LogTSettings
from predictors.registry import FAMILIES, load_predictor
from predictors.torch_loop import LoopSettings
from tests.hidden_runs import with_hidden
from tests.quick_families import QUICK
from tests.synthetic_runs import synthetic_runs
from training.recipe import fit_noted, recipe_of
from training.rows import training_set

RUNS = with_hidden(synthetic_runs(num_prompts=30))


def _fit(family: str) -> Predictor:
    return fit_noted(QUICK[family], training_set(RUNS))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp(request.param)
    predictor = _fit(request.param)
    predictor.save_pretrained(folder, [{"signal": "x", "log_mae": 0.5, "mae": float("nan")}])
    return predictor, folder


def test_a_round_trip_is_equal_to_the_bit(saved) -> None:  # type: ignore[no-untyped-def]
    predictor, folder = saved
    again = load_predictor(folder)
    assert type(again) is type(predictor)
    assert again.source_run_ids == {run.run_id for run in RUNS}
    assert again.excluded_prompts == {run.prompt_sha256 for run in RUNS}
    requests = [signal_request(run) for run in RUNS]
    ages = np.arange(len(RUNS), dtype=np.int64) * 2
    for answer in (
        lambda signal: signal.remaining(requests, ages),
        lambda signal: signal.quantile(requests, ages, 0.9),
        lambda signal: signal.survival(requests, ages, np.full(len(RUNS), 12.0)),
    ):
        assert answer(again).tobytes() == answer(predictor).tobytes()


def test_saving_again_writes_the_same_bytes(saved, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    predictor, folder = saved
    type(predictor).from_pretrained(folder).save_pretrained(
        tmp_path, json.loads((folder / CONFIG_FILE).read_text())["metrics"]
    )
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_it_says_what_it_was_fitted_with(saved) -> None:  # type: ignore[no-untyped-def]
    predictor, folder = saved
    recipe = recipe_of(load_predictor(folder))
    assert (recipe.family, recipe.settings) == (predictor.family, QUICK[predictor.family])
    predictor = QUICK["age-km"].fit(training_set(RUNS[:6]))
    with pytest.raises(InvalidInput, match="does not say which settings"):
        recipe_of(predictor)


def test_neither_paths_nor_trackers_travel(tmp_path: Path) -> None:
    """A checkpoint names no folder of the machine it was made on, and a stranger's none of ours."""
    loop = LoopSettings(num_epochs=2, state_dir=str(tmp_path / "state"))
    fit_noted(LogTSettings(num_landmarks=2, loop=loop), training_set(RUNS)).save_pretrained(
        tmp_path / "ck"
    )
    config = json.loads((tmp_path / "ck" / CONFIG_FILE).read_text())
    noted = config["fitted_with"]
    assert noted["settings"]["loop"]["num_epochs"] == 2 and "state" not in str(noted)
    noted["settings"]["loop"] |= {"state_dir": "/elsewhere", "tracker": "wandb"}
    _resign(tmp_path / "ck", fitted_with=noted)
    settings = recipe_of(load_predictor(tmp_path / "ck")).settings
    assert settings == LogTSettings(num_landmarks=2, loop=LoopSettings(num_epochs=2))
    noted["settings"]["hiden"] = [3]
    _resign(tmp_path / "ck", fitted_with=noted)
    with pytest.raises(UnknownName, match="did you mean 'hidden'"):
        recipe_of(load_predictor(tmp_path / "ck"))


def test_the_config_says_what_it_must(saved) -> None:  # type: ignore[no-untyped-def]
    _, folder = saved
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["target"].startswith("served remaining")
    assert config["training"]["cap_tokens"] == 200
    assert config["training"]["num_capped"] == sum(not run.event_observed for run in RUNS)
    assert config["training"]["licences"] == ["Apache-2.0"]
    assert "cut" in config["settings"]["censoring_rule"]
    assert config["metrics"] == [{"signal": "x", "log_mae": 0.5, "mae": None}]
    card = (folder / "README.md").read_text()
    assert "| x | 0.5 | – |" in card and "synthetic/model" in card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _fit("gbm-hazard").save_pretrained(tmp_path)
    return tmp_path


def _resign(folder: Path, **changes: object) -> None:
    """Write a config with ``changes`` whose own hash fits: what a stranger could have made."""
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    config.pop("config_sha256")

    def render(value: object) -> bytes:
        return (json.dumps(value, indent=1) + "\n").encode()

    config["config_sha256"] = hashlib.sha256(render(config)).hexdigest()
    (folder / CONFIG_FILE).write_bytes(render(config))


def _swap_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(folder / TENSOR_FILE)
    for name, array in changes.items():
        tensors.pop(name)
        if array is not None:
            tensors[name] = array
    blob = save(tensors)
    (folder / TENSOR_FILE).write_bytes(blob)
    _resign(folder, tensors_sha256=hashlib.sha256(blob).hexdigest())


def test_resigning_alone_changes_nothing(folder: Path) -> None:
    _resign(folder)
    assert isinstance(load_predictor(folder), GbmHazard)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not strict JSON"),
        ("[1]", "must be an object"),
        ('{"format": NaN}', "not a number JSON knows"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ("[" * 5000, "not strict JSON"),
        ('{"format": "preemptbench-predictor", "format_version": 99}', "version 99"),
        ("\udcff", "not strict JSON"),
    ],
)
def test_a_bad_config_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=says):
        load_predictor(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSOR_FILE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_predictor(folder)


def test_even_white_space_in_the_config_counts(folder: Path) -> None:
    path = folder / CONFIG_FILE
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        load_predictor(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"settings": {"features": ["agee"] * len(FEATURE_NAMES), "censoring_rule": ""}},
            "unknown feature 'agee'",
        ),
        ({"settings": {"features": [3], "censoring_rule": ""}}, "must be a str"),
        ({"settings": []}, "settings must be an object"),
        ({"training": {"run_ids": "x"}}, "must be a list"),
        ({"family": 7}, "must be a str"),
        ({"fitted_with": [1]}, "fitted_with is"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    folder: Path, changes: dict[str, object], says: str
) -> None:
    _resign(folder, **changes)
    with pytest.raises(CheckpointError, match=says):
        load_predictor(folder)


def test_a_family_this_release_lacks(folder: Path) -> None:
    _resign(folder, family="gbm-hazzard")
    with pytest.raises(UnknownName, match="did you mean 'gbm-hazard'"):
        load_predictor(folder)


def test_another_family_is_not_read_as_this_one(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="not 'age-km'"):
        AgeKm.from_pretrained(folder)


def test_arrays_that_make_no_sense_are_refused(folder: Path) -> None:
    """Hashes fit, so only the checks of meaning stand between these and an answer."""
    good = {name: (folder / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}
    right = load_file(folder / TENSOR_FILE)["trees.right"]
    for name, array, says in (
        ("trees.right", np.where(right > 0, 0, right), "must lie behind its parent"),
        ("trees.right", right[:-1], "as many"),
        ("trees.right", right.astype(np.int32), "must be int64"),
        ("trees.right", None, "missing"),
        ("edges", np.array([8, 4]), "must rise"),
        ("edges", np.array([[4, 8]]), "2 dimensions"),
        ("edges", None, "missing"),
    ):
        for file, data in good.items():
            (folder / file).write_bytes(data)
        _swap_tensors(folder, **{name: array})
        with pytest.raises(CheckpointError, match=says):
            load_predictor(folder)


def test_bad_curves_are_refused(tmp_path: Path) -> None:
    _fit("age-km").save_pretrained(tmp_path)
    alive = load_file(tmp_path / TENSOR_FILE)["curve_survival"]
    for broken, says in (
        (alive[::-1].copy(), "must fall from 1"),
        (alive + 1.0, "must fall from 1"),
        (np.full_like(alive, np.nan), "not finite"),
        (alive[:-1], "do not fit each other"),
    ):
        _swap_tensors(tmp_path, curve_survival=broken)
        with pytest.raises(CheckpointError, match=says):
            load_predictor(tmp_path)


def test_push_needs_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"preemptbench\[hub\]"):
        push_to_hub(folder, "someone/somewhere")


def test_push_uploads_a_verified_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[tuple[str, dict[str, object]]] = []

    class FakeApi:
        def create_repo(self, repo_id: str, **more: object) -> None:
            calls.append((repo_id, more))

        def upload_folder(self, **more: object) -> str:
            calls.append(("upload", more))
            return "https://hub/commit/1"

    monkeypatch.setattr(hub, "HfApi", FakeApi)
    assert push_to_hub(folder, "a/b") == "https://hub/commit/1"
    assert calls[0][0] == "a/b" and calls[0][1]["private"] is True
    assert calls[1][1]["folder_path"] == folder
    (folder / TENSOR_FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        push_to_hub(folder, "a/b")
    assert len(calls) == 2
