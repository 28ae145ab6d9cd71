"""The presets of ``preemptbench study``: which sources, policies, signals and seeds.

``paper`` and ``quick`` draw their runs from bundled length laws (parametric, no download);
``real`` imports public runs, ``real-text`` those of them whose whole texts are stored, so that a
predictor of text progress can answer too. No request is answered by a predictor that saw its
prompt: on drawn runs the predictor is fitted on other prompts of the same law, on real runs it is
cross-fitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from eval.study_config import Source, StudyConfig
from traces.importers import import_runs
from traces.length_profiles import LengthLaw, draw_runs, length_laws
from traces.public_families import CAP_TOKENS, COLLECTIONS, FAMILIES
from traces.public_texts import SOURCES as TEXTS
from traces.public_texts import read_source
from traces.runlog import read_runs, write_runs

if TYPE_CHECKING:
    from predictors.registry import FamilySettings

POLICIES = (
    "lifo",
    "fifo",
    "random",
    "largest-kv",
    "least-computed",
    "most-computed",
    "sglang-retract",
    "young(0.25)",
    "young(0.5)",
    "young(0.75)",
    "longest-remaining",
    "shortest-remaining",
)
NUM_PROMPTS = 100
NUM_TRAINING_PROMPTS = 400
NUM_FOLDS = 5
PROMPT_TOKENS = 100  # the collections count none; their prompts have 30 to 400 (characters / 4)
REPEATS_OF_TEXTS, REPEATS_ELSEWHERE, FEWEST_PROMPTS = 5, 2, 10
_TRAINING_SEED = 1  # prompts of other seeds are other prompts

# 24 at a time, 400 before the scored ones: up to nine tenths of the boundary's demand the queue
# then stands still; with 64 and 150 it grew in most cells, as in a burst (docs/notebook.md)
PAPER = StudyConfig(
    name="paper",
    policies=POLICIES,
    signals=("age-km", "surrogate-gbm", "oracle-4", "clairvoyant"),
    pressures=(0.7, 0.85, 0.95, 1.0, 1.1),
    num_seeds=20,
    profile="h100-qwen3-32b-tp2",
    concurrency=24.0,
    num_warmup=400,
    num_tagged=400,
)
QUICK = replace(
    PAPER,
    name="quick",
    policies=("lifo", "fifo", "random", "least-computed", "young(0.5)", "longest-remaining"),
    pressures=(0.85, 1.0, 1.1),
    num_seeds=8,  # with 6, max-T over nine rules seldom gets below .05
    num_pilots=3,
    observe_s=900.0,
)
REAL = replace(PAPER, name="real", signals=("age-km", "oracle", "clairvoyant"))
REAL_TEXT = replace(
    REAL, name="real-text", signals=("age-km", "gbm-hazard", "oracle", "clairvoyant")
)
PRESETS = {config.name: config for config in (QUICK, PAPER, REAL, REAL_TEXT)}
QUICK_SOURCES = (("GLM-Z1-32B", "LRMTokenEconomy"), ("DeepSeek-R1-0528", "MisguidedAttention"))


def drawn_sources(config: StudyConfig, out_dir: Path) -> list[Source]:
    """Return a source for each bundled law (two for ``quick``), its runs drawn and written.

    A prompt has one run for each seed up to 20 and the four that an oracle-4 needs.
    """
    laws = [
        law
        for law in length_laws()
        if config.name != QUICK.name or (law.model_family, law.benchmark) in QUICK_SOURCES
    ]
    return [drawn_source(law, config, out_dir / "inputs") for law in laws]


def drawn_source(law: LengthLaw, config: StudyConfig, folder: Path) -> Source:
    """Return a source of runs drawn from ``law``, written into ``folder`` with an age-km."""
    from predictors.age_km import AgeKmSettings
    from training.rows import training_set

    place = folder / f"{law.model_family}-{law.benchmark}"
    runs = place / "runs.parquet"
    if not runs.exists():
        training = draw_runs(law, num_prompts=NUM_TRAINING_PROMPTS, repeats=2, seed=_TRAINING_SEED)
        AgeKmSettings().fit(training_set(training)).save_pretrained(place / "age-km")
        drawn = draw_runs(law, num_prompts=NUM_PROMPTS, repeats=max(20, config.num_seeds), seed=0)
        write_runs(drawn, runs, {"drawn_from": law.name, "law_source": law.source})
    return Source(
        model_family=law.model_family,
        benchmark=law.benchmark,
        runs=runs,
        kind="parametric",
        checkpoints=(("age-km", place / "age-km"),),
    )


def real_sources(config: StudyConfig, data: Path, out_dir: Path) -> list[Source]:
    """Return a source for each family and public collection, from the tables in ``data``."""
    lengths = data / "reasoning_lengths" / "lengths.parquet"
    if not lengths.is_file():
        raise InvalidInput(
            f"{lengths} does not exist: the real preset reads runs of "
            f"{' and '.join(COLLECTIONS.values())}; give --data the folder that holds "
            "reasoning_lengths, or import your own run log and use --runs"
        )
    folder = out_dir / "inputs"
    return [
        _imported(lengths, family, name, collection, config, folder)
        for family, names in FAMILIES.items()
        for collection, name in zip(COLLECTIONS, names, strict=True)
    ]


def _imported(
    lengths: Path,
    family: str,
    name: str,
    collection: str,
    config: StudyConfig,
    folder: Path,
) -> Source:
    place = folder / f"{family}-{collection}"
    runs = place / "runs.parquet"
    if not runs.exists():
        imported, report = import_runs(
            "parquet",
            [lengths],
            column_map={"request_key": "group_id"},
            constants={"prompt_tokens": PROMPT_TOKENS, "max_new_tokens": CAP_TOKENS},
            where={"source": collection, "model": name},
        )
        _crossfit("age-km", imported, place / "age-km")
        origin = {"collection": COLLECTIONS[collection], "model": name}
        write_runs(imported, runs, origin | {"import": asdict(report)})
    return source_of(runs, family, collection, config, (("age-km", place / "age-km"),))


def text_sources(config: StudyConfig, data: Path, out_dir: Path) -> list[Source]:
    """Return a source for each collection and each family whose whole thinking is stored there.

    ``gbm-hazard`` is cross-fitted by prompt on all public texts, those of other collections and
    models included. Closed models show a summary or a part of their thinking, and of some open ones
    a run or two is stored whole: they have no source here.
    """
    folder = out_dir / "inputs"
    fitted = folder / "gbm-hazard"
    last_fold = fitted / f"fold-{NUM_FOLDS - 1}" / "config.json"
    every = {} if last_fold.exists() else _all_texts(data)
    sources = []
    for index, collection in enumerate(COLLECTIONS):
        names = {names[index]: family for family, names in FAMILIES.items()}
        for name, family in names.items():
            place = folder / f"{family}-{collection}"
            runs = [run for run in every.get(collection, ()) if run.model == name]
            enough = len({run.prompt_id for run in runs}) >= FEWEST_PROMPTS
            if enough and not _is_written(place):
                _crossfit("age-km", runs, place / "age-km")
                origin = {"collection": COLLECTIONS[collection], "model": name}
                write_runs(runs, place / "runs.parquet", origin)
            if _is_written(place):
                checkpoints = (("age-km", place / "age-km"), ("gbm-hazard", fitted))
                log = place / "runs.parquet"
                sources.append(source_of(log, family, collection, config, checkpoints))
    if every:  # last: a last fold says that all of this was done
        all_runs = [run for runs in every.values() for run in runs]
        _crossfit("gbm-hazard", all_runs, fitted, _many_prompts())
    return sources


def _all_texts(data: Path) -> dict[str, list[DecodeRun]]:
    return {
        name: read_source(
            data, name, REPEATS_OF_TEXTS if name in COLLECTIONS else REPEATS_ELSEWHERE
        )
        for name in TEXTS
    }


def _is_written(place: Path) -> bool:
    return (place / "runs.parquet").exists()


def source_of(
    runs: Path,
    family: str,
    benchmark: str,
    config: StudyConfig,
    checkpoints: tuple[tuple[str, Path], ...] = (),
) -> Source:
    """Return a run log as a source; raises InvalidInput when an oracle needs more runs of a request
    than it has."""
    log = list(read_runs(runs))
    repeats = max(Counter(run.request_key for run in log).values())
    for name in config.signals:
        base, _, most = name.partition(" | ")[0].partition("-")
        wanted = int(most) + 1 if base == "oracle" and most.isdigit() else 2
        if base == "oracle" and repeats < wanted:
            raise InvalidInput(
                f"signal {name!r} needs {wanted} runs of a request, one of which executes; {runs} "
                f"has at most {repeats}: collect with --repeats {wanted} or more"
            )
    is_sampled = any(run.temperature > 0 for run in log)
    return Source(
        model_family=family,
        benchmark=benchmark,
        runs=runs,
        kind="sampled" if is_sampled else "temperature zero",
        checkpoints=checkpoints,
    )


def own_source(runs: Path, config: StudyConfig, out_dir: Path) -> Source:
    """Return a user's run log as a source, an age-km cross-fitted on it beside."""
    log = list(read_runs(runs))
    place = out_dir / "inputs" / runs.stem
    if "age-km" in config.signals and not (place / "age-km").exists():
        _crossfit("age-km", log, place / "age-km")
    models = sorted({run.model for run in log})
    family = models[0] if len(models) == 1 else f"{len(models)} models"
    return source_of(runs, family, runs.stem, config, (("age-km", place / "age-km"),))


def _many_prompts() -> FamilySettings:
    """Return larger trees than few prompts allow: all texts have 413 (docs/predictors.md)."""
    from predictors.boosting import BoostingSettings
    from predictors.gbm_hazard import GbmHazardSettings

    trees = BoostingSettings(num_trees=300, num_leaves=15, min_rows_per_leaf=100)
    return GbmHazardSettings(num_landmarks=30, boosting=trees)


def _crossfit(
    family: str, runs: Sequence[DecodeRun], folder: Path, settings: FamilySettings | None = None
) -> None:
    from training.crossfit import crossfit, save_crossfit

    save_crossfit(crossfit(runs, family, num_folds=NUM_FOLDS, settings=settings), folder, ())
