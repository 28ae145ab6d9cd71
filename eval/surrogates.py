"""Surrogates: on drawn lengths, which carry no text, signals as good as a predictor was on texts.

A surrogate is the clairvoyant signal degraded until its error and its order match those measured
for a predictor on real texts. It is *not* a predictor: it errs by drawn noise, not by what a text
looks like, so it shows what a signal of that quality buys, not what that predictor would do. Fitted
by ``python -m benchmarks.fit_surrogate``, which prints the chain and both sets of figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oracles.degradations import Degradation
from oracles.degrade import parse_degradations

LABEL = "surrogate, not a predictor"


@dataclass(frozen=True, slots=True)
class Surrogate:
    """``chain`` degrades clairvoyant; ``source`` says whose quality it stands for, and on what."""

    name: str
    chain: str
    source: str

    @property
    def steps(self) -> tuple[Degradation, ...]:
        """The degradations, first one innermost."""
        return parse_degradations(f"clairvoyant | {self.chain}")[1]


SURROGATES: dict[str, Surrogate] = {
    one.name: one
    for one in (
        Surrogate(
            "surrogate-gbm",
            "shrink(0.222) | noise(0.529) | wander(0.252, 1024) | bias(1.14)",
            "gbm-hazard on unseen prompts of LRMTokenEconomy (15 models, 21 prompts; geometric, "
            "uniform and equal-age landmarks): log-MAE 1.02, 1.26 and 1.02 (surrogate 1.05, 1.24, "
            "1.05), concordance .61, .68 and .61 (surrogate .60, .66, .64)",
        ),
        Surrogate(
            "surrogate-gbm-maths",
            "shrink(0.442) | noise(0.531) | wander(0.306, 1024) | bias(0.903) | refresh(256)",
            "gbm-hazard on unseen prompts of ATTS-self (R1-Distill-Llama-8B, 97 problems of "
            "MATH-500; geometric, uniform and equal-age landmarks): log-MAE .67, .93 and .67 "
            "(surrogate .69, .92, .69), concordance .74, .71 and .69 (surrogate .72, .72, .70)",
        ),
    )
}


def surrogate_notes(signals: Sequence[str]) -> list[str]:
    """Return a sentence for each of ``signals`` that is a surrogate, degraded further or not."""
    names = dict.fromkeys(name.partition(" | ")[0] for name in signals)
    return [
        f"{name} is a {LABEL}: clairvoyant | {SURROGATES[name].chain}, fitted to "
        f"{SURROGATES[name].source}."
        for name in names
        if name in SURROGATES
    ]
