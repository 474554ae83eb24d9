#!/usr/bin/env bash
# What CI cannot check for lack of a GPU, in one go and under ten minutes; a table at the end. Runs what
# scripts/gpu-build.sh has built, from that folder, with nothing to compile and nothing to download.
#
#   gpu-check.sh            on a machine with a GPU, its driver, and libnccl.so.2 (or BURN_SHARD_NCCL)
#   gpu-check.sh --double   tries the script itself, with the test double in place of NCCL and the GPU
#
# A new check is one more `stage` line, and one `build` line in gpu-build.sh.
set -Eeuo pipefail
cd "$(dirname "$0")"

budget_s=${GPU_CHECK_BUDGET_S:-590}
logs=${GPU_CHECK_LOGS:-$(mktemp -d)}
mkdir -p "$logs"
rows=()
failed=0

# stage NAME SECONDS COMMAND...: within its limit and what is left of the budget.
stage() {
    local name=$1 limit_s=$2 left_s=$((budget_s - SECONDS)) start=$SECONDS status=0 verdict
    shift 2
    local log="$logs/${name//[^a-zA-Z0-9]/-}.log"
    printf '\n=== %s\n' "$name"
    if ((left_s < 10)); then
        rows+=("$(printf '%-32s %6s   %s' "$name" - 'NOT RUN: no time left')")
        failed=1
        return
    fi
    timeout --kill-after=10 "$((limit_s < left_s ? limit_s : left_s))" "$@" >"$log" 2>&1 || status=$?
    cat "$log"
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict="FAILED: not done in time" ;;
        *) verdict="FAILED: status $status" ;;
    esac
    ((status == 0)) || failed=1
    rows+=("$(printf '%-32s %4d s   %s' "$name" "$((SECONDS - start))" "$verdict")")
}

# ranks N COMMAND...: N processes on GPU 0. NCCL refuses two ranks on one GPU of one host, so each says
# that it is a host of its own, and they talk through the loopback interface.
ranks() {
    local world_size=$1 rank pids=() status=0 pid
    shift
    local port=$((20000 + RANDOM % 20000))
    for ((rank = 0; rank < world_size; rank++)); do
        RANK=$rank WORLD_SIZE=$world_size LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            NCCL_HOSTID="gpu-check-$rank" NCCL_SOCKET_IFNAME=lo "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    return "$status"
}
if [[ ${1:-} == ranks ]]; then
    shift
    ranks "$@"
    exit
fi

double=()
[[ ${1:-} == --double ]] && double=(--double)

uname -srm
if ((${#double[@]} == 0)); then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
two=(./gpu-check.sh ranks 2 ./gpu)
bert=(./bert-large --model large --backend cuda --comm nccl --steps 12 --micro-batch 8 --corpus text.md)

stage 'NCCL conformance, 1 rank' 60 ./gpu conformance "${double[@]}"
stage 'NCCL conformance, 2 on one GPU' 120 "${two[@]}" conformance "${double[@]}"
stage 'NCCL bandwidth, 1 rank' 60 ./gpu bandwidth "${double[@]}"
stage 'NCCL bandwidth, 2 on one GPU' 120 "${two[@]}" bandwidth "${double[@]}"

# Nothing stands in for the GPU in what follows.
if ((${#double[@]} == 0)); then
    for kernel in adam norm pack sgd; do
        stage "kernels: $kernel" 60 "./test-$kernel" --ignored cuda
    done
    stage 'kernels: bandwidth' 90 ./burn-shard-kernel-checks cuda 64
    stage 'parity with DDP, 1 rank' 90 ./test-cuda --ignored
    stage 'parity with DDP, 2 on one GPU' 120 ./gpu-check.sh ranks 2 ./test-cuda --ignored
    for strategy in ddp zero2 zero3; do
        stage "BERT-large, $strategy, 1 rank" 90 ./gpu-check.sh ranks 1 "${bert[@]}" --strategy "$strategy"
    done
    stage 'BERT-large, zero3, 2 on one GPU' 120 ./gpu-check.sh ranks 2 "${bert[@]}" --strategy zero3
fi

printf '\n%-32s %6s   %s\n' stage time verdict
printf '%s\n' "${rows[@]}"
printf '%-32s %4d s   logs in %s\n' total "$SECONDS" "$logs"
exit "$failed"
