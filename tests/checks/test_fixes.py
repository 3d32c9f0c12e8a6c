"""fix_model: what it replaces, that it computes the same, that the result can be trained privately."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import pmlf
from pmlf.checks.fixes import Attention
from reference import single_gradient
from zoo import classify, images


class Classifier(nn.Module):
    """Convolution with BatchNorm, a transformer layer, InstanceNorm with statistics: all that needs fixing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.norm(x)).flatten(2).mT
        return self.head(self.encoder(x).mean(1))


@pytest.mark.slow
def test_a_fixed_model_trains_privately_and_the_original_is_untouched() -> None:
    model = Classifier()
    keys = list(model.state_dict())
    batch = images(3, 6, 6)(4)
    with pytest.raises(ValueError, match="fix_model"):
        pmlf.check(model, classify, batch)
    fixed = pmlf.fix_model(model)
    assert pmlf.check(fixed, classify, batch).parameters == len(list(fixed.parameters()))
    assert list(model.state_dict()) == keys
    kinds = {type(module) for module in fixed.modules()}
    assert not kinds & {nn.BatchNorm2d, nn.MultiheadAttention} and {nn.GroupNorm, Attention} <= kinds
    assert all(not module.track_running_stats for module in fixed.modules() if isinstance(module, nn.InstanceNorm2d))
    step = pmlf.PrivateStep(fixed, classify, noise_multiplier=1.0, expected_batch_size=4)
    step.accumulate(batch)
    step.release()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("key_dim", "bias"), [(None, True), (6, True), (None, False)])
def test_replaced_attention_computes_the_same(batch_first: bool, key_dim: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(8, 2, bias=bias, kdim=key_dim, vdim=key_dim, batch_first=batch_first)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(torch.randn_like(parameter))
    fixed = pmlf.fix_model(original)
    query, keys = torch.randn(3, 5, 8), torch.randn(3, 7, key_dim or 8)
    if not batch_first:
        query, keys = query.transpose(0, 1), keys.transpose(0, 1)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    mask = torch.randn(5, 7)
    per_head = torch.randn(6, 5, 7)
    for named in ({}, {"key_padding_mask": padding}, {"attn_mask": mask}, {"attn_mask": per_head}):
        for average in (True, False):
            expected = original(query, keys, keys, average_attn_weights=average, **named)
            found = fixed(query, keys, keys, average_attn_weights=average, **named)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert fixed(query, keys, keys, need_weights=False)[1] is None


def test_a_transformer_layer_gives_the_same_after_fixing_in_both_modes() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    fixed = pmlf.fix_model(layer)
    x = torch.randn(3, 5, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for mode in (True, False):
        layer.train(mode), fixed.train(mode)
        torch.testing.assert_close(fixed(x), layer(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            fixed(x, src_mask=causal, is_causal=True), layer(x, src_mask=causal, is_causal=True), rtol=1e-4, atol=1e-5
        )
        with torch.inference_mode():
            torch.testing.assert_close(fixed(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("channels", "groups"), [(8, 2), (64, 16), (256, 32), (3, 1), (1, 1), (12, 3)])
def test_group_norm_keeps_weights_and_at_least_four_channels_a_group(channels: int, groups: int) -> None:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight)
    fixed = pmlf.fix_model(norm)
    assert isinstance(fixed, nn.GroupNorm) and fixed.num_groups == groups
    assert torch.equal(fixed.weight, norm.weight) and fixed.weight is not norm.weight
    vectors = pmlf.fix_model(nn.BatchNorm1d(8, affine=False))(torch.randn(4, 8))
    assert float(vectors.abs().max()) > 0.1  # a group of one value would be all zero


def test_what_attention_cannot_be_replaced_says_so() -> None:
    with pytest.raises(ValueError, match="add_bias_kv"):
        pmlf.fix_model(nn.MultiheadAttention(8, 2, add_bias_kv=True))


def test_a_layer_shared_by_two_parents_stays_shared() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"first": nn.ModuleList([attention]), "second": nn.ModuleList([attention])})
    fixed = pmlf.fix_model(model)
    assert fixed["first"][0] is fixed["second"][0]
    assert sum(p.numel() for p in fixed.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_an_encoder_with_a_padding_mask_gives_the_same_after_fixing_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[3], [5], [4]])
    expected, found = (m(x, src_key_padding_mask=padding) for m in (model, pmlf.fix_model(model)))
    assert torch.allclose(expected[~padding], found[~padding], atol=1e-5)


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the activation is inside."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_a_batch_norm_that_does_more_is_refused_and_not_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NormAct(8))
    with pytest.raises(ValueError, match=r"layer '1' \(NormAct\) is a BatchNorm of its own kind"):
        pmlf.fix_model(model)
    with pytest.raises(ValueError, match="or build the model with GroupNorm"):
        pmlf.check(model, classify, images(3, 6, 6)(2))


def test_an_attention_that_does_more_is_refused_and_not_replaced() -> None:
    class Scaled(nn.MultiheadAttention):
        def forward(self, *args: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            out, weights = super().forward(*args, **named)  # type: ignore[arg-type]
            return 2 * out, weights

    with pytest.raises(ValueError, match="MultiheadAttention of its own kind"):
        pmlf.fix_model(nn.Sequential(Scaled(8, 2)))


def test_with_neutral_statistics_a_fixed_model_computes_what_the_original_does_in_eval_mode() -> None:
    """Norms are made neutral in both, so that all else must be the same: weights, hooks, activations, their places."""

    def neutral(norm: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        return given[0] * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)

    def block(inside: int) -> nn.Sequential:
        norm = nn.BatchNorm2d(8)
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        norm.register_forward_hook(lambda norm, given, out: out.clamp(min=-0.5))
        return nn.Sequential(nn.Conv2d(inside, 8, 3, padding=1), norm, nn.ReLU(inplace=True))

    model = nn.Sequential(block(3), block(8), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    fixed = pmlf.fix_model(model)
    for each in fixed.modules():
        if isinstance(each, nn.GroupNorm):
            each.register_forward_hook(neutral, prepend=True)
    x = torch.randn(3, 3, 6, 6)
    assert sum(isinstance(each, nn.GroupNorm) for each in fixed.modules()) == 2
    torch.testing.assert_close(fixed(x), model(x), rtol=1e-4, atol=1e-4)  # running mean 0, variance 1


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(6, 5), lambda: nn.Conv2d(3, 4, 3), lambda: nn.ConvTranspose2d(3, 4, 3)]
)
def test_spectral_norm_is_replaced_by_one_that_writes_nothing_and_follows_the_weight(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    layer = build()
    parametrized = nn.utils.parametrizations.spectral_norm(layer)
    with pytest.raises(ValueError, match="power iteration"):
        pmlf.PrivateStep(nn.Sequential(parametrized), classify, noise_multiplier=1.0, expected_batch_size=2)
    fixed = pmlf.fix_model(nn.Sequential(parametrized))[0]
    before = {name: buffer.clone() for name, buffer in fixed.named_buffers()}

    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0

    def largest() -> float:
        return float(torch.linalg.matrix_norm(fixed.weight.detach().movedim(axis, 0).flatten(1), 2))

    assert abs(largest() - 1.0) < 0.01
    original = fixed.parametrizations.weight.original
    longest = torch.linalg.matrix_norm(original.detach().movedim(axis, 0).flatten(1), 2)
    torch.testing.assert_close(fixed.weight, original / longest, rtol=0.02, atol=0.0)
    with torch.no_grad():
        original += 0.3 * original.std() * torch.randn_like(original)
    assert abs(largest() - 1.0) < 0.05
    assert all(torch.equal(before[name], buffer) for name, buffer in fixed.named_buffers())


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("frozen", [True, False])
def test_spectral_norm_in_eval_mode_or_fixed_has_the_gradients_of_autograd(frozen: bool) -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4))
    model = nn.Sequential(nn.Flatten(), layer)
    model = model.eval() if frozen else pmlf.fix_model(model)
    step = pmlf.PrivateStep(model, classify, method="dpsgd", noise_multiplier=0.0, expected_batch_size=1, clip_norm=0.5)
    x, labels = images(3, 2, 2)(3)
    wanted = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        v = torch.cat([part.flatten() for part in single_gradient(model, classify, (x[i : i + 1], labels[i : i + 1]))])
        wanted = wanted + v.double() * min(1.0, 0.5 / float(v.norm()))
    step.accumulate((x, labels))
    step.release()
    found = torch.cat([p.grad.flatten().double() for p in step.trained if p.grad is not None])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_spectral_norm_of_hooks_is_refused_with_the_other_to_use() -> None:
    with pytest.raises(ValueError, match=r"torch\.nn\.utils\.parametrizations\.spectral_norm"):
        pmlf.fix_model(nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3))))


class DrawingVAE(nn.Module):
    """Draws the noise of its reparametrisation itself: always, or in training mode only."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always, self.encode, self.decode = always, nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_scale = self.encode(x).chunk(2, 1)
        noise = torch.randn_like(mean) if self.always or self.training else torch.zeros_like(mean)
        return self.decode(mean + noise * log_scale.exp())


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[0]).square().sum(1)


def test_a_vae_that_draws_in_training_mode_trains_and_one_that_always_draws_is_told_why_not() -> None:
    for always in (False, True):
        step = pmlf.PrivateStep(DrawingVAE(always=always), squared_error, noise_multiplier=1.0, expected_batch_size=3)
        if always:
            with pytest.raises(ValueError, match=r"random in eval mode.*only if model\.training is set"):
                step.accumulate(images(6)(3))
        else:
            step.accumulate(images(6)(3))
            step.release()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_an_rwkv_that_rescales_its_weights_releases_nothing_and_one_that_does_not_trains(training: bool) -> None:
    config = {"vocab_size": 20, "hidden_size": 8, "attention_hidden_size": 8, "num_hidden_layers": 2}
    ids = torch.randint(20, (2, 5))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch, use_cache=False).logits.square().mean((1, 2))

    def released(rescale_every: int) -> None:
        model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**config, rescale_every=rescale_every))
        step = pmlf.PrivateStep(
            model.train(training), loss, noise_multiplier=1.0, expected_batch_size=2, gradients="one-by-one"
        )
        step.accumulate(ids)
        step.accumulate(ids)
        step.release()

    released(0)
    for rescale_every in (1, 6):
        with pytest.raises((ValueError, RuntimeError), match=r"written by the forward pass|parameters changed"):
            released(rescale_every)
