"""Peak memory of a training step at RoBERTa-base size, private (DP-PMLF, k=2) against plain, each in its own process.

python benchmarks/memory.py            # prints both peaks, net of imports, and their ratio
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

SAMPLES, TOKENS = 16, 64


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(mode: str) -> dict[str, float]:
    """One step on random tokens, with the two points of k=2; the peak beyond what imports took."""
    import torch
    import torch.nn.functional as F
    from transformers import RobertaConfig, RobertaForSequenceClassification

    from pmlf import PrivateStep

    before = peak_bytes()
    torch.manual_seed(0)
    model = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, max_position_embeddings=514))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.randint(5, 50265, (SAMPLES, TOKENS)), "labels": torch.randint(2, (SAMPLES,))}

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
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    peaks = {}
    for mode in ("plain", "private"):
        output = subprocess.run([sys.executable, __file__, mode], check=True, capture_output=True, text=True).stdout
        peaks[mode] = json.loads(output.splitlines()[-1])["peak"]
    print(json.dumps({**peaks, "ratio": peaks["private"] / peaks["plain"]}))


if __name__ == "__main__":
    main()
