# Two commands do everything on a machine with Python 3.11, gcc and make: `make demo` and `make test`.
# Each makes the environment in .venv first if there is none, or if the lock has changed since it was made.

PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c 'print("$(p)")' 2>/dev/null)) python3.11)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SOAK_S ?= 3600
KILLS ?= 50
RACES ?= 100
SCHEDULES ?= 10000
ROLLOUTS ?= 10000
RL_KILLS ?= 10
SERVER_KILLS ?= 5
RAY_ROUNDS ?= 5
WORKERS ?= 2
SEED ?= 1
PARITY ?= 232
ARGS ?=

# The parts of the soak that can be counted, those of them that were given on the command line, and their flags.
PARTS := SCHEDULES ROLLOUTS KILLS RACES RL_KILLS SERVER_KILLS RAY_ROUNDS PARITY
GIVEN := $(strip $(foreach part,$(PARTS),$(if $(findstring command,$(origin $(part))),$(part))))
flag = --$(shell echo $(1) | tr A-Z_ a-z-)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-deps --no-compile -qq
LOCK := requirements/cpu.txt requirements/torch.txt
SOURCES := recovery storage_backends vllm_hooks tools tests examples requirements

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check docs format browser soak soak-parts bench bench-store bench-exact bench-scale bench-cut bench-capture bench-restore bench-snapshot bench-kills clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

setup: $(VENV)/ready  ## make the environment in .venv (a few minutes, 4 GB)

demo: $(VENV)/ready  ## kill and continue a job of a real model; compare it token for token (ARGS=... passed on)
	$(BIN)/prefix-recovery demo $(ARGS)

test: $(VENV)/ready  ## run all tests from SEED=1, in WORKERS=2 processes (ARGS=... passed on to pytest)
	@.ci/browser || true  # the tests that need one fail, and say so
	$(BIN)/python -m pytest -q --durations=10 -n $(WORKERS) --seed $(SEED) --hypothesis-seed $(SEED) $(ARGS)

check: $(VENV)/ready docs  ## ruff, mypy, the site of the documentation and the test of the import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: $(VENV)/ready  ## build the documentation in build/site, strictly: every link and every docstring
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/ready  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

browser:  ## install Chromium for the tests of the report page, where there is none (Debian, as root)
	.ci/browser

soak: $(VENV)/ready  ## for SOAK_S=3600 seconds: jobs killed in calm and trouble, two coordinators, schedules, in turn; count and verify. With a count (KILLS=50, ...): that part of soak-parts alone
	$(BIN)/python -m tests.soak $(if $(GIVEN),$(foreach part,$(PARTS),$(call flag,$(part)) $(if $(filter $(part),$(GIVEN)),$($(part)),0)),--for $(SOAK_S)) $(ARGS)

soak-parts: $(VENV)/ready  ## run SCHEDULES=10000 of the protocol and ROLLOUTS=10000 of a rollout, kill the real job KILLS=50 times, race coordinators RACES=100 times, kill the trainer RL_KILLS=10 times and each of two OpenAI servers SERVER_KILLS=5 times, jobs on Ray in RAY_ROUNDS=5 rounds, compare PARITY=232 cut calls (0: leave out)
	$(BIN)/python -m tests.soak $(foreach part,$(PARTS),$(call flag,$(part)) $($(part))) $(ARGS)

bench-store: $(VENV)/ready  ## measure the store: cost, size, restore, today's ways (minutes; ARGS=--quick: seconds)
	$(BIN)/python -m bench store $(ARGS)

bench: $(VENV)/ready  ## measure everything, one after the other (figures, pictures: build/bench; ARGS="--pictures docs": those of the docs too; ARGS=--quick: a minute)
	$(BIN)/python -m bench all $(ARGS)

bench-scale: $(VENV)/ready  ## measure the coordinator at a million calls and over a day of failures, simulated (ARGS=--quick: seconds)
	$(BIN)/python -m bench scale $(ARGS)

bench-cut: $(VENV)/ready  ## measure how long a cut stalls the engine's loop, beside pausing and copying (ARGS=--quick: seconds)
	$(BIN)/python -m bench cut $(ARGS)

bench-capture: $(VENV)/ready  ## measure what capture costs, by token and by throughput (ARGS=--quick: seconds)
	$(BIN)/python -m bench capture $(ARGS)

bench-restore: $(VENV)/ready  ## measure a restore of 1,000 to 100,000 calls beside pyarrow alone (ARGS=--quick: seconds)
	$(BIN)/python -m bench restore $(ARGS)

bench-snapshot: $(VENV)/ready  ## measure snapshot k up to 500 against full copies, on disk and in a bucket (ARGS=--quick: seconds)
	$(BIN)/python -m bench snapshot $(ARGS)

bench-kills: $(VENV)/ready  ## measure what kills cost, beside redoing or dropping unfinished rows (ARGS=--quick: seconds)
	$(BIN)/python -m bench kills $(ARGS)

bench-exact: $(VENV)/ready  ## measure what exactness costs: the plug-in, draws by position, attention in one piece (ARGS=--quick: seconds)
	$(BIN)/python -m bench exact $(ARGS)

clean:  ## remove the environment, caches and what was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written last: a .venv without `installed` is an unfinished one, removed and made anew.
# Bytecode is compiled here, on all cores, and not by pip, which uses one. It has to be there also where
# PYTHONDONTWRITEBYTECODE is set: without it every engine process would compile vLLM again at its start.
$(VENV)/installed: $(LOCK)
	@echo "making $(VENV) with $(PYTHON)"
	@rm -rf $(VENV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	@$(PIP) -r requirements/torch.txt || { \
	  echo "torch is not on pip's own indexes, trying $(TORCH_INDEX)"; \
	  $(PIP) --index-url $(TORCH_INDEX) -r requirements/torch.txt; }
	@echo "installing the lock"
	@$(PIP) -r requirements/cpu.txt
	@echo "compiling"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages carry files of other Pythons
	@touch $@

$(VENV)/ready: $(VENV)/installed pyproject.toml
	@$(PIP) --no-build-isolation -e .
	@touch $@
