"""`PrivateTrainer`: a `transformers.Trainer` whose steps are those of a `PrivateRun`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset as HubDataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from pmlf import checkpoint
from pmlf.basics.files import write_atomically
from pmlf.evidence.ledger import Ledger
from pmlf.experiments.spec import default_delta
from pmlf.integrations.huggingface.arguments import PrivacyArguments, refuse_unsupported, uses_bfloat16
from pmlf.integrations.huggingface.losses import loss_function
from pmlf.integrations.huggingface.own_ledger import opened_ledger
from pmlf.mechanism.sampling import population
from pmlf.parallel.agreement import begin_alike
from pmlf.parallel.processes import joined
from pmlf.run import PrivateRun, make_private
from pmlf.run.planned import planned_steps

STATE_FILE = "private_run.safetensors"
CERTIFICATE_FILE = "certificate.json"


class PrivateTrainer(Trainer):
    """`transformers.Trainer`, with differential privacy for every record of `train_dataset`.

    `TrainingArguments` mean what they mean in a plain trainer, with these readings. The expected batch size B is
    per_device_train_batch_size * gradient_accumulation_steps * processes, and per_device_train_batch_size samples are
    in memory at once. `max_grad_norm` is the clip norm C of each sample. `group_by_length` sorts the samples of a draw
    and changes no draw. Arguments that cannot be honoured are refused by name.

    Training loss and gradient norm are sensitive and never logged; `TrainOutput.training_loss` is NaN. Logs hold the
    learning rate and the epsilon spent. Records of `eval_dataset` are not protected.

    Every step is counted in `output_dir/ledger.jsonl` before it is released. So steps that are done again after a
    checkpoint, and a second call of `train`, are paid for. The last run's certificate is written to
    `output_dir/certificate.json`. With `PrivacyArguments(ema=...)`, `private_run.averaged_model()` is the average.

    Under `torchrun` all processes take every step together, from the weights of rank 0. The
    model is not wrapped, and accelerate's data loader, which repeats records, loads evaluation records only.

    Args:
        model: The model to train, also with an adapter of peft.
        args: The training arguments.
        privacy: The privacy arguments.
        ledger: An open ledger, on rank 0 alone, in place of the one in the output folder. The target covers all that
            is in it.
        data_collator: Makes a batch of a list of records, as in `Trainer`.
        train_dataset: The records to protect, a map-style dataset.
        eval_dataset: Records for evaluation.
        processing_class: The tokenizer or processor.
        compute_loss_func: A function of (outputs, labels) that returns one loss per sample; by default that of the
            model's task.
        compute_metrics: As in `Trainer`.
        callbacks: As in `Trainer`.
        optimizers: As in `Trainer`: an optimizer and a scheduler, each or both None.
        preprocess_logits_for_metrics: As in `Trainer`.

    Raises:
        ValueError: An argument cannot be private.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        privacy: PrivacyArguments,
        ledger: Ledger | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        refuse_unsupported(args)
        if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
            raise ValueError(
                "the model is cut over processes, and PrivateTrainer saves and evaluates whole models: give it as it "
                "was before fully_shard, or write the loop with pmlf.make_private"
            )
        if isinstance(data_collator, DataCollatorWithFlattening):
            raise ValueError(
                "DataCollatorWithFlattening packs several records into one sequence, so no loss is of one record: give "
                "a collator that pads, such as DataCollatorWithPadding"
            )
        for name in ("compute_loss", "training_step", "get_train_dataloader", "_get_train_sampler"):
            if getattr(type(self), name) is not getattr(Trainer, name):
                raise ValueError(
                    f"{type(self).__name__} overrides {name}, which private training does not call: give "
                    "compute_loss_func, or write the loop with pmlf.make_private"
                )
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "accelerate is configured for DeepSpeed or FSDP, whose gradients are of the whole batch: choose plain "
                "data parallel in `accelerate config`, or start the processes by torchrun"
            )
        for records in eval_dataset.values() if isinstance(eval_dataset, dict) else (eval_dataset,):
            self._refuse_training_records(records)
        self.privacy = privacy
        self.ledger = ledger
        self.private_run: PrivateRun | None = None

    def certificate(self) -> dict[str, Any]:
        """The mechanism of the last training, its public constants, and the epsilon they give.

        Raises:
            RuntimeError: `train` was not called yet.
        """
        if self.private_run is None:
            raise RuntimeError("there is no run to certify: call train() first")
        return self.private_run.certificate()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """The loop that `Trainer.train` calls."""
        if trial is not None:
            raise ValueError(
                "hyperparameter_search trains many models on the same records and counts one: use pmlf tune, or give "
                "all runs one ledger"
            )
        saved = None if resume_from_checkpoint is None else _saved_run(resume_from_checkpoint)
        folder = Path(self._get_output_dir(trial))
        try:
            with opened_ledger(self.ledger, folder, resume_from_checkpoint, saved) as ledger:
                run = self.private_run = self._made_private(ledger)
                if saved is not None:
                    run.load_state_dict(saved)
                self._begin(run, resume_from_checkpoint)
                return self._steps(run, trial, ignore_keys_for_eval)
        except RuntimeError as error:
            if should_reduce_batch_size(error):  # at which `auto_find_batch_size` would start again from here
                raise MemoryError(f"{error} Give a smaller per_device_train_batch_size, and resume") from error
            raise

    def _steps(self, run: PrivateRun, trial: Any, ignore_keys_for_eval: list[str] | None) -> TrainOutput:
        """One private step where `Trainer` has forward, backward and optimizer steps."""
        started, first = time.time(), self.state.global_step
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for batch in run.batches():
            if batch.step % run.steps_per_epoch == 0:
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            run.model.train()
            run.step(batch)
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
            self.state.global_step = run.steps_done
            self.state.epoch = run.steps_done / run.steps_per_epoch
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_evaluate_save(run, trial, ignore_keys_for_eval)
            if run.steps_done % run.steps_per_epoch == 0 or run.steps_done == run.steps:
                self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
                self._log_evaluate_save(run, trial, ignore_keys_for_eval)
            if run.processes.by_first(lambda: self.control.should_training_stop):
                break
        return self._end(run, trial, started, run.steps_done - first)

    def _made_private(self, ledger: Ledger | None) -> PrivateRun:
        args, privacy = self.args, self.privacy
        records, collate = self._records_and_collator()
        n = population(records)
        expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        epochs, steps = (None, args.max_steps) if args.max_steps > 0 else (args.num_train_epochs, None)
        assert self.model is not None
        begin_alike(self.model, joined("auto", "PrivateTrainer"))
        self.create_optimizer()
        if self._created_lr_scheduler:  # by an earlier call of train
            self.lr_scheduler = None
        self.create_scheduler(num_training_steps=planned_steps(epochs, steps, n, expected))
        assert self.optimizer is not None
        return make_private(
            model=self.model,
            optimizer=self.optimizer,
            dataset=records,
            loss_fn=loss_function(
                self.model,
                smoothing=args.label_smoothing_factor,
                own=self.compute_loss_func,
                bfloat16=uses_bfloat16(args),
            ),
            method=privacy.method,
            target_epsilon=privacy.target_epsilon,
            noise_multiplier=privacy.noise_multiplier,
            target_delta=default_delta(n) if privacy.target_delta is None else privacy.target_delta,
            batch_size=expected,
            epochs=epochs,
            steps=steps,
            clip_norm=args.max_grad_norm,
            ledger=ledger,
            max_physical_batch_size="auto" if args.auto_find_batch_size else args.per_device_train_batch_size,
            seed=privacy.noise_seed,
            ema=privacy.ema,
            secure_noise=privacy.secure_noise,
            gradients=privacy.gradients,
            assume_independent_samples=privacy.assume_independent_samples,
            scheduler=self.lr_scheduler,
            collate_fn=collate,
            lengths=self._lengths(records),
            num_workers=args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As in `Trainer`, except for the training records: their scores are computed without noise, and logged.

        Raises:
            ValueError: The records are `train_dataset`.
        """
        own: Any = self.eval_dataset
        given = own if eval_dataset is None else eval_dataset
        self._refuse_training_records(own[given] if isinstance(given, str) else given)
        return super().get_eval_dataloader(eval_dataset)

    def _refuse_training_records(self, records: Any) -> None:
        if records is not None and records is self.train_dataset:
            raise ValueError(
                "train_dataset is given for evaluation too, and the scores of its records would be logged without "
                "noise: give other records"
            )

    def _records_and_collator(self) -> tuple[Any, Callable[[list[Any]], dict[str, Any]]]:
        """The training records without unused columns, and their collator, whose batches are plain dicts."""
        if self.train_dataset is None:
            raise ValueError("train_dataset is None: give the records to train on")
        records, collator = self.train_dataset, self.data_collator
        if isinstance(records, HubDataset):
            records = self._remove_unused_columns(records, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return records, lambda few: dict(collator(few))

    def _lengths(self, records: Any) -> NDArray[np.int64] | None:
        """One length a record where records of similar length are to share a micro-batch."""
        grouped = getattr(self.args, "group_by_length", False)  # its name before transformers 5
        if not grouped and getattr(self.args, "train_sampling_strategy", "random") != "group_by_length":
            return None
        column = self.args.length_column_name
        if isinstance(self.train_dataset, HubDataset) and column in self.train_dataset.column_names:
            return np.asarray(self.train_dataset[column], dtype=np.int64)
        return np.asarray([len(records[index]["input_ids"]) for index in range(len(records))], dtype=np.int64)

    def _begin(self, run: PrivateRun, resume_from_checkpoint: str | None) -> None:
        """Set up the trainer's own state, or load it from a checkpoint."""
        stateful: Any = [
            part for part in (*self.callback_handler.callbacks, self.control) if isinstance(part, ExportableState)
        ]
        self.state = TrainerState(stateful_callbacks=stateful, train_batch_size=self.args.train_batch_size)
        if resume_from_checkpoint is not None:
            self.state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / "trainer_state.json"))
            self._load_callback_state()
        self.state.compute_steps(self.args, run.steps)
        self.state.max_steps = run.steps
        self.state.num_train_epochs = math.ceil(run.steps / run.steps_per_epoch)
        self.state.global_step = run.steps_done
        self.state.epoch = run.steps_done / run.steps_per_epoch
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self._globalstep_last_logged = self.state.global_step
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))

    def _log_evaluate_save(self, run: PrivateRun, trial: Any, ignore_keys: list[str] | None) -> None:
        """What the callbacks asked for after a step: only released numbers are logged."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._globalstep_last_logged = self.state.global_step
            self.log({"learning_rate": self._get_learning_rate(), "epsilon": run.epsilon()})
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys)
            best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(run.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _end(self, run: PrivateRun, trial: Any, started: float, steps: int) -> TrainOutput:
        expected = run.private_step.settings.expected_batch_size
        metrics = speed_metrics("train", started, num_samples=steps * expected, num_steps=steps)
        metrics["epsilon"] = run.epsilon()
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        if self.args.should_save:
            text = json.dumps(run.certificate(), indent=2)
            write_atomically(Path(self._get_output_dir(trial)) / CERTIFICATE_FILE, text.encode())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, math.nan, metrics)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The state of the run, in place of the optimizer's alone: `PrivateRun.state_dict`."""
        assert self.private_run is not None
        if self.args.should_save:
            checkpoint.save(Path(output_dir) / STATE_FILE, self.private_run.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: a private run draws from streams of its own, whose keys are never stored."""


def _saved_run(folder: str) -> dict[str, Any]:
    """The state of the run in a checkpoint's folder."""
    if not (Path(folder) / STATE_FILE).exists():
        raise ValueError(
            f"{folder!r} has no {STATE_FILE}, which save_only_model=True leaves out: give a checkpoint that a "
            "PrivateTrainer saved whole"
        )
    return checkpoint.load(Path(folder) / STATE_FILE)
