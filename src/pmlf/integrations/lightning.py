"""Private training of a `LightningModule`: `PrivateStrategy`, a strategy for `lightning.Trainer`.

    strategy = PrivateStrategy(target_epsilon=3.0, target_delta=1e-5)
    lightning.Trainer(strategy=strategy, max_epochs=5).fit(module, train_loader)

It needs `lightning`: pip install 'dp-pmlf[lightning]'.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:  # the extra is optional
    raise ImportError(
        f"pmlf.integrations.lightning needs {error.name}, which is not installed: pip install 'dp-pmlf[lightning]'"
    ) from error

from pmlf import checkpoint
from pmlf.engine.plan import Gradients
from pmlf.evidence.ledger import Ledger
from pmlf.mechanism.sampling import LogicalBatch, population
from pmlf.methods import Method
from pmlf.parallel.processes import joined
from pmlf.run import PrivateRun, make_private

STATE_ENDING = ".private_run.safetensors"

# Settings of `Trainer` that a private step has no place for: name, the only value that is accepted, reason.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("gradient_clip_val", None, "each sample is clipped already: give PrivateStrategy(clip_norm=...)"),
    ("accumulate_grad_batches", 1, "a larger batch is a larger draw: give the DataLoader a larger batch_size"),
    ("precision", "32-true", "put torch.autocast into training_step"),
    ("num_devices", 1, "a run of Lightning is one process: for several, use make_private under torchrun"),
    ("num_nodes", 1, "a run of Lightning is one process: for several, use make_private under torchrun"),
    ("overfit_batches", 0.0, "batches are Poisson draws"),
    ("limit_train_batches", 1.0, "the budget is planned for whole epochs: give max_steps"),
    ("reload_dataloaders_every_n_epochs", 0, "a run has one dataset"),
)

# Methods of `LightningModule` that a private step does not call.
_NOT_CALLED = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class PrivateStrategy(SingleDeviceStrategy):
    """A strategy of `lightning.Trainer` whose steps are those of a `PrivateRun`: one process, one device.

    `training_step` returns one loss per sample (`reduction="none"`). The training `DataLoader` gives the records, the
    collate function and, by its batch size, the expected batch size B of a Poisson draw; its order is not used.
    `max_epochs` of ceil(n / B) steps, or `max_steps`, are the plan. Optimizer, learning-rate schedulers, validation,
    loggers, callbacks and checkpoints work as usual. `ckpt_path` resumes a run with its budget.

    What `training_step` computes is sensitive: `self.log` in it is an error, and `self.trainer` is not there.
    The module is in manual optimization from then on (`module.automatic_optimization` is False).

    Args:
        target_epsilon: The epsilon that the run must not pass. Give this or `noise_multiplier`. This argument and the
            others have the meaning that they have in `pmlf.make_private`.
        target_delta: The delta of the guarantee.
        noise_multiplier: The noise multiplier, in place of `target_epsilon`.
        method: A method from `pmlf.methods`, or the name of a preset.
        clip_norm: The clip norm C of each sample.
        max_physical_batch_size: The number of samples in memory at once.
        seed: None for cryptographic noise and sampling.
        ledger: An open ledger. The target then covers all that is in it.
        secure_noise: Mitigate floating-point attacks on the noise.
        gradients: How per-sample gradients are computed.
        assume_independent_samples: Skip the proof that samples do not influence each other.
        device: The device to train on.

    Attributes:
        run: The run, from the start of training on; None before.
    """

    strategy_name = "private"

    def __init__(
        self,
        *,
        target_delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        method: Method | str = "dp-pmlf",
        clip_norm: float = 1.0,
        max_physical_batch_size: int = 256,
        seed: int | None = None,
        ledger: Ledger | None = None,
        secure_noise: bool = False,
        gradients: Gradients = "ghost",
        assume_independent_samples: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device=device)
        self.run: PrivateRun | None = None
        self._saved: dict[str, Any] | None = None
        self._ledger = ledger
        self._trained_on: Any = None  # the records of the training loader
        self._evaluated: list[Any] = []  # those of validation and test loaders
        self._make = partial(
            make_private,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
            method=method,
            clip_norm=clip_norm,
            max_physical_batch_size=max_physical_batch_size,
            seed=seed,
            ledger=ledger,
            secure_noise=secure_noise,
            gradients=gradients,
            assume_independent_samples=assume_independent_samples,
        )

    def certificate(self) -> dict[str, Any]:
        """The mechanism of the last training, its public constants, and the epsilon they give.

        Raises:
            RuntimeError: `fit` was not called yet.
        """
        if self.run is None:
            raise RuntimeError("there is no run to certify: call Trainer.fit first")
        return self.run.certificate()

    def setup(self, trainer: Trainer) -> None:
        """Refuse what cannot be private, and make the optimizer."""
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_unsupported(trainer)
            if self.run is not None and self._ledger is None:
                raise ValueError(
                    "this strategy has trained already, and a second run would not count what the first has spent: "
                    "give PrivateStrategy(ledger=...), which counts both"
                )
            self.run = None
            trainer.lightning_module.automatic_optimization = False  # `training_step` below takes the step
        super().setup(trainer)
        _refuse_schedulers(self.lr_scheduler_configs)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The batches of the run in place of the training loader; other loaders as they are."""
        module = self.lightning_module
        assert module is not None
        if not module.trainer.training:
            if module.trainer.state.fn != TrainerFn.PREDICTING:
                self._evaluated.append(getattr(dataloader, "dataset", None))
                self._refuse_evaluation_of(self._trained_on)
            return dataloader
        if not isinstance(dataloader, DataLoader) or self.run is not None:
            raise ValueError(
                f"the training data are in a {type(dataloader).__name__} beside others, or in no DataLoader: give one "
                "torch.utils.data.DataLoader"
            )
        self._trained_on = dataloader.dataset
        self._refuse_evaluation_of(self._trained_on)
        trainer = module.trainer
        each_epoch = math.ceil(population(dataloader.dataset) / (dataloader.batch_size or 1))
        self.run = self._make(
            model=module,
            optimizer=_only(self.optimizers),
            dataset=dataloader,
            loss_fn=_losses_of(trainer),
            steps=_planned(trainer, each_epoch),
        )
        if self._saved is not None:
            self.run.load_state_dict(self._saved)
        return _Epochs(self.run, each_epoch)

    def _refuse_evaluation_of(self, records: Any) -> None:
        if records is not None and any(each is records for each in self._evaluated):
            raise ValueError(
                "the training records are given for validation or test too, and their scores would be logged without "
                "noise: give other records"
            )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A batch on the device. A run puts its own batches there."""
        if isinstance(batch, LogicalBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: LogicalBatch, batch_idx: int = 0) -> None:
        """Take a private step. It counts as one step of the optimizer."""
        module, run = self.lightning_module, self.run
        assert module is not None and run is not None
        optimizer: Any = module.optimizers()
        optimizer.step(closure=partial(run.step, batch))
        each_epoch = module.trainer.num_training_batches
        for config in self.lr_scheduler_configs:
            if config.interval == "step" or run.steps_done % each_epoch == 0:
                config.scheduler.step()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure alone: a step of the run has the optimizer's in it."""
        return closure()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file, and beside it the state of the run, which only its owner can read."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.run is not None:
            _save(self.run.state_dict(), filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:  # not for the weights alone
            state = Path(f"{checkpoint_path}{STATE_ENDING}")
            if not state.exists():
                raise ValueError(
                    f"{str(state)!r} does not exist, and without it nobody knows what the run has spent: give "
                    "ckpt_path a file that PrivateStrategy saved"
                )
            self._saved = checkpoint.load(state)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        Path(f"{filepath}{STATE_ENDING}").unlink(missing_ok=True)


class _Epochs:
    """The batches of a run, as many at a time as an epoch has."""

    def __init__(self, run: PrivateRun, each: int) -> None:
        self._run, self._each = run, each
        self._batches: Iterator[LogicalBatch] = run.batches()

    def __len__(self) -> int:
        return self._each

    def __iter__(self) -> Iterator[LogicalBatch]:
        return islice(self._batches, self._each - self._run.steps_done % self._each)


def _save(state: Mapping[str, Any], filepath: Any) -> None:
    checkpoint.save(f"{filepath}{STATE_ENDING}", state)


def _losses_of(trainer: Trainer) -> Callable[[Any, Any], Tensor]:
    """A function of (module, batch): the losses that `training_step` returns.

    The module has no trainer meanwhile, so nothing that is computed before the noise can reach a logger.
    """

    def losses(module: Any, batch: Any) -> Tensor:
        attached = trainer if module is trainer.lightning_module else None  # copies have none
        module.trainer = None
        before = _counts(module)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=r".*self\.log\(\)", category=UserWarning)
                found = module.training_step(batch, 0)
        except UserWarning as warning:
            raise ValueError(
                "training_step calls self.log, and what it logs is computed from the records without noise: log in "
                "validation_step"
            ) from warning
        finally:
            module.trainer = attached
        changed = [name for name, counts in _counts(module).items() if counts != before.get(name, [])]
        if changed:
            raise ValueError(
                f"training_step changes self.{changed[0]}, which would carry what it has seen of the records without "
                "noise to a later log: count in validation_step"
            )
        if isinstance(found, Mapping):
            found = found.get("loss")
        if not isinstance(found, Tensor) or found.dim() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"training_step returned {shape}, and a private step needs one loss per sample: return "
                'F.cross_entropy(logits, labels, reduction="none"), for example'
            )
        return found

    return losses


def _counts(module: LightningModule) -> dict[str, list[int]]:
    """The whole numbers that a module keeps, also in lists and dicts. All other numbers are watched at every pass."""
    found = {}
    for name, value in vars(module).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        found[name] = [item for item in items if type(item) is int]
    return found


def _planned(trainer: Trainer, each_epoch: int) -> int:
    """The number of steps that `max_epochs` and `max_steps` allow."""
    limits = [trainer.max_steps, (trainer.max_epochs or -1) * each_epoch]
    given = [limit for limit in limits if limit > 0]
    if not given:
        raise ValueError("the budget is planned for a number of steps: give Trainer(max_epochs=...) or max_steps")
    return min(given)


def _refuse_schedulers(configs: list[Any]) -> None:
    for config in configs:
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau) or config.frequency != 1:
            raise ValueError(
                f"{type(config.scheduler).__name__} watches a metric or has frequency={config.frequency}: return a "
                "scheduler that steps after every step or every epoch"
            )


def _only(optimizers: list[Any]) -> Any:
    if len(optimizers) != 1:
        raise ValueError(f"configure_optimizers returned {len(optimizers)} optimizers: return one")
    return optimizers[0]


def _refuse_unsupported(trainer: Trainer) -> None:
    """Raise ValueError for a setting or a method that would have no effect, or would break the guarantee."""
    for name, accepted, reason in _SETTINGS:
        value = getattr(trainer, name)
        if value != accepted:
            raise ValueError(f"Trainer({name}={value!r}) cannot be used for private training: {reason}")
    if joined("auto", "PrivateStrategy").size > 1:
        raise ValueError("PrivateStrategy trains in one process: start it without torchrun, or use pmlf.make_private")
    module = trainer.lightning_module
    for name in _NOT_CALLED:
        if getattr(type(module), name) is not getattr(LightningModule, name):
            raise ValueError(f"{type(module).__name__} overrides {name}, which private training does not call")
