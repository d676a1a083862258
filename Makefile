# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo   runs the main job and writes its reports to demo/
#   make test   lint, types, layering, and the test suite
#   make fuzz   10,000 damaged inputs and absurd flags
# Both build their own virtual environment in $(VENV) first.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV ?= .venv
DEMO ?= demo
WORKERS ?= 3

# Tried versions of everything; of torch only where there is no NVIDIA driver, else the newest.
CONSTRAINTS ?= -c constraints.txt $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-torch-cpu.txt)
RUN := $(VENV)/bin/python

.PHONY: demo test lint types suite lowest fuzz clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.ready: pyproject.toml $(wildcard constraints*.txt)
	@test -n "$(PYTHON)" || { echo "foretrace needs Python 3.11 or newer on the PATH; or say make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable ".[trace,dev]"
	@touch $@

demo: $(VENV)/.ready
	$(RUN) examples/demo.py --output $(DEMO)

test: lint types suite

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

# A short part of the suite with the lowest versions of pyproject.toml, without torch: on the lowest Python.
LOWEST ?= .venv-lowest
lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt \
		--editable . pytest pytest-xdist hypothesis hatchling
	$(LOWEST)/bin/python -m pytest tests/traces tests/topologies tests/test_cli.py tests/test_installed.py \
		tests/simulator/test_analysed.py tests/simulator/test_simulate.py -n $(WORKERS) --dist loadfile

clean:
	rm -rf $(VENV) $(LOWEST) $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis
