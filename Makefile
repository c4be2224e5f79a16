# make demo | test | test-full | lint | bench      (needs only make and Python >= 3.11)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint bench install clean

PYTHON ?= python3
# Processes for the tests that can share the machine; those marked `process` always run alone.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# -qq hides progress and warnings; errors still show.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
# The stamps are named after what was installed, so a changed lock or pyproject refreshes the venv.
SUM = $(shell cat $(1) | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(call SUM,requirements.lock pyproject.toml)
BENCH_INSTALLED := $(VENV)/.bench-$(call SUM,requirements.lock requirements-bench.lock)
CODE := $(wildcard src tests bench examples)

help:
	@sed -n 1p Makefile

install: $(INSTALLED)

$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python >= 3.11; set PYTHON=")'
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(PIP) -r requirements.lock
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "installing the benchmark's peers into $(VENV)"
	@rm -f $(VENV)/.bench-*
	@$(PIP) $$(grep '^torch==' requirements-bench.lock)
	@$(PIP) -r requirements-bench.lock
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

lint: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)

test: lint
	$(BIN)/pytest -n $(JOBS) -m "not process and not full"
	$(BIN)/pytest -m "process and not full"

test-full: lint
	$(BIN)/pytest -n $(JOBS) -m "not process"
	$(BIN)/pytest -m "process"

bench: $(BENCH_INSTALLED)
	$(BIN)/python -m bench checkpoint

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
