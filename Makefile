# Both targets use the environment that scripts/setup_env.sh makes; VENV names another one.
VENV ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: check format test

check:
	ruff check .
	ruff format --check .
	pyright
	lint-imports

format:
	ruff check --fix .
	ruff format .

test:
	bash scripts/test.sh
