#!/usr/bin/env bash
# From a bare machine to a running ep-server and its first figures, and back: see --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: deploy/quickstart.sh [--skip-setup]

Installs what is missing with apt-get, builds into build/, starts an ep-server with four ranks on this
machine's CPUs, makes a group with ep-admin, has ep-bench route a real text through it in low latency
and in high throughput mode, checks every result, prints the figures and stops what it started.

Sockets and state are in a temporary directory that is removed.  Nothing outside build/ stays.

  --skip-setup   install nothing
  --help         this text
TEXT
}

ranks=4 experts=16 hidden=1024 top_k=4
declare -A tokens=([ll]='1,32,128' [ht]='512,2048') # of each rank
ready_wait_s=30
stop_wait_s=20
bench_wait_s=120
log_lines=40

step() { printf '==> %s\n' "$*"; }
die() { printf 'quickstart: %s\n' "$*" >&2; exit 1; }

setup=1
for argument in "$@"; do
    case $argument in
    --skip-setup) setup=0 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/build/bin
text=$PWD/tests/data/text.txt
server='' bench='' # process ids while they run
dir=''

# Waits for the server to end; true when it did.
server_ended() {
    local deadline=$((SECONDS + $1))
    while kill -0 "$server" 2>/dev/null; do
        ((SECONDS < deadline)) || return 1
        sleep 0.05
    done
}

clean_up() {
    local code=$?
    trap - EXIT
    [[ -z $bench ]] || kill -TERM "$bench" 2>/dev/null || true
    if [[ -n $server ]]; then
        kill -TERM "$server" 2>/dev/null || true
        server_ended "$stop_wait_s" || kill -KILL "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    if ((code != 0)) && [[ -s $dir/server.log ]]; then
        printf -- '---- the last lines of the server'\''s log\n' >&2
        tail -n "$log_lines" "$dir/server.log" >&2
    fi
    [[ -z $dir ]] || rm -rf -- "$dir"
    exit "$code"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Runs a command with its output in a log file below build/; shows the log's end when it fails.
logged() {
    local log=build/$1
    shift
    "$@" >"$log" 2>&1 || {
        tail -n "$log_lines" "$log" >&2
        die "failed: $* (all of its output: $log)"
    }
}

if ((setup)); then
    step 'packages: installing what is missing'
    bash deploy/setup.sh
fi

step 'build: preset release into build/'
mkdir -p build
logged quickstart-configure.log cmake --preset release
logged quickstart-build.log cmake --build --preset release --target ep-server ep-admin ep-bench

step "server: $ranks ranks on this machine's CPUs"
dir=$(mktemp -d "${TMPDIR:-/tmp}/ep-quickstart.XXXXXX")
export EP_SERVER=unix:$dir/ep.sock
"$bin/ep-server" --backend=host --host-ranks="$ranks" --socket="$dir/ep.sock" --state-dir="$dir/state" \
    --listen=127.0.0.1:0 --metrics=127.0.0.1:0 --port-file="$dir/ports" 2>"$dir/server.log" &
server=$!
for ((deadline = SECONDS + ready_wait_s; ; )); do
    [[ -e $dir/ports ]] && break
    kill -0 "$server" 2>/dev/null || die 'the server ended before it was ready'
    ((SECONDS < deadline)) || die "the server was not ready within $ready_wait_s s"
    sleep 0.05
done

step "group: $ranks ranks, $experts experts, hidden $hidden, top-$top_k"
"$bin/ep-admin" group create quickstart --ranks="$ranks" --experts="$experts" --hidden="$hidden" \
    --top-k="$top_k" --wait="${ready_wait_s}s"

for mode in ll ht; do
    step "bench: ${mode^^}, the words of $(basename "$text"), every result checked"
    timeout -k 5 "$bench_wait_s" \
        "$bin/ep-bench" --group=quickstart --modes="$mode" --tokens="${tokens[$mode]}" --iters=50 \
        --warmup=5 --routing="text:$text" --verify &
    bench=$!
    wait "$bench" || die "ep-bench --modes=$mode ended with exit code $?"
    bench=
done

step 'stop: the group, then the server'
"$bin/ep-admin" group delete quickstart
kill -TERM "$server"
server_ended "$stop_wait_s" || die "the server did not stop within $stop_wait_s s"
wait "$server" || die "the server ended with exit code $?"
server=
step "done in $SECONDS s; the programs are in build/bin"
