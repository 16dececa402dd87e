PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install quickstart test lint bench clean

# torch comes first and by itself: an open range would let pip choose a build with gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml $(wildcard csrc/* csrc/simd/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

install: $(VENV)/.installed

# The main job: entity matching on the Fodors-Zagats test set.
quickstart: install
	mkdir -p out
	$(BIN)/batchgen run --config recipes/data_wrangling/fodors_zagats.toml --output out/fodors_zagats.parquet --overwrite
	$(BIN)/python recipes/data_wrangling/score.py out/fodors_zagats.parquet

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: install
	$(BIN)/ruff check .

# Side by side with transformers; writes benchmarks/results/.
bench: install
	$(BIN)/python benchmarks/azure_vs_transformers.py
	$(BIN)/python benchmarks/prefix_sharing.py
	$(BIN)/python benchmarks/plan_accuracy.py

clean:
	rm -rf $(VENV) out build *.egg-info
