# Two commands on a fresh machine: `make demo` shows the main job, `make test` runs the whole suite.
PYTHON ?= python3
BIN := .venv/bin
PARTS ?= onnx,mlx,llamacpp,executorch,quantize,structured,eval,serve,sign,dev
DEMO_PARTS ?= onnx,quantize,structured
# Two workers, one thread each: vendor libraries that each take every core only slow each other down.
# Files keep their order, which begins with those that take longest.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Hundreds of tests start Python; without compiled modules each start takes half a second more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs wheel wheel-with-kernels kernels test test-all test-arm64 native-wheels check fuzz soak format clean

.venv/.with-dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	# One call: torch stands in it with its pin, so that nothing else can pull a newer build.
	$(BIN)/python -m pip install --quiet --editable ".[$(PARTS)]"
	@touch $@

.venv/.with-demo: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -e .venv/.with-dev || $(BIN)/python -m pip install --quiet --editable ".[$(DEMO_PARTS)]"
	@touch $@

# Where a compiler is there, the onnx target's own operators are compiled first; without them it runs on onnxruntime's.
HAS_COMPILER := $(and $(filter x86_64,$(shell uname -m)),$(shell command -v $(CXX)))
demo: .venv/.with-demo
	@test -z "$(HAS_COMPILER)" || $(MAKE) --silent kernels
	$(BIN)/python -m examples.demo

.venv/.with-docs: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

# The documentation as a site, in build/site; a dead link is an error.
docs: .venv/.with-docs
	$(BIN)/python -m mkdocs build --strict

# The wheel, in dist. A release names its repository: PROJECT_URL=https://HOST/OWNER/NAME make wheel
wheel: .venv/.with-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

# The same with the onnx target's compiled operators, for x86-64 Linux.
wheel-with-kernels: .venv/.with-dev kernels
	EDGEKIT_WHEEL_KERNELS=$(abspath $(KERNELS_BUILD))/libedgekit_kernels.so $(BIN)/python -m build --wheel --no-isolation --outdir dist

# The onnx target's own products and attention for x86-64, which sessions use once the library is there: only roundings
# that are asked for are fused, so that every path gives the same bits.
KERNELS := targets/edgekit_onnx/kernels
KERNELS_BUILD ?= $(KERNELS)/build
kernels: $(KERNELS_BUILD)/libedgekit_kernels.so
$(KERNELS_BUILD)/libedgekit_kernels.so: $(wildcard $(KERNELS)/*.cpp $(KERNELS)/*.h)
	mkdir -p $(@D)
	$(CXX) -O3 -std=c++17 -fPIC -shared -fvisibility=hidden -ffp-contract=off -o $@.new $(filter %.cpp,$^)
	mv $@.new $@

# The whole suite, or one app's part of it: make test APP=serve
test: .venv/.with-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) --durations=15 -m "not long" $(if $(APP),tests/apps/$(APP))

# With the tests that take minutes each: whole real models through every target.
test-all: .venv/.with-dev
	$(PYTEST)

# The onnx target and the runtime as programs for arm64, in an emulator: Debian on x86-64, 160 MB once, no root.
test-arm64: .venv/.with-dev
	$(BIN)/python tests/helpers/arm64.py

# Wheels of the native library in dist; each machine's compiler is Debian's g++ for it.
native-wheels: .venv/.with-dev
	$(BIN)/python -m edgekit.apps.native.wheel --machine x86_64
	$(BIN)/python -m edgekit.apps.native.wheel --machine aarch64

check: .venv/.with-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable
	$(BIN)/mypy --platform win32 --no-warn-unreachable
	$(PYTEST) -m "not slow and not long"

# A million damaged GGUF files, and as many tokenizers and manifests for the native library; 100,000 of each other format
# and of what models may write, 2,000 of model folders:
# several hours on one core.
# Then every call of the system that each operation makes, failing in turn; and the property tests with new
# examples.
fuzz: .venv/.with-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/gguf_mutations.py --count 1000000
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/stored_formats.py --count 100000
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/native_fuzzing.py --count 1000000
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/native_formats.py --count 100000
	OMP_NUM_THREADS=1 $(BIN)/python tests/helpers/fault_points.py
	$(BIN)/python tests/helpers/hostile_requests.py --count 100000
	$(PYTEST) -m hypothesis --hypothesis-profile random

# Half an hour of random requests, cancels, schemas, adapters, prefixes and reopenings on a real model.
soak: .venv/.with-dev
	test -d build/soak.edgekit || $(BIN)/python -m edgekit export \
		"$$($(BIN)/python -c 'from examples.small_models import smollm2; print(smollm2())')" \
		--device this --target onnx --adapter-rank 4 -o build/soak.edgekit
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.benchmarks.soak build/soak.edgekit --minutes 30

format: .venv/.with-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv dist build
