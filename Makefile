# Every target sets itself up: a virtual environment in .venv with the pinned packages.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# CONSTRAINTS=/dev/null installs the newest releases.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

TRAIN_ENV ?= HalfCheetah-v5
TRAIN_FRAMES ?= 2000000
SEED ?= 0
SOAK_MINUTES ?= 10
TASK ?= HalfCheetah-v5
ALGO ?= appo
SEEDS ?= 100 101 102 103 104
FRAMES ?= 1000000
SCREEN_ENV ?= Swimmer-v5
# Variants: SCREEN = --set "" --set "lr=3e-4 anneal=1"
SCREEN ?=
# Else each process of a test, of which some have many, compiles the package for itself.
unexport PYTHONDONTWRITEBYTECODE

RUN_DIR ?= runs/$(TRAIN_ENV)-appo-$(SEED)-$(shell date +%Y%m%d-%H%M%S)

ROBOT_DIR ?= runs/quadruped-$(SEED)-$(shell date +%Y%m%d-%H%M%S)

.PHONY: install check train robot test test-tutorials test-all test-faults test-gpu test-ray test-learning test-wheel test-matrix soak docs lint type format bench peers learn learning-page screen clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m $(PIP_INSTALL) torch
	$(BIN)/python -m $(PIP_INSTALL) -e '.[dev]'
	touch $@

train: install
	$(BIN)/torchrl-unilab train appo --env $(TRAIN_ENV) --frames $(TRAIN_FRAMES) --seed $(SEED) --run-dir $(RUN_DIR)

robot: install
	$(BIN)/torchrl-unilab train appo --env QuadrupedWalk --frames 1500000 --stop-at 500 --max-seconds 160 --seed $(SEED) --run-dir $(ROBOT_DIR)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

# The notebooks, from the first cell to the last.
test-tutorials: install
	PYTHONSTARTUP=$(CURDIR)/tests/support/fork_server.py $(BIN)/python -m pytest -n 2 --dist loadfile --nbmake tutorials

# The inner loop: what takes no other process to test.
FAST := tests/test_errors.py tests/test_contributing.py tests/test_migration.py tests/modules tests/objectives tests/shm

check: lint type
	$(BIN)/python -m pytest -n 2 --dist loadfile -q $(FAST)

test-all: install
	$(BIN)/python -m pytest --nbmake --hypothesis-profile thorough -m "not gpu and not ray and not faults and not nightly" tests tutorials

test-faults: install
	$(BIN)/python -m pytest -n 2 -m "not gpu" tests/faults
	$(BIN)/python -m tests.faults.table

# Each task with settings of its own, to the end, one after the other.
test-learning: install
	$(BIN)/python -m pytest -m nightly tests/learning

soak: install
	$(BIN)/python -m tests.benchmarks.soak --minutes $(SOAK_MINUTES)

# The wheel, built, installed into an environment of its own, and tested from there.
WHEEL := build/wheel-test
FROM_WHEEL := tests/test_package.py tests/test_cli.py tests/configs tests/hydra tests/weight_update tests/trainers/runs/test_train.py

test-wheel: install
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf build
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m $(PIP_INSTALL) torch
	$(WHEEL)/venv/bin/python -m $(PIP_INSTALL) "$$(echo dist/*.whl)[test]"
	cp -r tests tutorials pyproject.toml $(WHEEL)
	cd $(WHEEL) && venv/bin/python -c "import torchrl_unilab; assert 'site-packages' in torchrl_unilab.__file__"
	cd $(WHEEL) && venv/bin/python -m pytest -n 2 --dist loadfile -q $(FROM_WHEEL)

# Other versions of what we rest on; gigabytes. SETS="oldest newest".
SETS ?= pinned oldest newest

test-matrix:
	$(PYTHON) -m tests.matrix --sets $(SETS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu tests

test-ray: install
	$(BIN)/python -m pytest -m ray tests
	$(BIN)/python -m tests.distributed.table

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

# The site in build/site, from tutorials/ and from the code itself.
docs: install
	$(BIN)/python -m $(PIP_INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file .github/mkdocs.yml

type: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# BUSY: programs that never wait, beside; BENCH: arguments. bench-peers makes environments below .venv-peers.
BUSY ?= 0
BENCH ?=
BENCHES := weights tearing env collect appo overlap ring replay off-policy-update off-policy race peers nodes
.PHONY: $(BENCHES:%=bench-%)
$(BENCHES:%=bench-%): bench-%: install
	$(BIN)/python -m tests.benchmarks.beside $(BUSY) $* $(BENCH)

bench-env: peers
peers: install
	$(BIN)/python -m $(PIP_INSTALL) -e '.[peers]'

bench: $(filter-out bench-peers bench-nodes,$(BENCHES:%=bench-%))

# One JSON line per seed. OUT names another file, SET other settings ("epochs=10 lr=3e-4"), KEEP a directory for the runs, EVERY the frames from one evaluation to the next.
learn: install
	$(BIN)/python -m tests.benchmarks.learn $(TASK) $(ALGO) --seeds $(SEEDS) --frames $(FRAMES) $(if $(OUT),--out $(OUT)) $(if $(SET),--set $(SET)) $(if $(KEEP),--keep $(KEEP)) $(if $(EVERY),--evaluate-every $(EVERY))

learning-page: install
	$(BIN)/python -m tests.benchmarks.learning_page

screen: install
	$(BIN)/python -m tests.benchmarks.screen $(SCREEN_ENV) $(SCREEN)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
