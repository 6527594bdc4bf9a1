# Each target sets up everything it needs: a virtual environment in .venv, installed under constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
TRITON := 3.6.0
LAB := .venv/.lab
STAMP := .venv/.installed

.PHONY: demo test test-slow check format docs clean

demo: $(LAB)
	$(BIN)/anon demo

test: check
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis site

$(LAB): pyproject.toml constraints.txt
	@echo "installing into .venv, once ..."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[lab]"
	touch $@

$(STAMP): $(LAB)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	# For its interpreter; a CUDA build of torch brings, and insists on, a Triton of its own.
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install --quiet triton==$(TRITON)
	touch $@
