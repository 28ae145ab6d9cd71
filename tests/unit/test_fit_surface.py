"""Fitting surfaces: a known law comes back, held-out points stay out, bad rows are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from contracts.errors import InvalidInput
from serving_sim.fit_surface import StepMeasurement, fit_curve, fit_surface, predict
from serving_sim.grid_fit import fill_holes, grid_of, monotone, thin, written
from tests.surfaces import HEADER, law, measured


def test_the_law_comes_back_between_the_measured_points() -> None:
    """Linear pieces on doubling knots: within the bars of the issue, 3 % median and 10 % p99."""
    profile = fit_surface(measured(), HEADER)
    rng = np.random.default_rng(1)
    steps = np.column_stack([
        rng.integers(16, 1024, 400), rng.integers(0, 2048, 400),
        rng.integers(1, 64, 400), rng.integers(256, 2048, 400),
    ])  # fmt: skip
    steps[:150, :2] = 0
    steps[150:300, 2:] = 0
    truth = np.array([law(*map(int, step)) for step in steps])
    error = np.abs(predict(profile, steps) / truth - 1.0)
    assert np.median(error) < 0.03
    assert np.quantile(error, 0.99) < 0.10


def test_the_stated_error_is_of_points_that_no_table_saw() -> None:
    """Spoil a held-out point: only the stated error moves. Spoil a fitted one: the tables do."""
    rows = measured()
    profile = fit_surface(rows, HEADER)
    assert {"decode", "prefill", "mixed"} == set(profile.errors)
    same, moved = 0, 0
    for i, row in enumerate(rows):
        again = fit_surface([*rows[:i], replace(row, seconds=9.0), *rows[i + 1 :]], HEADER)
        if np.array_equal(again.flat, profile.flat):
            same += 1
            assert again.errors != profile.errors
        else:
            moved += 1
    assert same == sum(error.num_points for error in profile.errors.values())
    assert moved > 3 * same


def test_points_off_the_knots_are_held_out() -> None:
    rows = measured()
    profile = fit_surface(rows, HEADER, knots={"context_tokens": (16, 256, 1024, 4096)})
    off = sum(row.decode_context_tokens in (512, 2048) for row in rows)
    assert off > 0
    scored = profile.errors["decode"].num_points + profile.errors["mixed"].num_points
    assert off <= scored < off + 40
    assert set(profile.tables["decode"].axes[1]) <= {16, 256, 1024, 4096}
    with pytest.raises(InvalidInput, match=r"knots of \['contexts'\]"):
        fit_surface(rows, HEADER, knots={"contexts": (1,)})


def test_what_no_engine_can_hold_is_not_scored() -> None:
    rows = measured()
    whole, small = (
        fit_surface(rows, HEADER, kv_capacity_tokens=capacity) for capacity in (np.inf, 10_000)
    )
    assert np.array_equal(whole.flat, small.flat)
    assert small.errors["decode"].num_points < whole.errors["decode"].num_points


def test_captured_decodes_may_be_cheaper_than_eager_prefill() -> None:
    """2 ms a step for launching kernels, which a CUDA graph saves; graphs of 8 and 64."""

    def seconds(chunk: int, prefix: int, decodes: int, context: int) -> float:
        launches = 0.002 if chunk else 0.0
        padded = decodes if chunk else next(size for size in (8, 64, 128) if size >= decodes)
        return launches + law(chunk, prefix, padded, context)

    profile = fit_surface(measured(seconds), HEADER, graph_batch_sizes=(8, 64, 128))
    for kind in ((512, 1000, 0, 0), (0, 0, 32, 1500), (0, 0, 64, 1500), (16, 0, 0, 0)):
        found = predict(profile, np.array([kind]))[0]
        # the padded batch also reads KV for its real requests only: law() counts it for all
        assert found == pytest.approx(seconds(*kind), rel=0.08)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepMeasurement(0, 0, 0, 0, 1.0), "is no measured step"),
        (StepMeasurement(0, 0, 1, 1, -1.0), "is no measured step"),
        (StepMeasurement(0, 0, 1, 1, float("nan")), "is no measured step"),
        (StepMeasurement(-1, 0, 1, 1, 1.0), "is no measured step"),
        (StepMeasurement(1.5, 0, 1, 1, 1.0), "is no measured step"),  # type: ignore[arg-type]
    ],
)
def test_a_row_that_is_no_measurement_is_refused(row: StepMeasurement, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        fit_surface([*measured(), row], HEADER)


def test_a_kind_that_nobody_timed_is_named() -> None:
    decodes = [row for row in measured() if not row.prefill_chunk_tokens]
    with pytest.raises(InvalidInput, match="no step of kind 'prefill'"):
        fit_surface(decodes, HEADER)
    one_each = [StepMeasurement(8, 0, 0, 0, 0.1), StepMeasurement(0, 0, 8, 1, 0.1)]
    with pytest.raises(InvalidInput, match="give two sizes at least"):
        fit_surface(one_each, HEADER)


def test_a_curve_keeps_its_steps_and_ends_on_a_long_slope() -> None:
    """One line over the last eighth: two noisy neighbours must not say what goes on for ever."""
    x = [float(i) for i in range(1, 129)]
    seconds = [1.0 + 0.01 * i + (0.5 if i > 64 else 0.0) for i in range(1, 129)]
    seconds[-2] -= 0.01
    table, error = fit_curve(x, seconds)
    assert {64.0, 65.0} <= set(table.axes[0]) or {63.0, 65.0} <= set(table.axes[0])
    assert table.axes[0][-2] <= 112.0
    assert error.num_points > 10
    assert error.median < 0.005
    few, unscored = fit_curve(x[:5], seconds[:5])
    assert unscored.num_points == 0
    assert few.seconds[0] == seconds[0]


def test_holes_are_filled_along_the_axes() -> None:
    axes = ((1.0, 2.0, 4.0), (1.0, 3.0, 9.0))
    truth = np.multiply.outer(axes[0], axes[1])
    for hole in ((1, 1), (2, 2), (0, 0)):
        grid = truth.copy()
        grid[hole] = np.nan
        filled = fill_holes(grid, axes)
        if hole == (0, 0):  # level before the first point: 2 and 3 say what is there
            assert filled[hole] == 2.5
        else:  # a product is linear along each axis
            assert filled[hole] == pytest.approx(truth[hole])
    empty = np.full((3, 3), np.nan)
    assert np.isnan(fill_holes(empty, axes)).all()


def test_points_make_a_grid() -> None:
    points = np.array([[1.0, 3.0], [1.0, 3.0], [2.0, 1.0]])
    grid = grid_of(points, np.array([1.0, 3.0, 5.0]), ((1.0, 2.0), (1.0, 3.0)))
    assert grid[0, 1] == 2.0
    assert grid[1, 0] == 5.0
    assert np.isnan(grid[0, 0])


@given(arrays(np.float64, (4, 5), elements=st.floats(0, 1e3)))
def test_monotone_is_monotone_and_leaves_what_was(grid: np.ndarray) -> None:
    fixed = monotone(grid)
    assert all((np.diff(fixed, axis=i) >= 0).all() for i in (0, 1))
    rising = np.cumsum(np.cumsum(grid, axis=0), axis=1)
    assert np.array_equal(monotone(rising), rising)


def test_thinning_drops_knots_of_a_line_and_keeps_bends() -> None:
    axis = (1.0, 2.0, 3.0, 4.0, 8.0, 9.0)
    line = np.array([1.0, 2.0, 3.0, 4.0, 8.0, 20.0])
    kept, (knots,) = thin(line, (axis,), line, 0.001)
    assert knots == (1.0, 8.0, 9.0)
    assert kept.tolist() == [1.0, 8.0, 20.0]


def test_written_seconds_have_five_digits_and_stay_as_they_are() -> None:
    seconds = np.array([0.0, 1.23456789e-3, 9.99999e-6])
    once = written(seconds)
    assert np.array_equal(written(once), once)
    assert once[1] == pytest.approx(1.2346e-3, rel=1e-12)
