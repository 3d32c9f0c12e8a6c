"""fix_model: what it replaces, that it computes the same, that the result can be trained privately."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pmlf
from pmlf.checks.fixes import Attention
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
