"""Splits by prompt, never by run: no prompt, and no near-copy of one, stands on both sides.

Prompts are joined into groups first (same text hash, same text after normalisation, same id in
one benchmark); a group moves as a whole. Which side it goes to is keyed by the seed and the
group's own content, so the order of rows is irrelevant.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from contracts.errors import InvalidInput, LeakageError, unknown_name
from contracts.randomness import keyed_uniform
from contracts.runs import DecodeRun
from traces.runlog import PromptRow, RunLog


class Split(NamedTuple):
    """Two logs that share no prompt."""

    train: RunLog
    test: RunLog


class _Group(NamedTuple):
    """Prompts that must stay together. ``key`` is their smallest text hash."""

    key: str
    family: str
    prompts: tuple[PromptRow, ...]


def normalise_prompt(text: str) -> str:
    """Return ``text`` with case, punctuation and runs of white space made alike (NFKC)."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = (" " if unicodedata.category(c)[0] in "PSZC" else c for c in folded)
    return " ".join("".join(letters).split())


def split_runs(
    log: RunLog,
    *,
    test_share: float = 0.2,
    seed: int = 0,
    holdout_families: Collection[str] = (),
) -> Split:
    """Split a log by prompt: held-out families, plus ``test_share`` of the other prompts, test.

    Every family gives about its share. A family's near-copies in other families follow it.
    Raises InvalidInput when a side would be empty, UnknownName for a family the log lacks.
    """
    if not 0.0 <= test_share < 1.0:
        raise InvalidInput(f"test_share is {test_share}: it must be at least 0 and below 1")
    groups = _groups(log.prompts(), _within_benchmark)
    families = {row.family for group in groups for row in group.prompts}
    for family in holdout_families:
        if family not in families:
            raise unknown_name("family", family, families)
    held = [g for g in groups if any(row.family in holdout_families for row in g.prompts)]
    held_keys = {group.key for group in held}
    rest = _stratified([group for group in groups if group.key not in held_keys], seed, "split")
    offset = keyed_uniform(seed, "split-offset")
    # the running total of test groups steps up whenever (i + offset) * share passes an integer
    steps = np.floor((np.arange(len(rest) + 1) + offset) * test_share)
    chosen = held + [rest[i] for i in np.flatnonzero(np.diff(steps)).tolist()]
    test_hashes = {row.prompt_sha256 for group in chosen for row in group.prompts}
    codes, names = log.codes("prompt_sha256")
    in_test = np.array([name in test_hashes for name in names], dtype=bool)[codes]
    if in_test.all() or not in_test.any():
        side = "train" if in_test.all() else "test"
        raise InvalidInput(
            f"the {side} side of the split is empty ({len(groups)} groups of prompts, test_share "
            f"{test_share}, {len(held)} held out): use more prompts or another share"
        )
    split = Split(log.filter(~in_test), log.filter(in_test))
    assert_no_leak(split.train, split.test)
    return split


def crossfit_folds(
    runs: RunLog | Iterable[DecodeRun], *, num_folds: int = 5, seed: int = 0
) -> dict[str, int]:
    """Return the fold of each prompt_id; folds are even within a family and over all.

    Prompts that share a prompt_id go together, whatever their benchmark, because the map is keyed
    by it. Raises InvalidInput when there are fewer groups of prompts than folds.
    """
    groups = _groups(_prompts_of(runs), _by_id)
    if not 2 <= num_folds <= len(groups):
        raise InvalidInput(
            f"num_folds is {num_folds}: it must be at least 2 and at most {len(groups)}, the "
            "number of groups of prompts"
        )
    ordered = _stratified(groups, seed, "folds")
    return {
        row.prompt_id: index % num_folds
        for index, group in enumerate(ordered)
        for row in group.prompts
    }


def assert_no_leak(train: RunLog | Iterable[DecodeRun], test: RunLog | Iterable[DecodeRun]) -> None:
    """Raise LeakageError when a prompt, or a near-copy of one, stands on both sides."""
    ours, theirs = _prompts_of(train), _prompts_of(test)
    for what, key_of in (("prompt_sha256", _hash), ("normalised prompt", _text)):
        seen = {key: row for row in ours if (key := key_of(row)) is not None}
        for row in theirs:
            if (key := key_of(row)) in seen:
                raise LeakageError(
                    f"prompt {row.prompt_id!r} of benchmark {row.benchmark!r} is in test, and "
                    f"{seen[key].prompt_id!r} with the same {what} is in train: split by prompt "
                    "with traces.split.split_runs"
                )


def _prompts_of(runs: RunLog | Iterable[DecodeRun]) -> list[PromptRow]:
    if isinstance(runs, RunLog):
        return runs.prompts()
    rows = (
        PromptRow(run.prompt_id, run.prompt_sha256, run.benchmark, run.family, run.prompt)
        for run in runs
    )
    return list(dict.fromkeys(rows))


def _hash(row: PromptRow) -> Hashable:
    return row.prompt_sha256


def _text(row: PromptRow) -> Hashable:
    """Return the normalised text; None when it is absent or holds no letter or digit."""
    return (normalise_prompt(row.prompt) or None) if row.prompt else None


def _by_id(row: PromptRow) -> Hashable:
    return row.prompt_id


def _within_benchmark(row: PromptRow) -> Hashable:
    return row.benchmark, row.prompt_id


def _groups(prompts: list[PromptRow], id_of: Callable[[PromptRow], Hashable]) -> list[_Group]:
    """Join prompts that share a hash, a normalised text or an id, directly or through others."""
    parent = list(range(len(prompts)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for key_of in (_hash, _text, id_of):
        first: dict[Hashable, int] = {}
        for i, row in enumerate(prompts):
            if (key := key_of(row)) is not None:
                parent[root(i)] = root(first.setdefault(key, i))
    members: dict[int, list[PromptRow]] = {}
    for i, row in enumerate(prompts):
        members.setdefault(root(i), []).append(row)
    return [
        _Group(min(r.prompt_sha256 for r in rows), min(r.family for r in rows), tuple(rows))
        for rows in members.values()
    ]


def _stratified(groups: list[_Group], seed: int, purpose: str) -> list[_Group]:
    """Order groups family by family, at random (keyed) inside each: counting along is even."""

    def place(group: _Group) -> tuple[float, str, float, str]:
        family_draw = keyed_uniform(seed, purpose, "family", group.family)
        return family_draw, group.family, keyed_uniform(seed, purpose, group.key), group.key

    return sorted(groups, key=place)
