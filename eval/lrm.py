"""Floors and ceilings of length signals on real repeated reasoning runs (LRMTokenEconomy).

The victim test: 16 requests of one model run together, each met in proportion to its length and
anywhere in its life; a rule picks the one it believes has longest to go; the truth is the run that
executes, and oracles see the other runs of its prompt. The runs were *sampled* at providers'
settings, few prompts each, so the order of the rows is the finding, not their absolute values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, make_request_key, sha256_text
from contracts.signals import signal_request
from contracts.survival_many import SurvivalCurves, kaplan_meier_by
from eval.signal_quality import order_scores
from oracles.empirical import SAMPLED_LABEL, EmpiricalOracle, leave_one_out

SOURCE = "LRMTokenEconomy"
NUM_REPEATS = 5
SET_SIZE = 16
FILTER = (
    "Rows of source LRMTokenEconomy except those of evaluation_stats.csv (counts without text); a "
    f"cell is a (model, prompt) with at least {NUM_REPEATS} runs, of which the first "
    f"{NUM_REPEATS} count; models with fewer than {SET_SIZE} cells are left out. Table 1 leaves "
    "out every cell with a run marked truncated, as the published figures did; table 2 keeps them: "
    "such a run is censored for the oracle, and as a truth it counts with its served length."
)
_LOG_NORMAL_SIGMA = 0.35


@dataclass(frozen=True, slots=True, eq=False)
class LrmCells:
    """``lengths`` and ``cut`` (c, 5) of every cell, its ``cap`` (c,) and ``model`` (c,) by number
    in ``models``; ``prompts`` (c,) names."""

    models: tuple[str, ...]
    model: IntArray
    prompts: tuple[str, ...]
    lengths: IntArray
    cut: np.ndarray
    cap: IntArray


@dataclass(frozen=True, slots=True)
class LrmRow:
    """One signal: mean relative regret, share of best picks, concordance (ties count half), share
    of picks with less to go than the set's median."""

    signal: str
    regret: float
    top1: float
    concordance: float
    below_median: float


@dataclass(frozen=True, slots=True, eq=False)
class _Sets:
    """Running sets: ``cell``, ``run``, ``age`` and what was left, all (s, 16)."""

    cell: IntArray
    run: IntArray
    age: IntArray
    remaining: IntArray


def read_lrm(data_dir: Path, *, keep_cut: bool) -> LrmCells:
    """Read the cells of :data:`FILTER` from ``data_dir``/reasoning_lengths/lengths.parquet.

    Raises InvalidInput when the table is absent, naming where it comes from.
    """
    import pyarrow.parquet as pq

    path = data_dir / "reasoning_lengths" / "lengths.parquet"
    if not path.is_file():
        raise InvalidInput(
            f"{path} does not exist: give the folder of the public data with --data or "
            "PREEMPTBENCH_DATA; the suite is made of github.com/cpldcpu/LRMTokenEconomy, commit "
            "d5cc353 (data/output_queries_*.json), columns source, model, prompt_id, "
            "output_tokens, max_tokens, truncated, variant"
        )
    columns = ["model", "prompt_id", "variant", "output_tokens", "max_tokens", "truncated"]
    rows = pq.read_table(path, columns=columns, filters=[("source", "=", SOURCE)]).to_pylist()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["variant"] != "evaluation_stats.csv":
            groups[row["model"], row["prompt_id"]].append(row)
    kept: dict[str, list[tuple[str, list[dict[str, Any]]]]] = defaultdict(list)
    for (model, prompt), runs in sorted(groups.items()):
        if len(runs) >= NUM_REPEATS and (keep_cut or not any(r["truncated"] for r in runs)):
            kept[model].append((prompt, runs[:NUM_REPEATS]))
    models = [model for model, cells in kept.items() if len(cells) >= SET_SIZE]
    if not models:
        raise InvalidInput(f"{path} holds no model with {SET_SIZE} cells of source {SOURCE}")
    cells = [(m, prompt, runs) for m in models for prompt, runs in kept[m]]
    # a cap nobody recorded is read as the longest run of its model, as `runs import` does
    longest = {m: max(r["output_tokens"] for _, runs in kept[m] for r in runs) for m in models}
    return LrmCells(
        models=tuple(models),
        model=np.array([models.index(m) for m, _, _ in cells]),
        prompts=tuple(prompt for _, prompt, _ in cells),
        lengths=np.array([[r["output_tokens"] for r in runs] for _, _, runs in cells]),
        cut=np.array([[r["truncated"] is True for r in runs] for _, _, runs in cells]),
        cap=np.array([max(r["max_tokens"] or longest[m] for r in runs) for m, _, runs in cells]),
    )


def score_lrm(
    cells: LrmCells, *, num_sets: int = 4000, seed: int = 0, min_median: int = 0
) -> list[LrmRow]:
    """Return the rows of the table; ``min_median`` keeps prompts whose median is that long."""
    if min_median:
        cells = _only(cells, np.median(cells.lengths, axis=1) >= min_median)
    sets = _draw(cells, num_sets, seed)
    return [
        LrmRow(name, m["victim_regret"], m["top1"], m["concordance"], m["early_kills"])
        for name, answer in _signals(cells, seed).items()
        for m in [order_scores(answer(sets), sets.remaining)]
    ]


def exhausted_share(cells: LrmCells) -> float:
    """Return how often a run is strictly longer than the four others of its cell; without ties
    that is one time in five, whatever the lengths."""
    longest = cells.lengths == cells.lengths.max(axis=1, keepdims=True)
    return float((longest.sum(axis=1) == 1).mean() / cells.lengths.shape[1])


def lrm_table(rows: Sequence[LrmRow]) -> str:
    """Return the rows as aligned text."""
    head = f"{'signal':<44}{'regret':>8}{'top-1':>8}{'concord.':>10}{'below median':>14}"
    return "\n".join(
        [head]
        + [
            f"{r.signal:<44}{r.regret:>8.3f}{r.top1:>8.3f}{r.concordance:>10.3f}"
            f"{r.below_median:>14.3f}"
            for r in rows
        ]
    )


def lrm_runs(cells: LrmCells) -> list[DecodeRun]:
    """Return the cells as decode runs; ``repeat`` numbers the runs of a cell."""
    runs = []
    for index, prompt in enumerate(cells.prompts):
        model, cap = cells.models[cells.model[index]], int(cells.cap[index])
        sha = sha256_text(f"{SOURCE}\x1f{prompt}")
        key = make_request_key(
            model=model, prompt_sha256=sha, chat_template_sha256="unknown", temperature=1.0,
            max_new_tokens=cap, dtype="unknown",
        )  # fmt: skip
        for repeat in range(NUM_REPEATS):
            cut = bool(cells.cut[index, repeat])
            runs.append(
                DecodeRun(
                    run_id=f"{key}-{repeat}", request_key=key, repeat=repeat, prompt_id=prompt,
                    prompt_sha256=sha, benchmark=SOURCE, family=SOURCE, model=model,
                    model_revision="unknown", tokenizer_sha256="unknown",
                    chat_template_sha256="unknown", engine="unknown", engine_version="unknown",
                    kernel="unknown", batch_invariant=False, dtype="unknown", device="unknown",
                    batch_size=1, concurrency=1, temperature=1.0, seed=0, max_new_tokens=cap,
                    prompt_tokens=0, output_tokens=int(cells.lengths[index, repeat]),
                    how_counted="reported", finish_reason="length" if cut else "stop",
                    event_observed=not cut, licence="Apache-2.0",
                )
            )  # fmt: skip
    return runs


def _only(cells: LrmCells, mask: np.ndarray) -> LrmCells:
    """Keep the cells of ``mask`` (c,); runs repeat in a set, so a model may have few left."""
    left, model = np.unique(cells.model[mask], return_inverse=True)
    return LrmCells(
        models=tuple(cells.models[i] for i in left.tolist()),
        model=model.reshape(-1),
        prompts=tuple(p for p, kept in zip(cells.prompts, mask.tolist(), strict=True) if kept),
        lengths=cells.lengths[mask],
        cut=cells.cut[mask],
        cap=cells.cap[mask],
    )


def _draw(cells: LrmCells, num_sets: int, seed: int) -> _Sets:
    """Draw sets: a model at random, then 16 of its runs in proportion to their length, with
    repeats, each at an age uniform over its life. A run cut below its cap has no known truth."""
    known = ~cells.cut | (cells.lengths >= cells.cap[:, None])
    cell, run, age = (np.empty((num_sets, SET_SIZE), dtype=np.int64) for _ in range(3))
    of_model = [np.flatnonzero(cells.model == m) for m in range(len(cells.models))]
    for index in range(num_sets):
        rng = keyed_generator(seed, "lrm-set", index)
        own = of_model[int(rng.integers(len(of_model)))]
        weight = (cells.lengths[own] * known[own]).ravel().astype(np.float64)
        picked = rng.choice(len(weight), SET_SIZE, p=weight / weight.sum())
        cell[index], run[index] = own[picked // NUM_REPEATS], picked % NUM_REPEATS
        age[index] = (rng.random(SET_SIZE) * cells.lengths[cell[index], run[index]]).astype(int)
    return _Sets(cell, run, age, cells.lengths[cell, run] - age)


def _signals(cells: LrmCells, seed: int) -> dict[str, Callable[[_Sets], FloatArray]]:
    """Return every row's score function, in the order of the table."""
    own, others = _own_curves(cells), _other_prompts(cells)
    models = kaplan_meier_by(
        np.repeat(cells.model, NUM_REPEATS),
        cells.lengths.ravel(),
        ~cells.cut.ravel(),
        len(cells.models),
    )

    def total(s: _Sets) -> FloatArray:
        return np.asarray(np.median(_other_lengths(cells, s), axis=2), dtype=np.float64)

    def above(s: _Sets, none_left: Callable[[_Sets], FloatArray]) -> FloatArray:
        mean = own.mean_residual(
            (s.cell * NUM_REPEATS + s.run).ravel(), s.age.ravel(), cells.cap[s.cell].ravel()
        ).reshape(s.age.shape)
        return np.where(np.isnan(mean), none_left(s), mean)

    def group(s: _Sets, *, own_prompt: bool = True) -> FloatArray:
        curves, curve = (models, cells.model[s.cell]) if own_prompt else (others, s.cell)
        caps = cells.cap[s.cell].ravel()
        mean = curves.mean_residual(curve.ravel(), s.age.ravel(), caps).reshape(s.age.shape)
        return np.where(np.isnan(mean), 0.0, mean)

    def draw(s: _Sets) -> FloatArray:
        return keyed_generator(seed, "lrm-random").random(s.age.shape)

    return {
        "random": draw,
        "most elapsed": lambda s: s.age.astype(np.float64),
        "fewest elapsed (SGLang, LCF)": lambda s: -s.age.astype(np.float64),
        "model-level mean residual life at age": group,
        "same, from other prompts only": lambda s: group(s, own_prompt=False),
        "prompt median total, no progress": total,
        "one other run minus age, floor 0": lambda s: np.maximum(
            _other_lengths(cells, s)[:, :, 0] - s.age, 0.0
        ),
        "median of 4 minus age, floor 0": lambda s: np.maximum(total(s) - s.age, 0.0),
        "mean of runs above age; none left: 0": lambda s: above(s, lambda s: np.zeros(s.age.shape)),
        "mean of runs above age; none left: infinity": lambda s: above(
            s, lambda s: np.full(s.age.shape, 1e12)
        ),
        "mean of runs above age; none left: group": lambda s: above(s, group),
        "log-normal round the runs, sigma 0.35": lambda s: _log_normal(cells, s),
        f"oracle-4{SAMPLED_LABEL}, no log-t rung": lambda s: _oracle(
            cells, s, ("prompt", "near-duplicate", "family", "model")
        ),
        f"oracle-4{SAMPLED_LABEL}": lambda s: _oracle(cells, s, None),
    }


def _other_lengths(cells: LrmCells, sets: _Sets) -> IntArray:
    """Return the lengths (s, 16, 4) of the other runs, in a rotation that favours none."""
    turn = (sets.run[:, :, None] + np.arange(1, NUM_REPEATS)) % NUM_REPEATS
    return np.asarray(np.take_along_axis(cells.lengths[sets.cell], turn, axis=2))


def _own_curves(cells: LrmCells) -> SurvivalCurves:
    """Return a curve for each (cell, run left out), of the other runs of the cell."""
    count = cells.lengths.size
    keep = ~np.eye(NUM_REPEATS, dtype=bool)
    columns = np.nonzero(keep)[1].reshape(NUM_REPEATS, -1)
    lengths, cut = cells.lengths[:, columns], cells.cut[:, columns]
    group = np.repeat(np.arange(count), NUM_REPEATS - 1)
    return kaplan_meier_by(group, lengths.ravel(), ~cut.ravel(), count)


def _other_prompts(cells: LrmCells) -> SurvivalCurves:
    """Return a curve for each cell, of all runs of its model on other prompts."""
    group, lengths, ended = [], [], []
    for index in range(len(cells.model)):
        rest = (cells.model == cells.model[index]) & (np.arange(len(cells.model)) != index)
        lengths.append(cells.lengths[rest].ravel())
        ended.append(~cells.cut[rest].ravel())
        group.append(np.full(lengths[-1].size, index))
    return kaplan_meier_by(
        np.concatenate(group), np.concatenate(lengths), np.concatenate(ended), len(cells.model)
    )


def _log_normal(cells: LrmCells, sets: _Sets) -> FloatArray:
    """Mean of a log-normal with the other runs' log mean, given that it exceeds the age."""
    from scipy.special import log_ndtr

    sigma = _LOG_NORMAL_SIGMA
    location = np.log(_other_lengths(cells, sets)).mean(axis=2)
    below = (location - np.log(np.maximum(sets.age, 1))) / sigma
    gain = log_ndtr(below + sigma) - log_ndtr(below)
    return np.asarray(np.exp(location + sigma**2 / 2 + gain) - sets.age)


def _oracle(cells: LrmCells, sets: _Sets, levels: tuple[str, ...] | None) -> FloatArray:
    """This package's oracle, each run answered by the log without its repeat."""
    runs = lrm_runs(cells)
    requests = [signal_request(run) for run in runs]
    out = np.empty(sets.age.shape)
    for repeat in range(NUM_REPEATS):
        rows = sets.run == repeat
        rest = [run for run in runs if run.repeat != repeat]
        oracle = (
            leave_one_out(runs, repeat) if levels is None else EmpiricalOracle(rest, levels=levels)
        )
        asked = [requests[i] for i in (sets.cell[rows] * NUM_REPEATS + repeat).tolist()]
        out[rows] = oracle.remaining(asked, sets.age[rows])
    return out
