"""Every predictor family with settings that fit in a second or so."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from predictors.age_km import AgeKmSettings
from predictors.boosting import BoostingSettings
from predictors.countdown import CountdownSettings
from predictors.encoders import EncoderSettings
from predictors.entropy_pool import EntropyPoolSettings
from predictors.fused import FusedSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.gbm_rank import GbmRankSettings
from predictors.gru_progress import GruProgressSettings
from predictors.log_t import LogTSettings
from predictors.past_future import PastFutureSettings
from predictors.probe import ProbeSettings
from predictors.prompt_encoder import PromptEncoderSettings
from predictors.registry import FamilySettings
from predictors.text_progress import TextProgressSettings
from predictors.torch_loop import LoopSettings
from tests.tiny_model import save_tiny_model


def _tiny_encoder() -> str:
    """Return the folder of a random Llama, which serves as the encoder."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-encoder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(save_tiny_model(folder))


TINY_ENCODER = _tiny_encoder()
FEW_TREES = BoostingSettings(num_trees=30)
QUICK: dict[str, FamilySettings] = {
    "age-km": AgeKmSettings(),
    "countdown": CountdownSettings(boosting=FEW_TREES),
    "entropy-pool": EntropyPoolSettings(
        EncoderSettings(TINY_ENCODER, pooling="entropy", max_tokens=64),
        num_landmarks=6,
        loop=LoopSettings(num_epochs=4),
    ),
    "fused": FusedSettings(num_landmarks=6, boosting=FEW_TREES),
    "gbm-hazard": GbmHazardSettings(boosting=FEW_TREES),
    "gbm-rank": GbmRankSettings(num_sets=300, boosting=FEW_TREES),
    "gru-progress": GruProgressSettings(num_landmarks=6, hidden=8, loop=LoopSettings(num_epochs=4)),
    "log-t": LogTSettings(num_landmarks=6, loop=LoopSettings(num_epochs=8)),
    "past-future": PastFutureSettings(),
    "probe": ProbeSettings(hidden=(8,), loop=LoopSettings(num_epochs=4)),
    "prompt-encoder": PromptEncoderSettings(
        EncoderSettings(TINY_ENCODER, max_tokens=64),
        "listmle",
        num_landmarks=6,
        loop=LoopSettings(num_epochs=4),
    ),
    "text-progress": TextProgressSettings(
        num_landmarks=6, buckets=64, loop=LoopSettings(num_epochs=4)
    ),
}
