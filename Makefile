PYTHON ?= python3
VENV ?= .venv
HELM_VENV ?= .venv-helm
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= build/gpu-wheels
BIN := $(VENV)/bin
# Where no bytecode may be written, as images of containers often have it, each process compiles all that it imports: half of the
# time of the tests' processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install packages package quickstart recipes recipe-lm_eval recipe-throughput recipe-helm test test-all lint bench kill-check gpu-check gpu-wheels helm-check sanitize neon docs clean

# The kernels are compiled while packages are fetched: by pip alone the one would wait for the other.
$(VENV)/.installed: pyproject.toml $(wildcard csrc/* csrc/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import pip" 2>/dev/null || $(BIN)/python -m ensurepip  # uv makes environments without it
	$(MAKE) --no-print-directory --jobs 2 packages package
	touch $@

# One version of torch: an open range would let pip choose a build with gigabytes of CUDA libraries. Python compiles the modules
# that it imports at first import; pip would compile all, tens of thousands.
packages:
	$(BIN)/python .ci/requirements.py dev docs test > $(VENV)/requirements.txt
	$(BIN)/python -c "import torch" 2>/dev/null || echo torch==2.13.0 >> $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-compile -r $(VENV)/requirements.txt

package:
	$(BIN)/python -m pip install --quiet --no-deps -e .

install: $(VENV)/.installed

# The main job: entity matching on the Fodors-Zagats test set.
quickstart: install
	mkdir -p out
	$(BIN)/batchgen run --config recipes/data_wrangling/fodors_zagats/job.toml --output out/fodors_zagats.parquet --overwrite
	$(BIN)/python recipes/data_wrangling/score.py out/fodors_zagats.parquet

# All data wrangling recipes and their metrics; make recipe-beer runs one, RECIPE_OPTIONS="--model M" another model.
recipes: recipe-all

recipe-%: install
	$(BIN)/python recipes/data_wrangling/run.py $* $(RECIPE_OPTIONS)

# Three local tasks of lm-evaluation-harness, FlexGen's synthetic benchmark, and HELM's sub-scenarios that need no network.
recipe-lm_eval: install
	$(BIN)/python -m batchgen.lmeval --model batchgen --model_args pretrained=demo --include_path recipes/lm_eval \
		--tasks listings_match,listings_address,listings_perplexity $(RECIPE_OPTIONS)

recipe-throughput: install
	$(BIN)/batchgen bench --config recipes/throughput/job.toml $(RECIPE_OPTIONS)

recipe-helm: $(HELM_VENV)/.installed
	$(HELM_VENV)/bin/python recipes/helm/run.py --priority 1 $(RECIPE_OPTIONS)

# What passes before every change: seven minutes on two idle cores. PYTEST_OPTIONS adds to it (--durations=40).
test: install
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_OPTIONS)

# All there is: also the tests marked thorough, whole tables and more draws (tests/BUDGET.md). An hour or so.
test-all: install
	$(BIN)/python -m pytest -n auto --dist worksteal --all $(PYTEST_OPTIONS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp
	$(BIN)/python .ci/language.py
	$(BIN)/lint-imports
	$(BIN)/mypy

# The kernels' tests under the address and undefined-behaviour sanitizers.
sanitize: install
	cmake -S csrc -B build/sanitize -DBATCHGEN_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	cmake --build build/sanitize --parallel
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		BATCHGEN_KERNELS=$$(echo build/sanitize/_kernels.*.so) \
		$(BIN)/python -m pytest tests/ops/test_cpp.py tests/ops/test_gguf_products.py tests/ops/test_grouped_products.py -p no:cacheprovider --timeout 1800

# The kernels compiled for 64-bit Arm, with the compiler of PyPI's ziglang.
neon: install
	$(BIN)/python -m pip install --quiet ziglang
	mkdir -p build
	$(BIN)/python -m ziglang c++ -target aarch64-linux-gnu -std=gnu++20 -O3 -Wall -Icsrc -c csrc/target.cpp \
		-DBATCHGEN_TARGET=neon '-DBATCHGEN_SIMD="simd/neon.h"' -o build/neon.o

# The tests that need HELM, in an environment of its own: it pins older packages than the others run with. torchvision, which
# it has for images only, goes again: PyPI's does not work beside a CPU build of torch, and transformers not beside such a one.
helm-check: $(HELM_VENV)/.installed
	$(HELM_VENV)/bin/python -m pytest tests/helm/test_helm_rows.py tests/helm/test_helm_jobs.py tests/helm/test_helm_run.py tests/integration/test_helm_recipe.py

$(HELM_VENV)/.installed: pyproject.toml $(wildcard csrc/* csrc/*/*)
	test -x $(HELM_VENV)/bin/python || $(PYTHON) -m venv $(HELM_VENV)
	$(HELM_VENV)/bin/python -c "import torch" 2>/dev/null || $(HELM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(HELM_VENV)/bin/python -m pip install --quiet torchvision==0.28.0 -e ".[helm]" accelerate hypothesis pytest pytest-timeout
	$(HELM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# Side by side with transformers, and predicted against measured times; writes benchmarks/results/.
bench: install
	$(BIN)/python benchmarks/cpu_engines.py --engines batchgen,transformers
	$(BIN)/python benchmarks/plan_accuracy.py

# Jobs killed and interrupted at random moments of generation, in memory, on disk and in 4 bits; writes benchmarks/results/kills.json.
kill-check: install
	$(BIN)/python benchmarks/kills.py --kills 200 --interrupts 200

# On a machine with a CUDA GPU, with its own Python and no network: tests, profile and short benchmarks. CALL=1 (to 6) runs a part
# of it that takes less than nine minutes; GPU_WHEELS names a folder of wheels for what is not installed there.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(if $(CALL),--call $(CALL)) $(if $(wildcard $(GPU_WHEELS)/*.whl),--wheels $(GPU_WHEELS)) \
		$(GPU_CHECK_OPTIONS)

# The planner and what reads weight stores and GGUFs, as wheels for that machine's Python.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(foreach glibc,2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		--dest $(GPU_WHEELS) highspy xxhash gguf

# The pages as a site, in build/site: the generated ones are made anew, links are checked.
docs: install
	$(BIN)/python docs/describe_commands.py
	$(BIN)/python docs/describe_packages.py
	$(BIN)/python docs/describe_benchmarks.py
	$(BIN)/python docs/draw_sweep.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(HELM_VENV) out build *.egg-info
