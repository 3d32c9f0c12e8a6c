"""Digests of the weights that seeded runs end with: does a change of the code change a number that it computes?

    python dev/same_bits.py                                 # prints them
    python dev/same_bits.py --write                         # stores them for tests/test_same_bits.py
    PYTHONPATH=<another checkout>/src python dev/same_bits.py

Every method runs three seeded steps on CNN-5 and on a small RoBERTa, and `pmlf compare` runs four methods. The digests
are of bits, so they are of one kind of processor: `kernels` is the digest of a plain torch computation, which says
whether two machines can be compared bit by bit. The numbers beside each digest hold on any machine, but for rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import methods, models

RECORDED = Path(__file__).parent / "results" / "same-bits.json"
COMPARED = ("dpsgd", "lp-dpsgd", "inner-outer", "dp-pmlf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the result for the test")
    text = json.dumps(everything(), indent=1)
    if parser.parse_args().write:
        RECORDED.write_text(text + "\n")
    else:
        print(text)


def everything() -> dict[str, Any]:
    """What `kernels` and every run give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {f"cnn5 {name}": image_run(name) for name in methods.NAMES}
        found |= {f"text {name}": text_run(name) for name in methods.NAMES}
        return {"kernels": kernels(), "runs": found | compared()}
    finally:
        torch.set_num_threads(threads)


def kernels() -> str:
    """The digest of convolutions, products and normalisations by torch alone."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 32, 32, generator=generator).requires_grad_()
    weight = torch.randn(32, 3, 3, 3, generator=generator).requires_grad_()
    out = F.group_norm(F.conv2d(images, weight, padding=1).tanh(), 16).flatten(1)
    out = F.layer_norm(out[:, :768] @ torch.randn(768, 64, generator=generator), (64,)).softmax(1).square().sum()
    return digest(torch.autograd.grad(out, [images, weight]))["digest"]


def image_run(method: str) -> dict[str, Any]:
    model = models.build("cnn5", in_channels=1, image_size=28, classes=10, seed=0)
    images = torch.randn(48, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    return run(model, TensorDataset(images, torch.arange(48) % 10), image_loss, method)


def text_run(method: str) -> dict[str, Any]:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=20,
    )
    model = RobertaForSequenceClassification(config)
    ids = torch.randint(3, 60, (48, 12), generator=torch.Generator().manual_seed(1))
    return run(model, TensorDataset(ids, torch.arange(48) % 2), text_loss, method)


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def text_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1], reduction="none")


def run(model: nn.Module, dataset: TensorDataset, loss_fn: Any, method: str) -> dict[str, Any]:
    """Three seeded steps of 16 expected samples, or of 6 from one of 8 groups, in micro-batches of 6."""
    private = pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=dataset,
        loss_fn=loss_fn,
        method=method,
        noise_multiplier=0.5,
        target_delta=1e-3,
        batch_size=16 if methods.resolve(method).noise.bands == 1 else 6,
        steps=3,
        max_physical_batch_size=6,
        seed=7,
    )
    for batch in private.batches():
        private.step(batch)
    return digest(parameter for _, parameter in sorted(model.named_parameters()))


def compared() -> dict[str, Any]:
    """`pmlf compare` on 600 of the packaged images."""
    from pmlf.cli.main import main as command

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "comparison"
        options = ["--records", "600", "--batch-size", "100", "--steps", "4", "--json", "--out", str(out)]
        with contextlib.redirect_stdout(io.StringIO()):
            command(["compare", *options, "--methods", *COMPARED])
        found = {}
        for method in COMPARED:
            saved = load_file(out / method / "model.safetensors")
            found[f"compare {method}"] = digest(saved[name] for name in sorted(saved))
        return found


def digest(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """A digest of all bits, and sums that other machines have too, but for rounding."""
    sha, total, squares = hashlib.sha256(), 0.0, 0.0
    for tensor in tensors:
        values = tensor.detach().contiguous()
        sha.update(values.numpy().tobytes())
        total += float(values.double().sum())
        squares += float(values.double().square().sum())
    return {"digest": sha.hexdigest(), "sum": total, "norm": squares**0.5}


if __name__ == "__main__":
    main()
