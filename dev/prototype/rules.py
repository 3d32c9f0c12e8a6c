from __future__ import annotations
import torch, torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

# every rule: (use, grad, layout) -> list of (weight, per-sample gradient (n, *w.shape)); formed here, factors later

def rows_first(t, layout):
    """(…, axis of n*m, …) -> (n, …, m, …)"""
    axis, n = layout
    return t.unflatten(axis, (n, -1)).movedim(axis, 0)

def reduce_to(g, w, out_ndim, layout):
    """g (n, *out dims with m in place of axis) summed to (n, *w.shape), broadcasting as the operation did."""
    axis, n = layout
    lead = g.ndim - 1 - w.ndim
    if lead > 0: g = g.sum(tuple(range(1, 1 + lead)))
    for d in range(w.ndim):
        if w.shape[d] == 1 and g.shape[1 + d] != 1: g = g.sum(1 + d, keepdim=True)
    return g

def rule_elementwise(use, grad, layout):
    found = []
    for i, w in enumerate(use.weights):
        we = w.detach().expand(use.shape).clone().requires_grad_()
        sw = lambda t, w=w, we=we: we if t is w else (t.detach() if isinstance(t, Tensor) else t)
        a, k = tree_map(sw, (use.args, use.kwargs))
        with torch.enable_grad(): y = use.func(*a, **k)
        gw, = torch.autograd.grad(y, we, grad)
        found.append((w, reduce_to(rows_first(gw, layout), w, len(use.shape), layout)))
    return found

def rule_rows(use, grad, layout):
    (w,) = use.weights
    # gradient of the core: rows of a sample summed over every expanded axis
    g = rows_first(grad, layout)  # (n, m?, ...)
    core = w
    for d in range(w.ndim):
        if w.stride(d) == 0 and w.shape[d] > 1: core = core.narrow(d, 0, 1)
    return [(core, reduce_to(g, core, grad.ndim, layout))]

def rule_linear(use, grad, layout):
    x = use.args[0]; W = use.args[1] if len(use.args) > 1 else use.kwargs["weight"]
    b = use.args[2] if len(use.args) > 2 else use.kwargs.get("bias")
    n = layout[1]
    g = rows_first(grad, layout).reshape(n, -1, grad.shape[-1])
    found = []
    ids = [id(w) for w in use.weights]
    if id(W) in ids and id(x) not in ids:
        xx = rows_first(x, layout).reshape(n, -1, x.shape[-1])
        found.append((W, torch.einsum("nto,nti->noi", g, xx)))
    elif id(x) in ids:
        raise RuntimeError("linear of a weight by sample values")
    if b is not None and id(b) in ids: found.append((b, g.sum(1)))
    return found

def rule_matmul(use, grad, layout):
    x, y = use.args[:2]
    n = layout[1]
    w = use.weights[0]
    if y is w and w.ndim == 2:
        g = rows_first(grad, layout).reshape(n, -1, grad.shape[-1]); xx = rows_first(x, layout).reshape(n, -1, x.shape[-1])
        return [(w, torch.einsum("nti,nto->nio", xx, g))]
    if w.ndim == 1:
        return by_vmap(use, grad, layout)
    return by_vmap(use, grad, layout)

def by_vmap(use, grad, layout):
    axis, n = layout
    raise RuntimeError(f"vmap not in the prototype: {use.key}")

def rule_addmm(use, grad, layout):
    b, x, W = use.args[:3]; n = layout[1]; found = []
    g = rows_first(grad, layout).reshape(n, -1, grad.shape[-1])
    for w in use.weights:
        if w is W: found.append((w, torch.einsum("nti,nto->nio", rows_first(x, layout).reshape(n, -1, x.shape[-1]), g)))
        elif w is b: found.append((w, reduce_to(rows_first(grad, layout), w, grad.ndim, layout)))
        else: raise RuntimeError("addmm")
    return found

def rule_embedding(use, grad, layout):
    first, second = use.args[0], use.args[1] if len(use.args) > 1 else use.kwargs["weight"]
    W, idx = (first, second) if first is use.weights[0] else (second, first)
    pad = use.kwargs.get("padding_idx", use.args[2] if len(use.args) > 2 else None)
    n = layout[1]
    g = rows_first(grad, layout).reshape(n, -1, grad.shape[-1]); ix = rows_first(idx, layout).reshape(n, -1)
    if pad is not None and pad >= 0: g = g * (ix != pad).unsqueeze(-1)
    out = g.new_zeros(n, *W.shape)
    out.scatter_add_(1, ix.unsqueeze(-1).expand(-1, -1, g.shape[-1]), g)
    return [(W, out)]

def rule_conv(use, grad, layout):
    names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    given = dict(zip(names, use.args)) | use.kwargs
    x, W, b = given["input"], given["weight"], given.get("bias")
    n = layout[1]; found = []
    opts = {k: v for k, v in given.items() if k not in ("input", "weight", "bias")}
    for w in use.weights:
        if w is W:
            rows = []
            for gi, xi in zip(rows_first(grad, layout), rows_first(x, layout)):
                leaf = W.detach().clone().requires_grad_()
                with torch.enable_grad(): y = use.func(xi, leaf, None, **opts)
                rows.append(torch.autograd.grad(y, leaf, gi)[0])
            found.append((W, torch.stack(rows)))
        else:
            g = rows_first(grad, layout)
            found.append((w, g.sum([d for d in range(1, g.ndim) if d != 2])))
    return found

def rule_norm(use, grad, layout):
    """layer, group, rms and instance norms: normalise without weights, then an affine map"""
    names = {"layer_norm": ["input", "normalized_shape", "weight", "bias", "eps"], "rms_norm": ["input", "normalized_shape", "weight", "eps"],
             "group_norm": ["input", "num_groups", "weight", "bias", "eps"], "instance_norm": ["input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"],
             "batch_norm": ["input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"]}[use.func.__name__]
    given = dict(zip(names, use.args)) | use.kwargs
    plain = {k: v for k, v in given.items() if k not in ("weight", "bias")}
    x = plain.pop("input")
    normal = use.func(x, **plain)
    found = []
    channels = use.func.__name__ in ("group_norm", "instance_norm", "batch_norm")
    for w in use.weights:
        g = grad * normal if w is given.get("weight") else grad
        g = rows_first(g, layout)
        found.append((w, g.sum([d for d in range(1, g.ndim) if d != 2]) if channels else reduce_to(g, w, grad.ndim, layout)))
    return found

def rule_cat(use, grad, layout):
    parts = use.args[0]; dim = use.kwargs.get("dim", use.args[1] if len(use.args) > 1 else 0)
    found, start = [], 0
    for p in parts:
        size = p.shape[dim]
        if any(p is w for w in use.weights):
            found.append((p, rows_first(grad.narrow(dim, start, size), layout)))
        start += size
    return found

def linear_of_weight(x, W, b=None):
    return torch.nn.functional.linear(x, W, b)

RULES = {
    F.linear: rule_linear, torch._C._nn.linear: rule_linear,
    torch.matmul: rule_matmul, Tensor.matmul: rule_matmul, Tensor.__matmul__: rule_matmul, torch.mm: rule_matmul, torch.addmm: rule_addmm,
    F.embedding: rule_embedding, torch.embedding: rule_embedding,
    F.conv1d: rule_conv, F.conv2d: rule_conv, F.conv3d: rule_conv, torch.conv1d: rule_conv, torch.conv2d: rule_conv, torch.conv3d: rule_conv,
    torch.conv_transpose2d: rule_conv, F.conv_transpose2d: rule_conv,
    F.layer_norm: rule_norm, F.group_norm: rule_norm, F.rms_norm: rule_norm, F.instance_norm: rule_norm, F.batch_norm: rule_norm,
}
for f in ("add", "sub", "mul", "div", "where", "true_divide", "pow", "maximum", "minimum", "lerp", "rsub"):
    if hasattr(torch, f): RULES[getattr(torch, f)] = rule_elementwise
    if hasattr(Tensor, f): RULES[getattr(Tensor, f)] = rule_elementwise
for f in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__"):
    RULES[getattr(Tensor, f)] = rule_elementwise
ENTERED = {}
