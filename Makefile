# Every target makes the virtual environment that it needs, and keeps it until its requirements change.
.PHONY: serve test fuzz test-oldest check codegen bench docs release clean
SHELL := /bin/bash
PYTHON ?= python3
# Tests start hundreds of servers: each would be compiled anew.
unexport PYTHONDONTWRITEBYTECODE
# In the recipe, so that a failure ends it and `make -n` makes nothing.
environment = $$($(PYTHON) tests/environments.py $(1))

# The folder of the compiled build; where there is none it is made first or, with --later, meanwhile.
compiled = $$($(PYTHON) codegen/compiled.py $(1))

serve:  ## Serve the demo models; MODELS=PATH serves yours, ARGS adds options, BUILD=pure compiles nothing.
	@python="$(call environment,serve)" && \
	build="$(if $(filter pure,$(BUILD)),,$(call compiled,--later))" && \
	PYTHONPATH="$$build$${PYTHONPATH:+:$$PYTHONPATH}" exec "$$python" -m triglot serve $(MODELS) $(ARGS)

# Tests wait for processes of their own now and then: three workers more than there are cores keep these at work.
WORKERS ?= $(shell expr $$(nproc) + 3)
# A file's tests share servers; the files are begun in the order in which they are collected.
DIST = --dist loadfile --no-loadscope-reorder

# What the oldest libraries that are admitted could break: contracts, codecs, backends, and that every client works.
WITH_OLDEST = tests/cases tests/core tests/model tests/pb tests/protocols tests/backends tests/cli \
	tests/access/test_issuers.py tests/access/test_jwks.py \
	$(addprefix tests/e2e/test_,$(addsuffix .py,every_protocol grpc_standard grps_streams)) \
	tests/transports/test_grpc_alike.py tests/transports/test_compression.py

# COVERAGE=1 measures the lines and branches that the tests reach, here and in the servers that they start.
PYTEST = $(if $(COVERAGE),-m coverage run -m pytest,-m pytest)

# Each of hundreds of processes would begin with threads of OpenBLAS that compute nothing, and wait awake.
test test-oldest: export OPENBLAS_NUM_THREADS = 1
# BUILD=compiled tests the compiled build.
test:  ## Every test; ARGS="-n 0" to debug, COVERAGE=1 to print what they reach, EXAMPLES=N to try more of each property.
	@python="$(call environment,dev)" && \
	$(if $(filter compiled,$(BUILD)),export COMPILED_BUILD="$(call compiled)" && export PYTHONPATH="$$COMPILED_BUILD" &&) \
	"$$python" $(PYTEST) -n $(WORKERS) $(DIST) $(ARGS) \
	$(if $(COVERAGE),&& "$$python" -m coverage combine --quiet && "$$python" -m coverage report)

fuzz:  ## The same random inputs for the plain and the compiled build, for SECONDS; ARGS="--seed N" for others.
	@python="$(call environment,dev)" && \
	"$$python" -W error -m tests.differential "$(call compiled)" --seconds $(or $(SECONDS),60) $(ARGS)

test-oldest:  ## The tests of contracts, codecs and backends, with the oldest libraries that are admitted.
	@python="$(call environment,oldest)" && \
	"$$python" -m pytest -n $(WORKERS) $(DIST) --grpc-transport aio -m "not newest" $(WITH_OLDEST) $(ARGS)

check:  ## Lint, types, and that generated files are what their sources make.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" -m ruff check . && \
	"$$python" -m ruff format --check . && \
	"$$python" -m mypy && \
	"$$python" -m mypy --explicit-package-bases --allow-untyped-defs --allow-untyped-calls --allow-incomplete-defs examples && \
	"$$python" codegen/generate.py --check && \
	"$$python" codegen/docs.py --check

codegen:  ## Regenerate what `make check` compares.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" codegen/generate.py && "$$python" codegen/docs.py

bench:  ## Measure what bench/results.md says, in ten minutes; ARGS=NAME... runs other benches, ARGS=all every one.
	@python="$(call environment,dev)" && "$$python" -m bench $(ARGS)

docs:  ## Build the site of docs/ into site/.
	@python="$(call environment,docs)" && "$$python" -m zensical build --clean --strict

# Pythons that get a compiled wheel, where they are.
PYTHONS ?= python3.11 python3.12 python3.13

release:  ## Build the sdist, the pure wheel and the compiled ones into dist/, and check them.
	@python="$(call environment,release)" && set -ex && rm -rf dist && \
	"$$python" -m build --outdir dist . && \
	codegen/compiled_wheels.sh dist $(PYTHONS) && \
	"$$python" -m twine check --strict dist/* && \
	"$$python" -m check_wheel_contents dist/*.whl && \
	test "$$(stat -c %s dist/*-none-any.whl)" -le 1400000

clean:  ## Remove the virtual environments and caches.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
