"""`fix_model`: replace layers that cannot be private by equivalents that can."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

REPLACED_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # these types, no subclass
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_POWER_ITERATIONS = 8  # from a start that is never moved: a weight that has changed a lot is still followed


def fix_model(model: nn.Module) -> nn.Module:
    """A copy of the model that can be trained privately; build the optimizer on the copy's parameters.

    BatchNorm becomes GroupNorm (weights taken over; its running statistics have no place there), InstanceNorm stops
    tracking statistics, MultiheadAttention becomes Linear layers with scaled dot-product attention, computing the same.
    Spectral normalisation keeps its start vectors and iterates from them in every pass, writing nothing.
    Only layers of exactly these types are replaced, with their hooks: what a subclass adds cannot be carried over.

    Args:
        model: The model. It stays as it is.

    Returns:
        The copy.

    Raises:
        ValueError: If a layer is a BatchNorm or MultiheadAttention of a subclass, or cannot be replaced otherwise.

    >>> fix_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups
    2
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: a torch.nn.Module is needed")
    for name, module in model.named_modules():
        reason = _irreplaceable(module)
        if reason is not None:
            raise ValueError(f"{f'layer {name!r}' if name else 'the model'} ({type(module).__name__}) {reason}")
    fixed = copy.deepcopy(model)
    replacement = _replacement(fixed)
    if replacement is not None:
        return replacement
    replaced = {child: _replacement(child) for module in list(fixed.modules()) for child in module.children()}
    for module in list(fixed.modules()):
        for name, child in module._modules.items():  # a child by every name it has: shared, it stays shared
            replacement = None if child is None else replaced[child]
            if child is not None and replacement is not None:
                module._modules[name] = replacement
    for module in fixed.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in eval mode that path reads the attention's own weights
    return fixed


def _irreplaceable(module: nn.Module) -> str | None:
    """Why a layer that needs replacing has no replacement; None for all others."""
    if isinstance(module, _BatchNorm) and type(module) not in REPLACED_BATCH_NORMS:
        return (
            "is a BatchNorm of its own kind, and GroupNorm would drop what it does besides: build the model with "
            "GroupNorm in its place (timm: norm_layer='groupnorm' where the model takes it), or put it in eval mode "
            "and leave the model as it is"
        )
    if isinstance(module, nn.MultiheadAttention) and type(module) is not nn.MultiheadAttention:
        return (
            "is a MultiheadAttention of its own kind, whose forward pass cannot be carried over: build it from Linear "
            "layers and torch.nn.functional.scaled_dot_product_attention"
        )
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return (
            "has the spectral norm of torch.nn.utils, a hook that writes its weight in every pass: use "
            "torch.nn.utils.parametrizations.spectral_norm, which fix_model replaces by one that writes nothing"
        )
    return None


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _BatchNorm):
        return _in_place_of(module, _group_norm(module))
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    if isinstance(module, nn.MultiheadAttention):
        return _in_place_of(module, Attention.of(module))
    if type(module) is _SpectralNorm and "_u" in module._buffers:
        return _in_place_of(module, SpectralScale.of(module))
    return None


def _in_place_of(module: nn.Module, replacement: nn.Module) -> nn.Module:
    """The replacement, in the same mode and with the same hooks."""
    for name in _HOOKS:
        setattr(replacement, name, getattr(module, name))
    return replacement.train(module.training)


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    # At least four channels a group: a group of one value (BatchNorm1d on vectors) would always normalise to zero.
    groups = max(g for g in range(1, max(1, min(32, channels // 4)) + 1) if channels % g == 0)
    fixed = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        fixed.weight, fixed.bias = norm.weight, norm.bias
    return fixed


class SpectralScale(nn.Module):
    """weight / sigma, its largest singular value, by power iterations from a fixed start; no pass writes anything.

    torch's own parametrization goes on from where the last pass left its vectors, which is state that passes write.
    """

    def __init__(self, start: Tensor, *, axis: int, eps: float, iterations: int) -> None:
        super().__init__()
        self.axis, self.eps, self.iterations = axis, eps, iterations
        self.register_buffer("start", start)

    @classmethod
    def of(cls, norm: _SpectralNorm) -> SpectralScale:
        """The same norm, at the same precision or better."""
        iterations = max(norm.n_power_iterations, _POWER_ITERATIONS)
        return cls(norm._v.detach().clone(), axis=norm.dim, eps=norm.eps, iterations=iterations)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, scaled; the gradient takes the singular vectors as constants, as torch's does."""
        matrix = weight.movedim(self.axis, 0).flatten(1)
        right: Tensor = self.get_buffer("start")
        with torch.no_grad():
            for _ in range(self.iterations):
                left = F.normalize(matrix.mv(right), dim=0, eps=self.eps)
                right = F.normalize(matrix.mT.mv(left), dim=0, eps=self.eps)
        return weight / torch.dot(left, matrix.mv(right))


class Attention(nn.Module):
    """`nn.MultiheadAttention` built from Linear layers and `scaled_dot_product_attention`; same call, same result."""

    # nn.TransformerEncoderLayer looks at these to decide on its fused path, which would go around the Linear layers.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self, embed_dim: int, heads: int, *, key_dim: int, value_dim: int, dropout: float, bias: bool, batch_first: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.batch_first = heads, dropout, batch_first
        self.query = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key = nn.Linear(key_dim, embed_dim, bias=bias)
        self.value = nn.Linear(value_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    @classmethod
    def of(cls, attention: nn.MultiheadAttention) -> Attention:
        """The same attention with the same weights."""
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError(
                "MultiheadAttention with add_bias_kv or add_zero_attn has no replacement: build it without"
            )
        first = next(attention.parameters())
        made = cls(
            attention.embed_dim,
            attention.num_heads,
            key_dim=attention.kdim,
            value_dim=attention.vdim,
            dropout=attention.dropout,
            bias=attention.in_proj_bias is not None,
            batch_first=attention.batch_first,
        ).to(first)
        separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        weights = attention.in_proj_weight.chunk(3) if attention._qkv_same_embed_dim else separate
        with torch.no_grad():
            for index, layer in enumerate((made.query, made.key, made.value)):
                layer.weight.copy_(weights[index])
                if attention.in_proj_bias is not None:
                    layer.bias.copy_(attention.in_proj_bias.chunk(3)[index])
            made.out_proj.load_state_dict(attention.out_proj.state_dict())
        return made.requires_grad_(first.requires_grad)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights); weights are None unless asked for, as they cost a second pass."""
        if query.ndim != 3:
            raise ValueError(f"attention got a query of shape {tuple(query.shape)}: give batched sequences (3 axes)")
        if not self.batch_first:  # Linear layers see the batch first, whatever the caller's layout
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._heads(self.query(query)), self._heads(self.key(key)), self._heads(self.value(value))
        bias = self._bias(attn_mask, key_padding_mask, q)
        mixed = F.scaled_dot_product_attention(q, k, v, bias, self.dropout if self.training else 0.0)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        weights = self._weights(q, k, bias, average_attn_weights) if need_weights else None
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (n, heads, tokens, width)

    def _bias(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one additive bias that broadcasts to (n, heads, tokens, keys)."""
        total: Tensor | None = None
        if mask is not None:
            total = _additive(mask, q.dtype)
            if mask.ndim == 3:  # (n * heads, tokens, keys)
                total = total.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            padded = _additive(padding, q.dtype)[:, None, None, :].expand(-1, 1, q.shape[2], -1)
            total = padded if total is None else total + padded
        return total

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, average: bool) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return weights.mean(1) if average else weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask
