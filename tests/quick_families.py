"""Every predictor family with settings that fit in a second or so."""

from __future__ import annotations

from predictors.age_km import AgeKmSettings
from predictors.boosting import BoostingSettings
from predictors.countdown import CountdownSettings
from predictors.fused import FusedSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.gbm_rank import GbmRankSettings
from predictors.gru_progress import GruProgressSettings
from predictors.log_t import LogTSettings
from predictors.past_future import PastFutureSettings
from predictors.registry import FamilySettings
from predictors.text_progress import TextProgressSettings
from predictors.torch_loop import LoopSettings

FEW_TREES = BoostingSettings(num_trees=30)
QUICK: dict[str, FamilySettings] = {
    "age-km": AgeKmSettings(),
    "countdown": CountdownSettings(boosting=FEW_TREES),
    "fused": FusedSettings(num_landmarks=6, boosting=FEW_TREES),
    "gbm-hazard": GbmHazardSettings(boosting=FEW_TREES),
    "gbm-rank": GbmRankSettings(num_sets=300, boosting=FEW_TREES),
    "gru-progress": GruProgressSettings(num_landmarks=6, hidden=8, loop=LoopSettings(num_epochs=4)),
    "log-t": LogTSettings(num_landmarks=6, loop=LoopSettings(num_epochs=8)),
    "past-future": PastFutureSettings(),
    "text-progress": TextProgressSettings(
        num_landmarks=6, buckets=64, loop=LoopSettings(num_epochs=4)
    ),
}
