# batchgen for CPUs, with kernels of every instruction set:
#
#     docker build --tag batchgen .
#     docker run --rm --user "$(id -u)" --volume "$PWD:/data" batchgen run --model MODEL --input data.parquet
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/batchgen
ENV PATH=/opt/batchgen/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# PyPI's torch for x86-64 would bring 2.7 GB of CUDA.
RUN pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY batchgen batchgen
RUN pip install ".[structured,sentencepiece]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/batchgen /opt/batchgen
# Any user may run it: models and profiles are kept in /cache, which is to be a volume if they are to stay.
RUN useradd --create-home batchgen && mkdir --mode=1777 /cache
ENV PATH=/opt/batchgen/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
USER batchgen
WORKDIR /data
ENTRYPOINT ["batchgen"]
CMD ["--help"]
