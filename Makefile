# Forebay: `make help` is the map. Everything lives in .venv; nothing is installed outside the checkout
# but the cache of built servers (~/.cache/forebay, or FOREBAY_CACHE_DIR).
.DEFAULT_GOAL := help
.PHONY: help setup demo test interop check format bench servers sim nightly lock proto clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.forebay-setup
EXTRAS ?= fast,oxia,broker,otel,spark,iceberg,dev
# Two workers: tests are mostly waiting for fsync and for servers.
WORKERS ?= 2

help: ## this map
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with pinned dependencies and the `forebay` command

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Forebay needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable ".[$(EXTRAS)]"
	@touch $@

demo: setup ## the main job on the embedded default, from nothing to verified records
	@$(BIN)/forebay demo

test: setup ## the whole test suite (real servers included where they can be had)
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not nightly and not interop"

interop: setup ## one queue, two implementations: ours beside the published opendata-buffer crate
	$(BIN)/pytest -q -m interop tests/interop

check: setup ## format, lint, strict types, import contracts, code blocks of the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -q -p no:randomly tests/test_docs.py

format: setup ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## ratios measured in one run, JSON and chart under benchmarks/results/
	$(BIN)/python -m benchmarks

servers: setup ## fetch and build the real servers the tests use (SeaweedFS, Oxia) into the cache
	$(BIN)/python -m forebay.testing.servers

sim: setup ## every engine in the simulated world, with more seeds than `make test` runs: SEEDS=200
	FOREBAY_SEEDS=$${SEEDS:-200} $(BIN)/pytest -n $(WORKERS) -q --timeout 7200 -m "not integration and not nightly" -k sim tests

nightly: setup ## the long soaks
	FOREBAY_SEEDS=$${SEEDS:-2000} $(BIN)/pytest -n $(WORKERS) --dist loadgroup --timeout 21600 -m nightly

lock: setup ## renew requirements.lock (versions only, no addresses)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --all-extras --no-header --no-emit-index-url --no-annotate \
	  pyproject.toml --output-file requirements.lock

proto: setup ## regenerate the messages of Oxia and OTAP from our own .proto files
	$(BIN)/python -m grpc_tools.protoc --proto_path=src --python_out=src --pyi_out=src \
	  src/forebay/coordination/_oxia/oxia.proto src/forebay/dataflow/_otap/otap.proto

clean: ## remove what this Makefile made in the checkout
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
