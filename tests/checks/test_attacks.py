"""What auditors tried: models, losses, records and orders of calls that once moved the sum by more than C, or hid it.

Noise is off and B is 1, so that `p.grad` is the sum before noise.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateStep, methods
from pmlf.checks.first_look import FirstLook
from pmlf.engine.augmentation import Augmentation
from pmlf.mechanism.noise import SeededRandomness
from reference import single_gradient

C = 1.0
pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def stepped(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor] | None = None, **options: Any) -> PrivateStep:
    fixed = {"method": methods.dpsgd(), "clip_norm": C, "noise_multiplier": 0.0, "expected_batch_size": 1.0}
    return PrivateStep(model, loss or squares, **{**fixed, **options})


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).flatten(1).square().sum(1)


def summed(step: PrivateStep, *micro_batches: Any) -> Tensor:
    for micro_batch in micro_batches:
        step.accumulate(micro_batch)
    step.release()
    return torch.cat([p.grad.double().flatten() for p in step.trained if p.grad is not None])


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)


def test_complex_parameters_are_refused_since_noise_is_real() -> None:
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64"):
        stepped(Spectral())
    with pytest.raises(ValueError, match="real floating-point"):
        SeededRandomness(0).stream("noise").add_gaussian_(torch.zeros(3, dtype=torch.cfloat), 1.0)


class Pooled(nn.Module):
    """Mean over tokens, padding too or not."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 2)
        self.masked = masked

    def forward(self, ids: Tensor) -> Tensor:
        count = (ids != 0).sum(1, keepdim=True) if self.masked else ids.shape[1]
        return self.head(torch.tanh(20 * self.embedding(ids).sum(1) / count))


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_changes_the_gradients_of_shorter_records_is_refused(masked: bool) -> None:
    torch.manual_seed(0)
    records = [(torch.randint(1, 50, (size,)), size % 2) for size in [5] * 40 + [200]]

    def collate(some: list[Any]) -> tuple[Tensor, Tensor]:
        return pad_sequence([ids for ids, _ in some], batch_first=True), torch.tensor([label for _, label in some])

    def train() -> None:
        model = Pooled(masked)
        run = pmlf.make_private(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=records,
            loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
            collate_fn=collate,
            noise_multiplier=1.0,
            target_delta=1e-3,
            batch_size=20,
            steps=1,
        )
        for batch in run.batches():
            run.step(batch)

    if masked:
        train()
    else:
        with pytest.raises(ValueError, match="changes with the records that it is collated with"):
            train()


def test_a_collate_function_that_mixes_records_of_equal_size_is_refused() -> None:
    def centred(some: list[Any]) -> tuple[Tensor]:
        x = torch.stack([record[0] for record in some])
        return (x - x.mean(0) if len(some) > 1 else x,)

    with pytest.raises(ValueError, match="changes with the records that it is collated with"):
        made_private(nn.Linear(3, 1), steps=1, collate_fn=centred)


def test_another_mode_is_another_model_to_check() -> None:
    model = nn.Sequential(Centred(chance=0.5)).eval()  # in eval mode it centres nothing
    step = stepped(model)
    step.accumulate((rows(6, 3),))
    model.train()
    with pytest.raises(ValueError, match="depends on the other samples"):
        step.accumulate((rows(6, 3),))


class TokenMajor(nn.Module):
    """A layer whose batch is second: its per-sample gradients are of other samples."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.inner(x.transpose(0, 1).reshape(x.shape[0], -1, x.shape[2]))
            .reshape(x.shape[1], x.shape[0], -1)
            .transpose(0, 1)
        )


@pytest.mark.parametrize("head_is_zero", [False, True])
def test_a_head_of_zeros_hides_no_mixing_behind_it(head_is_zero: bool) -> None:
    model = nn.Sequential(TokenMajor(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    if head_is_zero:
        nn.init.zeros_(model[3].weight)
    loss = lambda m, b: (m(b[0]).squeeze(1) - b[1]).square()  # noqa: E731
    with pytest.raises(ValueError, match=r"not the samples' own|depends on the other samples"):
        stepped(model, loss).accumulate((rows(6, 4, 3), rows(6)))


class Centred(nn.Module):
    """Statistics of the batch, by hand; random in training mode where `chance` is set."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        self.linear, self.chance = nn.Linear(3, 3), chance

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.training or not self.chance:
            out = out - out.mean(0, keepdim=True)
        return F.dropout(out, self.chance, training=self.training) if self.chance else out


@pytest.mark.parametrize("spoil", [float("nan"), 0.0])
def test_samples_that_tell_nothing_are_not_taken_for_a_check(spoil: float) -> None:
    step = stepped(Centred(), lambda m, b: (b[0][:, 0] != 0) * m(b[0]).square().sum(1))
    first = rows(4, 3)
    first[:2] = spoil
    with pytest.raises(ValueError, match="depends on the other samples"):
        for some in (first[:2], first[2:]):
            step.accumulate((some,))


def test_synthetic_inputs_of_sizing_are_not_taken_for_a_check() -> None:
    model = Centred()
    with pytest.raises(ValueError, match="depends on the other samples"):
        run = pmlf.make_private(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=TensorDataset(rows(40, 3).abs()),
            loss_fn=lambda m, b: m(b[0].log()).square().sum(1),  # of normal numbers: NaN
            noise_multiplier=1.0,
            target_delta=1e-3,
            batch_size=20,
            steps=1,
            max_physical_batch_size="auto",
        )
        for batch in run.batches():
            run.step(batch)


def mixed(model: nn.Module, batch: Any) -> Tensor:
    other = batch[0][torch.randperm(len(batch[0]))] if model.training else batch[0]
    return squares(model, ((batch[0] + other) / 2,))


@pytest.mark.parametrize(
    ("model", "loss"), [(Centred(chance=0.3), squares), (nn.Linear(3, 2), mixed)], ids=["statistics", "mixup"]
)
def test_chance_in_training_mode_hides_no_mixing(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
    with pytest.raises(ValueError, match="depends on the other samples"):
        stepped(model, loss).accumulate((rows(6, 3),))


def test_chance_that_mixes_nothing_is_no_fault() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.RReLU(), nn.Linear(8, 2))
    stepped(model).accumulate((rows(6, 3),))


def test_an_augmentation_that_mixes_samples_is_refused() -> None:
    mixing = Augmentation(function=lambda batch, u: (batch[0] + batch[0].mean(0),), draws=1)
    with pytest.raises(ValueError, match="augmentation makes a sample depend"):
        stepped(nn.Linear(3, 2), augmentation=mixing).accumulate((rows(4, 3),))
    shifting = Augmentation(function=lambda batch, u: (batch[0] + u[:, :1].to(batch[0]),), draws=1)
    stepped(nn.Linear(3, 2), augmentation=shifting).accumulate((rows(4, 3),))


class Bypassed(nn.Module):
    """Uses a layer's weight outside it, behind a factor so small that its gradient hardly shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.layer_scale = nn.Parameter(torch.full((1, 3), 1e-4))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.inner(x) + 3 * F.linear(x, self.inner.weight)
        return self.head(x + self.layer_scale * branch)


def test_a_small_factor_hides_no_weight_used_outside_its_layer() -> None:
    """It is counted where it is used, however small its part is."""
    model, batch = Bypassed(), (rows(4, 3),)
    step = stepped(model)
    step.accumulate(batch)
    found = step.sensitive_sum()
    assert found is not None
    parts = [torch.cat([g.flatten() for g in single_gradient(model, squares, (row[None],))]) for row in batch[0]]
    expected = torch.stack([part * min(1.0, step.settings.clip_norm / float(part.norm())) for part in parts]).sum(0)
    ours = torch.cat([found.values[name].flatten() for name, _ in model.named_parameters()])
    inner = slice(0, model.layer_scale.numel() + model.inner.weight.numel())
    torch.testing.assert_close(ours[inner].double(), expected[inner].double(), rtol=1e-4, atol=1e-12)


class BareToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.token


class WithoutRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_module_without_a_rule_trains_in_half_precision() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Flatten()).bfloat16()
    assert summed(stepped(model), (rows(4, 3, 5).bfloat16(),)).isfinite().all()


@pytest.mark.parametrize("layer", [BareToken, WithoutRule])
def test_in_half_precision_one_of_many_samples_moves_the_sum_by_at_most_c(layer: type[nn.Module]) -> None:
    model = nn.Sequential(layer()).bfloat16()
    step = stepped(model, lambda m, b: m(b[0]).float().sum(1))
    many = rows(521, 4).bfloat16().abs() * 10
    found = []
    for samples in (many, many[:-1]):
        step.accumulate((samples,))
        summed = step.sensitive_sum()
        assert summed is not None
        found.append(torch.cat([t.double().flatten() for t in summed.values.values()]))
        step.discard()
    assert (found[0] - found[1]).norm() <= C * (1 + 1e-3)


def test_autocast_around_the_step_rounds_neither_norms_nor_sums() -> None:
    model = nn.Sequential(WithoutRule(), nn.Linear(4, 8))
    step, many = stepped(model), 10 * rows(1001, 4)
    found = []
    for samples in (many, many[:-1]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(summed(step, (samples,)))
    assert (found[0] - found[1]).norm() <= C * (1 + 1e-3)


class Codebook(nn.Module):
    """Keeps a running mean of its inputs: in a buffer, or in a frozen parameter; by `.data`, or in place."""

    def __init__(self, buffer: bool, by_data: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("kept", torch.zeros(3))
        else:
            self.kept = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.kept.data if self.by_data else self.kept).mul_(0.9).add_(0.1 * x.mean(0))
        return x


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_data_that_a_forward_pass_writes_into_the_model_is_refused_and_taken_back(buffer: bool, by_data: bool) -> None:
    model = nn.Sequential(Codebook(buffer, by_data), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0.kept' was written by the forward pass"):
        stepped(model).accumulate((rows(4, 3) + 1000.0,))
    assert torch.equal(model.state_dict()["0.kept"], torch.zeros(3))


@pytest.mark.slow
def test_tokens_that_cancel_do_not_make_the_rounding_of_others_follow_from_one_sample() -> None:
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    step = stepped(model, lambda m, b: (m(b[0]) * b[1]).sum((1, 2)))
    v, g = rows(1024, 1, 64, seed=1), rows(1024, 1, 64, seed=2)
    inputs, gradients = torch.cat([v, -v], 1) * 1e8, torch.cat([g, g], 1)  # the true gradients are zero
    tiny = (1e-10 * rows(1, 2, 64, seed=3), 1e-10 * rows(1, 2, 64, seed=4))
    with_it = (torch.cat([tiny[0], inputs]), torch.cat([tiny[1], gradients]))
    moved = summed(step, with_it) - summed(step, (inputs, gradients))
    assert moved.norm() < 1e-3 * C


class Turned(nn.Module):
    """One convolution on an image and on its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 256, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x).flatten(1), self.conv(x.mT[..., : x.shape[-2]]).flatten(1)], 1)


@pytest.mark.parametrize("shape", [(2, 8), (4, 4), (8, 2)])
def test_one_convolution_on_images_of_two_shapes_is_exact(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = Turned().double(), rows(3, 64, *shape).double()
    expected = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for sample in x:
        grads = torch.autograd.grad(squares(model, (sample[None],)).sum(), list(model.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        expected += flat * min(1.0, C / float(flat.norm()))
    assert torch.allclose(summed(stepped(model), (x,)), expected, atol=1e-9)


def test_neither_model_nor_mechanism_nor_randomness_is_exchanged_after_the_check() -> None:
    step = stepped(nn.Linear(3, 2))
    step.accumulate((rows(2, 3),))
    for name, other in (("model", nn.Linear(3, 2)), ("settings", step.settings), ("randomness", step.randomness)):
        with pytest.raises(AttributeError):
            setattr(step, name, other)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(4, 4, seed=5))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(x[:, None, :] @ self.weight + positions).sum(1)


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions()
        self.register_buffer("positions", rows(8, 4, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.positions)


@pytest.mark.parametrize("samples", [7, 8, 9])
def test_an_argument_that_happens_to_have_as_many_rows_as_samples_is_not_cut_up(samples: int) -> None:
    model, x = WithPositions().double(), rows(samples, 4).double()
    expected = torch.zeros(16, dtype=torch.float64)
    for sample in x:
        (grad,) = torch.autograd.grad(squares(model, (sample[None],)).sum(), list(model.parameters()))
        expected += grad.flatten() * min(1.0, C / float(grad.norm()))
    assert torch.allclose(summed(stepped(model.double()), (x,)), expected, atol=1e-9)


def test_numbers_whose_squares_float32_does_not_hold_are_not_lost_from_a_norm() -> None:
    model = nn.Linear(10, 4000, bias=False)
    nn.init.zeros_(model.weight)
    step = stepped(model, lambda m, b: (m(b[0]) * b[1]).sum(1), clip_norm=1e-3)
    inputs, gradients = torch.full((2, 10), 5e18), torch.full((2, 4000), 2.5e-23)
    assert summed(step, (inputs[1:], gradients[1:])).norm() <= 1e-3 * (1 + 1e-4)
    gradients[0] = float("nan")  # beside a sample that is refused, too
    assert summed(step, (inputs, gradients)).norm() <= 1e-3 * (1 + 1e-4)


def made_private(model: nn.Module, **options: Any) -> pmlf.PrivateRun:
    usual = {
        "dataset": TensorDataset(rows(64, 3)),
        "loss_fn": squares,
        "noise_multiplier": 5.0,
        "target_delta": 1e-3,
        "batch_size": 16,
        "steps": 1,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return pmlf.make_private(model=model, optimizer=optimizer, **{**usual, **options})


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_an_iterator_left_from_earlier_steps_is_refused() -> None:
    run = made_private(nn.Linear(3, 1), steps=6, seed=0)
    stale = run.batches()
    run.step(next(stale))
    for batch in run.batches():
        run.step(batch)
        if run.steps_done == 4:
            break
    with pytest.raises(ValueError, match="this batch belongs to step 1, and step 4 is next"):
        run.step(next(stale))


def test_a_gradient_left_on_a_frozen_parameter_is_never_applied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    squares(model, (rows(8, 3),)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = made_private(model, steps=1)
    for batch in run.batches():
        run.step(batch)
    assert torch.equal(model[0].weight, before)


def test_what_is_released_behind_the_runs_back_is_not_certified() -> None:
    run = made_private(nn.Linear(3, 1), steps=3)
    run.private_step.release()
    for ask in (run.epsilon, run.certificate, run.state_dict, lambda: run.step(next(run.batches()))):
        with pytest.raises(RuntimeError, match="outside of the run"):
            ask()


def test_what_is_released_after_going_back_behind_the_runs_back_is_not_certified() -> None:
    run = made_private(nn.Linear(3, 1), steps=3)
    before = run.private_step.state_dict()
    run.step(next(run.batches()))
    run.private_step.load_state_dict(before)
    with pytest.raises(RuntimeError, match="outside of the run"):
        run.certificate()


def test_a_run_with_a_ledger_is_not_copied(tmp_path: Path) -> None:
    with pmlf.Ledger(tmp_path / "ledger", dataset="patients") as ledger:
        run = made_private(nn.Linear(3, 1), steps=3, ledger=ledger)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(run)


def test_a_pickled_step_holds_nothing_sensitive() -> None:
    step = stepped(nn.Sequential(nn.Linear(3, 2)), squares)
    step.accumulate((rows(4, 3) + 1234.5,))
    with pytest.raises(RuntimeError, match="a sum is pending"):
        pickle.dumps(step)
    summed = step.sensitive_sum()
    assert summed is not None
    sensitive = [value.numpy().tobytes() for value in summed.values.values()]
    step.discard()
    assert not any(value in pickle.dumps(step) for value in sensitive)


def test_after_an_interrupted_release_a_saved_state_is_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    step = stepped(nn.Linear(3, 2))
    state = step.state_dict()
    step.accumulate((rows(4, 3),))
    with monkeypatch.context() as patched:
        patched.setattr(step._history, "remember", lambda parameters: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step.release()
    with pytest.raises(RuntimeError, match="interrupted halfway"):
        step.release()
    step.load_state_dict(state)
    assert not step.pending
    step.accumulate((rows(4, 3),))
    step.release()


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (nn.Linear(3, 2), lambda m, b: squares(m, b)[:-1]),
        (nn.Linear(3, 2), lambda m, b: m(b[0])),
        (nn.Sequential(nn.Flatten(0), nn.Linear(21, 5)), lambda m, b: m(b[0])),
    ],
)
def test_no_message_tells_how_many_samples_were_drawn(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FirstLook, "at", lambda self, batch, size, modes: "marked")
    with pytest.raises(ValueError, match="sample") as refused:
        stepped(model, loss).accumulate((rows(7, 3),))
    assert "7" not in str(refused.value)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.temperature


def test_a_parameter_without_axes_is_taken_like_any_other() -> None:
    x = rows(3, 4)
    expected = (2 * 2.0 * x.square().sum(1)).clamp(max=C).sum()
    assert torch.allclose(summed(stepped(nn.Sequential(Scaled())), (x,)), expected.double(), rtol=1e-4)


class PositionTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(rows(8, 4, seed=5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].unsqueeze(0)


class Gate(nn.Module):
    """Adds what the rows of a table come to, behind a gate."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((4,), gate))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(table).sum(0)


class Tabled(nn.Module):
    """A table of eight rows that every sample gets whole."""

    def __init__(self, module: nn.Module, table: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.module, PositionTable):
            return torch.tanh(x.unsqueeze(1) + self.module(self.table))
        found: Tensor = self.module(x, self.table)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("samples", [7, 8, 9])
@pytest.mark.parametrize(
    "kind", ["positions", "closed gate", "beside a huge sample", "beside a sample without a number"]
)
def test_a_table_with_as_many_rows_as_there_are_samples_is_not_taken_for_theirs(kind: str, samples: int) -> None:
    positions = kind == "positions"
    module = PositionTable() if positions else Gate(0.0 if kind == "closed gate" else 1.0)
    model = Tabled(module, torch.arange(8) if positions else 5 * rows(8, 4, seed=6))
    x = 10 * rows(samples, 4).abs()
    if kind == "huge sample":
        x[-1] = 1e8
    if kind == "sample without a number":
        x[3] = float("nan")
    expected = torch.zeros_like(torch.cat([p.flatten() for p in model.parameters()]), dtype=torch.float64)
    for single in x:
        found = torch.autograd.grad(squares(model, (single[None],)).sum(), list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in found]).double()
        if bool(gradient.isfinite().all()):
            expected += gradient * min(1.0, C / float(gradient.norm()))
    step = stepped(model)
    summed(step, (10 * rows(2, 4, seed=7).abs(),))  # the check is on other samples
    assert torch.allclose(summed(step, (x,)), expected, atol=1e-5)


class Packed(nn.Module):
    """A layer on the real tokens of all samples, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x[mask]))
        return torch.zeros(len(x), 4).index_add(0, mask.nonzero()[:, 0], hidden)


def test_rows_picked_from_samples_of_unlike_length_are_refused_where_their_number_happens_to_fit() -> None:
    """One record of 260 tokens among 255 of 4 is 5 tokens a record on average: 25 C before."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = (model(batch[0], batch[1]) * batch[2]).sum(1)
        return found

    samples, longest = 256, 260
    x, weights = 3 * rows(samples, longest, 4), 10 * rows(samples, 4, seed=2)
    mask = torch.arange(longest).expand(samples, -1) < 4
    step = stepped(Packed(), loss)
    alike = (x[1:], mask[1:], weights[1:])
    assert float(summed(step, alike).norm()) > 0.0  # equally many of each: exact, as the check has found
    mask = mask.clone()
    mask[0] = True
    with pytest.raises(ValueError, match=r"rows of layer 'layer' .* not the samples' own"):
        step.accumulate((x, mask, weights))


class FromThree(nn.Module):
    """Mixes samples where there are three or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x - x.mean(0) if len(x) > 2 else x)
        return found


def test_samples_that_are_mixed_from_three_on_are_refused() -> None:
    step = stepped(FromThree())
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        for some in (2, 5):
            step.accumulate((rows(some, 4),))


class PaddedTogether:
    """What a transform of a whole batch does: pads to the longest of those asked for."""

    def __init__(self, records: list[tuple[Tensor, int]]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.records[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        some = [self.records[index] for index in indices]
        return list(zip(pad_sequence([ids for ids, _ in some], batch_first=True), [y for _, y in some], strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_a_dataset_that_pads_what_it_gives_together_is_checked_like_a_collate_function(masked: bool) -> None:
    torch.manual_seed(0)
    model = Pooled(masked)
    records = [(torch.randint(1, 50, (length,)), length % 2) for length in [5] * 40 + [200]]

    dataset = PaddedTogether(records)
    if masked:
        assert made_private(model, dataset=dataset, loss_fn=classify).steps == 1
    else:
        with pytest.raises(ValueError, match="changes with the records that it is collated with"):
            made_private(model, dataset=dataset, loss_fn=classify)


class DrawsChance(PaddedTogether):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [(ids + torch.randint(0, 2, ids.shape), y) for ids, y in super().__getitems__(indices)]


def test_a_dataset_that_draws_chance_is_no_fault() -> None:
    records = [(torch.randint(1, 48, (6,), generator=torch.Generator().manual_seed(i)), i % 2) for i in range(40)]
    run = made_private(Pooled(masked=True), dataset=DrawsChance(records), loss_fn=classify)
    run.step(next(run.batches()))
    assert run.steps_done == 1


@pytest.mark.parametrize("written", ["frozen", "layer"])
def test_what_a_forward_pass_writes_into_a_parameter_by_data_is_never_released(written: str) -> None:
    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 40:  # when every check is over
                getattr(self, written).weight.data[0] += x.mean()
            found: Tensor = self.layer(x) + self.frozen(x)
            return found

    step = stepped(Leaking())
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"wrote into the parameter '{written}\.weight'"):
        for _ in range(60):
            summed(step, (rows(3, 4),))
    after = step.model.state_dict()
    assert after[f"{written}.weight"].isnan().all()  # nothing of the data is left
    assert all(torch.equal(before[name], after[name]) for name in before if name != f"{written}.weight")


@pytest.mark.slow
@pytest.mark.parametrize("physical", [64, 2**15])
def test_in_a_sum_of_very_many_samples_one_still_moves_it_by_c(physical: int) -> None:
    """Of 2^15 that point almost the same way. Regrouped without the first, it was 1.0009 C in a float32 sum of many
    micro-batches, and off as much in the product of a single one."""
    samples = 2**15
    model = nn.Linear(32, 32, bias=False)
    x = rows(1, 1, 32) + 0.1 * rows(samples, 1, 32, seed=2)
    weight = 100 * rows(1, 1, 32, seed=1).abs()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = (model(batch[0]) * weight).sum((1, 2))
        return found

    def pending(records: Tensor) -> Tensor:
        step = stepped(model, loss, expected_batch_size=float(samples))
        for micro_batch in records.split(physical):
            step.accumulate((micro_batch,))
        summed = step.sensitive_sum()
        assert summed is not None
        return summed.values["weight"].double()

    assert float((pending(x) - pending(x[1:])).norm()) == pytest.approx(C, rel=1e-4)


@pytest.mark.parametrize("clip_norm", [1.0, 1e-4])
def test_a_record_so_large_that_its_factor_is_no_normal_number_adds_no_more_than_c(clip_norm: float) -> None:
    """float32 rounded factors near 1e-45 to the next multiple of it: up to 1.88 C."""
    step = stepped(nn.Linear(16, 16, bias=False), clip_norm=clip_norm)
    step.accumulate((rows(3, 2, 16, seed=3),))
    step.discard()
    for exponent in range(60, 76):
        step.accumulate((rows(1, 2, 16) * 2.0**exponent * 1.3,))
        summed = step.sensitive_sum()
        assert summed is not None and float(summed.values["weight"].double().norm()) <= clip_norm * (1 + 1e-4)
        step.discard()


class SortedByLength(nn.Module):
    """Sort, run, and put back: every output is right, and a layer's rows are other samples'."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        found: Tensor = torch.tanh(self.layer(x[order]))[order.argsort()]
        return found


def test_rows_in_another_order_than_the_samples_are_refused() -> None:
    step = stepped(SortedByLength())
    x = rows(64, 4)
    x[:2, 0] = torch.tensor([-5.0, 5.0])  # the first two are in order
    with pytest.raises(ValueError, match=r"depends on the other samples of its batch: aten.sort .*argsort"):
        for some in (x[:2], x):
            step.accumulate((some,))


class MixedInFours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(-1, 4, 4) if len(x) % 4 == 0 else x.view(-1, 1, 4)
        found: Tensor = self.layer(
            (groups - groups.mean(1, keepdim=True) if len(x) % 4 == 0 else groups).reshape(-1, 4)
        )
        return found


def test_samples_that_are_mixed_in_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        stepped(MixedInFours()).accumulate((rows(64, 4),))


@pytest.mark.parametrize("rarely", [False, True])
def test_an_augmentation_that_mixes_from_three_on_or_by_chance_is_refused(rarely: bool) -> None:
    def mixed(batch: Any, uniforms: Tensor) -> Any:
        x = batch[0]
        others = 0.5 * x + 0.5 * x.roll(2, 0)
        return (torch.where(uniforms[:, :1] < 0.1, others, x) if rarely else others,)

    step = stepped(nn.Linear(4, 4), augmentation=Augmentation(function=mixed, draws=1))
    with pytest.raises(ValueError, match="augmentation makes a sample depend on the other samples"):
        step.accumulate((rows(40, 4),))


def test_a_collate_function_that_mixes_from_three_on_is_refused() -> None:
    def collate(some: list[Any]) -> Any:
        x = torch.stack([x for x, _ in some])
        return 0.5 * x + 0.5 * x.roll(2, 0), torch.tensor([int(y) for _, y in some])

    dataset = TensorDataset(rows(40, 4), torch.arange(40) % 2)
    with pytest.raises(ValueError, match="changes with the records that it is collated with"):
        made_private(nn.Linear(4, 2), dataset=dataset, loss_fn=classify, collate_fn=collate)


class Flipped(torch.utils.data.Dataset[Any]):
    """Half of the records mirrored, by chance."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = rows(4, seed=index)
        return x.flip(0) if torch.rand(()) < 0.5 else x, index % 2


@pytest.mark.slow
@pytest.mark.parametrize("with_nan", [False, True])
def test_a_subset_of_a_dataset_that_draws_chance_or_has_no_numbers_is_no_fault(with_nan: bool) -> None:
    x = rows(40, 4)
    x[3, 2] = float("nan")
    dataset: Any = TensorDataset(x, torch.arange(40) % 2) if with_nan else Flipped()
    for seed in range(10):
        torch.manual_seed(seed)
        subset = torch.utils.data.Subset(dataset, range(40))
        run = made_private(nn.Linear(4, 2), dataset=subset, loss_fn=lambda m, b: classify(m, (b[0].nan_to_num(), b[1])))
        assert run.steps == 1


class Nudged(nn.Module):
    """Every sample's features are moved a little by the first one's."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(16, 16), by

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.tanh(x) + self.by * torch.sign(x[:1]) if self.by else torch.tanh(x))
        return found


@pytest.mark.parametrize("autocast", [False, True])
def test_samples_that_move_each_other_by_as_much_as_rounding_may_are_refused(autocast: bool) -> None:
    """Of 512 all were moved the same way: 1.26 C in float32, and 19 C under bfloat16, where rounding is coarse."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return squares(model, batch)

    with pytest.raises(ValueError, match="depends on the other samples of its batch"):
        stepped(Nudged(1e-2 if autocast else 3e-4), loss).accumulate((rows(8, 16),))
    stepped(Nudged(0.0), loss).accumulate((rows(8, 16),))


class _LateMemory(nn.Module):
    """Once armed, its forward pass registers a buffer from the data, and then rewrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and "memory" in self._buffers:
            self.memory.copy_(2.0 * x.detach().mean(0))
        elif self.armed:
            self.register_buffer("memory", x.detach().mean(0))
        return self.linear(x)


def test_a_buffer_registered_at_one_point_and_rewritten_at_the_next_is_refused_before_it_is_released() -> None:
    model, batch = _LateMemory(), (torch.randn(4, 3),)
    step = stepped(model, method=methods.dp_pmlf(k=2))
    step.accumulate(batch)
    step.release()
    model.armed = True
    with pytest.raises(ValueError, match="written by the forward pass"):
        step.accumulate(batch)
