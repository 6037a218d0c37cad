#!/usr/bin/env bash
# Speed on GPUs.  Runs from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bench.sh [--gpus N] [--no-verify] [--only processes|server|kernels|gin] [--json FILE] [--quick] [--logs DIR]

One rank on each of all GPUs (or N). First through real processes, a server and a worker for each rank: pairs
of dispatch and combine, what it costs that the server runs the ops, attaching, a killed worker, memory. Then
the kernels alone, beside what the wire allows. Each beside the peers' figures and the bars of tests/gpu/bars.h. Then
puts of the NCCL plugin between two of its ranks.
Exits with 77 where there is no GPU.

  --gpus N     use N GPUs (default: all that nvidia-smi lists)
  --no-verify  do not compare results with the reference first
  --only PART  this part only; server: of processes, the pairs that the server runs
  --json FILE  add each figure to it, a JSON object a line
  --quick      a small shape: whether this script works; figures say nothing
  --logs DIR   keep complete output there
TEXT
}

pairs_limit_s=150 kill_limit_s=60 kernels_limit_s=240 gin_limit_s=60
deaths=5 # each with a server and workers of its own

gpus='' verify=--verify only='' json='' quick=0 logs=''
while (($#)); do
    case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift ;;
    --only) only=${2:?--only needs a part}; shift ;;
    --json) json=${2:?--json needs a file}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --no-verify) verify=--no-verify ;;
    --quick) quick=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
count_gpus
need "$gpu_bin/ll_bench" "$gpu_bin/ht_bench" "$gin_bin/gin_conformance" "$bin/ep-bench" "$bin/ep-server" "$bin/ep-admin"
open_logs
json=${json:-/dev/null}
code=0

model=(--experts=256 --hidden=7168 --top-k=8)
times=(--iters=1000 --warmup=50 --graph=20)
((quick)) && model=(--experts=16 --hidden=256 --top-k=4) times=(--iters=20 --warmup=2 --graph=4)
"$gpu_bin/ll_bench" --bars >"$logs/bars" || exit 2

# A program that fails costs its own figures only, and the exit status.
fail() { # WHAT CODE LIMIT_S LOG
    echo "$1 FAILED: $(why "$2" "$3")"
    tail -n 5 "$4" | cut -c 1-400
    code=1
}

# run_bench NAME LIMIT_S ARGUMENT...: ep-bench; what it prints is in NAME.out.
run_bench() {
    local name=$1 limit=$2
    shift 2
    timeout --kill-after=10 "$limit" "$bin/ep-bench" --spawn --backend=cuda --modes=ll --ranks="$gpus" "${model[@]}" \
        "$verify" "$@" >"$logs/$name.out" 2>"$logs/$name.err" || { fail "$name" $? "$limit" "$logs/$name.err"; return 1; }
}

# ---- pairs ----------------------------------------------------------------------------------------

# pairs_table NAME EXECUTOR: of ep-bench's CSV, a line for each case beside its bar, also as JSON.
pairs_table() {
    awk -F, -v gpus="$gpus" -v json="$json" -v executor="$2" '
    FNR == NR {
        if ($1 == "pair" && $2 == gpus) bar[$3, $4] = $5 "," (executor == "direct" ? $6 "," $7 : $8 ",-")
        next
    }
    FNR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    {
        layout = $at["layout"]; tokens = $at["tokens"]; graph = $at["graph_pair_us"]
        words = ""
        split(((layout, tokens) in bar && $at["dtype"] == "bf16") ? bar[layout, tokens] : "-,-,-", b, ",")
        if (b[1] != "-") words = b[3] != "-" && graph <= b[3] ? "aim reached" : graph <= b[2] ? "bar reached" : "MISSED"
        printf "%-12s %-5s %4d | %7.1f %7.1f | %8.1f %8.1f | %8.1f | %7s %6s %6s %s\n", layout, $at["dtype"], tokens,
            graph, $at["pair_us"], $at["dispatch_p50_us"], $at["combine_p50_us"], $at["service_us"], b[1], b[2], b[3], words
        printf "{\"what\": \"pair\", \"executor\": \"%s\", \"gpus\": %d, \"layout\": \"%s\", \"dtype\": \"%s\", \"tokens\": %d, " \
            "\"graph_pair_us\": %s, \"eager_pair_us\": %s, \"dispatch_us\": %s, \"combine_us\": %s, \"verified\": \"%s\"}\n",
            executor, gpus, layout, $at["dtype"], tokens, graph, $at["pair_us"], $at["dispatch_p50_us"], $at["combine_p50_us"],
            $at["verified"] >>json
    }' "$logs/bars" "$logs/$1.out"
}

# pairs_of EXECUTOR LAYOUT DTYPE TOKENS [FUNCTION]: to run ep-bench in.
pairs_of() {
    local executor=$1 layout=$2 dtype=$3 tokens=$4 name=pairs-$1-$2-$3
    "${@:5}" run_bench "$name" "$pairs_limit_s" --executor="$executor" --layouts="$layout" --dtypes="$dtype" --tokens="$tokens" \
        "${times[@]}" --output=csv && pairs_table "$name" "$executor"
}

pairs_head() {
    printf '%-12s %-5s %4s | %7s %7s | %8s %8s | %8s | %7s %6s %6s\n' layout wire T graph eager dispatch combine host \
        peers must aim
}

pairs() {
    printf '\nThrough real processes, us, slowest rank.  graph: a pair in a CUDA graph of 20; eager: period of pairs that follow\n'
    printf 'each other; each: between marks in the stream; host: what a lone pair costs beside its ops\n'
    pairs_head
    pairs_of direct expert-major bf16 128,64,32,8,1
    pairs_of direct rank-major bf16 128,8,1
    pairs_of direct expert-major fp8 128
}

# ---- executor server ------------------------------------------------------------------------------

# executor_rows NAME TEXT: of ep-bench's CSV, beside what executor direct had.
executor_rows() {
    awk -F, -v gpus="$gpus" -v json="$json" -v text="$2" '
    FNR == 1 { file++; for (i = 1; i <= NF; i++) at[$i] = i; next }
    file == 1 { graph[$at["tokens"]] = $at["graph_pair_us"]; eager[$at["tokens"]] = $at["pair_us"]; next }
    {
        tokens = $at["tokens"]
        printf "%-18s %4d | %7.1f %7.1f | %8.1f %8.1f | %8.1f | %7.1f %7.1f\n", text, tokens, $at["graph_pair_us"],
            $at["pair_us"], $at["dispatch_p50_us"], $at["combine_p50_us"], $at["service_us"],
            $at["graph_pair_us"] - graph[tokens], $at["pair_us"] - eager[tokens]
        printf "{\"what\": \"executor\", \"executor\": \"%s\", \"gpus\": %d, \"tokens\": %d, \"graph_pair_us\": %s, " \
            "\"eager_pair_us\": %s}\n", text, gpus, tokens, $at["graph_pair_us"], $at["pair_us"] >>json
    }' "$logs/executor-direct.out" "$logs/$1.out"
}

# executor NAME TEXT EXECUTOR [FUNCTION]: to run it in, in a process of its own.
executor() {
    local name=$1 text=$2 executor=$3
    shift 3
    "$@" run_bench "$name" "$pairs_limit_s" --layouts=expert-major --tokens=128,8,1 --executor="$executor" "${times[@]}" \
        --output=csv || { code=1; return 1; }
    executor_rows "$name" "$text"
}

served_pairs() {
    have_mps || return
    printf '\nThe same pairs with executor server, MPS and --doorbell=poll\n'
    pairs_head
    pairs_of server expert-major bf16 128,64,32,8,1 with_mps polls
    pairs_of server rank-major bf16 128,8,1 with_mps polls
}

executors() {
    printf '\nWho runs the ops, us, expert-major bf16; the last two: a pair beyond that of direct\n'
    printf '%-18s %4s | %7s %7s | %8s %8s | %8s | %7s %7s\n' executor T graph eager dispatch combine host graph eager
    executor executor-direct direct direct || return
    executor executor-server 'server, no MPS' server
    if have_mps; then
        executor executor-mps 'server, MPS' server with_mps
        executor executor-mps-poll 'server, MPS, poll' server with_mps polls
        executor executor-direct-mps 'direct, MPS' direct with_mps
    else
        echo 'server, MPS: skipped, there is no nvidia-cuda-mps-control'
    fi
}

# ---- figures --------------------------------------------------------------------------------------

# figure NAME TEXT VALUE...: their median and largest; the largest is held against the bar of that name.
figure() {
    local name=$1 text=$2
    shift 2
    printf '%s\n' "$@" | sort -g | awk -F, -v gpus="$gpus" -v json="$json" -v name="$name" -v text="$text" '
    FNR == NR { if ($1 == "figure" && $2 == name) { must = $3; aim = $4 } next }
    { value[FNR] = $1; n = FNR }
    END {
        most = value[n]; median = value[int((n + 1) / 2)]
        words = must == "" ? "" : most <= aim ? "aim reached" : most <= must ? "bar reached" : "MISSED"
        printf "%-62s %8.2f %8.2f | %6s %6s %s\n", text, median, most, must == "" ? "-" : must, must == "" ? "-" : aim, words
        printf "{\"what\": \"%s\", \"gpus\": %d, \"n\": %d, \"median\": %s, \"most\": %s}\n", name, gpus, n, median, most >>json
    }' "$logs/bars" -
}

# number FILE NAME: of an object in JSON that has a member a line.
number() { awk -F'[:, ]+' -v name="\"$2\"" '$2 == name { print $3; exit }' "$1"; }

# thousandth FILE NAME: us as ms.
thousandth() { awk -v us="$(number "$1" "$2")" 'BEGIN { print us / 1000 }'; }

deaths() {
    local i longest=() attach=() join=() context=()
    if ((gpus < 2)); then
        echo 'a killed worker: skipped, two GPUs are needed'
        return
    fi
    for ((i = 1; i <= deaths; i++)); do
        # In the second case: first ops load kernels.
        run_bench "death-$i" "$kill_limit_s" --layouts=expert-major --tokens=32,128 --iters=200 --kill=1@1 --no-verify \
            --output=json || return
        longest+=("$(thousandth "$logs/death-$i.out" longest_op_us)")
        attach+=("$(thousandth "$logs/death-$i.out" attach_us)")
        join+=("$(thousandth "$logs/death-$i.out" join_us)")
        context+=("$(thousandth "$logs/death-$i.out" context_us)")
    done
    figure kill_ms "kill -9 of a worker: its peers' longest op, ms" "${longest[@]}"
    figure attach_ms 'a new worker with a GPU context attaches to the running group, ms' "${attach[@]}"
    figure join_ms '  of this ep_join alone' "${join[@]}"
    figure context_ms '  before that, a fresh process makes its GPU context' "${context[@]}"
}

# What a group would have, on a server of our own.
window_bytes() { # RANKS
    timeout --kill-after=5 30 "$bin/ep-admin" group create window --ranks="$1" "${model[@]}" --modes=ll \
        --ll-max-tokens=128 --arena=1MiB --dry-run --output=json >"$logs/window-$1.json" 2>"$logs/window-$1.err" &&
        echo $(($(number "$logs/window-$1.json" window_bytes) - $(number "$logs/window-$1.json" arena_bytes)))
}

windows() {
    local dir bytes ranks
    dir=$(mktemp -d)
    export EP_SERVER=unix:$dir/ep.sock
    if start_server "$dir"; then
        for ranks in $( ((gpus == 8)) || echo "$gpus") 8; do
            if bytes=$(window_bytes "$ranks"); then
                figure "$( ((ranks == 8)) && echo window_mib || echo "window_mib_of_$ranks")" \
                    "window of a rank without its arena, T=128, $ranks ranks, MiB" "$(awk "BEGIN { print $bytes / 1048576 }")"
            else
                fail 'group create --dry-run' 1 30 "$logs/window-$ranks.err"
            fi
        done
    else
        fail ep-server 1 30 "$dir/server.out"
    fi
    kill -KILL "$server" 2>/dev/null
    wait "$server" 2>/dev/null
    rm -rf "$dir"
}

figures() {
    printf '\n%-62s %8s %8s | %6s %6s\n' '' median most must aim
    deaths
    windows
}

# ---- all of it ------------------------------------------------------------------------------------

kernels() {
    local flags=()
    [[ $verify == --no-verify ]] && flags=(--no-verify)
    printf '\nThe kernels alone, all ranks in one process\n'
    timeout --kill-after=10 "$kernels_limit_s" "$gpu_bin/ll_bench" --gpus "$gpus" --json "$json" "${flags[@]}" \
        2>"$logs/ll_bench.err" || fail ll_bench $? "$kernels_limit_s" "$logs/ll_bench.err"
    # The reference is slow with so many tokens: run.sh looks at HT's results, in smaller shapes.
    timeout --kill-after=10 "$kernels_limit_s" "$gpu_bin/ht_bench" --gpus "$gpus" --no-verify \
        2>"$logs/ht_bench.err" || fail ht_bench $? "$kernels_limit_s" "$logs/ht_bench.err"
}

gin() {
    local transport
    for transport in host tcp; do
        printf '\nThe NCCL plugin, %s, without NCCL and its kernels\n' "$transport"
        EP_CUDA_MODULE=${EP_CUDA_MODULE-$lib/libep_cuda.so} EP_GIN_TRANSPORT=$transport \
            timeout --kill-after=10 "$gin_limit_s" "$gin_bin/gin_conformance" --plugin "$lib/libnccl-net-ep.so" \
            --memory cuda --ranks $((gpus > 2 ? gpus : 2)) --seconds "$gin_limit_s" --bench 2>"$logs/gin-$transport.err" |
            sed 1d || fail "gin $transport" $? "$gin_limit_s" "$logs/gin-$transport.err"
    done
}

# What else may have been running, and at which clocks.
nvidia-smi --query-gpu=index,name,driver_version,clocks.sm,clocks.mem,power.draw,utilization.gpu --format=csv,noheader 2>/dev/null
if [[ -z $only || $only == processes ]]; then
    pairs
    executors
fi
if [[ -z $only || $only == processes || $only == server ]]; then
    served_pairs
fi
if [[ -z $only || $only == processes ]]; then
    figures
fi
if [[ -z $only || $only == kernels ]]; then
    kernels
fi
if [[ -z $only || $only == gin ]]; then
    gin
fi
exit "$code"
