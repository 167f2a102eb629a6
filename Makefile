# Everything works from a fresh clone: each target first makes the virtual environment if it is missing or out of date.
PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := CMakeLists.txt $(shell find runtime_ep -name CMakeLists.txt -o -name '*.cpp' -o -name '*.h')

.PHONY: demo test test-all lint format bench clean
.DEFAULT_GOAL := demo

$(READY): pyproject.toml $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; set PYTHON=python3.12, for example")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/ascend-onnx demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow'

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.bench_fuse
	$(BIN)/python -m benchmarks.bench_decode
	$(BIN)/python -m benchmarks.bench_sfa
	$(BIN)/python -m benchmarks.bench_moe
	$(BIN)/python -m benchmarks.bench_bodies
	$(BIN)/python -m benchmarks.bench_layout
	$(BIN)/python -m benchmarks.bench_provider

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
