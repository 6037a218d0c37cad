# What run.sh, product.sh, bench.sh and sanitize.sh share; sourced by them.
# shellcheck shell=bash disable=SC2034 # they use what is set here

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Programs lie together in the folder of deploy/bundle.sh, and apart in build/.
if [[ -d $here/bin ]]; then
    bin=$here/bin gpu_bin=$here/bin gin_bin=$here/bin lib=$here/lib text=$here/data/text.txt
else
    bin=$here/../../build/bin gpu_bin=$here/../../build/gpu gin_bin=$here/../../build/gin lib=$here/../../build/lib
    text=$here/../data/text.txt
fi

# need PROGRAM...: they are there, or this is the end.
need() {
    local program
    for program; do
        [[ -x $program ]] || { echo "${program##*/} is neither in $here/bin nor in build/: build first" >&2; exit 2; }
    done
}

# Sets gpus, if it is empty, to all there are. Ends with 77 where there is none.
count_gpus() {
    if [[ -z $gpus && -n ${CUDA_VISIBLE_DEVICES-} ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
    elif [[ -z $gpus ]]; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    fi
    if ((gpus == 0)); then
        echo 'no GPU here: nvidia-smi lists none'
        exit 77
    fi
    # Servers take all GPUs that they see.
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-$(seq -s , 0 $((gpus - 1)))}
}

# Makes the folder for complete output; one that nobody asked for is gone at the end.
open_logs() {
    if [[ -n $logs ]]; then
        mkdir -p "$logs"
    else
        logs=$(mktemp -d)
        trap 'rm -rf "$logs"' EXIT
    fi
}

passed=0 failed=0 skipped=0

# The last line of every script here; returns whether nothing failed.
closing_line() {
    echo "$passed passed, $failed failed$( ((skipped)) && echo ", $skipped skipped")"
    ((failed == 0))
}

# add_closing_line LOG: adds what the last such line of a log says; false when there is none.
add_closing_line() {
    local line p f s
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$1" | tail -n 1)
    [[ -n $line ]] || return 1
    read -r p _ f _ s _ <<<"$line"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + ${s:-0}))
}

# why CODE LIMIT_S: how a program ended.
why() {
    echo "ended with $1$( (($1 == 124 || $1 == 137)) && echo ", after $2 s")"
}

# until_so COMMAND [ARGUMENT...]: waits for it to succeed, a minute at most.
until_so() {
    local i
    for ((i = 0; i < 600; i++)); do
        "$@" && return
        sleep 0.1
    done
    echo "never so: $*"
    return 1
}

# has_loads GROUP EXPERTS: each of them has had rows, about as many as the others.
has_loads() {
    "$bin/ep-admin" stats "$1" --experts |
        awk -v experts="$2" 'NR > 1 && $2 > 0 && $3 > 0.5 && $3 < 2 { even++ } END { exit even != experts || NR != experts + 1 }'
}

nobody_in_old_epochs() {
    local group
    group=$("$bin/ep-admin" --timeout=40s group get moe) && ! grep -q '^old epochs' <<<"$group"
}

# under_changes FLAG... -- COMMAND [ARGUMENT...]: the command is a soak of the group moe with --follow. Meanwhile the group is
# updated with one flag after the other, and its workers go over each time.
under_changes() {
    local changes=() said soak change
    while [[ $1 != -- ]]; do
        changes+=("$1")
        shift
    done
    shift
    said=$(mktemp)
    "$@" >"$said" 2>&1 &
    soak=$!
    until_so grep -q 'soak: [1-9]' "$said"
    for change in "${changes[@]}"; do
        timeout --kill-after=5 60 "$bin/ep-admin" --timeout=40s group update moe "$change" || break
        until_so nobody_in_old_epochs || break
    done
    wait "$soak"
    local code=$?
    cat "$said"
    ((code == 0)) && grep -F "follow: ${#changes[@]} turns" "$said"
    code=$?
    rm -f "$said"
    return "$code"
}

# start_server DIR: its sockets, state and log are there, also what a former one left; server is its process.
start_server() {
    local dir=$1 i
    rm -f "$dir/ports"
    "$bin/ep-server" --backend=cuda --socket="$dir/ep.sock" --state-dir="$dir/state" --port-file="$dir/ports" \
        --log-level=warn >>"$dir/server.out" 2>&1 &
    server=$!
    for ((i = 0; i < 300; i++)); do
        [[ -s $dir/ports ]] && return
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    return 1
}

have_mps() { command -v nvidia-cuda-mps-control >/dev/null; }

# polls COMMAND [ARGUMENT...]: servers that it starts poll doorbells, where there is MPS.
polls() { EP_SERVER_DOORBELL=poll "$@"; }

# with_mps COMMAND [ARGUMENT...]: while an MPS server of our own is there, for our processes alone.
with_mps() {
    local dir code
    dir=$(mktemp -d)
    (
        export CUDA_MPS_PIPE_DIRECTORY=$dir/pipe CUDA_MPS_LOG_DIRECTORY=$dir/log EP_SERVER_MPS=require
        mkdir "$dir/pipe" "$dir/log"
        nvidia-cuda-mps-control -d || exit 1
        trap 'echo quit -t 5 | nvidia-cuda-mps-control >/dev/null' EXIT
        "$@"
    )
    code=$?
    ((code == 0)) || tail -n 5 "$dir"/log/*.log
    rm -rf "$dir"
    return "$code"
}
