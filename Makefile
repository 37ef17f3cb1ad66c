# `make demo` and `make test` do all their own set-up, in .venv of this folder.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-slow soak test-aarch64 test-sanitize models-table benchmarks lint clean

help:
	@echo "make demo          build, fetch a small model, serve it, chat, measure (about 3 minutes)"
	@echo "make test          lint, types and tests (what CI runs)"
	@echo "make test-slow     the tests that take minutes"
	@echo "make soak          random traffic against servers with too little of everything, 15 minutes"
	@echo "make test-aarch64  cross-compile the kernels for 64-bit ARM and run their tests in an emulator (about 5 minutes)"
	@echo "make test-sanitize the kernels under the address, undefined behaviour and thread sanitizers (about 15 minutes)"
	@echo "make models-table  prove every architecture, type and real model again, and write docs/models.md"
	@echo "make benchmarks    measure against llama.cpp, OpenVINO and vLLM, and write the tables (an hour the first time)"
	@echo "make lint          format and lint, changing files"
	@echo "make clean         remove the environment and all build products"

# What is installed follows pyproject.toml and the C++ sources; Python sources are used where they lie.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "Paceline builds its kernels with a C++20 compiler, and none was found. Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)." >&2; exit 2; }
	@echo "Setting up $(VENV) and building the kernels: two or three minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "scikit-build-core>=0.11" "nanobind>=2.4" cmake ninja
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what the tests need (PyTorch and transformers among it): a few minutes, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev --group oracles
	@touch $@

# Where pip has just built the module: its objects are those of the C++ tests.
MODULE_BUILD = $(shell ls -td build/cp* | head -n 1)

demo: $(VENV)/installed
	$(BIN)/paceline demo

test: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/cmake --build $(MODULE_BUILD) --target native_tests
	$(MODULE_BUILD)/native_tests
	$(BIN)/pytest

test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -m slow

soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.soak --minutes 15

test-aarch64: $(VENV)/installed
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { echo "This needs a cross-compiler and an emulator, aarch64-linux-gnu-g++ and qemu-aarch64. Install them (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)." >&2; exit 2; }
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DPACELINE_MODULE=OFF
	$(BIN)/cmake --build build/aarch64 --target native_tests
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/native_tests

test-sanitize: $(VENV)/installed-dev
	tests/sanitize $(BIN)/python address
	tests/sanitize $(BIN)/python thread

models-table: $(VENV)/installed-dev
	$(BIN)/python -m tests.proof

benchmarks: $(VENV)/installed
	$(BIN)/python -m benchmarks --publish

lint: $(VENV)/installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src -name '_native*.so' -delete
