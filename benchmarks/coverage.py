"""How many models that people train are taken, and how: `pmlf` and Opacus against float64 autograd, one sample a time.

    PYTHONPATH=tests python benchmarks/coverage.py --out docs/results/coverage.json [--only BERT Swin]

The models are those of tests/real_models.py, and of timm, vit-pytorch and x-transformers where installed. Every
model has default settings: its samples are proven independent and watched. Verdicts of `pmlf`: the way by which it is
right, "layers" or "operations" (both by `gradients="ghost"`), "vmap" or "one-by-one" (where the ways before refuse it);
"refused" (by all ways), "wrong", "error" (raised what is not a refusal). Of Opacus (hooks): "right", "wrong", "error".
The clipped sums of one release are compared, at 1e-4. A model that is in the file already is not run again; every row
names the code that it was measured with.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf import PrivateStep, fix_model, machine
from pmlf.basics.batches import batch_size, select, to_dtype
from pmlf.engine.plan import GRADIENTS, Gradients
from tiny_transformers import sweep

Built = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]
_AGREEMENT = 1e-4
_IMAGES = ("resnet18", "convnext_atto", "vit_tiny_patch16_224", "mixer_s32_224", "densenet121", "efficientnet_b0")


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def next_words(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).mT, batch[1], reduction="none").mean(1)


def zoo() -> dict[str, Callable[[], Built]]:
    """The models of the tests; tests/ must be on PYTHONPATH."""
    found: dict[str, Callable[[], Built]] = {}
    for name, real in importlib.import_module("real_models").REAL.items():
        found[name] = real.made
    return found


def others() -> dict[str, Callable[[], Built]]:
    """Models of packages that are installed."""
    found: dict[str, Callable[[], Built]] = {}
    if importlib.util.find_spec("timm") is not None:
        for name in _IMAGES:
            found[f"timm {name}"] = lambda name=name: _timm(name)  # type: ignore[misc]
    if importlib.util.find_spec("vit_pytorch") is not None:
        found["vit-pytorch ViT"] = _vit_pytorch
    if importlib.util.find_spec("x_transformers") is not None:
        found["x-transformers decoder"] = _x_transformers
    return found


def _timm(name: str) -> Built:
    create = importlib.import_module("timm").create_model
    model = fix_model(create(name, num_classes=3))
    return model, classify, (torch.randn(3, 3, 224, 224), torch.randint(3, (3,)))


def _vit_pytorch() -> Built:
    made = importlib.import_module("vit_pytorch").ViT
    model = made(image_size=16, patch_size=8, num_classes=3, dim=16, depth=2, heads=2, mlp_dim=20)
    return model, classify, (torch.randn(3, 3, 16, 16), torch.randint(3, (3,)))


def _x_transformers() -> Built:
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=16, depth=2, heads=2)
    model = package.TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=layers)
    return model, next_words, (torch.randint(30, (3, 8)), torch.randint(30, (3, 8)))


def reference(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
    """(samples, parameters): every sample's gradient in float64."""
    exact, wide = copy.deepcopy(model).double(), to_dtype(batch, torch.float64)
    use_eager = getattr(exact, "set_experts_implementation", None)
    if use_eager is not None:
        use_eager("eager")  # grouped products have no float64
    parameters = [p for p in exact.parameters() if p.requires_grad]
    rows = []
    for i in range(batch_size(batch)):
        loss = loss_fn(exact, select(wide, slice(i, i + 1))).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def ours(built: Built, clip_norm: float, gradients: Gradients) -> tuple[Tensor, str]:
    """The clipped sum, and the way to it."""
    model, loss_fn, batch = built
    step = PrivateStep(
        model, loss_fn, method="dpsgd", clip_norm=clip_norm, noise_multiplier=0.0, expected_batch_size=1.0,
        gradients=gradients,
    )  # fmt: skip
    step.accumulate(batch)
    step.release()
    by_rules = "operations" if step._plan.learned.by_operations else "layers"
    found = torch.cat([p.grad.flatten().double() for p in step.trained if p.grad is not None])
    return found, by_rules if gradients == "ghost" else gradients


def opacus(built: Built, clip_norm: float) -> Tensor:
    from opacus.grad_sample import GradSampleModule

    model, loss_fn, batch = built
    module = GradSampleModule(model, strict=False)
    loss_fn(module, batch).mean().backward()
    rows = torch.cat(
        [_grad_sample(p, batch_size(batch)).flatten(1).double() for p in model.parameters() if p.requires_grad], 1
    )
    return ((clip_norm / rows.norm(dim=1)).clamp(max=1.0)[:, None] * rows).sum(0)


def _grad_sample(parameter: nn.Parameter, samples: int) -> Tensor:
    found = getattr(parameter, "grad_sample", None)
    return torch.zeros(samples, *parameter.shape) if found is None else found


def verdicts(build: Callable[[], Built], *, beside_opacus: bool) -> dict[str, str]:
    """What becomes of one model."""

    def make() -> Built:
        torch.manual_seed(0)  # the same one each time
        return build()

    model, loss_fn, batch = make()
    v = reference(model, loss_fn, batch)
    clip_norm = float(v.norm(dim=1).median())
    wanted = ((clip_norm / v.norm(dim=1)).clamp(max=1.0)[:, None] * v).sum(0)

    def right(found: Tensor) -> bool:
        return found.shape == wanted.shape and float((found - wanted).norm() / wanted.norm()) <= _AGREEMENT

    row = _taken(make, clip_norm, right)
    if beside_opacus:
        try:
            row["opacus"] = "right" if right(opacus(make(), clip_norm)) else "wrong"
        except Exception as error:
            row["opacus"], row["opacus reason"] = "error", _said(error)
    return row


def _taken(make: Callable[[], Built], clip_norm: float, right: Callable[[Tensor], bool]) -> dict[str, str]:
    """By which way a model is taken first, and why not by those before it."""
    row: dict[str, str] = {}
    for gradients in GRADIENTS:
        try:
            found, way = ours(make(), clip_norm, gradients)
        except ValueError as error:
            row[gradients] = _said(error)
        except Exception as error:
            return {**row, gradients: _said(error), "pmlf": "error"}
        else:
            return {**row, "pmlf": way if right(found) else "wrong"}
    return {**row, "pmlf": "refused"}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="the table, a JSON file; what is in it already is kept")
    parser.add_argument("--only", nargs="+", default=[], help="models whose name contains one of these")
    parser.add_argument("--sweep", action="store_true", help="the models of tiny_transformers.py, and no others")
    parser.add_argument("--without-opacus", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    out: Path | None = arguments.out
    table: dict[str, dict[str, str]] = json.loads(out.read_text())["models"] if out and out.exists() else {}
    for name, make in (sweep() if arguments.sweep else {**zoo(), **others()}).items():
        if name in table or (arguments.only and not any(part in name for part in arguments.only)):
            continue
        try:
            table[name] = verdicts(make, beside_opacus=not arguments.without_opacus)
        except Exception as error:  # a model that does not run here, or not in float64
            table[name] = {"pmlf": "not run", "reason": _said(error)}
        row = table[name]
        row["code"] = machine.code()
        print(f"{name:32}{row['pmlf']:12}{row.get('opacus', ''):8}{row.get('ghost', '')[:80]}", flush=True)
        if out is not None:
            found = {"versions": versions(), "counts": counts(table), "models": table}
            out.write_text(json.dumps(found, indent=1) + "\n")
    print(counts(table))


def versions() -> dict[str, str]:
    """Of the packages that the models come from, where they are installed."""
    packages = ("torch", "transformers", "peft", "opacus", "timm", "vit-pytorch", "x-transformers")
    return {name: version(name) for name in packages if importlib.util.find_spec(name.replace("-", "_")) is not None}


def counts(table: dict[str, dict[str, str]]) -> dict[str, dict[str, int]]:
    """How many models have each verdict."""
    return {who: dict(Counter(row[who] for row in table.values() if who in row)) for who in ("pmlf", "opacus")}


if __name__ == "__main__":
    main()
