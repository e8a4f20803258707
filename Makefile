# make demo   install what is needed, then run the main job end to end on this machine
# make test   install what is needed, then run the tests
# VENV=DIR uses another virtual environment (one with the packages already in it is taken as it is with INSTALL=no).

VENV ?= .venv
INSTALL ?= yes
STAMP := $(VENV)/.slipstream-installed
PY := $(VENV)/bin/python
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: demo test lint install clean

demo: install
	$(PY) -m deploy demo $(DEMO_ARGS)

test: install
	$(PY) -m pytest $(PYTEST_ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy protocol deploy learner generators rewardd

ifeq ($(INSTALL),yes)
install: $(STAMP)

$(STAMP): pyproject.toml deploy/install.sh
	bash deploy/install.sh "$(VENV)"
	touch "$(STAMP)"
else
install:
	@test -x "$(PY)" || { echo "$(PY) does not exist: set VENV, or INSTALL=yes" >&2; exit 1; }
endif

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
