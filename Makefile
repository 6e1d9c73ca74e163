# make demo   a first look: every fixed sampler and weighting on a problem with a known answer
# make test   the test suite, doctests included (make test-slow: the tests that take minutes)
# make lint   ruff and mypy (strict)
# Each creates .venv from requirements.lock on first use, with Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow lint format clean

demo: $(READY)
	$(BIN)/python -m noiseclock.lab.demo

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('noiseclock needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.11')"
	@echo "Installing into .venv (once) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
