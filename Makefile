# Each target does its own set-up: a virtual environment, the install, then the job.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: demo test lint figures clean

demo: $(STAMP)
	$(BIN)/glass verify

test: $(STAMP)
	$(BIN)/python -m pytest

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

# torch is asked for first and exactly: a looser request may pull gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
