# make demo          install, convert a real model, reload it in a new process
# make test          install what is missing, run the tests
# make test-extras   install what converted models are tried together with, and try it (docs/compatibility.md)
# make check         ruff, mypy and the documentation
# make docs          the documentation, in build/docs; stops at a broken link or a missing docstring
# make bench         factorization, latency, training cost, similarity and quality against their references

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

# Real GLUE tasks, where they are at hand; tests that need them say so when they skip.
COLLAB_COMPRESS_DATA ?= $(wildcard $(abspath ../shared/data))
export COLLAB_COMPRESS_DATA
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-extras check docs bench clean

demo: $(STAMP)
	rm -rf demo-output
	$(BIN)/collab-compress minilm --dk 128 --output demo-output
	@echo
	$(BIN)/python -m collab_compress_cli.demo demo-output

# A worker for each core, with one thread each: tiny models gain nothing from more.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

test-extras: $(STAMP)
	$(PIP) install --quiet --editable ".[extras]" --constraint constraints.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto tests/extras

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) docs

docs: $(STAMP)
	$(PIP) install --quiet --editable ".[docs]" --constraint constraints.txt
	$(BIN)/python -m sphinx -q -W --keep-going --fresh-env --write-all --builder html docs build/docs

bench: $(STAMP)
	$(BIN)/python benchmarks/factorization.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/heads.py
	$(BIN)/python benchmarks/similarity.py --quick
	$(if $(COLLAB_COMPRESS_DATA),$(BIN)/python benchmarks/quality.py --data-dir $(COLLAB_COMPRESS_DATA)/glue,@echo "no real data, so no quality: set COLLAB_COMPRESS_DATA")

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "setuptools>=77" --constraint constraints.txt
	$(PIP) install --quiet torch --constraint constraints.txt
	$(PIP) install --quiet --editable ".[dev]" --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
