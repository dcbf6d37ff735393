# `make demo` and `make test` need only Python 3.11+ and a package index. TORCH names the build to install:
# a release by its number, so that no newer one is pulled in.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# GSM8K for the demo: a folder of local data files, if there is one.
LMEVAL_PRUNE_DATA ?= $(abspath $(wildcard ../shared/data))

.PHONY: demo test test-long lint format bench scoring-report clean

demo: $(VENV)/.installed
	LMEVAL_PRUNE_DATA="$(LMEVAL_PRUNE_DATA)" $(BIN)/lmeval-prune demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/unpruned_overhead.py

scoring-report: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scoring_quality.py

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml lmeval_prune/plugin/bridge.pth
	$(BIN)/pip install -q -e .
	$(BIN)/lmeval-prune models --get smollm2-135m
	$(BIN)/lmeval-prune models --get all-minilm-l6-v2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist out
