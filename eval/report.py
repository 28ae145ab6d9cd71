"""The report: one self-contained HTML page, figures inline, nothing fetched from anywhere."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.files import atomic_write_text
from eval.summary import SummaryRow

# matplotlib's black and white follow the reader's theme; colours of data stay
_THEMED = (
    ("stroke: #000000", "stroke: currentColor"),
    ("fill: #000000", "fill: currentColor"),
    ("fill: #ffffff", "fill: var(--paper)"),
)
# a path needs no finer grid than a hundredth of a point: a fifth of a page's bytes
_PATH, _FINE = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d\d)\d+")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the HTML below it."""

    title: str
    body: str


def write_report(path: Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page. ``lead`` is plain text, a paragraph a line; section bodies are HTML of
    :func:`table`, :func:`paragraph`, :func:`figure` or of your own."""
    body = "\n".join(
        f'<section id="{anchor(s.title)}"><h2>{html.escape(s.title)}</h2>{s.body}</section>'
        for s in sections
    )
    leads = "".join(f'<p class="lead">{html.escape(line)}</p>' for line in lead.splitlines())
    page = _PAGE.replace("@TITLE@", html.escape(title)).replace("@LEAD@", leads)
    atomic_write_text(path, page.replace("@BODY@", body))


def anchor(title: str) -> str:
    """Return the id of the section of that title, for links."""
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def contents(sections: Sequence[Section]) -> str:
    """Return links to the sections."""
    links = "".join(f'<a href="#{anchor(s.title)}">{html.escape(s.title)}</a>' for s in sections)
    return f"<nav>{links}</nav>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """Return an inline figure; its caption doubles as the text alternative."""
    text = html.escape(caption)
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
    for light, themed in _THEMED:
        labelled = labelled.replace(light, themed)
    labelled = _PATH.sub(lambda path: _FINE.sub(r"\1", path[0]), labelled)
    return f"<figure>{labelled}<figcaption>{text}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others are set as figures."""
    cells = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    inner = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll">{inner}</div>'


def summary_tables(rows: Sequence[SummaryRow]) -> str:
    """Return one table for each pressure, with the outcome counts that add up."""
    head = (
        "policy / signal", "breach", "vs LIFO, pp", "95 % interval", "floor", "completed only",
        "preempt/1k", "recompute", "met", "late", "failed", "unfinished", "withdrawn",
        "accepted", "rejected",
    )  # fmt: skip
    parts = []
    for pressure in dict.fromkeys(row.pressure for row in rows):
        chosen = [row for row in rows if row.pressure == pressure]
        parts.append(f"<h3>{html.escape(pressure)}: {chosen[0].num_blocks} blocks</h3>")
        parts.append(table(head, [_cells(row) for row in chosen]))
    return "".join(parts)


def _cells(row: SummaryRow) -> list[str]:
    d = row.difference
    if d is None:
        mean, interval = "baseline", ""
    elif not row.comparable:
        mean, interval = "not comparable", ""
    else:
        mean, interval = f"{d.mean:+.1f}", f"{d.low:+.1f} … {d.high:+.1f}"
    counts = (
        row.met, row.late, row.failed, row.unfinished, row.withdrawn, row.accepted, row.rejected,
    )  # fmt: skip
    return [
        row.label,
        f"{row.breach:.1%}",
        mean,
        interval,
        f"{row.floor:.1%}",
        f"{row.completed_only:.1%}",
        f"{row.preemptions_per_1000:.0f}",
        f"{row.recompute_tax:.1%}",
        *map(str, counts),
    ]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d9d9d9;
        --paper: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a8a8a8; --line: #3d3d3d; --paper: #16181b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 80rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.6rem; margin-bottom: .3rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
h3 { font-size: 1rem; margin-bottom: .2rem } .lead { max-width: 62rem; margin: .4rem 0 }
p, ul { max-width: 60rem } pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem }
nav { columns: 16rem; font-size: .9rem; margin: 1rem 0 } nav a { display: block; color: inherit }
figure { margin: 1rem 0; overflow-x: auto } figure svg { max-width: 100%; height: auto }
figure svg text { fill: currentColor }
@media (max-width: 40rem) { figure svg { max-width: none; width: 46rem } }
figcaption, .caption { color: var(--soft); font-size: .9rem; max-width: 60rem; margin: 1rem 0 0 }
figcaption { position: sticky; left: 0; max-width: min(60rem, 100vw - 2rem); margin: 0 }
.scroll { overflow: auto; max-height: 36rem; margin: .3rem 0 .8rem }
table { border-collapse: collapse; font-size: .82rem }
th, td { padding: .2rem .35rem; border-bottom: 1px solid var(--line); text-align: right;
         white-space: nowrap; font-variant-numeric: tabular-nums }
th:first-child, td:first-child, .t { text-align: left }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; white-space: normal;
           position: sticky; top: 0; background: var(--paper) }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0;
            padding: 0; cursor: pointer; text-align: inherit }
th[aria-sort=ascending] button::after { content: " \\25b2" }
th[aria-sort=descending] button::after { content: " \\25bc" }
summary { cursor: pointer; margin: .4rem 0 }
</style></head><body>
<h1>@TITLE@</h1>@LEAD@
@BODY@
<script>
for (const head of document.querySelectorAll("table.sortable th"))
  head.firstChild.onclick = () => {
    const body = head.closest("table").tBodies[0], at = head.cellIndex;
    const up = head.ariaSort !== "ascending";
    for (const other of head.parentNode.cells) other.ariaSort = "none";
    head.ariaSort = up ? "ascending" : "descending";
    const value = row => row.cells[at].dataset.v ?? row.cells[at].textContent;
    const order = (a, b) => (isNaN(a) - isNaN(b)) || (isNaN(a) ? a.localeCompare(b) : a - b);
    const rows = [...body.rows].sort((a, b) => order(value(a), value(b)) * (up ? 1 : -1));
    body.append(...rows);
  };
</script>
</body></html>
"""
