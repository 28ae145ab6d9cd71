"""Which model is timed: a named shape, a config.json, or the config behind a Hugging Face id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, missing_dependency, unknown_name
from traces.safe_json import read_json

# From the models' config.json files on the hub. How rotary angles are scaled is left out: it
# changes values, not times.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "deepseek-r1-distill-qwen-7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "tiny-llama": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


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
    if model in SHAPES:
        return SHAPES[model]
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
