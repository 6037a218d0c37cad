#!/usr/bin/env bash
# deploy/bundle.sh: its folder runs from anywhere, and finds nothing of the build that it was made from.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! -e $root/build/lib/libep_cuda.so ]]; then
    echo 'no CUDA compiler here'
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

bash "$root/deploy/bundle.sh" --no-build --out "$work/made"
mv "$work/made" "$work/moved"
cd /
if strings -a "$work"/moved/bin/* "$work"/moved/lib/* | grep -F "$root/build"; then
    echo 'the bundle knows where it was built'
    exit 1
fi
EP_CUDA_MODULE=$root/build/unit/libep_cuda_cpu.so "$work/moved/product.sh" --gpus 2 --quick --filter hello
