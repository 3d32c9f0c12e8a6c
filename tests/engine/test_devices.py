"""A step on an accelerator: the host waits for it once a micro-batch and once a release.

There is no accelerator here. The CPU plays one: `on_host` says of every tensor that it is not the host's, so the step
takes the way of a device, with real numbers, and every read of a number is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pmlf import PrivateStep, methods
from pmlf.engine import arithmetic, questions, swap
from pmlf.models import CNN5

_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__float__", "__int__", "__index__")
_OPERATIONS = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "is_nonzero", "bincount")
_STATE = torch.default_generator.get_state().shape  # of a generator, which is the host's


class _Operations(TorchDispatchMode):
    """Counts operations whose result has as many numbers as the data say, for which a device must be waited for."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _OPERATIONS:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """How often each way to read numbers was used."""
    found: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.shape != _STATE:
                found[name] += 1
            return original(tensor, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch, _Operations(found):
        for name in _READS:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        patch.setattr(torch, "equal", counted("equal", torch.equal))
        yield found


@contextmanager
def device() -> Iterator[None]:
    """All tensors are taken to be on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (arithmetic, questions, swap):
            patch.setattr(module, "on_host", lambda tensor: False)
        yield


class Encoder(nn.Module):
    """A parameter of positions and a tied embedding: gradients are taken at operations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.mixed = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, index: Tensor) -> Tensor:
        hidden: Tensor = self.mixed(self.tokens(index) + self.positions) * self.scale
        return hidden @ self.tokens.weight.T


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.read(x)[0][:, -1])
        return out


def _images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 16, 16), torch.arange(samples) % 10


def _texts(samples: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(samples * 6).reshape(samples, 6) % 11
    return index, index.roll(1, 1)


def _series(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4, 5), torch.arange(samples) % 3


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.movedim(-1, 1), batch[1], reduction="none").reshape(len(out), -1).mean(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "cnn5": (CNN5, _images),
    "encoder": (Encoder, _texts),
    "lstm": (Reader, _series),
}


def _step(name: str, k: int) -> tuple[PrivateStep, list[tuple[Tensor, Tensor]]]:
    make, data = CASES[name]
    torch.manual_seed(0)
    model = make()
    method = methods.dp_pmlf(k=k, beta=0.1, a=(-0.9,), b=(0.1,)) if k > 1 else methods.dpsgd()
    generator = torch.Generator().manual_seed(1)
    step = PrivateStep(
        model, _loss, method=method, clip_norm=0.1, noise_multiplier=0.5, expected_batch_size=8, generator=generator
    )
    return step, [data(8), data(8), data(6), data(5)]


def _move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_a_device_is_waited_for_once_a_micro_batch_and_once_a_release_and_computes_the_same(name: str, k: int) -> None:
    """Two releases, the second of two micro-batches with sizes that are new, so that samples are watched."""
    step, batches = _step(name, k)
    with device():
        for batch in batches[:2]:
            step.accumulate(batch)
        step.release()
        _move(step.model)
        step.accumulate(batches[2])
        with reads() as of_micro_batch:
            step.accumulate(batches[3])
        with reads() as of_release:
            step.release()
    assert of_micro_batch == {"tolist": 1}
    assert of_release == {"tolist": 1}

    on_cpu, batches = _step(name, k)
    for batch in batches[:2]:
        on_cpu.accumulate(batch)
    on_cpu.release()
    _move(on_cpu.model)
    for batch in batches[2:]:
        on_cpu.accumulate(batch)
    on_cpu.release()
    for one, other in zip(step.trained, on_cpu.trained, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_on_a_device_too_a_sample_that_is_not_finite_adds_nothing() -> None:
    step, batches = _step("lstm", 1)
    images, labels = batches[0]
    step.accumulate((images, labels))  # checks
    step.discard()
    with device():
        step.accumulate((images[1:], labels[1:]))
        without = {name: value.clone() for name, value in _sum(step).items()}
        step.discard()
        images = images.clone()
        images[0, 0, 0] = torch.inf
        step.accumulate((images, labels))
        for name, value in _sum(step).items():
            torch.testing.assert_close(value, without[name], rtol=1e-5, atol=1e-7)


def _sum(step: PrivateStep) -> dict[str, Tensor]:
    total = step.sensitive_sum()
    assert total is not None
    return dict(total.values)


def test_on_a_device_too_a_model_that_is_written_is_refused() -> None:
    """What is asked about is answered before anything is added up."""

    class Writes(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.register_buffer("seen", torch.zeros(()))
            self.writing = False

        def forward(self, x: Tensor) -> Tensor:
            if self.writing:
                self.seen.data.add_(x.sum())
            out: Tensor = self.head(x.mean(1))
            return out

    model = Writes()
    step = PrivateStep(model, _loss, method="dpsgd", noise_multiplier=1.0, expected_batch_size=8)
    step.accumulate(_series(8))
    before = {name: value.clone() for name, value in _sum(step).items()}
    model.writing = True
    with device(), pytest.raises(ValueError, match="'seen' was written"):
        step.accumulate(_series(8))
    assert float(model.seen) == 0.0
    assert all(torch.equal(value, before[name]) for name, value in _sum(step).items())


def test_on_a_device_too_parameters_written_by_a_pass_are_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    writing = False

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if writing:
            held[0].data.mul_(2.0)
        return _loss(model, (batch[0].mean(1), batch[1]))

    held = list(model.parameters())
    step = PrivateStep(model, loss, method="dpsgd", noise_multiplier=1.0, expected_batch_size=8)
    step.accumulate(_series(8))
    writing = True
    with device(), pytest.raises(RuntimeError, match=r"wrote into the parameter '0\.weight'"):
        step.accumulate(_series(8))
    assert not step.pending


def test_on_a_device_too_parameters_changed_between_accumulate_and_release_are_refused() -> None:
    step, batches = _step("lstm", 1)
    step.accumulate(batches[0])
    step.trained[0].data.mul_(2.0)  # without a new version
    kept = step.trained[0].detach().clone()
    with device():
        with pytest.raises(RuntimeError, match="changed between accumulate and release"):
            step.accumulate(batches[1])
        with pytest.raises(RuntimeError, match="changed between accumulate and release"):
            step.release()
    assert torch.equal(step.trained[0], kept)  # nobody else's write is taken for the pass's


def test_noise_reaches_a_device_without_a_wait_and_is_the_same_as_on_the_cpu() -> None:
    """Chunks are copied from page-locked memory, which torch's allocator keeps until the copy is done."""
    from pmlf.mechanism import noise

    plain, sent = torch.zeros(noise.CHUNK + 3), torch.zeros(noise.CHUNK + 3)
    noise.Stream(bytes(32)).add_gaussian_(plain, 2.0)
    copied: list[torch.device] = []

    def to_device(chunk: Tensor, device: torch.device) -> Tensor:
        copied.append(device)
        return chunk.clone()

    with mock.patch.object(noise, "_sent", to_device), reads() as found:
        noise.Stream(bytes(32)).add_gaussian_(sent, 2.0)
    assert torch.equal(plain, sent) and len(copied) == 2
    assert not found
