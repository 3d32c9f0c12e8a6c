"""What a run is: data that says all that is needed to repeat it.

The docstrings below the fields are also the help of the command line, whose options these fields are.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tyro

from pmlf.basics.arguments import steps_of_epochs

if TYPE_CHECKING:  # the methods need torch, which takes seconds to import: not for a --help
    from pmlf.methods import Method

DEFAULT_EPSILON = 3.0
DEFAULT_EPOCHS = 4.0
DEFAULT_BATCH_SIZE = 500
USUAL_DELTA = 1e-5
OPTIMIZERS = ("sgd", "adam")
IMAGE_MODEL = "cnn5"
TEXT_MODEL = "FacebookAI/roberta-base"


def shown_default(text: str, metavar: str | None = None) -> Any:
    """How the help describes a default that is not one constant."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})", metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Parameters of the methods. One that the method does not take is refused."""

    k: Annotated[int | None, shown_default("2")] = None
    """dp-pmlf, inner-outer: how many of the last iterates each sample's gradient is taken at, 1 or more."""

    beta: Annotated[float | None, shown_default("0.1")] = None
    """dp-pmlf: an iterate j steps old weighs beta^j in a sample's momentum. In (0, 1]; 1 is the plain mean."""

    a: Annotated[tuple[float, ...] | None, shown_default("-0.9", "[FLOAT ...]")] = None
    """dp-pmlf, lp-dpsgd: feedback coefficients a_1 a_2 ... of the low-pass filter, as in `--a -0.9`.
    No number at all, as in `--a --b 0.5 0.5`, is a filter without feedback."""

    b: Annotated[tuple[float, ...] | None, shown_default("0.1", "FLOAT [FLOAT ...]")] = None
    """dp-pmlf, lp-dpsgd: feed-forward coefficients b_0 b_1 ... of it, as in `--b 0.15 -0.05`.
    The filter must be stable and -sum(a) + sum(b) must be 1; `pmlf filter` shows what one does."""

    gamma: Annotated[float | None, shown_default("inner-outer 0.1, disk 0.5")] = None
    """inner-outer: decay of the weights of older iterates, in (0, 1].
    disk: length of the look-ahead, above 0."""

    outer_momentum: Annotated[float | None, shown_default("0.9")] = None
    """inner-outer: momentum on the noisy gradient, in [0, 1). The steady gain is 1/(1 - it)."""

    kappa: Annotated[float | None, shown_default("0.7")] = None
    """disk: weight of the new gradient, in (0, 1)."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """For texts: how a model is fine-tuned, and the columns of a table of one's own."""

    lora_rank: Annotated[int | None, shown_default("none, all weights are trained")] = None
    """Train updates of this rank to every linear layer, and the new head, in place of all weights."""

    max_length: Annotated[int | None, shown_default("none, a text longer than the model takes is refused")] = None
    """Cut texts after so many tokens."""

    text_column: Annotated[str | None, shown_default("none")] = None
    """One's own table: the column of the texts."""

    text_pair_column: Annotated[str | None, shown_default("none")] = None
    """One's own table: the column of the second texts, where a record is a pair."""

    label_column: Annotated[str | None, shown_default("label")] = None
    """One's own table: the column of the labels."""

    labels: Annotated[tuple[str, ...] | None, shown_default("none", "LABEL LABEL [LABEL ...]")] = None
    """One's own table: all the labels there can be, in the order of the classes.
    They are named and not collected from the records, whose labels are private."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much privacy a run may spend, and in how many steps of which size."""

    epsilon: Annotated[float | None, shown_default(f"{DEFAULT_EPSILON:g}, unless --noise-multiplier is given")] = None
    """Privacy budget of the whole run, above 0; the noise is calibrated to it."""

    noise_multiplier: Annotated[float | None, shown_default("from --epsilon")] = None
    """Standard deviation of the noise over the clip norm, in place of --epsilon."""

    delta: Annotated[float | None, shown_default("1e-5 if that is below 1/n, else n^-1.1")] = None
    """Probability with which epsilon may fail to hold, in (0, 1); well below 1/n, of n training records."""

    batch_size: int = DEFAULT_BATCH_SIZE
    """Expected number of records a step: each joins independently with probability batch_size/n."""

    epochs: Annotated[float | None, shown_default(f"{DEFAULT_EPOCHS:g}, unless --steps is given")] = None
    """How often each record is drawn on average."""

    steps: Annotated[int | None, shown_default("epochs * n / batch size, rounded up")] = None
    """Number of steps, in place of --epochs."""

    def resolved(self, records: int) -> Self:
        """The same on so many records, nothing left to a default."""
        # Refused here and not in __post_init__: the command line builds what was typed, then says what is wrong.
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier} are both given: each follows "
                "from the other, so give one"
            )
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs={self.epochs} and steps={self.steps} are both given: give one")
        epsilon = DEFAULT_EPSILON if self.noise_multiplier is None else None
        epochs = DEFAULT_EPOCHS if self.steps is None else None
        return replace(
            self,
            epsilon=epsilon if self.epsilon is None else self.epsilon,
            delta=default_delta(records) if self.delta is None else self.delta,
            epochs=epochs if self.epochs is None else self.epochs,
        )

    def planned_steps(self, records: int) -> int:
        """T = ceil(epochs * n / B), as `make_private` counts."""
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        return steps_of_epochs(epochs, records, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Setting(Budget):
    """Everything about a run but its method: what a comparison keeps equal."""

    dataset: str = "fashion-mnist-small"
    """fashion-mnist-small (inside the package), mnist, fashion-mnist, cifar10, cifar100; sst2, qnli, qqp, mnli.
    Or one's own: a folder with train/CLASS/*.png and test/CLASS/*.png;
    with --text-column and --labels a .csv, .tsv, .jsonl or .parquet file, or a folder with train.csv and test.csv."""

    records: Annotated[int | None, shown_default("all")] = None
    """Use the first so many records of either split: a smaller task, whose n is this number."""

    model: Annotated[str | None, shown_default("cnn5 for images, FacebookAI/roberta-base for texts")] = None
    """Images: cnn5, linear, resnet18, vit, vit-tiny or vit-small.
    Texts: a sequence classifier by its name on the Hugging Face hub, or the folder of one (safetensors)."""

    augment: bool = False
    """Shift each image by a few pixels and mirror half of them (not digits), anew at every step."""

    augment_per_point: bool = False
    """The same, drawn anew for every iterate that a sample's gradient is taken at: same privacy, less variance."""

    lr: float = 2.0
    """Learning rate, constant."""

    optimizer: str = "sgd"
    """What is given the private gradient: sgd or adam."""

    clip_norm: float = 1.0
    """Largest norm C of what one record adds to a step."""

    clipping: str = "flat"
    """flat scales a record's gradient v by min(1, C/|v|), automatic by C/(|v| + 0.01)."""

    ema: Annotated[float | None, shown_default("none")] = None
    """Decay, in (0, 1), of an average of the released parameters, which costs no privacy.
    It is evaluated and saved beside the last iterate."""

    holdout: Annotated[float | None, shown_default("none")] = None
    """Hold out this fraction of the training split, always the same records, and evaluate on it, not on the test split.
    For tuning. The held-out records are not protected; epsilon is for those that are left."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise; 0 for compare")] = None
    """Makes the run reproducible: initial weights, draws and noise follow from it.
    Whoever knows it can take the noise away: for experiments, not for a model to release."""

    secure_noise: bool = False
    """Make every Gaussian from four, against attacks on the last bits of floating-point noise.
    A mitigation, not a proof; it costs well below a per cent of a step."""

    max_physical_batch_size: int | Literal["auto"] = 256
    """Records in memory at once: a number, or auto for what fits memory and is fast, measured once at the start.
    Changes memory and speed, and results by rounding alone."""

    autocast: bool = False
    """Run the model in bfloat16 where torch.autocast does; norms, sums and noise stay in float32."""

    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps."""

    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = MethodOptions()

    text: TextOptions = TextOptions()

    @property
    def is_text(self) -> bool:
        from pmlf.data.catalogue import TEXT_DATASETS

        return self.dataset in TEXT_DATASETS or self.text.text_column is not None

    @property
    def model_name(self) -> str:
        """The model asked for, or the usual one for such data."""
        return self.model or (TEXT_MODEL if self.is_text else IMAGE_MODEL)

    @property
    def title(self) -> str:
        """Dataset and model in a few words, without the folders they are in."""
        return f"{Path(self.dataset).name}-{Path(self.model_name).name}"


@dataclass(frozen=True, kw_only=True)
class RunSpec(Setting):
    """One run: a method in a setting."""

    method: str = "dp-pmlf"
    first_part: float | None = None  # carry out this part of the steps alone: a trial is the beginning of a longer run

    def build_method(self) -> Method:
        """The method with the parameters given, its own defaults for the others."""
        return _method_function(self.method)(**self._parameters())

    def resolved(self, records: int) -> Self:
        """The same run on so many records, nothing left to a default: what is written down."""
        if not (self.lr > 0.0 and math.isfinite(self.lr)):
            raise ValueError(f"lr={self.lr} is not positive and finite: it is the learning rate, 1 for example")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        parameters = {_option(self.method, name): value for name, value in self._parameters().items()}
        return replace(super().resolved(records), model=self.model_name, options=MethodOptions(**parameters))

    def steps_to_take(self, planned: int) -> int:
        """Out of so many, for which the noise is calibrated."""
        return planned if self.first_part is None else math.ceil(self.first_part * planned)

    def to_json(self) -> str:
        """Every field that is set."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        for group in _GROUPS:
            values[group] = {name: value for name, value in values[group].items() if value is not None}
        return json.dumps(values, indent=2) + "\n"

    def digest(self) -> str:
        """Tells specs apart."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @staticmethod
    def from_json(text: str) -> RunSpec:
        """The spec that `to_json` wrote.

        >>> RunSpec.from_json(RunSpec(method="dpsgd", seed=1).to_json()) == RunSpec(method="dpsgd", seed=1)
        True
        """
        values: dict[str, Any] = json.loads(text)
        for group, kind in _GROUPS.items():
            given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.get(group, {}).items()}
            _refuse_unknown(kind, given)
            values[group] = kind(**given)
        _refuse_unknown(RunSpec, values)
        return RunSpec(**values)

    def _parameters(self) -> dict[str, Any]:
        """The method's parameters by the names its function gives them, defaults filled in."""
        accepted = _accepted(self.method)
        by_option = {_option(self.method, name): name for name in accepted}
        given = {name: value for name, value in vars(self.options).items() if value is not None}
        for name in given:
            if name not in by_option:
                takes = ", ".join(map(flag, by_option)) or "no parameters"
                raise ValueError(f"{flag(name)} is not for {self.method}, which takes {takes}")
        defaults = {name: parameter.default for name, parameter in accepted.items()}
        return defaults | {by_option[name]: value for name, value in given.items()}


_GROUPS: dict[str, type] = {"options": MethodOptions, "text": TextOptions}


def comparison(setting: Setting, methods: Sequence[str]) -> list[RunSpec]:
    """A run for every method, each with those of the setting's method options that it takes; one must take each."""
    if not methods or len(set(methods)) < len(methods):
        raise ValueError(f"methods={' '.join(methods)!r} is not a list of different methods: give each once")
    takes = {method: {_option(method, name) for name in _accepted(method)} for method in methods}
    given = {name: value for name, value in vars(setting.options).items() if value is not None}
    for name in given:
        if not any(name in options for options in takes.values()):
            raise ValueError(f"{flag(name)} is for none of {', '.join(methods)}: leave it out")

    def spec(method: str) -> RunSpec:
        options = MethodOptions(**{name: value for name, value in given.items() if name in takes[method]})
        return RunSpec(**{**vars(setting), "method": method, "options": options})

    return [spec(method) for method in methods]


def default_delta(records: int) -> float:
    """1e-5 where that is below 1/n, else n^-1.1, which always is."""
    return USUAL_DELTA if records * USUAL_DELTA < 1 else records**-1.1


def flag(field_name: str) -> str:
    """A field as the command line spells it."""
    return "--" + field_name.replace("_", "-")


def _option(method: str, parameter: str) -> str:
    """InnerOuter calls its outer momentum `beta`, which beside DP-PMLF's beta needs a name of its own."""
    return "outer_momentum" if (method, parameter) == ("inner-outer", "beta") else parameter


def _method_function(name: str) -> Callable[..., Method]:
    from pmlf import methods

    methods.resolve(name)  # refuses a name that is not known
    return methods.PRESETS[name]


def _accepted(method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_method_function(method)).parameters


def _refuse_unknown(of: type, values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - {known.name for known in fields(of)})
    if unknown:
        raise ValueError(f"the spec has an unknown field {unknown[0]!r}: it was written by another version, or by hand")
