"""The graph that autograd has built for a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node


def nodes_of(tensor: Tensor) -> Iterator[Node]:
    """Every node that a tensor's graph leads to, once; none where the tensor has no graph.

    >>> import torch
    >>> leaf = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in nodes_of(leaf.exp() * leaf)]
    ['MulBackward0', 'torch::autograd::AccumulateGrad', 'ExpBackward0']
    >>> list(nodes_of(torch.ones(2)))
    []
    """
    waiting, seen = [tensor.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
