#!/usr/bin/env bash
# Speed on GPUs.  Runs from the tree and from the folder that deploy/bundle.sh makes.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: bench.sh [--gpus N] [--pairs N] [--no-verify]

Prints how long LL ops take on all GPUs (or N), one rank on each, beside what peers need and what the wire
allows. Exits with 77 where there is no GPU. `ll_bench --help` says what the other options are.
TEXT
}

limit_s=540

case " $* " in
*' --help '* | *' -h '*) usage; exit 0 ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for bin in "$here/bin" "$here/../../build/gpu"; do
    [[ -x $bin/ll_bench ]] && break
done
[[ -x $bin/ll_bench ]] || { echo "ll_bench is neither in $here/bin nor in build/gpu: build first" >&2; exit 2; }

# What else may have been running, and at which clocks.
nvidia-smi --query-gpu=index,name,driver_version,clocks.sm,clocks.mem,power.draw,utilization.gpu --format=csv 2>/dev/null
timeout --kill-after=10 "$limit_s" "$bin/ll_bench" "$@"
code=$?
((code == 124 || code == 137)) && echo "ll_bench was ended after $limit_s s"
exit "$code"
