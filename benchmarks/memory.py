"""Peak memory of a training step at RoBERTa-base size, private (DP-PMLF, k=2) against plain, each in its own process.

python benchmarks/memory.py             # prints both peaks, net of imports, and their ratio
python benchmarks/memory.py --tokens 32 # the same of shorter texts, as the test does
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

SAMPLES = 16


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(mode: str, layers: int, tokens: int) -> dict[str, float]:
    """One step on random tokens, with the two points of k=2; the peak beyond what imports took."""
    import torch
    import torch.nn.functional as F
    from transformers import RobertaConfig, RobertaForSequenceClassification

    from pmlf import PrivateStep

    before = peak_bytes()
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, num_hidden_layers=layers)
    model = RobertaForSequenceClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.randint(5, 50265, (SAMPLES, tokens)), "labels": torch.randint(2, (SAMPLES,))}

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")

    if mode == "private":
        step = PrivateStep(
            model, loss_fn, method="dp-pmlf", noise_multiplier=1.0, expected_batch_size=SAMPLES, clip_norm=1.0
        )
        step.release()  # of an empty batch: now there is a past iterate
        optimizer.step()
        optimizer.zero_grad()
        step.accumulate(batch)
        step.release()
    else:
        loss_fn(model, batch).mean().backward()
    optimizer.step()
    return {"peak": peak_bytes() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="layers of the model; RoBERTa-base has 12")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--only", choices=("plain", "private"), help="measure one, in this process")
    given = parser.parse_args()
    if given.only is not None:
        print(json.dumps(measure(given.only, given.layers, given.tokens)))
        return
    peaks = {}
    for mode in ("plain", "private"):
        sizes = ["--layers", str(given.layers), "--tokens", str(given.tokens)]
        command = [sys.executable, __file__, "--only", mode, *sizes]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[mode] = json.loads(output.splitlines()[-1])["peak"]
    print(json.dumps({**peaks, "ratio": peaks["private"] / peaks["plain"]}))


if __name__ == "__main__":
    main()
