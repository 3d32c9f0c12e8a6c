"""The self-test: whether this machine and device compute what the guarantee rests on. All data is synthetic."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.basics.batches import select, to_device, without
from pmlf.bench import cases
from pmlf.bench.case import losses as case_losses
from pmlf.bench.probes import PROBES, Batch, RuleProbe, losses
from pmlf.bench.suite import on_this_machine

_SAMPLES, _RELEASES, _BETA = 6, 2, 0.5
_AGREEMENT, _SENSITIVITY = 1e-4, 1.0 + 1e-4
_NOISE_WIDTH = 500  # a matrix of its square is released: 250,000 draws
_STANDARD_ERRORS = 5.0  # an honest device fails once in two million runs
_TIMED = "stack-128x64"


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check. `passed` is None for what is only measured."""

    check: str
    measured: str
    limit: str
    passed: bool | None


def run(device_name: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run every check on a device. An error in a check is a failed row.

    Args:
        device_name: Name of a device of torch: "cpu", "cuda", "cuda:1", "mps".
        progress: Called with a line of text before each check.

    Returns:
        A JSON-ready document: machine, device, rows, and whether all of them passed.

    Raises:
        ValueError: If there is no such device on this machine.
    """
    device = _found(device_name)
    rows: list[CheckRow] = []
    for name, check in _checks():
        progress(name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # noise 0, and hints of torch's about speed
                rows += check(device)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            rows.append(
                CheckRow(check=name, measured=f"{type(error).__name__}: {text}", limit="no error", passed=False)
            )
    return {
        "machine": on_this_machine(torch.get_num_threads()),
        "device": _described(device),
        "passed": all(row.passed is not False for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def readable(document: dict[str, Any]) -> tuple[Table | str, ...]:
    """The table of a document, and what to do with it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "measured", "limit", ""):
        table.add_column(heading, no_wrap=heading != "measured")
    for row in document["rows"]:
        word = {True: "pass", False: "FAIL", None: ""}[row["passed"]]
        table.add_row(row["check"], row["measured"], row["limit"], word)
    device = document["device"]
    if document["passed"]:
        return (table, f"All checks passed on {device['name']} (torch {document['machine']['torch']}).")
    return (
        table,
        f"FAILED on {device['name']}. Do not train privately on this device. Report it with the whole output of "
        f"`pmlf selftest --device {device['device']} --json`, which contains no data of yours.",
    )


Check = Callable[[torch.device], list[CheckRow]]


def _checks() -> Iterator[tuple[str, Check]]:
    for probe in PROBES:
        yield probe.name, lambda device, probe=probe: _probed(probe, device)  # type: ignore[misc]
    yield "a sample that is not finite", _not_finite
    yield "noise", _noise
    yield "time and memory", _costs


def _found(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add_(1.0).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        available = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
        raise ValueError(f"device={name!r} cannot be used here: give one of {', '.join(available)}") from error
    return device


def _described(device: torch.device) -> dict[str, Any]:
    """What a report of a failure needs to say about a device."""
    if device.type != "cuda":
        return {"device": str(device), "name": str(device)}
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "convolutions_in_tf32": torch.backends.cudnn.allow_tf32,
    }


# --- gradients and sensitivity


def _probed(probe: RuleProbe, device: torch.device) -> list[CheckRow]:
    """Two releases against float64 on the CPU, one sample at a time; then each sample left out once."""
    model, batch = probe.prepare(_SAMPLES)
    exact = _OneByOne(copy.deepcopy(model).double(), batch)
    clip_norm = float(exact.momenta(list(model.parameters()), remember=False).norm(dim=1).median())
    model, batch = model.to(device), to_device(batch, device)
    step = PrivateStep(
        model,
        losses,
        method=methods.dp_pmlf_without_lf(k=_RELEASES, beta=_BETA),
        clip_norm=clip_norm,
        noise_multiplier=0.0,
        expected_batch_size=1.0,
        gradients=probe.gradients,
    )
    worst = 0.0
    for _ in range(_RELEASES):
        step.accumulate(batch)
        step.release()
        v = exact.momenta(step.trained)
        wanted = ((clip_norm / v.norm(dim=1)).clamp(max=1.0)[:, None] * v).sum(0)
        found = _flat([p.grad for p in step.trained if p.grad is not None])
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        with torch.no_grad():
            for parameter in step.trained:
                assert parameter.grad is not None and parameter.grad.device == parameter.device
                parameter.sub_(parameter.grad, alpha=0.1 / clip_norm)
    moved = _largest_move(step, batch) / clip_norm
    return [
        _at_most(f"gradients: {probe.name}", worst, _AGREEMENT, "{:.1e} from float64"),
        _at_most(f"sensitivity: {probe.name}", moved, _SENSITIVITY, "{:.6f} clip norms"),
    ]


class _OneByOne:
    """v of every sample by plain autograd: gradients at the iterates so far, weighted by powers of beta."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model, self._batch = model, (_double(batch[0]), batch[1])
        self._iterates: list[list[Tensor]] = []

    def momenta(self, iterate: Sequence[Tensor], *, remember: bool = True) -> Tensor:
        """(samples, parameters), at one more iterate."""
        iterates = [[p.detach().cpu().double() for p in iterate], *self._iterates][:_RELEASES]
        if remember:
            self._iterates = iterates
        weights = [_BETA**j for j in range(len(iterates))]
        parameters = list(self._model.parameters())
        found = torch.zeros(_SAMPLES, sum(p.numel() for p in parameters), dtype=torch.float64)
        for weight, values in zip(weights, iterates, strict=True):
            with torch.no_grad():
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
            for i in range(_SAMPLES):
                loss = losses(self._model, select(self._batch, slice(i, i + 1))).sum()
                grads = torch.autograd.grad(loss, parameters)
                found[i] += weight / sum(weights) * _flat(grads)
        return found


def _largest_move(step: PrivateStep, batch: Batch) -> float:
    """The most that leaving one sample out moves the sum before noise."""

    def summed(part: Batch) -> Tensor:
        step.accumulate(part)
        total = step.sensitive_sum()
        assert total is not None
        values = _flat(list(total.values.values()))
        step.discard()
        return values

    whole = summed(batch)
    return max(float((whole - summed(without(batch, i))).norm()) for i in range(_SAMPLES))


def _not_finite(device: torch.device) -> list[CheckRow]:
    """A sample of infinities adds exactly zero, and leaves what the others add untouched."""
    model, batch = PROBES[0].prepare(_SAMPLES)
    model, (inputs, classes) = model.to(device), to_device(batch, device)
    inputs = inputs.clone()
    inputs[0] = math.inf
    sums = []
    for chosen in (slice(0, _SAMPLES), slice(1, _SAMPLES)):
        step = PrivateStep(model, losses, noise_multiplier=0.0, expected_batch_size=1.0)
        step.accumulate((inputs[1:], classes[1:]))  # what is looked at first is finite
        step.discard()
        step.accumulate((inputs[chosen], classes[chosen]))
        total = step.sensitive_sum()
        assert total is not None
        sums.append(_flat(list(total.values.values())))
    difference = float((sums[0] - sums[1]).norm() / sums[1].norm())
    return [_at_most("a sample that is not finite", difference, 1e-6, "{:.1e} added")]


# --- noise


def _noise(device: torch.device) -> list[CheckRow]:
    """Releases of empty batches are noise alone: its scale, its mean, its tails, and that no two are alike."""
    multiplier, clip_norm, expected = 1.3, 0.7, 5.0
    model = nn.Linear(_NOISE_WIDTH, _NOISE_WIDTH, bias=False).to(device)
    step = PrivateStep(
        model,
        lambda model, batch: model(batch).sum(1),
        method="dpsgd",
        clip_norm=clip_norm,
        noise_multiplier=multiplier,
        expected_batch_size=expected,
    )
    drawn = []
    for _ in range(2):
        step.release()
        assert model.weight.grad is not None
        drawn.append(model.weight.grad.cpu().double().flatten() * expected / (multiplier * clip_norm))
    z, count = drawn[0], drawn[0].numel()
    beyond = float((z.abs() > 2.0).double().mean())
    tail = math.erfc(2.0 / math.sqrt(2.0))
    return [
        _within("noise: standard deviation", float(z.std()), 1.0, _STANDARD_ERRORS / math.sqrt(2 * count)),
        _within("noise: mean", float(z.mean()), 0.0, _STANDARD_ERRORS / math.sqrt(count)),
        _within("noise: share beyond two", beyond, tail, _STANDARD_ERRORS * math.sqrt(tail * (1 - tail) / count)),
        _within("noise: two releases", float((z * drawn[1]).mean()), 0.0, _STANDARD_ERRORS / math.sqrt(count)),
    ]


# --- costs


def _costs(device: torch.device) -> list[CheckRow]:
    """Time and memory of a private gradient over a plain one, for two transformer blocks. No limit: machines differ."""
    ways = {"plain": _plain, "k=1": lambda m, b: _private(m, b, 1), "k=2": lambda m, b: _private(m, b, 2)}
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for name, prepare in ways.items():
        model, batch = cases.find(_TIMED).prepare()
        gradient = prepare(model.to(device), to_device(batch, device))
        gradient()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds[name] = min(_timed(gradient, device) for _ in range(5))
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device)
    rows = []
    for name in ("k=1", "k=2"):
        text = f"{seconds[name] / seconds['plain']:.2f} times plain"
        rows.append(CheckRow(check=f"time at {name}", measured=text, limit="", passed=None))
        memory = f"{peaks[name] / peaks['plain']:.2f} times plain" if peaks else "`pmlf bench` measures it"
        rows.append(CheckRow(check=f"memory at {name}", measured=memory, limit="", passed=None))
    return rows


def _plain(model: nn.Module, batch: Batch) -> Callable[[], None]:
    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        case_losses(model, batch).mean().backward()

    return gradient


def _private(model: nn.Module, batch: Batch, k: int) -> Callable[[], None]:
    step = PrivateStep(
        model,
        case_losses,
        method=methods.dp_pmlf_without_lf(k=k),
        noise_multiplier=1.0,
        expected_batch_size=len(batch[1]),
    )
    for _ in range(k):  # until all past iterates exist
        step.release()

    def gradient() -> None:
        step.accumulate(batch)
        step.release()

    return gradient


def _timed(gradient: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    gradient()
    torch.zeros(1, device=device).cpu()  # waits for the device, whatever kind it is
    return time.perf_counter() - start


# --- rows


def _at_most(check: str, value: float, limit: float, text: str) -> CheckRow:
    return CheckRow(check=check, measured=text.format(value), limit=f"<= {limit:g}", passed=value <= limit)


def _within(check: str, value: float, expected: float, allowed: float) -> CheckRow:
    limit = f"{expected:.4f} +- {allowed:.4f}"
    return CheckRow(check=check, measured=f"{value:.4f}", limit=limit, passed=abs(value - expected) <= allowed)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().cpu().double() for tensor in tensors])


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
