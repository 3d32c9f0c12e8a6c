"""The specification of a run: everything needed to repeat it.

The fields are options of the command line, and the docstrings below them are its help text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tyro

from pmlf.basics.arguments import steps_of_epochs
from pmlf.experiments.options import OwnData, PretrainedOptions, shown_default

if TYPE_CHECKING:  # it imports torch, which takes seconds: too slow for --help
    from pmlf.methods import Method

DEFAULT_EPSILON = 3.0
DEFAULT_EPOCHS = 4.0
DEFAULT_BATCH_SIZE = 500
USUAL_DELTA = 1e-5
OPTIMIZERS = ("sgd", "adam")
DEFAULT_MODELS = {
    "image": "cnn5",
    "text": "FacebookAI/roberta-base",
    "language": "openai-community/gpt2",
    "table": "mlp",
}


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Parameters of the methods. A method refuses those that it does not have."""

    k: Annotated[int | None, shown_default("2")] = None
    """dp-pmlf, inner-outer: number of iterates at which each per-sample gradient is computed, 1 or more."""

    beta: Annotated[float | None, shown_default("0.1")] = None
    """dp-pmlf: the iterate from j steps ago has weight beta^j in the per-sample momentum. In (0, 1]; 1 is the mean."""

    a: Annotated[tuple[float, ...] | None, shown_default("-0.9", "[FLOAT ...]")] = None
    """dp-pmlf, lp-dpsgd: feedback coefficients a_1 a_2 ... of the low-pass filter, as in `--a -0.9`.
    Without numbers, as in `--a --b 0.5 0.5`: no feedback."""

    b: Annotated[tuple[float, ...] | None, shown_default("0.1", "FLOAT [FLOAT ...]")] = None
    """dp-pmlf, lp-dpsgd: feed-forward coefficients b_0 b_1 ... of the filter, as in `--b 0.15 -0.05`.
    The filter must be stable, with -sum(a) + sum(b) = 1. `pmlf filter` shows its properties."""

    bands: Annotated[int | None, shown_default("1, white noise; 8 for dp-pmlf-shaped and lp-dpsgd-shaped")] = None
    """dp-pmlf, lp-dpsgd: shape the noise with this many bands, so that the filter removes more of it. Records are then
    drawn from this many groups in turn: bands * batch size must be at most the number of records."""

    gamma: Annotated[float | None, shown_default("inner-outer 0.1, disk 0.5")] = None
    """inner-outer: decay of the weights of past iterates, in (0, 1]. disk: length of the look-ahead, above 0."""

    outer_momentum: Annotated[float | None, shown_default("0.9")] = None
    """inner-outer: momentum m on the noisy gradient, in [0, 1). The DC gain is 1/(1 - m)."""

    kappa: Annotated[float | None, shown_default("0.7")] = None
    """disk: weight of the new gradient, in (0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The privacy budget of a run, its number of steps and its batch size."""

    epsilon: Annotated[float | None, shown_default(f"{DEFAULT_EPSILON:g}, unless --noise-multiplier is given")] = None
    """Privacy budget of the whole run, above 0. The noise is calibrated to it."""

    noise_multiplier: Annotated[float | None, shown_default("from --epsilon")] = None
    """Standard deviation of the noise divided by the clip norm. Give it instead of --epsilon."""

    delta: Annotated[float | None, shown_default("1e-5 if that is below 1/n, else n^-1.1")] = None
    """Probability that the epsilon guarantee fails, in (0, 1). Choose it well below 1/n for n training records."""

    batch_size: int = DEFAULT_BATCH_SIZE
    """Expected number of records per step. Each record is drawn independently with probability batch size / n."""

    epochs: Annotated[float | None, shown_default(f"{DEFAULT_EPOCHS:g}, unless --steps is given")] = None
    """Mean number of times that each record is drawn."""

    steps: Annotated[int | None, shown_default("epochs * n / batch size, rounded up")] = None
    """Number of steps. Give it instead of --epochs."""

    def resolved(self, records: int) -> Self:
        """A copy for this number of records with all defaults filled in.

        Raises:
            ValueError: If both epsilon and noise_multiplier, or both epochs and steps, are given.
        """
        # here and not in __post_init__: the command line builds the object before it reports errors
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier} are both given: each determines "
                "the other, so give one"
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
        """Number of steps T = ceil(epochs * n / B), as in `make_private`."""
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        return steps_of_epochs(epochs, records, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Setting(Budget):
    """Everything about a run except its method: what a comparison keeps equal."""

    dataset: str = "fashion-mnist-small"
    """fashion-mnist-small (comes with the package), mnist, fashion-mnist, cifar10, cifar100; sst2, qnli, qqp, mnli.
    Your own images, with --labels: a folder with train/CLASS/*.jpg and test/CLASS/*.jpg. Your own texts (with
    --text-column) and tables (with --columns or --schema): a .csv, .tsv, .jsonl or .parquet file, or a folder with
    train.csv and test.csv."""

    records: Annotated[int | None, shown_default("all")] = None
    """Use only this number of records: the first ones of the training split and of the test split."""

    model: Annotated[str | None, shown_default("images cnn5, tables mlp, texts FacebookAI/roberta-base")] = None
    """Images: cnn5, linear, resnet18, resnet18-narrow, vit, vit-mini, vit-tiny or vit-small; or prior-linear, a private
    linear model on features from synthetic images, for small epsilons. Tables: mlp or linear. Texts, and images too:
    the name of a model on the Hugging Face hub, or a folder with a model in safetensors format."""

    augment: bool = False
    """Shift each image by a few pixels and mirror half of the images (not digits), at random at every step."""

    augment_per_point: bool = False
    """The same, with another random draw for each iterate of the per-sample momentum. Same privacy, less variance."""

    lr: float = 2.0
    """Learning rate (constant)."""

    optimizer: str = "sgd"
    """Optimizer of the private gradients: sgd or adam. Neither has a momentum of its own after a filter, which is one;
    without a filter Adam has its usual 0.9."""

    clip_norm: float = 1.0
    """Clip norm C: each per-sample gradient is scaled to at most this norm."""

    clipping: str = "flat"
    """flat scales a per-sample gradient v by min(1, C/|v|), automatic by C/(|v| + 0.01). per-layer scales the part of
    each of L layers to at most C/sqrt(L)."""

    clip_quantile: Annotated[float | None, shown_default("none, a constant clip norm")] = None
    """Adaptive clipping: the clip norm follows this quantile of the per-sample norms, 0.5 for example, from --clip-norm
    on. A noisy count of the samples within it is released at every step, in the same epsilon. For white noise."""

    largest_batch: Annotated[int | None, shown_default("none", "RECORDS")] = None
    """Truncated Poisson sampling: cut a draw of more records than this to it, at random. Epsilon is then for one record
    zeroed out, not added or removed, and delta includes the chance of a cut. For white noise."""

    ema: Annotated[float | None, shown_default("none")] = None
    """Also keep an exponential average of the parameters with this decay, in (0, 1). It costs no privacy.
    The average is evaluated and saved next to the last iterate."""

    holdout: Annotated[float | None, shown_default("none")] = None
    """Evaluate on this fraction of the training split, always the same records, instead of the test split. For tuning.
    The held-out records are not protected. Epsilon is for the remaining records."""

    seed: Annotated[int | None, shown_default("none, cryptographic noise; 0 for compare")] = None
    """Make the run reproducible: initial weights, batches and noise depend on the seed.
    Anyone who knows the seed can remove the noise. For experiments, not for a model that you release."""

    secure_noise: bool = False
    """Make each Gaussian from four others, against attacks on the low bits of floating-point noise.
    A mitigation, not a proof. Costs well below 1 % of a step."""

    max_physical_batch_size: int | Literal["auto"] = 256
    """Largest number of records per forward and backward pass: a number, or auto, which measures what fits into memory
    and is fast. It changes memory and speed, and the results only by rounding."""

    autocast: bool = False
    """Run the model in bfloat16 with torch.autocast. Norms, sums and noise stay in float32."""

    device: str = "cpu"
    """Device to train on: cpu, cuda, cuda:1, mps."""

    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = MethodOptions()

    own: OwnData = field(default_factory=OwnData)

    pretrained: PretrainedOptions = field(default_factory=PretrainedOptions)

    @property
    def kind(self) -> str:
        """The kind of records: image, text, language or table. Your own are texts or tables if columns are given."""
        from pmlf.data.catalogue import TEXT_DATASETS

        if self.own.task == "causal-lm":
            return "language"
        if self.dataset in TEXT_DATASETS or self.own.text_column is not None:
            return "text"
        return "image" if self.own.columns is None and self.own.schema is None else "table"

    @property
    def model_name(self) -> str:
        """The given model, or the default for this kind of data."""
        return self.model or DEFAULT_MODELS[self.kind]

    @property
    def title(self) -> str:
        """Dataset and model, without their folders."""
        return f"{Path(self.dataset).name}-{Path(self.model_name).name}"


@dataclass(frozen=True, kw_only=True)
class RunSpec(Setting):
    """One run: a method in a setting."""

    method: str = "dp-pmlf"
    part: tuple[float, float] | None = (
        None  # train on this part of the records, in a public random order, as tuning does
    )
    chosen_by: int | None = None  # number of trials on the same records that chose the settings, if any did

    @property
    def not_accounted_for(self) -> list[str]:
        """What the settings depend on besides the run. The certificate lists it."""
        return [] if self.chosen_by is None else [chosen_by_trials(self.chosen_by)]

    def build_method(self) -> Method:
        """The method with the given parameters and its defaults for the others."""
        return _method_function(self.method)(**self._parameters())

    def resolved(self, records: int) -> Self:
        """A copy for this number of records with all defaults filled in: what spec.json holds.

        Raises:
            ValueError: If a setting is invalid or is not an option of the method.
        """
        if not (self.lr > 0.0 and math.isfinite(self.lr)):
            raise ValueError(f"lr={self.lr} is not positive and finite: give a learning rate such as 1.0")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} is not known: give one of {', '.join(OPTIMIZERS)}")
        parameters = {_option(self.method, name): value for name, value in self._parameters().items()}
        return replace(super().resolved(records), model=self.model_name, options=MethodOptions(**parameters))

    def to_json(self) -> str:
        """JSON text with all fields that are not None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        for group in GROUPS:
            values[group] = {name: value for name, value in values[group].items() if value is not None}
        return json.dumps(values, indent=2) + "\n"

    def digest(self) -> str:
        """A hash of the spec."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    @staticmethod
    def from_json(text: str) -> RunSpec:
        """The spec that `to_json` wrote.

        >>> RunSpec.from_json(RunSpec(method="dpsgd", seed=1).to_json()) == RunSpec(method="dpsgd", seed=1)
        True
        """
        values: dict[str, Any] = json.loads(text)
        for group, kind in GROUPS.items():
            given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.get(group, {}).items()}
            _refuse_unknown(kind, given)
            values[group] = kind(**given)
        _refuse_unknown(RunSpec, values)
        if "part" in values:
            values["part"] = tuple(values["part"])
        return RunSpec(**values)

    def _parameters(self) -> dict[str, Any]:
        """Keyword arguments of the method's function, with defaults filled in."""
        accepted = _accepted(self.method)
        by_option = {_option(self.method, name): name for name in accepted}
        given = {name: value for name, value in vars(self.options).items() if value is not None}
        for name in given:
            if name not in by_option:
                takes = ", ".join(f"`{option}`" for option in by_option) or "no options"
                raise ValueError(f"`{name}` is not an option of {self.method}, which takes {takes}")
        defaults = {name: parameter.default for name, parameter in accepted.items()}
        return defaults | {by_option[name]: value for name, value in given.items()}


GROUPS: dict[str, type] = {"options": MethodOptions, "own": OwnData, "pretrained": PretrainedOptions}


def comparison(setting: Setting, methods: Sequence[str], *, lrs: Sequence[float] = (), seeds: int = 1) -> list[RunSpec]:
    """One run per seed and method. Each gets those of the setting's method options that it takes.

    Args:
        setting: What all runs have in common.
        methods: The methods.
        lrs: The learning rate of each method; none for that of the setting.
        seeds: The number of seeds, counted from the setting's.

    Raises:
        ValueError: If a method is given twice, an option is not one of any method, or lrs or seeds do not fit.

    >>> [spec.method for spec in comparison(Setting(seed=0), ["dpsgd", "dp-pmlf"])]
    ['dpsgd', 'dp-pmlf']
    """
    if not methods or len(set(methods)) < len(methods):
        raise ValueError(f"methods={' '.join(methods)!r} is not a list of different methods: give each method once")
    if lrs and len(lrs) != len(methods):
        raise ValueError(f"lrs={' '.join(map(str, lrs))!r} for {len(methods)} methods: give one learning rate for each")
    if seeds < 1 or (seeds > 1 and setting.seed is None):
        raise ValueError(f"seeds={seeds} counted from seed={setting.seed}: give 1 or more, and a first seed")
    takes = {method: {_option(method, name) for name in _accepted(method)} for method in methods}
    given = {name: value for name, value in vars(setting.options).items() if value is not None}
    for name in given:
        if not any(name in options for options in takes.values()):
            raise ValueError(f"`{name}` is not an option of {', '.join(methods)}: leave it out")

    def spec(place: int, number: int) -> RunSpec:
        method, seed = methods[place], None if setting.seed is None else setting.seed + number
        options = MethodOptions(**{name: value for name, value in given.items() if name in takes[method]})
        own = {"method": method, "options": options, "lr": lrs[place] if lrs else setting.lr, "seed": seed}
        return RunSpec(**{**vars(setting), **own})

    return [spec(place, number) for number in range(seeds) for place in range(len(methods))]


def chosen_by_trials(trials: int) -> str:
    """What a certificate says of trials on the same records."""
    return f"tuning: the settings were chosen by {trials} trials on the same records"


def default_delta(records: int) -> float:
    """1e-5 if that is below 1/n, else n^-1.1."""
    return USUAL_DELTA if records * USUAL_DELTA < 1 else records**-1.1


def flag(field_name: str) -> str:
    """The command-line flag of a field."""
    return "--" + field_name.replace("_", "-")


def _option(method: str, parameter: str) -> str:
    """The option of a method's parameter. InnerOuter's `beta` has another name than DP-PMLF's, `outer_momentum`."""
    return "outer_momentum" if (method, parameter) == ("inner-outer", "beta") else parameter


def _method_function(name: str) -> Callable[..., Method]:
    from pmlf import methods

    methods.resolve(name)  # raises for an unknown name
    return methods.PRESETS[name]


def _accepted(method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_method_function(method)).parameters


def _refuse_unknown(of: type, values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - {known.name for known in fields(of)})
    if unknown:
        raise ValueError(f"the spec has an unknown field {unknown[0]!r}: was it written by another version of pmlf?")
