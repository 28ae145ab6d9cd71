"""The picture of a validation: each request's end-to-end time, and the engine over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eval.recorded_run import RecordedRun
from eval.save_figure import save_figure
from eval.validation import Replay, measured_latencies, record_latencies

_REAL, _SIMULATED = "#0072B2", "#D55E00"  # Okabe and Ito's palette, as in eval/figures.py


def write_figure(run: RecordedRun, replayed: Replay, folder: Path) -> tuple[Path, ...]:
    """Write validation.svg and validation.png into ``folder`` and return their paths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 6.0), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=(1.0, 1.4))
    scatter = figure.add_subplot(grid[:, 0])
    real = measured_latencies(run).e2e
    simulated = record_latencies(replayed.result.records).e2e
    most = float(max(real.max(), simulated.max()))
    scatter.plot([0, most], [0, most], color="black", lw=0.8)
    scatter.plot(real, simulated, ".", ms=5, alpha=0.6, color=_SIMULATED)
    scatter.set_xlabel("real end-to-end time of a request, s")
    scatter.set_ylabel("simulated, s")
    scatter.set_title(run.name, fontsize=10)
    for row, name in enumerate(("running", "waiting", "kv_share")):
        ax = figure.add_subplot(grid[row, 1])
        values = getattr(run.occupancy, name)
        if not np.isnan(values).all():
            ax.step(run.occupancy.t_s, values, color=_REAL, lw=1.4, label="real (each second)")
        ours = replayed.occupancy
        ax.plot(ours.t_s, getattr(ours, name), color=_SIMULATED, lw=0.8, label="simulated")
        ax.set_ylabel(name.replace("kv_share", "KV in use"))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False)
    ax.set_xlabel("seconds since the first request was queued")
    svg, png = (save_figure(figure, folder / f"validation.{kind}") for kind in ("svg", "png"))
    return svg, png
