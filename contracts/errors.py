"""One exception family. Every message names the value, the bound it broke and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PreemptBenchError(Exception):
    """Base of every error this project raises on purpose; catch it to catch them all."""


class InvalidInput(PreemptBenchError):
    """A file, table, argument or configuration that breaks a stated rule."""


class UnknownName(InvalidInput):
    """A name that no registry holds. Build it with :func:`unknown_name`."""


class LeakageError(PreemptBenchError):
    """Truth and signal share a run, or a prompt crosses a split."""


class CheckpointError(InvalidInput):
    """A checkpoint folder that is damaged, incomplete or of another version."""


class NoProgressError(PreemptBenchError):
    """The engine ran many steps without completing a token; the message holds the diagnosis."""


class LawViolation(PreemptBenchError):
    """An invariant of the engine or of a score failed; a bug in this project or in a plug-in."""


class ConformanceError(PreemptBenchError):
    """A policy, predictor or oracle breaks its contract."""


class PolicyRaised(ConformanceError):
    """A policy of the user's own raised while it was asked; it may do so in one run only."""


class CollectionStopped(PreemptBenchError):
    """A collection that cannot go on now (disk full, no memory, server away); what was finished is
    on disk, and the same command goes on."""


class MissingDependency(PreemptBenchError):
    """A package of an extra that is not installed. Build it with :func:`missing_dependency`."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UnknownName:
    """Return the error for an unknown ``name``, offering the nearest of ``choices``."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownName(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(known)}")


def missing_dependency(package: str, extra: str, needed_for: str) -> MissingDependency:
    """Return the error for an absent optional ``package`` and the extra that installs it."""
    return MissingDependency(
        f"{needed_for} needs the package {package!r}, which is not installed: "
        f"install the extra, pip install 'preemptbench[{extra}]'"
    )
