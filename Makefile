# Each target does its own set-up: a virtual environment, what the job needs, then the job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.installed
STAMP := $(VENV)/.installed-test

.PHONY: demo quick test sanitize lint docs figures findings hashes tokenizers chromium clean

demo: $(CORE)
	$(BIN)/glass demo
	@echo
	@echo 'The command glass is in $(BIN); to have it on the path: . $(BIN)/activate'

# Three workers on two cores: the browser and other processes are waited for a third of the time.
# Many tests start a new interpreter, so what was compiled is kept.
# Without Chromium the tests that need it are skipped; CHROMIUM=install installs it first, as CI does.
test: $(STAMP) tokenizers $(if $(filter install,$(CHROMIUM)),chromium)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder; \
	status=$$?; $(FIND_CHROMIUM) || echo "$(NO_CHROMIUM)" >&2; exit $$status

# What fails cheaply, under a minute and a half: format, lint, types, the contracts of the tree, specs.
QUICK := $(addprefix tests/contracts/test_,architecture.py files_touched.py house.py options.py \
  requirements.py variants.py) tests/spec
quick: lint
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -k 'not drawn and not family' $(QUICK)

# The C kernels and the native step under AddressSanitizer and UBSan, with every check of them.
sanitize: $(STAMP)
	$(BIN)/python -m tests.kernels.sanitized

# The official Qwen tokenizers (31 MB, checked by their hashes) for the tests that need them.
tokenizers: $(STAMP)
	$(BIN)/python -m tests.adapters.official

# A browser for the tests of the explorer's pages: Debian's, or the one GLASS_CHROMIUM names. Only this
# target, and CHROMIUM=install, change the system.
FIND_CHROMIUM := command -v "$${GLASS_CHROMIUM:-chromium}" > /dev/null
NO_CHROMIUM := no Chromium: the tests that open the pages of the explorer were skipped. \
'make chromium' installs it (as root, apt-get install chromium); GLASS_CHROMIUM=PATH names another.
APT := apt-get install -y chromium
chromium:
	@if $(FIND_CHROMIUM); then exit 0; fi; \
	if ! command -v apt-get > /dev/null; then \
	  echo "no apt-get here: install Chromium, and name it with GLASS_CHROMIUM=PATH" >&2; exit 1; fi; \
	as=; [ "$$(id -u)" = 0 ] || as=sudo; echo "$$as $(APT)"; \
	$$as apt-get update -qq && $$as $(APT)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site, to open in a browser: build/site/index.html. A broken link ends it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

# docs/findings.md: what is missing in docs/findings.json is run, then the page is made again.
findings: $(STAMP)
	$(BIN)/python -m bench findings --jobs 2

# hashes.txt for the versions of constraints.txt, the bill of materials, and two equal wheels.
hashes: $(STAMP)
	$(BIN)/python -m bench supply --hashes

# The benchmarks that need only this repository and a CPU: hours on two cores. docs/figures.md names the others.
figures: $(STAMP)
	$(BIN)/glass verify --deep
	$(BIN)/python -m bench layer
	$(BIN)/python -m bench byhand
	$(BIN)/python -m bench engines
	$(BIN)/python -m bench loop
	$(BIN)/python -m bench stacked
	$(BIN)/python -m bench training
	$(BIN)/python -m bench kills
	$(BIN)/python -m bench attack --resume
	$(BIN)/python -m bench load
	$(BIN)/python -m bench supply
	$(BIN)/python -m bench distributed
	$(BIN)/python -m bench learning
	$(BIN)/python -m bench extract
	$(BIN)/python -m bench language
	$(BIN)/python -m bench corpus
	$(BIN)/python -m bench budget
	$(BIN)/python -m bench diff
	$(BIN)/python -m bench doctor
	$(BIN)/python -m bench adapters
	$(BIN)/python -m bench generate
	$(BIN)/python -m bench quant
	$(BIN)/python -m bench lens
	$(BIN)/python -m bench explore
	$(BIN)/python -m bench findings --jobs 2
	$(BIN)/python -m pages figures
	$(BIN)/python -m pages animation
	$(BIN)/python -m pages notebooks --execute
	$(BIN)/python -m pages shots

# torch is requested first and exactly: a looser request may pull gigabytes of CUDA libraries. It
# comes through pip, which also searches local wheels; the rest through uv, several times as fast,
# or through pip where uv is not to be had.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
KERNELS := $(wildcard src/glassformer/kernels/*.c src/glassformer/kernels/*.h)
define install
@echo 'installing $(1)'
@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ./glasscheck -e '$(1)' \
  || $(PIP) -c constraints.txt -e ./glasscheck -e '$(1)'
endef

$(CORE): pyproject.toml glasscheck/pyproject.toml constraints.txt setup.py $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 -c constraints.txt
	@$(PIP) uv -c constraints.txt || echo 'no uv here: pip does it all'
	$(call install,.)
	@touch $@

$(STAMP): $(CORE)
	$(call install,.[test])
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
