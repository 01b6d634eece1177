# One line a verb. Everything is installed in .venv; delete it to install again. Runs are not in there: `sparsebp doctor`
# says where.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: coverage test-fast wheel-test bare-test test-long test-oldest test-k8s quickstart picture results results-study results-masked setup test chaos mutants browser check style fix docs site screenshots bench image clean help

BASE ?= python:3.12-slim
IMAGE ?= sparsebp:latest
# cuda, or cpu: several GB smaller.
VARIANT ?= cuda
# Such as: PIP_OPTIONS="--extra-index-url ..." for torch without CUDA; BUILD_OPTIONS="--network host".
PIP_OPTIONS ?=
BUILD_OPTIONS ?=
# Processes of `make test`: one more than two cores, since tests of daemons and killed runs wait a third of their time.
WORKERS ?= 3
# The ids of the runs of make quickstart, whatever else runs meanwhile.
QUICKSTART = .venv/quickstart
# Percent of public names whose types a checker must know without guessing; the path makes it find package and torch.
TYPES_KNOWN = 98

quickstart: .venv/runtime  ## install, train dense and with the same gradient for less work, compare the two
	$(BIN)/sparsebp quickstart --ids $(QUICKSTART)
	@echo "docs/guide/quickstart.md explains each number; docs/guide/lossless.md does this in your own Trainer or loop."

picture: .venv/develop  ## record the runs of make quickstart as the README's picture and numbers
	$(BIN)/sparsebp compare $$(cat $(QUICKSTART)) -o json | $(BIN)/python benchmarks/quickstart_picture.py docs/picture/quickstart.svg
	$(BIN)/sparsebp compare $$(cat $(QUICKSTART)) -o md > docs/picture/quickstart.part
	mv docs/picture/quickstart.part docs/picture/quickstart.md
	$(BIN)/python docs/generate.py

results: results-study results-masked  ## both studies of docs/results, three seeds a part (more than half an hour at two quiet cores)

results-study: .venv/runtime  ## the study, dense at the cost of two of its parts, and the report
	$(BIN)/python benchmarks/study.py recipes/study --baseline dense --margin 0.02 --controls tokens-random --kinds fewer_steps smaller_batch --out docs/results/study

results-masked: .venv/runtime  ## masked fine-tuning, the loss mask at the cost of detach, and the report
	$(BIN)/python benchmarks/study.py recipes/masked --baseline loss-mask --margin 0.02 --controls detach --kinds fewer_steps smaller_batch --out docs/results/masked

setup: .venv/develop  ## install for development

test-fast: .venv/develop  ## the tests that need no model
	$(BIN)/pytest tests --fast -n 2 --dist loadfile

test: .venv/develop  ## all tests; of those with many cases a sample, which each commit draws anew
	$(BIN)/pytest --sample -n $(WORKERS) --dist loadgroup --durations 30 --durations-min 10

coverage: .venv/develop  ## the tests that need no model, and the share of lines that they run, with a floor
	$(BIN)/pytest tests --fast -n 2 --dist loadfile --cov sparsebp_cli --cov-report term:skip-covered --cov-fail-under 45

wheel-test: .venv/develop  ## the quickstart with a wheel built from the source distribution, away from the checkout
	bash tests/wheel.sh

bare-test: .venv/develop  ## the same with every requirement from the package index, and the whole quickstart, timed
	BARE=1 bash tests/wheel.sh

test-oldest:  ## the tests with the oldest PyTorch and transformers that are allowed (fetches gigabytes)
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[test,check,docs]' --editable plugins/sparsebp-audit --editable plugins/sparsebp-lab --editable plugins/sparsebp-shelf --editable plugins/sparsebp-stride --editable plugins/sparsebp-tools torch==2.11.0 transformers==5.17.0
	.venv-oldest/bin/pytest -n 2 --dist loadgroup

test-long: .venv/develop  ## all cases of all tests, and the longest tests, each a larger form of one that `make test` runs (hours)
	$(BIN)/pytest -n 2 --dist loadgroup
	$(BIN)/pytest -m long -n 2 --dist loadgroup

chaos: .venv/develop  ## faults in large numbers, counted into docs/reference/promises.md (two hours, with lossless in the second)
	$(BIN)/pytest -m "chaos or promise" -n 2 --dist loadgroup --trials=docs/reference/promises.json
	$(BIN)/python benchmarks/exactness.py --minutes 60 --processes 2 --write
	$(BIN)/python docs/generate.py

mutants: .venv/develop  ## change guard code in one place at a time, and count what its tests notice (half an hour; DRAW=6)
	$(BIN)/python benchmarks/mutants.py $(if $(DRAW),--draw $(DRAW))
	$(BIN)/python docs/generate.py

browser: .venv/develop  ## the report of compare in a headless chromium, which has to be installed
	$(BIN)/pytest -m browser plugins/sparsebp-audit/tests tests/compare tests/docs

test-k8s: .venv/develop  ## the target kubernetes on a real control plane, compiled once (ten minutes; Debian, root)
	bash tests/target/kubernetes.sh
	$(BIN)/pytest -m k8s -s -v tests/target/test_kubernetes.py

check: style docs  ## style, types, layers, docstrings, docs

style: .venv/develop
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/mypy plugins/sparsebp-stride/sparsebp_stride.py plugins/sparsebp-folder/sparsebp_folder.py plugins/sparsebp-depth/sparsebp_depth plugins/sparsebp-audit/sparsebp_audit plugins/sparsebp-lab/sparsebp_lab plugins/sparsebp-shelf/sparsebp_shelf plugins/sparsebp-tools/sparsebp_tools
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_house.py
	$(BIN)/pydoclint --quiet sparsebp_cli plugins
	$(BIN)/pytest -q -m types tests/test_public_names.py
	@PYTHONPATH=.:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	$(BIN)/basedpyright --verifytypes sparsebp_cli --ignoreexternal --pythonpath $(BIN)/python --outputjson | $(BIN)/python -c \
	'import json, sys; known = 100 * json.load(sys.stdin)["typeCompleteness"]["completenessScore"]; \
	print(f"public types: {known:.2f} % known, at least $(TYPES_KNOWN) %"); sys.exit(known < $(TYPES_KNOWN))'

fix: .venv/develop  ## mend what a tool can mend, write again what is generated
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/python docs/generate.py

docs: .venv/develop  ## build the documentation; warnings and stale generated pages are errors
	$(BIN)/python docs/generate.py --check
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

site: .venv/develop  ## the documentation of every version tag and of main, in docs/_build/site
	$(BIN)/python docs/site.py docs/_build/site

screenshots: .venv/develop  ## the picture of the report in docs/picture; chromium has to be installed
	$(BIN)/python docs/screenshots.py

bench: .venv/develop  ## time every form of topk on this machine, which should have nothing else to do
	$(BIN)/sparsebp bench topk --recipe benchmarks/llama-23m.yaml --out benchmarks/results/topk-cpu.json

image:  ## the container image; VARIANT=cpu, BASE, IMAGE, PIP_OPTIONS, BUILD_OPTIONS
	docker build --build-arg BASE=$(BASE) --build-arg VARIANT=$(VARIANT) --build-arg PIP_OPTIONS="$(PIP_OPTIONS)" $(BUILD_OPTIONS) -t $(IMAGE) .

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

clean:  ## remove what was installed and built
	rm -rf .venv .venv-oldest docs/_build dist build .mypy_cache .ruff_cache .pytest_cache

.venv/runtime: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv; PyTorch is large: this takes a few minutes"
	$(BIN)/python -m pip install --editable .
	touch $@

.venv/develop: pyproject.toml plugins/sparsebp-audit/pyproject.toml plugins/sparsebp-lab/pyproject.toml plugins/sparsebp-shelf/pyproject.toml plugins/sparsebp-tools/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test,check,docs]' --editable plugins/sparsebp-audit --editable plugins/sparsebp-lab --editable plugins/sparsebp-shelf --editable plugins/sparsebp-stride --editable plugins/sparsebp-tools
	touch $@ .venv/runtime
