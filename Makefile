# Every target makes the virtual environment that it needs, and keeps it until its requirements change.
.PHONY: serve test check codegen bench clean
SHELL := /bin/bash
PYTHON ?= python3
# In the recipe, so that a failure ends it and `make -n` makes nothing.
environment = $$($(PYTHON) tests/environments.py $(1))

serve:  ## Serve the demo models; MODELS=PATH serves yours, ARGS adds options.
	@python="$(call environment,serve)" && exec "$$python" -m triglot serve $(MODELS) $(ARGS)

# Tests wait for processes of their own now and then: one worker more than there are cores keeps these at work.
WORKERS ?= $(shell expr $$(nproc) + 1)

test:  ## Every test, with the newest libraries and again with the oldest that are admitted; ARGS="-n 0" to debug.
	@python="$(call environment,dev)" && "$$python" -m pytest -n $(WORKERS) $(ARGS)
	@python="$(call environment,oldest)" && "$$python" -m pytest -n $(WORKERS) -m "not newest" $(ARGS)

check:  ## Lint, types, and that generated files are what their sources make.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" -m ruff check . && \
	"$$python" -m ruff format --check . && \
	"$$python" -m mypy && \
	"$$python" codegen/generate.py --check && \
	"$$python" codegen/image_classifier.py --check && \
	"$$python" codegen/readme.py --check

codegen:  ## Regenerate what `make check` compares.
	@python="$(call environment,dev)" && set -ex && \
	"$$python" codegen/generate.py && "$$python" codegen/image_classifier.py && "$$python" codegen/readme.py

bench:  ## Measure, and write bench/results.md, and h2.md over our own HTTP/2, and a text for each of the other benches.
	@python="$(call environment,dev)" && set -exo pipefail && \
	for name in micro lifecycle batching overload process stream shared_memory; do \
	"$$python" -m bench.$$name | tee bench/$$name.txt; done && "$$python" -m bench.load && \
	export TRIGLOT_GRPC_TRANSPORT=h2 && "$$python" -m bench.stream | tee bench/stream_h2.txt && \
	"$$python" -m bench.load --only grpc- --output bench/h2.md

clean:  ## Remove the virtual environments and caches.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
