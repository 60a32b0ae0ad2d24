# make train | test | test-worlds | test-all | lint | bench, in a clean clone: each makes .venv and installs what it needs, once.
#
#   PYTHON     the interpreter that makes .venv (3.11 or later)
#   PIP_FLAGS  passed to pip install, for example --find-links DIR
#   ARGS       passed on: make train ARGS="--ranks 4 --plan row_wise"
#   SEED       any text, from which the seeds of `make test-worlds` follow; the commit unless given
#   SECONDS    how long `make test-worlds` draws new worlds
#
# A torch that .venv already has (2.13.0, for example a +cpu build) is kept: it satisfies the pin in pyproject.toml.

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
BENCH ?=
SEED ?= $(shell git rev-parse HEAD 2>/dev/null || date +%F)
SECONDS ?= 480

VENV := .venv
PY := $(VENV)/bin/python
CPU := $(VENV)/.installed-cpu
DEV := $(VENV)/.installed-dev

# one worker process per core; all tests of one Ray cluster go to one of them
PYTEST = $(PY) -m pytest -q -n auto --dist loadgroup

.PHONY: help train test test-worlds test-all lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make train        train a DLRM on synthetic clicks, on this machine              (ARGS=... is passed on)"
	@echo "make test         the default tests, in minutes                                 (ARGS=... is passed on)"
	@echo "make test-worlds  new random worlds for SECONDS=480; SEED=... says which"
	@echo "make test-all     all tests with all their seeds, the slow ones too"
	@echo "make lint         ruff check, ruff format --check, mypy"
	@echo "make bench        all benchmarks, about 10 minutes; BENCH=dlrm runs one         (ARGS=... is passed on)"
	@echo "make clean        remove .venv and caches"

train: $(CPU)
	@$(PY) -m jobs.train_dlrm $(ARGS)

test: $(DEV)
	@$(PYTEST) -m "not slow" $(ARGS)

test-worlds: $(DEV)
	@$(PYTEST) --dist load --worlds "$(SEED)" --seconds $(SECONDS) $(ARGS)

test-all: $(DEV)
	@$(PYTEST) --seeds all $(ARGS)

lint: $(DEV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

bench: $(DEV)
	@$(PY) -m benchmarks$(if $(BENCH),.$(BENCH)) $(ARGS)

$(PY):
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rayrec needs Python 3.11 or later, this is " + sys.version.split()[0] + "; say PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(CPU): pyproject.toml | $(PY)
	@echo "installing rayrec[cpu] into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) --editable ".[cpu]"
	@touch $@

# separate from $(CPU), so that `make train` needs no test tools; both stamps hold what pip then finds in place
$(DEV): pyproject.toml | $(PY)
	@echo "installing rayrec[cpu,dev] into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) --editable ".[cpu,dev]"
	@touch $@ $(CPU)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
