# make demo and make test set up everything they need in .venv on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= tiny
SEEDS ?= 3
STAMP := $(VENV)/.installed

.PHONY: demo test unit lint gates bench memory chaos install clean
.DELETE_ON_ERROR:

install: $(STAMP)

# CPU builds of torch are small; constraints.txt names the one that CI runs.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), which takes some minutes the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/tinkerbus demo --model $(MODEL)

test: $(STAMP)
	@$(BIN)/python -m pytest

unit: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not e2e"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

gates: $(STAMP)
	@$(BIN)/python -W ignore -m scripts.layout_table

bench: $(STAMP)
	@$(BIN)/tinkerbus bench

memory: $(STAMP)
	@$(BIN)/python -W ignore -m benchmarks.memory

chaos: $(STAMP)
	@$(BIN)/python -W ignore -m tests.chaos --seeds $(SEEDS)

clean:
	rm -rf $(VENV) demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
