"""Damaged profile files: whatever changes, loading succeeds or says InvalidInput."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.randomness import keyed_generator
from serving_sim.profile import StepWork, load_profile
from serving_sim.surface import SurfaceProfile
from serving_sim.surface_file import parse_surface, surface_document, surface_text
from tests.surfaces import small_profile

DOCUMENT = json.loads(json.dumps(surface_document(small_profile())))
WORK = StepWork(60, 260, 5, 5 * 300, 6, 300)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-2, 3), max_size=4), st.dictionaries(st.text(max_size=3), st.none()),
)  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        path
        for key, item in items
        for path in [
            (*at, key),
            *(_paths(item, (*at, key)) if isinstance(item, dict | list) else []),
        ]
    ]


PATHS = _paths(DOCUMENT)


def _works(profile: SurfaceProfile) -> bool:
    return math.isfinite(profile.steps_s(np.array([WORK]))[0])


@settings(max_examples=400)
@given(st.sampled_from(PATHS), VALUES, st.booleans())
def test_a_changed_value_is_taken_or_refused(
    path: tuple[Any, ...], value: Any, delete: bool
) -> None:
    data = copy.deepcopy(DOCUMENT)
    *parents, last = path
    holder = data
    for key in parents:
        holder = holder[key]
    if delete:
        del holder[last]
    else:
        holder[last] = value
    try:
        profile = parse_surface(data, "fuzzed")
    except InvalidInput:
        return
    assert _works(profile)


def test_changed_bytes_are_taken_or_refused(tmp_path: Path) -> None:
    text = surface_text(small_profile()).encode()
    rng = keyed_generator(3, "profile-fuzz")
    path = tmp_path / "p.json"
    refused = 0
    for number in range(300):
        body = bytearray(text)
        at = int(rng.integers(len(body)))
        if number % 3 == 0:
            body = body[:at]
        elif number % 3 == 1:
            body[at] = int(rng.integers(32, 127))
        else:
            body[at : at + 8] = rng.bytes(8)
        path.write_bytes(bytes(body))
        try:
            profile = load_profile(path)
        except InvalidInput:
            refused += 1
            continue
        assert isinstance(profile, SurfaceProfile)
        assert _works(profile)
    assert refused > 150
