"""Communication and noise as a share of a step, by calculation, for many processes that have not been tried.

    python benchmarks/communication.py --out docs/results/communication.json

P parameters on W processes, data parallel, once a logical batch whatever its size B:
  sent by each process = 2 (W - 1) / W * 8 P bytes: float64 sums reduced to owners of their parts, results sent back;
  noise made by each process = P / W Gaussians.
A step computes 6 P L FLOPs a sample of L tokens and point (forward and backward passes), B / W samples a process.
With `fully_shard`, each micro-batch and point adds a gathering of parameters, (W - 1) / W * 4 P bytes, and each
micro-batch a sum, of as many numbers in float64.

Measured here: Gaussians a second of one core. Measured before, in docs/results/scaling.json: `release` on one and on
two processes of one thread, which the same formulas turn into the bandwidth that gloo had between two processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pmlf.mechanism.noise import SeededRandomness
from scaling import BATCH, case

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "results" / "scaling.json"
GAUSSIANS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a step runs on."""

    processes: int  # W
    bandwidth: float  # bytes a second that a process sends, and receives at the same time
    flops: float  # floating-point operations a second of a process, as achieved
    gaussians: float  # a second of a process


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step computes."""

    parameters: int  # P
    batch_size: int  # B
    tokens: int  # L
    points: int  # 2 for DP-PMLF
    micro_batch: int


def sent_bytes(parameters: int, processes: int) -> float:
    """2 (W - 1) / W * 8 P: what each process sends in a step of data parallel."""
    return 2 * (processes - 1) / processes * 8 * parameters


def shares(step: Step, on: Machines) -> dict[str, float]:
    """Seconds of a step, and what share of it communication and noise have."""
    compute = 6 * step.parameters * step.tokens * step.points * step.batch_size / on.processes / on.flops
    communication = sent_bytes(step.parameters, on.processes) / on.bandwidth
    noise = step.parameters / on.processes / on.gaussians
    rounds = -(-step.batch_size // on.processes // step.micro_batch)
    gathered = rounds * (on.processes - 1) / on.processes * step.parameters * (4 * step.points + 8)
    whole = compute + communication + noise
    return {
        "compute_seconds": compute,
        "communication_seconds": communication,
        "noise_seconds": noise,
        "communication_share": communication / whole,
        "noise_share": noise / whole,
        "fully_shard_communication_share": gathered / on.bandwidth / (compute + noise + gathered / on.bandwidth),
    }


def gaussians_a_second() -> float:
    """The best of nine measurements, in processor time of one core."""
    torch.set_num_threads(1)
    values, times = torch.zeros(GAUSSIANS, dtype=torch.float64), []
    for turn in range(9):
        begin = time.process_time()
        SeededRandomness(0).stream("noise", turn).add_gaussian_(values, 1.0)
        times.append(time.process_time() - begin)
    return GAUSSIANS / min(times)


def compared(gaussians: float) -> dict[str, Any]:
    """The formulas beside what was measured on two processes."""
    found = {}
    for name in ("cnn5", "transformer"):
        turns = json.loads(MEASURED.read_text())[name]["turns"]
        parameters = sum(parameter.numel() for parameter in case(name)[0].parameters())

        def seconds(count: int, turns: Any = turns) -> float:
            return statistics.median(
                turn[str(count)]["release"] * BATCH / turn[str(count)]["samples a second"] for turn in turns
            )

        alone, together = seconds(1), seconds(2)
        filtered = alone - parameters / gaussians  # by every process: it does not become less with more of them
        left = together - filtered - parameters / 2 / gaussians
        found[name] = {
            "parameters": parameters,
            "measured_release_seconds": {"1": alone, "2": together},
            "measured_share_of_two_processes": statistics.median(turn["2"]["release"] for turn in turns),
            "calculated_noise_seconds": {"1": parameters / gaussians, "2": parameters / 2 / gaussians},
            "left_for_communication_seconds": left,
            "bytes_sent": sent_bytes(parameters, 2),
            "gloo_bytes_a_second": sent_bytes(parameters, 2) / left,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    gaussians = gaussians_a_second()
    machines = Machines(processes=8, bandwidth=25e9, flops=4e13, gaussians=gaussians)
    table = []
    for batch_size in (512, 4096, 32768):
        step = Step(parameters=100_000_000, batch_size=batch_size, tokens=128, points=2, micro_batch=32)
        table.append({**asdict(step), **shares(step, machines)})
    document = {"torch": torch.__version__, "on": asdict(machines), "steps": table, "measured": compared(gaussians)}
    print(json.dumps(document, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
