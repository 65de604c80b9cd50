# Every target below sets up .venv by itself, reuses it while it is sound and repairs it when it is not.
#   make test ARGS='-m "not slow"'     arguments for the command that runs
#   make setup PYTHON=python3.12       another interpreter (3.11 or newer)

PYTHON ?= python3
ARGS   ?=
TRAIN  ?= scripts/train_hetero.py --capacity-profile mobile
FUZZ   ?= 200
CHAOS  ?= 200
MICRO  ?= bench/extraction.py bench/mixing.py bench/capacity.py
VENV   := .venv/bin/python
DOCS   := .venv-docs/bin/python
FLOWER := .venv-flower/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup test test-export test-ray test-ray-nodes test-flower test-federation crash kills fuzz chaos mutants train federate bench microbench docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make or repair .venv
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "error: no '$(PYTHON)' on this machine; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup_venv.py

# Compiled files are kept even where the environment says not to: two workers and sixty processes import the same modules.
test: lint ## check the style, then run every test on all cores (ARGS go to pytest)
	PYTHONDONTWRITEBYTECODE= $(VENV) -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-export: setup ## run the tests of exported files with the extra `export`, in an environment of its own (ARGS go to pytest)
	$(VENV) scripts/setup_extra.py export
	.venv-export/bin/python -m pytest tests/test_export.py tests/test_export_formats.py tests/test_export_browser.py $(ARGS)

test-ray: setup ## run the tests of the Ray engine in an environment of its own, and without a network where the system allows it
	$(VENV) scripts/setup_extra.py ray
	@if unshare -n true 2>/dev/null; then set -- unshare -n sh -c 'ip link set lo up && exec "$$0" "$$@"'; else set --; fi; \
	    "$$@" .venv-ray/bin/python -m pytest tests/test_ray.py $(ARGS)

test-ray-nodes: setup ## run on two nodes of a Ray cluster, each in a network namespace, and kill one in a round (as root; a minute)
	$(VENV) scripts/setup_extra.py ray
	.venv-ray/bin/python -m pytest tests/ray_two_nodes.py $(ARGS)

test-flower: setup ## run the tests of federations that need Flower, in an environment of its own (.venv-flower)
	$(VENV) scripts/setup_extra.py flower
	$(FLOWER) -m pytest tests/test_flower_grid.py tests/test_flower.py $(ARGS)

test-federation: setup ## start, kill and stop real processes of a federation over TLS on loopback (ten minutes and more)
	$(VENV) scripts/setup_extra.py flower
	@if unshare -n true 2>/dev/null; then set -- unshare -n sh -c 'ip link set lo up && exec "$$0" "$$@"'; else set --; fi; \
	    "$$@" $(FLOWER) -m pytest -s tests/federation_machines.py tests/federation_endings.py tests/federation_processes.py \
	    tests/federation_refusals.py $(ARGS)

crash: setup ## kill a run at every step that changes a file, resume it, compare (minutes; ARGS=--twice: kill it again)
	PYTHONPATH=. $(VENV) tests/crash_points.py $(ARGS)

kills: setup ## kill runs of seven kinds at random moments, resume them, compare (100 kills, minutes; ARGS='--seed 1': others)
	PYTHONPATH=. $(VENV) tests/kills.py $(ARGS)

fuzz: setup ## feed the commands and the library what no user should (FUZZ=200 inputs of each kind; minutes)
	HETPERM_FUZZ=$(FUZZ) $(VENV) -m pytest --numprocesses auto tests/test_fuzz.py $(ARGS)

chaos: setup ## kill, stop and rob workers (CHAOS=200 faults, a twentieth of them in whole commands; minutes)
	HETPERM_CHAOS=$(CHAOS) $(VENV) -m pytest --numprocesses auto tests/test_chaos.py $(ARGS)

mutants: setup ## break the code in every way that tests/mutants.toml lists; no mutant may survive (minutes; ARGS='--jobs 4 NAME')
	$(VENV) tests/mutants.py $(ARGS)

train: setup ## the main job: clients of five sizes learn whom to learn from (digits, a minute), with tables and pictures
	$(VENV) $(TRAIN) $(ARGS)

federate: setup ## show a federation of real processes on this machine, over TLS (ARGS='--nodes 4 --out federation')
	$(VENV) scripts/setup_extra.py flower
	$(FLOWER) -m hetperm federate $(ARGS)

bench: setup ## time rounds and epochs against a bare torch loop, literal epochs and peers (ARGS='--data-dir DATA': MNIST)
	$(VENV) -m hetperm bench --out bench $(ARGS)

microbench: setup ## time extraction against the naive version, and the solver and the schedule
	@set -e; for file in $(MICRO); do echo "$(VENV) $$file $(ARGS)"; $(VENV) $$file $(ARGS); done

docs: ## build the pages of docs/ into site/, to be opened without a network (in an environment of their own, .venv-docs)
	@test -x $(DOCS) || "$(PYTHON)" -m venv .venv-docs
	@$(DOCS) -c "import material, mkdocstrings" 2>/dev/null || $(DOCS) -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	    | $(DOCS) -m pip install --quiet --requirement /dev/stdin
	NO_MKDOCS_2_WARNING=1 $(DOCS) -m mkdocs build --strict --quiet
	@echo "written to site: open site/index.html in a browser"

lint: setup ## check the style
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .

clean: ## remove .venv, build output and caches
	rm -rf .venv .venv.lock .venv-export .venv-ray .venv-flower .venv-docs site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
