"""The walk of a private step through the code: calls, modules, changes of module; a convolution and a linear layer.

    python dev/trace_step.py            # counts
    python dev/trace_step.py --calls    # and every function with how often it was called

One warm micro-batch of DP-PMLF with k = 2. A change of module is a call or a return into another file of the library.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep, methods

HOME = str(Path(pmlf.__file__).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print every function")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="noise_multiplier=0")
    calls, changes = traced()
    modules = {file for file, _ in calls}
    print(json.dumps({"calls": sum(calls.values()), "modules": len(modules), "changes_of_module": changes}))
    if given.calls:
        for (file, name), count in calls.most_common():
            print(f"{count:5d}  {file} {name}")


def traced() -> tuple[Counter[tuple[str, str]], int]:
    """Calls by (file, function), and changes of module, of one `accumulate`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 4))
    batch = (torch.randn(16, 3, 8, 8), torch.randint(4, (16,)))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    method = methods.dp_pmlf(k=2, beta=0.1, a=(-0.9,), b=(0.1,))
    step = PrivateStep(model, loss_fn, method=method, noise_multiplier=0.0, expected_batch_size=1e6)
    for _ in range(3):
        step.accumulate(batch)
        step.release()
    calls: Counter[tuple[str, str]] = Counter()
    stack: list[str] = []
    changes = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal changes
        file = frame.f_code.co_filename
        if not file.startswith(HOME):
            return
        if event == "call":
            calls[file[len(HOME) + 1 :], frame.f_code.co_qualname] += 1
            changes += bool(stack) and stack[-1] != file
            stack.append(file)
        elif event == "return":
            stack.pop()
            changes += bool(stack) and stack[-1] != file

    sys.setprofile(profile)
    try:
        step.accumulate(batch)
    finally:
        sys.setprofile(None)
    return calls, changes


if __name__ == "__main__":
    main()
