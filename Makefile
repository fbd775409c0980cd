# On a bare machine with Python 3.10, g++ and a package index these commands do everything. What they
# need is found, made or installed by tools/environment.py, which says so and prints the Python to use.
# ARGS is passed on: make test ARGS="tests/unit/test_layout.py -x", make demo ARGS="--device cuda".

PYTHON ?= python3
environment = $(firstword $(PYTHON)) tools/environment.py
native = $(shell find csrc tests tools -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.NOTPARALLEL:
.PHONY: bench demo docs test test-all test-gpu test-sglang test-transformers test-vllm test-tsan test-asan lint build wheel stub clean

demo:
	@python=$$($(environment) demo) && "$$python" examples/serving_demo $(ARGS)

# The site in build/docs: guides and reference. Warnings are errors.
docs:
	@python=$$($(environment) docs) && "$$python" -m sphinx -W --keep-going -q -b html docs build/docs

# About 7 minutes on one GPU; ARGS="--only bandwidth --json DIR --seconds 100"
bench:
	@python=$$($(environment) build) && "$$python" benchmarks/run_all.py $(ARGS)

# Two minutes on two idle cores: tests marked slow and those of the benchmarks are for test-all.
test:
	@python=$$($(environment) test) && "$$python" -m pytest -n 2 -m "not slow" -o testpaths=tests $(ARGS)

test-all:
	@python=$$($(environment) test) && "$$python" -m pytest -n 2 $(ARGS)

test-gpu:
	@python=$$($(environment) test) && export KVSWAP_REQUIRE_GPU=1 && \
	"$$python" -m pytest -m gpu $(ARGS) && \
	PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$$python" -m pytest -m gpu $(ARGS)

# Installs the extra into the environment that the others use too; their tests then run it as well.
test-transformers:
	@python=$$($(environment) test-transformers) && \
	"$$python" -m pytest tests/engines/test_transformers*.py $(ARGS)

# vLLM has to be in the environment: pip install -e '.[vllm]'
test-vllm:
	@python=$$($(environment) test) && export KVSWAP_TEST_VLLM=1 && "$$python" -c "import vllm" && \
	"$$python" -m pytest tests/engines/test_vllm*.py $(ARGS)

# SGLang's memory code has to be in the environment: pip install --no-deps sglang==0.5.23 msgspec
test-sglang:
	@python=$$($(environment) test) && export KVSWAP_TEST_SGLANG=1 && \
	"$$python" -m pytest tests/engines/test_sglang*.py $(ARGS)

# Handlers, queues, block managers and the simulated driver, compiled for sanitizers of g++.
test-tsan:
	@python=$$($(environment) test) && "$$python" tools/sanitize.py tsan $(ARGS)

test-asan:
	@python=$$($(environment) test) && "$$python" tools/sanitize.py asan $(ARGS)

lint:
	@python=$$($(environment) lint) && set -x && \
	"$$python" -m ruff check . && \
	"$$python" -m ruff format --check . && \
	"$$python" -m mypy && \
	"$$python" -c "import clang_format; clang_format.clang_format()" --dry-run -Werror $(native) && \
	"$$python" -m check_jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml && \
	"$$(dirname "$$python")/zizmor" --offline -q .github/workflows

build:
	@$(environment) build

# dist/*.whl for glibc 2.28 and later, with kernels; PYTHON="python3.11 python3.12" makes one for each.
wheel:
	@python=$$($(environment) wheel) && "$$python" tools/build_wheel.py $(PYTHON)

# The types of the native library, for mypy, after a change of csrc/bindings.
stub:
	@python=$$($(environment) build) && "$$python" tools/write_stub.py torch_kvswap/_C.pyi

clean:
	rm -rf build dist *.egg-info torch_kvswap/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
