"""The roofline: by hand where one term rules, and below every bundled profile."""

from __future__ import annotations

import numpy as np
import pytest

from serving_sim.models import MODELS, architecture
from serving_sim.profile import StepWork, list_profiles, load_profile
from serving_sim.roofline import PEAKS, Peak, roofline_s
from serving_sim.surface import SurfaceProfile

LLAMA = MODELS["Llama-3.1-8B"]
STEPS = [
    StepWork(0, 0, 1, 512, 1, 512), StepWork(0, 0, 32, 32 * 2048, 32, 2048),
    StepWork(1024, 1024, 0, 0, 1), StepWork(512, 1536, 16, 16 * 1024, 17, 1024),
]  # fmt: skip


def test_one_decode_moves_the_weights_and_its_context() -> None:
    """Embedding rows and norms are left out: 0.53 GB of the table's 16.06 GB."""
    bytes_moved = LLAMA.weight_bytes - 2 * LLAMA.vocabulary * LLAMA.hidden + 1000 * 131_072
    found_s = roofline_s(LLAMA, Peak(1e18, 1e12), 1, StepWork(0, 0, 1, 1000, 1, 1000))
    assert found_s == pytest.approx(bytes_moved / 1e12, rel=1e-4)


def test_a_prompt_multiplies_with_every_weight_and_half_of_its_square() -> None:
    weights = LLAMA.num_parameters - 2 * LLAMA.vocabulary * LLAMA.hidden
    operations = 2 * 4096 * weights + 2 * LLAMA.vocabulary * LLAMA.hidden
    operations += 4 * (4096**2 / 2) * 32 * 32 * 128
    one = roofline_s(LLAMA, Peak(1e15, 1e18), 1, StepWork(4096, 4096, 0, 0, 1))
    assert one == pytest.approx(operations / 1e15, rel=1e-4)
    two = roofline_s(LLAMA, Peak(1e15, 1e18), 2, StepWork(4096, 4096, 0, 0, 1))
    assert two == one / 2
    # two prompts of half the length have half of the pairs
    halves = roofline_s(LLAMA, Peak(1e15, 1e18), 1, StepWork(4096, 4096, 0, 0, 2))
    pairs_s = 4 * (4096**2 / 4) * 32 * 32 * 128 / 1e15
    head_s = 2 * LLAMA.vocabulary * LLAMA.hidden / 1e15
    assert one - halves == pytest.approx(pairs_s - head_s, rel=1e-6)


def test_experts_are_read_as_far_as_they_are_hit() -> None:
    shape = MODELS["Qwen3-30B-A3B"]
    one, many = (
        roofline_s(shape, Peak(1e30, 1e12), 1, StepWork(0, 0, n, n, n, 1)) for n in (1, 4096)
    )
    expert_s = 2 * shape.layers * 3 * shape.hidden * shape.intermediate / 1e12
    kv_s = 4095 * shape.kv_bytes_per_token / 1e12
    assert many - one - kv_s == pytest.approx(120 * expert_s, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in list_profiles() if "-tp" in name])
def test_no_bundled_profile_is_faster_than_the_card(name: str) -> None:
    profile = load_profile(name)
    assert isinstance(profile, SurfaceProfile)
    shape, gpus = architecture(profile.model), profile.header.tensor_parallel
    floors = [roofline_s(shape, PEAKS[name.partition("-")[0]], gpus, work) for work in STEPS]
    assert (profile.steps_s(np.array(STEPS)) > floors).all()
