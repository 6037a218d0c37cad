#!/usr/bin/env bash
# Correctness on GPUs.  Runs from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: run.sh [--gpus N] [--soak N] [--quick] [--verbose] [--logs DIR]

Every case on all GPUs, one rank on each, and with several ranks on a GPU; then random ops. Prints what
failed and, at the end, `N passed, N failed`. Exits with 77 where there is no GPU.

  --gpus N    use N GPUs (default: all that nvidia-smi lists)
  --soak N    random ops per rank (default 20000; 0: none)
  --quick     one arrangement of ranks instead of all
  --verbose   every case, not only those that failed
  --logs DIR  keep complete output there
TEXT
}

case_limit_s=540
soak_limit_s=540

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for bin in "$here/bin" "$here/../../build/gpu"; do
    [[ -x $bin/ll_device ]] && break
done
[[ -x $bin/ll_device ]] || { echo "ll_device is neither in $here/bin nor in build/gpu: build first" >&2; exit 2; }

gpus='' soak=20000 quick=0 verbose=0 logs=''
while (($#)); do
    case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift ;;
    --soak) soak=${2:?--soak needs a number}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --quick) quick=1 ;;
    --verbose) verbose=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
if [[ -z $gpus ]]; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
fi
if ((gpus == 0)); then
    echo 'no GPU here: nvidia-smi lists none'
    exit 77
fi
if [[ -n $logs ]]; then
    mkdir -p "$logs"
else
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
fi

passed=0 failed=0

# run NAME LIMIT_S ARGUMENT...: ll_device with these arguments.
run() {
    local name=$1 limit=$2 log=$logs/$1.log code closing
    shift 2
    timeout --kill-after=10 "$limit" "$bin/ll_device" "$@" >"$log" 2>&1
    code=$?
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    echo "== $name: ll_device $*: ${closing:-no closing line} ($(head -n 1 "$log"))"
    if ((verbose)); then
        sed 1d "$log"
    else
        grep -A1 '^FAIL' "$log" | cut -c 1-400
    fi
    if [[ -n $closing ]]; then
        read -r p _ f _ <<<"$closing"
        passed=$((passed + p)) failed=$((failed + f))
    fi
    # It was killed or ended early: that is a failure of its own, and its last lines say more.
    if [[ -z $closing ]] || { ((code != 0)) && [[ $closing == *' 0 failed' ]]; }; then
        echo "   ended with $code$( ((code == 124 || code == 137)) && echo ", after $limit s"):"
        tail -n 12 "$log" | cut -c 1-400
        failed=$((failed + 1))
    fi
}

ranks=$((gpus > 1 ? gpus : 4))
run "ranks-$ranks-gpus-$gpus" "$case_limit_s" --ranks "$ranks" --gpus "$gpus"
if ((!quick)); then
    if ((gpus > 1)); then # several ranks on each GPU
        run "ranks-$((2 * gpus))-gpus-$gpus" "$case_limit_s" --ranks "$((2 * gpus))" --gpus "$gpus" --seed 2
    else
        run ranks-2-gpus-1 "$case_limit_s" --ranks 2 --gpus 1 --seed 2
    fi
    run ranks-1-gpus-1 "$case_limit_s" --ranks 1 --gpus 1 --seed 3
fi
if ((soak > 0)); then
    run soak "$soak_limit_s" --ranks "$ranks" --gpus "$gpus" --soak "$soak" --seed 4
fi
echo "$passed passed, $failed failed"
((failed == 0))
