# Two commands are enough on a fresh clone: `make demo` and `make test`. Each sets up what it needs.
#
#   PYTHON=python3.12   the interpreter for .venv (3.11 to 3.13)
#   EXTRA=cuda          the build of vLLM: cpu (default) or cuda

PYTHON ?= python3
EXTRA  ?= cpu
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)

.DEFAULT_GOAL := help
.PHONY: help setup model demo bench bench-quick eval-quick test test-slow lint format clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv and install OasisKV, vLLM and the tools in it

$(STAMP): pyproject.toml $(wildcard oasiskv/core/native/*.cpp oasiskv/core/native/*.h)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
		"OasisKV needs Python 3.11 to 3.13, found %d.%d: make PYTHON=python3.12 ..." % v)'
	@echo "Installing OasisKV, vLLM ($(EXTRA)) and tools in $(VENV): a few minutes, 4.2 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA),dev]'
	$(BIN)/python -m oasiskv.cli.repair
	@touch $@

model: setup  ## Fetch SmolLM2 (93 MB, once)
	$(BIN)/oasiskv model fetch smollm2

demo: model  ## Real SmolLM2, stock vLLM against OasisKV in the same KV memory
	$(BIN)/python -m oasiskv.demo

bench: model  ## The speed targets: hours on 2 cores (the short way: oasiskv bench targets --only NAME --rounds 1)
	$(BIN)/oasiskv bench targets --html bench-targets.html --json bench-targets.json

bench-quick: model  ## Speed beside stock vLLM in the same KV memory: small sizes, 10 minutes on 2 cores
	$(BIN)/oasiskv bench long-context reasoning --quick --html bench-quick.html --json bench-quick.json

eval-quick: model  ## Accuracy beside dense attention, at three budgets: 10 minutes on 2 cores
	$(BIN)/oasiskv eval all --budgets 512,1024,2048 --quick --html eval-quick.html --json eval-quick.json

lint: setup  ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## Lint, types and the tests that need no network
	$(BIN)/python -m pytest -q -m 'not slow'

test-slow: model  ## The tests with real weights, the package index or minutes of work
	$(BIN)/python -m pytest -q -m slow

format: setup  ## Let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
