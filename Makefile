# The environment lives in .venv and is made again only when it is missing or when its description changes.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.DELETE_ON_ERROR:
.PHONY: help demo test clean

help:
	@echo "make demo    compare the methods on the small real dataset inside the package"
	@echo "make test    lint, type-check and test"
	@echo "make clean   remove the environment, caches and build products"

demo: .make/runtime
	$(BIN)/pmlf compare

test: .make/dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache --no-logo > .make/imports.txt || { cat .make/imports.txt; exit 1; }
	$(BIN)/mypy
	$(BIN)/pytest -n 2

clean:
	rm -rf .venv .make build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv

# torch first and alone: its exact version, whichever build of it is at hand, is then what the rest is resolved with
.make/torch: .venv/pyvenv.cfg constraints.txt
	$(PIP_INSTALL) $(TORCH)
	@mkdir -p .make && touch $@

.make/runtime: .make/torch pyproject.toml
	$(PIP_INSTALL) -e .
	@touch $@

.make/dev: .make/torch pyproject.toml
	$(PIP_INSTALL) -e '.[dev]'
	@touch .make/runtime $@
