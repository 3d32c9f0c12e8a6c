"""Per-sample gradients of a whole model by `torch.func`: every sample is a batch of one, all of them at once by vmap.

Samples cannot see each other: the model and the loss get one sample. For models whose layers have no rule, where plain
autograd, one sample at a time, is too slow.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pmlf.basics.batches import refilled, same_bits, tensors_of, untensored
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.confined import Confined, nothing_left
from pmlf.engine.layers import VmapUnsupported
from pmlf.engine.losses import checked_losses, no_autocast_cache
from pmlf.engine.passes import Pass
from pmlf.engine.swap import ModelWritten, swapped

_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict)
_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent)


def mapped(one: Pass) -> Iterator[tuple[str, Tensor]]:
    """The per-sample gradients that a pass asks for, (samples, *shape) of each parameter.

    Raises VmapUnsupported for what vmap does not take and for what would get around it; the model is left as it was.
    """
    anatomy, batch = one.anatomy, one.batch
    for value in untensored(batch):
        raise VmapUnsupported(
            f"the batch holds a {type(value).__name__}, and vmap maps tensors alone: keep what is no tensor out of the "
            "batch, or encode it"
        )
    model, parameters, buffers = anatomy.model, anatomy.parameters, anatomy.buffers
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    versions = {name: p._version for name, p in parameters.items() if not p.requires_grad}

    def loss_of_one(leaves: Mapping[str, Tensor], parts: tuple[Tensor, ...]) -> Tensor:
        replacements = {id(parameters[name]): leaf for name, leaf in leaves.items()}
        replacements |= {id(buffers[name]): buffer for name, buffer in copies.items()}
        with Confined(), swapped(anatomy, replacements) as swap:
            single = refilled(batch, [part.unsqueeze(0) for part in parts])
            loss = checked_losses(one.loss_fn(model, single), 1).sum() * one.weight
        swap.refuse_written()
        return loss

    per_sample = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0), randomness="different")
    leaves = {name: value.detach() for name, value in one.values.items()}
    with _restored(anatomy), nothing_left(), no_autocast_cache(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # one sample after another, there
        try:
            found = per_sample(leaves, tuple(tensors_of(batch)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise VmapUnsupported(f"torch.func.vmap cannot run the loss ({_said(error)}){_where(error)}") from error
        written = [name for name, buffer in copies.items() if not same_bits(buffer, buffers[name])]
        written += [name for name, version in versions.items() if parameters[name]._version != version]
        if written:
            raise ModelWritten(written[0])
    for name in one.plan.parameters:
        yield name, found.pop(name)


@contextmanager
def _restored(anatomy: Anatomy) -> Iterator[None]:
    """After an error, every module's attributes, and what is in its lists and mappings, are as they were."""
    saved = [(vars(module), dict(vars(module))) for module in anatomy.modules.values()]
    held = [(each, copy.copy(each)) for _, before in saved for each in before.values() if type(each) in _CONTAINERS]
    try:
        yield
    except BaseException:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)
        for container, contents in held:
            container.clear()
            container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        raise


def _said(error: RuntimeError) -> str:
    """What torch says first, and what was attempted, without numbers, which may count the samples."""
    first, *rest = str(error).replace("\n", " ").split(". ")
    said = ". ".join([first, *(each for each in rest if each.startswith("Attempt"))]).rstrip(".")
    return re.sub(r"\(n\) ", "", re.sub(r"[0-9]+", "n", said))


def _where(error: RuntimeError) -> str:
    """The line of the user's own code that the error came through last."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(root) for root in _NOT_THE_USERS):
            return f" at {Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
    return ""
