"""A study on disk: study.json beside its cells, so that reports, rescoring and comparisons need no
engine, and say with what they were made.

Paths inside the study's folder are kept relative to it: the folder can be moved.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from eval.cells import read_cells
from eval.matrix import task_path
from eval.study import SourceResult, StudyResult
from eval.study_config import Source, StudyConfig
from eval.study_pilots import Pilot, matrix_of
from eval.task_key import code_sha256, path_sha256
from eval.tasks import Failure
from serving_sim.config import EngineConfig, OffloadSettings, SglangSettings
from traces.deadlines import DeadlineClass

FORMAT = "preemptbench-study/1"
FILE = "study.json"
_PACKAGES = ("preemptbench", "numpy", "scipy", "numba", "pyarrow", "lightgbm", "matplotlib")


@dataclass(frozen=True, slots=True, eq=False)
class StoredStudy:
    """A study, where it lies, and how it came about.

    ``semantics`` is the hash of all code that a cell passes through; ``inputs`` maps run logs and
    checkpoints to their hashes; ``tasks`` maps a source's name to the file names of its seeds.
    """

    study: StudyResult
    out_dir: Path
    command: str
    semantics: str
    versions: dict[str, str]
    inputs: dict[str, str]
    tasks: dict[str, tuple[str, ...]]

    def records_of(self, source: SourceResult) -> list[Path]:
        """Return the files of request records of ``source``, a file a seed."""
        return [source.out_dir / "records" / name for name in self.tasks[source.source.name]]

    def runs_sha256(self, source: SourceResult) -> str:
        """Return the hash of the run log of ``source``."""
        return self.inputs[_relative(source.source.runs, self.out_dir)]


def store_study(study: StudyResult, out_dir: Path, command: str) -> Path:
    """Write OUT/study.json: settings, pilots, hashes, versions and the command; return its path."""
    document = {
        "format": FORMAT,
        "command": command,
        "semantics": code_sha256(),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "margin_pp": study.margin_pp,
        "config": asdict(study.config) | {"engine": _changed_settings(study.config.engine)},
        "failures": [asdict(failure) for failure in study.failures],
        "sources": [_source_document(source, study.seeds, out_dir) for source in study.sources],
    }
    path = out_dir / FILE
    atomic_write_text(path, json.dumps(document, indent=1) + "\n")
    return path


def load_study(out_dir: Path) -> StoredStudy:
    """Read a stored study back, its cells checked against their hashes.

    Raises InvalidInput when the folder holds no study, study.json is damaged or of another format,
    or a cells file is damaged, missing or not the one that was stored.
    """
    path = out_dir / FILE
    if not path.is_file():
        raise InvalidInput(
            f"{out_dir} holds no {FILE}: it is no finished study; run "
            f"'preemptbench study --out {out_dir}', which writes it at its end"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise InvalidInput(
                f"{path} has format {document['format']!r}, this version reads {FORMAT!r}: run the "
                "study again, or use the version that wrote it"
            )
        config = _config(document["config"])
        results = [_source_result(config, row, out_dir) for row in document["sources"]]
        return StoredStudy(
            study=StudyResult(
                config,
                results,
                float(document["margin_pp"]),
                tuple(Failure(**row) for row in document.get("failures", [])),
            ),
            out_dir=out_dir,
            command=document["command"],
            semantics=document["semantics"],
            versions=document["versions"],
            inputs={k: v for row in document["sources"] for k, v in row["inputs"].items()},
            tasks={
                result.source.name: tuple(row["tasks"])
                for result, row in zip(results, document["sources"], strict=True)
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is damaged ({type(error).__name__}: {error}): run 'preemptbench study' again "
            "with the same settings; finished seeds are kept"
        ) from None


def _source_document(result: SourceResult, seeds: Sequence[int], out_dir: Path) -> dict[str, Any]:
    source = result.source
    checkpoints = {name: _relative(folder, out_dir) for name, folder in source.checkpoints}
    paths = [source.runs, *(folder for _, folder in source.checkpoints)]
    tasks = [task_path(result.matrix, seed, result.out_dir) for seed in seeds]
    return {
        "model_family": source.model_family,
        "benchmark": source.benchmark,
        "kind": source.kind,
        "runs": _relative(source.runs, out_dir),
        "checkpoints": checkpoints,
        "folder": _relative(result.out_dir, out_dir),
        "inputs": {_relative(path, out_dir): path_sha256(path) for path in paths},
        "pilot": asdict(result.pilot),
        "tasks": {path.name: path_sha256(path) for path in tasks},
    }


def _source_result(config: StudyConfig, row: dict[str, Any], out_dir: Path) -> SourceResult:
    source = Source(
        model_family=row["model_family"],
        benchmark=row["benchmark"],
        kind=row["kind"],
        runs=out_dir / row["runs"],
        checkpoints=tuple((name, out_dir / folder) for name, folder in row["checkpoints"].items()),
    )
    pilot = Pilot(**_with_tuples(row["pilot"]))
    folder = out_dir / row["folder"]
    cells = []
    for name, stored in row["tasks"].items():
        path = folder / "cells" / name
        if not path.is_file() or path_sha256(path) != stored:
            raise InvalidInput(
                f"{path} is {'damaged or changed' if path.exists() else 'missing'} (its hash is "
                "not the stored one): delete it and its records, and run the study again to redo it"
            )
        cells += read_cells(path)
    return SourceResult(source, matrix_of(config, source, pilot), pilot, cells, folder)


def _config(stored: dict[str, Any]) -> StudyConfig:
    known = {field.name for field in fields(StudyConfig)}
    if unknown := sorted(set(stored) - known):
        raise TypeError(f"unknown setting {', '.join(unknown)}")
    values = _with_tuples(stored)
    values["deadline_classes"] = tuple(
        DeadlineClass(**row) for row in values.get("deadline_classes", ())
    )
    engine = dict(values.pop("engine"))
    for name, kind in (("sglang", SglangSettings), ("offload", OffloadSettings)):
        if name in engine:
            engine[name] = kind(**engine[name])
    return StudyConfig(**values, engine=EngineConfig(**engine))


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}


def _changed_settings(engine: EngineConfig) -> dict[str, Any]:
    """Return the settings that are not the default; strict JSON has no infinity."""
    default = asdict(EngineConfig(num_blocks=2))
    changed = {k: v for k, v in asdict(engine).items() if v != default[k]}
    return {"num_blocks": engine.num_blocks} | changed


def _relative(path: Path, out_dir: Path) -> str:
    whole, base = path.resolve(), out_dir.resolve()
    return whole.relative_to(base).as_posix() if whole.is_relative_to(base) else str(whole)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
