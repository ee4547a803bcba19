# One command for every figure, table and claim of the paper; `make help` lists them.
# The first command that needs Python creates the virtual environment from requirements.lock.

PYTHON ?= python3
VENV   ?= .venv
SCALE  ?= auto
RECORDS ?= own
ARGS   ?=
EXTRA  ?=
TESTS  ?= tests

PY      := $(VENV)/bin/python
READY   := $(VENV)/.installed
NUMBERED := $(shell seq 1 24)
# the specs of a kind that the paper does not number
other    = $(filter-out _% 0% 1% 2%,$(patsubst conf/$1/%.yaml,%,$(sort $(wildcard conf/$1/*.yaml))))
FIGURES := $(addprefix figure-,$(NUMBERED) $(call other,figure))
TABLES  := $(addprefix table-,$(shell seq 1 9) $(call other,table))
SWEEPS  := $(patsubst conf/sweep/%.yaml,sweep-%,$(sort $(wildcard conf/sweep/*.yaml)))

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: FORCE help all $(FIGURES) $(TABLES) $(SWEEPS) figures tables theory surprises claims status plan report \
        publish verify dashboard wandb-sync tensorboard bench-optimizer bench-training bench-engines gpu-check \
        kill-and-resume fuzz recordings test test-slurm \
        test-slow test-all test-examples lint audit format setup setup-cluster lock docker docker-cpu clean distclean

help: # prints every line of this file that starts with two hashes
	@sed -n 's/^## \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# the settings of every product; the default records are omitted
WORDS = $(if $(EXTRA),--extra "$(EXTRA)") scale=$(SCALE) $(filter-out records=own,records=$(RECORDS)) $(ARGS)

## Reproduce the paper (missing runs are trained, finished runs are reused)
##   figure-1 … figure-24   draw a figure: png, pdf and the plotted csv in results/figures/; figure-s2 and figure-s3
##                          explain results that differ from the paper, figure-s6 is Figures 4 and 7 at desktop scale;
##                          figure-<name> draws conf/figure/<name>.yaml
$(FIGURES): figure-%: $(READY)
	@$(PY) -m experiments figure $* $(WORDS)

##   table-1 … table-9      write a table to results/tables/; table-s4 asks why translation goes against AdaShift,
##                          table-s5 whether to use AdaShift or Adam
$(TABLES): table-%: $(READY)
	@$(PY) -m experiments table $* $(WORDS)

# any other name is an error, also with `make -n`
figure-%: FORCE
	$(error there is no $@: the paper has figures 1 to 24, conf/figure also has $(call other,figure))
table-%: FORCE
	$(error there is no $@: the paper has tables 1 to 9, conf/table also has $(call other,table))
sweep-%: FORCE
	$(error there is no $@: conf/sweep has $(SWEEPS:sweep-%=%))
.DEFAULT:
	$(error there is no target $@: make help lists all)

##   figures                draw every figure
##   tables                 write every table
figures tables: $(READY)
	@$(PY) -m experiments $(@:s=) all $(WORDS)

##   theory                 run the experiments on lemmas and theorems
##   surprises              run the experiments that explain results that differ from the paper
##   claims                 judge every claim of the paper from the records: results/claims.md
theory surprises claims: $(READY)
	@$(PY) -m experiments $@ $(WORDS)

##   status                 count finished, running, failed (with the error) and missing runs, estimate the time left;
##                          FIGURE=4 or TABLE=5 selects one and prints the commands for its missing runs
##   plan                   SCALE=paper: the runs, operations, memory and hours of every figure and table, on this
##                          machine and on named GPUs, before anything is trained; FIGURE=4 or TABLE=5 selects one
status plan: $(READY)
	@$(PY) -m experiments $(strip $@ $(FIGURE:%=figure-%) $(TABLE:%=table-%)) $(WORDS)

##   sweep-betas …          run a sweep of conf/sweep; needs ARGS="experiment=resnet_cifar10 optimizer=adashift"
$(SWEEPS): sweep-%: $(READY)
	$(if $(findstring experiment=,$(ARGS)),,$(error $@ needs an experiment: add ARGS="experiment=… optimizer=…"))
	@$(PY) run.py -m sweep=$* scale=$(SCALE) $(ARGS)

##   report                 write one page with all results, results/report.html; RECORDS=published uses the published ones
report: $(READY)
	@$(PY) -m experiments $@ $(WORDS)

##   verify                 train a published run of every experiment again and compare; up to 10 minutes
##   publish                add your runs to the records in results/published/ and regenerate all results there
##   dashboard              W&B: build a report with a section for every figure; needs an account
verify publish dashboard: $(READY)
	@$(PY) -m experiments $@ $(ARGS)

##   wandb-sync             W&B: upload offline runs; ARGS=<folder>/wandb selects another folder
wandb-sync: $(READY)
	@WANDB_DIR=results $(VENV)/bin/wandb sync --yes $(ARGS)

##   tensorboard            show the runs that were trained with tracking=tensorboard in the browser
tensorboard: $(READY)
	@$(VENV)/bin/tensorboard --logdir results/tensorboard $(ARGS)

##   all                    make every figure, table and claim, and the report
# smoke runs are too short to train in a process pool, so figures and tables are made in parallel
all: $(READY)
	@$(MAKE) $(if $(filter smoke,$(SCALE)),-j2) figures tables
	@$(MAKE) surprises
	@$(MAKE) claims
	@$(MAKE) report

##   bench-optimizer        measure time per step, state and bandwidth next to Adam and others: results/benchmarks/
bench-optimizer: $(READY)
	@$(PY) -m benchmarks.optimizer $(ARGS)

##   bench-training         measure steps per second on MNIST and images per second of the input: results/benchmarks/
bench-training: $(READY)
	@$(PY) -m benchmarks.training $(ARGS)

##   bench-engines          run a sweep on every engine, also with a killed launcher and two launchers:
##                          results/benchmarks/; needs setup-cluster
bench-engines: $(READY)
	@$(PY) -m benchmarks.engines $(ARGS)

##   gpu-check              your GPU: AdaShift compared with its reference, every experiment with a CPU, time per step:
##                          results/gpu-check.md
gpu-check: $(READY)
	@$(PY) -m benchmarks.gpu_check $(ARGS)

##   kill-and-resume        kill trainings 50 times, resume them, compare their records: results/benchmarks/
kill-and-resume: $(READY)
	@$(PY) -m benchmarks.kill_and_resume $(ARGS)

##
## Work on the code
# one thread for each of the two processes: more threads than cores are many times slower
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

##   test                   run the tests that are not marked slow; TESTS=tests/adashift selects some
test: $(READY)
	$(PYTEST) -m "not slow" $(TESTS) $(ARGS)

##   test-slow              run the tests that are marked slow
test-slow: $(READY)
	$(PYTEST) -m slow $(TESTS) $(ARGS)

##   test-all               run every test
test-all: $(READY)
	$(PYTEST) $(TESTS) $(ARGS)

##   test-slurm             run a sweep on a one-node Slurm, with a requeued and a cancelled job; needs root and apt-get
test-slurm: setup-cluster
	@tests/slurm/one-node-slurm start
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/slurm $(ARGS); status=$$?; tests/slurm/one-node-slurm stop; exit $$status

##   test-examples          run every file of examples/, with Lightning, Transformers and Accelerate; needs a network
test-examples: build/examples
	OMP_NUM_THREADS=1 $</bin/python -m pytest -rs tests/examples $(ARGS)

# an environment on top of the other one, so that these packages stay out of the lock
SITE = python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
build/examples: examples/requirements.txt $(READY)
	@$(PY) -m venv $@
	@$(VENV)/bin/$(SITE) > "$$($@/bin/$(SITE))/base.pth"
	@$@/bin/pip install --quiet -r $< || { rm -rf $@; exit 1; }
	@touch $@

##   fuzz                   try 300 random command lines: each runs or fails with a one-line error
fuzz: $(READY)
	OVERRIDES=300 OMP_NUM_THREADS=1 $(PY) -m pytest tests/experiments/config/test_overrides.py $(ARGS)

##   recordings             record terminal sessions as text in docs/recordings/; about 5 minutes
recordings: $(READY)
	@$(PY) docs/recordings/make.py $(ARGS)

##   lint                   ruff (rules and format) and mypy
lint: $(READY)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

##   audit                  list known vulnerabilities of the locked packages; needs a network
audit: build/audit
	@$(PYTHON) .ci/audit.py build/audit/bin/pip-audit

build/audit:
	@$(PYTHON) -m venv $@
	@$@/bin/pip install --quiet pip-audit || rm -rf $@   # then the audit reports that it could not run

##   format                 apply ruff's format and automatic fixes
format: $(READY)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

##
## Set up (the commands above do it automatically)
##   setup                  create the virtual environment with the locked versions
setup: $(READY)
	@echo "Ready: $(VENV)"

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is missing or older than 3.11: install Python 3.11 or newer," \
	       "or select one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing the locked packages into $(VENV)."
	@echo "The first time this takes some minutes and about 6 GB, most of it PyTorch."
	@rm -f $@
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet -r requirements.lock
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

##   setup-cluster          install the launchers: joblib, submitit for Slurm, Ray
setup-cluster: $(READY)
	@echo "Adding the launchers of requirements-cluster.lock to $(VENV)."
	@$(PY) -m pip install --quiet -r requirements-cluster.lock

##   lock                   resolve both lock files again; ARGS=--upgrade takes newer versions
COMPILE = build/uv/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
          --generate-hashes --custom-compile-command "make lock" $(ARGS)
lock: build/uv
	$(COMPILE) --extra experiments --extra dev -o requirements.lock
	$(COMPILE) --extra cluster -c requirements.lock -o requirements-cluster.lock

build/uv:
	@$(PYTHON) -m venv $@ && $@/bin/pip install --quiet uv || { rm -rf $@; exit 1; }

##   docker                 build an image for NVIDIA GPUs: adashift
docker:
	docker build -t adashift .

##   docker-cpu             build an image without CUDA: adashift:cpu; TORCH_CPU_INDEX=PyTorch's CPU wheel index
docker-cpu:
	docker build -t adashift:cpu --build-arg DEVICE=cpu --build-arg TORCH_CPU_INDEX="$(TORCH_CPU_INDEX)" .

##   clean                  remove caches; results, data and the virtual environment stay
clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find adashift experiments benchmarks tests -name __pycache__ -prune -exec rm -rf {} +

##   distclean              clean, and remove the virtual environment
distclean: clean
	rm -rf $(VENV)

##
## Variables
##   SCALE=auto             paper, desktop, laptop, smoke; auto: paper if this machine can run it, else laptop
##   RECORDS=own            own: your runs, missing ones are trained; published: never train; all: your runs, else
##                          published ones, else train
##   EXTRA=my_optimizer     another curve in a figure: a file of conf/optimizer, or several separated by commas
##   ARGS=                  more arguments for the command, for example ARGS="tracking=off force=true"
##   VENV=.venv             the folder of the virtual environment
##   PYTHON=python3         the Python that creates it, 3.11 or newer
##
## Examples
##   make figure-1
##   make figure-1 SCALE=smoke
##   .venv/bin/python run.py experiment=counterexample_stochastic optimizer=adashift
##   .venv/bin/python run.py -m experiment=counterexample_stochastic optimizer=adam,adashift 'seed=range(0,4)'
