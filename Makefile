# Every target does all of its own set-up: a fresh clone needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed
RUNS   := $(VENV)/.runs
FLEET  ?= 4x8xH100
SEEDS  ?= 300
FROM   ?= 0
ROOMS  := schemas system bus scheduler ranking worker client testing tests bench tools docs findings

# where a machine says that Python shall keep no bytecode, each of the many processes that tests start compiles it all
unexport PYTHONDONTWRITEBYTECODE

# what CI runs beyond `make test`: the system layer, the slow ones of the unit layer, the short ones of the release layer
BEYOND := not image and not long and not (unit and not slow) and not (release and slow)

.PHONY: help up test test-system types lint check demo dist deb docs site sim mutants bench release-check clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 15

$(STAMP): pyproject.toml constraints.txt tools/group.py worker/build_hook.py worker/build_launcher.py worker/moorage/worker/supervisor/launcher.c \
		worker/moorage/worker/drivers/container/entry.c worker/moorage/worker/sharing/limiter/limiter.c worker/moorage/worker/sharing/limiter/limiter.h
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/group.py test dev >$(VENV)/group.txt
	$(PIP) -e '.[all]' -r $(VENV)/group.txt
	@touch $(RUNS) $@

# what `make up` needs, which is a part of what the tests need
$(RUNS): pyproject.toml constraints.txt
	@echo "installing moorage into $(VENV): server, top, page and http"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile -e '.[server,top,page,http]'
	@touch $@

up: $(RUNS)  ## a server, a scheduler and simulated GPUs until Ctrl-C: make up FLEET=2x4xL40S
	@exec $(BIN)/moorage up --simulate $(FLEET)

test: $(STAMP)  ## the unit layer and one smoke of real processes, in some three minutes on two cores (no GPU needed)
	$(BIN)/python -m pytest -n 4 --dist loadscope -m "not slow" tests/unit tests/system/test_smoke.py

# four at once on two cores: these tests wait for most of their time
test-system: $(STAMP)  ## real processes, engines, pages that are run, and more cases of the others; what fails runs once more alone
	$(BIN)/python -m tests.again -n 4 --dist loadscope --durations 40 -m "$(BEYOND)" --deselect tests/system/test_smoke.py

types: $(STAMP)  ## mypy, strict, sources and tests
	$(BIN)/mypy

lint: $(STAMP)  ## ruff: rules and format; import-linter: who imports whom
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)
	$(BIN)/lint-imports --no-logo

check: test types lint  ## before a commit; CI runs more

demo: $(STAMP)  ## several hundred real requests on simulated GPUs, the scheduler killed in the middle
	$(BIN)/moorage demo

dist: $(STAMP)  ## sdist, pure wheel and manylinux wheel, in dist/; to publish them: make dist HOME_URL=https://…
	$(BIN)/python -m tools.dist $(if $(HOME_URL),--home $(HOME_URL))

deb: dist  ## a Debian package with all wheels that it needs, the list of its parts (CycloneDX), and SHA256SUMS, in dist/
	@$(BIN)/python tools/group.py deb >$(VENV)/deb.txt
	@$(PIP) -r $(VENV)/deb.txt
	$(BIN)/python -m tools.deb

docs: $(STAMP)  ## regenerate the reference pages from the code
	$(BIN)/python -m tools.generate

site: $(STAMP)  ## the documentation as a site in .site; a broken link is an error
	@$(BIN)/python tools/group.py docs >$(VENV)/docs.txt
	@test -x $(BIN)/zensical || $(PIP) -r $(VENV)/docs.txt
	$(BIN)/python -m tools.generate --schemas
	$(BIN)/zensical build --strict --clean

sim: $(STAMP)  ## whole clusters under faults in virtual time: make sim SEEDS=300 FROM=1000
	$(BIN)/python -m tests.release.sim.many --seeds $(SEEDS) --from $(FROM)

mutants: $(STAMP)  ## break each promise on purpose and see its test fail
	$(BIN)/python -m tests.release.mutants $(if $(ONLY),--only "$(ONLY)") $(if $(JOBS),--jobs $(JOBS))

bench: $(STAMP)  ## measure, and write bench/RESULTS.md; other measurements: python -m bench.<name>
	$(BIN)/python -m bench.run

# first what takes minutes: with TRIAL=1 it says what stands against a publication, and goes on
release-check: deb  ## what a release needs beyond CI, from what make dist made: hours on two cores
	$(BIN)/python -m tools.release $(if $(TRIAL),--trial)
	$(MAKE) test test-system types lint site
	$(BIN)/python -m pytest -n 4 --dist loadscope -m "slow and not image" tests/release
	$(BIN)/python -m pytest -n 4 --dist loadscope -m "long and not image"
	$(BIN)/python -m pytest -n 4 -m "unit and release" tests/unit/scheduler
	tests/other_pythons python3.12 python3.13 debian13 -- -m "not slow"
	tests/kubernetes/build
	$(BIN)/python -m pytest tests/system/worker/drivers/test_kubernetes_driver.py tests/system/worker/drivers/test_conformance.py tests/system/deploy/test_kubernetes.py -k kubernetes
	tests/system/deploy/build
	$(BIN)/python -m pytest tests/system/deploy/test_image.py tests/system/deploy/test_systemd.py tests/system/deploy/test_deb.py tests/system/deploy/test_backups_away.py tests/system/deploy/test_ansible.py
	MOORAGE_TEST_ALL=1 $(BIN)/python -m pytest tests/system/live/test_many_replicas_live.py tests/unit/scheduler/queue/test_groups.py
	for first in 0 100000 200000 300000 400000; do $(BIN)/python -m tests.release.workloads.many --cases 10000 --from $$first || exit 1; done
	$(BIN)/python -m tests.release.sim.many --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.release.sim.many --wide --seeds $(SEEDS) --from $(FROM)
	PYTHONPATH=. $(BIN)/python -m tests.release.chaos.run
	$(BIN)/python -m tests.release.fuzz.many --frames 1000000
	$(BIN)/python -m tests.release.fuzz.live --frames 100000
	$(BIN)/python -m tests.release.mutants
	@$(BIN)/python tools/group.py mutants >$(VENV)/mutants.txt
	$(PIP) -r $(VENV)/mutants.txt
	$(BIN)/python -m tests.release.mutants.library --minutes 2

clean:  ## remove what the targets made
	rm -rf $(VENV) .site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
