# Each target does its own set-up: a virtual environment, the install, then the job.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: demo test lint figures tokenizers clean

demo: $(STAMP)
	$(BIN)/glass demo

test: $(STAMP) tokenizers
	$(BIN)/python -m pytest

# The official Qwen tokenizers (31 MB, checked by their hashes) for the tests that need them.
tokenizers: $(STAMP)
	$(BIN)/python -m tests.adapters.official

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every figure of the README and the docs, again; about half an hour on two cores.
figures: $(STAMP)
	$(BIN)/glass verify --deep
	$(BIN)/python -m bench layer
	$(BIN)/python -m bench byhand
	$(BIN)/python -m bench loop
	$(BIN)/python -m bench kills
	$(BIN)/python -m bench learning
	$(BIN)/python -m bench language
	$(BIN)/python -m bench budget
	$(BIN)/python -m bench adapters
	$(BIN)/python -m bench generate

# torch is asked for first and exactly: a looser request may pull gigabytes of CUDA libraries.
KERNELS := $(wildcard src/glassformer/kernels/*.c src/glassformer/kernels/*.h)
$(STAMP): pyproject.toml constraints.txt setup.py $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
