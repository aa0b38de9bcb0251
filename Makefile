# On a new machine, run `make demo` or `make test`. Every target builds what it needs and keeps what is up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/tcmgc.yaml
RUNS := runs
# `demo` and `smoke` write to build/demo and build/smoke; `clean` removes these two folders.
DEMO_FOLDER := build/demo
SHARE := $(if $(FAST),--fixture --share features,$(if $(TVR_DATA),,--share encoder))
TABLE1 ?= runs/table1$(if $(FAST),-fast)
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
# Runs on real data use float32, as in the released codes, and up to four GPUs of this machine, since every recipe's batch is
# a multiple of four. Set HARDWARE=cpu or another overlay to change this. Runs on synthetic data use one device.
MACHINE := $(if $(filter-out 0,$(GPUS)),$(if $(filter 1 2 3,$(GPUS)),gpu1,ddp4))
HARDWARE ?= $(if $(FAST),,$(if $(TVR_DATA),$(MACHINE)))

# Overlays for `zero-shot` and `heads`. ON="--config recipes/fixture.yaml" needs no real data or weights.
BACKBONE ?= pe-core-b
ON ?= --config recipes/backbone/$(BACKBONE).yaml
HEADS ?= gare tcmgc ncl dpdv gaid
FEATURES ?= features/$(BACKBONE)
# Store audio and patches only if a head needs them; patches take most of the space.
PARTS := text frames $(if $(filter dpdv,$(HEADS)),patches) $(if $(filter gaid,$(HEADS)),audio)

.PHONY: help install demo demo-search screenshots test test-slow test-oldest test-fake-gpu lint docs smoke zero-shot heads \
  reproduce-table1 verify-released clean

help:
	@echo 'make install           create .venv and install the package in it; then: . .venv/bin/activate'
	@echo 'make demo              install, write 500 synthetic videos, train, show the results, search the videos'
	@echo 'make test              run the tests (make test-slow: the slow tests; make lint: ruff and mypy)'
	@echo 'make test-oldest       test the wheel with the oldest versions that pyproject.toml allows (downloads several GB)'
	@echo 'make test-fake-gpu     find mixed devices and waits for the device without a GPU (Linux; downloads several GB)'
	@echo 'make docs              build the documentation as a site in build/site'
	@echo 'make zero-shot         test a pretrained encoder on MSR-VTT 1k-A, no training: BACKBONE=pe-core-b (needs data)'
	@echo 'make heads             extract features, train the papers'"'"' heads on them: BACKBONE, HEADS="gare tcmgc ncl dpdv gaid"'
	@echo 'make reproduce-table1  run Table 1 of every paper (FAST=1: heads on one shared encoder, synthetic videos)'
	@echo 'make verify-released   compare the authors'"'"' checkpoints with the published results: CHECKPOINTS=FOLDER (needs data)'
	@echo 'make smoke             train two epochs on 24 synthetic videos (make clean: remove the files of demo and smoke)'

install: $(VENV)/.installed

# The package for users. Installs again if pyproject.toml or constraints.txt is newer than this file.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing torch and the other packages: about two and a half minutes if their downloads are cached"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[search]'
	touch $@

# Additional packages for tests, all encoders, and all audio models.
$(VENV)/.complete: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[dev,audio,encoders,search]'
	touch $@

$(DEMO_FOLDER)/msrvtt/MSRVTT_data.json: | $(VENV)/.installed
	@echo "Writing 500 synthetic videos: about half a minute, then six to seven minutes left"
	$(BIN)/tvr data synth msrvtt --root $(DEMO_FOLDER) --videos 500 --seed 0

demo:
	@echo "The demo writes videos, trains, tests, and searches: six to ten minutes on two CPU cores after the installation"
	@$(MAKE) --no-print-directory $(DEMO_FOLDER)/msrvtt/MSRVTT_data.json
	@echo "Training TC-MGC and testing it: five to seven minutes, then half a minute left"
	$(BIN)/tvr fit --config recipes/tcmgc.yaml --config recipes/fixture.yaml --config recipes/demo.yaml \
	  --data.init_args.root $(DEMO_FOLDER) --results.directory $(DEMO_FOLDER)/runs
	@echo "Indexing the 100 test videos and searching them: about half a minute"
	@$(MAKE) --no-print-directory demo-search

# Searches the held-out videos with the newest run, for captions that its test answered correctly.
demo-search: $(VENV)/.installed $(DEMO_FOLDER)/msrvtt/MSRVTT_data.json
	$(BIN)/python benchmarks/demo_search.py --runs $(DEMO_FOLDER)/runs --videos $(DEMO_FOLDER)/msrvtt --out $(DEMO_FOLDER)/index
	@echo; echo "To see the videos: $(BIN)/tvr serve --index $(DEMO_FOLDER)/index, then open http://127.0.0.1:8321/"

# The images of the README and the documentation, from the demo; needs Chromium and its driver.
screenshots: $(VENV)/.complete
	test -d $(DEMO_FOLDER)/index || $(MAKE) demo
	$(BIN)/python benchmarks/screenshots.py --demo $(DEMO_FOLDER) --out docs/images

test: $(VENV)/.complete
	$(BIN)/python -m pytest -n auto --dist loadfile --durations=10

test-slow: $(VENV)/.complete
	$(BIN)/python -m pytest -m slow -n auto --dist loadfile --durations=10

# Tests the wheel without constraints.txt. Plain `pytest` does not add the checkout to the path, so it imports the wheel.
# Warnings are not errors here, since old releases trigger some in each other.
OLDEST := build/oldest
test-oldest:
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --requirement pyproject.toml $(addprefix --extra ,audio encoders vlm search ray mteb slurm)
	$(OLDEST)/bin/uv pip freeze --quiet --python $(OLDEST)/bin/python > $(OLDEST)/versions.txt
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --constraint $(OLDEST)/versions.txt \
	  pytest pytest-xdist hypothesis httpx selenium setuptools
	$(OLDEST)/bin/uv build --quiet --wheel --out-dir $(OLDEST)/wheel
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps $(OLDEST)/wheel/*.whl
	$(OLDEST)/bin/pytest -W default -n auto --dist loadfile

# Runs every method on a fake CUDA device. This needs a CUDA build of torch, which the constraints may not allow.
FAKE_GPU := build/fake-gpu
$(FAKE_GPU)/.installed: pyproject.toml constraints.txt
	test -x $(FAKE_GPU)/bin/python || $(PYTHON) -m venv $(FAKE_GPU)
	grep -vE '^(torch|torchvision|triton)==' constraints.txt > $(FAKE_GPU)/constraints.txt
	$(FAKE_GPU)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(FAKE_GPU)/constraints.txt torch torchvision --editable . pytest
	touch $@

test-fake-gpu: $(FAKE_GPU)/.installed
	$(FAKE_GPU)/bin/python -m pytest -rs tests/test_fake_gpu.py

lint: $(VENV)/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tvr_lightning

$(VENV)/.docs-installed: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site. To read it, open build/site/index.html, or run $(BIN)/mkdocs serve."

smoke: $(VENV)/.installed
	rm -rf build/smoke
	$(BIN)/tvr data synth msrvtt --root build/smoke --videos 24 --seed 1
	$(BIN)/tvr fit --config $(RECIPE) --config recipes/fixture.yaml \
	  --data.init_args.root build/smoke --data.init_args.batch_size 8 --trainer.max_epochs 2 \
	  --trainer.check_val_every_n_epoch 1 --results.directory build/smoke/runs
	test -s build/smoke/runs/*/version_0/results.json

# The fastest result on real data: mean frames of a pretrained encoder, no training.
zero-shot: $(VENV)/.complete
	$(BIN)/tvr test --config recipes/zero-shot.yaml $(ON) --results.directory $(RUNS)/zero-shot

# Extracts features once, then trains the papers' heads on them.
heads: $(VENV)/.complete
	$(BIN)/tvr extract --config recipes/$(if $(filter gaid,$(HEADS)),gaid,clip4clip).yaml $(ON) --config recipes/heads.yaml \
	  $(foreach part,$(PARTS),--parts $(part)) --out $(FEATURES)
	for head in $(HEADS); do $(BIN)/tvr fit --config recipes/$$head.yaml $(ON) --config recipes/heads.yaml \
	  --data.init_args.features $(FEATURES) --results.directory $(RUNS)/heads || exit 1; done

# Without TVR_DATA, runs on synthetic datasets start from one shared encoder; FAST=1 trains only heads on its features.
# Rerun the command to resume. A failed run is a row with its error, and the report is written anyway.
reproduce-table1: $(VENV)/.complete
	$(BIN)/tvr reproduce gare-1 tc-mgc-1a tc-mgc-1b ncl-1 dpdv-1 gaid-1 $(SHARE) \
	  $(if $(HARDWARE),--overlay recipes/hardware/$(HARDWARE).yaml) --out $(TABLE1); status=$$?; \
	  $(BIN)/tvr report $(TABLE1) && exit $$status

# Tests the authors' checkpoints, named by method (xpool.pth, gare.bin, ...), on the real test videos in $TVR_DATA.
CHECKPOINTS ?= released
verify-released: $(VENV)/.complete
	$(BIN)/tvr verify-released $(CHECKPOINTS)

clean:
	rm -rf build/demo build/smoke
