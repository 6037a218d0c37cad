#!/usr/bin/env bash
# Correctness on GPUs.  Runs from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: run.sh [--gpus N] [--soak N] [--quick] [--only kernels|soak|product|gin] [--verbose] [--logs DIR]

The kernels: every case on all GPUs, one rank on each, and with several ranks on a GPU, launched by the ranks and by
a thread that they ring for; random ops. Then the
product: a server and workers that are processes of their own (product.sh). Then the NCCL plugin, over each way that it
has, with windows in GPU memory (tests/gin), and under NCCL itself, whose library the loader must find. Prints what
failed and, at the end, `N passed, N failed`. Exits with 77 where there is no GPU.

  --gpus N    use N GPUs (default: all that nvidia-smi lists)
  --soak N    random ops per rank (default 20000; 0: none)
  --quick     one arrangement of ranks instead of all, small shapes through the product
  --only PART this part only
  --verbose   every case, not only those that failed
  --logs DIR  keep complete output there
TEXT
}

case_limit_s=540
soak_limit_s=540
product_limit_s=1200
gin_limit_s=540

gpus='' soak=20000 quick=0 only='' verbose=0 logs=''
while (($#)); do
    case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift ;;
    --soak) soak=${2:?--soak needs a number}; shift ;;
    --only) only=${2:?--only needs a part}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --quick) quick=1 ;;
    --verbose) verbose=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
count_gpus
need "$gpu_bin/ll_device" "$gin_bin/gin_conformance"
open_logs

# run NAME LIMIT_S PROGRAM ARGUMENT...: counts what its closing line says.
run() {
    local name=$1 limit=$2 log=$logs/$1.log code before=$failed
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    code=$?
    echo "== $name: ${1##*/} ${*:2}: $(tail -n 1 "$log") ($(head -n 1 "$log"))"
    if ((verbose)); then
        sed 1d "$log"
    else
        grep -E '^(FAIL|     |skip)' "$log" | cut -c 1-400
    fi
    # It was killed or ended early: that is a failure of its own, and its last lines say more.
    if ! add_closing_line "$log" || ((code != 0 && failed == before)); then
        echo "   $(why "$code" "$limit"):"
        tail -n 12 "$log" | cut -c 1-400
        failed=$((failed + 1))
    fi
}

run_cases() { # NAME SEED RANKS GPUS ARGUMENT...
    run "$1" "$case_limit_s" "$gpu_bin/ll_device" --seed "$2" --ranks "$3" --gpus "$4" "${@:5}"
}

run_kernels() {
    run_cases "ranks-$ranks-gpus-$gpus" 1 "$ranks" "$gpus"
    run_cases "served-ranks-$ranks-gpus-$gpus" 5 "$ranks" "$gpus" --executor server
    run_cases "pcie-ranks-$ranks-gpus-$gpus" 12 "$ranks" "$gpus" --pcie --filter major
    ((quick)) && return
    if ((gpus > 1)); then # several ranks on each GPU
        run_cases "ranks-$((2 * gpus))-gpus-$gpus" 2 $((2 * gpus)) "$gpus"
        run_cases "served-ranks-$((2 * gpus))-gpus-$gpus" 6 $((2 * gpus)) "$gpus" --executor server
    else
        run_cases ranks-2-gpus-1 2 2 1
    fi
    run_cases ranks-1-gpus-1 3 1 1
}

# run_gin NAME SEED TRANSPORT TABLE: ranks that the faults need, whatever the number of GPUs.
run_gin() {
    EP_CUDA_MODULE=${EP_CUDA_MODULE-$lib/libep_cuda.so} EP_GIN_TRANSPORT=$3 EP_GIN_TIMEOUT_S=10 \
        run "$1" "$gin_limit_s" "$gin_bin/gin_conformance" --plugin "$lib/libnccl-net-ep.so" --memory cuda \
        --ranks $((gpus > 4 ? gpus : 4)) --seed "$2" --table "$4"
}

# run_nccl NAME TRANSPORT NODES ARGUMENT...: the plugin under NCCL, between processes that pretend to be nodes.
run_nccl() {
    EP_CUDA_MODULE=${EP_CUDA_MODULE-$lib/libep_cuda.so} EP_GIN_TRANSPORT=$2 EP_GIN_TIMEOUT_S=10 \
        run "$1" "$gin_limit_s" "$gpu_bin/nccl_gin" --plugin "$lib/libnccl-net-ep.so" --nodes "$3" \
        --ranks $((gpus > $3 ? gpus : $3)) "${@:4}"
}

wanted() { [[ -z $only || $only == "$1" ]]; }

ranks=$((gpus > 1 ? gpus : 4))
if wanted kernels; then
    run_kernels
fi
if wanted soak && ((soak > 0)); then
    run soak "$soak_limit_s" "$gpu_bin/ll_device" --ranks "$ranks" --gpus "$gpus" --soak "$soak" --seed 4
    run soak-both-modes "$soak_limit_s" "$gpu_bin/ll_device" --ranks "$ranks" --gpus "$gpus" --soak "$soak" --ht \
        --seed 10
    run served-soak "$soak_limit_s" "$gpu_bin/ll_device" --ranks "$ranks" --gpus "$gpus" --soak "$soak" --seed 7 \
        --executor server
    run served-soak-both-modes "$soak_limit_s" "$gpu_bin/ll_device" --ranks "$ranks" --gpus "$gpus" --soak "$soak" --ht \
        --seed 11 --executor server
fi
if wanted product; then
    small=()
    ((quick)) && small=(--quick)
    run product "$product_limit_s" "$here/product.sh" --gpus "$gpus" --logs "$logs/product" "${small[@]}"
fi
if wanted gin; then
    run_gin gin-host 8 host gin-v11
    run_gin gin-tcp 9 tcp rma-v14
    if [[ -x $gpu_bin/nccl_gin ]]; then # where NCCL's headers were when it was built
        run_nccl nccl-host host 2
        run_nccl nccl-host-own-memory host 2 --memory own
        run_nccl nccl-tcp tcp 2
        run_nccl nccl-host-4-nodes host 4
    fi
fi
closing_line
