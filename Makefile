# The only set-up: `make quickstart` and `make test` make .venv when it is missing. Needs Python >= 3.11, git, a C compiler.
# `make quickstart ARGS="seed=1 rl.steps=60"` changes keys of the recipe.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test lint check bench base install clean

quickstart: $(VENV)/.installed
	$(BIN)/etude quickstart $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# Etude beside a peer, as ratios; prints, asserts nothing.
bench: $(VENV)/.installed-dev
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

install: $(VENV)/.installed

# Trains again, from nothing, the base model that ships in src/etude/assets/base (about three hours on two cores).
base: $(VENV)/.installed
	$(BIN)/etude pretrain recipes/base.toml --run runs/base
	$(BIN)/etude pretrain recipes/base2.toml --run runs/base2
	$(BIN)/etude pretrain recipes/base2.toml --run runs/base3 init=runs/base2/stages/pretrain seed=1 stage.max_seconds=3000
	cp runs/base3/stages/pretrain/* src/etude/assets/base/

# torch comes first and alone: its CPU wheels live in an index of their own, PyPI's pull several gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Etude needs Python >= 3.11; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(PYTHON) scripts/install_torch.py $(BIN)/pip constraints.txt
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
