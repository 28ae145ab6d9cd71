"""``--timeline``: one simulated run written as a trace or drawn as a figure, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from contracts.errors import InvalidInput
from preemptbench.progress import Bar
from serving_sim.engine import SimResult, StepLog

TRACES, FIGURES = (".json", ".json.gz"), (".png", ".svg")

timeline_option = click.option(
    "--timeline",
    "timeline_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Write what happened to every request in one run: .json or .json.gz opens in Perfetto "
    "(ui.perfetto.dev), .png and .svg show KV, queue and evictions over time. Repeatable.",
)
timeline_seed_option = click.option(
    "--timeline-seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Which seed of the matrix --timeline shows.",
)


def check_timeline_paths(paths: Sequence[Path], others: Sequence[Path | None]) -> None:
    """Refuse, before any work, a name that says no known format or that of another file.

    ``others`` are the files that the run reads or writes besides.
    """
    taken = {other.resolve() for other in others if other is not None}
    for path in paths:
        if not path.name.endswith((*TRACES, *FIGURES)):
            raise InvalidInput(
                f"--timeline {path}: the name must end in {', '.join(TRACES)} (a trace) or "
                f"{', '.join(FIGURES)} (a figure)"
            )
        if path.is_dir():
            raise InvalidInput(f"--timeline {path} is a folder: name a file in it")
        if path.resolve() in taken:
            raise InvalidInput(f"--timeline {path} names a file that this run uses: name another")
        taken.add(path.resolve())


def record_timelines(
    paths: Sequence[Path],
    run: Callable[[Callable[[StepLog], None]], SimResult],
    *,
    title: str,
    rule: str,
    usable_blocks: int,
    num_requests: int,
) -> SimResult:
    """Let ``run`` run with a listener on every step, and write each of ``paths``.

    ``title`` says which run it is, ``rule`` who names the victims.
    """
    from eval.timeline_figure import write_timeline_figure
    from serving_sim.timeline import StepSeries, chrome_trace

    title = f"{title}, {num_requests:,} requests"
    click.echo(f"timeline: {title}; the step engine runs, as it tells of every step", err=True)
    series = StepSeries(usable_blocks)
    with ExitStack() as stack:
        traces = [
            stack.enter_context(chrome_trace(path, title, rule, usable_blocks))
            for path in paths
            if path.name.endswith(TRACES)
        ]
        listeners = [series.step, *(trace.step for trace in traces)]
        bar = stack.enter_context(Bar("request", "timeline"))

        def tell(log: StepLog) -> None:
            for listen in listeners:
                listen(log)
            if log.finished_before:
                bar.update(bar.done + len(log.finished_before), num_requests)

        result = run(tell)
        for finish in (series.finish, *(trace.finish for trace in traces)):
            finish(result)
    for path in paths:
        if path.name.endswith(FIGURES):
            write_timeline_figure(series, path, title)
        click.echo(f"timeline: wrote {path}", err=True)
    return result
