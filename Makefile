# `make check` is the whole of what .ci/run checks. PYTHON is the interpreter that has the [test] extra.
PYTHON ?= python

.PHONY: check lint types test quick format

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -n auto --dist worksteal

quick:
	$(PYTHON) -m pytest -n auto --dist worksteal -m "not slow"

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
