# Every target does all of its own set-up: a fresh clone needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEEDS  ?= 300
FROM   ?= 0
MINUTES ?= 30
KILLS  ?= 10
CLUSTER ?= 5
# other Pythons than the one of .venv; debian13 is Debian 13 with its own, and needs root and debootstrap
PYTHONS ?= python3.12 python3.13
ROOMS  := schemas system bus scheduler worker client tests bench tools docs

# where a machine says that Python shall keep no bytecode, each of the many processes that tests start compiles it all
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test test-all test-slow test-pythons demo types lint check docs pictures site mutants bench bench-quick bench-core bench-cli bench-drivers \
        bench-placement bench-decisions bench-fairness bench-queueing bench-ablation bench-peers transcripts nats-image record-frames sim \
        sim-wide sim-long workloads chaos chaos-long soak takeover hostile poison fsyncs fuzz clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt worker/build_hook.py worker/build_launcher.py worker/moorage/worker/supervisor/launcher.c \
		worker/moorage/worker/drivers/entry.c worker/moorage/worker/limiter/limiter.c worker/moorage/worker/limiter/limiter.h
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

test: $(STAMP)  ## the tests, in some four minutes on two cores (real nats-server from the wheel; no GPU needed)
	$(BIN)/python -m pytest -n 4 --dist loadscope -m "not slow"

test-all: test test-slow  ## those, and the slow ones

test-slow: $(STAMP)  ## what `make test` leaves out: more seeds, the pages of the docs, containers, whatever takes seconds
	$(BIN)/python -m pytest -n 4 --dist loadscope -m slow

test-pythons:  ## the tests but the slow ones on each of PYTHONS="python3.12 python3.13" that is found; or on debian13
	tests/other_pythons $(PYTHONS) -- -m "not slow" $(TESTS)

demo: $(STAMP)  ## several hundred real requests on simulated GPUs, the scheduler killed in the middle
	$(BIN)/moorage demo

types: $(STAMP)  ## mypy, strict, sources and tests
	$(BIN)/mypy

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)

check: test types lint  ## before a commit; CI runs more

nats-image: $(STAMP)  ## nats-server as an image for Docker; no registry needed
	PYTHON=$(BIN)/python deploy/nats/build

record-frames: $(STAMP)  ## what this release says, for the tests of the next one: tests/frames/
	$(BIN)/python -m tests.frames.record

docs: $(STAMP)  ## regenerate the reference pages and the JSON schemas from the code
	$(BIN)/python -m tools.generate

pictures: $(STAMP)  ## draw those of docs/scheduling.md with moorage simulate
	$(BIN)/python -m tools.pictures

site: $(STAMP)  ## the documentation as a site in .site; a broken link is an error
	@test -x $(BIN)/zensical || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --strict --clean

transcripts: $(STAMP)  ## write down every help and a first session as tests/cli/transcripts (needs tmux)
	$(BIN)/python -m tests.cli.transcribe

sim: $(STAMP)  ## whole clusters under faults in virtual time: make sim SEEDS=300 FROM=1000
	$(BIN)/python -m tests.sim.many --seeds $(SEEDS) --from $(FROM)

sim-wide: $(STAMP)  ## the same with restores, other settings, other devices, and services that follow their jobs
	$(BIN)/python -m tests.sim.many --wide --seeds $(SEEDS) --from $(FROM)

sim-long: SEEDS = 10000
sim-long: sim  ## ten thousand of them, on every core

workloads: CASES ?= 10000
workloads: $(STAMP)  ## random fleets, requests and acts, confirmed by a reference scheduler; goes on where it was stopped; CASES=10000 FROM=0
	$(BIN)/python -m tests.workloads.many --cases $(CASES) --from $(FROM)
	$(BIN)/python -m tests.workloads.many --cases $(CASES) --from $$((100000 + $(FROM)))
	$(BIN)/python -m tests.workloads.many --cases $(CASES) --from $$((200000 + $(FROM)))
	$(BIN)/python -m tests.workloads.many --cases $(CASES) --from $$((300000 + $(FROM)))
	$(BIN)/python -m tests.workloads.many --cases $(CASES) --from $$((400000 + $(FROM)))

fuzz: $(STAMP)  ## a million frames over everything that decodes, 100,000 at a running system
	$(BIN)/python -m tests.fuzz.many --frames 1000000
	$(BIN)/python -m tests.fuzz.live --frames 100000

chaos: $(STAMP)  ## real processes killed, stopped, cut off and filled up under load; some five minutes
	PYTHONPATH=. $(BIN)/python -m tests.chaos.run $(if $(SEED),--seed $(SEED))

chaos-long: $(STAMP)  ## the figures of that; some 25 minutes on two quiet cores
	PYTHONPATH=. $(BIN)/python -m tests.chaos.run --long $(if $(SEED),--seed $(SEED))

soak: $(STAMP)  ## half of the peak rate for MINUTES=30: memory and descriptors stay flat
	PYTHONPATH=. $(BIN)/python -m tests.chaos.pressure soak --minutes $(MINUTES)

takeover: $(STAMP)  ## from a leader's SIGKILL to the next accepted submit, default numbers: KILLS=10, of both leaders of three servers CLUSTER=5
	PYTHONPATH=. $(BIN)/python -m tests.chaos.takeover --kills $(KILLS) --cluster $(CLUSTER)

hostile: $(STAMP)  ## throughput beside fifty slow and hostile observers and submitters
	PYTHONPATH=. $(BIN)/python -m tests.chaos.pressure hostile

poison: $(STAMP)  ## throughput beside a tenant whose requests make the scheduler fail
	PYTHONPATH=. $(BIN)/python -m tests.chaos.poison

fsyncs: $(STAMP)  ## fsyncs for each acknowledged append, counted by strace (which must be installed)
	PYTHONPATH=. $(BIN)/python -m tests.chaos.fsyncs

mutants: $(STAMP)  ## break each promise on purpose and see its test fail
	$(BIN)/python -m tests.mutants $(if $(ONLY),--only "$(ONLY)") $(if $(JOBS),--jobs $(JOBS))

bench: $(STAMP)  ## measure, and write bench/RESULTS.md
	$(BIN)/python -m bench.run

bench-quick: $(STAMP)  ## one round of everything, written nowhere
	$(BIN)/python -m bench.run --rounds 1 --dry

bench-core: $(STAMP)  ## the scheduler's CPU µs a job by step, no server; scaled for a busy machine; BEFORE=revision
	$(BIN)/python bench/steps.py $(if $(BEFORE),--before $(BEFORE))

bench-placement: $(STAMP)  ## allocation on real traces and on lists made from them, ours against FGD and the classics; TRACES= another folder
	$(BIN)/python -m bench.placement.run --keep .cache/placement $(if $(TRACES),--traces $(TRACES),--made)

bench-decisions: $(STAMP)  ## what a decision costs: µs mean, p50, p99, and the memory of the ranking
	$(BIN)/python -m bench.placement.decisions

bench-peers: $(STAMP)  ## ours beside Ray, Dask, HyperQueue and Slurm, each from its own package, into bench/RESULTS-peers.md
	$(BIN)/python -m bench.peers.run

bench-fairness: $(STAMP)  ## two tenants of weights 3:1 on real processes for ten minutes
	$(BIN)/python -m bench.fairness

bench-queueing: $(STAMP)  ## waits on the Philly jobs and copies of them: ours beside FIFO, EASY, greedy backfill and SJF
	$(BIN)/python -m bench.queueing --keep .cache/queueing --out bench/QUEUEING.md

bench-ablation: $(STAMP)  ## what each part of ranking and of reservations brings: runs without it, printed
	$(BIN)/python -m bench.ablation ranking --keep .cache/ablation
	$(BIN)/python -m bench.ablation queueing --keep .cache/ablation

bench-drivers: $(STAMP)  ## containers: cost over the engine's own, and what is left of 200 of them and of 20 killed agents
	$(BIN)/python -m bench.drivers

bench-cli: $(STAMP)  ## processor time of one-shot commands over bare Python's
	$(BIN)/python -m bench.cli

clean:  ## remove what the targets made
	rm -rf $(VENV) .site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
