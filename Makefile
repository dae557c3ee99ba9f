# make train: trains a model; CONFIG, WORKDIR and ARGS are optional, for example
#   make train CONFIG=configs/gpt2_3d.py WORKDIR=runs/gpt2_3d ARGS="--config.train.num_steps=50"
# make test: runs the quick tests, at least one per feature (6 minutes on 2 cores)
# make test-thorough: runs only the thorough tests
# make test-compiler: runs only the tests that compile for GPUs; installs XLA's GPU compiler (3 GB), needs no GPU
# make test-device: runs only the tests of tests/device, which need a GPU
# make test-all: runs these three, one after another (40 minutes)
# make docs: builds the site of the documentation into .site/, and checks its links (a few seconds; installs MkDocs)
# make reproduce: compiles all jobs of docs/published.md again, and writes its tables and plot (12 to 60 minutes, no GPU)
# make lint: runs ruff, codespell, the type checker and the checks of habits, and prints large files and folders
# make setup-browser: installs Chromium (Debian's package), without which the tests of the report's page are skipped
# make setup, setup-test, setup-compiler: only install dependencies for training, tests or GPU tests, into .venv
#   (make setup CUDA=1: for NVIDIA GPUs, also on a machine without one, such as a login node)
PYTHON ?= python3
CONFIG ?= configs/gpt2_3d.py
ARGS ?=

# CUDA=1 installs jax for NVIDIA GPUs, CUDA=0 for CPUs. By default, the driver of this machine decides. A login node has
# none although the compute nodes have GPUs.
CUDA := $(if $(wildcard /proc/driver/nvidia/version),1,0)
ifeq ($(filter 0 1,$(CUDA)),)
$(error CUDA=$(CUDA) must be 1, for NVIDIA GPUs, or 0, for CPUs)
endif
REQUIREMENTS := $(if $(filter 1,$(CUDA)),requirements.txt,requirements-cpu.txt)
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check

# Python keeps the modules that it compiles. Otherwise each process of a test would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-test setup-compiler setup-browser train test test-all test-thorough test-compiler test-device reproduce docs lint
setup: .venv/$(REQUIREMENTS).stamp .venv/bin/taibai
setup-test: .venv/requirements-test.txt.stamp
setup-compiler: .venv/requirements-compiler.txt.stamp

.venv/bin/python:
	$(PYTHON) -m venv .venv || (rm -rf .venv; exit 1)

.venv/$(REQUIREMENTS).stamp: $(REQUIREMENTS) requirements-cpu.txt | .venv/bin/python
	@echo "Installing $(REQUIREMENTS) into .venv (a few minutes the first time)"
	$(PIP) -r $(REQUIREMENTS)
	@touch $@

# The command taibai, which imports the project from here.
.venv/bin/taibai: pyproject.toml .venv/$(REQUIREMENTS).stamp
	$(PIP) --no-deps --editable .
	@touch $@

.venv/requirements-test.txt.stamp: requirements-test.txt .venv/$(REQUIREMENTS).stamp .venv/bin/taibai
	@echo "Installing requirements-test.txt into .venv"
	$(PIP) -r requirements-test.txt
	@touch $@

.venv/requirements-compiler.txt.stamp: requirements-compiler.txt .venv/requirements-test.txt.stamp
	@echo "Installing requirements-compiler.txt into .venv (3 GB)"
	$(PIP) -r requirements-compiler.txt
	@touch $@

.venv/requirements-docs.txt.stamp: requirements-docs.txt | .venv/bin/python
	@echo "Installing requirements-docs.txt into .venv"
	$(PIP) -r requirements-docs.txt
	@touch $@

# Not in .venv: only the system's packages have a browser. Without one, nothing but these tests is missing.
setup-browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then \
		echo "Chromium is installed"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null && echo "Installed Chromium"; \
	else \
		echo "Install the packages chromium and chromium-driver, as root"; \
	fi

train: setup
	.venv/bin/python -m train.main --config=$(CONFIG) $(if $(WORKDIR),--workdir=$(WORKDIR)) $(ARGS)

test: setup-test
	@echo "Not run here: thorough tests (make test-thorough), tests/gpu (make test-compiler), tests/device (make test-device), campaigns (-m slow)"
	.venv/bin/python -m pytest -m "not (thorough or gpu_compiler or slow)" --budget=6 $(ARGS)

test-thorough: setup-test
	.venv/bin/python -m pytest -m "thorough and not slow" --budget=16 $(ARGS)

test-compiler: setup-test setup-compiler
	.venv/bin/python -m pytest tests/gpu --budget=12 $(ARGS)

test-device: setup-test
	TAIBAI_TEST_DEVICE=gpu XLA_PYTHON_CLIENT_PREALLOCATE=false .venv/bin/python -m pytest tests/device $(ARGS)

reproduce: setup-test setup-compiler
	.venv/bin/python -m benchmarks.published
	.venv/bin/python -m benchmarks.published.libai
	.venv/bin/python -m benchmarks.published --docs
	.venv/bin/python -m benchmarks.published.libai --docs

# The site reads the sources without importing them, so it needs neither jax nor the tests' packages. With --quiet, MkDocs
# would not count the warnings that --strict refuses.
docs: .venv/requirements-docs.txt.stamp
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo "Open http://localhost:8000 after .venv/bin/python -m http.server --directory=.site"

test-all:
	$(MAKE) test
	$(MAKE) test-thorough
	$(MAKE) test-compiler

lint: setup-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/codespell
	.venv/bin/basedpyright
	.venv/bin/python -m tests.sizes
	.venv/bin/python -m pytest -q -n 0 -m "" tests/test_habits.py
