"""The package: its public names, its size rules, and a wheel that works outside the source tree."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pmlf
from pmlf.basics import version

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "pmlf"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 60


# --- public names

CONTRACT = [  # the paths that users rely on
    "pmlf.PrivateStep.accumulate",
    "pmlf.PrivateStep.release",
    "pmlf.PrivateStep.releases",
    "pmlf.PrivateStep.state_dict",
    "pmlf.PrivateStep.load_state_dict",
    "pmlf.PrivateRun.batches",
    "pmlf.PrivateRun.step",
    "pmlf.PrivateRun.epsilon",
    "pmlf.PrivateRun.certificate",
    "pmlf.PrivateRun.steps_done",
    "pmlf.PrivateRun.steps_per_epoch",
    "pmlf.PrivateRun.state_dict",
    "pmlf.PrivateRun.load_state_dict",
    "pmlf.make_private",
    "pmlf.check",
    "pmlf.fix_model",
    "pmlf.load",
    "pmlf.evaluate",
    "pmlf.Ledger.spend",
    "pmlf.Augmentation",
    "pmlf.accounting.epsilon",
    "pmlf.accounting.delta",
    "pmlf.accounting.noise_multiplier",
    "pmlf.audit",
    "pmlf.checkpoint.save",
    "pmlf.checkpoint.load",
    "pmlf.filters.LowPass",
    "pmlf.machine.keep_freed_memory",
    "pmlf.methods.Method",
    "pmlf.methods.NAMES",
    "pmlf.methods.dpsgd",
    "pmlf.methods.lp_dpsgd",
    "pmlf.methods.inner_outer",
    "pmlf.methods.dp_pmlf",
    "pmlf.methods.disk",
    "pmlf.sampling.PoissonBatches",
    "pmlf.shapes.NoiseShape",
    "pmlf.shapes.banded",
    "pmlf.shapes.best",
    "pmlf.theory.rho_squared",
    "pmlf.theory.impulse_response",
    "pmlf.theory.noise_gain",
    "pmlf.theory.gamma_dp",
    "pmlf.theory.gamma_sgd",
]
MODULES = ("accounting", "audit", "checkpoint", "filters", "machine", "methods", "sampling", "shapes", "theory")


@pytest.mark.parametrize("path", CONTRACT)
def test_a_public_name_is_at_its_path(path: str) -> None:
    found: Any = pmlf
    for name in path.split(".")[1:]:
        found = getattr(found, name)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_can_be_imported_by_its_path(name: str) -> None:
    assert importlib.import_module(f"pmlf.{name}") is getattr(pmlf, name)


def test_every_exported_name_exists() -> None:
    assert dir(pmlf) == sorted(pmlf.__all__)
    for name in pmlf.__all__:
        assert getattr(pmlf, name) is not None
    with pytest.raises(AttributeError, match="'pmlf' has no attribute 'epsilon'"):
        _ = pmlf.epsilon


def test_type_checkers_and_the_documentation_find_every_exported_name() -> None:
    tree = ast.parse(Path(pmlf.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {alias.name for node in imports for alias in node.names} | {"__version__"}
    assert found >= set(pmlf.__all__)


def test_importing_the_package_imports_neither_torch_nor_scipy() -> None:
    program = "import sys, pmlf; print({'torch', 'scipy', 'dp_accounting', 'tyro'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- one version


def test_the_version_is_written_once() -> None:
    assert pmlf.__version__ == PROJECT["version"]
    assert version.of_source_tree(ROOT) == PROJECT["version"]
    assert version.of_source_tree(ROOT / "src") == "unknown"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == PROJECT["version"]
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


# --- documents of the repository


def test_files_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)/`.* \| `(\w+\.py)` \|$", text, flags=re.MULTILINE)
    assert len(rows) >= 10
    paths = {SOURCE / package / file for package, file in rows}
    paths |= {ROOT / name for name in re.findall(r"`((?:src|tests|docs|dev)/[\w/.-]+)`", text)}
    paths |= {SOURCE / name for name in re.findall(r"`((?:engine|mechanism|evidence|run|basics)/[\w/.]*)`", text)}
    assert sorted(str(path) for path in paths if not path.exists()) == []


def test_every_package_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}/`" not in text} == set()


def test_workflow_and_hooks_run_what_make_test_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert {"run": "make test"} in workflow["jobs"]["test"]["steps"]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["os"] == ["ubuntu-latest", "macos-latest"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in hooks["repos"]} == {"local"}


# --- size and names


def sources() -> Iterator[tuple[str, str]]:
    """Every source file: its path inside the package and its text."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), path.read_text()


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without its signature and docstring: `make_private` has a line for each argument."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1


def test_no_file_is_long() -> None:
    lengths = {path: text.count("\n") for path, text in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE} == {}


@pytest.mark.slow
def test_no_function_is_long() -> None:
    long = {
        f"{path}: {node.name}": length(node)
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and length(node) > MOST_LINES_OF_A_FUNCTION
    }
    assert long == {}


@pytest.mark.slow
def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves files in the tree that it builds."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(SOURCE, copy / "src" / "pmlf", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel contains."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def pip(command: str, *arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *arguments], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """What a Python process prints that finds the installed package first, in a folder outside the source tree."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*.py")}
    assets = {str(path.relative_to(SOURCE.parent)) for path in (SOURCE / "assets").iterdir()}
    assert len(assets) > 4 and (files | assets | {"pmlf/py.typed"}) - inside == set()
    assert {name.split("/")[0] for name in inside} == {"pmlf", f"dp_pmlf-{PROJECT['version']}.dist-info"}
    assert not any("__pycache__" in name for name in inside)


@pytest.mark.slow
def test_the_installed_wheel_accounts_and_trains_outside_the_source_tree(installed: Path, tmp_path: Path) -> None:
    program = str(installed / "bin" / "pmlf")
    where = run(installed, tmp_path, "-c", "import pmlf; print(pmlf.__file__, pmlf.__version__)")
    assert where == f"{installed / 'pmlf' / '__init__.py'} {PROJECT['version']}\n"
    assert run(installed, tmp_path, program, "--version") == f"pmlf {PROJECT['version']}\n"
    mechanism = ("--records", "60000", "--batch-size", "1000", "--epochs", "25", "--epsilon", "2", "--delta", "1e-5")
    account = json.loads(run(installed, tmp_path, program, "account", *mechanism, "--json"))
    assert account["steps"] == 1500 and 1.99 < account["epsilon"] <= 2
    quick = ("--model", "linear", "--steps", "2", "--batch-size", "20", "--epsilon", "2", "--out", "run", "--json")
    trained = json.loads(run(installed, tmp_path, program, "train", *quick))
    assert trained["steps"] == 2 and (tmp_path / "run" / "certificate.html").exists()
