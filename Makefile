# Two commands on a fresh machine: `make demo` shows the main job, `make test` runs the whole suite.
PYTHON ?= python3
BIN := .venv/bin
PARTS ?= onnx,mlx,executorch,quantize,structured,report,dev
DEMO_PARTS ?= onnx,quantize
# Two workers, one thread each: vendor libraries that each take every core only slow each other down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test check format clean

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

demo: .venv/.with-demo
	$(BIN)/python examples/demo.py

test: .venv/.with-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

check: .venv/.with-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

format: .venv/.with-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv dist build
