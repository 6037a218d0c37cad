#!/usr/bin/env bash
# The kernels under compute-sanitizer, on one GPU.  Runs from the tree and from the folder that
# deploy/bundle.sh makes.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: sanitize.sh [--tools LIST] [--ranks LIST] [--filter TEXT] [--logs DIR]

memcheck and racecheck of small cases, with one rank and with two that wait for each other, launched by the ranks and
by a thread that they ring for. Prints a line per step and, at the end, `N passed, N failed`. Exits with 77 where there is no GPU or no compute-sanitizer: it is
looked for at $COMPUTE_SANITIZER, in the folder compute-sanitizer beside this script, on the PATH and where
CUDA is. (Without CUDA: the files of PyPI's nvidia-cuda-sanitizer-api, bin/ and lib/ in one folder.)

  --tools LIST   of memcheck, racecheck, synccheck, initcheck (default memcheck,racecheck)
  --ranks LIST   ranks of the groups (default 1,2)
  --filter TEXT  only the cases of ll_device that have TEXT in their name
  --logs DIR     keep complete output there
TEXT
}

# Instrumented kernels are slower by orders of magnitude, and waits are a part of them.
step_limit_s=150 op_timeout_ms=100000
# Blocks of an op run all at once, and fewer fit than was found when the tool makes them larger.
sms=16
# Bad ids and rows that do not fit are where a kernel could leave its memory.
filters=('T=33 K=4 E=32 H=1024' 'T=1 ' 'bad-ids' 'packed rows do not fit' 'H=1040' 'two handles' 'a stale handle'
    'HT: packed rows do not fit' 'HT: flat rows do not fit')
# What a worker rings for is not to be trusted.  (Of LL: HT under executor server does not come to its end under the tool.)
served_filters=('major bf16 T=33 K=4 E=32 H=1024' 'major fp8-given T=33 K=4 E=32 H=1024' 'ops that are none'
    'ops that change while they run, packed' 'in halves')

gpus='' tools=memcheck,racecheck ranks=1,2 logs=''
while (($#)); do
    case $1 in
    --tools) tools=${2:?--tools needs a list}; shift ;;
    --ranks) ranks=${2:?--ranks needs a list}; shift ;;
    --filter) filters=("${2:?--filter needs a text}") served_filters=("$2"); shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
count_gpus
need "$gpu_bin/ll_device"
for sanitizer in "${COMPUTE_SANITIZER-}" "$here/compute-sanitizer/compute-sanitizer" \
    "$(command -v compute-sanitizer)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    [[ -n $sanitizer && -x $sanitizer ]] && break
done
if [[ ! -x $sanitizer ]]; then
    echo 'no compute-sanitizer here'
    exit 77
fi
open_logs

# It has run to its end, nothing failed, and the tool has seen nothing.
clean() { # CODE LOG
    (($1 == 0)) && grep -qE '^[1-9][0-9]* passed, 0 failed$' "$2" &&
        grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$2"
}

step() { # TOOL RANKS FILTER EXECUTOR
    local name="$1, $2 ranks, $3, $4" log=$logs/$1-$2-${3//[^a-zA-Z0-9]/-}-$4.log code began=$SECONDS
    timeout --kill-after=10 "$step_limit_s" "$sanitizer" --tool "$1" --error-exitcode 9 --print-limit 20 \
        "$gpu_bin/ll_device" --ranks "$2" --gpus 1 --sms "$sms" --filter "$3" --timeout-ms "$op_timeout_ms" \
        --executor "$4" >"$log" 2>&1
    code=$?
    if clean "$code" "$log"; then
        echo "ok   $name: $(grep -E '^[0-9]+ passed' "$log") ($((SECONDS - began)) s)"
        passed=$((passed + 1))
    else
        echo "FAIL $name: $(why "$code" "$step_limit_s") ($((SECONDS - began)) s)"
        # What the tool saw first, and how it ended.
        { grep -E '^(=========|FAIL)' "$log" | head -n 12; tail -n 4 "$log"; } | cut -c 1-200 | sed 's/^/     /'
        failed=$((failed + 1))
    fi
}

"$sanitizer" --version | grep -i version
for tool in ${tools//,/ }; do
    for n in ${ranks//,/ }; do
        for filter in "${filters[@]}"; do
            step "$tool" "$n" "$filter" direct
        done
        for filter in "${served_filters[@]}"; do
            step "$tool" "$n" "$filter" server
        done
    done
done
closing_line
