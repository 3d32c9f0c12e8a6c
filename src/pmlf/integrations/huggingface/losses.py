"""One loss per sample for models of `transformers`, whose own `.loss` is a mean over the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmlf.data.targets import mean_over_tokens

_LABELS = ("labels", "start_positions", "end_positions")

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch, float], Tensor]  # of (outputs, batch, label smoothing)


def classes(outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """Classification or regression of whole samples: cross-entropy, squared error, or a mean over several labels."""
    logits, labels = outputs.logits, batch["labels"]
    if logits.shape[1] == 1 and labels.is_floating_point():
        return F.mse_loss(logits.squeeze(1), labels.flatten().to(logits), reduction="none")
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(1)
    return F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)


def tokens(outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """Mean cross-entropy over the labelled tokens of each sequence; zero for a sequence without any."""
    return mean_over_tokens(outputs.logits, batch["labels"], smoothing)


def next_tokens(outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """The loss of `tokens`, with each position predicting the token after it."""
    return mean_over_tokens(outputs.logits[:, :-1], batch["labels"][:, 1:], smoothing)


def spans(outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """Question answering: mean cross-entropy of the first and the last token of the answer."""
    ends = ((outputs.start_logits, batch["start_positions"]), (outputs.end_logits, batch["end_positions"]))
    losses = [
        F.cross_entropy(logits, where.flatten(), reduction="none", label_smoothing=smoothing) for logits, where in ends
    ]
    return (losses[0] + losses[1]) / 2


# By the end of the class's name, which is how transformers itself tells tasks apart.
TASKS: dict[str, Loss] = {
    "ForSequenceClassification": classes,
    "ForImageClassification": classes,
    "ForAudioClassification": classes,
    "ForMultipleChoice": classes,
    "ForTokenClassification": tokens,
    "ForMaskedLM": tokens,
    "ForCausalLM": next_tokens,
    "LMHeadModel": next_tokens,
    "ForConditionalGeneration": tokens,
    "ForQuestionAnswering": spans,
}


def task_loss(model: nn.Module) -> Loss:
    """The loss of a model's task, also where an adapter is wrapped around the model.

    Raises:
        ValueError: The task is not known.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> task_loss(BertForMaskedLM(BertConfig(vocab_size=8, hidden_size=2, num_hidden_layers=1, num_attention_heads=1,
    ...     intermediate_size=2))).__name__
    'tokens'
    """
    names = [type(module).__name__ for module in model.modules()]
    for name in names:
        for ending, loss in TASKS.items():
            if name.endswith(ending):
                return loss
    raise ValueError(
        f"the task of a {names[0]} is not known: give compute_loss_func, a function of (outputs, labels) that returns "
        f"one loss per sample, or a model whose class ends in one of {', '.join(TASKS)}"
    )


def loss_function(
    model: nn.Module, *, smoothing: float, own: Callable[..., Tensor] | None, bfloat16: bool
) -> Callable[[nn.Module, Batch], Tensor]:
    """A function of (model, batch) that returns one loss per sample.

    Args:
        model: The model, for its task and device.
        smoothing: Label smoothing, 0 for none.
        own: The trainer's `compute_loss_func`, or None.
        bfloat16: Whether the forward pass runs under autocast.
    """
    loss = None if own is not None else task_loss(model)
    device = next(model.parameters()).device.type

    def per_sample(model: Any, batch: Batch) -> Tensor:
        # Without labels the model computes no loss of its own, which would be a mean over the batch.
        inputs = {name: value for name, value in batch.items() if name not in _LABELS}
        if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16):
            outputs = model(**inputs)
        if own is not None:
            return own(outputs, batch.get("labels"), num_items_in_batch=None)
        assert loss is not None
        return loss(_in_float32(outputs), batch, smoothing)

    return per_sample


def _in_float32(outputs: Any) -> Any:
    for name, value in list(outputs.items()):
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            outputs[name] = value.float()
    return outputs
