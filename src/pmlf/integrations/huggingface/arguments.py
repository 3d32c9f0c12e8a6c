"""What a private trainer is told: `PrivacyArguments`, and which `TrainingArguments` cannot be private."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from transformers import TrainingArguments

from pmlf.engine.plan import Gradients


@dataclass(kw_only=True)
class PrivacyArguments:
    """The privacy of a `PrivateTrainer`, beside its `TrainingArguments`. `HfArgumentParser` reads it too.

    >>> PrivacyArguments(target_epsilon=3.0).method
    'dp-pmlf'
    """

    target_epsilon: float | None = field(
        default=None, metadata={"help": "epsilon that training must not pass; give this or noise_multiplier"}
    )
    target_delta: float | None = field(
        default=None, metadata={"help": "delta of the guarantee; by default 1e-5, or n^-1.1 where that is smaller"}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "standard deviation of the noise over the clip norm"}
    )
    method: str = field(default="dp-pmlf", metadata={"help": "a preset of pmlf.methods, or a Method"})
    gradients: Gradients = field(default="ghost", metadata={"help": "ghost, vmap or one-by-one"})
    ema: float | None = field(
        default=None, metadata={"help": "decay of an average of the released parameters, 0.95 for example"}
    )
    secure_noise: bool = field(default=False, metadata={"help": "harden the noise against floating-point attacks"})
    assume_independent_samples: bool = field(
        default=False, metadata={"help": "skip the proof that samples do not influence each other"}
    )
    noise_seed: int | None = field(
        default=None, metadata={"help": "for experiments only: whoever knows the seed can subtract the noise"}
    )


class _Refusal(NamedTuple):
    """An argument of `TrainingArguments` that would break the guarantee, or that a private step has no place for."""

    name: str
    wanted: Callable[[Any], bool]  # whether a value asks for it
    reason: str


_REFUSED = (
    _Refusal("deepspeed", bool, "its engine computes gradients of the whole batch, not of each sample"),
    _Refusal("fsdp", bool, "its wrapper averages gradients before they are clipped; start several processes instead"),
    _Refusal("torch_compile", bool, "per-sample gradients are taken in eager mode"),
    _Refusal("use_liger_kernel", bool, "its fused loss is a mean over the batch"),
    _Refusal("fp16", bool, "its loss scaling skips steps by looking at gradients before the noise; use bf16=True"),
    _Refusal(
        "mixed_precision",
        lambda value: value not in (None, "no", "bf16"),
        "only bf16 needs no loss scaling, and accelerate's configuration can set it too",
    ),
    _Refusal("parallelism_config", lambda value: value is not None, "a sample is computed whole, by one process"),
    _Refusal("predict_with_generate", bool, "evaluation computes losses and logits; call model.generate yourself"),
    _Refusal("neftune_noise_alpha", lambda value: value is not None, "its hook is not checked for independence"),
    _Refusal("debug", bool, "it prints activations, which are computed from the records without noise"),
    _Refusal(
        "hub_strategy",
        lambda value: value in ("checkpoint", "all_checkpoints"),
        "it publishes the state of a run, which is private until the run ends",
    ),
    _Refusal("dataloader_drop_last", bool, "a Poisson batch has no fixed size"),
    _Refusal(
        "include_num_input_tokens_seen",
        lambda value: value not in (False, "no"),
        "the number of tokens drawn is sensitive",
    ),
    _Refusal(
        "train_sampling_strategy", lambda value: value in ("sequential", "batch_rebalance"), "batches are Poisson"
    ),
)


def refuse_unsupported(args: TrainingArguments) -> None:
    """Refuse by name what cannot be honoured.

    Raises:
        ValueError: An argument asks for something that is not private, or that a private step cannot do.
    """
    for refusal in _REFUSED:
        value = getattr(args, refusal.name, None)
        if refusal.wanted(value):
            raise ValueError(
                f"TrainingArguments({refusal.name}={value!r}) cannot be used for private training: {refusal.reason}. "
                "Leave it at its default"
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, and DataParallel averages gradients before they are "
            "clipped: start one process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    grouped = dist.is_available() and dist.is_initialized()
    started = max(int(os.environ.get("WORLD_SIZE", "1")), dist.get_world_size() if grouped else 1)
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started, and TrainingArguments counts {args.world_size}, so each would train by "
            "itself: give TrainingArguments(use_cpu=True) on a machine without GPUs"
        )


def uses_bfloat16(args: TrainingArguments) -> bool:
    """Whether forward passes run under autocast, by `bf16=True` or by accelerate's own configuration."""
    return bool(args.bf16) or getattr(args, "mixed_precision", None) == "bf16"
