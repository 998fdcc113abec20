# The commands of the README. They need make, and a python3 of 3.11 or newer with its venv module.
#   TORCH_INDEX=URL   an extra package index for torch, for example PyTorch's own CPU or CUDA index
#   MODEL, PORT       what `make serve` serves, and where

PYTHON ?= python3
VENV ?= .venv
INSTALL ?= --editable '.[dev]'
TORCH_INDEX ?=
MODEL ?= demo
HOST ?= 127.0.0.1
PORT ?= 8000

CLIENTS_VENV ?= .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
# Without the kinds that come with operators: their schemas are not Kubernetes'.
MANIFESTS := $(filter-out %/kustomization.yaml %/servicemonitor.yaml %/scaledobject.yaml,$(wildcard deploy/kubernetes/*.yaml))
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help install serve fmt check test test-page test-clients lock clean

help:
	@echo "make install | serve | fmt | check | test | test-page | test-clients | lock | clean"

install: $(STAMP)

$(STAMP): pyproject.toml hatch_build.py requirements.lock
	@$(PYTHON) -c 'import sys, venv; sys.exit("python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(INDEX) --constraint requirements.lock $(INSTALL)
	@touch $@

serve: install
	$(BIN)/jetspecpp serve --model $(MODEL) --host $(HOST) --port $(PORT)

fmt: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES) tests hatch_build.py
	$(BIN)/lint-imports
	! test -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile
	$(BIN)/kubernetes-validate --strict --quiet $(MANIFESTS)

test: install
	$(BIN)/python -m pytest

# The page in headless Chromium; on Debian: apt-get install chromium chromium-driver
test-page: install
	$(PIP) install --quiet --constraint requirements.lock 'selenium>=4.30,<5'
	$(BIN)/python -m pytest tests/server/test_page_browser.py

# Real clients against the demo server, in an environment of their own: some want older packages than we do.
test-clients: $(CLIENTS_STAMP)
	JETSPEC_PYTHON=$(abspath $(BIN)/python) $(CLIENTS_VENV)/bin/python -m pytest tests/clients

$(CLIENTS_STAMP): tests/clients/requirements.txt $(STAMP)
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

# Resolve the newest versions that pyproject.toml admits, without installing them. The lock names no build of torch
# (+cpu, +cu130): a constraint on 2.13.0 admits each of them.
lock:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(INDEX) --dry-run --ignore-installed --report $(VENV)/lock.json '.[dev]'
	$(BIN)/python -c 'import json, sys; \
	found = [item["metadata"] for item in json.load(sys.stdin)["install"]]; \
	pins = [(item["name"].lower(), item["version"].partition("+")[0]) for item in found]; \
	print(*sorted("==".join(pin) for pin in pins if pin[0] != "jetspec-pp"), sep="\n")' \
	< $(VENV)/lock.json > $(VENV)/lock.txt
	cp $(VENV)/lock.txt requirements.lock

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
