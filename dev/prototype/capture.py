from __future__ import annotations
import torch, contextlib
from torch import Tensor
from uses import Uses
from rules import RULES, rule_rows
from torch.func import functional_call
from unittest import mock

def per_sample(model, loss_fn, batch, n):
    """name -> (n, *shape) per-sample gradients, by uses."""
    leaves = {k: p.detach().requires_grad_() for k, p in model.named_parameters() if p.requires_grad}
    full = dict(leaves)
    mode = Uses(leaves, batch, n)
    with torch.nn.utils.stateless._reparametrize_module(model, full, tie_weights=True), mode:
        loss = loss_fn(model, batch)
        assert loss.shape == (n,)
    # leak
    seen, todo = set(), [loss.grad_fn]
    ids = {id(l) for l in leaves.values()}
    while todo:
        nd = todo.pop()
        if nd is None or nd in seen: continue
        seen.add(nd)
        if getattr(nd, "variable", None) is not None and id(nd.variable) in ids: raise RuntimeError("leak: " + mode.names[id(nd.variable)])
        todo += [m for m, _ in nd.next_functions]
    edges = [u.edge for u in mode.uses]
    marks = 2.0 ** torch.arange(n).to(loss)
    g1 = torch.autograd.grad(loss, edges, torch.ones_like(loss), allow_unused=True, retain_graph=True)
    g2 = torch.autograd.grad(loss, edges, marks, allow_unused=True)
    out = {}
    at = {}   # id(weight) -> (weight, per-sample gradient)
    for u, g, m in zip(mode.uses, g1, g2):
        if g is None: continue
        g, m = g.reshape(u.shape), m.reshape(u.shape)
        layout = find_layout(g, m, n, u)
        rule = rule_rows if u.func == "rows" else RULES[u.func]
        for w, s in rule(u, g, layout):
            if id(w) not in at: at[id(w)] = (w, s)
            else: at[id(w)] = (w, at[id(w)][1] + s)
    for w, s in at.values():
        if id(w) in ids:
            name = mode.names[id(w)]
            out[name] = out.get(name, 0) + s.reshape(n, *w.shape)
            continue
        need = [l for l in leaves.values()]
        gs = torch.autograd.grad(w, need, s.reshape(n, *w.shape), is_grads_batched=True, allow_unused=True, retain_graph=True)
        for (name, l), gg in zip(leaves.items(), gs):
            if gg is not None: out[name] = out.get(name, 0) + gg
    return out, mode

def find_layout(g, m, n, u):
    ratio = m / g
    ok = g != 0
    for axis in range(g.ndim):
        if g.shape[axis] % n: continue
        want = (2.0 ** (torch.arange(g.shape[axis]) // (g.shape[axis] // n))).to(g).view(*[-1 if d == axis else 1 for d in range(g.ndim)])
        if bool(((m - want * g).abs() <= 1e-3 * (want * g).abs() + 1e-6 * float((want*g).abs().max())).all()): return axis, n
    raise RuntimeError(f"no layout for {u.key} {tuple(g.shape)}")
