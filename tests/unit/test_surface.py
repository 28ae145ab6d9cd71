"""Surface profiles: the sum, the edges, the file, and what is refused."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from contracts.errors import InvalidInput
from serving_sim.config import EngineConfig
from serving_sim.kernels.surface import one_chunk
from serving_sim.operator_profile import _one_chunk
from serving_sim.profile import (
    AffineProfile,
    StepProfile,
    StepWork,
    check_model,
    list_profiles,
    load_profile,
    save_profile,
    single_stream_s,
    strictly,
)
from serving_sim.surface import SurfaceProfile, Table, beyond_range
from serving_sim.surface_file import surface_document
from tests.surfaces import HEADER, small_profile

SMALL = small_profile()


def _on(table: Table, *point: float) -> float:
    """Look a table up inside its grid, by other code than the kernel's."""
    inside = RegularGridInterpolator(table.axes, table.seconds)
    low = [max(x, axis[0]) for x, axis in zip(point, table.axes, strict=True)]
    return float(inside(low)[0])


@pytest.mark.parametrize(
    "work",
    [
        StepWork(0, 0, 1, 128, 1, 128),
        StepWork(0, 0, 9, 9 * 500, 9, 500),
        StepWork(100, 100, 0, 0, 1),
        StepWork(200, 900, 0, 0, 1),
        StepWork(60, 260, 5, 5 * 300, 6, 300),
        StepWork(2, 2, 1, 1, 2, 1),
    ],
)
def test_a_step_is_tokens_and_head_and_attention(work: StepWork) -> None:
    prefill, prefill_context, decodes, context, requests, _ = work
    tables = SMALL.tables
    expected = _on(tables["tokens"], prefill + decodes) + _on(tables["head"], requests)
    prefix, mean = prefill_context - prefill, context / max(1, decodes)
    if prefill and decodes:
        expected += _on(tables["mixed"], prefill, prefix, decodes, mean)
    elif prefill:
        expected += _on(tables["prefill"], prefill, prefix)
    else:
        expected += _on(tables["decode"], decodes, mean)
    assert SMALL.step_s(work) == pytest.approx(expected, rel=1e-12)  # order of the sums differs


def test_without_a_mixed_table_the_two_attentions_add_up() -> None:
    tables = {name: table for name, table in SMALL.tables.items() if name != "mixed"}
    profile = small_profile(tables=tables)
    decode, prefill = StepWork(0, 0, 5, 1000, 5, 200), StepWork(60, 160, 0, 0, 1)
    both = StepWork(60, 160, 5, 1000, 6, 200)
    parts = [profile.step_s(work) - _dense(work) for work in (decode, prefill)]
    assert profile.step_s(both) - _dense(both) == pytest.approx(sum(parts), rel=1e-12)


def _dense(work: StepWork) -> float:
    tokens = work.prefill_tokens + work.num_decodes
    return _on(SMALL.tables["tokens"], tokens) + _on(SMALL.tables["head"], work.num_requests)


def test_many_steps_at_once_are_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    work = rng.integers(0, 300, (500, 6))
    work[:, 4] = work[:, 2] + (work[:, 0] > 0)
    work[:, 1] += work[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_by_one = [SMALL.step_s(StepWork(*map(int, row))) for row in work]
    assert SMALL.steps_s(work).tolist() == one_by_one


@pytest.mark.parametrize(("prompt", "output", "budget"), [(1, 1, 8), (500, 300, 64), (65, 9, 64)])
def test_alone_is_the_sum_of_its_steps_bit_for_bit(prompt: int, output: int, budget: int) -> None:
    profile = small_profile(graph_batch_sizes=(1, 2))
    config = EngineConfig(num_blocks=100, max_num_batched_tokens=budget)
    clock_s, computed = 0.0, 0
    for known in range(prompt, prompt + output):
        while computed < known:
            tokens = min(known - computed, budget)
            computed += tokens
            is_decode = tokens == 1
            work = (
                StepWork(0, 0, 1, computed, 1) if is_decode else StepWork(tokens, computed, 0, 0, 1)
            )
            clock_s += profile.steps_s(np.array([work]))[0]
    assert single_stream_s(prompt, output, config, profile) == clock_s


def test_a_batch_is_padded_to_the_next_graph_only_without_prefill() -> None:
    padded = small_profile(graph_batch_sizes=(1, 8, 16))
    nine, sixteen = StepWork(0, 0, 9, 900, 9, 100), StepWork(0, 0, 16, 1600, 16, 100)
    tokens = SMALL.tables["tokens"]
    assert padded.step_s(nine) - SMALL.step_s(nine) == pytest.approx(
        _on(tokens, 16) - _on(tokens, 9), rel=1e-9
    )
    beyond, beside = StepWork(0, 0, 20, 2000, 20, 100), StepWork(10, 10, 9, 900, 10, 100)
    for work in (sixteen, beyond, beside):
        assert padded.step_s(work) == SMALL.step_s(work)


def test_an_uneven_batch_goes_a_share_of_the_way_to_the_longest() -> None:
    skewed = small_profile(skew_share=0.25)
    uneven = StepWork(0, 0, 8, 8 * 200, 8, 600)
    assert skewed.step_s(uneven) == SMALL.step_s(StepWork(0, 0, 8, 8 * 300, 8, 300))
    even = uneven._replace(max_decode_context_tokens=200)
    assert skewed.step_s(even) == SMALL.step_s(even)


@given(
    st.integers(2, 5000), st.integers(0, 50_000), st.integers(1, 8),
)  # fmt: skip
def test_several_chunks_count_as_the_operator_profile_counts_them(
    tokens: int, prefix: int, count: int
) -> None:
    work = StepWork(tokens, tokens + prefix, 0, 0, count)
    assert one_chunk(tokens, tokens + prefix, count) == pytest.approx(_one_chunk(work), rel=1e-12)


@given(
    st.lists(st.integers(0, 5000), min_size=4, max_size=4),
    st.sampled_from([(0, 1), (1, 50), (2, 1), (3, 50)]),
)
def test_more_work_never_takes_less_time(at: list[int], more: tuple[int, int]) -> None:
    """Also far beyond the range, and across the padding of graphs. A step of decodes only is left
    out beside one with prefill: eager and captured kernels are different kernels."""
    profile = small_profile(graph_batch_sizes=(1, 2, 4, 8, 16, 64))
    bigger = list(at)
    bigger[more[0]] += more[1]
    if (at[0] == 0) != (bigger[0] == 0) or (at[2] == 0) != (bigger[2] == 0):
        return

    def seconds(chunk: int, prefix: int, decodes: int, context: int) -> float:
        prefills = int(chunk > 0)
        work = (chunk, prefills * (chunk + prefix), decodes, decodes * context, prefills + decodes)
        return float(profile.steps_s(np.array([[*work, context]]))[0])

    # a hundredth of a nanosecond is rounding of sums of milliseconds
    assert seconds(*bigger) >= seconds(*at) - 1e-11


def test_beyond_the_range_it_goes_on_along_the_last_slope_and_says_so_once() -> None:
    profile = small_profile(header=replace(HEADER, name="warns once"))
    steps = [profile.steps_s(np.array([[0, 0, 8, 8 * k, 8, k]]))[0] for k in (1088, 2048, 3008)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=1e-9)
    with pytest.warns(UserWarning, match="8 decodes|3008 context_tokens, measured up to 2048"):
        profile.step_s(StepWork(0, 0, 8, 8 * 3008, 8, 3008))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile.step_s(StepWork(0, 0, 8, 8 * 4000, 8, 4000))


def test_strict_refuses_what_lies_beyond() -> None:
    profile = strictly(small_profile())
    inside = StepWork(100, 200, 4, 400, 5, 100)
    assert profile.step_s(inside) == SMALL.step_s(inside)
    assert beyond_range(profile.range, inside) == ""
    for work in (
        StepWork(600, 600, 0, 0, 1), StepWork(10, 1100, 0, 0, 1), StepWork(0, 0, 33, 33, 33, 1),
        StepWork(0, 0, 1, 2049, 1, 2049), StepWork(240, 240, 20, 20, 21, 1),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="measured up to"):
            profile.step_s(work)
    with pytest.raises(InvalidInput, match="is affine and keeps no range"):
        strictly(load_profile("rtx4090-llama-3.1-8b"))


def test_profiles_are_equal_by_content_and_survive_file_and_pickle(tmp_path: Path) -> None:
    again = small_profile()
    assert again == SMALL
    assert hash(again) == hash(SMALL)
    assert isinstance(SMALL, StepProfile)
    save_profile(SMALL, tmp_path / "p.json")
    loaded = load_profile(tmp_path / "p.json")
    save_profile(loaded, tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes()
    assert loaded == load_profile(tmp_path / "q.json") == pickle.loads(pickle.dumps(loaded))
    assert loaded != replace(loaded, strict=True)
    # ten digits of microseconds are written
    work = StepWork(60, 260, 5, 5 * 300, 6, 300)
    assert loaded.step_s(work) == pytest.approx(SMALL.step_s(work), rel=1e-9)


Change = Callable[[dict[str, Any]], object]
BAD: list[tuple[str, Change]] = [
    ("expected preemptbench-profile/1", lambda d: d.update(format="preemptbench-profile/2")),
    ("unknown profile key .*'modell'", lambda d: d.update(modell="x")),
    ("model is ''", lambda d: d.update(model="")),
    ("model is 'None'", lambda d: d.pop("model")),
    ("tensor_parallel is '0'", lambda d: d.update(tensor_parallel=0)),
    ("num_layers is '1.5'", lambda d: d.update(num_layers=1.5)),
    ("versions is", lambda d: d.update(versions={"vllm": 1})),
    ("skew_share is 2.0; give 0 to 1", lambda d: d.update(skew_share=2)),
    ("skew_share is a number", lambda d: d.update(skew_share=None)),
    ("must be at most 1024 whole numbers above 0", lambda d: d.update(graph_batch_sizes=[8, 4])),
    ("must be at most 1024 whole numbers above 0", lambda d: d.update(graph_batch_sizes=[1.5])),
    ("tables \\['decode'\\] are missing", lambda d: d["tables"].pop("decode")),
    ("unknown table .*'decodes': did you mean", lambda d: d["tables"].update(decodes={})),
    ("unknown profile key .*'ms'", lambda d: d["tables"]["head"].update(ms=[])),
    ("us must be a list .* without holes", lambda d: d["tables"]["head"].update(us=[1.0, None])),
    ("1 values for a grid of 2 points", lambda d: d["tables"]["head"].update(us=[1.0])),
    ("-1e-06 s at {'requests': 1.0}", lambda d: d["tables"]["head"].update(us=[-1, 1])),
    ("seconds fall as requests grows", lambda d: d["tables"]["head"].update(us=[2, 1])),
    ("requests must rise", lambda d: d["tables"]["head"].update(requests=[2, 2])),
    ("is not finite and >= 0", lambda d: d["tables"]["head"].update(requests=[-1, 2])),
    ("seconds above 0", lambda d: d["tables"]["tokens"].update(us=[0, 1, 2, 3])),
    ("an error holds", lambda d: d.update(errors={"decode": {"median": 1}})),
    ("numbers >= 0", lambda d: d.update(
        errors={"decode": {"num_points": 1, "median": -1, "p90": 0, "p99": 0}})),
    ("errors is a list", lambda d: d.update(errors=[])),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), BAD)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, message: str, change: Change) -> None:
    data = json.loads(json.dumps(surface_document(SMALL)))
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        load_profile(path)


def test_no_number_and_too_many_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    text = json.dumps(surface_document(SMALL))
    path.write_text(text.replace("16, 17", "16, NaN", 1), encoding="utf-8")
    with pytest.raises(InvalidInput, match="NaN"):
        load_profile(path)
    path.write_text(text + " " * (9 << 20), encoding="utf-8")
    with pytest.raises(InvalidInput, match="the bound is"):
        load_profile(path)


def test_a_profile_of_another_model_is_refused() -> None:
    check_model(load_profile("rtxpro6000-qwen3-30b-a3b-tp1"), "Qwen3-30B-A3B")
    check_model(load_profile("rtx4090-llama-3.1-8b"), "meta-llama/Llama-3.1-8B")
    with pytest.raises(
        InvalidInput, match=r"step times of 'Qwen/Qwen3-32B', not of 'Llama-3.1-8B'"
    ):
        check_model(load_profile("h100-qwen3-32b-tp1"), "Llama-3.1-8B")


def test_a_profile_that_names_no_model_fits_none() -> None:
    with pytest.raises(InvalidInput, match=r"step times of '', not of 'Llama-3\.1-8B'"):
        check_model(AffineProfile("mine", 0.1, 0.1, 0.0, model=""), "Llama-3.1-8B")


@pytest.mark.parametrize("name", list_profiles())
def test_a_bundled_profile_meets_its_bars_and_says_whose_it_is(name: str) -> None:
    profile = load_profile(name)
    assert profile.source
    assert "Apache" in profile.licence or "MIT" in profile.licence
    if not isinstance(profile, SurfaceProfile):
        return
    assert profile.header.kv_bytes_per_token
    for surface in ("decode", "prefill", "mixed"):
        if surface in profile.tables and surface in profile.errors:
            error = profile.errors[surface]
            assert error.num_points >= 9
            assert error.median <= 0.03
            assert error.p99 <= 0.10
    assert {"decode", "prefill"} <= set(profile.errors)


@pytest.mark.parametrize(
    ("card", "bytes_per_s"),
    [("rtx4090", 1.008e12), ("rtxpro6000", 1.597e12), ("h100", 3.35e12), ("h200", 4.8e12)],
)
def test_one_decode_reads_the_weights_once_and_no_faster_than_memory_can(
    card: str, bytes_per_s: float
) -> None:
    """Bandwidths are the makers'; 60 % of one is what a poor kernel still reaches."""
    for model in ("llama-3.1-8b", "qwen3-32b"):
        name = f"{card}-{model}-tp1"
        if name in list_profiles():
            profile = load_profile(name)
            assert isinstance(profile, SurfaceProfile)
            assert profile.header.weight_bytes
            floor_s = profile.header.weight_bytes / bytes_per_s
            decode_s = profile.step_s(StepWork(0, 0, 1, 128, 1, 128))
            assert 0.95 * floor_s < decode_s < floor_s / 0.6
