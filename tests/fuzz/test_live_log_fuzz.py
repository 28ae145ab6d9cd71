"""A damaged live log is read and replayed, or refused with InvalidInput, and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from eval.log_replay import replay_log
from serving_sim.live_log import read_recorded
from serving_sim.policies import get_policy
from tests.unit.test_what_if import write_live


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_live(tmp_path_factory.mktemp("live"))[0].read_text(encoding="utf-8").splitlines()


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**60), st.floats(), st.text(max_size=3),
    st.lists(st.integers(), max_size=2), st.just({}),
)  # fmt: skip


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_field_or_a_lost_line(
    lines: list[str], tmp_path: Path, data: st.DataObject
) -> None:
    damaged = list(lines)
    at = data.draw(st.integers(0, len(lines) - 1))
    row = json.loads(damaged[at])
    nested = row.get("arrived", row)
    key = data.draw(st.sampled_from(sorted(nested)))
    change = data.draw(st.sampled_from(["value", "key", "line", "cut"]))
    if change == "value":
        nested[key] = data.draw(VALUES)
    elif change == "key":
        del nested[key]
    damaged[at] = json.dumps(row)
    if change == "line":
        del damaged[at]
    elif change == "cut":
        damaged[at] = damaged[at][: data.draw(st.integers(0, len(damaged[at])))]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(damaged) + "\n", encoding="utf-8")
    with contextlib.suppress(InvalidInput):
        replay_log(read_recorded(path), get_policy("fifo"))
