# Two commands do all the set-up on a machine with Python >= 3.10 (with venv) and make, quicker with a C++ compiler:
# `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

PYTEST := $(VENV)/bin/pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo demo-docs quick test test-all faults lint format codegen-check emulate bench bench-host bench-frontier bench-head bench-layer exits convert-families convert-peaks convert-sweep docs package wheels test-matrix test-cpus gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

install: $(STAMP) ## .venv with the pinned environment, and ckptkern in it (editable)

# Rebuilt only when one of these is newer than the last installation.
$(STAMP): requirements-dev.txt setup.py pyproject.toml
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ckptkern needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(PY) -c "import ckptkern"
	@touch $@

demo: $(STAMP) ## train a GPT in five variants, side by side, in two minutes; writes demo_output/. ARGS=--quick, ARGS=--full
	$(PY) -m ckptkern demo $(ARGS)

demo-docs: $(STAMP) ## the demo, and its picture and table in the documentation; on a quiet machine. ARGS="--threads 2"
	$(PY) -m benchmarks.dev.demo --full $(ARGS)

quick: $(STAMP) ## after every edit, at most 90 s: the first case of every test that takes no seconds. ARGS="tests/ops -k mlp"
	$(PYTEST) --quick $(ARGS)

test: $(STAMP) ## what every change must pass, a quarter of an hour of two cores: all tests but the long ones. ARGS="tests/test_state.py -k philox"
	$(PYTEST) $(ARGS)

test-all: $(STAMP) ## the long tests too: whole sweeps, trainers, every page and recipe, all sizes; then `make emulate`
	$(PYTEST) --all $(ARGS)
	$(MAKE) emulate ARGS=

faults: $(STAMP) ## inject each fault of tests/faults into a copy and see a test fail; 20 minutes of two cores. ARGS="NAME... --list"
	$(PY) -m tests.faults $(ARGS)

lint: $(STAMP) ## ruff, clang-format and mypy, changing nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*
	$(VENV)/bin/mypy

format: $(STAMP) ## ruff: fix and format; clang-format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i csrc/*

# `make codegen-check` and `make emulate` run with another Triton than the venv's by its version: TRITON=3.6.0, that of the reference GPU
# stack. Its wheel is unpacked beside the venv, and comes first on the path.
OTHER_TRITON := $(if $(TRITON),build/triton-$(TRITON))
WITH_TRITON := PYTHONPATH="$(if $(TRITON),$(CURDIR)/$(OTHER_TRITON):)$(CURDIR)/tests" TRITON_CACHE_DIR="$(CURDIR)/build/triton"

build/triton-%: $(STAMP)
	rm -rf $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==$*
	mv $@.part $@

codegen-check: $(STAMP) $(OTHER_TRITON) ## compile every kernel for sm_80, sm_90 and later and check registers, memory and instructions. ARGS="--all", TRITON=3.6.0
	$(WITH_TRITON) $(PY) -m tests.codegen $(ARGS)

emulate: $(STAMP) $(OTHER_TRITON) ## run the kernels' tests as compiled for sm_80 and sm_90, on the CPU; 40 minutes of two cores. ARGS="-k norm" or ARGS=--quick, TRITON=3.6.0
	$(WITH_TRITON) $(VENV)/bin/pytest $(if $(filter tests/%,$(ARGS)),,tests/triton_kernels) --device emulated -n auto --dist worksteal $(ARGS)

bench: $(STAMP) ## run the benchmark cases on what is here. ARGS="--out DIR --cases mlp"
	$(PY) -m ckptkern bench $(ARGS)

bench-host: $(STAMP) ## the host time of a segment as a ratio to torch.utils.checkpoint's
	$(PY) -m benchmarks.dev.host $(ARGS)

bench-frontier: $(STAMP) ## peak and time of a step over the length of the sequence, beside checkpointing and chunked losses. ARGS="--tokens 1024 2048"
	$(PY) -m benchmarks.dev.frontier --out benchmarks/results/cpu/frontier.csv --picture docs/measurements/frontier.png $(ARGS)

bench-head: $(STAMP) ## time and peak of the mean loss of a large vocabulary, beside torch's in chunks. ARGS="--rounds 5"
	$(PY) -m benchmarks.dev.head --page docs/how-to/linear-cross-entropy.md $(ARGS)

bench-layer: $(STAMP) ## count what 32 layers of a 7B Llama save in each mode, and their matmuls
	$(PY) -m benchmarks.dev.layer --page docs/measurements/figures.md $(ARGS)

exits: $(STAMP) ## run a short DDP training by torchrun and count the runs that do not exit as they should. ARGS="--runs 200"
	$(PY) -m tests.support.exits $(ARGS)

convert-families: $(STAMP) ## convert on 50 families of models of transformers, timm and diffusers, of those that are installed. ARGS="--only llama"
	$(PY) -m benchmarks.conversion.families $(ARGS)

convert-peaks: $(STAMP) ## peak of a step of small models of 26 families of decoders, beside gradient checkpointing. ARGS="Qwen3_5 Gemma4"
	$(PY) -m benchmarks.conversion.peaks $(ARGS)

convert-sweep: $(STAMP) ## the same of every class of transformers that builds small. ARGS="--mapping MODEL_FOR_CAUSAL_LM_MAPPING --out sweep.csv"
	$(PY) -m benchmarks.conversion.sweep $(ARGS)

docs: $(STAMP) ## write signatures and docstrings into docs/reference, and build the documentation into site/; a warning is an error. ARGS="--site-dir DIR"
	$(PY) docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

package: $(STAMP) ## the sdist and the wheel for every machine, checked, into dist/
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*

wheels: ## a wheel with the extension inside for each torch and Python that is here, each tried in an environment of its own, into dist/. TORCH="2.13 2.14" PYTHONS=3.11
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' PYTHONS='$(PYTHONS)' .ci/wheels dist

test-matrix: $(STAMP) ## the suite on the oldest and the newest torch (downloads about 5 GB each). TORCH=2.11|turn, MATRIX=DIR, ARGS=--quick
	TORCH='$(TORCH)' MATRIX='$(MATRIX)' .ci/test-matrix $(PY) $(ARGS)

test-cpus: $(STAMP) ## the suite as on Intel and AMD, with 1, 2 and 4 threads and older instruction sets. ARGS="tests/ops"
	.ci/test-cpus $(PY) $(ARGS)

# No venv, no network: whatever torch PYTHON has.
COMMIT ?= $(shell git describe --always --dirty --abbrev=12 2>/dev/null)
gpu: ## all that is measured on a GPU, in three parts of 570 s: make gpu PART=1 OUT=DIR [IN=DIR] [PYTHON=python3] [DRY=1, without a GPU] [HELP=1]
	@CKPTKERN_COMMIT='$(COMMIT)' $(PYTHON) -m benchmarks.gpu $(if $(HELP),--help) $(if $(PART),--part $(PART)) $(if $(OUT),--out '$(OUT)') \
	  $(if $(IN),--in '$(IN)') $(if $(DRY),--dry) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(WHEELS),--wheels '$(WHEELS)') \
	  --cases='$(CASES)' --models='$(MODELS)' --tests='$(subst ','\'',$(TESTS))' --steps='$(STEPS)'

clean: ## remove builds and caches, not .venv
	rm -rf build dist site *.egg-info ckptkern/_C.*.so .pytest_cache .ruff_cache
	@rm -f $(STAMP)
