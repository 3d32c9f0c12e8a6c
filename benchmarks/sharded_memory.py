"""Peak memory of a rank with `fully_shard` on two processes, over that of a single process, at RoBERTa-base size.

    python benchmarks/sharded_memory.py --out docs/results/sharded-memory.json

DP-PMLF (two points, a filter of order one) with SGD, float32, all weights trained, B = 128, micro-batches of 2 short
texts. Every process reports its own peak, by the operating system (ru_maxrss), minus what it had before the model was
built. Weights are random: memory does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pmlf

STEPS, BATCH, TOGETHER, TOKENS = 2, 128, 2, 16


def model_of(name: str) -> Any:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    small: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    base: dict[str, Any] = {"max_position_embeddings": 514, "vocab_size": 50265, "num_labels": 2}
    return RobertaForSequenceClassification(RobertaConfig(**base, **(small if name == "small" else {})))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(name: str, *, sharded: bool) -> dict[str, Any]:
    """Train a few steps and report this process's memory."""
    torch.set_num_threads(1)
    if sharded:
        dist.init_process_group("gloo")
    import transformers  # noqa: F401  # before the first measurement

    before = peak()
    torch.manual_seed(0)
    model = model_of(name).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.roberta.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    records = 4 * BATCH
    run = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=TensorDataset(torch.randint(5, 1000, (records, TOKENS)), torch.randint(2, (records,))),
        loss_fn=losses,
        noise_multiplier=1.0,
        target_delta=1e-5,
        batch_size=BATCH,
        steps=STEPS,
        max_physical_batch_size=TOGETHER,
        seed=0,
    )
    for batch in run.batches():
        run.step(batch)
    found = {"parameters": parameters, "before": before, "peak": peak(), "rank": run.processes.rank}
    return {**found, "taken": found["peak"] - before, "over parameters": (found["peak"] - before) / (4 * parameters)}


def children(name: str, *, sharded: bool) -> list[dict[str, Any]]:
    """Measure in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if sharded else []
        command = [sys.executable, *launcher, __file__, "--model", name, "--child", folder]
        subprocess.run([*command, *(["--sharded"] if sharded else [])], check=True, env={**os.environ})
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["base", "small"], default="base")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        found = measured(given.model, sharded=given.sharded)
        (given.child / f"{found['rank']}.json").write_text(json.dumps(found))
        return
    (alone,), ranks = children(given.model, sharded=False), children(given.model, sharded=True)
    ratio = max(rank["taken"] for rank in ranks) / alone["taken"]
    document = {"torch": torch.__version__, "one process": alone, "ranks": ranks, "largest rank over one": ratio}
    print(json.dumps(document, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
