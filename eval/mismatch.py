"""A checkpoint answers for the model and tokenizer it was trained on, and for no other unasked.

Where another is allowed, the label of whatever the checkpoint answers ends with what it was trained
on, so that no figure of it can be taken for one of a matching checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from predictors.base import Predictor


def mismatches(predictor: Predictor, runs: Sequence[DecodeRun]) -> list[str]:
    """Return what of ``runs`` the predictor was not trained on: models, tokenizers."""
    trained = predictor.provenance
    models = {run.model for run in runs} - set(trained.models)
    tokenizers = {run.tokenizer_sha256 for run in runs} - set(trained.tokenizer_sha256s)
    found = [f"model {name}" for name in sorted(models)]
    return found + [f"tokenizer {name[:12]}" for name in sorted(tokenizers)]


TRAINED_ON = " (trained on "


def matched_name(
    predictors: Sequence[Predictor],
    runs: Sequence[DecodeRun],
    *,
    allow_mismatch: bool,
    name: str | None = None,
) -> str:
    """Return the label of ``predictors`` (one, or the folds of a cross-fit) in a table of ``runs``;
    ``name`` is what they are called there, by default their family.

    Raises InvalidInput on another model or tokenizer, unless that is allowed: then the label says
    what the predictor was trained on.
    """
    name = predictors[0].name if name is None else name
    foreign = [set(mismatches(predictor, runs)) for predictor in predictors]
    strange = sorted(set.intersection(*foreign))  # a fold need not have met every model of its log
    if not strange:
        return name
    trained = ", ".join(sorted({m for p in predictors for m in p.provenance.models}))
    if not allow_mismatch:
        raise InvalidInput(
            f"predictor {name!r} was trained on {trained}, these runs are of "
            f"{', '.join(strange)}: use a checkpoint of that model, or --allow-mismatch to see how "
            "far this one carries"
        )
    return f"{name}{TRAINED_ON}{trained})"
