"""Pretrained encoders: a text to one vector, for the families that read words.

An encoder is named, never stored: a checkpoint keeps the name and a digest of the weights, and an
encoder that differs is refused. ``bundled:`` names come from packages that ship their weights
(:mod:`traces.bundled_models`); anything else is a Hugging Face id or a local folder with
safetensors weights. Texts go through one at a time, so that a vector depends on its text alone, and
vectors are kept. torch and transformers load inside functions.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, missing_dependency, unknown_name
from contracts.policy import FloatArray
from traces.bundled_models import MINILM, SMOLLM2, smollm2_file, unpack_minilm

POOLINGS = ("mean", "last", "entropy")
_KEPT_VECTORS = 50_000
_MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Which encoder, and how its states become a vector: those of ``layer`` (-1: the last) are
    averaged (``mean``), taken at the last token (``last``), or averaged with softmax weights of the
    entropy of the next-token law (``entropy``; language models only). Of a longer text the
    beginning is read, ``max_tokens``, or the end where the newest words count (``keep_end``)."""

    model: str = MINILM
    layer: int = -1
    pooling: str = "mean"
    max_tokens: int = 256
    keep_end: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise unknown_name("pooling", self.pooling, POOLINGS)
        if not self.model or not 1 <= self.max_tokens <= _MAX_TOKENS:
            raise InvalidInput(
                f"encoder {self.model!r} with max_tokens {self.max_tokens}: name one, and read 1 "
                f"to {_MAX_TOKENS} tokens"
            )


class Encoder:
    """A loaded encoder; ``width`` numbers a text."""

    def __init__(self, how: EncoderSettings, tokenizer: Any, model: Any) -> None:
        self.how, self.tokenizer, self.model = how, tokenizer, model
        config = model.config.get_text_config()
        self.width, layers = int(config.hidden_size), int(config.num_hidden_layers)
        if not -layers - 1 <= how.layer <= layers:
            raise InvalidInput(
                f"layer {how.layer} of {how.model} does not exist: choose 0 (embeddings) to "
                f"{layers}, or -1 for the last"
            )
        if how.pooling == "entropy" and model.get_output_embeddings() is None:
            raise InvalidInput(
                f"{how.model} predicts no next token, so entropy pooling has no entropies: take a "
                f"language model such as {SMOLLM2}, or pooling mean"
            )
        self._kept: dict[str, FloatArray] = {}
        self._digest = ""

    def vectors(self, texts: Sequence[str]) -> FloatArray:
        """Return (n, width), each of mean square 1; zeros for an empty text."""
        out = np.zeros((len(texts), self.width))
        for row, text in enumerate(texts):
            if text not in self._kept:
                if len(self._kept) >= _KEPT_VECTORS:
                    self._kept.clear()
                self._kept[text] = self._vector(text)
            out[row] = self._kept[text]
        return out

    def ids(self, text: str) -> list[int]:
        """Return the token ids that are read of ``text``."""
        side = "left" if self.how.keep_end else "right"
        limit = getattr(self.model.config, "max_position_embeddings", None) or _MAX_TOKENS
        self.tokenizer.truncation_side = side
        clean = text.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
        found = self.tokenizer(
            clean, truncation=True, max_length=min(self.how.max_tokens, int(limit))
        )
        return [int(i) for i in found["input_ids"]]

    def pooled(self, ids: Any, mask: Any) -> Any:
        """Return the vectors (n, width) of token ids (n, t) and their mask, as a torch tensor."""
        import torch

        out = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = out.hidden_states[self.how.layer].float()
        weight = mask.float()
        if self.how.pooling == "last":
            last = mask.sum(1) - 1
            weight = torch.nn.functional.one_hot(last, mask.shape[1]).float()
        elif self.how.pooling == "entropy":
            logprobs = out.logits.float().log_softmax(-1)
            entropy = torch.special.entr(logprobs.exp()).sum(-1)
            weight = entropy.masked_fill(mask == 0, -torch.inf).softmax(-1)
        vector = (states * weight[:, :, None]).sum(1) / weight.sum(1, keepdim=True)
        return torch.nn.functional.normalize(vector, dim=-1) * self.width**0.5

    def _vector(self, text: str) -> FloatArray:
        import torch

        if not (ids := self.ids(text)):
            return np.zeros(self.width)
        with torch.inference_mode():
            row = torch.tensor([ids], device=self.model.device)
            vector: FloatArray = self.pooled(row, torch.ones_like(row))[0].cpu().double().numpy()
        return vector

    def digest(self) -> str:
        """Return the SHA-256 of the weights, by name."""
        if not self._digest:
            digest = hashlib.sha256()
            for name, value in sorted(self.model.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
            self._digest = digest.hexdigest()
        return self._digest

    def tuned(self, weights: Mapping[str, np.ndarray]) -> Encoder:
        """Return this encoder with other ``weights``; raises InvalidInput where they do not fit."""
        import copy

        import torch

        model = copy.deepcopy(self.model)
        try:
            model.load_state_dict({name: torch.as_tensor(w) for name, w in weights.items()})
        except RuntimeError as error:
            raise InvalidInput(
                f"the tuned weights do not fit {self.how.model}: {str(error).splitlines()[0]}"
            ) from None
        return Encoder(self.how, self.tokenizer, model)


@lru_cache(maxsize=4)
def load_encoder(how: EncoderSettings) -> Encoder:
    """Load an encoder in float32 on the CPU; the same object for the same settings.

    Raises MissingDependency without transformers or the package of a bundled name, InvalidInput
    for a model that cannot be loaded.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise missing_dependency(error.name or "torch", "train", "a text encoder") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM if how.pooling == "entropy" else transformers.AutoModel
    with tempfile.TemporaryDirectory() as scratch:
        place, gguf = how.model, None
        if how.model == SMOLLM2:
            place, gguf = str(smollm2_file().parent), smollm2_file().name
        elif how.model == MINILM:
            place = str(unpack_minilm(Path(scratch)))
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=gguf)
            model = kind.from_pretrained(
                place, dtype=torch.float32, gguf_file=gguf, use_safetensors=gguf is None
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidInput(
                f"encoder {how.model!r} cannot be loaded: {said[0]}; give {MINILM}, {SMOLLM2}, a "
                "Hugging Face id or a folder with config.json and safetensors weights"
            ) from None
    return Encoder(how, tokenizer, model)


def checked_encoder(how: EncoderSettings, digest: str) -> Encoder:
    """Return the encoder; raises InvalidInput when its weights are not those of ``digest``."""
    encoder = load_encoder(how)
    if encoder.digest() != digest:
        raise InvalidInput(
            f"encoder {how.model!r} has other weights than the ones the checkpoint was trained "
            "with: use the same release of it, or train again"
        )
    return encoder


def encoder_from(value: object) -> EncoderSettings:
    """Return the encoder settings that a checkpoint wrote; raises InvalidInput."""
    kinds = {name: type(default) for name, default in asdict(EncoderSettings()).items()}
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise InvalidInput(f"encoder must be a table of {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind:
            raise InvalidInput(f"encoder.{name} is {value[name]!r}: it must be {kind.__name__}")
    return EncoderSettings(**value)
