# make demo | test | test-full | chaos | lint | bench      (needs only make and Python >= 3.11)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-full chaos lint bench install clean

PYTHON ?= python3
# Processes for the tests that can share the machine; those marked `process` always run alone.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --no-input
# Of what pip says only what takes its time, as it happens, and errors.
TOLD := 2> >(awk '!/^WARNING:/' >&2) | awk '/^ *(Downloading|Using cached) / && !/metadata/ { sub(/^ */, "  "); print; fflush() } \
	/^Installing collected/ { print "  Installing " NF - 3 " packages"; fflush() }'
# The stamps are named after what was installed, so a change of that refreshes the venv.
SUM = $(shell cat $(1) | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(call SUM,requirements.lock pyproject.toml hatch_build.py $(wildcard src/holdfast/arrays/*.[ch]))
BENCH_INSTALLED := $(VENV)/.bench-$(call SUM,requirements.lock requirements-bench.lock)
CODE := $(wildcard src tests bench examples hatch_build.py)

# Bytecode is kept: tests start thousands of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n 1p Makefile

install: $(INSTALLED)

$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python >= 3.11; set PYTHON=")'
	@echo "installing into $(VENV): a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(PIP) -r requirements.lock $(TOLD)
	@$(PIP) -qq --no-build-isolation --no-deps -e .
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "installing the benchmark's peers into $(VENV)"
	@rm -f $(VENV)/.bench-*
	@$(PIP) $$(grep '^torch==' requirements-bench.lock) $(TOLD)
	@$(PIP) -r requirements-bench.lock $(TOLD)
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

# With the peers of the benchmarks: Orbax itself restores what was exported, torch saves what is imported.
test-full: lint $(BENCH_INSTALLED)
	$(BIN)/pytest -n $(JOBS) -m "not process" --hypothesis-profile=explore
	$(BIN)/pytest -m "process"

# A hundred thousand simulated runs with faults, then the long campaigns of real processes.
SEEDS ?= 0:100000
chaos: $(INSTALLED)
	$(BIN)/python -m holdfast.testing.coordination --seeds $(SEEDS) --jobs $(JOBS)
	$(BIN)/python -m holdfast.testing.supervision --seeds 0:5000 --jobs $(JOBS)
	$(BIN)/pytest -m "full and process"

# etcd, a peer of the coordination benchmark, where there is none. Unpacked, not installed: no service starts and
# nothing of the system changes. Without it the benchmark leaves it out.
APT_DOWNLOAD := apt-get -qq -o APT::Sandbox::User=root download etcd-server
$(VENV)/etcd: | $(INSTALLED)
	@command -v etcd > /dev/null || ( echo "unpacking etcd-server into $@" && \
		rm -rf $@.new && mkdir $@.new && cd $@.new && \
		( $(APT_DOWNLOAD) 2> /dev/null || ( apt-get -qq update && $(APT_DOWNLOAD) ) ) && \
		dpkg-deb -x etcd-server_*.deb . && rm etcd-server_*.deb && mv ../etcd.new ../etcd \
	) || echo "etcd-server is not to be had here: etcd will not be measured"

bench: $(BENCH_INSTALLED) $(VENV)/etcd
	$(BIN)/python -m bench checkpoint
	$(BIN)/python -m bench load
	$(BIN)/python -m bench scale
	$(BIN)/python -m bench coord
	$(BIN)/python -m bench transfer
	$(BIN)/python -m bench reduce
	$(BIN)/python -m bench recovery
	$(BIN)/python -m bench train

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
