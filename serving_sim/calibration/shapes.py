"""Which model is timed: a named shape, a config.json, or the config behind a Hugging Face id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, missing_dependency, unknown_name
from serving_sim.models import MODELS, Architecture
from traces.safe_json import read_json

# model_type of transformers and the longest context, beside the sizes in serving_sim/models.py and
# from the same files. How rotary angles are scaled is left out: it changes no time.
_PUBLISHED: Mapping[str, tuple[str, int]] = {
    "Llama-3.1-8B": ("llama", 131_072),
    "Llama-2-70B": ("llama", 4096),
    "Qwen3-8B": ("qwen3", 40_960),
    "Qwen3-32B": ("qwen3", 40_960),
    "Qwen3-30B-A3B": ("qwen3_moe", 40_960),
    "DeepSeek-R1-Distill-Qwen-7B": ("qwen2", 131_072),
}


def _config(architecture: Architecture, model_type: str, max_context: int) -> dict[str, Any]:
    """Return the config.json of a published model, as far as it matters for time."""
    experts = {
        "moe_intermediate_size": architecture.intermediate,
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.experts_per_token,
    }
    return {
        "model_type": model_type,
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.hidden,
        "intermediate_size": architecture.intermediate,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": architecture.tied_head,
        **(experts if architecture.num_experts else {}),
    }


TINY = "tiny-llama"
_TINY = Architecture(2, 64, 4, 2, 16, 128, 256)  # for trials on a CPU
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **{name.lower(): _config(MODELS[name], *rest) for name, rest in _PUBLISHED.items()},
    TINY: _config(_TINY, "llama", 4096),
}
"""Configs of the named models, in lower case; for use with random weights."""


def published_name(model: str) -> str:
    """Return the name a model was published under, for a name in :data:`SHAPES`."""
    return {name.lower(): name for name in _PUBLISHED}.get(model.lower(), model)


def read_config(model: str) -> Any:
    """Return the transformers config of ``model``: a name in :data:`SHAPES`, a JSON file or folder
    with config.json, or a Hugging Face id (of which the config alone is fetched).

    Raises InvalidInput for an unknown architecture or a config that transformers refuses.
    """
    try:
        import transformers
        from huggingface_hub.errors import HFValidationError, StrictDataclassError
    except ImportError as error:
        raise missing_dependency(error.name or "transformers", "collect", "calibrate") from None
    transformers.utils.logging.set_verbosity_error()
    try:
        if (data := _local_config(model)) is None:
            return transformers.AutoConfig.from_pretrained(model)
        return _from_mapping(dict(data), model)
    except (OSError, HFValidationError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"model {model!r} has no config that can be read: {said}; give a folder with "
            f"config.json, a Hugging Face id, or one of {', '.join(SHAPES)}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"model {model!r}: transformers refuses its config: {said}") from None


def _local_config(model: str) -> Mapping[str, Any] | None:
    """Return the config of a named shape or a path; None for what can only be a hub's id."""
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InvalidInput(
                f"model folder {model} holds no config.json: name a folder that does, or the file"
            )
    if path.is_file() or model.endswith(".json"):
        return read_json(path)
    if "/" not in model or model.startswith(("/", ".")):
        raise unknown_name("model", model, SHAPES)
    return None


def _from_mapping(data: dict[str, Any], model: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = data.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise unknown_name(f"architecture (model_type) in {model}", str(kind), CONFIG_MAPPING)
    return CONFIG_MAPPING[kind].from_dict(data)


def config_sha256(config: Any) -> str:
    """Return the fingerprint of a transformers config."""
    data = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("transformers_version", "_name_or_path")
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
