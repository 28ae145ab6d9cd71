"""The preset on whole texts, on made-up tables in the shape of the public ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.signals import signal_request
from predictors.registry import load_predictor
from preemptbench.study_presets import NUM_FOLDS, REAL_TEXT, text_sources
from traces.public_texts import SOURCES
from traces.runlog import read_runs

# model -> prompts that it answered in each collection; the preset's families and two others
MODELS = {
    "LRMTokenEconomy": {"qwen3-235b-a22b-think": 12, "some-open-model": 12},
    "MisguidedAttention": {"qwen3-235b-a22b-think": 12, "deepseek-r1-0528": 3, "grok-3-mini": 12},
    "ATTS-self": {"distill": 10},
    "crosslingual-s1.1": {"s1.1-3B": 10},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tables of lengths, texts and prompts; two runs a prompt, of 200 tokens and more."""
    lengths: list[dict[str, Any]] = []
    prompts: dict[tuple[str, str], dict[str, str]] = {}
    folder = tmp_path / "data" / "reasoning_lengths"
    (folder / "texts").mkdir(parents=True)
    for source in SOURCES:
        texts = []
        for model, count in MODELS[source].items():
            for number in range(count):
                prompt = f"p{number}"
                key = {"source": source, "model": model, "benchmark": source, "prompt_id": prompt}
                prompts[source, prompt] = {
                    "benchmark": source, "prompt_id": prompt, "source": source,
                    "prompt": f"{source}: what is {number} and why?",
                }  # fmt: skip
                for sample in range(2):
                    words = 200 + 40 * number + 15 * sample + len(model)
                    run = key | {"sample_idx": sample, "variant": ""}
                    lengths.append(
                        run
                        | {
                            "temperature": 0.6, "output_tokens": words, "how_counted": "reported",
                            "max_tokens": 4000, "truncated": False, "prompt_tokens": 9,
                        }
                    )  # fmt: skip
                    thinking = "\n".join(f"wait, step {i} of {words}" for i in range(words // 8))
                    texts.append(
                        run | {"thinking": thinking, "answer": "so it is", "licence": "made up"}
                    )
        pq.write_table(pa.Table.from_pylist(texts), folder / "texts" / f"{source}.parquet")
    pq.write_table(pa.Table.from_pylist(lengths), folder / "lengths.parquet")
    pq.write_table(pa.Table.from_pylist(list(prompts.values())), folder / "prompts.parquet")
    return tmp_path / "data"


def test_a_source_for_each_family_whose_texts_are_whole(data: Path, tmp_path: Path) -> None:
    sources = text_sources(REAL_TEXT, data, tmp_path / "out")
    # three prompts are too few, and a closed model's thinking is a summary
    assert [source.name for source in sources] == [
        "Qwen3-235B-A22B on LRMTokenEconomy",
        "Qwen3-235B-A22B on MisguidedAttention",
    ]
    assert {source.kind for source in sources} == {"sampled"}


def test_its_predictor_learns_from_all_texts_and_never_answers_a_prompt_it_saw(
    data: Path, tmp_path: Path
) -> None:
    sources = text_sources(REAL_TEXT, data, tmp_path / "out")
    folders = {dict(source.checkpoints)["gbm-hazard"] for source in sources}
    (folder,) = folders
    folds = [load_predictor(folder / f"fold-{fold}") for fold in range(NUM_FOLDS)]
    learnt = {model for fold in folds for model in fold.provenance.models}
    assert {"some-open-model", "distill", "s1.1-3B"} <= learnt and "grok-3-mini" not in learnt
    for source in sources:
        for run in read_runs(source.runs):
            seen = [
                signal_request(run).prompt_sha256 in fold.provenance.prompt_sha256s
                for fold in folds
            ]
            assert seen.count(False) == 1  # the fold that answers


def test_a_second_start_reads_what_the_first_wrote(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = text_sources(REAL_TEXT, data, tmp_path / "out")
    monkeypatch.setattr("preemptbench.study_presets.read_source", None)
    assert text_sources(REAL_TEXT, data, tmp_path / "out") == first
