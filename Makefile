# The two commands to begin with: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.installed
# Most tests wait for processes most of the time: two at once take little more than half as long.
WORKERS := --numprocesses 2 --dist worksteal

.PHONY: help demo test test-long test-soak lint format bench bench-peers clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## Train the example job: two ranks, about two minutes
	$(BIN)/elastictrain run stdlib-lm --output pretty

test: $(STAMP)  ## Run the tests
	$(BIN)/pytest $(WORKERS)

test-long: $(STAMP)  ## Run the long drills
	$(BIN)/pytest -m "long and not soak" $(WORKERS)

test-soak: $(STAMP)  ## Run the sweeps that take many minutes
	$(BIN)/pytest -m soak --timeout 1800

lint: $(STAMP)  ## Format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## Run the benchmarks
	$(BIN)/python benchmarks/loop_overhead.py

bench-peers:  ## Make environments for the peers in the benchmarks
	$(PYTHON) benchmarks/peers.py

clean:  ## Remove everything that was made
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
