# Every target does its own set-up: nothing but Python >= 3.11 needs to be there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TRACE_ARGS ?= --capacity 50k,100k,200k --page-size 16

.PHONY: example engine test lint setup setup-base bench clean

# The main job on the built-in example: replay a generated chat trace. Needs no torch.
example: setup-base
	$(BIN)/rotaradix replay example $(TRACE_ARGS)

# A small transformer with a scheduler: no cache, one rank, and pages spread over 2 and 4 ranks.
engine: setup
	$(BIN)/python -m examples.tiny_engine $(ENGINE_ARGS)

test: setup
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup-base: $(VENV)/.base
setup: $(VENV)/.dev

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
