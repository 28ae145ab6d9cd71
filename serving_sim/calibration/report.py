"""The picture of a calibration: measured and fitted surfaces, the roofline, and the errors."""

from __future__ import annotations

import html
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidInput
from contracts.files import atomic_path, atomic_write_text
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.result import Calibration, work_of
from serving_sim.calibration.roofline import step_roofline_s
from serving_sim.calibration.steps import StepShape, shape_of
from serving_sim.profile import StepProfile
from serving_sim.roofline import Peak

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 6
_PROBES, _FITTED = "#D55E00", "#0072B2"  # Okabe and Ito's palette
_MIXED, _UNEVEN = "#009E73", "#CC79A7"


def check_report_path(path: Path) -> None:
    """Refuse, before any work, a report that is neither .html nor .png."""
    if path.suffix not in (".html", ".png"):
        raise InvalidInput(f"report {path}: name a file that ends in .html or .png")


def write_report(
    result: Calibration[Any],
    facts: ModelFacts,
    peak: Peak | None,
    rows: Sequence[tuple[str, str]],
    path: Path,
) -> None:
    """Write the picture as .png, or with ``rows`` (label, text) as a page of its own (.html)."""
    check_report_path(path)
    figure = draw(result, facts, peak)
    if path.suffix == ".png":
        with atomic_path(path) as scratch:
            figure.savefig(scratch, format="png", dpi=120)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    table = "".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
        for label, value in rows
    )
    title = html.escape(f"Calibration of {result.profile.name}")
    atomic_write_text(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}"
        "th{text-align:left;padding-right:1.5em;vertical-align:top;font-weight:600}"
        f"svg{{width:100%;height:auto}}</style><h1>{title}</h1><table>{table}</table>"
        f"{svg[svg.index('<svg') :]}</html>\n",
    )


def draw(result: Calibration[Any], facts: ModelFacts, peak: Peak | None) -> Figure:
    """Return the figure; the roofline is drawn for 16-bit weights and a known peak."""
    from matplotlib.figure import Figure

    peak = peak if facts.bytes_per_value == 2 else None
    figure = Figure(figsize=(13.0, 9.5), layout="constrained")
    decode, prefill, errors, ratio = figure.subplots(2, 2).ravel()
    shapes = {shape_of(row): row.seconds for row in result.measured}
    for ax, surface, lines, x in (
        (decode, "decode", "num_decodes", "decode_context_tokens"),
        (prefill, "prefill", "prefill_prefix_tokens", "prefill_chunk_tokens"),
    ):
        own = {shape: s for shape, s in shapes.items() if shape.surface == surface}
        _surface(ax, own, result.profile, lines, x, facts, peak)
    decode.set_xlabel("context of each request, tokens")
    decode.set_title("decode steps, by requests in the batch", fontsize=10)
    prefill.set_xlabel("chunk, tokens")
    prefill.set_title("prefill steps, by tokens computed before", fontsize=10)
    _errors(errors, result, shapes)
    _ratio(ratio, shapes, facts, peak)
    for ax in (decode, prefill, errors, ratio):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _surface(
    ax: Axes,
    shapes: dict[StepShape, float],
    profile: StepProfile,
    lines: str,
    x: str,
    facts: ModelFacts,
    peak: Peak | None,
) -> None:
    """Draw one surface: dots measured, lines fitted, dashes the roofline."""
    import matplotlib as mpl

    counts = Counter(getattr(shape, lines) for shape in shapes)
    kept = sorted(v for v, count in counts.items() if count > 1)
    step = max(1, math.ceil(len(kept) / _MAX_LINES))
    kept = sorted({*kept[::step], *kept[-1:]})
    colours = mpl.colormaps["viridis"]
    for i, value in enumerate(kept):
        own = sorted((s for s in shapes if getattr(s, lines) == value), key=lambda s: getattr(s, x))
        at = [getattr(s, x) for s in own]
        colour = colours(0.9 * i / max(1, len(kept) - 1))
        ax.plot(at, [1e3 * shapes[s] for s in own], "o", ms=4, color=colour)
        fitted = [1e3 * profile.step_s(work_of(s)) for s in own]
        ax.plot(at, fitted, lw=1.2, color=colour, label=f"{value:,}")
        if peak is not None:
            bound = [1e3 * step_roofline_s(s, facts, peak) for s in own]
            ax.plot(at, bound, "--", lw=0.8, color=colour)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylabel("ms a step (dots measured, lines fitted)")
    if kept:
        title = "requests" if lines == "num_decodes" else "prefix, tokens"
        ax.legend(title=title, title_fontsize=8, fontsize=8, frameon=False, loc="upper left")


def _errors(ax: Axes, result: Calibration[Any], shapes: dict[StepShape, float]) -> None:
    """Draw the signed relative errors of steps that were fitted and of steps that were not."""
    probed = {probe.shape for probes in result.rounds[-1:] for probe in probes}
    groups = {
        "grid": (_FITTED, [
            result.profile.step_s(work_of(s)) / seconds - 1.0
            for s, seconds in shapes.items() if s not in probed
        ]),
        "last round of probes (not seen by the fit)": (
            _PROBES, [p.predicted_s / p.measured_s - 1.0 for r in result.rounds[-1:] for p in r]
        ),
        "mixed steps (never fitted)": (
            _MIXED, [p.predicted_s / p.measured_s - 1.0 for p in result.mixed]
        ),
        "uneven decodes (skew share fitted)": (
            _UNEVEN, [p.predicted_s / p.measured_s - 1.0 for p in result.uneven]
        ),
    }  # fmt: skip
    everything = [100 * e for _, errors in groups.values() for e in errors]
    bound = max(1.0, *(abs(e) for e in everything))
    bins = [bound * (i / 15 - 1.0) for i in range(31)]
    for label, (colour, errors) in groups.items():
        if errors:
            ax.hist([100 * e for e in errors], bins, alpha=0.6, color=colour, label=label)
    ax.axvline(0.0, color="black", lw=0.8)
    ax.set_xlabel("predicted - measured, % of measured")
    ax.set_ylabel("steps")
    ax.set_title("error", fontsize=10)
    ax.legend(fontsize=8, frameon=False)


def _ratio(ax: Axes, shapes: dict[StepShape, float], facts: ModelFacts, peak: Peak | None) -> None:
    """Draw how many times the roofline each step takes."""
    ax.set_title("measured / roofline", fontsize=10)
    if peak is None:
        why = "no roofline: it needs 16-bit weights and the peaks of the device"
        ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    for surface, colour in (("decode", _FITTED), ("prefill", _PROBES)):
        own = [s for s in shapes if s.surface == surface]
        ratios = [shapes[s] / step_roofline_s(s, facts, peak) for s in own]
        ax.plot([s.tokens for s in own], ratios, "o", ms=4, color=colour, label=surface)
    ax.axhline(1.0, color="black", lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("tokens computed in the step")
    ax.set_ylabel("times the roofline")
    ax.legend(fontsize=8, frameon=False)
