"""A Ray cluster for one run, joined or started, and Ray Train on it."""

from __future__ import annotations

import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from pmlf import machine
from pmlf.parallel.failure import RankFailed

_ATTEMPTS = 4  # Ray gives its own node 30 seconds: too few on a busy machine, until its files are in memory
_OBJECT_STORE_BYTES = 100_000_000  # messages are small, and sums do not go through Ray
_ENVIRONMENT = {  # where the user has not decided otherwise
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray reports to its makers
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process that waits for a reason to start workers again
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
}
_SHORT = "/tmp" if os.path.isdir("/tmp") else None  # the paths of Ray's sockets have at most 107 characters


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for the files of Ray, that its owner alone can read and that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="pmlf-", dir=_SHORT, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def connected(workers: int, *, gpus: bool, folder: Path) -> Iterator[Any]:
    """The package ray, connected to a cluster with room for some workers, in a `with` block.

    The cluster is the one at RAY_ADDRESS. Without that variable Ray is started on this machine and ends with the block.
    A Ray that happens to run here is not joined: it may be that of another command, and end with it. What is printed on
    stdout within the block is dropped: Ray tells there of workers that died.

    Args:
        workers: The number of workers.
        gpus: Whether each needs a GPU.
        folder: Where a Ray that is started here has its logs and sockets.

    Raises:
        ValueError: The package is missing, RAY_ADDRESS does not answer, or the cluster is too small.
        RankFailed: Ray does not start.
    """
    try:
        import ray
        import ray.train.torch
    except ImportError as error:
        raise ValueError(
            "--ray-workers needs the package ray with Ray Train: pip install 'dp-pmlf[ray]', or start the processes by "
            "`torchrun --nproc-per-node N -m pmlf train`"
        ) from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS") or "local"
    with redirect_stdout(io.StringIO()):
        try:
            if address == "local":
                _start(ray, workers, folder)
            else:
                _join(ray, address)
            kind = "GPU" if gpus else "CPU"
            there = int(ray.cluster_resources().get(kind, 0))
            if there < workers:
                raise ValueError(f"--ray-workers={workers} needs as many {kind}s, and the Ray cluster has {there}")
            yield ray
        finally:
            ray.shutdown()


def _join(ray: Any, address: str) -> None:
    """Connect to a cluster that runs."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster answers at RAY_ADDRESS={address}: correct it, or unset it to start Ray on this machine"
        ) from error


def _start(ray: Any, workers: int, folder: Path) -> None:
    """Start Ray on this machine, with at least as many CPUs as workers: torchrun counts no cores either."""
    for attempt in range(_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=max(workers, machine.cores()),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / "ray"),  # Ray opens this one to everybody
                _system_config={"worker_niceness": 0},  # as torchrun: Ray's own is 15, and anything else goes first
            )
        except Exception as error:  # Ray raises the class Exception itself where its node is late
            ray.shutdown()
            if attempt == _ATTEMPTS - 1:
                raise RankFailed(
                    f"Ray did not start on this machine in {_ATTEMPTS} attempts ({' '.join(str(error).split())}): "
                    "start it by `ray start --head`, and type the command with RAY_ADDRESS=auto"
                ) from error
        else:
            return


def fit(work: Callable[[], Any], workers: int, gpus: bool, folder: Path) -> Any:
    """Call `work` on workers of Ray Train that are one process group: gloo on CPUs, NCCL on GPUs.

    Args:
        work: A function that can be pickled.
        workers: The number of workers.
        gpus: Whether each needs a GPU.
        folder: Where Ray Train notes what it does.

    Returns:
        What it returns on rank 0.
    """
    from ray import train
    from ray.train.torch import TorchTrainer

    never_again = train.FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0)
    trainer = TorchTrainer(
        work,
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=gpus),
        run_config=train.RunConfig(
            name="pmlf",
            storage_path=str(folder / "train"),
            failure_config=never_again,
            logging_config=train.LoggingConfig(log_level="ERROR"),
        ),
    )
    return trainer.fit().return_value


def failed_ranks(error: Exception) -> set[int]:
    """The ranks that Ray Train names in an error of `fit`."""
    from ray.train import WorkerGroupError

    return set(error.worker_failures) if isinstance(error, WorkerGroupError) else set()
