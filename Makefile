# Two commands on a fresh machine: `make demo` and `make test`. Every target makes what it needs and notices what is there.
PYTHON ?= python3
VENV := .venv
COMMA := ,
BIN := $(VENV)/bin
RECIPE ?= recipes/tcmgc.yaml
RUNS := runs
# `demo` and `smoke` write to build/demo and build/smoke, and `clean` removes these two folders.
DEMO_FOLDER := build/demo
# From random weights: without dropout on its attention TC-MGC trains on the factorised form, so that twice the epochs take
# less time; what lies on top of the encoder keeps the paper's learning rate, and softer weights reach more of a new encoder.
DEMO ?= --trainer.max_epochs 60 --trainer.check_val_every_n_epoch 10 --model.init_args.tcmgc.attention.dropout 0 \
  --model.init_args.optimizer.lr 1e-4 --model.init_args.tcmgc.similarity_aggregation.init_args.softmax_lambda 10

SHARE := $(if $(FAST),--fixture --share features,$(if $(TVR_DATA),,--share encoder))
TABLE1 ?= runs/table1$(if $(FAST),-fast)
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
# Real data are trained on in float32, as the released codes do, on the GPUs of this machine; HARDWARE=cpu or another overlay
# replaces that. At most four, since every recipe's batch divides by four. Runs on synthetic data use one device.
MACHINE := $(if $(filter-out 0,$(GPUS)),$(if $(filter 1 2 3,$(GPUS)),gpu1,ddp4))
HARDWARE ?= $(if $(FAST),,$(if $(TVR_DATA),$(MACHINE)))

# What lies on top of a recipe in `zero-shot` and `heads`; ON="--config recipes/fixture.yaml" needs no data or weights.
BACKBONE ?= pe-core-b
ON ?= --config recipes/backbone/$(BACKBONE).yaml
HEADS ?= gare tcmgc ncl dpdv gaid
FEATURES ?= features/$(BACKBONE)
# Sound and patches are stored for those that need them: patches take most of the space.
WHAT := [text, frames$(if $(filter dpdv,$(HEADS)),$(COMMA) patches)$(if $(filter gaid,$(HEADS)),$(COMMA) audio)]

.PHONY: help demo demo-search test test-slow test-oldest lint smoke zero-shot heads reproduce-table1 verify-released clean

help:
	@echo 'make demo              install, write 500 synthetic videos, train on them, print the table, search them'
	@echo 'make test              the test suite; make test-slow what is marked slow; make lint ruff and mypy'
	@echo 'make test-oldest       the test suite on the wheel with the oldest versions that pyproject.toml allows (downloads GBs)'
	@echo 'make zero-shot         a pretrained encoder on MSR-VTT 1k-A, nothing trained: BACKBONE=pe-core-b (needs data)'
	@echo 'make heads             features once, then the papers'"'"' heads on them: BACKBONE, HEADS="gare tcmgc ncl dpdv gaid"'
	@echo 'make reproduce-table1  Table 1 of every paper; FAST=1 from one shared encoder on synthetic videos'
	@echo 'make verify-released   the authors'"'"' checkpoints beside their print: CHECKPOINTS=FOLDER (needs data)'
	@echo 'make smoke             train two epochs on 24 synthetic videos; make clean removes what demo and smoke wrote'

# The stamp is newer than what decides the installation, or the installation is made again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,audio,encoders,search]'
	touch $@

$(DEMO_FOLDER)/msrvtt/MSRVTT_data.json: | $(VENV)/.installed
	$(BIN)/tvr data synth msrvtt --root $(DEMO_FOLDER) --videos 500 --seed 0

demo: $(VENV)/.installed $(DEMO_FOLDER)/msrvtt/MSRVTT_data.json
	$(BIN)/tvr fit --config $(RECIPE) --config recipes/fixture.yaml $(DEMO) \
	  --data.init_args.root $(DEMO_FOLDER) --results.directory $(DEMO_FOLDER)/runs
	$(MAKE) demo-search

# Searches the held-out videos with the newest run; its own test says which captions it can answer.
demo-search: $(VENV)/.installed $(DEMO_FOLDER)/msrvtt/MSRVTT_data.json
	$(BIN)/python benchmarks/demo_search.py --runs $(DEMO_FOLDER)/runs --videos $(DEMO_FOLDER)/msrvtt --out $(DEMO_FOLDER)/index
	@echo; echo "To see the videos: $(BIN)/tvr serve --index $(DEMO_FOLDER)/index, then open http://127.0.0.1:8321/"

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# The wheel without constraints.txt. Plain `pytest` does not put the checkout on the path, so the wheel is what is tested.
# Warnings that old releases trigger in each other are not errors here.
OLDEST := build/oldest
test-oldest:
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --requirement pyproject.toml $(addprefix --extra ,audio encoders search ray mteb slurm)
	$(OLDEST)/bin/uv pip freeze --quiet --python $(OLDEST)/bin/python > $(OLDEST)/versions.txt
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --constraint $(OLDEST)/versions.txt \
	  pytest pytest-xdist hypothesis httpx scipy selenium setuptools
	$(OLDEST)/bin/uv build --quiet --wheel --out-dir $(OLDEST)/wheel
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps $(OLDEST)/wheel/*.whl
	$(OLDEST)/bin/pytest -W default -n auto --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tvr_lightning

smoke: $(VENV)/.installed
	rm -rf build/smoke
	$(BIN)/tvr data synth msrvtt --root build/smoke --videos 24 --seed 1
	$(BIN)/tvr fit --config $(RECIPE) --config recipes/fixture.yaml \
	  --data.init_args.root build/smoke --data.init_args.batch_size 8 --trainer.max_epochs 2 \
	  --trainer.check_val_every_n_epoch 1 --results.directory build/smoke/runs
	test -s build/smoke/runs/*/version_0/results.json

# The quickest figure on real data: a pretrained encoder's mean frames, nothing trained.
zero-shot: $(VENV)/.installed
	$(BIN)/tvr test --config recipes/zero-shot.yaml $(ON) --results.directory $(RUNS)/zero-shot

# Features once, then the papers' heads on them.
heads: $(VENV)/.installed
	$(BIN)/tvr extract --config recipes/$(if $(filter gaid,$(HEADS)),gaid,clip4clip).yaml $(ON) --config recipes/heads.yaml \
	  --what '$(WHAT)' --out $(FEATURES)
	for head in $(HEADS); do $(BIN)/tvr fit --config recipes/$$head.yaml $(ON) --config recipes/heads.yaml \
	  --data.init_args.features $(FEATURES) --results.directory $(RUNS)/heads || exit 1; done

# Without TVR_DATA on the synthetic datasets, from one shared encoder; FAST=1 trains heads on its stored features.
# Interrupted, the same command goes on. A failed run is a line with its error, and the report is written all the same.
reproduce-table1: $(VENV)/.installed
	$(BIN)/tvr reproduce gare-1 tc-mgc-1a tc-mgc-1b ncl-1 dpdv-1 gaid-1 $(SHARE) \
	  $(if $(HARDWARE),--overlay recipes/hardware/$(HARDWARE).yaml) --out $(TABLE1); status=$$?; \
	  $(BIN)/tvr report $(TABLE1) && exit $$status

# The authors' own checkpoints, named by method (xpool.pth, gare.bin, ...), on the real test videos of $TVR_DATA.
CHECKPOINTS ?= released
verify-released: $(VENV)/.installed
	$(BIN)/tvr verify-released $(CHECKPOINTS)

clean:
	rm -rf build/demo build/smoke
