# make train | test | test-worlds | test-all | test-cuda-dry | lint | docs | bench, in a clean clone: each
# makes its environment and installs what it needs, once.
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
DOCS := $(VENV)/.installed-docs

# the CUDA builds of torch and FBGEMM, whose code `make test-cuda-dry` runs without a GPU
VENV_CUDA := .venv-cuda-dry
CUDA := $(VENV_CUDA)/.installed

# One worker process per core; all tests of one Ray cluster go to one of them. Where the variable is set, as in many
# images of containers, every process that a test starts would compile all sources anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --dist loadgroup

.PHONY: help train test test-worlds test-all test-cuda-dry lint docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make train        train a DLRM on synthetic clicks, on this machine              (ARGS=... is passed on)"
	@echo "make test         the default tests, in minutes                                 (ARGS=... is passed on)"
	@echo "make test-worlds  new random worlds for SECONDS=480; SEED=... says which"
	@echo "make test-all     all tests with all their seeds, the slow ones too"
	@echo "make test-cuda-dry  the CUDA path without a GPU; 8 GB in .venv-cuda-dry          (ARGS=... is passed on)"
	@echo "make lint         ruff check, ruff format --check, mypy"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make bench        all benchmarks, about 12 minutes; BENCH=dlrm runs one         (ARGS=... is passed on)"
	@echo "make clean        remove .venv and caches"

train: $(CPU)
	@$(PY) -m jobs.train_dlrm $(ARGS)

test: $(DEV)
	@$(PYTEST) -m "not slow" $(ARGS)

test-worlds: $(DEV)
	@$(PYTEST) --dist load --worlds "$(SEED)" --seconds $(SECONDS) $(ARGS)

test-all: $(DEV)
	@$(PYTEST) --seeds all $(ARGS)

test-cuda-dry: $(CUDA)
	@$(VENV_CUDA)/bin/python -m tests.cuda_dry $(ARGS)

lint: $(DEV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# the variable silences a banner of the theme about its successor
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "build/site/index.html; to serve it: $(PY) -m http.server --directory build/site"

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

# separate from $(CPU), so that `make train` needs no test tools; all stamps hold what pip then finds in place
$(DEV): pyproject.toml | $(PY)
	@echo "installing rayrec[cpu,dev,docs] into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) --editable ".[cpu,dev,docs]"
	@touch $@ $(CPU) $(DOCS)

$(DOCS): pyproject.toml | $(PY)
	@echo "installing rayrec[cpu,docs] into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) --editable ".[cpu,docs]"
	@touch $@ $(CPU)

# three equals signs: a build such as 2.13.0+cpu would satisfy two, and is not the one for GPUs
$(CUDA): pyproject.toml
	@echo "making $(VENV_CUDA) with the CUDA builds of torch and FBGEMM (8 GB on disk)"
	@$(PYTHON) -m venv $(VENV_CUDA)
	@$(VENV_CUDA)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) \
		"torch===2.13.0" --editable ".[cuda,dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_CUDA) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
