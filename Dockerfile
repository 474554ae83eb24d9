# syntax=docker/dockerfile:1
# BERT-large on NVIDIA GPUs. Not built or run by our CI, which has no container engine.
#
#   docker build -t burn-shard:cuda .
#   docker run --rm --gpus all --shm-size 1g -v "$PWD/text:/data:ro" -v burn-shard:/cache \
#       burn-shard:cuda --backend cuda --comm nccl --launch 8 --corpus /data
#
# The host needs a driver (525 or later for CUDA 12, 580 or later for CUDA 13), and the NVIDIA container
# toolkit. `burn-shard doctor` in the container says what is missing.
ARG CUDA=12.9.1
ARG RUST=1.95.0

FROM rust:${RUST}-bookworm AS rust

# The toolkit tells the bindings which CUDA they are for.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake libzstd-dev python3 zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=rust /usr/local/cargo /usr/local/cargo
COPY --from=rust /usr/local/rustup /usr/local/rustup
ENV PATH=/usr/local/cargo/bin:$PATH CARGO_HOME=/usr/local/cargo RUSTUP_HOME=/usr/local/rustup
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked -p bert-large --features cuda \
    && cargo build --release --locked -p burn-shard-launch \
    && install -D -t /out target/release/bert-large target/release/burn-shard

# With libnccl2; the driver's libcuda comes from the host. What LLVM was linked to is in the image that built.
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libstdc++6 libzstd1 tini zlib1g \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 burn \
    && install -d -o burn /cache
COPY --from=build /out/ /usr/local/bin/
# Kernels with exp, log, tanh or erf are linked with it when they are compiled, at run time.
COPY --from=build /usr/local/cuda/nvvm/libdevice/ /usr/local/cuda/nvvm/libdevice/
# Fails here if a library is missing, rather than on a machine with a GPU.
RUN for program in /usr/local/bin/bert-large /usr/local/bin/burn-shard; do \
        if ldd "$program" | grep 'not found'; then exit 1; fi; \
    done \
    && test -s /usr/local/cuda/nvvm/libdevice/libdevice.10.bc
# The vocabulary that a first run trains is kept there.
ENV XDG_CACHE_HOME=/cache
USER 10001
WORKDIR /home/burn
# As the first process of a container, the program would not get SIGTERM's default.
ENTRYPOINT ["tini", "-g", "--", "bert-large"]
CMD ["--help"]
