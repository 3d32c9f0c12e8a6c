"""What two processes with a model that `fully_shard` has cut do. Each writes what it found to a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import pmlf
from parallel.ranks import refused
from pmlf import PrivateRun, PrivateStep

WORLD = 2
Found = dict[str, Any]


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.inner(x) + self.up(self.down(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention: nn.Module = nn.Linear(width, 3 * width)
        self.hidden: nn.Module = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + torch.as_tensor(self.out(F.gelu(self.hidden(self.norm_after(x)))))


class Transformer(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, words: int = 23, width: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width))
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.words(tokens) + self.positions[: tokens.shape[1]])
        return F.linear(x, self.words.weight)


def transformer(*, lora: bool = False) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    if lora:
        model.requires_grad_(False)
        for block in model.blocks:
            block.attention, block.hidden = LowRank(block.attention), LowRank(block.hidden)
    return model.train()


def cut(model: Transformer) -> Transformer:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def sentences(count: int = 60) -> TensorDataset:
    return TensorDataset(torch.randint(0, 23, (count, 6), generator=torch.Generator().manual_seed(1)))


def losses(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])[:, :-1]
    return F.cross_entropy(logits.mT, batch[0][:, 1:], reduction="none").mean(1)


def private(model: nn.Module, **options: Any) -> PrivateRun:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {
        "optimizer": torch.optim.Adam(trained, lr=0.01, betas=(0.0, 0.999)),
        "dataset": sentences(),
        "loss_fn": losses,
        "noise_multiplier": 0.5,
        "target_delta": 1e-3,
        "batch_size": 20,
        "steps": 3,
        "max_physical_batch_size": 5,  # an odd number of micro-batches in some steps
        "seed": 3,
        "assume_independent_samples": True,  # the proof takes seconds: one run has it
        **options,
    }
    return pmlf.make_private(model=model, **options)


RUNS: dict[str, dict[str, Any]] = {
    "DP-SGD, all weights": {"method": "dpsgd"},
    "DP-PMLF, all weights, hardened noise": {"method": "dp-pmlf", "secure_noise": True},
    "DP-SGD, LoRA": {"method": "dpsgd", "lora": True, "steps": 2},
    "DP-PMLF, LoRA": {"method": "dp-pmlf", "lora": True, "assume_independent_samples": False},
    "mostly empty batches": {"method": "dp-pmlf", "batch_size": 0.7, "max_physical_batch_size": 1, "steps": 4},
    "per-layer clipping": {"method": "dpsgd", "clipping": "per-layer", "steps": 2},
}


def whole(model: nn.Module) -> Tensor:
    found = [p.full_tensor() if type(p).__name__ == "DTensor" else p for p in model.parameters() if p.requires_grad]
    return torch.cat([each.detach().flatten() for each in found])


def trained(name: str, *, sharded: bool) -> Found:
    """Take the steps of a run; its parameters afterwards, and what this rank holds."""
    options = dict(RUNS[name])
    model = transformer(lora=options.pop("lora", False))
    run = private(cut(model) if sharded else model, **options)
    for batch in run.batches():
        run.step(batch)
    state = run.private_step.state_dict()
    held = [tensor for iterate in state["history"]["iterates"] for tensor in iterate]
    return {"parameters": whole(model), "history": sum(tensor.numel() for tensor in held), "epsilon": run.epsilon()}


def continued() -> Found:
    """A run that is saved and loaded into a new one, beside one that is not."""
    straight, first = private(cut(transformer()), steps=3), private(cut(transformer()), steps=3)
    for batch in straight.batches():
        straight.step(batch)
    for batch in first.batches():
        first.step(batch)
        if first.steps_done == 2:
            break
    second = private(cut(transformer()), steps=3)
    second.load_state_dict(first.state_dict())
    for batch in second.batches():
        second.step(batch)
    return {"straight": whole(straight.model), "resumed": whole(second.model)}


def one_rank_fails(rank: int) -> Found:
    """Rank 1's loss fails in its second micro-batch; then both go on."""
    armed = {"left": 0 if rank == 0 else 1}

    def failing(model: Any, batch: Any) -> Tensor:
        if armed["left"] and run.steps_done == 1:
            armed["left"] = 0
            raise OSError("a loss of mine")
        return losses(model, batch)

    run = private(cut(transformer()), loss_fn=failing, method="dp-pmlf")
    seen = ""
    for batch in run.batches():
        try:
            run.step(batch)
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            break
    for batch in run.batches():
        run.step(batch)
    return {"seen": seen, "parameters": whole(run.model), "steps": run.steps_done}


def used_in_between() -> float:
    """The difference of a plain forward pass of the sharded model, after a step, from that of a whole one."""
    model, plain = cut(transformer()), transformer()
    run = private(model, steps=1)
    run.step(next(iter(run.batches())))
    tokens = sentences().tensors[0][:4]
    with torch.no_grad():
        logits = model.eval()(tokens)
        torch.nn.utils.vector_to_parameters(whole(model), plain.parameters())
        return float((logits - plain.eval()(tokens)).abs().max())


def unseeded_noise(rank: int) -> Tensor:
    """The noise of one release, whole."""
    model = fully_shard(nn.Linear(1001, 301, bias=False))
    step = PrivateStep(
        model, lambda model, batch: model(batch).sum(1), noise_multiplier=2.0, expected_batch_size=1, group="auto"
    )
    step.release()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    gradient: Any = parameter.grad
    return torch.as_tensor(gradient.full_tensor()).flatten()


def refusals() -> Found:
    def step(model: nn.Module, **options: Any) -> PrivateStep:
        given = {"noise_multiplier": 1.0, "expected_batch_size": 4, "group": "auto", **options}
        return PrivateStep(model, losses, **given)

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(layers[0])
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "replicas": refused(lambda: step(fully_shard(nn.Linear(4, 4), mesh=mesh))),
        "in part": refused(lambda: step(layers)),
        "mixed precision": refused(lambda: step(fully_shard(nn.Linear(4, 4), mp_policy=half))),
        "vmap": refused(lambda: step(fully_shard(nn.Linear(4, 4)), gradients="vmap")),
        "average": refused(lambda: private(cut(transformer()), ema=0.9)),
        "automatic size": refused(lambda: private(cut(transformer()), max_physical_batch_size="auto")),
        "shaped noise": refused(lambda: private(transformer(), method="dp-pmlf-shaped", batch_size=2)),
    }


def work(rank: int, folder: Path) -> None:
    found: Found = {name: trained(name, sharded=True) for name in RUNS}
    found["resumed"] = continued()
    found["one rank fails"] = one_rank_fails(rank)
    found["used in between"] = used_in_between()
    found["unseeded noise"] = unseeded_noise(rank)
    found["refusals"] = refusals()
    torch.save(found, folder / f"{rank}.pt")
