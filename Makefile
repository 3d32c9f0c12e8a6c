# Tests run in two processes of one thread each.
# The environment is in .venv. It is rebuilt when it is missing or when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.DELETE_ON_ERROR:
.PHONY: help demo test quick docs clean

help:
	@echo "make demo    compare DPSGD, DP-PMLF and shaped DP-PMLF on the small real dataset inside the package"
	@echo "make test    lint, check types and import layers, run every test"
	@echo "make quick   the tests that take less than about half a second each"
	@echo "make docs    build the documentation site in site/"
	@echo "make clean   remove the environment, caches and build products"

demo: .make/runtime
	$(BIN)/python benchmarks/demo.py

test: .make/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo > .make/imports.txt || { cat .make/imports.txt; exit 1; }
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

quick: .make/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

docs: .make/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .make build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts benchmarks dev examples -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv

# torch comes first and alone: pip then resolves the rest against the exact build of torch that is available.
.make/torch: .venv/pyvenv.cfg constraints.txt
	$(PIP_INSTALL) $(TORCH)
	@mkdir -p .make && touch $@

.make/runtime: .make/torch pyproject.toml
	$(PIP_INSTALL) -e .
	@touch $@

.make/dev: .make/torch pyproject.toml
	$(PIP_INSTALL) -e '.[dev]'
	@touch .make/runtime $@

.make/docs: .make/torch pyproject.toml
	$(PIP_INSTALL) -e '.[docs]'
	@touch .make/runtime $@
