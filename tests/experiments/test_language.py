"""Language models on the command line: perplexity on held-out texts, LoRA by default, use after training, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

import pmlf
from pmlf import data
from pmlf.cli.main import main
from pmlf.evidence import certificate
from pmlf.experiments import export, runner, splits, tasks
from pmlf.experiments.options import OwnData, PretrainedOptions
from pmlf.experiments.spec import RunSpec
from twins import WORDS, write_language_model, write_table

OWN = OwnData(task="causal-lm", text_column="text")


def phrases(count: int, seed: int = 0) -> list[str]:
    """Texts in which every word determines the next one, with an exception now and then."""
    chance = np.random.default_rng(seed)
    found = []
    for start in chance.integers(0, len(WORDS), count):
        words = [WORDS[(start + step) % len(WORDS)] for step in range(chance.choice([4, 7]))]
        words[chance.integers(0, len(words))] = WORDS[chance.integers(0, len(WORDS))]
        found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of texts, and the folder of a model."""
    root = tmp_path_factory.mktemp("language")
    texts = write_table(root / "texts.jsonl", [{"text": text, "who": "x"} for text in phrases(400)])
    return texts, write_language_model(root / "model")


def plain_perplexity(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """Text by text in float64, by transformers' own loss: exp of the mean over all predicted tokens."""
    model, total, count = model.double().eval(), 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        predicted = ids.shape[1] - 1
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * predicted
        count += predicted
    return math.exp(total / count)


def held_out(texts: Path) -> list[str]:
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    return [rows[index] for index in splits.holdout_indices(len(rows), tasks.DEFAULT_HOLDOUT)[1]]


@pytest.fixture(scope="module")
def run_folder(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command as it stands on the page, with LoRA."""
    texts, network = made
    out = tmp_path_factory.mktemp("trained") / "run"
    command = ["train", "--task", "causal-lm", "--dataset", texts, "--text-column", "text", "--model", network]
    options = ["--epsilon", 50, "--steps", 25, "--batch-size", 100, "--optimizer", "adam", "--lr", 0.03]
    assert main([str(word) for word in [*command, *options, "--method", "dpsgd", "--out", out]]) == 0
    return out


@pytest.mark.slow
def test_one_command_lowers_the_perplexity_of_held_out_texts(made: tuple[Path, Path], run_folder: Path) -> None:
    texts, network = made
    tokenizer = AutoTokenizer.from_pretrained(network)
    before = plain_perplexity(GPT2LMHeadModel.from_pretrained(network), tokenizer, held_out(texts))
    score = json.loads((run_folder / "result.json").read_text())["scores"]["holdout"]
    assert score["records"] == 40 and score["interval"][0] < score["perplexity"] < score["interval"][1]
    assert score["interval"][1] < 0.9 * before

    released = pmlf.load(run_folder)
    network_now: Any = released.model.merge_and_unload()  # of peft: only LoRA's weights were trained
    assert score["perplexity"] == pytest.approx(plain_perplexity(network_now, tokenizer, held_out(texts)), rel=1e-4)
    assert released.certificate is not None and certificate.examined(released.certificate)[1] is None
    assert released.certificate["records"] == 360


@pytest.mark.slow
def test_all_weights_are_trained_at_rank_zero(made: tuple[Path, Path], tmp_path: Path) -> None:
    spec = RunSpec(
        dataset=str(made[0]),
        model=str(made[1]),
        own=OWN,
        pretrained=PretrainedOptions(lora_rank=0),
        steps=2,
        batch_size=100,
        noise_multiplier=0.5,
        delta=1e-4,
        method="dpsgd",
    )
    result = runner.run(spec, tmp_path / "run")
    model, before = pmlf.load(tmp_path / "run").model, GPT2LMHeadModel.from_pretrained(made[1])
    for (name, now), earlier in zip(model.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(now, earlier), name
    found = plain_perplexity(model, AutoTokenizer.from_pretrained(made[1]), held_out(made[0]))
    assert result.evaluations[-1].numbers()["holdout/perplexity"] == pytest.approx(found, rel=1e-4)


@pytest.mark.slow
def test_a_trained_model_continues_texts_and_is_scored_again(
    made: tuple[Path, Path], run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released = pmlf.load(run_folder)
    texts = [f"{WORDS[0]} {WORDS[1]}", WORDS[5], ""]
    batch = torch.tensor([released.tokenizer(texts[0])["input_ids"]])
    expected = released.model.generate(
        input_ids=batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=30, pad_token_id=0
    )
    rows = released.predict(texts)
    assert [list(row) for row in rows] == [["prediction"]] * 3
    assert rows[0]["prediction"] == released.tokenizer.decode(expected[0, 2:], skip_special_tokens=True)
    held = write_table(tmp_path / "held.csv", [{"text": text} for text in held_out(made[0])])
    stored = json.loads((run_folder / "result.json").read_text())["scores"]["holdout"]["perplexity"]
    assert released.evaluate(str(held)).to_json()["perplexity"] == pytest.approx(stored, rel=1e-5)
    assert main(["predict", str(run_folder), "--text", texts[0]]) == 0
    assert rows[0]["prediction"] in capsys.readouterr().out
    with pytest.raises(ValueError, match="no classes: use `predict`"):
        released.probabilities(texts)


def test_a_language_model_is_exported_with_its_card_and_not_as_a_graph(run_folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(run_folder), "--out", str(tmp_path / "hub")]) == 0
    assert "continues texts" in (tmp_path / "hub" / "README.md").read_text()
    assert pmlf.load(tmp_path / "hub").predict([WORDS[0]])
    for kind in ("onnx", "torch-export"):
        with pytest.raises(ValueError, match="format='hub'"):
            export.write(run_folder, kind, tmp_path / "graph")


def test_each_text_has_one_loss_that_padding_does_not_change(made: tuple[Path, Path]) -> None:
    task = tasks.prepare(RunSpec(dataset=str(made[0]), model=str(made[1]), own=OWN, seed=0))
    assert task.collate_fn is not None
    items = [task.train[index] for index in range(6)]
    together = task.losses(task.model, task.collate_fn(items))
    alone = [task.losses(task.model, task.collate_fn([item])) for item in items]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    assert len({len(item[0]) for item in items}) > 1


def test_texts_end_with_the_end_token_once_and_empty_ones_cost_nothing(made: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[1])
    form = data.LanguageForm(text="text", longest=4, cut=True)
    words = " ".join(WORDS[:6])
    found = form.tokens(tokenizer, [words, WORDS[0], f"{WORDS[0]} <end>", ""], "here")
    assert [len(tokens) for tokens in found] == [4, 2, 2, 1]
    assert found[1] == found[2] and found[1][-1] == tokenizer.eos_token_id
    model = GPT2LMHeadModel.from_pretrained(made[1])
    batch = data.CausalPadding(0)([(torch.tensor(tokens), None, torch.tensor(0)) for tokens in found])
    losses = data.NextToken().losses(model(batch["input_ids"]).logits, batch["labels"])
    assert losses[3] == 0 and (losses[:3] > 0).all()


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"own": OwnData(task="causal-lm")}, "needs `text_column`"),
        ({"own": OwnData(task="causal-lm", text_column="text", labels=("a", "b"))}, "`labels` is only for"),
        ({"own": OwnData(task="causal-lm", text_column="text", text_pair_column="who")}, "only for texts"),
        ({"pretrained": PretrainedOptions(head_only=True)}, "`head_only` is only for images and texts"),
        ({"pretrained": PretrainedOptions(lora_rank=-1)}, "lora_rank=-1"),
        ({"own": OwnData(task="causal-lm", text_column="body")}, "no column 'body', only 'text', 'who'"),
    ],
)
def test_what_a_language_model_has_no_use_for_is_refused(
    given: dict[str, Any], answer: str, made: tuple[Path, Path]
) -> None:
    spec = RunSpec(**{"dataset": str(made[0]), "model": str(made[1]), "own": OWN, **given})
    with pytest.raises(ValueError, match=answer):
        tasks.prepare(spec)


def test_a_text_that_is_too_long_is_refused_or_cut(made: tuple[Path, Path], tmp_path: Path) -> None:
    texts = write_table(tmp_path / "long.jsonl", [{"text": " ".join(WORDS[:1] * 40)}] * 12)
    spec = RunSpec(dataset=str(texts), model=str(made[1]), own=OWN)
    with pytest.raises(ValueError, match="more than 32 tokens, the limit of the model: give max_length=32"):
        tasks.prepare(spec)
    cut = tasks.prepare(RunSpec(**{**vars(spec), "pretrained": PretrainedOptions(max_length=9)}))
    assert {len(item[0]) for item in (cut.train[0], cut.train[5])} == {9}
