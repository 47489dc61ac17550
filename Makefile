# Everything a newcomer or a CI job runs. Each target makes the environment first if it is not there yet.

PYTHON ?= python3
VENV ?= .venv
SHELL := /bin/bash

BIN := $(VENV)/bin
# Written when the environment is complete; holds the name of the requirements it was made from.
STAMP := $(VENV)/.headrace-stamp
MADE_FROM := $(shell cat $(STAMP) 2>/dev/null)
REQUIREMENTS ?= $(or $(MADE_FROM),requirements/cpu.txt)

# One thread per process: OpenMP threads on shared cores spin and stall. Tests take nothing from the hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help venv runtime runtime-packages quickstart test chaos members learn lint docs site k8s-test watch-test k8s-generate clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo
	@echo "  With a GPU: make venv REQUIREMENTS=requirements/gpu.txt VENV=.venv-gpu"

venv: $(STAMP) ## Make the environment (.venv) from the pinned requirements

ifneq ($(MADE_FROM),)
ifneq ($(MADE_FROM),$(REQUIREMENTS))
$(error $(VENV) was made from $(MADE_FROM), not $(REQUIREMENTS): remove it, or pass another VENV=)
endif
endif

# requirements/cpu.txt says why nothing resolves dependencies here. Modules are compiled afterwards, on all cores: pip would
# take a third of the installation for it, and uncompiled ones cost every process half a minute where Python may not
# write them (PYTHONDONTWRITEBYTECODE). Some packages ship files that are no Python 3; compileall's complaint is no error.
$(STAMP): $(REQUIREMENTS) requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); headrace needs Python 3.11 or newer (PYTHON=python3.11)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-compile -r $(REQUIREMENTS) -r requirements/dev.txt
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@[ '$(REQUIREMENTS)' != requirements/cpu.txt ] || $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || { \
	  echo "error: pip chose the CUDA build of torch. Remove $(VENV) and run: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make venv" >&2; exit 1; }
	@echo '$(REQUIREMENTS)' > $@

# What the images are built with: complete, but without the tests' packages and the working tree. In two steps, so that a changed
# line of code does not install torch again.
runtime-packages:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-compile -r $(REQUIREMENTS)
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

runtime: ## Finish an environment to ship (after make runtime-packages; VENV=, REQUIREMENTS=)
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation .
	$(BIN)/headrace config schema > /dev/null

quickstart: $(STAMP) ## Train a small real model on two CPU cores and see it get better
	$(BIN)/python examples/quickstart.py

test: $(STAMP) ## Run the whole test suite
	$(TEST_ENV) $(BIN)/python -m pytest

chaos: $(STAMP) ## Kill every part of a fleet at random, 200 times, and a real learner 20 times; nothing may be lost or trained twice
	$(TEST_ENV) $(BIN)/python -m pytest -m long
	$(TEST_ENV) $(BIN)/python -m tests.chaos --seeds 5 --kills 200
	$(TEST_ENV) $(BIN)/python -m tests.chaos.resume --kills 20
	$(TEST_ENV) $(BIN)/python -m tests.chaos.elastic

members: $(STAMP) ## Generators join, die, drain and freeze in a real run; every token is scored again (15 minutes on two cores)
	$(TEST_ENV) $(BIN)/python -m tests.chaos.members

learn: $(STAMP) ## Measure the ablations of docs and benchmarks/RESULTS.md (about an hour and a half on two cores)
	$(BIN)/python -m benchmarks.ablation chain
	$(BIN)/python -m benchmarks.ablation staleness

lint: $(STAMP) ## Ruff, mypy and the arrows between the packages
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## Write docs/configuration.md and docs/metrics.md from the code
	$(BIN)/python docs/generate.py

# In an environment of its own, since none of it is Headrace's; the built pages need no network.
DOCS_VENV ?= .venv-docs
$(DOCS_VENV)/.stamp: requirements/docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --disable-pip-version-check -q --no-deps -r requirements/docs.txt
	touch $@

site: $(DOCS_VENV)/.stamp ## Build the site of docs/ into build/site (open build/site/index.html)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo build/site/index.html

# The linters live in an environment of their own: checkov wants older versions of what headrace uses.
K8S_VENV ?= .venv-k8s
$(K8S_VENV)/.stamp: requirements/k8s-lint.txt
	test -x $(K8S_VENV)/bin/python || $(PYTHON) -m venv $(K8S_VENV)
	$(K8S_VENV)/bin/pip install --disable-pip-version-check -q --no-deps -r requirements/k8s-lint.txt
	touch $@

k8s-test: $(STAMP) $(K8S_VENV)/.stamp ## Chart, Kustomize base, images: schemas, equality, security; the pods of a small run, run (5 minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/k8s tests/unit/test_autoscale.py
	$(TEST_ENV) $(BIN)/python -m pytest -q -m long tests/k8s
	$(BIN)/python -m tests.k8s.lint $(K8S_VENV)/bin

watch-test: $(STAMP) ## What people see, on real runs: Prometheus, panels and alerts; the page in Chromium; docs/start.md, command by command (12 minutes)
	@for tool in prometheus promtool chromium; do command -v $$tool >/dev/null || { echo "watch-test: $$tool is missing (Debian: apt install prometheus chromium)"; exit 1; }; done
	@$(BIN)/python -c "import playwright" || { echo "watch-test: playwright is missing; run: $(BIN)/pip install playwright"; exit 1; }
	$(TEST_ENV) $(BIN)/python -m pytest tests/alerts
	$(TEST_ENV) $(BIN)/python -m pytest -m long tests/integration/test_alerts_live.py tests/integration/test_page_live.py tests/integration/test_newcomer.py

k8s-generate: $(STAMP) ## Write the Kustomize base and the ACL file from the chart and the code
	$(BIN)/python -m k8s.generate

clean: ## Remove caches and build products; the environment, models and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
