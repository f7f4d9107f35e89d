# `make port` and `make test` each set up everything by themselves, in .venv.
#
#   MODEL, HW, ARGS   what `make port` runs: zm-port $(MODEL) --hw $(HW) $(ARGS)
#   PYTHON            the Python 3.11 that makes .venv
#   TORCH_INDEX       where torch's +cpu wheel comes from when neither the package index nor a folder of wheels
#                     (pip's PIP_FIND_LINKS) supplies it

MODEL ?= smollm2-135m
HW ?= cpu
ARGS ?=
PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

LOCK := requirements/cpu.lock
PIP := .venv/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --no-deps

.DEFAULT_GOAL := port
.DELETE_ON_ERROR:
.PHONY: port test nightly setup lint clean help

port: setup  ## port MODEL to HW and measure it (the default)
	.venv/bin/zm-port $(MODEL) --hw $(HW) $(ARGS)

test: lint  ## set up, check the style, run the tests
	.venv/bin/python -m pytest

nightly: setup  ## the further cases that `make test` leaves out for time
	.venv/bin/python -m pytest -m nightly

lint: setup  ## check the style
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

setup: .venv/installed  ## make .venv and install what the lock says

.venv/installed: .venv/locked pyproject.toml
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

.venv/locked: $(LOCK)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit("zm-port needs Python 3.11 and $(PYTHON) is %d.%d: set PYTHON=/path/to/python3.11" % v)'
	@$(PYTHON) -m venv .venv
	@echo "installing $$(grep -c '^[a-zA-Z]' $(LOCK)) packages: some minutes, once"
	@torch=$$(grep '^torch==' $(LOCK)); \
	$(INSTALL) "$$torch" 2>/dev/null || { \
	    echo "$$torch: not where pip looks by itself, trying $(TORCH_INDEX)"; \
	    $(INSTALL) --index-url $(TORCH_INDEX) "$$torch"; } || { \
	    echo "set TORCH_INDEX to an index that has $$torch, or PIP_FIND_LINKS to a folder that does"; exit 1; }
	@$(INSTALL) --requirement $(LOCK)
	@touch $@

clean:  ## remove .venv and what tools leave behind; runs/ stays
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

help:  ## say what the targets do
	@sed -nE 's/^([a-z]+):.*  ## (.*)/make \1\t\2/p' Makefile | expand -t 16
