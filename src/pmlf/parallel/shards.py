"""Models that `fully_shard` (FSDP2) has cut: every rank keeps a part of each parameter, and of all that goes with it.

Iterates of the past, the filter's memory, the sum and its noise, `p.grad` and the optimizer's state are parts like the
parameters: rows `rank * ceil(n / W)` and following, of n rows on W ranks. For the time of a micro-batch the parameters
are gathered, and the model is as it was before `fully_shard`, without FSDP's hooks, which would gather the present
parameters where a past iterate is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pmlf.engine.fingerprint import bit_digest, summary
from pmlf.engine.plan import Gradients
from pmlf.mechanism.points import History, Point
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.parallel.processes import ManyProcesses, Processes
from pmlf.parallel.summing import AddNoise, Part, parts

_NO_SAMPLES = torch.empty(0)
_TOGETHER = 1 << 20  # numbers of a rank in one message
_STATE = "__composable_api_state_key"  # where torch keeps the state of `fully_shard` in a module


class Placement(Protocol):
    """How the ranks hold the parameters of a model."""

    def iterate(self) -> int:
        """A number from what all ranks must have in common."""

    def rounds(self, batch: LogicalBatch) -> Iterator[tuple[Tensor | None, Any]]:
        """What this rank accumulates of a logical batch: its samples' numbers and each micro-batch."""

    def whole_parameters(self) -> AbstractContextManager[None]:
        """A block in which the model has whole parameters. All ranks enter it together."""

    def local_part(self, parameter: Tensor) -> Tensor:
        """What this rank holds of a parameter."""

    def as_gradient(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A value of what this rank holds, in the form that `p.grad` has."""

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        """The sum over all ranks, plus noise that is added once, of what this rank holds, in place."""


class Replicated:
    """Every rank holds every parameter whole."""

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self._model, self._processes = model, processes

    def iterate(self) -> int:
        return summary(self._model.parameters())

    def rounds(self, batch: LogicalBatch) -> Iterator[tuple[Tensor | None, Any]]:
        return batch.numbered()

    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def local_part(self, parameter: Tensor) -> Tensor:
        return parameter

    def as_gradient(self, value: Tensor, parameter: Tensor) -> Tensor:
        return value

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        self._processes.add_up(values, add_noise, hardened=hardened)


class ParameterShards:
    """Every rank holds some rows of each parameter.

    Args:
        model: A model whose parameters `fully_shard` has cut along their first axis, over all ranks.
        processes: The ranks.

    Raises:
        ValueError: The parameters are cut in another way.
    """

    def __init__(self, model: nn.Module, processes: ManyProcesses) -> None:
        self._model, self._processes = model, processes
        self._whole: dict[str, _WholeParameter] = {}  # while the parameters are gathered
        _refuse_other_cuts(model, processes)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterShards:
        raise TypeError("a model that fully_shard has cut cannot be copied, and neither can its step")

    def iterate(self) -> int:
        return summary(self._model.buffers())  # of each parameter there is one version only

    def local_part(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to_local()  # type: ignore[attr-defined]  # a DTensor

    def as_gradient(self, value: Tensor, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        if self._whole:  # already
            yield
            return
        named = dict(self._model.named_parameters())
        stripped = [_Stripped(module) for module in self._model.modules()]
        whole: dict[int, nn.Parameter] = {}
        try:
            self._whole = {name: _WholeParameter(parameter, self._processes.size) for name, parameter in named.items()}
            self.gathered({name: self.local_part(parameter) for name, parameter in named.items()})
            for name, parameter in named.items():
                value = self._whole[name].value
                whole[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            for each in stripped:
                each.strip(whole)
            yield
        finally:
            for each in stripped:
                each.restore()
            self._whole = {}

    def rounds(self, batch: LogicalBatch) -> Iterator[tuple[Tensor | None, Any]]:
        """A logical batch's micro-batches with their numbers, then empty ones, as many as the rank with most has.

        Where one cannot be loaded, the reason takes its place: the other ranks must learn of it in a round of theirs.
        """
        found = batch.numbered()
        for _ in range(self._processes.most(batch.micro_batches)):
            try:
                round_: tuple[Tensor | None, Any] = next(found, (None, _NO_SAMPLES))
            except Exception as error:
                round_ = None, Failure(error)
            yield round_

    def gathered(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters from every rank's parts, in the memory of those of `whole_parameters`."""
        for bucket in _buckets({name: value.numel() for name, value in values.items()}):
            each = [self._whole[name].padded(values[name]) for name in bucket]
            found = each[0].new_empty(self._processes.size, sum(part.numel() for part in each))
            self._processes.gather(found.view(-1), torch.cat([part.reshape(-1) for part in each]))
            for name, share in zip(bucket, found.split([part.numel() for part in each], 1), strict=True):
                self._whole[name].fill(share)
        return {name: self._whole[name].value for name in values}

    def digest(self) -> list[int]:
        """A digest of the bits of each gathered parameter."""
        return [bit_digest(rows.value) for rows in self._whole.values()]

    def reduced(self, totals: Mapping[str, Tensor], onto: Mapping[str, Tensor]) -> None:
        """onto += this rank's part of the sum over all ranks of their totals, parameter by parameter."""
        for rank in range(self._processes.size):
            shares = [total[self._whole[name].of(rank)].reshape(-1) for name, total in totals.items()]
            together = torch.cat(shares).to(torch.promote_types(shares[0].dtype, torch.float64))
            self._processes.reduce_to(rank, together)
            if rank == self._processes.rank:
                for name, share in zip(totals, together.split([each.numel() for each in shares]), strict=True):
                    onto[name].add_(share.view_as(onto[name]))

    def add_up(self, values: Sequence[Tensor], add_noise: AddNoise, *, hardened: bool) -> None:
        """The values are summed over ranks already. Noise is that of the whole tensors: this rank's part of it."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        starts = [_first_row(p, self._processes) * p[:1].numel() for p in trained]
        for part in parts([p.numel() for p in trained], hardened=hardened):
            value, start = values[part.tensor].view(-1), starts[part.tensor]
            low, high = max(part.start, start), min(part.stop, start + value.numel())
            if low < high:
                noise = torch.zeros(part.stop - part.start, dtype=value.dtype, device=value.device)
                add_noise(noise, Part(part.tensor, part.start, part.stop, part.word))
                value[low - start : high - start] += noise[low - part.start : high - part.start]


@dataclass(frozen=True)
class Failure:
    """Stands in place of a micro-batch, and says why this rank has none."""

    error: BaseException


class PartialSums:
    """This rank's part of the sum over samples and ranks, one parameter after the other, the same on every rank.

    Args:
        shards: The model's shards.
        values: The sum so far of what this rank holds, which is added to.
    """

    def __init__(self, shards: ParameterShards, values: Mapping[str, Tensor]) -> None:
        self._shards, self._values = shards, values
        self._waiting = _buckets({name: value.numel() for name, value in values.items()})
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, total: Tensor) -> None:
        """Add the sum of this rank's samples for the next parameter."""
        self._taken[name] = total
        if list(self._taken) == self._waiting[0]:  # the last of its bucket
            self._shards.reduced(self._taken, self._values)
            del self._waiting[0]
            self._taken = {}

    def finish(self, like: Mapping[str, Tensor]) -> None:
        """Zero for what is left: this rank has no samples, or failed."""
        for name in [name for bucket in self._waiting for name in bucket if name not in self._taken]:
            self.take(name, torch.zeros_like(like[name]))


class GatheredHistory:
    """The points of one round: each is evaluated on parts, gathered, and takes the place of the one before.

    Args:
        shards: The model's shards, gathered by `whole_parameters`.
        history: The past iterates' parts.
        current: The present parameters' parts by name.
        points: The evaluation points of the round, in order.
    """

    def __init__(
        self, shards: ParameterShards, history: History, current: Mapping[str, Tensor], points: Sequence[Point]
    ) -> None:
        self._shards, self._history, self._current = shards, history, current
        self._waiting = list(points)
        self._digest = shards.digest()

    def evaluate(self, point: Point, current: Sequence[Tensor]) -> list[Tensor]:
        """The whole parameters of an evaluation point, gathered from what `History.evaluate` finds on every rank."""
        self.refuse_written()
        assert point == self._waiting.pop(0)
        found = self._history.evaluate(point, list(self._current.values()))
        whole = self._shards.gathered(dict(zip(self._current, found, strict=True)))
        self._digest = self._shards.digest()
        return [whole[name] for name in self._current]

    def finish(self) -> None:
        """Take part in what is left: this rank has no samples, or failed."""
        for point in list(self._waiting):
            self._digest = self._shards.digest()
            self.evaluate(point, ())

    def refuse_written(self) -> None:
        """Raise RuntimeError if a forward pass wrote into a gathered parameter."""
        if self._digest != self._shards.digest():
            raise RuntimeError(
                "the forward pass wrote into a parameter, which would carry the data without noise: change the model "
                "so that it does not write its parameters"
            )


class _WholeParameter:
    """A parameter whole: the rows of all ranks, as many of each, the last ones without meaning."""

    def __init__(self, parameter: Tensor, ranks: int) -> None:
        self._count = parameter.shape[0]
        self._each = -(-self._count // ranks)
        like = parameter.detach().to_local()  # type: ignore[attr-defined]  # a DTensor
        self._padded = like.new_empty(self._each * ranks, *parameter.shape[1:])
        self.value = self._padded[: self._count]

    def of(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(min(rank * self._each, self._count), min((rank + 1) * self._each, self._count))

    def padded(self, part: Tensor) -> Tensor:
        """A rank's rows, with zeros up to the number of rows of the others."""
        missing = self._each - len(part)
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def fill(self, parts: Tensor) -> None:
        """Write the ranks' rows, padded, one rank after the other."""
        self._padded.copy_(parts.reshape(self._padded.shape))


def _buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in order, so many together that few messages are needed and little memory.

    >>> _buckets({"a": 10, "b": _TOGETHER, "c": 1, "d": 2})
    [['a'], ['b'], ['c', 'd']]
    """
    found: list[list[str]] = []
    held = _TOGETHER
    for name, size in sizes.items():
        if held + size > _TOGETHER:
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return found


class _Stripped:
    """A module without what `fully_shard` has put on it: its class, its hooks, its state, its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind = module, type(module)
        self._attributes = {name: value for name, value in vars(module).items() if name.startswith(_STATE)}
        self._parameters = dict(module._parameters)
        hooks: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
        self._hooks = [(place, dict(place)) for place in hooks]

    def strip(self, whole: Mapping[int, nn.Parameter]) -> None:
        module = self._module
        if _is_fsdp(self._kind):
            module.__class__ = self._kind.__bases__[-1]
        for name in self._attributes:
            del module.__dict__[name]
        for name, parameter in self._parameters.items():
            if parameter is not None:
                module._parameters[name] = whole[id(parameter)]
        for place, hooks in self._hooks:
            for key, hook in hooks.items():
                if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                    del place[key]

    def restore(self) -> None:
        module = self._module
        module.__class__ = self._kind
        module.__dict__.update(self._attributes)
        module._parameters.update(self._parameters)
        for place, hooks in self._hooks:
            place.clear()
            place.update(hooks)


def placement_of(
    model: nn.Module, processes: Processes, gradients: Gradients = "ghost"
) -> Replicated | ParameterShards:
    """How the ranks hold a model's parameters.

    Raises:
        ValueError: They are spread over ranks in a way that is not followed.
    """
    if not isinstance(model, nn.Module):  # which is refused in its own place
        return Replicated(model, processes)
    cut = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if not cut and not any(_is_fsdp(type(module)) for module in model.modules()):
        return Replicated(model, processes)
    if not isinstance(processes, ManyProcesses):
        raise ValueError(
            'the model is cut by fully_shard, and this process has no group: give group="auto", or the model as it was '
            "before"
        )
    if gradients != "ghost":
        raise ValueError(f'gradients={gradients!r} needs whole parameters, and fully_shard has cut them: give "ghost"')
    return ParameterShards(model, processes)


def _refuse_other_cuts(model: nn.Module, processes: ManyProcesses) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    ranks = processes.global_ranks
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r} is whole and others are cut by fully_shard: call fully_shard on the model itself "
                "too, without ignored_params"
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or tuple(placements) != (Shard(0),) or mesh.mesh.flatten().tolist() != ranks:
            raise ValueError(
                f"parameter {name!r} is spread over {mesh} by {placements}: only rows over all ranks of the group "
                "are followed, as fully_shard(model) cuts them; tensor parallel, replicas of shards (HSDP) and other "
                "axes are not"
            )
    for name, module in model.named_modules():
        if not _is_fsdp(type(module)):
            continue
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        if len(state._modules) > 1:
            raise ValueError(f"fully_shard was given a list of modules, {name!r} among them: give it one at a time")
        if any(value is not None for value in (state._mp_policy.param_dtype, state._mp_policy.output_dtype)):
            raise ValueError(f"{name!r} has a mixed-precision policy of FSDP: put torch.autocast into loss_fn instead")


def _first_row(parameter: Tensor, processes: ManyProcesses) -> int:
    rows = parameter.shape[0]
    return min(processes.rank * -(-rows // processes.size), rows)


def _is_fsdp(kind: type) -> bool:
    return any(each.__name__ == "FSDPModule" for each in kind.__mro__[1:])
