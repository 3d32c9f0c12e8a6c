"""The paper's tables and figures as lists of runs. Nothing here trains.

Profiles differ in their panels: `paper` is the paper's setting, `cpu` a reduced setting, the same for every method, and
`smoke` a test of a few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pmlf.experiments.options import OwnData
from pmlf.experiments.spec import MethodOptions, Setting
from pmlf.reproduction import stand_ins
from pmlf.reproduction.artifacts import Artifact, Panel, Variant

PAPER_RATE = 0.5

_SMALL = "fashion-mnist-small"
SHAPED_LABEL = "DP-PMLF (shaped noise)"  # the row that the paper does not have
_SHAPED = "dp-pmlf-shaped"

RECORDS = {
    **{"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000},
    **{"sst2": 67_349, "qnli": 104_743, "qqp": 363_846, "mnli": 392_702},
}
_EPOCHS = {
    "mnist": 25,
    "fashion-mnist": 25,
    "cifar10": 50,
    "cifar100": 50,
    "sst2": 20,
    "qnli": 20,
    "qqp": 20,
    "mnli": 20,
}
# (records, epochs): E B / n is as in the paper, so the noise multiplier is nearly the same, with fewer steps
_CPU = {
    **{"mnist": (12_000, 5), "fashion-mnist": (12_000, 5), "cifar10": (20_000, 20), "cifar100": (20_000, 20)},
}


def artifact(name: str) -> Artifact:
    """The artifact with this name. Raises ValueError if there is none."""
    if name not in BY_NAME:
        raise ValueError(f"unknown artifact {name!r}: give one of {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _filter(dataset: str) -> MethodOptions:
    """The paper's filter coefficients for a dataset. It gives none for texts; those of MNIST are used."""
    b = (0.15, -0.05) if dataset.startswith("cifar") else (0.1,)
    return MethodOptions(a=(-0.9,), b=b)


def _shaped(dataset: str) -> Variant:
    """DP-PMLF with shaped noise, which the paper does not have: a row of ours. Four bands suit epsilons from 1 to 4."""
    bands = 2 if dataset == _SMALL else 4  # the 16 records of a smoke trial are two batches
    options = replace(_filter(dataset), bands=bands)
    return Variant(label=SHAPED_LABEL, method=_SHAPED, options=options)


def method_variants(dataset: str, *names: str) -> tuple[Variant, ...]:
    """The paper's four methods with its parameters for a dataset, and ours with shaped noise; or those named."""
    low_pass = _filter(dataset)
    every = (
        Variant(label="DPSGD", method="dpsgd"),
        Variant(label="LP-DPSGD", method="lp-dpsgd", options=low_pass),
        Variant(label="InnerOuter", method="inner-outer"),
        Variant(label="DP-PMLF", method="dp-pmlf", options=low_pass),
        _shaped(dataset),
    )
    return tuple(variant for variant in every if not names or variant.method in names)


def ablation(dataset: str) -> tuple[Variant, ...]:
    """DP-PMLF, without one of its two parts, and with shaped noise in addition."""
    low_pass = _filter(dataset)
    return (
        Variant(label="DP-PMLF", method="dp-pmlf", options=low_pass),
        Variant(label="DP-PMLF (w/o PM)", method="dp-pmlf-without-pm", options=low_pass),
        Variant(label="DP-PMLF (w/o LF)", method="dp-pmlf-without-lf"),
        _shaped(dataset),
    )


# Figures 6 and 7 vary one parameter of DP-PMLF and compare no methods, so they have no row with shaped noise.
def betas(dataset: str) -> tuple[Variant, ...]:
    """DP-PMLF with the momentum weights of Figure 6."""
    low_pass = _filter(dataset)
    return tuple(
        Variant(
            label=f"beta = {beta:g}", method="dp-pmlf", options=replace(low_pass, **_not_default(beta=beta)), value=beta
        )
        for beta in (0.1, 0.3, 0.5, 0.7, 0.9)
    )


def lengths(dataset: str) -> tuple[Variant, ...]:
    """DP-PMLF with the momentum lengths of Figure 7."""
    low_pass = _filter(dataset)
    return tuple(
        Variant(label=f"k = {k}", method="dp-pmlf", options=replace(low_pass, **_not_default(k=k)), value=k)
        for k in (2, 3, 4, 5, 6)
    )


def _not_default(**changed: float) -> dict[str, Any]:
    """The parameters that are not at their default, so that a default run has one key and is not repeated."""
    defaults = {"beta": 0.1, "k": 2}
    return {name: value for name, value in changed.items() if value != defaults[name]}


FILTERS: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = (
    ((-0.6,), (0.4,)),
    ((-0.6,), (0.2, 0.2)),
    ((-0.6,), (0.5, -0.1)),
    ((-0.9,), (0.1,)),
    ((-0.9,), (0.05, 0.05)),
    ((-0.9,), (0.15, -0.05)),
    ((-0.7, -0.2), (0.05, 0.05)),
    ((), (1.0,)),
)


def filter_label(a: Sequence[float], b: Sequence[float]) -> str:
    """The paper's notation of a filter.

    >>> filter_label((-0.9,), (0.15, -0.05))
    'a {-0.9}, b {0.15, -0.05}'
    """
    listed = ["{" + ", ".join(f"{value:g}" for value in values) + "}" for values in (a, b)]
    return f"a {listed[0]}, b {listed[1]}"


def filter_variants(dataset: str) -> tuple[Variant, ...]:
    """DP-PMLF with the eight filters of Table 4, and with shaped noise for the usual one."""
    white = (Variant(label=filter_label(a, b), method="dp-pmlf", options=MethodOptions(a=a, b=b)) for a, b in FILTERS)
    return (*white, _shaped(dataset))


_RATES = (0.05, 0.17, 0.5, 1.5, 4.5)  # times the filter's gain


def _paper(
    dataset: str, model: str, epsilons: Sequence[float], variants: tuple[Variant, ...], epochs: float | None = None
) -> Panel:
    """The paper's setting: eta 0.5, B 1000, C 1, delta 1/n, five seeds."""
    setting = Setting(
        dataset=dataset,
        model=model,
        lr=PAPER_RATE,
        batch_size=1000,
        epochs=_EPOCHS[dataset] if epochs is None else epochs,
        delta=1 / RECORDS[dataset],
    )
    return Panel(setting=setting, epsilons=tuple(epsilons), variants=variants, seeds=5, rates=_RATES)


def _cpu(
    dataset: str,
    model: str,
    epsilons: Sequence[float],
    variants: tuple[Variant, ...],
    epochs: float | None = None,
    seeds: int = 2,
) -> Panel:
    """Fewer records and epochs; delta below 1/n."""
    records, usual = _CPU[dataset]
    epochs = usual if epochs is None else epochs
    setting = Setting(dataset=dataset, records=records, model=model, lr=PAPER_RATE, batch_size=1000, epochs=epochs)
    return Panel(setting=setting, epsilons=tuple(epsilons), variants=variants, seeds=seeds, rates=_RATES)


def _small_images(model: str, epsilons: Sequence[float]) -> Panel:
    """A panel for models that are slow on a CPU: a smaller one, fewer and smaller images, E B / n as in the paper."""
    setting = Setting(
        dataset="mnist",
        records=2_400,
        model=model,
        lr=PAPER_RATE,
        batch_size=200,
        epochs=5,
        own=OwnData(image_size=16),
    )
    return Panel(setting=setting, epsilons=tuple(epsilons), variants=method_variants("mnist"), seeds=5, rates=_RATES)


def _small_texts(epsilons: Sequence[float]) -> Panel:
    """A linear model on MiniLM's embeddings in RoBERTa's place, on fewer texts, E B / n as in the paper."""
    setting = Setting(
        dataset=stand_ins.EMBEDDINGS,
        records=stand_ins.EMBEDDED,
        model="linear",
        lr=PAPER_RATE,
        batch_size=1000,
        epochs=6,
    )
    return Panel(setting=setting, epsilons=tuple(epsilons), variants=method_variants("sst2"), seeds=5, rates=_RATES)


def _linear(epsilons: Sequence[float]) -> Panel:
    """Table 4 with a linear model, as in the published code: fast enough for the paper's setting on a CPU."""
    panel = _paper("mnist", "linear", epsilons, filter_variants("mnist"))
    return replace(panel, setting=replace(panel.setting, delta=None))


def _smoke(model: str, epsilons: Sequence[float], variants: tuple[Variant, ...], seeds: int = 1) -> Panel:
    """A few steps on packaged images: a test that everything runs. Its accuracies mean nothing."""
    setting = Setting(model=model, records=18, batch_size=8, steps=4, lr=PAPER_RATE)
    return Panel(setting=setting, epsilons=tuple(epsilons), variants=variants, seeds=seeds, rates=(0.17, 0.5))


def _smoke_texts(epsilons: Sequence[float], variants: tuple[Variant, ...]) -> Panel:
    panel = _smoke(stand_ins.TEXT_MODEL, epsilons, variants)
    return replace(panel, setting=replace(panel.setting, dataset=stand_ins.TEXTS))


_IMAGES = ("mnist", "fashion-mnist", "cifar10", "cifar100")
_TEXTS = ("mnli", "qnli", "qqp", "sst2")
_TEXT_MODEL = "FacebookAI/roberta-base"
_ONE_TO_EIGHT = tuple(float(epsilon) for epsilon in range(1, 9))
_EVEN = (2.0, 4.0, 6.0, 8.0)

ARTIFACTS = (
    Artifact(
        name="figure-1",
        title="Where LP-DPSGD and InnerOuter fall behind DPSGD: CIFAR-10, CNN-5, 100 epochs",
        axis="epoch",
        panels={
            "paper": (
                _paper("cifar10", "cnn5", [8.0], method_variants("cifar10", "dpsgd", "lp-dpsgd", _SHAPED), epochs=100),
                _paper(
                    "cifar10", "cnn5", [1.0], method_variants("cifar10", "dpsgd", "inner-outer", _SHAPED), epochs=100
                ),
            ),
            "cpu": (
                _cpu("cifar10", "cnn5", [8.0], method_variants("cifar10", "dpsgd", "lp-dpsgd", _SHAPED), epochs=10),
                _cpu("cifar10", "cnn5", [1.0], method_variants("cifar10", "dpsgd", "inner-outer", _SHAPED)),
            ),
            "smoke": (
                _smoke("linear", [8.0], method_variants(_SMALL, "dpsgd", "lp-dpsgd", _SHAPED)),
                _smoke("linear", [1.0], method_variants(_SMALL, "dpsgd", "inner-outer", _SHAPED)),
            ),
        },
    ),
    Artifact(
        name="figure-2",
        title="Three models on CIFAR-10 at epsilon 1",
        axis="epoch",
        panels={
            "paper": tuple(
                _paper("cifar10", m, [1.0], method_variants("cifar10")) for m in ("cnn5", "resnet18", "vit")
            ),
            "cpu": (_cpu("cifar10", "cnn5", [1.0], method_variants("cifar10")),),
            "smoke": tuple(
                _smoke(m, [1.0], method_variants(_SMALL, "dp-pmlf")) for m in ("cnn5", "resnet18-narrow", "vit-mini")
            ),
        },
    ),
    Artifact(
        name="figure-3",
        title="Ablation: DP-PMLF without per-sample momentum, and without the low-pass filter",
        axis="epsilon",
        panels={
            "paper": tuple(
                _paper(d, m, _ONE_TO_EIGHT, ablation(d)) for d in ("mnist", "cifar10") for m in ("cnn5", "resnet18")
            ),
            "cpu": (_cpu("mnist", "cnn5", [1.0, 8.0], ablation("mnist")),),
            "smoke": (_smoke("linear", [1.0, 8.0], ablation(_SMALL), seeds=2),),
        },
    ),
    Artifact(
        name="figure-4",
        title="CNN-5 on four datasets, epsilon from 1 to 8",
        axis="epsilon",
        panels={
            "paper": tuple(_paper(d, "cnn5", _ONE_TO_EIGHT, method_variants(d)) for d in _IMAGES),
            "cpu": (
                _cpu("cifar10", "cnn5", [1.0], method_variants("cifar10")),
                _cpu("cifar10", "cnn5", [8.0], method_variants("cifar10"), epochs=10),
            ),
            "smoke": (_smoke("linear", [1.0, 8.0], method_variants(_SMALL)),),
        },
    ),
    Artifact(
        name="figure-5",
        title="ResNet-18 over 100 epochs at epsilon 1",
        axis="epoch",
        panels={
            "paper": tuple(
                _paper(d, "resnet18", [1.0], method_variants(d), epochs=100)
                for d in ("mnist", "fashion-mnist", "cifar100")
            ),
            "cpu": (_small_images("resnet18-narrow", [1.0]),),
            "smoke": (_smoke("resnet18-narrow", [1.0], method_variants(_SMALL, "dp-pmlf")),),
        },
    ),
    Artifact(
        name="figure-6",
        title="The momentum weight beta",
        axis="beta",
        panels={
            "paper": tuple(_paper(d, "cnn5", _EVEN, betas(d)) for d in ("mnist", "cifar10")),
            "cpu": (_cpu("mnist", "cnn5", [2.0, 8.0], betas("mnist")),),
            "smoke": (_smoke("linear", [8.0], betas(_SMALL)),),
        },
    ),
    Artifact(
        name="figure-7",
        title="The momentum length k",
        axis="k",
        panels={
            "paper": tuple(_paper(d, "cnn5", _EVEN, lengths(d)) for d in ("mnist", "cifar10")),
            "cpu": (_cpu("mnist", "cnn5", [2.0, 8.0], lengths("mnist")),),
            "smoke": (_smoke("linear", [8.0], lengths(_SMALL)),),
        },
    ),
    Artifact(
        name="table-1",
        title="ViT on four datasets",
        axis="epsilon",
        panels={
            "paper": tuple(_paper(d, "vit", [1.0, 8.0], method_variants(d)) for d in _IMAGES),
            "cpu": (_small_images("vit-mini", [1.0, 8.0]),),
            "smoke": (_smoke("vit-mini", [1.0], method_variants(_SMALL, "dp-pmlf")),),
        },
    ),
    Artifact(
        name="table-2",
        title="RoBERTa-base fine-tuned on GLUE",
        axis="epsilon",
        panels={
            "paper": tuple(_paper(d, _TEXT_MODEL, [1.0, 8.0], method_variants(d)) for d in _TEXTS),
            "cpu": (_small_texts([1.0, 8.0]),),
            "smoke": (_smoke_texts([1.0], method_variants(_SMALL)),),
        },
    ),
    Artifact(
        name="table-3",
        title="ResNet-18 on four datasets",
        axis="epsilon",
        panels={
            "paper": tuple(_paper(d, "resnet18", [1.0, 8.0], method_variants(d)) for d in _IMAGES),
            "cpu": (_small_images("resnet18-narrow", [1.0, 8.0]),),
            "smoke": (_smoke("resnet18-narrow", [1.0], method_variants(_SMALL, "dp-pmlf")),),
        },
    ),
    Artifact(
        name="table-4",
        title="Eight low-pass filters: a linear model, as in the published code, and CNN-5",
        axis="epsilon",
        panels={
            "paper": (
                _paper("mnist", "linear", _EVEN, filter_variants("mnist")),
                *(_paper(d, "cnn5", _EVEN, filter_variants(d)) for d in ("mnist", "cifar10")),
            ),
            "cpu": (_linear(_EVEN), _cpu("mnist", "cnn5", [2.0, 8.0], filter_variants("mnist"))),
            "smoke": (_smoke("linear", [8.0], filter_variants(_SMALL)),),
        },
    ),
)
BY_NAME = {one.name: one for one in ARTIFACTS}
