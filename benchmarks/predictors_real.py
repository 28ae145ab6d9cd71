"""Predictors beside oracle-K on public reasoning texts: the tables of docs/predictors.md.

    python -m benchmarks.predictors_real [--data DIR] [--source LRMTokenEconomy …] [--seeds 3]

Every run is answered by a predictor that never saw its prompt (folds of prompts, several seeds);
the ceiling is oracle-K without the run itself. Landmarks are geometric in age (0, 32, 64, 128 …)
or uniform over a run's life. Errors are means over a run's landmarks, then over runs. Running sets
hold 8 runs of one model, each met at one of its landmarks; "same age": all at one geometric
landmark, where a signal that only knows ages is blind; "any model": geometric landmarks, but sets
of runs of all models, which no engine serves together. Intervals are percentiles over 1,000
resamples of prompts; each resample weighs runs, and pairs of runs, by how often their prompts were
drawn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import DistributionalSignal, signal_request
from predictors.age_km import AgeKmSettings
from predictors.boosting import BoostingSettings
from predictors.countdown import CountdownSettings
from predictors.encoders import EncoderSettings
from predictors.features import AGE_FEATURES, PROMPT_FEATURES
from predictors.fused import Fused, FusedSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.gbm_rank import GbmRankSettings
from predictors.log_t import LogTSettings
from predictors.past_future import PastFutureSettings
from predictors.prompt_encoder import PromptEncoderSettings
from predictors.registry import FamilySettings
from predictors.text_progress import TextProgressSettings
from predictors.torch_loop import LoopSettings
from traces.public_texts import SOURCES, read_source
from traces.split import crossfit_folds
from training.evaluate import LeaveOneOut, assert_unseen
from training.rows import training_set

KINDS = ("geometric", "uniform", "same age", "any model")
SET_SIZE, NUM_SETS, NUM_RESAMPLES = 8, 600, 1000
# few prompts: small trees, or they learn the prompts by heart (chosen on seed 0 of two sources)
_TREES = BoostingSettings(num_trees=80, num_leaves=6, min_rows_per_leaf=300)
_TOTALS = BoostingSettings(num_trees=80, num_leaves=6, min_rows_per_leaf=40)
_LANDMARKS = 30
# trained on the runs of the other sources too: many prompts, larger trees
_ALL = "gbm-hazard, all collections"
_LARGE_TREES = BoostingSettings(num_trees=300, num_leaves=15, min_rows_per_leaf=100)
# what two cores read in minutes: ELIS reads up to 512 tokens of text, again every 50
_ENCODE_EVERY, _ENCODER_TOKENS = 512, 128


def methods() -> dict[str, FamilySettings]:
    """Return what is compared, under one budget: the same rows, ages and (for trees) trees; but for
    one that also learns from the runs of the other sources, with larger trees."""
    loop = LoopSettings(num_epochs=25, patience_epochs=4, batch_rows=512)
    text_loop = LoopSettings(num_epochs=12, patience_epochs=3, batch_rows=512, weight_decay=0.03)
    order = {"num_landmarks": _LANDMARKS, "boosting": _TREES}
    return {
        "age-km": AgeKmSettings(),
        "past-future": PastFutureSettings(),
        "countdown": CountdownSettings(boosting=_TOTALS),
        "prompt ranker (trees)": GbmRankSettings(features=PROMPT_FEATURES, **order),
        "prompt-encoder, ListMLE (LTR idea, MiniLM)": PromptEncoderSettings(
            loss="listmle", num_landmarks=_LANDMARKS, loop=loop
        ),
        "prompt-encoder, log-t (SSJF idea, MiniLM)": PromptEncoderSettings(
            num_landmarks=_LANDMARKS, loop=loop
        ),
        "text-progress (ELIS idea, words)": TextProgressSettings(
            num_landmarks=_LANDMARKS, loop=text_loop
        ),
        "text-progress (ELIS idea, MiniLM)": TextProgressSettings(
            num_landmarks=_LANDMARKS,
            loop=text_loop,
            reader="encoder",
            encode_every=_ENCODE_EVERY,
            encoder=EncoderSettings(max_tokens=_ENCODER_TOKENS, keep_end=True),
        ),
        "gbm-hazard": GbmHazardSettings(num_landmarks=_LANDMARKS, boosting=_TREES),
        "gbm-hazard, age only": GbmHazardSettings(
            num_landmarks=_LANDMARKS, boosting=_TREES, features=AGE_FEATURES
        ),
        _ALL: GbmHazardSettings(num_landmarks=_LANDMARKS, boosting=_LARGE_TREES),
        "gbm-rank": GbmRankSettings(**order),
        "log-t": LogTSettings(num_landmarks=_LANDMARKS, loop=loop),
        "fused": FusedSettings(num_landmarks=_LANDMARKS, boosting=_TREES),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where signals are asked: ``run`` and ``age`` of the landmarks, then of the sets (s, k)."""

    run: IntArray
    age: IntArray
    set_run: IntArray
    set_age: IntArray


def landmark_rows(runs: Sequence[DecodeRun], kind: str, seed: int) -> Rows:
    """Return landmarks of every run and running sets met at such landmarks."""
    lengths = np.array([run.output_tokens for run in runs])
    ages = [_ages(length, kind) for length in lengths.tolist()]
    if kind == "same age":
        return _same_age_rows(runs, seed)
    run = np.repeat(np.arange(len(runs)), [len(a) for a in ages])
    models = np.array([r.model if kind != "any model" else "" for r in runs], dtype=object)
    pools = [np.flatnonzero(models == m) for m in sorted(set(models.tolist()))]
    pools = [pool for pool in pools if len(pool) >= SET_SIZE]
    share = np.array([lengths[pool].sum() for pool in pools], dtype=np.float64)
    set_run, set_age = np.empty((2, NUM_SETS, SET_SIZE), dtype=np.int64)
    for index in range(NUM_SETS):
        rng = keyed_generator(seed, "bench-set", kind, index)
        pool = pools[int(rng.choice(len(pools), p=share / share.sum()))]
        race = rng.standard_exponential(len(pool)) / lengths[pool]
        set_run[index] = pool[np.argpartition(race, SET_SIZE - 1)[:SET_SIZE]]
        for place, member in enumerate(set_run[index].tolist()):
            if kind != "uniform":
                set_age[index, place] = rng.choice(ages[member])
            else:
                set_age[index, place] = int(rng.random() * lengths[member])
    return Rows(run, np.concatenate(ages), set_run, set_age)


def _same_age_rows(runs: Sequence[DecodeRun], seed: int) -> Rows:
    """Return geometric landmarks, and sets of runs of one model that are all equally old."""
    where = landmark_rows(runs, "geometric", seed)
    lengths = np.array([run.output_tokens for run in runs])
    models = np.array([r.model for r in runs], dtype=object)
    pools = [
        (age, pool)
        for age in _ages(int(lengths.max()), "geometric").tolist()
        for model in sorted(set(models.tolist()))
        if len(pool := np.flatnonzero((lengths > age) & (models == model))) >= SET_SIZE
    ]
    set_run, set_age = np.empty((2, NUM_SETS, SET_SIZE), dtype=np.int64)
    for index in range(NUM_SETS):
        rng = keyed_generator(seed, "bench-set", "same age", index)
        set_age[index], pool = pools[int(rng.integers(len(pools)))]
        set_run[index] = rng.choice(pool, SET_SIZE, replace=False)
    return replace(where, set_run=set_run, set_age=set_age)


def _ages(length: int, kind: str) -> IntArray:
    if kind != "uniform":
        doubled = 32 * 2 ** np.arange(max(0, int(np.log2(max(length - 1, 1) / 32)) + 1))
        return np.concatenate([[0], doubled[doubled < length]]).astype(np.int64)
    return np.unique((np.arange(10) + 0.5) / 10 * length).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """``error`` (r,) is a run's mean |log1p answer - log1p truth|, ``median_error`` that of the
    signal's median instead of its mean; ``right`` (s, p) is 1, 0.5 or
    0 for each ordered pair of each set, NaN for ties in truth."""

    error: FloatArray
    median_error: FloatArray
    right: FloatArray


def score(answers: FloatArray, rows: Rows, runs: Sequence[DecodeRun]) -> Scored:
    """Return the scores of (means, medians), each of the landmarks, then of the sets' members."""
    lengths = np.array([run.output_tokens for run in runs])
    count = len(rows.run)

    def run_error(values: FloatArray) -> FloatArray:
        gap = np.abs(np.log1p(values) - np.log1p(lengths[rows.run] - rows.age))
        return np.bincount(rows.run, gap) / np.bincount(rows.run)

    left = lengths[rows.set_run] - rows.set_age
    guess = answers[0, count:].reshape(left.shape)
    first, second = np.triu_indices(SET_SIZE, k=1)
    truth = np.sign(left[:, first] - left[:, second])
    right = (1.0 + truth * np.sign(guess[:, first] - guess[:, second])) / 2.0
    errors = (run_error(values[:count]) for values in answers)
    return Scored(*errors, np.where(truth != 0, right, np.nan))


def answers_of(
    runs: Sequence[DecodeRun],
    rows: Mapping[str, Rows],
    seed: int,
    num_folds: int,
    chosen: Mapping[str, FamilySettings],
    elsewhere: Sequence[DecodeRun],
) -> tuple[dict[str, dict[str, FloatArray]], dict[str, float]]:
    """Return answers by method and landmark kind, cross-fitted, and CPU seconds of all fits;
    ``elsewhere`` are the runs that only the method of all collections learns from, besides."""
    requests = [signal_request(run) for run in runs]
    fold_of = crossfit_folds(runs, num_folds=num_folds, seed=seed)
    fold = np.array([fold_of[run.prompt_id] for run in runs])
    at = {
        kind: (
            np.concatenate([r.run, r.set_run.ravel()]),
            np.concatenate([r.age, r.set_age.ravel()]),
        )
        for kind, r in rows.items()
    }
    out: dict[str, dict[str, FloatArray]] = {}
    seconds: dict[str, float] = {}
    ceiling = LeaveOneOut(runs)

    def ask(label: str, signal: DistributionalSignal, which: np.ndarray) -> None:
        for kind, (run, age) in at.items():
            mine = np.flatnonzero(which[run])
            answers = out.setdefault(label, {}).setdefault(kind, np.full((2, len(run)), np.nan))
            asked = [requests[i] for i in run[mine].tolist()]
            answers[0, mine] = signal.remaining(asked, age[mine])
            answers[1, mine] = signal.quantile(asked, age[mine], 0.5)

    ask(ceiling.name, ceiling, np.ones(len(runs), dtype=bool))
    for index in range(num_folds):
        inside = fold == index
        outside = [run for run, out_ in zip(runs, inside, strict=True) if not out_]
        unseen = {runs[i].prompt_sha256 for i in np.flatnonzero(inside).tolist()}
        more = (run for run in elsewhere if run.prompt_sha256 not in unseen)  # some stand in two
        training, everything = training_set(outside), training_set([*outside, *more])
        for label, settings in chosen.items():
            start = time.process_time()
            predictor = settings.fit(everything if label == _ALL else training, seed=seed)
            seconds[label] = seconds.get(label, 0.0) + time.process_time() - start
            assert_unseen(predictor, (runs[i] for i in np.flatnonzero(inside).tolist()))
            if isinstance(predictor, Fused):
                print(f"  trust {predictor.trust} width {predictor.width}", file=sys.stderr)
                label = f"fused with {ceiling.name.split()[0]}"
                ask(label, predictor.with_prior(ceiling), inside)
                ask("fused without a prior", predictor, inside)
            else:
                ask(label, predictor, inside)
            print(f"  fold {index} {label}", file=sys.stderr, flush=True)
    return out, seconds


def resampled(
    scores: Mapping[str, list[Scored]], rows: Sequence[Rows], prompt: IntArray
) -> dict[str, tuple[FloatArray, FloatArray, FloatArray]]:
    """Return for each method (log-MAE, concordance, the median's log-MAE): the estimate,
    then the resamples."""
    count = int(prompt.max()) + 1
    rng = keyed_generator(0, "prompt-bootstrap")
    draws = rng.multinomial(count, np.full(count, 1.0 / count), NUM_RESAMPLES)
    draws = np.vstack([np.ones(count, dtype=np.int64), draws]).astype(np.float64)
    first, second = np.triu_indices(SET_SIZE, k=1)
    out = {}
    for name, by_seed in scores.items():
        runs_drawn = draws @ np.bincount(prompt, minlength=count)
        means, medians = (
            draws @ np.bincount(prompt, np.mean(errors, axis=0), count) / runs_drawn
            for errors in ([s.error for s in by_seed], [s.median_error for s in by_seed])
        )
        right, total = np.zeros((2, count, count))
        for scored, where in zip(by_seed, rows, strict=True):
            known = ~np.isnan(scored.right)
            a, b = (prompt[where.set_run[:, side]][known] for side in (first, second))
            np.add.at(right, (a, b), scored.right[known])
            np.add.at(total, (a, b), 1.0)
        weigh = [np.einsum("ra,ab,rb->r", draws, table, draws) for table in (right, total)]
        out[name] = (means, weigh[0] / weigh[1], medians)
    return out


def table(found: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], ceiling: str) -> str:
    """Return the Markdown rows: estimates, their intervals, and the share of the gap closed."""
    floor, top = found["age-km"][1], found[ceiling][1]
    lines = [
        "| signal | log-MAE [95 %] | of the median | concordance [95 %] | gap closed, % [95 %] |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, (log_mae, order, median) in sorted(found.items(), key=lambda item: item[1][1][0]):
        gap = (order - floor) / (top - floor)
        cells = (_cell(log_mae, 3), f"{median[0]:.3f}", _cell(order, 3), _cell(100 * gap, 0))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def against(found: Mapping[str, tuple[FloatArray, FloatArray, FloatArray]], best: str) -> str:
    """Return what ``best`` gains on each other method, with intervals."""
    lines = [f"| {best} against | log-MAE less by | concordance more by |", "| --- | --- | --- |"]
    for name, (log_mae, order, _) in found.items():
        if name != best:
            less, more = log_mae - found[best][0], found[best][1] - order
            lines.append(f"| {name} | {_cell(less, 3)} | {_cell(more, 3)} |")
    return "\n".join(lines)


def _cell(values: FloatArray, digits: int) -> str:
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return f"{values[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def one_source(
    data: Path, source: str, num_seeds: int, num_folds: int, max_repeats: int, only: Sequence[str]
) -> None:
    """Print the tables of one source."""
    start = time.perf_counter()
    runs = read_source(data, source, max_repeats)
    prompts, prompt = np.unique([run.prompt_id for run in runs], return_inverse=True)
    lengths = np.array([run.output_tokens for run in runs])
    cut = sum(run.event_observed is not True for run in runs)
    print(
        f"\n## {source}: {len(runs)} runs of {len(prompts)} prompts, "
        f"{len({run.model for run in runs})} models, median {np.median(lengths):.0f} and longest "
        f"{lengths.max()} tokens, {cut} at their cap; {num_seeds} x {num_folds} folds",
        flush=True,
    )
    print(f"read in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    chosen = {name: s for name, s in methods().items() if not only or name in only}
    elsewhere = [
        run
        for other in (SOURCES if _ALL in chosen else ())
        if other != source
        for run in read_source(data, other, _repeats(other, max_repeats))
    ]
    scores: dict[str, dict[str, list[Scored]]] = {kind: {} for kind in KINDS}
    asked: dict[str, list[Rows]] = {kind: [] for kind in KINDS}
    cpu_s: dict[str, float] = {}
    for seed in range(num_seeds):
        rows = {kind: landmark_rows(runs, kind, seed) for kind in scores}
        answers, seconds = answers_of(runs, rows, seed, num_folds, chosen, elsewhere)
        for name, value in seconds.items():
            cpu_s[name] = cpu_s.get(name, 0.0) + value / (num_seeds * num_folds)
        for kind, where in rows.items():
            asked[kind].append(where)
            for name, by_kind in answers.items():
                scores[kind].setdefault(name, []).append(score(by_kind[kind], where, runs))
    ceiling = LeaveOneOut(runs).name
    for kind in scores:
        found = resampled(scores[kind], asked[kind], prompt)
        print(f"\n### {source}, {kind} landmarks\n\n{table(found, ceiling)}\n")
        if "gbm-hazard" in found:
            print(against(found, "gbm-hazard"), flush=True)
    each = ", ".join(f"{name} {value:.1f}" for name, value in cpu_s.items())
    print(f"\nCPU seconds a fit: {each}", flush=True)


def _repeats(source: str, max_repeats: int) -> int:
    """Two of crosslingual-s1.1, whose "repeats" are languages; they would outnumber the rest."""
    return min(2, max_repeats) if source == "crosslingual-s1.1" else max_repeats


def main() -> None:
    """Print every table asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = os.environ.get("PREEMPTBENCH_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--source", action="append", choices=SOURCES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="runs of a request to use")
    parser.add_argument("--only", action="append", default=[], help="a method; default: all")
    args = parser.parse_args()
    if not (args.data / "reasoning_lengths").is_dir():
        parser.error(f"{args.data} holds no reasoning_lengths: give --data or PREEMPTBENCH_DATA")
    for source in args.source or SOURCES:
        one_source(args.data, source, args.seeds, args.folds, args.repeats, args.only)


if __name__ == "__main__":
    main()
