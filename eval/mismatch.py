"""A checkpoint answers for the model and tokenizer it was trained on, and for no other unasked."""

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


def matched_name(
    predictors: Sequence[Predictor], runs: Sequence[DecodeRun], *, allow_mismatch: bool
) -> str:
    """Return the label of ``predictors`` (one, or the folds of a cross-fit) in a table of ``runs``.

    Raises InvalidInput on another model or tokenizer, unless that is allowed: then the label says
    what the predictor was trained on.
    """
    first = predictors[0]
    strange = mismatches(first, runs)
    if not strange:
        return first.name
    trained = ", ".join(first.provenance.models)
    if not allow_mismatch:
        raise InvalidInput(
            f"predictor {first.name!r} was trained on {trained}, these runs are of "
            f"{', '.join(strange)}: use a checkpoint of that model, or --allow-mismatch to see how "
            "far this one carries"
        )
    return f"{first.name} (trained on {trained})"
