# Everything a fresh machine needs is Python 3.11 to 3.13, git and make. Each target sets itself up; a second call does not.
VENV ?= .venv
# Python: that of an environment which is there, else the newest on the path that runs. Version managers leave shims of
# versions that are not installed.
SUITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in $(VENV)/bin/python python3.13 python3.12 python3.11 python3; do \
	$$python -c '$(SUITS)' >/dev/null 2>&1 && echo $$python && break; done)
VERSION := import sys; print(*sys.version_info[:2], sep=".")
OUT ?= runs/reproduce
REPORT ?= report.html
EXHIBITS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help which-python reproduce test soak coverage lint bench families figures mutate record docs format clean

which-python:
	@echo "$(PYTHON)"

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '' 2>/dev/null || { echo "joma needs Python 3.11, 3.12 or 3.13; install one, or say make PYTHON=/path/to/python"; exit 1; }
	@there=$$($(BIN)/python -c '$(VERSION)' 2>/dev/null); test -z "$$there" -o "$$there" = "$$($(PYTHON) -c '$(VERSION)')" || \
		{ echo "$(VENV) has Python $$there, not that of $(PYTHON): make clean first, or say make VENV=another"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

reproduce: $(READY) ## reproduce the paper and write report.html
	$(BIN)/joma reproduce $(EXHIBITS) --out $(OUT) --report $(REPORT)

test: $(READY) ## run the tests on all cores
	$(BIN)/python -m pytest -n auto -q

soak: $(READY) ## run them four times in a row on two cores, twice under load; SOAK_ARGS="tests/jobs" for a part
	PYTHON=$(BIN)/python .ci/soak $(SOAK_ARGS)

coverage: $(READY) ## the tests with coverage: at least 90 % of the lines
	$(BIN)/python -m pytest -n auto -q --cov --cov-report=term

lint: $(READY) ## ruff (lint and format), mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

bench: $(READY) ## benchmarks against what one would use instead, side by side
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

FAMILIES ?= .venv-families
FAMILIES_READY := $(FAMILIES)/.ready
FAMILIES_PIP = $(FAMILIES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
PURELIB := import sysconfig; print(sysconfig.get_paths()["purelib"])

# An environment that shares the packages of the first one, and folders for libraries that must not be seen by others.
$(FAMILIES_READY): $(READY) $(wildcard benchmarks/families/requirements*.txt)
	$(BIN)/python -m venv $(FAMILIES)
	$(BIN)/python -c '$(PURELIB)' > "$$($(FAMILIES)/bin/python -c '$(PURELIB)')/shared.pth"
	$(FAMILIES_PIP) -r benchmarks/families/requirements.txt
	for folder in vision tune titan; do \
		$(FAMILIES_PIP) --upgrade --target $(FAMILIES)/$$folder -r benchmarks/families/requirements-$$folder.txt || exit 1; done
	@touch $@

# Minutes of processor time for each library; the models that do not fit are left out, and the page says so.
MINUTES ?= 25

families: $(FAMILIES_READY) ## watch models of public libraries and write docs/watch-families.md (hours; LIBRARIES="timm litgpt" for a part)
	$(BIN)/python -m benchmarks.families.page --python $(FAMILIES)/bin/python --folders $(FAMILIES) --minutes $(MINUTES) $(LIBRARIES)

figures: $(READY) ## make the pictures and tables of README and docs again
	$(BIN)/python docs/make_figures.py

mutate: $(READY) ## show that the checks of all claims reject their mutants
	OMP_NUM_THREADS=1 $(BIN)/python -m joma.paper.claims.mutation

record: $(READY) ## make a record with its data (EXHIBIT=fig8), or go on with the queue of long runs (docs/record.md)
	$(BIN)/python $(if $(EXHIBIT),-m joma.paper.make_record $(EXHIBIT),docs/record.py)

docs: $(READY) ## build the documentation into site/, offline and with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

format: $(READY) ## format the code
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

clean: ## remove the environment and everything made
	rm -rf $(VENV) $(FAMILIES) runs site report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
