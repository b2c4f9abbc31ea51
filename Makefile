# `make check` is the whole of what .ci/run checks. PYTHON is the interpreter that has the [test] extra.
# `make nightly` looks deeper, for hours; NIGHT is its seed: another one, other problems.
PYTHON ?= python
NIGHT ?= 1

.PHONY: check lint types test quick format nightly

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

nightly:
	$(PYTHON) tests/oracle/compare.py --problems 200000 --seed $(NIGHT)0000000
	$(PYTHON) tests/oracle/methods.py --problems 4000 --seed $(NIGHT)000000
	$(PYTHON) tests/oracle/mutate_certificates.py --certificates 2000 --seed $(NIGHT)0000
	$(PYTHON) tests/reliability/attack.py --mutations 4600 --seed $(NIGHT)
	$(PYTHON) tests/reliability/kills.py --kills 200 --seed $(NIGHT)
	$(PYTHON) tests/hooks/older_torch.py 2.1.0
	$(PYTHON) tests/hooks/older_torch.py 2.6.0
	$(PYTHON) tests/hooks/older_torch.py 2.7.1 --tests

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
