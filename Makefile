# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo   runs the main job and writes its reports to demo/
#   make test   lint, types, layering, the lowest versions of dependencies, and the test suite
#   make newest the newest versions of dependencies, and which lines of constraints.txt are behind
#   make fuzz   10,000 damaged inputs and absurd flags
# Both build their own virtual environment in $(VENV) first.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
OLDEST ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null)
VENV ?= .venv
DEMO ?= demo
WORKERS ?= 3

# Tried versions of everything; of torch only where there is no NVIDIA driver, else the newest.
CONSTRAINTS ?= -c constraints.txt $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-torch-cpu.txt)
RUN := $(VENV)/bin/python

.PHONY: demo test lint types suite lowest newest fuzz clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.ready: pyproject.toml $(wildcard constraints*.txt)
	@test -n "$(PYTHON)" || { echo "foretrace needs Python 3.11 or newer on the PATH; or say make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up $(VENV): PyTorch and others are downloaded, which takes some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ".[trace,dev]"
	@touch $@

demo: $(VENV)/.ready
	$(RUN) examples/demo.py --output $(DEMO)

# All at once: but for the suite each keeps one processor busy, and waits for files from elsewhere.
test:
	@$(MAKE) --no-print-directory --jobs=4 suite lint types $(if $(OLDEST),lowest)

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.ready
	$(RUN) -m mypy

# Three processes for two processors, as tests wait now and then. They take files in the order of tests/conftest.py;
# all tests of a file run in one, to share its trainings.
suite: $(VENV)/.ready
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

# 10,000 damaged inputs and absurd flags, some ten minutes; CASES and SEED choose others.
fuzz: $(VENV)/.ready
	$(RUN) -m tests.fuzzing --cases $(or $(CASES),10000) --seed $(or $(SEED),0) --workers $(WORKERS)

# The lowest versions of pyproject.toml, on the Python that has them: every verb on every kind of input, and figures.
# What pip does not compile (half its time) Python does where it is used, and warns of old escapes.
LOWEST ?= $(VENV)-lowest
QUICK_TESTS ?= tests/test_fuzzing.py::test_what_is_damaged_is_answered_whole tests/traces/test_figures.py
lowest:
	$(or $(OLDEST),python3.11) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-lowest.txt \
		--editable . pytest hypothesis
	NUMBA_CACHE_DIR=$(abspath $(LOWEST))/compiled $(LOWEST)/bin/python -m pytest -W "ignore:invalid escape" $(QUICK_TESTS)

# The same on the newest versions of all but torch, in place of the tried ones; then which of these are behind.
NEWEST ?= $(VENV)-newest
newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable ".[dev]"
	$(NEWEST)/bin/python -m pytest $(QUICK_TESTS)
	@$(NEWEST)/bin/python -m pip freeze | grep -Fixvf - constraints.txt | sed -n '/==/s/^/constraints.txt is behind: /p'

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis
