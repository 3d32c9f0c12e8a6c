"""`PrivateStrategy`: the plain loop's bits in a `lightning.Trainer`, nothing sensitive in logs, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import pmlf
from small_runs import dataset, small, weights

lightning = pytest.importorskip("lightning", reason="pip install 'dp-pmlf[lightning]'")
from lightning.pytorch import LightningModule, Trainer  # noqa: E402

from pmlf.integrations.lightning import PrivateStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of lightning itself
EPOCHS, BATCH = 2, 50  # of 120 records: 3 steps each


class Classifier(LightningModule):
    """A module as people write it, with one loss per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05, betas=(0.0, 0.999))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def strategy() -> PrivateStrategy:
    return PrivateStrategy(noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=8, seed=4)


def trainer(folder: Path, **changed: Any) -> Trainer:
    given: dict[str, Any] = {
        "strategy": strategy(),
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 1,
        "enable_checkpointing": False,
    }
    return Trainer(**(given | changed))


def fitted(folder: Path, module: LightningModule | None = None, **changed: Any) -> Trainer:
    ckpt_path = changed.pop("ckpt_path", None)
    made = trainer(folder, **changed)
    loaders = DataLoader(dataset(), batch_size=BATCH, shuffle=True), DataLoader(dataset(), batch_size=60)
    made.fit(module or Classifier(), *loaders, ckpt_path=ckpt_path)
    return made


def plain_loop() -> pmlf.PrivateRun:
    model = small().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.0, 0.999))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)  # an epoch has three steps
    run = pmlf.make_private(
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        dataset=dataset(),
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        noise_multiplier=1.0,
        target_delta=1e-3,
        batch_size=BATCH,
        steps=3 * EPOCHS,
        max_physical_batch_size=8,
        seed=4,
    )
    for batch in run.batches():
        run.step(batch)
    return run


@pytest.mark.slow
def test_a_private_strategy_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    made, run = fitted(tmp_path), plain_loop()
    assert torch.equal(weights(made.lightning_module), weights(run.model))
    assert made.global_step == 6
    certificate = made.strategy.certificate()
    assert certificate["epsilon"] == run.certificate()["epsilon"] and certificate["released_steps"] == 6
    assert set(made.logged_metrics) == {"accuracy"}


@pytest.mark.slow
def test_a_resumed_training_ends_in_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole")
    half = fitted(tmp_path / "half", max_epochs=EPOCHS, limit_val_batches=0, callbacks=[Stop()])
    saved = tmp_path / "half.ckpt"
    half.save_checkpoint(saved)
    assert half.strategy.run is not None and half.strategy.run.steps_done == 3
    resumed = fitted(tmp_path / "resumed", Classifier(), ckpt_path=saved)
    assert torch.equal(weights(resumed.lightning_module), weights(whole.lightning_module))
    assert resumed.strategy.certificate()["released_steps"] == 6


class Stop(lightning.pytorch.Callback):  # type: ignore[name-defined,misc]
    """Ends training after the first epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = True


@pytest.mark.slow
def test_a_checkpoint_without_the_state_of_a_run_is_refused(tmp_path: Path) -> None:
    made = fitted(tmp_path)
    saved = tmp_path / "saved.ckpt"
    made.save_checkpoint(saved)
    Path(f"{saved}.private_run.safetensors").unlink()
    with pytest.raises(ValueError, match="nobody knows what the run has spent"):
        fitted(tmp_path, ckpt_path=saved)


class Mean(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).mean()


class Logging(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = super().training_step(batch, batch_idx)
        self.log("train_loss", losses.mean())
        return losses


class Counting(Classifier):
    """Keeps what it has seen of the records, for a log after the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hits += int((self.net(batch[0]).argmax(1) == batch[1]).sum())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("train_hits", float(self.hits))


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = super().training_step(batch, batch_idx)
        self.seen.append(losses.mean().item())
        return losses


class Clipping(Classifier):
    def on_after_backward(self) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (Mean, 'reduction="none"'),
        (Logging, "log in validation_step"),
        (Counting, r"training_step changes self\.hits"),
        (Keeping, "'seen' was written"),
        (Clipping, "overrides on_after_backward"),
    ],
)
def test_modules_that_cannot_be_private_are_refused_with_a_way_out(module: Any, answer: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=answer):
        fitted(tmp_path, module())


@pytest.mark.parametrize("sanity_checks", [0, 1])
def test_the_training_records_are_refused_for_validation(sanity_checks: int, tmp_path: Path) -> None:
    records = dataset()
    made = trainer(tmp_path, num_sanity_val_steps=sanity_checks)
    with pytest.raises(ValueError, match="without noise: give other records"):
        made.fit(Classifier(), DataLoader(records, batch_size=BATCH), DataLoader(records, batch_size=60))


@pytest.mark.slow
def test_a_second_training_of_one_strategy_is_refused_without_a_ledger(tmp_path: Path) -> None:
    """Its certificate would state what the second run alone has spent."""
    made = fitted(tmp_path, max_epochs=1)
    made.fit_loop.max_epochs = 2
    with pytest.raises(ValueError, match="would not count what the first has spent"):
        made.fit(made.lightning_module, DataLoader(dataset(), batch_size=BATCH))


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 0.5},
        {"overfit_batches": 1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": -1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_settings_that_cannot_be_private_are_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        fitted(tmp_path, **changed)
