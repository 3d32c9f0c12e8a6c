"""What breaks privacy is refused by name; `check` finds what hooks cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep
from real_transformers import sound
from zoo import CASES, classify, images, make


class Owner(nn.Module):
    """A model around one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(4), r"layer 'layer' \(BatchNorm2d\) mixes the samples.*fix_model"),
        (nn.SyncBatchNorm(4), "mixes the samples"),
        (nn.BatchNorm1d(4, affine=False), "mixes the samples"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "saves running statistics.*track_running_stats=False"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(4, 4, sparse=True), "sparse"),
        (nn.LazyLinear(4), "not initialised yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_that_break_privacy_are_refused_by_name(layer: nn.Module, message: str) -> None:
    for attempt in (
        lambda: PrivateStep(Owner(layer), classify, noise_multiplier=1.0, expected_batch_size=1),
        lambda: pmlf.check(Owner(layer), classify, images(4)(2)),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_a_parallel_wrapper_is_refused_by_name(process_group: None) -> None:
    for wrapper in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        model = wrapper(nn.Linear(4, 2))
        with pytest.raises(ValueError, match=rf"the model \({wrapper.__name__}\) adds up .* give the model inside it"):
            PrivateStep(model, classify, noise_multiplier=1.0, expected_batch_size=1)


def test_a_model_that_fully_shard_has_touched_needs_its_process_group(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="the model is cut by fully_shard, and this process has no group"):
        PrivateStep(model, classify, noise_multiplier=1.0, expected_batch_size=1)


def refused(model: nn.Module, batch: Any, message: str, loss: Any = classify) -> None:
    """Both `check` and the first `accumulate` say so."""
    with pytest.raises(ValueError, match=message):
        pmlf.check(model, loss, batch)
    step = PrivateStep(model, loss, noise_multiplier=1.0, expected_batch_size=1)
    with pytest.raises(ValueError, match=message):
        step.accumulate(batch)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class BatchSecond(nn.Module):
    """Sequences first, samples second: a multiple of the batch size hides it from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:  # (n, tokens, 6)
        return torch.tanh(self.layer(x.transpose(0, 1))).mean(0)


class Borrowing(nn.Module):
    """Uses a layer's weight outside that layer's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.first(x)), self.first.weight))


class Counting(nn.Module):
    def __init__(self, *, assign: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.assign = assign
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.assign:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x)


class InputChanged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        out = self.layer(x)
        x.mul_(2.0)
        return out + x.sum(1, keepdim=True)


def test_samples_that_mix_are_found() -> None:
    refused(Mixing(), images(6)(4), "gradient depends on the other samples")


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_layer_that_puts_the_batch_second_is_exact(tokens: int) -> None:
    assert pmlf.check(BatchSecond(), classify, images(tokens, 6)(4)).disagreement < 1e-4


def test_a_penalty_on_weights_inside_the_loss_is_exact() -> None:
    """It is a part of every sample's loss."""

    def loss(m: Any, b: Any) -> Tensor:
        return classify(m, b) + 0.1 * m.weight.square().sum()

    assert pmlf.check(nn.Linear(6, 4), loss, images(6)(4)).disagreement < 1e-4


def test_a_weight_used_outside_its_layer_is_exact() -> None:
    assert pmlf.check(Borrowing(), classify, images(6)(4)).disagreement < 1e-4


@pytest.mark.parametrize("assign", [False, True])
def test_a_buffer_rewritten_from_the_data_is_refused_and_left_as_it_was(assign: bool) -> None:
    model = Counting(assign=assign)
    refused(model, images(6)(4), "'mean' was written by the forward pass")
    assert not model.mean.any()


def test_an_input_changed_in_place_after_use_is_refused() -> None:
    refused(InputChanged(), images(6)(4), "the input of .*layer.*changed in place")


def test_the_error_does_not_tell_numbers_of_the_data() -> None:
    with pytest.raises(ValueError) as error:
        pmlf.check(Mixing(), classify, images(6)(4))
    said, _, rest = str(error.value).partition("(test_validation.py, line ")
    place, _, also = rest.partition("; ")
    assert "return self.layer(x - x.mean(0))" in place  # the user's own code
    assert not any(character.isdigit() for character in said + also)


class RootScale(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(*shape))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.gamma)


class RandomScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.gamma, 0.5, training=self.training)


class PairScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        return x * self.gamma, x


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return self.head(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize(
    "model", [RootScale((6,)), RootScale((1,)), RootScale((1, 6)), First(PairScale()), First(RandomScale())]
)
def test_bare_parameters_are_exact_wherever_they_are_kept(model: nn.Module) -> None:
    assert pmlf.check(model, classify, images(6)(3)).disagreement < 1e-4


@pytest.mark.parametrize("layer", [nn.LSTM(6, 4, batch_first=True), nn.EmbeddingBag(9, 4), nn.Bilinear(3, 3, 4)])
def test_a_layer_without_a_rule_is_named_or_exact(layer: nn.Module) -> None:
    """Never silently frozen, never silently wrong."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:  # (n, 2, 6)
            if isinstance(self.inner, nn.LSTM):
                return self.head(self.inner(x)[0][:, -1])
            if isinstance(self.inner, nn.EmbeddingBag):
                return self.head(self.inner((x[:, 0].abs() * 3).long().clamp(max=8)))
            return self.head(self.inner(x[:, 0, :3], x[:, 1, 3:]))

    model = Around()
    try:
        checked = pmlf.check(model, classify, images(2, 6)(3))
    except ValueError as error:
        assert "'inner'" in str(error)
    else:
        assert checked.parameters == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["dpsgd", "dp-pmlf", "disk", "inner-outer"])
def test_check_passes_and_changes_nothing(name: str, method: str) -> None:
    model = make(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    report = pmlf.check(model, CASES[name].loss, CASES[name].batch(3), method=method)
    assert report.samples == 3 and report.parameters == len(list(model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_does_not_disturb_the_check() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    pmlf.check(model, classify, images(6)(4))
    assert model.training


def test_randomness_in_eval_mode_is_found() -> None:
    class AlwaysRandom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.dropout(x, 0.5, training=True))

    refused(AlwaysRandom(), images(6)(4), "random in eval mode")


def test_draws_by_another_library_are_refused_by_its_name() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (float(np.random.rand()) if self.training else 1.0)

    refused(Noisy(6, 4), images(6)(4), 'from NumPy\'s generator in training mode.*gradients="one-by-one"')


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no loss depends on")
def test_a_wav2vec_with_spec_augment_is_refused_with_what_to_type_and_runs_after_it() -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = sound("Wav2Vec2", mask_time_prob=0.3, mask_time_length=2)()
    with pytest.raises(ValueError, match=r"set model\.config\.apply_spec_augment = False"):
        pmlf.check(model.train(), loss_fn, batch)
    model.config.apply_spec_augment = False  # type: ignore[union-attr]
    pmlf.check(model, loss_fn, batch)


def test_activations_at_a_kink_are_not_taken_for_a_fault() -> None:
    """A ReLU unit within rounding of zero flips between a batch of one and of two; in float64 it does not."""

    class Kinked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            rounding = 1e-8 if x.dtype == torch.float32 else 0.0
            side = 1.0 if len(x) > 1 else -1.0  # what another kernel for another batch size may do
            return self.layer(x) * (x[:, :1] * 0.0 + rounding * side >= 0)

    pmlf.check(Kinked(), classify, images(6)(2))


def test_every_frozen_parameter_and_no_module_are_refused() -> None:
    model = nn.Linear(6, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of the model is frozen"):
        PrivateStep(model, classify, noise_multiplier=1.0, expected_batch_size=1)
    with pytest.raises(ValueError, match="model is a function"):
        PrivateStep(classify, classify, noise_multiplier=1.0, expected_batch_size=1)  # type: ignore[arg-type]


def trained_once(model: nn.Module, batch: Any, loss: Any = classify) -> None:
    """One step; its sum without noise is the reference's, one sample at a time."""
    step = pmlf.PrivateStep(
        model, loss, method="dpsgd", clip_norm=1.0, noise_multiplier=0.0, expected_batch_size=1.0, generator=None
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = [torch.zeros_like(p) for p in parameters]
    for single in zip(*(part.split(1) for part in batch), strict=True):
        grads = torch.autograd.grad(loss(model, single).sum(), parameters)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for total, grad in zip(expected, grads, strict=True):
            total += grad / norm.clamp(min=1.0)
    step.accumulate(batch)
    step.release()
    for total, parameter in zip(expected, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-3, atol=1e-5)


class TwoInputs(nn.Module):
    """Two arguments, no rule, and an output that is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.film, self.head = nn.Bilinear(6, 6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.film(x, x + 1.0).relu_())


class Standardised(nn.Module):
    """A parameter with four axes that is no convolution's, seen through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.view(4, -1) - self.weight.view(4, -1).mean(1, keepdim=True)).view_as(self.weight)
        return F.conv2d(x, weight)


class ByMode(nn.Module):
    """A model whose output has another form in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.head(x)} if self.training else self.head(x)


def frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.Flatten(), nn.Linear(144, 4))


class Deviation(nn.Module):
    """A parameter that must stay positive."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 4), nn.Parameter(torch.full((1, 4), 0.001))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.distributions.Normal(0.0, self.spread.expand(len(x), 4)).log_prob(self.mean(x).detach() * 1e-3)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize(
    ("model", "shape", "loss"),
    [
        (TwoInputs(), (6,), classify),
        (nn.Sequential(Standardised(), nn.Flatten(), nn.Linear(196, 4)), (3, 8, 8), classify),
        (ByMode(), (6,), lambda m, b: F.cross_entropy(m(b[0])["logits"], b[1], reduction="none")),
        (frozen_backbone(), (3, 8, 8), classify),
        (Deviation(), (6,), lambda m, b: m(b[0]).sum(1) + classify(m.mean, b)),
    ],
    ids=["two arguments", "four axes", "by mode", "frozen batch norm", "positive parameter"],
)
def test_ordinary_models_are_not_refused(model: nn.Module, shape: tuple[int, ...], loss: Any) -> None:
    torch.manual_seed(0)
    trained_once(model, images(*shape)(4), loss)


def test_a_frozen_batch_norm_that_is_put_in_training_mode_is_refused_then() -> None:
    model = frozen_backbone()
    step = pmlf.PrivateStep(model, classify, noise_multiplier=1.0, expected_batch_size=4)
    step.accumulate(images(3, 8, 8)(4))
    step.release()
    model.train()
    with pytest.raises(ValueError, match="mixes the samples of a batch"):
        step.accumulate(images(3, 8, 8)(4))


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.ones(1, 6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.token.repeat(len(x), 1))


def test_a_parameter_that_is_repeated_by_hand_is_exact() -> None:
    assert pmlf.check(Repeated(), classify, images(6)(3)).disagreement < 1e-4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"compiled by torch\.jit"):
        pmlf.PrivateStep(
            torch.jit.script(nn.Sequential(nn.Linear(6, 4))), classify, noise_multiplier=1.0, expected_batch_size=4
        )


def test_a_correct_model_whose_loss_knows_no_float64_is_not_refused_for_a_kink() -> None:
    """Its activations lie at the kink, where rounding decides: only other parameters can tell."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    weights = torch.ones(4)

    def loss(m: Any, batch: Any) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1], weight=weights, reduction="none")

    pmlf.check(model, loss, images(6)(4))
    mixing = nn.Sequential(Mixing())
    refused(mixing, images(6)(4), "depends on the other samples", loss)
