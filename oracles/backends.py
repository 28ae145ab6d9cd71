"""From a user's choice to a backend: endpoint, vLLM, continuous batching or static batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contracts.errors import InvalidInput, unknown_name
from oracles.backend import Backend
from oracles.continuous import ContinuousBatches, why_not_continuous
from oracles.endpoint import API_KEY_VARIABLE, UNKNOWN, Endpoint, key_headers
from oracles.generate import StaticBatches
from oracles.http_json import JsonClient
from oracles.models import BUNDLED_MODEL, LoadedModel, load_model
from oracles.offline_vllm import OfflineVllm

ENGINES = ("auto", "static", "continuous", "vllm")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which model runs where. ``engine`` auto means continuous batching on CUDA where it works,
    static batches elsewhere; ``endpoint`` (a URL) overrides it. ``dtype`` None is bfloat16 here,
    and unknown at an endpoint."""

    model: str = BUNDLED_MODEL
    engine: str = "auto"
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str = "auto"
    kv_blocks: int | None = None
    endpoint: str | None = None
    api_key_variable: str = API_KEY_VARIABLE
    timeout_s: float = 600.0
    attempts: int = 6
    batch_invariant: bool = False
    seed: int = 0
    largest_batch: int = 32


def open_backend(
    choice: EngineChoice, say: Callable[[str], None] = lambda _: None
) -> tuple[Backend, LoadedModel | None]:
    """Return the backend, and the model if it was loaded here; ``say`` hears what was chosen.

    Raises InvalidInput, MissingDependency, or CollectionStopped when an endpoint is away.
    """
    if choice.engine not in ENGINES:
        raise unknown_name("engine", choice.engine, ENGINES)
    if choice.endpoint is not None:
        return _endpoint(choice), None
    if choice.engine == "vllm":
        return _vllm(choice), None
    lm = load_model(
        choice.model,
        gguf_file=choice.gguf_file,
        revision=choice.revision,
        dtype=choice.dtype or "bfloat16",
        device=choice.device,
    )
    if not lm.tokenizer.chat_template:
        say(f"{lm.name} has no chat template: prompts are sent bare")
    if choice.engine == "continuous":
        return ContinuousBatches(lm, choice.kv_blocks), lm
    if choice.engine == "auto" and lm.model.device.type == "cuda":
        reason = why_not_continuous(lm)
        if reason is None:
            return ContinuousBatches(lm, choice.kv_blocks), lm
        say(f"static batches: {reason}")
    return StaticBatches(lm, say), lm


def _endpoint(choice: EngineChoice) -> Endpoint:
    assert choice.endpoint is not None
    if choice.model == BUNDLED_MODEL:
        raise InvalidInput(
            f"--endpoint {choice.endpoint} needs --model: the name under which the server lists it"
        )
    client = JsonClient(
        timeout_s=choice.timeout_s,
        attempts=choice.attempts,
        seed=choice.seed,
        headers=key_headers(choice.api_key_variable),
    )
    return Endpoint(
        choice.endpoint,
        choice.model,
        client,
        batch_invariant=choice.batch_invariant,
        dtype=choice.dtype or UNKNOWN,
        revision=choice.revision or UNKNOWN,
    )


def _vllm(choice: EngineChoice) -> OfflineVllm:
    return OfflineVllm(
        choice.model,
        size=choice.largest_batch,
        revision=choice.revision,
        dtype=choice.dtype or "bfloat16",
        seed=choice.seed,
    )
