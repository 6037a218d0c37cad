#!/usr/bin/env bash
# The whole product on GPUs: a server, workers that are processes of their own, ep-admin and ep-bench. Runs
# from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: product.sh [--gpus N] [--ranks N] [--quick] [--filter TEXT] [--logs DIR]

Runs a server of its own and workers beside it: every layout and format, examples, processes that are killed.
Prints a line per step and, at the end, `N passed, N failed`. Exits with 77 where there is no GPU.

  --gpus N       use N GPUs (default: all that nvidia-smi lists)
  --ranks N      ranks of the groups (default: one per GPU, two on a single one)
  --quick        small shapes only, for GPUs that are shared or played by a CPU (EP_CUDA_MODULE)
  --filter TEXT  only steps whose name has TEXT in it
  --logs DIR     keep complete output there
TEXT
}

bench_limit_s=240
says_limit_s=30 # a worker says something once a second
gone_limit_s=20 # far below the timeout of the group whose workers are to notice
group_timeout_ms=60000
lost_code=4 # EP_SERVER_LOST, EP_DEVICE_LOST
half_gpu=64 # multiprocessors

gpus='' ranks='' quick=0 filter='' logs=''
while (($#)); do
    case $1 in
    --gpus) gpus=${2:?--gpus needs a number}; shift ;;
    --ranks) ranks=${2:?--ranks needs a number}; shift ;;
    --filter) filter=${2:?--filter needs a text}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    --quick) quick=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
count_gpus
need "$bin/ep-server" "$bin/ep-admin" "$bin/ep-bench" "$bin/hello_dispatch" "$bin/worker" "$gpu_bin/lost"
ranks=${ranks:-$((gpus > 1 ? gpus : 2))}
last=$((ranks - 1))
# Processes that share a GPU take turns of milliseconds while others wait for them.
((ranks > gpus)) && quick=1
open_logs

# ---- steps ----------------------------------------------------------------------------------------

# step NAME FUNCTION [ARGUMENT...]: in a process of its own, which ends what it has started.
step() {
    local name=$1 log=$logs/${1//[^a-zA-Z0-9]/-}.log began=$EPOCHREALTIME code
    shift
    [[ $name == *"$filter"* ]] || return
    ( set_up; trap tear_down EXIT; "$@" ) >"$log" 2>&1
    code=$?
    printf '%s %s (%.1f s)\n' "$( ((code == 0)) && echo 'ok  ' || echo FAIL)" "$name" \
        "$(awk "BEGIN { print $EPOCHREALTIME - $began }")"
    if ((code == 0)); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        { head -n 10 "$log"; echo ...; tail -n 12 "$log"; } | cut -c 1-400 | sed 's/^/     /'
    fi
}

# step_if_not_quick NAME FUNCTION [ARGUMENT...]
step_if_not_quick() {
    if ((!quick)); then
        step "$@"
    elif [[ $1 == *"$filter"* ]]; then
        echo "skip $1: only small shapes, as --quick was given or several processes share a GPU"
        skipped=$((skipped + 1))
    fi
}

# In the step's process: a folder, and no process yet.
set_up() {
    step_dir=$(mktemp -d)
    started=()
    export EP_SERVER=unix:$step_dir/ep.sock
}

tear_down() {
    ((${#started[@]} == 0)) || kill -KILL "${started[@]}" 2>/dev/null
    wait
    rm -rf "$step_dir"
}

complain() {
    echo "$*"
    tail -n 5 "$step_dir"/*.out 2>/dev/null
    exit 1
}

# in_process FUNCTION [ARGUMENT...]: what it has started ends with it, as long as there is what it needs.
in_process() {
    ( trap tear_down EXIT; "$@" )
}

# ---- a server -------------------------------------------------------------------------------------

start() {
    start_server "$step_dir" || complain 'the server does not start'
    started+=("$server")
}

mode=ll
make_group() { # NAME RANKS [OPTION...]
    timeout --kill-after=5 "$says_limit_s" "$bin/ep-admin" group create "$1" --ranks="$2" --experts=$((4 * $2)) \
        --hidden=1024 --top-k=2 --modes="$mode" --"$mode"-max-tokens=32 --arena=64MiB --wait=20s "${@:3}" || complain "no group $1"
}

# A server with the group "moe".
serve() {
    start
    make_group moe "$ranks" "$@"
}

# in_ht FUNCTION [ARGUMENT...]: the group has HT, and its workers use it.
in_ht() {
    mode=ht
    "$@"
}

# ---- workers --------------------------------------------------------------------------------------

# start_worker NAME RANK [OPTION...]: its process is worker[NAME], what it says in NAME.out.
declare -A worker
start_worker() {
    local name=$1 rank=$2
    shift 2
    "$bin/worker" --group=moe --rank="$rank" --mode="$mode" --pause-ms=2 "$@" >"$step_dir/$name.out" 2>&1 &
    worker[$name]=$!
    started+=("${worker[$name]}")
}

start_workers() { # FIRST LAST [OPTION...]: named for their ranks
    local rank first=$1 end=$2
    shift 2
    for ((rank = first; rank <= end; rank++)); do
        start_worker "$rank" "$rank" "$@"
    done
}

# says NAME TEXT: waits until it has said that, the last time it was asked excepted.
says() {
    local name=$1 text=$2
    for ((i = 0; i < 10 * says_limit_s; i++)); do
        tail -n "+${heard[$name]:-1}" "$step_dir/$name.out" 2>/dev/null | grep -qF -- "$text" && break
        sleep 0.1
    done
    ((i < 10 * says_limit_s)) || complain "worker $name never says '$text'"
    heard[$name]=$(($(wc -l <"$step_dir/$name.out") + 1))
}
declare -A heard

none_wrong() {
    ! grep -E '[1-9][0-9]* wrong' "$step_dir"/*.out || complain 'results are wrong'
}

# leaves NAME CODE: it ends by itself, in time, with that code.
leaves() {
    local process=${worker[$1]} code
    for ((i = 0; i < 20 * gone_limit_s; i++)); do
        kill -0 "$process" 2>/dev/null || break
        sleep 0.05
    done
    ((i < 20 * gone_limit_s)) || complain "worker $1 has not ended after $gone_limit_s s"
    wait "$process"
    code=$?
    ((code == $2)) || complain "worker $1 ended with $code, not $2"
}

# ---- what the steps do ----------------------------------------------------------------------------

modes=ll # of ep-bench's cases
run_bench() {
    timeout --kill-after=10 "$bench_limit_s" "$bin/ep-bench" --spawn --backend=cuda --modes="$modes" --ranks="$ranks" \
        --verify "$@"
    local code=$?
    ((code == 0)) || echo "ep-bench $(why "$code" "$bench_limit_s")"
    return "$code"
}

# with_modes LIST FUNCTION [ARGUMENT...]
with_modes() {
    local modes=$1
    shift
    "$@"
}

# The peers finish all their ops, none fails, and a new worker takes the rank.
run_kill() {
    local report=$step_dir/report.out want
    run_bench "$@" --kill="$last@1" --output=json >"$report" || { cat "$report"; return 1; }
    sed -n '/"kill"/,/}/p' "$report"
    for want in '"ok": true' '"done": true' '"masked_verified": true' '"ops_failed": 0'; do
        grep -qF "$want" "$report" || complain "its report has no $want"
    done
}

# Whoever runs an op, its results are the same, bit for bit: what all ranks have received and what they have combined.
run_same_bits() {
    local executor
    for executor in direct server mixed; do
        run_bench "$@" --executor="$executor" --output=json >"$step_dir/report.out" || { cat "$step_dir/report.out"; return 1; }
        grep -E '"(mode|layout|dtype|scales|pass|tokens|hash)":' "$step_dir/report.out" >"$step_dir/$executor"
        echo "$executor: $(grep -c '"hash": "[0-9a-f]*[1-9a-f]' "$step_dir/$executor") cases"
        grep -q '"hash"' "$step_dir/direct" && diff "$step_dir/direct" "$step_dir/$executor" || return 1
    done
}

# The functions below take options of the group that they make.

run_hello() {
    serve "$@"
    timeout --kill-after=5 60 "$bin/hello_dispatch" moe | tee "$step_dir/hello.out"
    grep -qF 'all results are right' "$step_dir/hello.out"
}

run_workers() {
    serve "$@"
    start_workers 0 "$last"
    local rank
    for ((rank = 0; rank < ranks; rank++)); do
        says "$rank" 'absent 0, failures 0'
        says "$rank" 'absent 0, failures 0'
    done
    until_so has_loads moe $((4 * ranks)) || complain 'the rows of experts are not told'
    for ((rank = 0; rank < ranks; rank++)); do
        kill -TERM "${worker[$rank]}"
    done
    for ((rank = 0; rank < ranks; rank++)); do
        leaves "$rank" 0
    done
    none_wrong
}

run_killed_worker() {
    serve --timeout-ms="$group_timeout_ms" "$@"
    start_workers 0 "$last"
    says 0 'absent 0, failures 0'
    local victim=$last round
    for round in 1 2 3; do
        kill -KILL "${worker[$victim]}"
        says 0 "rank $last lost"
        says 0 'absent 1, failures 0'
        victim=again-$round
        start_worker "$victim" "$last"
        says 0 "rank $last joined"
        says "$victim" 'absent 0, failures 0'
        says 0 'absent 0, failures 0'
    done
    none_wrong
}

# The op of a worker waits for its peers when it is killed.  Who comes next does not wait for its timeout.
run_killed_worker_in_op() {
    serve --timeout-ms="$group_timeout_ms" "$@"
    start_worker first "$last" --once
    says first attached
    sleep 1 # into the op
    kill -KILL "${worker[first]}"
    start_worker next "$last" --once
    says next attached
}

# Ops wait for a peer when the server dies: all ranks but one have a worker.
run_server_killed_in_op() {
    serve --timeout-ms="$group_timeout_ms" "$@"
    start_workers 0 $((last - 1)) --once
    says 0 attached
    sleep 1 # into the op
    kill -KILL "$server"
    for ((rank = 0; rank < last; rank++)); do
        leaves "$rank" "$lost_code"
    done
}

# The op of a worker waits for its peers when the server dies. What lets it go on must not be in a hardware queue
# behind it, and which queue that is depends on how many streams there are.
run_server_killed_streams() {
    local n
    for n in 1 2 3 4 5 6 7 8 9 24; do
        serve --timeout-ms="$group_timeout_ms" "$@"
        heard[lost]=1
        : >"$step_dir/lost.out" # what the last one said is not this one's
        "$gpu_bin/lost" moe "$n" >"$step_dir/lost.out" 2>&1 &
        worker[lost]=$!
        started+=("${worker[lost]}")
        says lost waiting
        kill -KILL "$server"
        leaves lost 0
        rm -rf "$step_dir/state" # the next one begins without the group
    done
}

run_server_killed() {
    serve --timeout-ms="$group_timeout_ms" "$@"
    start_workers 0 "$last" --once
    says 0 'absent 0, failures 0'
    kill -KILL "$server"
    for ((rank = 0; rank < ranks; rank++)); do
        leaves "$rank" "$lost_code"
    done
    none_wrong
}

# Workers that wait for their server go on when it is back, in its next epoch.
run_server_returns() {
    serve "$@"
    start_workers 0 "$last"
    says 0 'absent 0, failures 0'
    kill -KILL "$server"
    says 0 'the server is gone'
    start
    for ((rank = 0; rank < ranks; rank++)); do
        says "$rank" 'epoch 2: absent 0, failures 0'
    done
    none_wrong
}

# A program beside them goes wrong on the GPU, and with MPS all who use it are done with: the server ends, and serves again
# when it is started again.
run_fault_beside() {
    serve "$@"
    start_workers 0 "$last"
    says 0 'absent 0, failures 0'
    "$gpu_bin/fault" || complain 'the program that is to go wrong does not'
    worker[server]=$server
    leaves server "$lost_code"
    grep -F 'a GPU is lost' "$step_dir/server.out" || complain 'the server does not say why it ends'
    for ((rank = 0; rank < ranks; rank++)); do
        leaves "$rank" "$lost_code"
    done
    until_so start_server "$step_dir" || complain 'the server does not start again'
    started+=("$server")
    for ((rank = 0; rank < ranks; rank++)); do
        start_worker "again-$rank" "$rank"
    done
    for ((rank = 0; rank < ranks; rank++)); do
        says "again-$rank" 'absent 0, failures 0'
    done
    none_wrong
}

# And those whose ops wait for a peer when it dies.  With MPS it can return only if these ops end.
run_server_returns_in_op() {
    serve --timeout-ms="$group_timeout_ms" "$@"
    start_workers 0 $((last - 1))
    says 0 attached
    sleep 1 # into the op
    kill -KILL "$server"
    says 0 'the server is gone'
    start
    start_worker "$last" "$last"
    for ((rank = 0; rank < ranks; rank++)); do
        says "$rank" 'epoch 2: absent 0, failures 0'
    done
    none_wrong
}

# The group is changed under workers that go over to each new epoch, and check all results.
run_changes() { # EXECUTOR [OPTION...]
    local executor=$1
    local soak=(timeout --kill-after=10 "$bench_limit_s" "$bin/ep-bench" --group=moe --backend=cuda --soak="$((quick ? 12 : 25))"
        --follow --tokens=4,24 --executor="$executor")
    shift
    serve --timeout-ms="$group_timeout_ms" "$@"
    if ((quick)); then
        under_changes --ll-max-tokens=48 --hidden=512 --ll-max-tokens=24 --hidden=1024 -- "${soak[@]}" --modes=ll
    else
        under_changes --ll-max-tokens=48 --modes=ll,ht --hidden=512 --modes=ht --ht-max-tokens=64 --modes=ll -- "${soak[@]}"
    fi
}

# The first group has one GPU, and its worker rests most of the time. The second one has all of them, and HT beside LL.
run_second_group() {
    local rank modes=ll,ht uses=both
    ((quick)) && modes=ll uses=ll
    EP_SERVER_SMS_PER_RANK=4 start # room for both
    make_group first 1 "$@"
    start_worker first 0 --group=first --pause-ms=500
    says first 'absent 0, failures 0'
    make_group moe "$ranks" --modes="$modes" "$@"
    start_workers 0 "$last" --mode="$uses"
    for ((rank = 0; rank < ranks; rank++)); do
        says "$rank" 'absent 0, failures 0'
    done
    says first 'absent 0, failures 0'
    none_wrong
}

# Two groups have a rank on each GPU, one with low latency and one with high throughput, and ops all the time. In whatever
# order these come to the GPUs, none waits for room.
run_two_groups() { # EXECUTOR [OPTION...]
    local executor=$1 mode first
    local soak=(timeout --kill-after=10 "$bench_limit_s" "$bin/ep-bench" --backend=cuda --soak=8 "--tokens=24,128" --executor="$executor")
    shift
    EP_SERVER_SMS_PER_RANK=$half_gpu start
    for mode in ll ht; do
        make_group "$mode" "$ranks" --"$mode"-max-tokens=128 "$@" # enough to fill all that a rank may
    done
    "${soak[@]}" --group=ll --modes=ll >"$step_dir/ll.out" 2>&1 &
    first=$!
    started+=("$first")
    "${soak[@]}" --group=ht --modes=ht || complain 'high throughput fails'
    wait "$first" || complain 'low latency fails'
    cat "$step_dir/ll.out"
}

run_late() {
    serve --timeout-ms=300 "$@"
    start_workers 0 $((last - 1))
    says 0 'was late'
    grep -F "rank $last was late" "$step_dir/0.out" || complain 'another rank is named'
}

# ---- all of them ----------------------------------------------------------------------------------

all_dtypes=bf16,fp16,fp32,fp8,fp16-to-fp8,fp32-to-fp8,fp8-given
odd=(--experts=37 --hidden=2880 --top-k=5 --alignment=8)
model=(--experts=256 --hidden=7168 --top-k=8 --iters=20)
small=(--experts=16 --hidden=256 --top-k=4)
replays=1000
soak=(--tokens=24 --dtypes="$all_dtypes" '--scales=fp32,ue8m0' --soak=30)
if ((quick)); then
    odd=(--experts=37 --hidden=528 --top-k=5 --alignment=8)
    replays=100
    soak=("${soak[@]/--soak=30/--soak=8}")
fi

echo "$ranks ranks on $gpus GPUs$( ((quick)) && echo ', small shapes')"
step 'odd shape, all layouts and formats' run_bench "${odd[@]}" --tokens=1,77 --dtypes=$all_dtypes --iters=4 --warmup=1
step 'odd shape, a rank without tokens, choices of no expert' run_bench "${odd[@]}" --tokens=0,13 --dtypes=$all_dtypes \
    --zero-rank="$last" --drop=0.3 --iters=4 --warmup=1
step_if_not_quick 'H 7168, K 8, E 256, T 128, all layouts and formats' run_bench "${model[@]}" --tokens=128 --dtypes=$all_dtypes
step_if_not_quick 'H 7168, K 8, E 256, graphs of 20 pairs' run_bench "${model[@]}" --tokens=1,7,64 --graph=20
step 'graphs of 20 pairs' run_bench "${small[@]}" --tokens=4 --iters=40 --graph=20
for routing in zipf:1.2 hot:3 deepseek-v3 "text:$text"; do
    step "routing ${routing%%:*}" run_bench "${small[@]}" --tokens=24 --iters=4 --routing="$routing"
done
for layout in expert-major rank-major packed; do
    step "kill -9 of a worker in a sweep, $layout" run_kill "${small[@]}" --layouts="$layout" --tokens=4,24 --iters=100
done
step_if_not_quick 'kill -9 of a worker in a sweep, H 7168, K 8, E 256' run_kill "${model[@]}" --layouts=expert-major \
    --dtypes=fp8 --tokens=32,128
step 'soak: random ops, some of them in halves, several under way' run_bench "${odd[@]}" "${soak[@]}"
step 'soak: kill -9 of workers all the while' run_bench "${odd[@]}" "${soak[@]}" --soak-kill=3
step 'soak: memory of its own' run_bench "${odd[@]}" "${soak[@]}" --memory=own

# High throughput, alone and in one group with low latency.
ht_steps() { # NAME [OPTION...]: of ep-bench
    local name=$1 layout
    local ht=(with_modes ht run_bench "${@:2}") ht_kill=(with_modes ht run_kill "${@:2}")
    local both=(with_modes ll,ht run_bench "${@:2}")
    step_if_not_quick "$name: odd shape, all layouts and formats" "${ht[@]}" "${odd[@]}" --tokens=1,77 --dtypes=$all_dtypes \
        --scales=fp32,ue8m0 --iters=4 --warmup=1
    step_if_not_quick "$name: odd shape, a rank without tokens, choices of no expert" "${ht[@]}" "${odd[@]}" --tokens=0,13 \
        --dtypes=$all_dtypes --zero-rank="$last" --drop=0.3 --iters=4 --warmup=1
    step_if_not_quick "$name: gradients, with the routing of the forward pass" "${ht[@]}" "${odd[@]}" --tokens=33,300 \
        --passes=forward,backward --iters=4 --warmup=1
    step_if_not_quick "$name: H 7168, K 8, E 256, T 512" "${ht[@]}" "${model[@]}" --tokens=512 \
        --dtypes=bf16,fp8
    step_if_not_quick "$name: routing zipf" "${ht[@]}" "${small[@]}" --tokens=500 --iters=4 --routing=zipf:1.2
    step_if_not_quick "$name: routing hot" "${ht[@]}" "${small[@]}" --tokens=500 --iters=4 --routing=hot:3
    step_if_not_quick "$name: $replays launches of a graph, with other inputs each" "${ht[@]}" "${small[@]}" --tokens=200 \
        --iters=20 --graph=2 --replays=$replays
    for layout in flat packed; do
        step_if_not_quick "$name: kill -9 of a worker in a sweep, $layout" "${ht_kill[@]}" "${small[@]}" --layouts="$layout" \
            --tokens=24,500 --iters=100
    done
    step_if_not_quick "$name: soak beside low latency" "${both[@]}" "${odd[@]}" "${soak[@]}"
    step_if_not_quick "$name: soak beside low latency, kill -9 of workers all the while" "${both[@]}" "${odd[@]}" "${soak[@]}" \
        --soak-kill=3
}

ht_steps 'high throughput'
step_if_not_quick 'high throughput: on 4 multiprocessors' with_modes ht run_bench "${model[@]}" --ht-sms=4 --tokens=300
ht_steps 'high throughput, server' --executor=server
ht_steps 'high throughput, mixed, memory of its own' --executor=mixed --memory=own

process_steps() { # NAME [OPTION...]: of the group
    local name=$1
    shift
    step "$name: hello_dispatch" run_hello "$@"
    step "$name: workers" run_workers "$@"
    step "$name: kill -9 of workers, again and again" run_killed_worker "$@"
    step "$name: kill -9 of a worker, whose op waits for its peers" run_killed_worker_in_op "$@"
    step "$name: kill -9 of the server, between ops" run_server_killed "$@"
    step "$name: kill -9 of the server, ops wait for a peer" run_server_killed_in_op "$@"
    step "$name: kill -9 of the server, with many streams" run_server_killed_streams "$@"
    step "$name: kill -9 of the server, which returns" run_server_returns "$@"
    step "$name: kill -9 of the server, ops wait for a peer, and it returns" run_server_returns_in_op "$@"
    step "$name: a rank that is late is named" run_late "$@"
    step "$name: a second group comes while the first one is served" run_second_group "$@"
    step "$name: the group changes under a soak" run_changes "$name" "$@"
    step_if_not_quick "$name: two groups on the same GPUs" run_two_groups "$name" "$@"
}

ht_process_steps() { # NAME [OPTION...]: of the group
    local name="high throughput, $1"
    shift
    step_if_not_quick "$name: workers" in_ht run_workers "$@"
    step_if_not_quick "$name: kill -9 of workers, again and again" in_ht run_killed_worker "$@"
    step_if_not_quick "$name: kill -9 of a worker, whose op waits for its peers" in_ht run_killed_worker_in_op "$@"
    step_if_not_quick "$name: kill -9 of the server, between ops" in_ht run_server_killed "$@"
    step_if_not_quick "$name: kill -9 of the server, ops wait for a peer" in_ht run_server_killed_in_op "$@"
    step_if_not_quick "$name: kill -9 of the server, which returns" in_ht run_server_returns "$@"
    step_if_not_quick "$name: kill -9 of the server, ops wait for a peer, and it returns" in_ht run_server_returns_in_op "$@"
    step_if_not_quick "$name: a rank that is late is named" in_ht run_late "$@"
}

# Inputs and outputs where an application has its tensors.
memory_steps() { # NAME EXECUTOR
    local name="memory of its own, $1" own=(--memory=own --executor="$2")
    step "$name: odd shape, all layouts and formats" run_bench "${odd[@]}" "${own[@]}" --tokens=1,77 --dtypes=$all_dtypes \
        --iters=4 --warmup=1
    step "$name: odd shape, a rank without tokens" run_bench "${odd[@]}" "${own[@]}" --tokens=0,13 --dtypes=$all_dtypes \
        --zero-rank="$last" --drop=0.3 --iters=4 --warmup=1
    step_if_not_quick "$name: H 7168, K 8, E 256, T 128" run_bench "${model[@]}" "${own[@]}" --tokens=128 --dtypes=$all_dtypes
    step "$name: $replays launches of a graph, with other inputs each" run_bench "${small[@]}" "${own[@]}" --tokens=24 \
        --iters=20 --graph=2 --replays=$replays
    step "$name: kill -9 of a worker in a sweep" run_kill "${small[@]}" "${own[@]}" --tokens=4,24 --iters=100
}

same=(--tokens=33 --dtypes="$all_dtypes" '--scales=fp32,ue8m0' --drop=0.3 --iters=2 --warmup=1)
step 'the same bits, whoever runs the ops' run_same_bits "${odd[@]}" "${same[@]}"
step_if_not_quick 'high throughput: the same bits, whoever runs the ops' with_modes ht run_same_bits "${odd[@]}" "${same[@]}" \
    --passes=forward,backward

memory_steps direct auto
memory_steps server server
memory_steps mixed mixed

# Ops that the server runs, all or those of every second rank.
executor_steps() { # NAME EXECUTOR [FUNCTION]: to run each in
    local name=$1 executor=$2 in=("${@:3}")
    step "$name: odd shape, all layouts and formats" "${in[@]}" run_bench "${odd[@]}" --executor="$executor" --tokens=1,77 \
        --dtypes=$all_dtypes --iters=4 --warmup=1
    step "$name: odd shape, a rank without tokens" "${in[@]}" run_bench "${odd[@]}" --executor="$executor" --tokens=0,13 \
        --dtypes=$all_dtypes --zero-rank="$last" --drop=0.3 --iters=4 --warmup=1
    step_if_not_quick "$name: H 7168, K 8, E 256, T 128" "${in[@]}" run_bench "${model[@]}" --executor="$executor" --tokens=128 \
        --dtypes=$all_dtypes
    step "$name: $replays launches of a graph, with other inputs each" "${in[@]}" run_bench "${small[@]}" --executor="$executor" \
        --tokens=24 --iters=20 --graph=2 --replays=$replays
    step "$name: kill -9 of a worker in a sweep" "${in[@]}" run_kill "${small[@]}" --executor="$executor" --tokens=4,24 --iters=100
    step "$name: soak, kill -9 of workers all the while" "${in[@]}" run_bench "${odd[@]}" "${soak[@]}" --executor="$executor" \
        --soak-kill=3
}

# Workers that are gone while the server's kernels go on, and the other way round.
mps_steps() { # NAME [FUNCTION]: to run each in
    local name=$1 in=(with_mps "${@:2}" in_process)
    step "$name: kill -9 of workers, again and again" "${in[@]}" run_killed_worker --direct=none
    step "$name: kill -9 of a worker, whose op waits for its peers" "${in[@]}" run_killed_worker_in_op --direct=none
    step "$name: kill -9 of the server, between ops" "${in[@]}" run_server_killed --direct=none
    step "$name: kill -9 of the server, ops wait for a peer" "${in[@]}" run_server_killed_in_op --direct=none
    step "$name: kill -9 of the server, which returns" "${in[@]}" run_server_returns --direct=none
    step "$name: kill -9 of the server, ops wait for a peer, and it returns" "${in[@]}" run_server_returns_in_op --direct=none
    step "$name: another program goes wrong on the GPU" "${in[@]}" run_fault_beside --direct=none
    step_if_not_quick "high throughput, $name: kill -9 of the server, ops wait for a peer, and it returns" "${in[@]}" \
        in_ht run_server_returns_in_op --direct=none
}

step "direct: $replays launches of a graph, with other inputs each" run_bench "${small[@]}" --tokens=24 --iters=20 --graph=2 \
    --replays=$replays
executor_steps server server
executor_steps mixed mixed
process_steps direct
process_steps server --direct=none
ht_process_steps direct
ht_process_steps server --direct=none
if have_mps; then
    need "$gpu_bin/fault"
    executor_steps 'server with MPS' server with_mps
    executor_steps 'server with MPS, doorbell poll' server with_mps polls
    mps_steps 'server with MPS'
    mps_steps 'server with MPS, doorbell poll' polls
    step_if_not_quick 'direct with MPS: two groups on the same GPUs' with_mps in_process run_two_groups direct
    step_if_not_quick 'server with MPS: two groups on the same GPUs' with_mps in_process run_two_groups server --direct=none
elif [[ 'server with MPS' == *"$filter"* ]]; then
    echo 'skip server with MPS: there is no nvidia-cuda-mps-control'
    skipped=$((skipped + 1))
fi
closing_line
