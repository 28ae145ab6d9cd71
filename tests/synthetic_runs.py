"""Small decode runs made by a known law: families of different lengths, a cap, telling progress.

Length is drawn from a log-normal of the family, times the number named in the prompt; runs of one
prompt scatter around the prompt's own length. Entropy rises as a run nears its end, so progress
says something about what remains. Everything is keyed by the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, ProgressRecord, make_request_key, sha256_text

CAP_TOKENS = 200
STRIDE = 8
MODEL = "synthetic/model"
# family: (prompt, tokens for each unit of the number named, scatter of its log length)
_FAMILIES = {
    "count": ("Count from 1 to {n}, one number per line, for child {k}.", 3.0, 0.05),
    "story": ("Write a story of about {n} words about topic {k}.", 2.5, 0.5),
    "answer": ("Is {n} larger than {k}? Answer yes or no.", 0.4, 0.6),
    "code": ("Write a Python function that handles case {k} of {n}. Code only.", 2.0, 0.4),
}


def synthetic_runs(
    *,
    num_prompts: int = 40,
    repeats: int = 3,
    cap_tokens: int = CAP_TOKENS,
    seed: int = 0,
    model: str = MODEL,
) -> list[DecodeRun]:
    """Return ``num_prompts`` * ``repeats`` runs, some cut at ``cap_tokens``."""
    return [
        run
        for number in range(num_prompts)
        for run in _runs_of_prompt(number, repeats, cap_tokens, seed, model)
    ]


def _runs_of_prompt(
    number: int, repeats: int, cap_tokens: int, seed: int, model: str
) -> Iterator[DecodeRun]:
    family = list(_FAMILIES)[number % len(_FAMILIES)]
    template, unit, scatter = _FAMILIES[family]
    rng = keyed_generator(seed, "synthetic-prompt", number)
    named = int(rng.integers(5, 60))
    prompt = template.format(n=named, k=number)
    typical = 4.0 + unit * named * float(np.exp(scatter * rng.standard_normal()))
    for repeat in range(repeats):
        noise = keyed_generator(seed, "synthetic-run", number, repeat)
        natural = max(1, int(typical * np.exp(0.08 * noise.standard_normal())))
        yield make_run(
            prompt=prompt,
            prompt_id=f"p{number}",
            family=family,
            repeat=repeat,
            natural_tokens=natural,
            cap_tokens=cap_tokens,
            model=model,
            noise=noise,
        )


def make_run(
    *,
    prompt: str,
    prompt_id: str,
    natural_tokens: int,
    family: str = "story",
    repeat: int = 0,
    cap_tokens: int = CAP_TOKENS,
    model: str = MODEL,
    noise: np.random.Generator | None = None,
) -> DecodeRun:
    """Return one run of ``natural_tokens``, cut at ``cap_tokens``."""
    output_tokens = min(natural_tokens, cap_tokens)
    stopped = natural_tokens <= cap_tokens
    key = make_request_key(
        model=model,
        prompt_sha256=sha256_text(prompt),
        chat_template_sha256=sha256_text(""),
        temperature=0.0,
        max_new_tokens=cap_tokens,
        dtype="float32",
    )
    return DecodeRun(
        run_id=f"{key[:16]}-{repeat}",
        request_key=key,
        repeat=repeat,
        prompt_id=prompt_id,
        prompt_sha256=sha256_text(prompt),
        benchmark="synthetic",
        family=family,
        model=model,
        model_revision="r1",
        tokenizer_sha256=sha256_text("tokenizer"),
        chat_template_sha256=sha256_text(""),
        engine="none",
        engine_version="0",
        kernel="none",
        batch_invariant=True,
        dtype="float32",
        device="none",
        batch_size=1,
        concurrency=1,
        temperature=0.0,
        seed=0,
        max_new_tokens=cap_tokens,
        prompt_tokens=len(prompt.split()),
        output_tokens=output_tokens,
        how_counted="drawn",
        finish_reason="stop" if stopped else "length",
        event_observed=stopped,
        licence="Apache-2.0",
        prompt=prompt,
        progress_stride=STRIDE,
        progress=_progress(natural_tokens, output_tokens, noise),
    )


def _progress(
    natural_tokens: int, output_tokens: int, noise: np.random.Generator | None
) -> tuple[ProgressRecord, ...]:
    records = []
    for index in range(output_tokens // STRIDE):
        done = (index + 1) * STRIDE / natural_tokens
        jitter = 0.0 if noise is None else 0.1 * float(noise.standard_normal())
        records.append(
            ProgressRecord(
                mean_entropy=round(max(0.0, 0.5 + done**3 + jitter), 6),
                mean_logprob=round(-0.4 - 0.3 * done, 6),
                newline_rate=0.125,
                hesitation_rate=0.0,
                repetition=round(min(1.0, 0.1 * index / 10), 6),
                in_thinking=0.0,
            )
        )
    return tuple(records)
