"""A run log as an oracle holds it: a few bytes a run, filled in one streaming pass.

Names become 64-bit hashes and runs become array entries, so ten million runs fit in well under
2 GB. Which request a run belongs to, how long it was, whether it was seen to end: nothing else of
a run is kept.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contracts.errors import InvalidInput
from contracts.policy import IntArray
from contracts.runs import DecodeRun
from traces.runlog import iter_tables

HashArray = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]

NEAR_DUPLICATE_RULE = (
    "Two prompts of one model are near-duplicates when they agree after Unicode NFKC and case "
    "folding, with runs of white space as one space and sentence punctuation at either end of a "
    "word dropped. Digits are kept: a number in a prompt often sets the length of its answer."
)
_EDGE_PUNCTUATION = ".,;:!?\"'`()[]{}…“”„‘’«»¿¡"
_TEXTS = (
    "run_id", "request_key", "prompt_sha256", "benchmark", "family", "model", "prompt",
    "tokenizer_sha256", "text_sha256",
)  # fmt: skip
_NUMBERS = ("repeat", "output_tokens", "max_new_tokens", "temperature")
_FLAGS = ("event_observed", "batch_invariant")
_CHUNK_RUNS = 65_536
_HASH_BYTES = 8
_LOW = (1 << 32) - 1


class RequestKeys(NamedTuple):
    """What names a request at each level of the ladder, as 64-bit hashes."""

    request: int
    near: int
    family: int
    model: int


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a log says of its decoding set-up, over all runs.

    ``caps`` and ``tokenizers`` are the distinct values by model; ``temperatures`` and
    ``batch_invariant`` the distinct values of the log.
    """

    caps: Mapping[str, tuple[int, ...]]
    tokenizers: Mapping[str, tuple[str, ...]]
    temperatures: tuple[float, ...]
    batch_invariant: tuple[bool, ...]

    @property
    def is_sampled(self) -> bool:
        """Whether some run was drawn at a temperature above zero."""
        return any(temperature > 0.0 for temperature in self.temperatures)


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Runs as columns: ``request_of`` (n,) int32 indexes the requests; ``text_hash`` is 0 without
    a text. ``keys`` (p, 4) uint64 holds :class:`RequestKeys`, ``prompt_hash`` (p,) the prompts."""

    keys: HashArray
    prompt_hash: HashArray
    request_of: NDArray[np.int32]
    repeat: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    event_observed: BoolArray
    run_hash: HashArray
    text_hash: HashArray
    facts: LogFacts

    def __len__(self) -> int:
        return len(self.request_of)

    @property
    def num_requests(self) -> int:
        """How many distinct requests ran."""
        return len(self.keys)

    def runs_per_request(self) -> IntArray:
        """Return K (p,) of each request."""
        return np.bincount(self.request_of, minlength=self.num_requests).astype(np.int64)

    def take(self, mask: BoolArray) -> RunTable:
        """Return the runs where ``mask`` (n,) is True, and the requests they belong to."""
        kept, request_of = np.unique(self.request_of[mask], return_inverse=True)
        return replace(
            self,
            keys=self.keys[kept],
            prompt_hash=self.prompt_hash[kept],
            request_of=request_of.reshape(-1).astype(np.int32),
            repeat=self.repeat[mask],
            output_tokens=self.output_tokens[mask],
            event_observed=self.event_observed[mask],
            run_hash=self.run_hash[mask],
            text_hash=self.text_hash[mask],
        )


def read_run_table(path: Path) -> RunTable:
    """Read a run log (a Parquet file or a folder of them) in one pass, one batch at a time."""
    builder = _Builder()
    for _, _, table in iter_tables(path, (*_TEXTS, *_NUMBERS, *_FLAGS)):
        columns: dict[str, Any] = {}
        for name in _TEXTS:
            column = table[name].combine_chunks()
            codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            columns[name] = _in_use(codes, column.dictionary)
        for name in _NUMBERS:
            columns[name] = table[name].to_numpy()
        for name in _FLAGS:  # an unknown ending may have been a cut: it counts as one
            columns[name] = table[name].fill_null(False).to_numpy()
        builder.add(columns)
    return builder.finish()


def run_table(runs: Iterable[DecodeRun]) -> RunTable:
    """Return the table of ``runs``; raises InvalidInput without any."""
    builder = _Builder()
    source = iter(runs)
    while chunk := list(islice(source, _CHUNK_RUNS)):
        columns: dict[str, Any] = {}
        for name in _TEXTS:
            values = list(map(attrgetter(name), chunk))
            names = list(dict.fromkeys(value for value in values if value is not None))
            rank = {value: code for code, value in enumerate(names)}
            columns[name] = np.array([rank.get(value, -1) for value in values]), names
        for name in _NUMBERS:
            columns[name] = np.array([getattr(run, name) for run in chunk])
        for name in _FLAGS:
            columns[name] = np.array([getattr(run, name) is True for run in chunk])
        builder.add(columns)
    return builder.finish()


def hash64(text: str) -> int:
    """Return a 64-bit hash of ``text``, the same in every process."""
    return int.from_bytes(_digest(text), "big")


def normalised_prompt(prompt: str) -> str:
    """Return ``prompt`` as :data:`NEAR_DUPLICATE_RULE` compares it."""
    words = unicodedata.normalize("NFKC", prompt).casefold().split()
    return " ".join(filter(None, (word.strip(_EDGE_PUNCTUATION) for word in words)))


def request_keys(
    *, request_key: str, prompt: str | None, prompt_sha256: str, model: str, benchmark: str,
    family: str,
) -> RequestKeys:  # fmt: skip
    """Return the keys of a request; without a prompt text only an equal prompt is near."""
    near = prompt_sha256 if prompt is None else normalised_prompt(prompt)
    return RequestKeys(
        request=hash64(request_key),
        near=hash64(f"{model}\x1f{near}"),
        family=hash64("\x1f".join((model, benchmark, family))),
        model=hash64(model),
    )


@dataclass(slots=True)
class _Builder:
    """Collects batches; each text is hashed once a batch and each request looked at once."""

    index: dict[int, int] = field(default_factory=dict)
    keys: list[RequestKeys] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    caps: dict[str, set[int]] = field(default_factory=dict)
    tokenizers: dict[str, set[str]] = field(default_factory=dict)
    temperatures: set[float] = field(default_factory=set)
    invariant: set[bool] = field(default_factory=set)

    def add(self, columns: Mapping[str, Any]) -> None:
        """Take a batch: (codes, names) for texts, arrays for the rest."""
        codes, names = columns["request_key"]
        present, first = np.unique(codes, return_index=True)
        slots = np.zeros(len(names), dtype=np.int32)
        for code, row in zip(present.tolist(), first.tolist(), strict=True):
            slots[code] = self._request(columns, row)
        self.parts.append(
            (
                slots[codes],
                columns["repeat"].astype(np.int32),
                columns["output_tokens"].astype(np.int32),
                columns["event_observed"].astype(bool),
                _hashes(*columns["run_id"]),
                _hashes(*columns["text_sha256"]),
            )
        )
        self._note(columns)

    def _request(self, columns: Mapping[str, Any], row: int) -> int:
        texts: dict[str, Any] = {}
        for name in ("request_key", "prompt", "prompt_sha256", "model", "benchmark", "family"):
            codes, names = columns[name]
            texts[name] = names[codes[row]] if codes[row] >= 0 else None
        own = hash64(texts["request_key"])
        slot = self.index.get(own)
        if slot is None:
            slot = self.index[own] = len(self.keys)
            self.keys.append(request_keys(**texts))
            self.prompts.append(hash64(texts["prompt_sha256"]))
        return slot

    def _note(self, columns: Mapping[str, Any]) -> None:
        models, model_names = columns["model"]
        tokenizers, tokenizer_names = columns["tokenizer_sha256"]
        for values, names, noted in (
            (columns["max_new_tokens"], None, self.caps),
            (tokenizers, tokenizer_names, self.tokenizers),
        ):
            pairs = np.unique((models.astype(np.int64) << 32) | values)
            for model, value in zip((pairs >> 32).tolist(), (pairs & _LOW).tolist(), strict=True):
                told: Any = value if names is None else names[value]
                noted.setdefault(model_names[model], set()).add(told)
        self.temperatures |= set(np.unique(columns["temperature"]).tolist())
        self.invariant |= set(np.unique(columns["batch_invariant"]).tolist())

    def finish(self) -> RunTable:
        """Return the table of everything added."""
        if not self.parts:
            raise InvalidInput("an oracle needs at least one decode run; the run log is empty")
        request_of, repeat, output_tokens, event_observed, run_hash, text_hash = (
            np.concatenate([part[place] for part in self.parts])
            for place in range(len(self.parts[0]))
        )
        return RunTable(
            keys=np.array(self.keys, dtype=np.uint64),
            prompt_hash=np.array(self.prompts, dtype=np.uint64),
            request_of=request_of,
            repeat=repeat,
            output_tokens=output_tokens,
            event_observed=event_observed,
            run_hash=run_hash,
            text_hash=text_hash,
            facts=LogFacts(
                caps={model: tuple(sorted(caps)) for model, caps in sorted(self.caps.items())},
                tokenizers={m: tuple(sorted(t)) for m, t in sorted(self.tokenizers.items())},
                temperatures=tuple(sorted(self.temperatures)),
                batch_invariant=tuple(sorted(self.invariant)),
            ),
        )


def _in_use(codes: IntArray, names: Any) -> tuple[IntArray, list[str]]:
    """Return codes and names without the names no code points to: a batch carries the dictionary
    of its whole row group."""
    used = np.zeros(len(names) + 1, dtype=bool)
    used[codes] = True
    kept = np.flatnonzero(used[:-1])
    rank = np.full(len(names) + 1, -1, dtype=np.int64)
    rank[kept] = np.arange(len(kept))
    return rank[codes], names.take(kept).to_pylist()


def _hashes(codes: IntArray, names: Sequence[str]) -> HashArray:
    """Return hash64 of each row's text (n,), 0 where it has none (code -1)."""
    joined = b"".join(_digest(name) for name in names) + bytes(_HASH_BYTES)
    table = np.frombuffer(joined, dtype=">u8")
    return np.asarray(table[codes], dtype=np.uint64)  # -1 reads the last


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest()
