"""What ``score --learning-curve`` prints: error by runs of a prompt, and by training prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from contracts.errors import InvalidInput, PreemptBenchError
from contracts.runs import DecodeRun
from predictors.base import Predictor
from preemptbench.options import to_json
from preemptbench.progress import Bar

if TYPE_CHECKING:
    from eval.oracle_curve import CurvePoint as KPoint
    from training.learning_curve import CurvePoint as SizePoint

_T = TypeVar("_T")


def print_learning_curves(
    runs: Sequence[DecodeRun],
    predictor: Predictor,
    *,
    seed: int,
    as_json: bool,
    figures: Path | None,
) -> None:
    """Print oracle-K by K from the repeats in ``runs``, and what ``predictor`` was fitted with by
    the number of training prompts, both on the prompts it never saw; draw them to ``figures``.

    A curve that cannot be had is left out, with the reason; InvalidInput when neither can.
    """
    test = [run for run in runs if run.prompt_sha256 not in predictor.excluded_prompts]
    known = [run for run in test if run.has_known_length]
    reasons: list[str] = []
    by_k = _unless_refused(lambda: _by_k(known, seed), "K", reasons)
    by_size = _unless_refused(
        lambda: _by_size(runs, test, predictor, seed), "training prompts", reasons
    )
    if by_k is None and by_size is None:
        raise InvalidInput("; ".join(reasons))
    for reason in reasons:
        click.echo(reason, err=True)
    if figures is not None:
        _draw(by_k, by_size, predictor.name, figures)
    if as_json:
        curves = {
            key: points and [asdict(point) for point in points]
            for key, points in (("by_k", by_k), ("by_training_prompts", by_size))
        }
        click.echo(to_json({"signal": predictor.name, **curves, "left_out": reasons}))
    else:
        num_prompts = len({run.prompt_sha256 for run in known})
        click.echo(_text(by_k, by_size, predictor.name, num_prompts))


def _by_k(known: Sequence[DecodeRun], seed: int) -> list[KPoint]:
    from eval.oracle_curve import learning_curve, possible_ks

    with Bar("K", "oracle-K") as bar:
        return learning_curve(known, possible_ks(known), seed=seed, on_point=bar.update)


def _by_size(
    runs: Sequence[DecodeRun], test: Sequence[DecodeRun], predictor: Predictor, seed: int
) -> list[SizePoint]:
    from training.learning_curve import learning_curve
    from training.recipe import recipe_of

    seen = predictor.excluded_prompts
    train = [run for run in runs if run.prompt_sha256 in seen]
    num_found = len({run.prompt_sha256 for run in train})
    if not train:
        raise InvalidInput(
            f"the log has none of the {len(seen)} prompts {predictor.name} was trained on: give "
            "the log it was trained on with --runs"
        )
    if num_found < len(seen):
        click.echo(f"the log has {num_found} of its {len(seen)} training prompts", err=True)
    with Bar("fit", predictor.name) as bar:
        return learning_curve(train, test, recipe_of(predictor), seed=seed, on_fit=bar.update)


def _unless_refused(curve: Callable[[], _T], by: str, reasons: list[str]) -> _T | None:
    """Return the curve, or None and one more reason."""
    try:
        return curve()
    except PreemptBenchError as error:
        reasons.append(f"no learning curve by {by}: {error}")
        return None


def _draw(
    by_k: list[KPoint] | None, by_size: list[SizePoint] | None, name: str, folder: Path
) -> None:
    from eval.oracle_curve import write_curve_figure
    from training.learning_curve import draw_curves

    paths = []
    if by_k is not None:
        path = folder / "learning-curve-k.png"
        paths.append(write_curve_figure(by_k, _oracle_name(by_k), path))
    if by_size is not None:
        paths.append(draw_curves({name: by_size}, folder / "learning-curve-prompts.png"))
    for path in paths:
        click.echo(f"wrote {path}", err=True)


def _text(
    by_k: list[KPoint] | None, by_size: list[SizePoint] | None, name: str, num_prompts: int
) -> str:
    from eval.oracle_curve import curve_table
    from training.learning_curve import curve_text

    parts = []
    if by_k is not None:
        count = by_k[0].quality.num_requests
        head = f"{_oracle_name(by_k)} by K, on {count} requests of held-out prompts"
        parts.append(f"{head}\n{curve_table(by_k)}")
    if by_size is not None:
        head = f"{name} by training prompts, fitted again for each row, on {num_prompts} held-out"
        parts.append(f"{head} prompts\n{curve_text(by_size)}")
    return "\n\n".join(parts)


def _oracle_name(points: Sequence[KPoint]) -> str:
    """Return oracle-K, marked as the oracle of each K is (sampled)."""
    return points[0].quality.signal.replace(f"-{points[0].k}", "-K", 1)
