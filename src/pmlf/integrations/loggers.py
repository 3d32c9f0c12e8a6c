"""Loggers: callbacks that write the released numbers of a run to a CSV file, TensorBoard, Weights & Biases or MLflow.

    run.callbacks.append(CsvLogger("log.csv"))

Numbers of steps are collected and written at the next evaluation or at the end. So no log shows when a single step was
taken: the time of a step tells how many samples were drawn.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pmlf.basics.arguments import did_you_mean
from pmlf.run.callbacks import EndRecord, EvaluationRecord, StepRecord

Numbers = Mapping[str, float]


class Logger(ABC):
    """A callback that writes numbers by step. Subclasses say where."""

    def __init__(self) -> None:
        self._steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        """Keep the numbers of a step for the next evaluation."""
        self._steps.append(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Write the steps since the last evaluation, and the scores."""
        self._write_steps()
        self.write(record.step, {"epoch": record.epoch, "epsilon": record.epsilon, **record.scores})

    def on_end(self, record: EndRecord) -> None:
        """Write the steps since the last evaluation, and the certificate where the place has room for it."""
        self._write_steps()
        self.finish(record.certificate)

    def _write_steps(self) -> None:
        for record in self._steps:
            self.write(record.step, {"learning_rate": record.learning_rate, "gradient_norm": record.gradient_norm})
        self._steps.clear()

    @abstractmethod
    def write(self, step: int, numbers: Numbers) -> None:
        """Write numbers of one step."""

    @abstractmethod
    def finish(self, certificate: Mapping[str, Any]) -> None:
        """Write what is left to write."""


class CsvLogger(Logger):
    """A CSV file with the columns step, name and value. An existing file is appended to.

    Args:
        path: The file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> logger = CsvLogger(path)
    >>> logger.on_evaluation(EvaluationRecord(step=5, epoch=1.0, epsilon=0.5, scores={"test/accuracy": 0.8}))
    >>> path.read_text().split()
    ['step,name,value', '5,epoch,1.0', '5,epsilon,0.5', '5,test/accuracy,0.8']
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__()
        self._path = Path(path)

    def write(self, step: int, numbers: Numbers) -> None:
        new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("step", "name", "value")] if new else [])
            writer.writerows((step, name, value) for name, value in numbers.items())

    def finish(self, certificate: Mapping[str, Any]) -> None:
        pass


class TensorBoardLogger(Logger):
    """Event files for `tensorboard --logdir FOLDER`. The certificate is in the tab Text.

    Args:
        folder: Where the event files go.

    Raises:
        ValueError: The package tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        require("tensorboard", "tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer

    def write(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._open().add_scalar(name, value, step)

    def finish(self, certificate: Mapping[str, Any]) -> None:
        self._open().add_text("certificate", f"```json\n{json.dumps(certificate, indent=2)}\n```")
        self._open().close()


class WandbLogger(Logger):
    """A run of Weights & Biases. WANDB_MODE=offline writes files only; the certificate is in the run's summary.

    Args:
        project: The project's name.
        folder: Where wandb keeps its files.

    Raises:
        ValueError: The package wandb is not installed.
    """

    def __init__(self, project: str, folder: Path | str = ".") -> None:
        super().__init__()
        require("wandb", "wandb")
        self._project, self._folder = project, Path(folder)
        self._run: Any = None

    def _open(self) -> Any:
        if self._run is None:
            import wandb

            self._folder.mkdir(parents=True, exist_ok=True)
            # neither the console nor the machine's statistics are released numbers
            settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
            self._run = wandb.init(project=self._project, dir=str(self._folder), settings=settings)
        return self._run

    def write(self, step: int, numbers: Numbers) -> None:
        self._open().log(dict(numbers), step=step)

    def finish(self, certificate: Mapping[str, Any]) -> None:
        self._open().summary["certificate"] = dict(certificate)
        self._open().finish()


class MlflowLogger(Logger):
    """A run of MLflow, at the tracking URI that MLflow is set to, with the certificate as an artifact.

    Args:
        experiment: The experiment's name.
        tracking_uri: Where MLflow stores runs; None for its own setting, MLFLOW_TRACKING_URI.

    Raises:
        ValueError: The package mlflow is not installed.
    """

    def __init__(self, experiment: str, tracking_uri: str | None = None) -> None:
        super().__init__()
        require("mlflow", "mlflow")
        self._experiment, self._uri, self._run = experiment, tracking_uri, ""

    def _client(self) -> Any:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._uri)
        if not self._run:
            found = client.get_experiment_by_name(self._experiment)
            name = found.experiment_id if found else client.create_experiment(self._experiment)
            self._run = client.create_run(name).info.run_id
        return client

    def write(self, step: int, numbers: Numbers) -> None:
        client = self._client()
        for name, value in numbers.items():
            client.log_metric(self._run, name, value, step=step)

    def finish(self, certificate: Mapping[str, Any]) -> None:
        client = self._client()
        client.log_dict(self._run, dict(certificate), "certificate.json")
        client.set_terminated(self._run)


_IN_A_FOLDER: Mapping[str, Callable[[Path], Logger]] = {
    "csv": lambda folder: CsvLogger(folder / "log.csv"),
    "tensorboard": lambda folder: TensorBoardLogger(folder / "tensorboard"),
    "wandb": lambda folder: WandbLogger("pmlf", folder),
    "mlflow": lambda folder: MlflowLogger("pmlf"),
}
NAMES = tuple(_IN_A_FOLDER)


def by_name(name: str, folder: Path) -> Logger:
    """The logger of a name, for a run that writes to a folder.

    Args:
        name: One of `NAMES`.
        folder: The run's folder.

    Returns:
        The logger. It creates its files when it first writes.

    Raises:
        ValueError: The name is unknown, or the logger's package is not installed.

    >>> by_name("tensorbord", Path("."))
    Traceback (most recent call last):
    ValueError: log='tensorbord' is not a logger: give csv, tensorboard, wandb or mlflow. Did you mean 'tensorboard'?
    """
    if name not in _IN_A_FOLDER:
        known = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
        raise ValueError(f"log={name!r} is not a logger: give {known}{did_you_mean(name, NAMES)}")
    return _IN_A_FOLDER[name](folder)


def require(package: str, extra: str) -> None:
    """Raise ValueError with the line to install a package, if it is missing."""
    try:
        import_module(package)
    except ImportError as error:
        raise ValueError(f"this logger needs the package {package}: pip install 'dp-pmlf[{extra}]'") from error
