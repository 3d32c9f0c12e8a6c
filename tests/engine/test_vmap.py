"""The whole model under vmap: exact, samples apart whatever the model does, and nothing kept from pass to pass."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import Augmentation, PrivateStep, methods
from pmlf.basics.batches import batch_size, select, without
from pmlf.engine import strategy
from pmlf.engine.half_precision import deadly
from reference import Reference
from zoo import CASES, Case, classify, images, make, token_batch

pytestmark = pytest.mark.filterwarnings("ignore:(noise_multiplier=0|no loss depends on .unused)")

CLIP = 0.5


def stepped(model: nn.Module, loss: Any = classify, **options: Any) -> PrivateStep:
    fixed = {"clip_norm": CLIP, "noise_multiplier": 0.0, "expected_batch_size": 1.0, "gradients": "vmap"}
    return PrivateStep(model, loss, **{"method": "dpsgd", **fixed, **options})


def summed(step: PrivateStep, *micro_batches: Any) -> Tensor:
    for micro_batch in micro_batches:
        step.accumulate(micro_batch)
    step.release()
    return torch.cat([p.grad.flatten() for p in step.trained if p.grad is not None])


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def classify_masked(model: Any, batch: Any) -> Tensor:
    """The mask as transformers takes it without a look at its numbers: (samples, 1, queries, keys)."""
    keys = batch["attention_mask"].bool()[:, None, None, :]
    logits = model(input_ids=batch["input_ids"], attention_mask=keys.expand(-1, 1, keys.shape[-1], -1)).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


MAPPED = {name: case for name, case in CASES.items() if name not in ("roberta", "bert", "checkpointed")}
MAPPED["roberta"] = Case(CASES["roberta"].make, token_batch, classify_masked)
SMALL_AT_OTHER_K = [(name, k) for name in ("tied", "unusual", "convolutions") for k in (1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), [*((name, 2) for name in MAPPED), *SMALL_AT_OTHER_K])
def test_every_sample_is_exact_under_vmap(name: str, k: int) -> None:
    """k + 1 steps of DP-PMLF against float64, one sample and one point at a time; frozen: the first parameter."""

    def points(t: int) -> list[tuple[list[float], float]]:
        weights = [0.5**j for j in range(min(t + 1, k))]
        return [([0.0] * j + [1.0], weight / sum(weights)) for j, weight in enumerate(weights)]

    model, case = make(name), MAPPED[name]
    next(model.parameters()).requires_grad_(name == "tied")
    step = stepped(model, case.loss, method=methods.dp_pmlf(k=k, beta=0.5, a=(-0.9,), b=(0.1,)))
    reference = Reference(
        model, case.loss, points=points, a=(-0.9,), b=(0.1,), corrected=True, clip_norm=CLIP, expected_batch_size=1.0
    )
    for _ in range(k + 1):
        step.accumulate(case.batch(3))
        step.release()
        wanted = reference.step(case.batch(3))
        for parameter, exact in zip(step.trained, wanted, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad.double(), exact, rtol=1e-4, atol=1e-5)
        reference.update(wanted, 0.05)
        with torch.no_grad():
            for parameter, exact in zip(step.trained, reference.trained, strict=True):
                parameter.copy_(exact)


def test_samples_in_several_slices_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(True)
        return classify(model, batch)

    found, passes = [], []
    for budget in (strategy.LATE_BYTES, 3 * 4 * sum(p.numel() for p in small().parameters()), 1):
        monkeypatch.setattr(strategy, "LATE_BYTES", budget)
        step = stepped(small(), loss)
        step.accumulate(images(6)(2))  # and what is looked at first
        seen.clear()
        step.accumulate(images(6)(7))
        passes.append(len(seen))
        found.append(summed(step))
    assert passes == [1, 3, 7]
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-7)
    assert torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-7)


class Applied(nn.Module):
    """Two layers and something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between
        self.register_buffer("mean", torch.zeros(8))
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self, torch.tanh(self.first(x))))
        return found


def balanced(model: nn.Module, batch: Any) -> Tensor:
    shares = (batch[1][:, None] == torch.arange(4)).float().mean(0)
    return classify(model, batch) / (shares[batch[1]] * 4)


MIXING: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any]] = {
    "centred": (lambda m, x: x - x.mean(0), classify),
    "standardised": (lambda m, x: (x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt(), classify),
    "sorted": (lambda m, x: x.sort(0).values, classify),
    "rolled": (lambda m, x: x + x.roll(1, 0), classify),
    "attention over the batch": (lambda m, x: torch.softmax(x @ x.mT, -1) @ x, classify),
    "exchanged at random": (lambda m, x: F.dropout(x, 0.1, m.training) + x[torch.randperm(len(x))], classify),
    "class weights": (lambda m, x: x, balanced),
    "divided by its size": (lambda m, x: x, lambda m, b: classify(m, b) * len(b[0])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_a_batch_have_nothing_to_mix(name: str) -> None:
    """Leaving a sample out moves the sum by at most C: every sample was alone."""
    between, loss = MIXING[name]
    torch.manual_seed(3)
    model, batch = Applied(between), images(6)(6)
    batch[0][2] *= 30.0

    def added_up(some: Any) -> Tensor:
        return summed(stepped(copy.deepcopy(model).train("random" not in name), loss), some)

    whole = added_up(batch)
    for left_out in range(batch_size(batch)):
        assert float((whole - added_up(without(batch, left_out))).norm()) <= CLIP * (1 + 1e-4)
    alone = sum(added_up(select(batch, slice(i, i + 1))) for i in range(6))
    assert torch.allclose(whole, torch.as_tensor(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cnn5", "vit", "convolutions"])
def test_a_sample_that_is_not_finite_adds_exactly_zero(name: str, spoil: float) -> None:
    case = MAPPED[name]
    batch = case.batch(4)
    spoiled = (batch[0].clone(), batch[1])
    spoiled[0][1] = spoil
    rest = without(spoiled, 1)
    assert torch.allclose(
        summed(stepped(make(name), case.loss), spoiled), summed(stepped(make(name), case.loss), rest), atol=1e-6
    )
    assert not summed(stepped(make(name), case.loss), select(spoiled, slice(1, 2))).any()


def test_every_sample_has_a_dropout_of_its_own_and_a_seed_gives_it_again() -> None:
    same = torch.randn(1, 6).expand(5, 6)

    def released(samples: int, seed: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        step = stepped(
            model, lambda m, b: m(b[0]).squeeze(1), generator=torch.Generator().manual_seed(seed), clip_norm=1e6
        )
        return summed(step, (same[:samples],))

    five = released(5, seed=1)
    assert torch.equal(five, released(5, seed=1))
    assert not torch.allclose(five, released(5, seed=2))
    weights = five[-65:-1]  # of the last layer: the sum of five masked copies of one input
    ones = released(1, seed=1)[-65:-1]
    masks = (weights / torch.where(ones == 0, torch.nan, ones)).round()
    assert len(masks[masks.isfinite()].unique()) > 2  # in how many of five it was kept


def keep_in_closure() -> Callable[[Any, Tensor], Tensor]:
    bank: list[Tensor] = []

    def between(model: Any, x: Tensor) -> Tensor:
        bank.append(x.detach())
        return x - bank[0]

    return between


def set_buffer(model: Any, x: Tensor) -> Tensor:
    model.mean = x.detach().mean(0)
    return x


def set_parameter(model: Any, x: Tensor) -> Tensor:
    model.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
    return x


def add_buffer(model: Any, x: Tensor) -> Tensor:
    if "seen" not in dict(model.last.named_buffers()):  # has no buffer so far
        model.last.register_buffer("seen", x.detach().mean(0))
    return x - model.last.seen


def keep_in_attribute(model: Any, x: Tensor) -> Tensor:
    model.running = 0.9 * getattr(model, "running", 0.0) + x.detach()
    return x - model.running


def keep_on_parameter(model: Any, x: Tensor) -> Tensor:
    model.frozen.last = x.detach() * 2
    return x


def keep_rows(model: Any, x: Tensor) -> Tensor:
    model.kept.extend(x.detach())  # by its iterator
    return x


def keep_as_parameter(model: Any, x: Tensor) -> Tensor:
    model.kept.append(nn.Parameter(x.detach()))
    gc.collect()
    return x


def keep_by_hand(model: Any, x: Tensor) -> Tensor:
    """As soon as there is something to keep, and never again: the first samples stay."""
    if not model.kept:
        model.kept.append(x.detach().clone())
    return x - model.kept[0].mean(0)


def keep_in_list(model: Any, x: Tensor) -> Tensor:
    model.kept.append(x.detach() * 1)
    return x - model.kept[0]


def with_hook(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad)
    return x


def set_data(model: Any, x: Tensor) -> Tensor:
    model.frozen.data = torch.ones(8)
    return x


class Mean(torch.autograd.Function):
    """Its own rule sees all samples."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(0, keepdim=True), 0


@torch.library.custom_op("pmlf_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


AROUND: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a list outside the model": (keep_in_closure(), "is kept after it|was written by the forward pass"),
    "an attribute": (keep_in_attribute, "is kept after it|was written by the forward pass"),
    "an attribute of a parameter": (keep_on_parameter, "is kept after it|was written by the forward pass"),
    "a list of the model": (keep_in_list, "is kept after it|was written by the forward pass"),
    "rows in a list": (keep_rows, "is kept after it|was written by the forward pass"),
    "parameters in a list": (keep_as_parameter, "is kept after it|was written by the forward pass"),
    "the first sample": (keep_by_hand, "is kept after it|was written by the forward pass"),
    "a buffer set": (set_buffer, "'mean'.* was written by the forward pass"),
    "a buffer added": (add_buffer, "'last.seen'.* was written by the forward pass"),
    "a buffer written": (lambda m, x: x + m.mean.add_(x.detach().mean(0)), "torch.func.vmap cannot run the loss"),
    "a buffer counting": (lambda m, x: x + m.mean.add_(1), "add_.*mutate a captured Tensor"),
    "a frozen parameter set": (set_parameter, "'frozen'.* was written by the forward pass"),
    "the data of a frozen parameter": (set_data, r"sets a tensor's \.data"),
    "a rule of its own": (lambda m, x: Mean.apply(x), "uses Mean, an autograd.Function"),
    "an operation of its own": (lambda m, x: x * doubled(x.detach()), "uses pmlf_tests::doubled"),
    "a hook": (with_hook, "registers a hook"),
    "text": (lambda m, x: x * len(f"{x}"), "writes a tensor's numbers out"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_would_get_around_vmap_is_refused_and_the_model_left_as_it_was(name: str) -> None:
    between, message = AROUND[name]
    torch.manual_seed(1)
    model = Applied(between)
    step = stepped(model)
    parts = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            step.accumulate(images(6)(3))
    assert not step.pending
    assert [list(vars(module)) for module in model.modules()] == [list(each) for each in attributes]
    assert all(vars(m)[key] is each[key] for m, each in zip(model.modules(), attributes, strict=True) for key in each)
    assert model.state_dict().keys() == parts.keys() and not model.kept
    assert all(torch.equal(value, parts[key]) for key, value in model.state_dict().items())


def test_nothing_is_kept_where_nothing_is_refused() -> None:
    """Neither hooks, nor attributes, nor tensors of functorch's."""
    model = Applied(lambda m, x: x - m.mean + m.frozen)
    before = [dict(vars(module)) for module in model.modules()]
    summed(stepped(model, method="dp-pmlf"), images(6)(5))
    assert [vars(module) for module in model.modules()] == before
    copy.deepcopy(model)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "if": (lambda m, x: x if x.sum() > 0 else -x, "data-dependent control flow"),
    "item": (lambda m, x: x * x.max().item(), r"calling \.item\(\)"),
    "mask": (lambda m, x: x[x > 0].sum() + x, "indexing with a boolean mask"),
    "in place": (lambda m, x: torch.zeros(1, 8).add_(x), "shape"),
    "numpy": (lambda m, x: x * float(x.detach().numpy().max()), "data pointer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vmap_does_not_take_is_refused_with_its_line_and_the_way_out(name: str) -> None:
    between, cause = REFUSED[name]
    with pytest.raises(
        ValueError, match=f'{cause}.* at test_vmap.py, line .*lambda m, x.*gradients="one-by-one"'
    ) as told:
        stepped(Applied(between)).accumulate(images(6)(911))
    assert "911" not in str(told.value)
    summed(stepped(Applied(between), gradients="one-by-one"), images(6)(3))


def test_checkpointing_and_masks_that_transformers_looks_into_are_refused() -> None:
    for name in ("checkpointed", "bert"):
        with pytest.raises(ValueError, match=r'torch.func.*saved tensor hooks|masking_utils.*gradients="one-by-one"'):
            stepped(make(name), CASES[name].loss).accumulate(CASES[name].batch(3))


def test_an_ordinary_mistake_is_said_as_ever() -> None:
    for loss, message in (
        (lambda m, b: classify(m, b).mean(), "returned a scalar"),
        (lambda m, b: classify(m, b).detach(), "does not depend on any trainable parameter"),
        (lambda m, b: m(b[0]), "not one loss a sample"),
    ):
        with pytest.raises(ValueError, match=message):
            stepped(small(), loss).accumulate(images(6)(3))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        stepped(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))


@pytest.mark.parametrize("part", [["a", "b", "c"], 3, "name"])
def test_parts_of_a_batch_that_are_no_tensors_are_refused(part: Any) -> None:
    x, y = images(6)(3)
    with pytest.raises(ValueError, match=r'vmap maps tensors alone.*gradients="one-by-one"|that all samples share'):
        stepped(small(), lambda m, b: classify(m, b["xy"])).accumulate({"xy": (x, y), "part": part})
    summed(stepped(small(), lambda m, b: classify(m, b["xy"])), {"xy": (x, y), "part": None})


def test_a_model_of_one_sample_is_never_given_more() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert len(batch[0]) == 1
        return F.cross_entropy(model(batch[0].squeeze(0)), batch[1].squeeze(0)).reshape(1)

    found = [summed(stepped(small(), each), images(6)(5)) for each in (loss, classify)]
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_an_augmentation_has_one_sample_at_a_time() -> None:
    def mixed(batch: Any, uniforms: Tensor) -> Any:
        return batch[0] + 100.0 * (len(batch[0]) > 2) + uniforms.to(batch[0]), batch[1]

    augmentation = Augmentation(function=mixed, draws=1)
    found = [
        summed(stepped(small(), gradients=way, augmentation=augmentation, generator=torch.Generator()), images(6)(5))
        for way in ("vmap", "one-by-one")
    ]
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "channels-last", "float64"])
def test_precisions_and_layouts_are_as_one_by_one(kind: str) -> None:
    if kind in ("autocast", "bfloat16") and deadly():
        pytest.skip("bfloat16 ends the process on this CPU")
    model = make("resnet")
    x, y = images(3, 8, 8)(4)
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(kind, torch.float32)
    layout = torch.channels_last if kind == "channels-last" else torch.contiguous_format
    model, x = model.to(dtype, memory_format=layout), x.to(dtype, memory_format=layout)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            return classify(model, batch)

    mapped, alone = (
        summed(stepped(copy.deepcopy(model), loss, gradients=way), (x, y)) for way in ("vmap", "one-by-one")
    )
    half = kind in ("autocast", "bfloat16")
    assert float((mapped - alone).norm() / alone.norm()) < (5e-2 if half else 1e-4)


@pytest.mark.slow
def test_both_ways_out_are_named_and_check_takes_them() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.inner(x)[0][:, -1])
            return found

    torch.manual_seed(0)
    model, batch = Recurrent(), images(5, 6)(4)
    with pytest.raises(ValueError) as refused:  # the faster of the two comes first, as measured
        pmlf.check(model, lambda m, b: classify(m, (b[0] - b[0].mean(0), b[1])), batch)
    assert all(f'gradients="{way}"' in str(refused.value) for way in ("vmap", "one-by-one"))
    for way in ("vmap", "one-by-one"):
        checked = pmlf.check(model, classify, batch, gradients=way, clip_norm=0.1)
        assert checked.sensitivity <= 1 + 1e-4 and checked.disagreement < 1e-4
        assert [cost.rule for cost in checked.layers] == [way]
    with pytest.raises(ValueError, match="gradients='quick' is not known: give one of ghost, vmap, one-by-one"):
        pmlf.check(model, classify, batch, gradients="quick")  # type: ignore[arg-type]


@pytest.mark.slow
def test_make_private_trains_under_vmap_and_a_seed_gives_the_same_bits() -> None:
    def run() -> Tensor:
        torch.manual_seed(0)
        y = torch.randint(2, (120,))
        x = torch.randn(120, 6) + 2.0 * y[:, None] - 1.0
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        run = pmlf.make_private(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.0, 0.999)),
            dataset=TensorDataset(x, y),
            loss_fn=classify,
            noise_multiplier=0.5,
            target_delta=1e-3,
            batch_size=30,
            steps=12,
            max_physical_batch_size=16,
            seed=0,
            gradients="vmap",
        )
        for drawn in run.batches():
            run.step(drawn)
        assert pmlf.evaluate(model, TensorDataset(x, y)) > 0.8
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(), run())
