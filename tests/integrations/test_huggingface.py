"""`PrivateTrainer`: the plain loop's bits, losses of each sample, nothing sensitive in logs, refusals by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import pmlf
from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer
from pmlf.integrations.huggingface.losses import loss_function

ROOT = Path(__file__).resolve().parents[2]
RECORDS, LENGTH = 48, 6
SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
PRIVACY = {"noise_multiplier": 0.8, "target_delta": 1e-3, "noise_seed": 5, "method": "dp-pmlf"}


def bert(**changed: Any) -> BertConfig:
    return BertConfig(**SMALL, max_position_embeddings=16, **changed)


def records() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 20, (RECORDS, LENGTH), generator=generator)
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [{"input_ids": row, "attention_mask": mask, "labels": row.sum() % 2} for row in ids]


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(bert(num_labels=2))


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.7,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **(given | changed))


def trainer(folder: Path, model: nn.Module | None = None, **changed: Any) -> PrivateTrainer:
    return PrivateTrainer(
        classifier() if model is None else model,
        arguments(folder, **changed),
        train_dataset=records(),
        privacy=PrivacyArguments(**PRIVACY),
    )


@pytest.mark.slow
def test_a_private_trainer_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    private = trainer(tmp_path, warmup_steps=2, optim="adamw_torch", weight_decay=0.1)
    private.train()
    model = classifier().train()
    decayed = private.get_decay_parameter_names(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    run = pmlf.make_private(
        model=model,
        optimizer=optimizer,
        scheduler=get_linear_schedule_with_warmup(optimizer, 2, 4),
        dataset=records(),
        loss_fn=lambda model, batch: F.cross_entropy(
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
            batch["labels"],
            reduction="none",
        ),
        method="dp-pmlf",
        noise_multiplier=0.8,
        target_delta=1e-3,
        batch_size=12,
        steps=4,
        clip_norm=0.7,
        max_physical_batch_size=6,
        seed=5,
    )
    for batch in run.batches():
        run.step(batch)
    trained = private.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert private.certificate()["epsilon"] == run.certificate()["epsilon"]


@pytest.mark.slow
def test_a_resumed_training_ends_in_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in resumed.model.state_dict().items())
    saved = tmp_path / "whole" / "checkpoint-2" / "private_run.safetensors"
    assert os.stat(saved).st_mode & 0o077 == 0  # a state from which a run can resume is private


@pytest.mark.slow
def test_logs_and_files_hold_no_training_loss_and_no_gradient_norm(tmp_path: Path) -> None:
    private = trainer(tmp_path)
    output = private.train()
    logged = {name for entry in private.state.log_history for name in entry}
    assert {"learning_rate", "epsilon"} <= logged
    assert not logged & {"loss", "train_loss", "grad_norm", "num_input_tokens_seen", "total_flos"}
    assert output.training_loss != output.training_loss  # NaN
    stored = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert not {name for entry in stored["log_history"] for name in entry} & {"loss", "grad_norm"}
    assert json.loads((tmp_path / "certificate.json").read_text())["released_steps"] == 4


def tokens() -> Tensor:
    return torch.randint(3, 20, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def partly_ignored() -> Tensor:
    labels = tokens()
    labels[0, :2], labels[1, 3:] = -100, -100
    return labels


MODELS: dict[str, Any] = {
    "classes": lambda: (BertForSequenceClassification(bert(num_labels=3)), {"labels": torch.tensor([0, 2, 1])}),
    "regression": lambda: (BertForSequenceClassification(bert(num_labels=1)), {"labels": torch.rand(3).double()}),
    "several labels": lambda: (
        BertForSequenceClassification(bert(num_labels=4)),
        {"labels": torch.randint(2, (3, 4)).double()},
    ),
    "tokens": lambda: (BertForTokenClassification(bert(num_labels=20)), {"labels": partly_ignored()}),
    "masked": lambda: (BertForMaskedLM(bert()), {"labels": partly_ignored()}),
    "causal": lambda: (
        GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
        {"labels": partly_ignored()},
    ),
    "sequences": lambda: (
        BartForConditionalGeneration(
            BartConfig(vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                       decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16)
        ),
        {"labels": partly_ignored()},
    ),
    "spans": lambda: (
        BertForQuestionAnswering(bert()),
        {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([3, 4, 1])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_each_sample_is_the_models_own_loss_on_that_sample_alone(name: str) -> None:
    torch.manual_seed(0)
    model, labels = MODELS[name]()
    model = model.double().eval()
    batch = {"input_ids": tokens(), **labels}
    losses = loss_function(model, smoothing=0.0, own=None, bfloat16=False)(model, batch)
    alone = [model(**{key: value[i : i + 1] for key, value in batch.items()}).loss for i in range(3)]
    assert torch.allclose(losses, torch.stack(alone).double(), rtol=1e-6)  # some of their losses are in float32


@pytest.mark.slow
def test_an_own_loss_of_each_sample_is_used_and_a_mean_refused(tmp_path: Path) -> None:
    def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.square().sum(1)

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs.logits, labels)

    for own in (squared, mean):
        private = PrivateTrainer(
            classifier(),
            arguments(tmp_path, max_steps=1, save_strategy="no"),
            train_dataset=records(),
            privacy=PrivacyArguments(**PRIVACY),
            compute_loss_func=own,
        )
        if own is squared:
            private.train()
        else:
            with pytest.raises(ValueError, match="one loss"):
                private.train()


@pytest.mark.parametrize(
    "changed",
    [
        {"fp16": True},
        {"torch_compile": True},
        {"neftune_noise_alpha": 5.0},
        {"dataloader_drop_last": True},
        {"include_num_input_tokens_seen": "all"},
        {"train_sampling_strategy": "sequential"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_arguments_that_cannot_be_private_are_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        trainer(tmp_path, **changed)


def test_packing_and_overridden_losses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DataCollatorWithFlattening"):
        PrivateTrainer(
            classifier(), arguments(tmp_path), privacy=PrivacyArguments(**PRIVACY), train_dataset=records(),
            data_collator=DataCollatorWithFlattening(),
        )  # fmt: skip

    class Own(PrivateTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return Trainer.compute_loss(self, *args, **kwargs)

    with pytest.raises(ValueError, match="compute_loss_func"):
        Own(classifier(), arguments(tmp_path), privacy=PrivacyArguments(**PRIVACY), train_dataset=records())


@pytest.mark.slow
def test_micro_batches_of_similar_length_change_no_draw(tmp_path: Path) -> None:
    plain, grouped = trainer(tmp_path), trainer(tmp_path, train_sampling_strategy="group_by_length")
    plain.train()
    grouped.train()
    ours, theirs = plain.model.state_dict(), grouped.model.state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-5) for name, value in ours.items())


@pytest.mark.slow
def test_a_stock_script_becomes_private_in_at_most_six_lines(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/hugging-face-trainer.md").read_text()
    shown = page.split("```diff\n")[1].split("```")[0].splitlines()
    added = [line[1:] for line in shown if line.startswith("+")]
    removed = [line[1:] for line in shown if line.startswith("-")]
    script = (ROOT / "examples/huggingface_trainer.py").read_text()
    assert len(added) <= 6 and all(f"{line}\n" in script for line in added)
    for line, before in zip(added, [*removed, None, None], strict=True):  # back to the stock script
        script = script.replace(f"{line}\n", f"{before}\n" if before else "", 1)
    assert "pmlf" not in script.split('"""')[2]
    stock = tmp_path / "stock.py"
    stock.write_text(script)
    done = subprocess.run([sys.executable, str(stock)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
