#!/usr/bin/env bash
# A group on the GPUs of several nodes, which are servers of this machine with a share of its GPUs each: NCCL takes them
# for hosts of their own. Runs from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: nodes.sh N [--gpus N] [--each N] [--no-checks] [--soak S] [--bench] [--pauses N] [--limit S] [--logs DIR]

Starts N ep-servers on an etcd of their own, makes a group over all of them with a rank on each GPU, and runs verified
dispatch and combine on it. Prints a line per step and, at the end, `N passed, N failed`. Exits with 77 where there is no
GPU, no NCCL or no etcd. Servers share a GPU where there are fewer GPUs than nodes: slow, and right all the same.

  --gpus N    use N GPUs (default: all that nvidia-smi lists)
  --each N    give each node N of them (default: an equal part), some to several nodes where there are too few
  --no-checks leave that out: only what the next three say
  --soak S    then run random ops of both modes for S seconds, with kill -9 of a worker a minute
  --bench     then time low latency and high throughput with H 7168, K 8, E 256, T 128 to 1 and 4096, and print the tables
              and what TCP over loopback brings here
  --pauses N  then change modes and token limits N times, have the last server end and return N times, and print how long
              workers that follow paused
  --limit S   seconds for a step (default 120)
  --logs DIR  keep complete output there
TEXT
}

gpus='' each='' logs='' limit_s=120 nodes='' checks=1 times=0 pauses=0 soak_s=0
while (($#)); do
    case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift ;;
    --each) each=${2:?--each needs a number}; shift ;;
    --limit) limit_s=${2:?--limit needs seconds}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --no-checks) checks=0 ;;
    --bench) times=1 ;;
    --pauses) pauses=${2:?--pauses needs a number}; shift ;;
    --soak) soak_s=${2:?--soak needs seconds}; shift ;;
    --help | -h) usage; exit 0 ;;
    [1-8]) nodes=$1 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
[[ -n $nodes ]] || { usage >&2; exit 2; }
count_gpus
((${each:-1} >= 1 && ${each:-1} <= gpus)) || { echo "nodes.sh: --each is $each: must be 1 to $gpus, the GPUs here" >&2; exit 2; }
need "$bin/ep-server" "$bin/ep-admin" "$bin/ep-bench" "$bin/worker"
[[ -z $logs ]] || mkdir -p "$logs"
dir=$(mktemp -d)
processes=()

tear_down() {
    ((${#processes[@]} == 0)) || kill -KILL "${processes[@]}" 2>/dev/null
    wait 2>/dev/null
    [[ -z $logs ]] || cp "$dir"/*.out "$logs/" 2>/dev/null
    rm -rf "$dir"
}
trap tear_down EXIT

# ---- etcd: the system's, or the one of the bundle, which is packed ---------------------------------

etcd=$(command -v etcd) || etcd=''
if [[ -z $etcd && -e $here/etcd.xz ]]; then
    etcd=$dir/etcd
    xz -dc "$here/etcd.xz" >"$etcd" && chmod +x "$etcd"
fi
[[ -n $etcd ]] || { echo 'no etcd here: several servers need one'; exit 77; }

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

start_etcd() {
    local client peer
    client=$(free_port) peer=$(free_port)
    store=127.0.0.1:$client
    "$etcd" --data-dir="$dir/etcd.d" --listen-client-urls="http://$store" --advertise-client-urls="http://$store" \
        --listen-peer-urls="http://127.0.0.1:$peer" --initial-advertise-peer-urls="http://127.0.0.1:$peer" \
        --initial-cluster="default=http://127.0.0.1:$peer" --unsafe-no-fsync --log-level=error >"$dir/etcd.out" 2>&1 &
    processes+=("$!")
}

# ---- nodes ---------------------------------------------------------------------------------------------

# share NODE: its GPUs.  All servers see all of them.
share() {
    local first=$(($1 * gpus / nodes)) last i

    if [[ -n $each ]]; then
        for ((i = 0; i < each; i++)); do
            echo $((($1 * each + i) % gpus))
        done | sort -n | paste -sd ,
        return
    fi
    last=$((gpus >= nodes ? ($1 + 1) * gpus / nodes - 1 : first))
    seq -s , "$first" "$last"
}

if [[ -n $each ]]; then
    ranks=$((nodes * each))
else
    ranks=$((gpus >= nodes ? gpus : nodes))
fi

# For servers alone, and fewer queues where they share a GPU.
of_nccl=(NCCL_NET_PLUGIN="${NCCL_NET_PLUGIN-$(realpath "$lib")/libnccl-net-ep.so}" NCCL_NET_PLUGIN_REF_COUNT=1
    NCCL_GIN_ENABLE=1 NCCL_GIN_NCONTEXTS=1 NCCL_CUMEM_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0
    CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS="$((gpus < ranks ? 16 : 32))")

# Where servers share a GPU, they are slow, and under MPS the kernels of all must fit there at once.
sharing=()
((gpus >= ranks)) || sharing=(--lost-after=20s --sms-per-rank=24)

start_node() {
    local node=$1
    mkdir -p "$dir/$node"
    rm -f "$dir/$node/ports"
    env "${of_nccl[@]}" NCCL_HOSTID="ep-node-$node" "$bin/ep-server" --backend=cuda --gpus="$(share "$node")" --name="node-$node" \
        --store="etcd://$store" --listen=127.0.0.1:0 --insecure --socket="$dir/$node/ep.sock" "${sharing[@]}" \
        --state-dir="$dir/$node/state" --port-file="$dir/$node/ports" --log-level=info >>"$dir/server-$node.out" 2>&1 &
    processes+=("$!")
    pids[node]=$!
}

# node_serves NODE: or it has ended.
node_serves() { [[ -s $dir/$1/ports ]] || ! kill -0 "${pids[$1]}" 2>/dev/null; }

await_node() { until_so node_serves "$1" && [[ -s $dir/$1/ports ]]; }

start_nodes() {
    local node
    for ((node = 0; node < nodes; node++)); do
        start_node "$node"
    done
    for ((node = 0; node < nodes; node++)); do
        await_node "$node" || return 1
    done
}

admin() { timeout --kill-after=5 "$limit_s" "$bin/ep-admin" --timeout=40s "$@"; }

# step NAME COMMAND [ARGUMENT...]
step() {
    local name=$1 log=$dir/${1//[^a-zA-Z0-9]/-}.out began=$EPOCHREALTIME code
    shift
    "$@" >"$log" 2>&1
    code=$?
    printf '%s %s (%.1f s)\n' "$( ((code == 0)) && echo 'ok  ' || echo FAIL)" "$name" \
        "$(awk "BEGIN { print $EPOCHREALTIME - $began }")"
    if ((code == 0)); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        tail -n 12 "$log" | cut -c 1-400 | sed 's/^/     /'
        tail -qn 4 "$dir"/server-*.out | cut -c 1-400 | sed 's/^/     /'
    fi
    return "$code"
}

# refused TEXT COMMAND [ARGUMENT...]: it fails, and says so.
refused() {
    local text=$1 said
    shift
    said=$("$@" 2>&1) && { echo "not refused: $said"; return 1; }
    echo "$said"
    grep -qF -- "$text" <<<"$said"
}

group=(moe --ranks="$ranks" --experts=$((4 * ranks)) --hidden=1024 --top-k=4 '--modes=ll,ht' --ll-max-tokens=32
    --ht-max-tokens=256 --arena=64MiB --timeout-ms=20000 --placement=spread)
servers=()
for ((node = 0; node < nodes; node++)); do
    servers+=("--server=unix:$dir/$node/ep.sock")
done
export EP_SERVER=unix:$dir/0/ep.sock

bench() {
    timeout --kill-after=5 "$limit_s" "$bin/ep-bench" "${servers[@]}" --group=moe --backend=cuda --verify "$@"
}
low() { bench --modes=ll "$@"; }
high() { bench --modes=ht "$@"; }

# ---- how long workers that follow pause ------------------------------------------------------------------

# Followers print to $dir/follower-NODE-GPU.out.
start_followers_of() {
    local node=$1 gpu
    for gpu in $(share "$node" | tr , ' '); do
        "$bin/worker" --group=moe --server="unix:$dir/$node/ep.sock" --mode=both --follow --once --tokens=16 \
            >>"$dir/follower-$node-$gpu.out" 2>&1 &
        processes+=("$!")
    done
}

start_followers() {
    local node
    for ((node = 0; node < nodes; node++)); do
        start_followers_of "$node"
    done
    all_attached
}

# Every rank has a worker in the newest epoch, and none is elsewhere.
is_whole() {
    local group
    group=$("$bin/ep-admin" --timeout=40s group get moe) || return 1
    grep -q '^phase  *READY' <<<"$group" && grep -q "^ranks  *$ranks/$ranks attached" <<<"$group" && ! grep -q '^old epochs' <<<"$group"
}
all_attached() { until_so is_whole; }

reported() { (($(grep -c 'longest pause' "$1") > $2)); }

# await_reports FILE...: one more of each, which tells of all until now.
await_reports() {
    local file
    local -A before=()
    for file; do
        before[$file]=$(grep -c 'longest pause' "$file")
    done
    for file; do
        until_so reported "$file" "${before[$file]}" || return 1
    done
}

# during NAME PATTERN COMMAND [ARGUMENT...]: runs it and tells the longest op and pause of followers meanwhile, ms.
during() {
    local name=$1 file
    local files
    mapfile -t files < <(compgen -G "$2")
    local -A before=()
    shift 2
    await_reports "${files[@]}" || return 1
    for file in "${files[@]}"; do
        before[$file]=$(wc -l <"$file")
    done
    "$@" >&2 || return 1
    await_reports "${files[@]}" || return 1
    for file in "${files[@]}"; do
        tail -n "+$((${before[$file]} + 1))" "$file"
    done | awk -v name="$name" '
        function more(a, b) { return b + 0 > a + 0 ? b + 0 : a + 0 }
        { for (i = 1; i < NF; i++) {
            if ($i == "most" && $(i - 1) == "at") op = more(op, $(i + 1))
            if ($i == "pause") pause = more(pause, $(i + 1))
            if ($i == "failures") failures = more(failures, $(i + 1))
            if ($(i + 1) ~ /^wrong/) wrong += $i } }
        END { printf "%-24s %9.1f %9.1f %9d %6d\n", name, op / 1000, pause / 1000, failures, wrong; exit wrong > 0 }'
}

update() { admin group update moe "$1" && all_attached; }

nap() { sleep 1; }

ended() { ! kill -0 "$1" 2>/dev/null; }

# Under MPS the first program to start after one was killed fails, the next one runs.
bring_back() {
    start_node "$1"
    await_node "$1" && return
    start_node "$1"
    await_node "$1"
}

# leave_and_return SIGNAL: the last server ends, and its workers with it; later it comes back, and others.
leave_and_return() {
    local last=$((nodes - 1))
    kill "-$1" "${pids[last]}" && until_so ended "${pids[last]}" && sleep 2 && bring_back "$last" &&
        start_followers_of "$last" && all_attached
}

pauses_of_changes() {
    local i flag
    for ((i = 0; i < pauses; i++)); do
        during 'nothing' "$dir/follower-*" nap || return 1
        for flag in --modes=ll --modes=ll,ht --modes=ht --modes=ll,ht --ll-max-tokens=64 --ll-max-tokens=32 --ht-max-tokens=512 \
            --ht-max-tokens=256; do
            during "$flag" "$dir/follower-*" update "$flag" || return 1
        done
    done
}

# Of the followers of all other nodes.
pauses_of_servers() {
    local i signal
    for ((i = 0; i < pauses; i++)); do
        for signal in TERM KILL; do
            during "server ends, $signal" "$dir/follower-[!$((nodes - 1))]-*" leave_and_return "$signal" || return 1
        done
    done
}

measure_pauses() {
    step 'a group that changes' admin group create "${group[@]}" --wait=60s &&
        step 'workers that follow' start_followers &&
        step 'rows of experts, of all nodes' until_so has_loads moe $((4 * ranks)) || return
    step 'pauses of changes' pauses_of_changes
    step 'pauses while a server is away' pauses_of_servers
    printf '%-24s %9s %9s %9s %6s\n' 'ms' 'op' 'pause' 'failures' 'wrong'
    grep -hE '^(nothing|--|server ends)' "$dir"/pauses-*.out
}

# Workers of a group on one node alone, which rest most of the time. NCCL begins with the first group over several nodes, when
# their streams wait for doorbells.
alone() {
    local node i
    admin group create alone "${group[@]:1}" --ranks="$((ranks / nodes))" --placement=pack --direct=none --wait=60s || return
    node=$("$bin/ep-admin" group get alone | sed -n 's/^nodes  *node-\([0-9]*\) .*/\1/p')
    for ((i = 0; i < ranks / nodes; i++)); do
        "$bin/worker" --group=alone --server="unix:$dir/$node/ep.sock" --mode=both --pause-ms=500 >"$dir/alone-$i.out" 2>&1 &
        resting+=("$!")
    done
    for ((i = 0; i < ranks / nodes; i++)); do
        until_so reported "$dir/alone-$i.out" 0 || return
    done
}

nobody_failed() { ! grep -E 'failures [1-9]|[1-9][0-9]* wrong|lost' "$dir"/alone-*.out; }

# They go on meanwhile and afterwards.
all_of_them() {
    admin group create "${group[@]}" --wait=60s && await_reports "$dir"/alone-*.out && nobody_failed
}

alone_ends() {
    kill "${resting[@]}" && wait "${resting[@]}"
    admin group delete alone && nobody_failed
}

# NCCL asks the driver for much while streams of the same process wait for doorbells.
beside() {
    local work code
    low --soak=8 &
    work=$!
    sleep 3
    admin group create beside "${group[@]:1}" --wait=40s && admin group delete beside
    code=$?
    wait "$work" && ((code == 0))
}

check() {
    step 'a group on one of them, and its workers' alone
    step 'a group over all of them' all_of_them || return
    step 'the group on one of them goes' alone_ends
    step 'executor direct is refused' refused 'several nodes' low --executor=direct --tokens=1 --iters=1 --layouts=packed
    step 'low latency: every layout, verified' low --tokens=1,16 --iters=20
    step 'low latency: fp8' low --tokens=16 --iters=10 --dtypes=fp8
    step 'low latency: a worker is killed and another comes' low --tokens=16 --iters=20 --layouts=expert-major,packed \
        --kill=$((ranks - 1))@0
    step 'high throughput: every layout, verified' high --tokens=1,200 --iters=10
    step 'high throughput: fp8, aligned' high --tokens=200 --iters=5 --dtypes=fp8,fp8-given --alignment=16
    step 'high throughput: gradients' high --tokens=200 --iters=5 --passes=backward
    step 'high throughput: a rank without tokens, skewed routing' high --tokens=200 --iters=5 --zero-rank=0 \
        --routing=zipf:1.2
    step 'high throughput: a worker is killed and another comes' high --tokens=200 --iters=10 --kill=$((ranks - 1))@0
    step 'soak: both modes' bench --tokens=24 --soak=8
    step 'soak: both modes, kill -9 of workers all the while' bench --tokens=24 --soak=12 --soak-kill=3
    step 'a second group comes and goes while the first one works' beside
    step 'the group changes under a soak' under_changes --ll-max-tokens=48 --modes=ll --hidden=512 --modes=ll,ht \
        --ht-max-tokens=300 -- bench --tokens=24 --soak=25 --follow
    step 'the group goes' admin group delete moe
}

soak() {
    step 'a group to soak' admin group create "${group[@]}" --wait=60s || return
    limit_s=$((limit_s + soak_s)) step "soak of $soak_s s: both modes, kill -9 of a worker a minute" bench --tokens=24 \
        --soak="$soak_s" --soak-kill=60
    grep '^soak' "$dir"/soak-of-*.out
    step 'that group goes' admin group delete moe
}

measure_times() {
    local connections=${EP_GIN_CONNECTIONS:-$(($(nproc) < 16 || ranks > 8 ? 4 : 8))}
    step 'a large group' admin group create moe --ranks="$ranks" --experts=256 --hidden=7168 --top-k=8 --modes=ll,ht \
        --ll-max-tokens=128 --ht-max-tokens=4096 --arena=2GiB --timeout-ms=20000 --placement=spread --wait=60s || return
    step 'low latency, times' low --no-verify --tokens=128,32,8,1 --iters=200 --warmup=20 \
        --layouts=expert-major,rank-major --dtypes=bf16,fp8 && cat "$dir/low-latency--times.out"
    step 'high throughput, times' high --no-verify --tokens=4096 --iters=30 --warmup=5 --layouts=flat,packed \
        --dtypes=bf16,fp8 && cat "$dir/high-throughput--times.out"
    # One connection, and as many as all of them have over TCP.
    step 'loopback' python3 "$here/loopback.py" 1 $((ranks * (ranks - 1) * connections / 2)) && cat "$dir/loopback.out"
    step 'the large group goes' admin group delete moe
}

declare -a pids resting
start_etcd
step "$nodes servers start" start_nodes || { closing_line; exit 1; }
((!checks)) || check || { closing_line; exit 1; }
((!soak_s)) || soak
((!times)) || measure_times
((!pauses)) || measure_pauses
closing_line
