"""Where weights meet samples: every operation that combines them, seen by one torch function mode."""
from __future__ import annotations
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_leaves


class Use(NamedTuple):
    func: Any
    args: tuple
    kwargs: dict
    weights: tuple      # weight tensors (with their own graph), in order of appearance
    edge: Any
    shape: torch.Size
    key: tuple


_META = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__, Tensor.requires_grad.__get__,
         Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.layout.__get__, Tensor.is_cuda.__get__,
         Tensor.stride, Tensor.is_contiguous, Tensor.grad.__get__, Tensor._is_view if hasattr(Tensor,'_is_view') else None,
         Tensor.is_complex, Tensor.element_size, Tensor.data_ptr, Tensor.__hash__, Tensor.is_leaf.__get__, Tensor.grad_fn.__get__}

_INPLACE = {Tensor.add_: torch.add, Tensor.sub_: torch.sub, Tensor.mul_: torch.mul, Tensor.div_: torch.div,
            Tensor.__iadd__: torch.add, Tensor.__isub__: torch.sub, Tensor.__imul__: torch.mul, Tensor.__itruediv__: torch.div}


class Uses(TorchFunctionMode):
    def __init__(self, leaves: Mapping[str, Tensor], batch: Any, samples: int) -> None:
        super().__init__()
        self.names = {id(l): n for n, l in leaves.items()}
        self.weights = {id(l): l for l in leaves.values()}
        self.samples = samples
        self._refs: dict[int, Any] = {}
        for t in tree_leaves(batch):
            if isinstance(t, Tensor): self.mark(t)
        self.uses: list[Use] = []
        self.keep: list[Any] = []

    def mark(self, t: Tensor) -> None:
        self._refs[id(t)] = weakref.ref(t)

    def is_sample(self, t: Tensor) -> bool:
        if t.requires_grad: return True
        r = self._refs.get(id(t))
        if r is not None and r() is t: return True
        return t.ndim > 0 and t.shape[0] == self.samples and self.samples > 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _META: return func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        weights = [t for t in tensors if id(t) in self.weights]
        if not weights:
            out = func(*args, **kwargs)
            if any(not t.requires_grad and self.is_sample(t) for t in tensors):
                for o in tree_leaves(out):
                    if isinstance(o, Tensor) and not o.requires_grad: self.mark(o)
            return out
        rest = [t for t in tensors if id(t) not in self.weights]
        if not any(self.is_sample(t) for t in rest) and func is not Tensor.__setitem__:
            return self._weight(func, args, kwargs)
        return self._use(func, args, kwargs, weights, rest)

    def _weight(self, func, args, kwargs):
        """Weights alone (and constants): another weight."""
        if func is Tensor.repeat and args[0].ndim and len(args) > 1:
            sizes = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            w = args[0]
            if len(sizes) >= w.ndim:
                lead = len(sizes) - w.ndim
                shape = (1,) * lead + tuple(w.shape)
                if all(s == 1 or n == 1 for s, n in zip(shape, sizes)):
                    func, args = Tensor.expand, (w, *[max(s, n) for s, n in zip(shape, sizes)])
        out = func(*args, **kwargs)
        for o in tree_leaves(out):
            if isinstance(o, Tensor) and o.requires_grad:
                self.weights[id(o)] = o
                self.keep.append(o)
        return out

    def _use(self, func, args, kwargs, weights, rest):
        from rules import RULES, ENTERED, rule_elementwise
        if not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            for o in tree_leaves(out):
                if isinstance(o, Tensor): self.mark(o)
            return out
        if func in ENTERED:
            with self: return ENTERED[func](*args, **kwargs)
        if func in _INPLACE:
            with self: new = _INPLACE[func](*args, **kwargs)
            if id(args[0]) in self.weights: raise RuntimeError("samples written into a weight")
            return args[0].copy_(new)
        if func is Tensor.__setitem__:
            x, index, w = args
            if id(x) in self.weights: raise RuntimeError("samples written into a weight")
            target = x[index]
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                mask = index.reshape(*index.shape, *[1]*(x.ndim-index.ndim)).expand(x.shape)
                with self: new = torch.where(mask, w, x)
                x.copy_(new); return None
            with self: r = torch.add(torch.zeros_like(target), w)
            x[index] = r
            return None
        rule = RULES.get(func)
        # expanded weights with a batch axis of their own become sample values row by row
        mat = [w for w in weights if _expanded(w, self.samples)]
        if mat and (rule is None or rule is rule_elementwise) :
            made = {}
            for w in mat:
                made[id(w)] = self._materialised(w)
            args, kwargs = tree_map(lambda t: made.get(id(t), t) if isinstance(t, Tensor) else t, (args, kwargs))
            with self: return func(*args, **kwargs)
        if rule is None:
            raise RuntimeError(f"no rule for {func} with weights {[tuple(w.shape) for w in weights]}")
        need = not any(t.requires_grad for t in rest)
        stand = {id(w): w.detach().requires_grad_(need) for w in weights}
        swap = lambda t: (stand.get(id(t), t)) if isinstance(t, Tensor) else t
        a, k = tree_map(swap, (args, kwargs))
        out = func(*a, **k)
        self._record(func, args, kwargs, tuple(weights), out)
        return out

    def _materialised(self, w):
        r = w.detach().clone().requires_grad_()
        out = r * 1.0
        self._record("rows", (w,), {}, (w,), out)
        return out

    def _record(self, func, args, kwargs, weights, out):
        base = out._base
        whole = base if base is not None and base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous() else out
        det = lambda t: t.detach() if isinstance(t, Tensor) and id(t) not in self.weights else t
        a, k = tree_map(det, (args, kwargs))
        key = (getattr(func, "__name__", str(func)), tuple(self.names.get(id(w), tuple(w.shape)) for w in weights), out.ndim)
        self.uses.append(Use(func, a, k, weights, get_gradient_edge(whole), out.shape, key))


def _expanded(w: Tensor, samples: int) -> bool:
    return w.ndim >= 2 and w.shape[0] == samples and samples > 1 and w.stride(0) == 0
