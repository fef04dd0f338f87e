# All commands for development and CI. Each target sets up what it needs, and reuses it the next time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2
TEST_JOBS ?= 10
QUICK_JOBS ?= 4
SOURCE ?=
MINUTES ?= 1
NIGHTLY_MINUTES ?= 10
STEPS ?=
TESTS ?=
WORKER_PYTHON ?=
WORKER_COMMAND ?=
SEED ?=
GRAPHS ?=
CLUSTER ?=
PEERS ?=
ROWS ?=
SIZES ?= 1000,5000,20000
STAND_IN_JAVA ?= -XX:TieredStopAtLevel=4 -Xmx3g -Xmn2g
SITE := $(BIN)/sphinx-build --quiet --fail-on-warning --doctree-dir build/doctrees docs build/docs

# Let the programs that tests, demo and benchmark start cache their bytecode, as installed programs do.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup servers check lint types site quick docs test test-contract large chaos fuzz nightly house demo interop bench bench-load bench-items histories screenshots wheel clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	@echo "installing into $(VENV) (once, about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/pip install --quiet --editable ".[server]" --group dev
	@touch $(INSTALLED)

setup: $(INSTALLED) servers ## Install the package, its tools and the local servers.

# The tests need Kafka too, whichever role external workers serve.
servers: $(INSTALLED)
	@$(BIN)/flowkit up --install --external any

check: lint ## Lint, import layers, types, documentation, and tests that need no server and little time (about 75 s).
	@$(MAKE) --no-print-directory --output-sync=target --jobs=3 types site quick

lint: $(INSTALLED)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	@report=$$($(BIN)/lint-imports --no-cache --no-logo) || { echo "$$report"; exit 1; }

types: $(INSTALLED)
	$(BIN)/mypy

site: $(INSTALLED)
	$(SITE)

quick: $(INSTALLED)
	$(BIN)/pytest -q -n $(QUICK_JOBS) -m "not server and not slow and not nightly"

docs: $(INSTALLED) ## Build the documentation as a site: build/docs/index.html.
	@$(SITE)
	@echo "open build/docs/index.html"

test: setup ## All tests but the nightly ones, on real servers started for them (or those of TEMPORAL_ADDRESS, MONGO_URL, KAFKA_BOOTSTRAP_SERVERS).
	$(BIN)/pytest -q -n $(TEST_JOBS) --dist worksteal -m "not nightly"

# The database that MONGO_URL names keeps nothing of these tests. Those that stop or freeze MongoDB are skipped.
test-contract: setup ## Contract and integration tests on the MongoDB that MONGO_URL names, a replica set for example: MONGO_URL=... make test-contract.
	@test -n "$$MONGO_URL" || { echo "set MONGO_URL to a MongoDB server or replica set"; exit 2; }
	FLOWKIT_ALL_DRIVERS=1 $(BIN)/pytest -q -n $(TEST_JOBS) --dist worksteal -m "server and not nightly" -rs $(if $(TESTS),$(TESTS),tests/contract tests/integration)

# MongoDB's stand-in clones the whole document for each update, which takes memory and the optimizing compiler.
large: setup ## The large cases: 5,000 batches a stage, 1,000 increments under kills, 5,000 pulling nodes, up to 20,000 nodes [SIZES=1000,20000].
	@FLOWKIT_LARGE=1 FLOWKIT_SIZES="$(SIZES)" _JAVA_OPTIONS="$(STAND_IN_JAVA)" $(BIN)/pytest -q -s \
		tests/integration/test_endurance.py tests/integration/test_exactly_once.py \
		tests/integration/test_many_pulling_nodes.py tests/integration/test_growth.py \
		tests/integration/test_large_graphs.py tests/integration/test_streaming.py::test_totals_of_many_batches_are_exact

chaos: setup ## Random tasks and actions of operators while processes and servers are killed: make chaos [MINUTES=10] [SEED=n] [TASKS=500] [CLUSTER=1], with Temporal as a cluster on PostgreSQL.
	@FLOWKIT_CHAOS_CLUSTER="$(filter-out 0,$(CLUSTER))" FLOWKIT_CHAOS_MINUTES="$(MINUTES)" FLOWKIT_SEED="$(SEED)" FLOWKIT_CHAOS_TASKS="$(TASKS)" $(BIN)/pytest -q -s tests/integration/test_chaos.py

fuzz: setup ## Random graphs, shared limits, nodes with shards, flows of the gateway and requests for admission against models, and property tests with fifty times the examples: make fuzz [MINUTES=10] [SEED=n] [GRAPHS=n].
	FLOWKIT_FUZZ_MINUTES="$(MINUTES)" FLOWKIT_FUZZ_GRAPHS="$(GRAPHS)" FLOWKIT_SEED="$(SEED)" $(BIN)/pytest -q -s tests/fuzz tests/integration/test_flow_model.py
	FLOWKIT_THOROUGH=1 $(BIN)/pytest -q -n $(JOBS) --dist worksteal -o timeout=3600 \
		tests/unit/test_validation_fuzz.py tests/unit/test_expression_names.py tests/unit/test_flow_round_trip.py tests/contract/test_vars_model.py \
		tests/contract/test_group_commit.py tests/unit/test_contracts.py tests/unit/test_arguments.py tests/unit/test_cron.py

nightly: setup ## What takes an hour: long tests, the integration tests on the newer Temporal server and on a cluster of it, the contract tests with both drivers, the core without its products, then fuzz, chaos and large: make nightly [NIGHTLY_MINUTES=10] [STEPS=long,server,drivers,core,cluster,fuzz,chaos,large].
	@PYTHONPATH=. $(BIN)/python -m tests.nightly --minutes $(NIGHTLY_MINUTES) --jobs $(TEST_JOBS) --steps "$(STEPS)" $(if $(TESTS),--tests "$(TESTS)")

house: $(INSTALLED) ## Report where the code falls into fragments: small modules and helpers with one user, file names that occur twice.
	@PYTHONPATH=. $(BIN)/python -m tests.tools.house

demo: setup ## Index a source tree: make demo [SOURCE=folder] [WORKERS=3] [CHAOS=1] [EXTERNAL=1] [KEEP=1] [REPORT=file].
	@PYTHONPATH=examples $(BIN)/python -m code_index $(if $(SOURCE),--source "$(SOURCE)") \
		$(if $(WORKERS),--workers "$(WORKERS)") $(if $(filter-out 0,$(CHAOS)),--chaos) \
		$(if $(filter-out 0,$(EXTERNAL)),--external) $(if $(filter-out 0,$(KEEP)),--keep) $(if $(REPORT),--report "$(REPORT)")

bench: setup ## Compare wall and processor time with hand-written programs (six minutes): make bench [ROWS=all] [PEERS=1], which also measures DBOS and Prefect, [PEERS=only].
	@$(if $(filter-out 0,$(PEERS)),PYTHONPATH=. $(BIN)/python -m benchmarks.peers)
	@$(if $(filter only,$(PEERS)),,PYTHONPATH=. $(BIN)/python -m benchmarks --rows "$(ROWS)")

bench-load: setup ## A bridge with 1,000 external nodes in flight: memory, CPU time, events per second (some minutes).
	@PYTHONPATH=. $(BIN)/python -m benchmarks.external_load

bench-items: setup ## A node with `map` over up to 100,000 items: time and memory for each (a minute).
	@PYTHONPATH=. $(BIN)/python -m benchmarks.many_items

interop: setup ## Run a public worker, unchanged, in mixed graphs: make interop [WORKER_PYTHON=path] [WORKER_COMMAND=...].
	@PYTHONPATH=examples WORKER_PYTHON="$(WORKER_PYTHON)" WORKER_COMMAND="$(WORKER_COMMAND)" $(BIN)/python -m interop

histories: setup ## Record the histories that later versions must replay.
	@PYTHONPATH=. $(BIN)/python -m tests.replay.record

screenshots: setup ## Take new screenshots for docs/web-ui.md and docs/ui.md; needs Chromium.
	@$(BIN)/pip install --quiet --group screenshots
	@PYTHONPATH=docs $(BIN)/python -m screenshots

wheel: $(INSTALLED) ## Build the wheel, install it in a clean environment, import its packages.
	@rm -rf build/lib build/bdist.* build/clean dist
	@$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	@$(PYTHON) -m venv --without-pip build/clean
	@$(BIN)/pip --python build/clean install --quiet --no-compile dist/*.whl
	@cd build && clean/bin/python -c "import flowkit.workflows.task, flowkit.activities.role_attempt, flowkit.adapters.tasks.store, flowkit.bridge, flowkit; print('wheel', flowkit.__version__, 'imports from', flowkit.__path__[0].split('build/')[-1])"
	@build/clean/bin/flowkit --version
	@cd build && rm -rf new-project && clean/bin/flowkit init new-project >/dev/null && cd new-project && ../clean/bin/flowkit validate new_project.pipeline:flow

clean: ## Remove everything that the targets created.
	rm -rf build dist .flowkit .logs .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)
