"""A small study stored, read back, reported, rescored, compared; and what wrong input is told."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from eval.cells import Cell, write_task
from eval.lives import lives_of, read_records
from eval.report import Section, paragraph, write_report
from eval.rescoring import rescore_lives
from eval.stored import FILE, StoredStudy, load_study, store_study
from eval.study import SourceResult, run_study
from eval.study_cell_tables import breach_table
from eval.study_compare import compare_studies
from eval.study_config import Source, StudyConfig
from eval.study_numbers import StudyNumbers, overload_sentence, study_numbers, three_sentences
from eval.study_quality import measure_qualities
from eval.study_report import render_study, write_study_report
from eval.study_rescoring import LIFO, legal_deadlines, rescore_study
from eval.study_service import class_table, cost_table, service_table
from eval.study_tables import all_tables
from eval.tables import Column, Table, html_table, markdown_table, show, write_tables
from preemptbench.cli import cli
from preemptbench.cli_report import parse_deadlines
from tests.synthetic_runs import synthetic_runs
from tests.unit.test_outcomes import record
from traces.deadlines import DeadlineClass
from traces.runlog import write_runs

CONFIG = StudyConfig(
    name="tiny",
    policies=("lifo", "fifo", "young(0.5)", "longest-remaining"),
    signals=("oracle-2", "clairvoyant"),
    pressures=(0.8, 1.3),
    num_seeds=6,
    num_pilots=2,
    deadline_s=3.0,
    observe_s=6.0,
    concurrency=16.0,
    num_warmup=20,
    num_tagged=40,
    grid_stride=8,
)
COMMAND = "preemptbench study --runs <mine> --deadline 3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    sources = []
    for k in (0, 1):
        runs = out / "inputs" / f"runs{k}.parquet"
        log = synthetic_runs(num_prompts=24, repeats=3, seed=11 + k, cap_tokens=100)
        write_runs(log, runs, {})
        sources.append(
            Source(model_family=f"f{k}", benchmark="made", runs=runs, kind="temperature zero")
        )
    write_study_report(run_study(CONFIG, sources, out, num_jobs=1), out, COMMAND)
    return out


@pytest.fixture(scope="module")
def stored(folder: Path) -> StoredStudy:
    return load_study(folder)


@pytest.fixture(scope="module")
def numbers(stored: StoredStudy) -> StudyNumbers:
    return study_numbers(stored)


def edited(stored: StoredStudy, **changes: object) -> StoredStudy:
    """``stored`` with every source changed."""
    sources = [replace(source, **changes) for source in stored.study.sources]  # type: ignore[arg-type]
    return replace(stored, study=replace(stored.study, sources=sources))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_what_is_stored_is_what_is_read_even_after_a_move(stored: StoredStudy, copy: Path) -> None:
    moved = load_study(copy)
    assert moved.study.config == stored.study.config == CONFIG
    assert moved.study.margin_pp == stored.study.margin_pp
    assert moved.command == COMMAND
    for ours, theirs in zip(moved.study.sources, stored.study.sources, strict=True):
        assert ours.cells == theirs.cells
        assert ours.pilot == theirs.pilot
        assert ours.source.runs.is_relative_to(copy)
    assert str(stored.out_dir) not in (copy / FILE).read_text()


def test_every_rule_stands_in_every_cell_with_outcomes_that_add_up(
    stored: StoredStudy, numbers: StudyNumbers
) -> None:
    table = breach_table(numbers)
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    assert len(rows) == 2 * 2 * 5
    for row in rows:
        parts = ("met", "late", "failed", "unfinished", "withdrawn")
        total = sum(row[f"mean_{name}"] for name in parts)  # type: ignore[misc]
        assert total == pytest.approx(row["mean_accepted"], abs=1e-9)
    for source in stored.study.sources:
        for row in (row for row in rows if row["source"] == source.source.name):
            mine = [
                c.score.breach
                for c in source.cells
                if c.pressure == row["pressure"] and str(row["rule"]).startswith(c.policy)
                and (c.signal == "none" or str(row["rule"]).endswith(c.signal))
            ]  # fmt: skip
            assert len(mine) == CONFIG.num_seeds
            assert row["breach"] == pytest.approx(np.mean(mine), abs=1e-12)


def test_curves_pass_through_the_scores_of_the_cells(stored: StoredStudy) -> None:
    deadlines = (1.0, CONFIG.deadline_s, CONFIG.observe_s)
    curves = rescore_study(stored, deadlines)
    assert not curves.refusals
    for source in stored.study.sources:
        for cell in source.cells:
            of_rule = curves.by_cell[source.source.name, cell.pressure][cell.policy, cell.signal]
            curve = of_rule[cell.seed]
            assert curve.breach[1] == pytest.approx(cell.score.breach, abs=1e-12)
            assert curve.floor[1] == pytest.approx(cell.score.floor, abs=1e-12)
            assert np.all(np.diff(curve.breach) <= 0)


def test_lives_on_disk_are_those_of_the_records(stored: StoredStudy, tmp_path: Path) -> None:
    cell = stored.study.sources[0].cells[0]
    lives = [
        replace(record("completed", 2.0), request_id="a"),
        replace(record("unfinished", None), request_id="b"),
        replace(record("completed", 1.0), request_id="c", cohort="warmup"),
        replace(record("rejected", None), request_id="d"),
    ]
    write_task(tmp_path / "cells" / "t.parquet", [cell], [(cell, lives)])
    ((run, read),) = read_records(tmp_path / "records" / "t.parquet")
    assert (run.policy, run.seed) == (cell.policy, cell.seed)
    assert read.request_id.tolist() == lives_of(lives).request_id.tolist() == ["a", "b"]
    curve, expected = (rescore_lives(x, [1.5, 2.5]) for x in (read, lives_of(lives)))
    assert curve.breach.tolist() == expected.breach.tolist()


def test_a_request_in_two_cohorts_is_an_error(stored: StoredStudy, tmp_path: Path) -> None:
    cell = stored.study.sources[0].cells[0]
    twice = [record("completed", 2.0), replace(record("completed", 2.0), cohort="warmup")]
    with pytest.raises(InvalidInput, match=r"stands there 2 times: cohorts overlap"):
        write_task(tmp_path / "cells" / "t.parquet", [cell], [(cell, twice)])


def test_a_rule_that_read_the_deadline_is_refused_and_the_others_are_not(copy: Path) -> None:
    stored = load_study(copy)
    for source in stored.study.sources:
        for path in stored.records_of(source):
            table = pq.read_table(path)
            seen = [3.0 if p == "fifo" else None for p in table["policy"].to_pylist()]
            at = table.column_names.index("deadline_seen")
            pq.write_table(table.set_column(at, "deadline_seen", [seen]), path)
    curves = rescore_study(stored, (1.0, 3.0))
    assert {refusal.rule for refusal in curves.refusals} == {("fifo", "none")}
    assert "a policy read the deadline of 3 s" in curves.refusals[0].reason
    assert all(LIFO in rules and ("fifo", "none") not in rules for rules in curves.by_cell.values())
    assert not rescore_study(stored, (3.0,)).refusals
    page = render_study(stored).read_text()
    assert "Not rescored: fifo in 4 cells" not in page  # 3 s is the only usual deadline here
    done = CliRunner().invoke(cli, ["rescore", str(copy), "--deadlines", "1,3"])
    assert done.exit_code == 0
    assert "not rescored: fifo in 4 cells" in done.stderr


def test_no_deadline_beyond_what_was_watched(stored: StoredStudy) -> None:
    with pytest.raises(InvalidInput, match=r"7 s was asked for, but .* watched requests for 6 s"):
        rescore_study(stored, (3.0, 7.0))
    assert legal_deadlines(stored) == (3.0,)


class _Links(HTMLParser):
    """Collects whatever a browser would fetch, and ids that stand twice in the page's own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.sections: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            is_link = name in ("src", "href", "xlink:href", "srcset", "data", "poster")
            if is_link and value and not value.startswith("#"):
                self.fetched.append(value)
            if tag == "section" and name == "id":
                self.sections.append(value or "")


def test_the_page_has_every_section_and_fetches_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    links = _Links()
    links.feed(page)
    assert links.fetched == []
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", page)
    assert len(set(links.sections)) == len(links.sections)
    assert links.sections == [
        "contents", "paired-differences", "breach-by-source-and-pressure", "regime-and-clusters",
        "dose-response-over-the-victim-s-age", "what-a-better-signal-buys",
        "signal-quality-against-breach", "other-deadlines",
        "floors--survivors-and-the-longest-tenth", "latency-and-goodput",
        "recompute-tax-and-preemptions", "timelines-of-one-contrasting-cell",
        "what-is-not-covered", "command-and-manifest",
    ]  # fmt: skip
    assert page.count("<svg") == 10  # eight figures and two timelines
    assert "preemptbench study --runs &lt;mine&gt;" in page
    for text in (page, (folder / "report.md").read_text(encoding="utf-8")):
        assert not re.search(r"no (significant )?difference|\bnan\b", text, re.IGNORECASE)


def test_the_verdict_is_three_sentences_of_the_agreed_words(numbers: StudyNumbers) -> None:
    low, signals, beyond = three_sentences(numbers)
    assert "low-breach regime (LIFO below 15% on pilot seeds)" in low
    assert "beyond the regime (LIFO at least 15% on pilot seeds)" in beyond
    for text in (low, beyond):
        counts = re.search(
            r"(\d+) better, (\d+) worse, (\d+) equivalent within .* and (\d+) i", text
        )
        assert counts is not None
        assert sum(map(int, counts.groups())) == 4
    assert "oracle-2" in signals
    assert "clairvoyant" in signals


def test_a_queue_that_grows_is_called_one(stored: StoredStudy, numbers: StudyNumbers) -> None:
    steady = [replace(c, breach_by_half=(0.1, 0.12)) for c in stored.study.sources[0].cells]
    growing = [replace(c, breach_by_half=(0.1, 0.4)) for c in steady]
    for cells, said in ((steady, "In no cell does LIFO"), (growing, "In 4 cells of 4 the later")):
        changed = replace(numbers, stored=edited(stored, cells=cells))
        assert overload_sentence(changed).startswith(said)


def test_a_report_written_again_is_the_same(copy: Path) -> None:
    before = (copy / "report.html").read_bytes()
    assert render_study(load_study(copy)).read_bytes() == before


def _in_chromium(page: Path, place: Path) -> str:
    """Return the page as Chromium has it after its scripts ran; no host can be reached."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={place}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=400,800", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chromium_opens_it_fetches_nothing_and_sorts(folder: Path, tmp_path: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    probe = """<script>
      const table = document.querySelector('table[aria-label=grid]');
      const at = [...table.querySelectorAll('th')].findIndex(h => h.textContent === 'breach');
      const values = () => [...table.tBodies[0].rows].map(r => +r.cells[at].dataset.v);
      const button = table.querySelectorAll('th button')[at];
      button.click(); const up = values(); button.click(); const down = values();
      document.title = JSON.stringify({up, down,
        fetched: performance.getEntriesByType('resource').map(e => e.name),
        too_wide: document.documentElement.scrollWidth > window.innerWidth});
    </script></body>"""
    probed = tmp_path / "probed.html"
    probed.write_text(page.replace("</body>", probe), encoding="utf-8")
    dom = _in_chromium(probed, tmp_path / "profile")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    found = json.loads(title[1])
    assert found["fetched"] == []
    assert found["too_wide"] is False  # wide tables scroll in their own box
    assert len(found["up"]) == 10
    assert found["up"] == sorted(found["up"])
    assert found["down"] == sorted(found["down"], reverse=True)


def test_tables_keep_what_pages_round(numbers: StudyNumbers, tmp_path: Path) -> None:
    tables = all_tables(numbers)
    assert len({table.name for table in tables}) == len(tables)
    write_tables(tables, tmp_path)
    for table in tables:
        read = pq.read_table(tmp_path / f"{table.name}.parquet")
        assert read.column_names == [column.key for column in table.columns]
        assert [tuple(row.values()) for row in read.to_pylist()] == list(table.rows)
        lines = (tmp_path / f"{table.name}.csv").read_text().splitlines()
        assert len(lines) == 1 + len(table.rows)


def test_cells_of_a_table_as_a_reader_sees_them() -> None:
    assert show(None, "share") == show(float("nan"), "pp") == "–"
    assert [show(0.1234, "share"), show(-0.05, "pp"), show(12.34, "pp")] == [
        "12.3%", "-0.05", "+12.3",
    ]  # fmt: skip
    assert [show(True, "text"), show(1, "text"), show(1234.0, "count")] == ["yes", "1", "1,234"]
    assert [show(0.0001, "p"), show(0.04, "p")] == ["< 0.001", "0.040"]
    table = Table("t", "a <caption>", (Column("x", "a|b"), Column("y", "y", "pp")), (("<i>", 2.0),))
    assert "&lt;i&gt;" in html_table(table)
    assert "a &lt;caption&gt;" in html_table(table)
    assert "| <i> | +2.0 |" in markdown_table(table)


def test_a_page_of_its_own_escapes_text(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    write_report(path, "<t>", "lead <b>", [Section("A & b", paragraph("x < y"))])
    page = path.read_text(encoding="utf-8")
    assert "<h1>&lt;t&gt;</h1>" in page
    assert "x &lt; y" in page


def test_an_empty_regime_is_said_and_the_report_is_written(copy: Path) -> None:
    stored = load_study(copy)
    pilot = replace(stored.study.sources[0].pilot, lifo_breach=(0.4, 0.5))
    empty = edited(stored, pilot=pilot)
    numbers = study_numbers(empty)
    assert numbers.grid["low breach"] == []
    assert numbers.contrasts["low breach"] is None
    low = three_sentences(numbers)[0]
    assert (
        low == "No cell of this grid has LIFO below 15% on pilot seeds: nothing is said about such."
    )
    assert "nothing is said about such" in render_study(empty).read_text(encoding="utf-8")


def _all_as_lifo(source: SourceResult) -> SourceResult:
    score = {(c.pressure, c.seed): c.score for c in source.cells if c.policy == "lifo"}
    return replace(
        source, cells=[replace(c, score=score[c.pressure, c.seed]) for c in source.cells]
    )


def test_all_differences_zero_give_points_and_no_nan(copy: Path) -> None:
    stored = load_study(copy)
    equal = [_all_as_lifo(source) for source in stored.study.sources]
    same = replace(stored, study=replace(stored.study, sources=equal))
    numbers = study_numbers(same)
    for comparison in numbers.comparisons:
        d = comparison.difference
        assert (d.mean, d.low, d.high) == (0.0, 0.0, 0.0)
        assert comparison.verdict.word == "equivalent"
    for rows in numbers.grid.values():
        assert all(row.confidence_set_p == 1.0 and row.letters == "a" for row in rows)
    assert not re.search(r"\bnan\b", render_study(same).read_text(encoding="utf-8"), re.IGNORECASE)


def test_rules_that_are_not_comparable_are_said_to_be_so(stored: StoredStudy) -> None:
    def others(source: SourceResult) -> SourceResult:  # as many as LIFO accepted, but not the same
        cells = [
            replace(c, accepted_digest="0" * 16) if c.policy == "fifo" else c for c in source.cells
        ]
        return replace(source, cells=cells)

    sources = [others(source) for source in stored.study.sources]
    numbers = study_numbers(replace(stored, study=replace(stored.study, sources=sources)))
    assert not any(c.rule[0] == "fifo" for c in numbers.comparisons)
    rows = [row for row in breach_table(numbers).rows if row[2] == "fifo"]
    assert rows
    assert all("not comparable" in row for row in rows)


def test_what_is_undetermined_has_bounds_and_no_verdict(stored: StoredStudy) -> None:
    def unsure(source: SourceResult) -> SourceResult:
        cells = [
            replace(
                c,
                score=replace(
                    c.score,
                    met=c.score.met - 1,
                    undetermined=1,
                    breach=float("nan"),
                    breach_high=c.score.breach_high + 1 / c.score.accepted,
                ),
            )
            if (c.policy, c.seed) == ("fifo", 0)
            else c
            for c in source.cells
        ]
        return replace(source, cells=cells)

    sources = [unsure(source) for source in stored.study.sources]
    numbers = study_numbers(replace(stored, study=replace(stored.study, sources=sources)))
    assert not any(c.rule[0] == "fifo" for c in numbers.comparisons)
    assert any(c.rule[0] == "young(0.5)" for c in numbers.comparisons)
    assert not any(numbers.grid.values())  # a grid row needs every rule in every cell
    table = breach_table(numbers)
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    for row in (row for row in rows if row["rule"] == "fifo"):
        assert row["verdict"] == "undetermined: no rank, bounds only"
        assert float(row["breach_low"] or 0) < float(row["breach_high"] or 0)
    for row in (row for row in rows if row["rule"] != "fifo"):
        assert row["breach_low"] == row["breach"] == row["breach_high"]


def _rows(table: Table) -> list[dict[str, Any]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def test_service_of_a_cell_is_the_mean_over_its_seeds(
    stored: StoredStudy, numbers: StudyNumbers
) -> None:
    rows = {(r["source"], r["pressure"], r["rule"]): r for r in _rows(service_table(numbers))}
    assert len(rows) == 2 * 2 * 5
    for source in stored.study.sources:
        for pressure in ("0.8", "1.3"):
            mine = [c for c in source.cells if (c.policy, c.pressure) == ("young(0.5)", pressure)]
            row = rows[source.source.name, pressure, "young(0.5)"]
            assert row["ttft_p99_s"] == pytest.approx(np.mean([c.service.ttft_p99_s for c in mine]))
            assert row["jain_fairness"] == pytest.approx(
                np.mean([c.service.jain_fairness for c in mine])
            )
    for row in rows.values():
        assert row["offered"] == row["accepted"] + row["rejected"] == 40
        assert row["excess_pp"] == pytest.approx(100 * (row["breach"] - row["floor"]))
        assert row["excess_pp"] >= -1e-9
        assert row["goodput_per_s"] == pytest.approx(
            row["offered_per_s"] * (1 - row["breach"]), 0.1
        )


def test_the_tax_is_split_into_what_was_computed_and_what_was_found(
    stored: StoredStudy, numbers: StudyNumbers
) -> None:
    for row in _rows(cost_table(numbers)):
        assert 0 <= row["recompute_tax"] < 1
        assert row["recomputed_per_preemption_tokens"] >= 0
        assert row["soft_hits_per_preemption_tokens"] >= 0
    cells = [c for s in stored.study.sources for c in s.cells if c.policy == "fifo"]
    row = next(r for r in _rows(cost_table(numbers)) if r["rule"] == "fifo")
    here = [c for c in cells if numbers.curves.in_regime[_source_of(stored, c), c.pressure]]
    wanted = here if row["part"] == "low breach" else [c for c in cells if c not in here]
    assert row["recomputed_per_preemption_tokens"] == pytest.approx(
        np.mean([c.recomputed_tokens / max(1, c.num_preemptions) for c in wanted])
    )


def _source_of(stored: StoredStudy, cell: Cell) -> str:
    return next(s.source.name for s in stored.study.sources if cell in s.cells)


def test_signal_quality_stands_beside_what_it_did(
    stored: StoredStudy, numbers: StudyNumbers, copy: Path
) -> None:
    assert numbers.not_measured == ()
    for row in numbers.qualities:
        mine = [
            c.difference.mean
            for c in numbers.comparisons
            if (c.source, c.rule) == (row.source, ("longest-remaining", row.quality.signal))
            and c.in_regime == (row.part == "low breach")
        ]
        assert (row.difference_pp, row.num_cells) == (pytest.approx(np.mean(mine)), len(mine))
        if row.quality.signal == "clairvoyant":
            assert row.quality.concordance == 1.0
        else:
            assert 0.5 < row.quality.concordance < 1.0
    assert {row.quality.signal for row in numbers.qualities} == {"oracle-2", "clairvoyant"}
    # kept, so that a report is written without an engine; a source that is gone is named
    kept = sorted((stored.out_dir / "quality").glob("*.json"))
    assert len(kept) == 2
    moved = load_study(copy)
    shutil.rmtree(copy / "quality")
    moved.study.sources[0].source.runs.unlink()
    gone = measure_qualities(moved)
    assert list(gone.by_source) == [moved.study.sources[1].source.name]
    assert len(gone.missing) == 1 and "f0 on made" in gone.missing[0]


def test_a_study_with_deadline_classes_is_stored_reported_and_rescored(tmp_path: Path) -> None:
    classes = (DeadlineClass("chat", 0.4, 1.5), DeadlineClass("batch", 0.6, 6.0))
    config = replace(
        CONFIG,
        policies=("lifo", "fifo"),
        signals=(),
        pressures=(1.3,),
        num_seeds=3,
        deadline_classes=classes,
    )
    runs = tmp_path / "inputs" / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=24, repeats=3, seed=11, cap_tokens=100), runs, {})
    source = Source(model_family="f", benchmark="made", runs=runs, kind="temperature zero")
    page = write_study_report(run_study(config, [source], tmp_path, num_jobs=1), tmp_path, COMMAND)
    stored = load_study(tmp_path)
    assert stored.study.config == config
    assert "1.5 s for 40% (chat)" in page.read_text(encoding="utf-8")
    numbers = study_numbers(stored)
    assert numbers.qualities == []
    rows = _rows(class_table(numbers))
    assert {row["rule"] for row in rows} == {"lifo", "fifo"}
    assert all(row["breach_chat"] > row["breach_batch"] for row in rows)
    own = rescore_study(stored, (0.5, 1.0), of_own=True)
    cells = [c for c in stored.study.sources[0].cells if c.policy == "fifo"]
    curves = own.by_cell["f on made", "1.3"]["fifo", "none"]
    assert [c.breach[1] for c in curves] == pytest.approx([c.score.breach for c in cells])
    with pytest.raises(InvalidInput, match=r"1\.1 times its own was asked for"):
        rescore_study(stored, (1.1,), of_own=True)
    runner = CliRunner()
    said = runner.invoke(cli, ["rescore", str(tmp_path), "--multiples", "0.5,1"])
    assert said.exit_code == 0, said.output
    assert "1 x own" in said.output
    both = runner.invoke(cli, ["rescore", str(tmp_path), "--multiples", "1", "--deadlines", "2"])
    assert "does not go with --multiples" in both.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": ("fifo",)}, "every comparison is with lifo, so add it"),
        ({"num_seeds": 1}, "num_seeds is 1: a difference needs at least 2 seeds"),
    ],
)
def test_a_study_that_cannot_compare_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_lifo_missing_from_the_cells_is_named(stored: StoredStudy) -> None:
    cells = [cell for cell in stored.study.sources[0].cells if cell.policy != "lifo"]
    with pytest.raises(InvalidInput, match=r"f0 on made at 0\.8: lifo is missing"):
        study_numbers(edited(stored, cells=cells))


def test_an_empty_folder_and_damaged_files_are_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no study\.json: it is no finished study"):
        load_study(tmp_path)
    cells = next(copy.glob("sources/*/cells/*.parquet"))
    whole = cells.read_bytes()
    cells.write_bytes(whole[:-40])
    with pytest.raises(InvalidInput, match=r"seed-.* is damaged or changed .* delete it"):
        load_study(copy)
    cells.unlink()
    with pytest.raises(InvalidInput, match=r"seed-.* is missing"):
        load_study(copy)
    cells.write_bytes(whole)
    records = next(copy.glob("sources/*/records/*.parquet"))
    records.write_bytes(records.read_bytes()[:-40])
    with pytest.raises(InvalidInput, match=r"records.* is damaged .*delete it with its cells"):
        rescore_study(load_study(copy), (3.0,))
    document = json.loads((copy / FILE).read_text())
    for change, said in (
        ({"format": "preemptbench-study/9"}, r"has format 'preemptbench-study/9', this version"),
        ({"config": document["config"] | {"colour": 1}}, r"unknown setting colour"),
        ({"sources": None}, r"study\.json is damaged"),
    ):
        (copy / FILE).write_text(json.dumps(document | change))
        with pytest.raises(InvalidInput, match=said):
            load_study(copy)
    (copy / FILE).write_text("{")
    with pytest.raises(InvalidInput, match=r"study\.json is damaged .*finished seeds are kept"):
        load_study(copy)


def test_a_study_compared_with_itself_differs_by_nothing(stored: StoredStudy) -> None:
    found = compare_studies(stored, stored)
    assert found.differs == ()
    assert found.only == (0, 0)
    assert len(found.cells) == 20
    for row in (*found.cells, *found.rules):
        assert row.difference is not None
        assert (row.difference.mean, row.difference.low, row.difference.high) == (0.0, 0.0, 0.0)


def test_two_semantics_or_settings_are_refused_unless_said(stored: StoredStudy) -> None:
    other = replace(stored, semantics="0" * 64)
    with pytest.raises(InvalidInput, match=r"two versions of the semantics .* --anyway"):
        compare_studies(stored, other)
    assert compare_studies(stored, other, anyway=True).differs
    config = replace(CONFIG, deadline_s=2.0)
    with pytest.raises(InvalidInput, match=r"deadline_s is 3\.0 in one and 2\.0 in the other"):
        compare_studies(stored, replace(stored, study=replace(stored.study, config=config)))
    fewer = replace(CONFIG, policies=CONFIG.policies[:2], num_seeds=3)
    assert not compare_studies(
        stored, replace(stored, study=replace(stored.study, config=fewer))
    ).differs


def test_seeds_of_other_requests_get_no_interval(stored: StoredStudy) -> None:
    other = replace(stored, inputs=dict.fromkeys(stored.inputs, "another"))
    found = compare_studies(stored, other)
    assert not found.rules
    assert all(cell.difference is None for cell in found.cells)
    renamed = [replace(s, source=replace(s.source, benchmark="else")) for s in stored.study.sources]
    apart = replace(stored, study=replace(stored.study, sources=renamed))
    with pytest.raises(InvalidInput, match=r"no cell in common: sources f0 on made, f1 on made"):
        compare_studies(stored, apart)


def test_the_verbs(copy: Path) -> None:
    run = CliRunner().invoke
    done = run(cli, ["report", str(copy), "--json"])
    assert json.loads(done.stdout)["report"] == str(copy / "report.html")
    done = run(cli, ["rescore", str(copy), "--deadlines", "1:6:1", "--cells", "--json"])
    told = json.loads(done.stdout)
    assert told["deadlines_s"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert len(told["curves"]) == 5 * 2 + 5 * 4
    assert "reversal" in run(cli, ["rescore", str(copy), "--deadlines", "1:6:1"]).stdout
    done = run(cli, ["compare", str(copy), str(copy), "--json"])
    assert len(json.loads(done.stdout)["cells"]) == 20
    assert "20 cells in common" in run(cli, ["compare", str(copy), str(copy)]).stdout


def test_deadlines_as_written() -> None:
    assert parse_deadlines("600:660:30") == (600.0, 630.0, 660.0)
    assert parse_deadlines("900,600") == (600.0, 900.0)
    for wrong in ("600:30", "1:2:0", "2:1:1", "soon", "1:2:3:4"):
        with pytest.raises(InvalidInput, match="neither FROM:TO:STEP nor a list"):
            parse_deadlines(wrong)


def test_storing_again_names_the_same_code(stored: StoredStudy) -> None:
    path = store_study(stored.study, stored.out_dir, COMMAND)
    assert json.loads(path.read_text())["semantics"] == stored.semantics
