"""The predictor families, by name. A new family is its own file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contracts.errors import unknown_name
from predictors.age_km import AgeKm, AgeKmSettings
from predictors.base import Predictor, TrainingSet
from predictors.calibrated import Calibrated
from predictors.checkpoint import read_checkpoint
from predictors.conformal import table_from_json
from predictors.countdown import Countdown, CountdownSettings
from predictors.entropy_pool import EntropyPool, EntropyPoolSettings
from predictors.fused import Fused, FusedSettings
from predictors.gbm_hazard import GbmHazard, GbmHazardSettings
from predictors.gbm_rank import GbmRank, GbmRankSettings
from predictors.gru_progress import GruProgress, GruProgressSettings
from predictors.log_t import LogT, LogTSettings
from predictors.past_future import PastFuture, PastFutureSettings
from predictors.probe import Probe, ProbeSettings
from predictors.prompt_encoder import PromptEncoder, PromptEncoderSettings
from predictors.text_progress import TextProgress, TextProgressSettings


class FamilySettings(Protocol):
    """The settings of a family: a frozen dataclass that checks itself and can fit."""

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> Predictor: ...


@dataclass(frozen=True, slots=True)
class Family:
    """What a family is: the predictor it loads, and the settings that fit one."""

    predictor: type[Predictor]
    settings: type[FamilySettings]


FAMILIES: Mapping[str, Family] = {
    AgeKm.family: Family(AgeKm, AgeKmSettings),
    Countdown.family: Family(Countdown, CountdownSettings),
    EntropyPool.family: Family(EntropyPool, EntropyPoolSettings),
    Fused.family: Family(Fused, FusedSettings),
    GbmHazard.family: Family(GbmHazard, GbmHazardSettings),
    GbmRank.family: Family(GbmRank, GbmRankSettings),
    GruProgress.family: Family(GruProgress, GruProgressSettings),
    LogT.family: Family(LogT, LogTSettings),
    PastFuture.family: Family(PastFuture, PastFutureSettings),
    Probe.family: Family(Probe, ProbeSettings),
    PromptEncoder.family: Family(PromptEncoder, PromptEncoderSettings),
    TextProgress.family: Family(TextProgress, TextProgressSettings),
}


def find_family(name: str) -> Family:
    """Return a family by name; raises UnknownName offering the nearest."""
    if name not in FAMILIES:
        raise unknown_name("predictor family", name, FAMILIES)
    return FAMILIES[name]


def load_predictor(folder: Path | str) -> Predictor:
    """Load the predictor of a checkpoint folder, whichever family it is, with its calibration;
    raises CheckpointError when it is damaged, UnknownName when this release has no such family."""
    checkpoint = read_checkpoint(Path(folder))
    predictor: Predictor = find_family(checkpoint.family).predictor.restored(checkpoint)
    table = table_from_json(checkpoint.calibration)
    return predictor if table is None else Calibrated(predictor, table)
