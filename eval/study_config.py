"""What a study is: its settings, and the sources of its lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import InvalidInput
from eval.intervals import look_alphas
from serving_sim.config import EngineConfig
from traces.deadlines import DeadlineClass

BASELINE = "lifo"
ALPHA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a column of the study has its lengths from: a run log of one model family on one
    benchmark, and the checkpoints that answer for it (name -> folder). ``kind`` says what the log
    is: "parametric", "sampled" or "temperature zero". With ``allow_mismatch``, checkpoints trained
    for another model answer too, and results say so."""

    model_family: str
    benchmark: str
    runs: Path
    kind: str
    checkpoints: tuple[tuple[str, Path], ...] = ()
    allow_mismatch: bool = False

    @property
    def name(self) -> str:
        """The family and the benchmark."""
        return f"{self.model_family} on {self.benchmark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """What a study is. Times in seconds.

    ``pressures`` are KV demands relative to that at which LIFO's breach on pilot seeds crosses
    ``boundary`` (1 is there, 0.8 has a quarter more KV). ``concurrency`` is how many requests would
    run on average if each ran alone; it sets the rate. Requests are watched for ``observe_s``, so
    that records can be rescored up to there. ``margin_pp`` is the equivalence margin; by
    default min(1, a tenth of LIFO's breach in the regime on pilot seeds). With ``deadline_classes``
    each request is due at the deadline of its class, and ``deadline_s`` is not used. ``looks`` are
    the numbers of seeds at which the study may stop (eval.study_looks), ``num_seeds`` one of them.
    """

    name: str
    policies: tuple[str, ...]
    signals: tuple[str, ...]
    pressures: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1, 1.25)
    num_seeds: int = 20
    num_pilots: int = 5
    boundary: float = 0.15
    deadline_s: float = 900.0
    observe_s: float = 1800.0
    concurrency: float = 64.0
    num_warmup: int = 150
    num_tagged: int = 200
    arrival_cv: float = 1.0
    grid_stride: int = 64
    margin_pp: float | None = None
    looks: tuple[int, ...] = ()
    deadline_classes: tuple[DeadlineClass, ...] = ()
    profile: str = "rtx4090-llama-3.1-8b"
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(num_blocks=2))

    def __post_init__(self) -> None:
        if BASELINE not in self.policies:
            raise InvalidInput(
                f"the policies are {', '.join(self.policies)}: every comparison is with "
                f"{BASELINE}, so add it"
            )
        if self.num_seeds < 2:
            raise InvalidInput(
                f"num_seeds is {self.num_seeds}: a difference needs at least 2 seeds, and a "
                "two-sided p below .05 at least 6"
            )
        if self.num_pilots < 1:
            raise InvalidInput(f"num_pilots is {self.num_pilots}: the regime needs at least 1")
        if not self.pressures or min(self.pressures) <= 0:
            raise InvalidInput(f"pressures are {self.pressures}: give numbers above 0")
        if not 0 < self.boundary < 1:
            raise InvalidInput(f"boundary is {self.boundary}: it must be a share in (0, 1)")
        if self.looks and self.num_seeds not in self.looks:
            raise InvalidInput(
                f"num_seeds is {self.num_seeds}, but looks are planned at {self.looks}: give one "
                "of them, the last to begin with"
            )
        if self.looks:
            look_alphas(self.looks)  # refuses what does not rise

    @property
    def alpha(self) -> float:
        """The level of the verdicts: 5 %, or the share of it that the look at ``num_seeds`` has."""
        if not self.looks:
            return ALPHA
        return look_alphas(self.looks, ALPHA)[self.looks.index(self.num_seeds)]


def deadline_text(config: StudyConfig) -> str:
    """Return the deadline in words: one for all, or each class with its own."""
    classes = config.deadline_classes
    if not classes:
        return f"{config.deadline_s:g} s"
    return ", ".join(f"{c.deadline_s:g} s for {c.share:.0%} ({c.name})" for c in classes)


def source_folder(source: Source, out_dir: Path) -> Path:
    """Return the folder of the tasks of ``source``."""
    return out_dir / "sources" / re.sub(r"[^\w.-]", "-", source.name)
