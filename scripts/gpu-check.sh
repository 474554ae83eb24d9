#!/usr/bin/env bash
# What CI cannot check for lack of a GPU, in under ten minutes; a table at the end. Runs whatever of the programs of
# scripts/gpu-build.sh are in its folder, with nothing to compile and nothing to download.
#
#   gpu-check.sh            on a machine with a GPU, its driver, and libnccl.so.2 (or BURN_SHARD_NCCL)
#   gpu-check.sh --double   the same stages, as far as the test double stands in for NCCL and the GPU
#
# Results are one archive, $GPU_CHECK_RESULTS (results.tar): results.json, results.md, a log of each stage. A stage
# fails on wrong results, and on what takes longer than it may. A new check is one more `stage` line.
set -Eeuo pipefail
cd "$(dirname "$0")"

budget_s=${GPU_CHECK_BUDGET_S:-570}
results=${GPU_CHECK_RESULTS:-$PWD/results.tar}
logs=$(mktemp -d)
rows=()
json=()
failed=0

# row NAME SECONDS VERDICT
row() {
    rows+=("$(printf '| %s | %s | %s |' "$1" "$2" "$3")")
    json+=("$(printf '{"stage": "%s", "seconds": %s, "verdict": "%s"}' "$1" "$2" "$3")")
}

# stage NAME SECONDS COMMAND...: within its limit and what is left of the budget.
stage() {
    local name=$1 limit_s=$2 left_s=$((budget_s - SECONDS)) start=$SECONDS status=0 verdict
    shift 2
    local log="$logs/${name//[^a-zA-Z0-9]/-}.log"
    printf '\n=== %s\n' "$name"
    if ((left_s < 10)); then
        row "$name" 0 'NOT RUN: no time left'
        failed=1
        return
    fi
    timeout --kill-after=10 "$((limit_s < left_s ? limit_s : left_s))" "$@" >"$log" 2>&1 || status=$?
    cat "$log"
    case $status in
        0) verdict=ok ;;
        124 | 137) verdict='FAILED: not done in time' ;;
        *) verdict="FAILED: status $status" ;;
    esac
    ((status == 0)) || failed=1
    row "$name" "$((SECONDS - start))" "$verdict"
}

# ranks N COMMAND...: N processes on GPU 0. NCCL refuses two ranks on one GPU of one host, unless each says that it is
# a host of its own (they talk through the loopback interface then) or, from 2.30 on, unless it is told to allow it
# (GPU_CHECK_SHARED=1: the transports within a host are tried then).
ranks() {
    local world_size=$1 rank pids=() status=0 pid
    shift
    local port=$((20000 + RANDOM % 20000))
    for ((rank = 0; rank < world_size; rank++)); do
        local own=(NCCL_HOSTID="gpu-check-$rank" NCCL_SOCKET_IFNAME=lo)
        [[ -z ${GPU_CHECK_SHARED:-} ]] || own=(NCCL_MULTI_RANK_GPU_ENABLE=1)
        env RANK="$rank" WORLD_SIZE="$world_size" LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" \
            "${own[@]}" "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    return "$status"
}

# losses FILE FILE...: each as long as the first, and its numbers within 1e-5 of those, relatively, or TOLERANCE.
losses() {
    python3 - "${TOLERANCE:-1e-5}" "$@" <<'PYTHON'
import math, re, sys
tolerance, files = float(sys.argv[1]), sys.argv[2:]
number = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf", re.IGNORECASE)
lines = [[[float(n) for n in number.findall(line)] for line in open(file)] for file in files]
if not lines[0]:
    sys.exit(f"{files[0]} has no losses")
for file, other in zip(files[1:], lines[1:]):
    if [len(line) for line in other] != [len(line) for line in lines[0]]:
        sys.exit(f"{file} has other numbers of losses than {files[0]}")
    for step, (a, b) in enumerate(zip(lines[0], other)):
        for x, y in zip(a, b):
            if not (math.isfinite(x) and math.isfinite(y)) or abs(x - y) > tolerance * max(1, abs(x)):
                sys.exit(f"line {step}: {x} in {files[0]}, {y} in {file}, more than {tolerance} apart")
    print(f"{file}: {len(other)} lines within {tolerance} of {files[0]}")
PYTHON
}

case ${1:-} in
    ranks)
        shift
        ranks "$@"
        exit
        ;;
    losses)
        shift
        losses "$@"
        exit
        ;;
esac

double=()
[[ ${1:-} == --double ]] && double=(--double)

# Where CubeCL looks for libdevice, and we for NCCL, if nothing else is set.
if [[ -z ${CUDA_PATH:-} && -d cuda && ! -d /usr/local/cuda/nvvm/libdevice ]]; then
    export CUDA_PATH=$PWD/cuda
fi
if [[ -z ${BURN_SHARD_NCCL:-} ]] && ! ldconfig -p | grep -q 'libnccl\.so\.2 '; then
    nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null || true)
    [[ -z $nccl ]] || export BURN_SHARD_NCCL=$nccl
fi

uname -srm
if ((${#double[@]} == 0)); then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$logs/gpu.csv"
fi
two=(./gpu-check.sh ranks 2 ./gpu)

stage 'what the machine has' 30 ./gpu doctor
stage 'NCCL conformance, 1 rank' 60 ./gpu conformance "${double[@]}"
stage 'NCCL conformance, 2 ranks' 90 "${two[@]}" conformance "${double[@]}"
stage 'a late rank ends the others: host' 40 "${two[@]}" hang "${double[@]}"
stage 'a late rank ends the others: device' 40 "${two[@]}" hang-device "${double[@]}"
stage 'no race between streams, 1 rank' 60 ./gpu race "${double[@]}"
stage 'no race between streams, 2 ranks' 60 "${two[@]}" race "${double[@]}"

# Nothing stands in for the GPU in what follows.
if ((${#double[@]} == 0)); then
    stage 'NCCL within a host, 2 ranks' 60 env GPU_CHECK_SHARED=1 "${two[@]}" conformance
    if [[ -x test-gpu ]]; then
        stage 'kernels' 120 ./test-gpu --ignored cuda
        stage 'kernels: bandwidth, 512 M elements' 120 ./burn-shard-kernel-checks cuda 512
        stage 'NCCL bandwidth, 1 rank' 60 ./gpu bandwidth
    fi
    if [[ -x bert-large ]]; then
        stage 'parity with DDP, 1 rank' 90 ./test-cuda --ignored
        stage 'parity with DDP, 2 ranks' 90 ./gpu-check.sh ranks 2 ./test-cuda --ignored
        bert=(./bert-large --model large --backend cuda --comm nccl --dropout 0 --steps 12 --micro-batch 8 --corpus text.md)
        # What the program does without a word on CUDA, beside f32 below.
        stage 'BERT-large, zero2 in bf16, 1 rank' 60 \
            ./gpu-check.sh ranks 1 "${bert[@]}" --strategy zero2 --losses "$logs/losses-bf16.txt"
        bert+=(--precision f32)
        files=()
        for strategy in ddp zero1 zero2 zero3; do
            files+=("$logs/losses-$strategy.txt")
            stage "BERT-large, $strategy, 1 rank" 60 \
                ./gpu-check.sh ranks 1 "${bert[@]}" --strategy "$strategy" --losses "$logs/losses-$strategy.txt"
        done
        stage 'BERT-large: losses of all strategies' 10 ./gpu-check.sh losses "${files[@]}"
        stage 'BERT-large: losses in bf16' 10 env TOLERANCE=2e-2 ./gpu-check.sh losses "${files[0]}" "$logs/losses-bf16.txt"
        stage 'BERT-large, zero3, 2 ranks' 90 ./gpu-check.sh ranks 2 "${bert[@]}" --strategy zero3
    fi
fi

{
    printf '| stage | s | verdict |\n|---|---|---|\n'
    printf '%s\n' "${rows[@]}"
} | tee "$logs/results.md"
{
    printf '{"seconds": %d, "double": %s, "stages": [\n' "$SECONDS" "$( ((${#double[@]})) && echo true || echo false)"
    for ((i = 0; i < ${#json[@]}; i++)); do
        printf '  %s%s\n' "${json[i]}" "$( ((i + 1 < ${#json[@]})) && echo ,)"
    done
    printf ']}\n'
} >"$logs/results.json"
tar -C "$logs" -cf "$results" .
printf 'total %d s, results in %s\n' "$SECONDS" "$results"
exit "$failed"
