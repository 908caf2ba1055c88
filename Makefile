# Every target makes the virtual environment that it needs, and keeps it until its requirements change.
.PHONY: serve test check codegen bench docs release clean
SHELL := /bin/bash
PYTHON ?= python3
# Tests start hundreds of servers: each would be compiled anew.
unexport PYTHONDONTWRITEBYTECODE
# In the recipe, so that a failure ends it and `make -n` makes nothing.
environment = $$($(PYTHON) tests/environments.py $(1))

serve:  ## Serve the demo models; MODELS=PATH serves yours, ARGS adds options.
	@python="$(call environment,serve)" && exec "$$python" -m triglot serve $(MODELS) $(ARGS)

# Tests wait for processes of their own now and then: two workers more than there are cores keep these at work.
WORKERS ?= $(shell expr $$(nproc) + 2)

# gRPC has two transports, and so has REST: what goes through a port is tested over both (aiohttp beside aio). To save time, over h2 with the newest
# libraries and over aio with the oldest; what these cannot do, and what clients use most, over aio with the newest too.
AIO_TOO = tests/cases tests/e2e

# Each of hundreds of processes would begin with threads of OpenBLAS that compute nothing, and wait awake.
test: export OPENBLAS_NUM_THREADS = 1
test:  ## Every test, with the newest libraries and again with the oldest that are admitted; ARGS="-n 0" to debug.
	@python="$(call environment,dev)" && "$$python" -m pytest -n $(WORKERS) --grpc-transport h2 $(ARGS)
	@python="$(call environment,oldest)" && \
	"$$python" -m pytest -n $(WORKERS) --grpc-transport aio -m "not newest" $(ARGS)
	@python="$(call environment,dev)" && \
	"$$python" -m pytest -n $(WORKERS) --grpc-transport aio -m "newest or again" $(AIO_TOO) $(ARGS)

check:  ## Lint, types, and that generated files are what their sources make.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" -m ruff check . && \
	"$$python" -m ruff format --check . && \
	"$$python" -m mypy && \
	"$$python" codegen/generate.py --check && \
	"$$python" codegen/image_classifier.py --check && \
	"$$python" codegen/docs.py --check

codegen:  ## Regenerate what `make check` compares.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" codegen/generate.py && "$$python" codegen/image_classifier.py && "$$python" codegen/docs.py

bench:  ## Measure what bench/results.md says, in ten minutes; ARGS=NAME... runs other benches, ARGS=all every one.
	@python="$(call environment,dev)" && "$$python" -m bench $(ARGS)

docs:  ## Build the site of docs/ into site/.
	@python="$(call environment,docs)" && "$$python" -m zensical build --clean

release:  ## Build wheel and sdist into dist/, and check both.
	@python="$(call environment,release)" && set -ex && rm -rf dist && \
	"$$python" -m build --outdir dist . && \
	"$$python" -m twine check --strict dist/* && \
	"$$python" -m check_wheel_contents dist/*.whl && \
	test "$$(stat -c %s dist/*.whl)" -le 3000000

clean:  ## Remove the virtual environments and caches.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
