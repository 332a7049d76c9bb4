# make help says what there is. Variables: PROFILE, DEVICE, DATA, SEEDS, STAND_IN.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REPRO := $(BIN)/python -m repro
STAMP := $(VENV)/.installed
PAPERS := mbs dualbatch adaptive outofcore microconv together
NOTEBOOK_mbs := 01_mbs
NOTEBOOK_dualbatch := 02_dualbatch
NOTEBOOK_adaptive := 03_adaptive
NOTEBOOK_outofcore := 04_outofcore
NOTEBOOK_microconv := 05_microconv
NOTEBOOK_together := 06_together

# Threads that wait by spinning stop each other for seconds where cores are shared.
export OMP_WAIT_POLICY ?= passive
# Ray has its workers give way to everything else (nice 15), and whoever waits for them too.
export RAY_worker_niceness ?= 0
# Keeps pip and papermill from asking or telling what is not about this project.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# As it was typed, spaces and all: abspath would take a path with one for two.
ifdef DATA
export REPRO_DATA := $(value DATA)
endif
# Read by the shell, which takes no quote within them for an end.
export PROFILE DEVICE SEEDS HOURS
# Whether other data may stand in for a paper's own under the profile paper.
export REPRO_STAND_IN ?= $(STAND_IN)

RUN_FLAGS := $(if $(PROFILE),--profile "$$PROFILE") $(if $(DEVICE),--device "$$DEVICE") \
	$(if $(SEEDS),--seeds "$$SEEDS")
HOURS_FLAG := $(if $(HOURS),--hours "$$HOURS")
# One line for a Python that is too old or too new, before anything is made; none where it fits.
SUPPORTED := $(shell sed -n 's/^requires-python = "\(.*\)"/\1/p' pyproject.toml)
COMPARE := import re, sys; \
	low, high = [tuple(map(int, v.split("."))) for v in re.findall("[0-9]+[.][0-9]+", sys.argv[1])]; \
	low <= sys.version_info[:2] < high or sys.stdout.write("it is " + sys.version.split()[0])
UNFIT = $(shell python=$(BIN)/python; advice='remove $(VENV) and run'; \
	test -x $$python || { python="$(PYTHON)"; advice=run; }; \
	why=$$("$$python" -c '$(COMPARE)' '$(SUPPORTED)' 2>/dev/null) || why='it does not run'; \
	test -z "$$why" || echo "repro needs Python $(SUPPORTED), and not $$python, as $$why:" \
	"$$advice make setup PYTHON=python3.12, or another that fits")
# Where an accelerator is present the profile is gpu, elsewhere quick.
CHOSEN = $(if $(PROFILE),"$$PROFILE",$$($(BIN)/python -c "from repro.experiments.arguments import \
	default_profile; print(default_profile())"))

.DEFAULT_GOAL := help
.PHONY: help setup lab data test test-fast test-thorough coverage \
	unit-methods unit-dualbatch unit-experiments unit-rest unit-device unit-gpu nbval smoke smoke-runs \
	smoke-simulated recipes docs doctor gpu reproduce-all golden $(PAPERS:%=reproduce-%) report status lint typecheck clean

help:  ## say what the targets do
	@grep -hE '^[a-z%-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18
	@echo "reproduce-PAPER   compute one paper's records and notebook; PAPER is one of: $(PAPERS)"
	@echo "Variables: PROFILE=smoke|quick|long|gpu|paper DEVICE=cpu|cuda DATA=folder SEEDS=3 or 0,5,7"
	@echo "           HOURS=2.5 (begin no run after that) STAND_IN=1"

setup: $(STAMP)  ## make the environment in .venv and install

$(STAMP): pyproject.toml constraints.txt
	$(eval PROBLEM := $(UNFIT))$(if $(PROBLEM),$(error $(PROBLEM)))
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install -q -c constraints.txt torch
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[notebooks,dev,cluster]'
	@touch $@

gpu: $(STAMP)  ## make the most of a GPU for MINUTES=10: the missing records that matter most
	@$(REPRO) gpu $(if $(MINUTES),--minutes "$$MINUTES" --out "$(or $(OUT),results/local/session)",--list) \
		$(if $(DEVICE),--device "$$DEVICE")

doctor: $(STAMP)  ## say what this machine is, whether each method works on it (DEVICE), what fits
	@$(REPRO) doctor $(if $(DEVICE),--device "$$DEVICE")

reproduce-all: $(STAMP)  ## reproduce every table and figure, resumable, then print the verdicts
	@failed=0; \
	$(REPRO) run all $(RUN_FLAGS) $(HOURS_FLAG) || { failed=$$?; test $$failed != 2 || exit 2; }; \
	$(REPRO) notebooks $(RUN_FLAGS) --profile $(CHOSEN) || failed=1; \
	$(REPRO) report --profile $(CHOSEN) || failed=1; \
	if [ $$failed != 0 ]; then echo "some pieces failed: make status"; fi; exit $$failed

$(PAPERS:%=reproduce-%): reproduce-%: $(STAMP)
	@$(REPRO) run $* $(RUN_FLAGS) $(HOURS_FLAG) && \
	$(REPRO) notebooks $(NOTEBOOK_$*) $(RUN_FLAGS) --profile $(CHOSEN)

# Long ones first, one more than cores, since some wait for processes that they start.
PYTEST := $(BIN)/python -m pytest
METHODS := $(patsubst %,tests/%,$(filter-out dualbatch together,$(PAPERS)))
# Some other tests go along, for they share toy records with those of the experiments.
WITH_RECORDS := tests/experiments tests/test_cli.py tests/test_notebooks.py
UNIT := unit-dualbatch unit-experiments unit-methods unit-rest
CHOICE := not gpu and not slow
test: $(STAMP)  ## unit tests, notebook validation, a smoke reproduction: five minutes on two cores
	@$(MAKE) --no-print-directory -j3 --output-sync=target smoke-runs $(UNIT) unit-gpu unit-device nbval

test-fast: $(STAMP)  ## unit tests alone, without an accelerator's, while you work
	@$(MAKE) --no-print-directory -j3 --output-sync=target $(UNIT)

test-thorough: $(STAMP)  ## what make test leaves to CI: tests that take seconds each
	@$(MAKE) --no-print-directory -j2 --output-sync=target CHOICE="slow and not gpu" \
		ON_DEVICE="slow" smoke $(UNIT) unit-device

unit-experiments: $(STAMP)
	@$(PYTEST) -m "$(CHOICE)" $(WITH_RECORDS)

unit-methods: $(STAMP)
	@$(PYTEST) -m "$(CHOICE)" $(METHODS)

# By itself, as it waits for the processes of clusters.
unit-dualbatch: $(STAMP)
	@$(PYTEST) -m "$(CHOICE)" tests/dualbatch

unit-rest: $(STAMP)
	@$(PYTEST) -m "$(CHOICE)" tests $(WITH_RECORDS:%=--ignore %) $(METHODS:%=--ignore %) \
		--ignore tests/simulated_device --ignore tests/dualbatch

# By themselves: a process that has loaded the simulated device keeps it.
ON_DEVICE := not slow
unit-device: $(STAMP)
	@$(PYTEST) -m "$(ON_DEVICE)" tests/simulated_device

# Only the files that have such tests: to collect the others takes longer than to run these.
unit-gpu: $(STAMP)
	@$(PYTEST) -m gpu $$(grep -rl --include='test_*.py' \
		--exclude-dir=simulated_device 'mark\.gpu' tests)

coverage: $(STAMP)  ## which lines the unit tests run, in their own processes, and which not
	@rm -f .coverage .coverage.*
	@failed=0; $(MAKE) --no-print-directory -j3 --output-sync=target \
		PYTEST="$(BIN)/python -m coverage run -m pytest" CHOICE="not gpu" \
		$(UNIT) || failed=1; \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report; exit $$failed

golden: $(STAMP)  ## compute the cheapest reference records again: has a result changed?
	@$(REPRO) verify

nbval: $(STAMP)  ## run the notebooks as they are and compare their outputs
	@$(BIN)/python -m pytest -p no:warnings --nbval --nbval-sanitize-with notebooks/sanitize.cfg \
		notebooks

SMOKE = folder=$$(mktemp -d) && REPRO_RESULTS="$$folder" && OMP_NUM_THREADS=1 && \
	export REPRO_RESULTS OMP_NUM_THREADS && $(REPRO) run all --profile smoke
smoke: $(STAMP)  ## every experiment and notebook end to end at toy scale, in a folder of its own
	@$(SMOKE) && $(REPRO) notebooks --profile smoke && rm -r "$$folder" && \
	echo "smoke reproduction passed"

smoke-runs: $(STAMP)  ## every experiment alone, likewise
	@$(SMOKE) && rm -r "$$folder" && echo "smoke runs passed"

smoke-simulated: $(STAMP)  ## the same runs on the simulated accelerator, watched for races
	@folder=$$(mktemp -d) && REPRO_RESULTS="$$folder" PYTHONPATH=tests \
	$(BIN)/python -m simulated_device smoke && rm -r "$$folder"

recipes: $(STAMP)  ## run the files of examples with the libraries they name; compare with ordinary training
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[recipes,cluster]'
	@$(BIN)/python -m pytest tests/test_recipes.py tests/test_torchrun.py

# Not --quiet, which would keep warnings from --strict.
docs: $(STAMP)  ## build the site of docs and notebooks into build/site, and follow every link
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@$(REPRO) report --output build/report/report.md
	@$(BIN)/python docs/explorers.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built build/site/index.html"

lab: $(STAMP)  ## open the notebooks in JupyterLab
	@$(BIN)/python -m jupyterlab notebooks --ip=127.0.0.1 $$(test $$(id -u) != 0 || echo --allow-root)

data: $(STAMP)  ## download the datasets that the network allows, say what it could not
	@$(REPRO) data

report: $(STAMP)  ## count the verdicts and write the report as Markdown
	@$(REPRO) report $(if $(PROFILE),--profile "$$PROFILE")

status: $(STAMP)  ## say which records of this machine are missing or failed
	@$(REPRO) status $(if $(PROFILE),--profile "$$PROFILE")

lint: $(STAMP)  ## ruff
	@$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check .

typecheck: $(STAMP)  ## mypy
	@$(BIN)/python -m mypy

clean:  ## remove the environment, caches, executed notebooks; records and datasets stay
	@rm -rf $(VENV) build *.egg-info .ruff_cache .mypy_cache .pytest_cache .coverage*
	@rm -rf results/local/notebooks
	@find repro tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
