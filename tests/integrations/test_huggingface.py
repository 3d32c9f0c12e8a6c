"""`PrivateTrainer`: the plain loop's bits, losses of each sample, nothing sensitive in logs, refusals by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

import pmlf
from pmlf.integrations.huggingface import PrivacyArguments, PrivateTrainer
from pmlf.integrations.huggingface.losses import loss_function
from small_trainers import LENGTH, PRIVACY, arguments, bert, classifier, plain_loop, records, trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_private_trainer_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    private = trainer(tmp_path, warmup_steps=2, optim="adamw_torch", weight_decay=0.1)
    private.train()
    run = plain_loop(private.get_decay_parameter_names(private.model), records(), batch_size=12, together=6)
    trained = private.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in run.model.state_dict().items())
    assert private.certificate()["epsilon"] == run.certificate()["epsilon"]


@pytest.mark.slow
def test_a_resumed_training_ends_in_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    resumed = trainer(tmp_path / "whole")
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


def unseeded(folder: Path, *, own: Callable[..., Tensor] | None = None, **changed: Any) -> PrivateTrainer:
    return PrivateTrainer(
        classifier(),
        arguments(folder, **changed),
        train_dataset=records(),
        privacy=PrivacyArguments(target_epsilon=8.0, target_delta=1e-3, assume_independent_samples=True),
        compute_loss_func=own,
    )


@pytest.mark.slow
def test_steps_that_are_done_again_after_a_checkpoint_are_paid_for(tmp_path: Path) -> None:
    unseeded(tmp_path).train()
    resumed = unseeded(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # two of four steps; all of epsilon is spent
    assert resumed.state.global_step == 2 and resumed.certificate()["released_steps"] == 4
    with pytest.raises(ValueError, match="is not in output_dir"):
        unseeded(tmp_path / "other").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_a_second_training_is_paid_for(tmp_path: Path) -> None:
    private = unseeded(tmp_path, max_steps=1, save_strategy="no")
    private.train()
    with (
        pytest.warns(UserWarning, match="counts an earlier training"),
        pytest.raises(ValueError, match=r"target_epsilon=8\.0 is spent already"),
    ):
        private.train()


@pytest.mark.slow
def test_a_training_that_runs_out_of_memory_does_not_start_again_with_a_new_budget(tmp_path: Path) -> None:
    released: list[int] = []

    def too_large_at_the_second_step(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if private.state.global_step == 1 and not released:
            released.append(1)
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    private = unseeded(tmp_path, own=too_large_at_the_second_step, auto_find_batch_size=True, save_strategy="no")
    with pytest.raises(MemoryError, match="per_device_train_batch_size"):
        private.train()
    assert private.certificate()["released_steps"] == 1


def test_the_training_records_are_refused_for_evaluation(tmp_path: Path) -> None:
    rows: Any = records()
    given: dict[str, Any] = {"privacy": PrivacyArguments(**PRIVACY), "train_dataset": rows}
    for evaluated in (rows, {"train": rows, "test": records(8)}):
        with pytest.raises(ValueError, match="without noise: give other records"):
            PrivateTrainer(classifier(), arguments(tmp_path), eval_dataset=evaluated, **given)
    with pytest.raises(ValueError, match="without noise: give other records"):
        PrivateTrainer(classifier(), arguments(tmp_path), **given).evaluate(rows)


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


def t5() -> T5ForConditionalGeneration:
    config = T5Config(  # type: ignore[call-arg]  # of its base class
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def gpt2_with_lora() -> Any:
    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True))


def one_at_a_time(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss of each sequence in a batch by itself: a mean over its labelled tokens."""
    rows = range(len(batch["labels"]))
    return torch.stack([model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in rows])


@pytest.mark.slow
@pytest.mark.parametrize("build", [t5, gpt2_with_lora])
def test_a_sequence_has_one_loss_whatever_its_number_of_labels(build: Callable[[], Any], tmp_path: Path) -> None:
    """Trained weights are those of the plain loop with the model's own loss, one sequence at a time."""
    rows = [
        {"input_ids": ids, "labels": ids.where(torch.arange(LENGTH) <= 1 + number % 5, -100)}
        for number, ids in enumerate(row["input_ids"] for row in records())
    ]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    private = PrivateTrainer(
        models[0],
        arguments(tmp_path, max_steps=2, lr_scheduler_type="constant", optim="sgd", learning_rate=0.5),
        train_dataset=rows,
        privacy=PrivacyArguments(**PRIVACY, assume_independent_samples=True),  # the proof takes seconds
    )
    private.train()
    model = models[1].train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=0.5),
        dataset=rows,
        loss_fn=one_at_a_time,
        gradients="one-by-one",
        method="dp-pmlf",
        noise_multiplier=0.8,
        target_delta=1e-3,
        batch_size=12,
        steps=2,
        clip_norm=0.7,
        max_physical_batch_size=6,
        seed=5,
        assume_independent_samples=True,
    )
    for batch in run.batches():
        run.step(batch)
    assert (tmp_path / "certificate.json").exists()
    for (name, one), other in zip(models[0].named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), name


@pytest.mark.slow
def test_an_own_loss_of_each_sample_is_used_and_a_mean_refused(tmp_path: Path) -> None:
    def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.square().sum(1)

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs.logits, labels)

    for own in (squared, mean):
        private = PrivateTrainer(
            classifier(),
            arguments(tmp_path / own.__name__, max_steps=1, save_strategy="no"),
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
        {"parallelism_config": ParallelismConfig()},
        {"dataloader_drop_last": True},
        {"debug": "underflow_overflow"},
        {"hub_strategy": "all_checkpoints"},
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
    plain, grouped = (
        trainer(tmp_path / "plain"),
        trainer(tmp_path / "grouped", train_sampling_strategy="group_by_length"),
    )
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
