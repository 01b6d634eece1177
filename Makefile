# One line a verb. Everything lives in .venv; delete it to start again.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart setup test chaos check fix docs bench image clean

quickstart: .venv/runtime  ## install, run the quickstart dense and sparse, compare the two
	$(BIN)/sparsebp run recipes/quickstart-dense.yaml recipes/quickstart.yaml && $(BIN)/sparsebp compare @2

setup: .venv/develop  ## install for development

test: .venv/develop  ## the tests
	$(BIN)/pytest

chaos: .venv/develop  ## random faults in large numbers (about half an hour)
	$(BIN)/pytest -m chaos -s

check: .venv/develop  ## style, types, layers, docstrings, docs
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet sparsebp_cli plugins
	$(MAKE) docs

fix: .venv/develop  ## mend what a tool can mend, write again what is generated
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/python docs/generate.py

docs: .venv/develop  ## build the documentation; warnings and stale generated pages are errors
	$(BIN)/python docs/generate.py --check
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

bench: .venv/develop  ## measure the kernels on this machine
	$(BIN)/python benchmarks/linears.py

image:  ## the container image
	docker build -t sparsebp:latest .

clean:
	rm -rf .venv docs/_build dist build .mypy_cache .ruff_cache .pytest_cache

.venv/runtime: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/develop: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test,check,docs]' --editable plugins/sparsebp-stride
	touch $@ .venv/runtime
