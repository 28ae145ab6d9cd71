"""Length laws of reasoning model families, fitted from public runs: workloads without a download.

log L = location of the prompt + within * exp(spread * Z) * Z', capped. A prompt's location follows
the quantiles of the benchmark's prompts (they are mixtures, from "1 + 1" to contest problems; no
normal law fits); Z, a prompt's, and Z', a run's, are standard normals. That a prompt's own scale
varies is what makes tails heavy. Runs drawn from a law are *parametric*: their ``engine`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, make_request_key, sha256_text

ENGINE = "parametric"
NUM_QUANTILES = 21
_MAX_LOG = 40.0  # e^40 tokens are beyond any cap, and still a float
_FILE = Path(__file__).parent / "data" / "length_profiles.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """The law of one model family on one benchmark; lengths in tokens, scales in log tokens.

    ``locations`` (q,) are evenly spaced quantiles, from 0 to 1, of a prompt's mean log length;
    between them all is linear. ``within`` is the median standard deviation of a prompt's runs,
    ``spread`` how much that varies (standard deviation of its log). ``prompt_location`` and
    ``prompt_scale`` are mean and standard deviation of the log of prompt tokens.
    """

    model_family: str
    benchmark: str
    locations: tuple[float, ...]
    within: float
    spread: float
    cap_tokens: int
    prompt_location: float
    prompt_scale: float
    num_prompts: int
    num_runs: int
    source: str

    def __post_init__(self) -> None:
        if len(self.locations) < 2 or np.any(np.diff(self.locations) < 0):
            raise InvalidInput(
                f"length law {self.name}: locations must be at least 2 quantiles that never fall"
            )
        for name in ("within", "spread", "prompt_scale"):
            if not 0.0 <= getattr(self, name) < np.inf:
                raise InvalidInput(
                    f"length law {self.name}: {name} is {getattr(self, name)!r}; give a finite "
                    "number >= 0"
                )
        if self.cap_tokens < 1:
            raise InvalidInput(f"length law {self.name}: cap_tokens is {self.cap_tokens}, not >= 1")

    @property
    def name(self) -> str:
        """The family and the benchmark, as tables show them."""
        return f"{self.model_family} on {self.benchmark}"


def fit_law(
    lengths_by_prompt: Mapping[str, Sequence[int]],
    prompt_tokens: Sequence[int],
    *,
    model_family: str,
    benchmark: str,
    cap_tokens: int,
    source: str,
) -> LengthLaw:
    """Fit the law by moments of log lengths; prompts with a single run count for the location only.

    The spread of the scale is what the variance of log sample variances has beyond that of equal
    scales, trigamma((k - 1) / 2). Runs cut at the cap enter at the cap. Raises InvalidInput with
    fewer than two prompts of two runs that differ.
    """
    from scipy import special

    logs = [np.log(np.asarray(lengths, np.float64)) for lengths in lengths_by_prompt.values()]
    means = np.array([x.mean() for x in logs])
    repeated = [x for x in logs if len(x) > 1]
    variances = np.array([x.var(ddof=1) for x in repeated])
    degrees = np.array([len(x) - 1.0 for x in repeated])
    telling = variances > 0
    if telling.sum() < 2:
        raise InvalidInput(
            f"{model_family} on {benchmark}: {int(telling.sum())} prompts have two runs of unequal "
            "length; a law needs at least 2 of them"
        )
    half = degrees[telling] / 2.0
    log_scales = 0.5 * (np.log(variances[telling]) - special.digamma(half) + np.log(half))
    beyond = float(log_scales.var(ddof=1) - 0.25 * special.polygamma(1, half).mean())
    prompts = np.log(np.asarray(prompt_tokens, np.float64))
    return LengthLaw(
        model_family=model_family,
        benchmark=benchmark,
        locations=tuple(np.quantile(means, np.linspace(0, 1, NUM_QUANTILES)).tolist()),
        within=float(np.exp(log_scales.mean())),
        spread=float(np.sqrt(max(0.0, beyond))),
        cap_tokens=cap_tokens,
        prompt_location=float(prompts.mean()),
        prompt_scale=float(prompts.std(ddof=1)) if len(prompts) > 1 else 0.0,
        num_prompts=len(logs),
        num_runs=sum(map(len, logs)),
        source=source,
    )


def draw_runs(law: LengthLaw, *, num_prompts: int, repeats: int, seed: int) -> list[DecodeRun]:
    """Return ``repeats`` runs of each of ``num_prompts`` prompts of the law, keyed by ``seed``.

    Prompt i is the same whatever the other arguments; its run j is too, so a larger K only adds.
    """
    if num_prompts < 1 or repeats < 1:
        raise InvalidInput(f"{num_prompts} prompts x {repeats} repeats: both must be at least 1")
    return [
        run for number in range(num_prompts) for run in _runs_of_prompt(law, number, repeats, seed)
    ]


def _runs_of_prompt(law: LengthLaw, number: int, repeats: int, seed: int) -> list[DecodeRun]:
    rng = keyed_generator(seed, "parametric-prompt", law.name, number)
    scale, size = rng.standard_normal(2)
    levels = np.linspace(0, 1, len(law.locations))
    location = float(np.interp(rng.random(), levels, law.locations))
    prompt_tokens = max(1, round(float(np.exp(law.prompt_location + law.prompt_scale * size))))
    prompt_id = f"{law.benchmark}/{law.model_family}/{seed}/{number}"
    digest = sha256_text(prompt_id)
    within = law.within * np.exp(law.spread * scale)
    runs = []
    for repeat in range(repeats):
        noise = keyed_generator(seed, "parametric-run", law.name, number, repeat).standard_normal()
        log_length = min(location + within * noise, _MAX_LOG)
        natural = max(1, round(float(np.exp(log_length))))
        runs.append(_run(law, prompt_id, digest, prompt_tokens, repeat, natural, seed))
    return runs


def _run(
    law: LengthLaw,
    prompt_id: str,
    digest: str,
    prompt_tokens: int,
    repeat: int,
    natural_tokens: int,
    seed: int,
) -> DecodeRun:
    is_cut = natural_tokens > law.cap_tokens
    key = make_request_key(
        model=law.model_family,
        prompt_sha256=digest,
        chat_template_sha256="",
        temperature=0.0,
        max_new_tokens=law.cap_tokens,
        dtype=ENGINE,
    )
    return DecodeRun(
        run_id=f"{prompt_id}/{repeat}",
        request_key=key,
        repeat=repeat,
        prompt_id=prompt_id,
        prompt_sha256=digest,
        benchmark=law.benchmark,
        family=law.benchmark,
        model=law.model_family,
        model_revision=ENGINE,
        tokenizer_sha256="",
        chat_template_sha256="",
        engine=ENGINE,
        engine_version="1",
        kernel=ENGINE,
        batch_invariant=False,
        dtype=ENGINE,
        device=ENGINE,
        batch_size=1,
        concurrency=1,
        temperature=0.0,
        seed=seed,
        max_new_tokens=law.cap_tokens,
        prompt_tokens=prompt_tokens,
        output_tokens=min(natural_tokens, law.cap_tokens),
        how_counted=ENGINE,
        finish_reason="length" if is_cut else "stop",
        event_observed=not is_cut,
        licence="drawn from a fitted law",
    )


@lru_cache
def length_laws() -> tuple[LengthLaw, ...]:
    """Return the bundled laws: seven reasoning families on two benchmarks."""
    document = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(_law(row) for row in document["laws"])


def find_law(model_family: str, benchmark: str) -> LengthLaw:
    """Return a bundled law. Raises UnknownName with the names there are."""
    laws = {(law.model_family, law.benchmark): law for law in length_laws()}
    if (model_family, benchmark) not in laws:
        raise unknown_name(
            "length law", f"{model_family} on {benchmark}", [law.name for law in laws.values()]
        )
    return laws[model_family, benchmark]


def _law(row: Mapping[str, Any]) -> LengthLaw:
    known = {field.name for field in fields(LengthLaw)}
    if set(row) != known:
        raise InvalidInput(
            f"a length law has the fields {sorted(row)}: it needs exactly {sorted(known)}"
        )
    return LengthLaw(**{**row, "locations": tuple(row["locations"])})
