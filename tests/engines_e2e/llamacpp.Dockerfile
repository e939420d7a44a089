# llama.cpp's server as this machine has built it, and a model. BASE: this machine's Debian, for its libc.
ARG BASE=debian:12-slim
FROM ${BASE}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends libgomp1 libstdc++6 \
 && rm -rf /var/lib/apt/lists/*
COPY llama-server /usr/local/bin/
COPY 88M.gguf /models/
USER 65532:65532
ENTRYPOINT ["llama-server"]
