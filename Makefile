# make demo   eight methods compared on small digits: a report with pictures, in three to eight minutes
# make test   the test suite, doctests included (make test-slow: the tests that take minutes; make test-integrations: with Lightning, W&B and others)
# make lint   ruff and mypy (strict)
# make docs   the documentation as a site, in site/
# make wheel  a wheel in dist/, tried in an empty environment
# Each creates .venv from requirements.lock on first use, with Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow test-integrations lint docs wheel format clean

demo: $(READY)
	$(BIN)/noiseclock compare digits --samplers uniform min-snr p2 log-normal speed+change-aware adaptive lsm variance-optimal \
		--seeds 4 --out results/demo --updates 240 --every 120 --batch 32 --channels 16 --lr 2e-3 --warmup 30 --ema 0.98 --samples 400 --solver-steps 15 --vlb-images 0 --jobs 2

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-integrations: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-integrations.lock
	$(BIN)/python -m pytest -n 2 tests/test_docs.py tests/test_integrations_*.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m pytest -m slow tests/test_release.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('noiseclock needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.11')"
	@echo "Installing into .venv (once) ..."
	$(PYTHON) -m venv .venv
	@# a third of the time would go into compiling modules, most of which nobody imports
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
