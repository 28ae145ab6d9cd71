"""vLLM in this process as a backend (extra ``vllm``). Tested here against a stand-in only.

vLLM batches as it likes within ``max_num_seqs``; a plan's batch is handed over whole, so its size
is the concurrency at admission. It shows neither entropies nor hidden states of greedy runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from contracts.errors import CollectionStopped, InvalidInput, missing_dependency
from contracts.loops import loop_period
from contracts.runs import FinishReason, sha256_text
from oracles.backend import DecodeSettings, EngineFacts, Generation, Outcomes

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class OfflineVllm:
    """The backend around ``vllm.LLM``; ``size`` is the largest batch it will be given.

    VLLM_BATCH_INVARIANT=1 in the environment makes its kernels batch-invariant; rows say so.
    """

    flows = False

    def __init__(
        self,
        model: str,
        *,
        size: int,
        revision: str | None = None,
        dtype: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        try:
            import vllm
        except ImportError:
            raise missing_dependency("vllm", "vllm", "collect --engine vllm") from None
        self._vllm = vllm
        try:
            self._llm = vllm.LLM(
                model=model, revision=revision, dtype=dtype, max_num_seqs=size, seed=seed
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(f"vLLM cannot load {model!r}: {error}") from error
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._context_tokens = int(self._llm.llm_engine.model_config.max_model_len)
        self.facts = EngineFacts(
            model=model,
            model_revision=revision or "unpinned",
            tokenizer_sha256=_tokenizer_sha256(self._tokenizer),
            chat_template_sha256=sha256_text(self._tokenizer.chat_template or ""),
            engine="vllm",
            engine_version=str(vllm.__version__),
            kernel=os.environ.get("VLLM_ATTENTION_BACKEND", "vLLM's choice"),
            batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT") == "1",
            dtype=dtype,
            device=str(vllm.platforms.current_platform.get_device_name()),
        )

    def check(self, settings: DecodeSettings) -> None:
        """Raise InvalidInput for what vLLM cannot do."""
        if settings.hidden_layers or settings.stop_loops:
            raise InvalidInput(
                "vLLM shows no hidden states and is not stopped at loops: leave out "
                "--hidden-layers and --stop-loops, or take --engine static"
            )

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:
        """Say why ``prompt`` does not fit the context; None when it does."""
        needed = len(self._ids(prompt)) + max_new_tokens
        if needed <= self._context_tokens:
            return None
        return f"prompt and cap need {needed} tokens; the context is {self._context_tokens}"

    def run(
        self,
        prompts: Sequence[str],
        size: int,
        settings: DecodeSettings,
    ) -> Outcomes:
        """Yield the outcome of every prompt once all have ended."""
        how = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=settings.max_new_tokens, seed=settings.seed
        )
        for start in range(0, len(prompts), size):
            part = [{"prompt_token_ids": self._ids(p)} for p in prompts[start : start + size]]
            try:
                answers = self._llm.generate(part, how, use_tqdm=False)
            except RuntimeError as error:  # vLLM's engine errors, out of memory among them
                raise CollectionStopped(
                    f"vLLM stopped: {error}; finished runs are safe, the same command goes on"
                ) from error
            for index, answer in enumerate(answers, start):
                yield index, _generation(answer, len(part))

    def _ids(self, prompt: str) -> list[int]:
        if not self._tokenizer.chat_template:
            return [int(i) for i in self._tokenizer(prompt)["input_ids"]]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def _generation(answer: Any, concurrency: int) -> Generation:
    output = answer.outputs[0]
    ids = [int(token) for token in output.token_ids]
    reason = _REASONS.get(str(output.finish_reason), "unknown")
    if reason == "length" and loop_period(ids) is not None:
        reason = "loop"
    return Generation(
        prompt_tokens=len(answer.prompt_token_ids),
        output_tokens=max(len(ids), 1),
        thinking_tokens=None,
        finish_reason=reason,
        text=str(output.text),
        wall_s=None,
        concurrency=concurrency,
        how_counted="vLLM token ids",
    )


def _tokenizer_sha256(tokenizer: Any) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
