#!/usr/bin/env bash
# Makes one folder that runs on a machine where nothing of ours is installed: programs, the libraries they
# need, GPU tests and their scripts.  It may be moved, and run from anywhere.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: deploy/bundle.sh [--no-build] [--out DIR]

Builds the release preset and puts programs, libraries and GPU tests into one folder. The machine that runs
it needs an x86-64 Linux with a glibc as new as that of the one that builds it (Debian 12: 2.36, Ubuntu 24.04:
2.39) and, for GPUs, NVIDIA's driver.

  --no-build  take what is in build/ as it is
  --out DIR   where to make it (default build/bundle; what is there is replaced)
  --help      this text
TEXT
}

most_bytes=$((48 * 1024 * 1024))
newest_glibc=2.39 # of Ubuntu 24.04

programs=(bin/ep-server bin/ep-admin bin/ep-bench bin/hello_dispatch bin/worker gpu/ll_device gpu/ll_bench gpu/ht_bench gpu/lost gpu/fault
    gin/gin_conformance)
of_nccl=gpu/nccl_gin # there when NCCL's headers were
# What every machine has, in the version of its own kernel, C library and driver.
of_the_system='^(ld-linux.*|lib(c|m|pthread|dl|rt|resolv|util|anl|nsl|gcc_s|cuda|nvidia-.*))\.so'

say() { printf 'bundle: %s\n' "$*"; }
die() { printf 'bundle: %s\n' "$*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/build/bundle
build=1
while (($#)); do
    case $1 in
    --no-build) build=0 ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; die "unknown argument '$1'" ;;
    esac
    shift
done

for tool in patchelf strip ldd objdump xz; do
    command -v "$tool" >/dev/null || die "$tool is missing: apt-get install patchelf binutils libc-bin xz-utils"
done
if ((build)); then
    cmake -S "$root" --preset release >/dev/null
    cmake --build "$root/build"
fi
[[ -e $root/build/lib/libep_cuda.so ]] || die "build/lib/libep_cuda.so is missing: was a CUDA compiler found?"

rm -rf "$out"
mkdir -p "$out/bin" "$out/lib" "$out/data"
[[ -e $root/build/$of_nccl ]] && programs+=("$of_nccl")
for program in "${programs[@]}"; do
    cp "$root/build/$program" "$out/bin/"
done
cp "$root/build/lib/libep_cuda.so" "$root/build/lib/libnccl-net-ep.so" "$out/lib/"
cp -P "$root"/build/client/lib/libepclient.so* "$out/lib/"
cp "$root/tests/data/text.txt" "$out/data/"
cp "$root"/tests/gpu/*.sh "$root"/tests/gpu/*.py "$out/"
# For nodes.sh, whose servers are a cluster; packed, as it is large.
if etcd=$(command -v etcd); then
    xz -c "$etcd" >"$out/etcd.xz"
fi

# ---- libraries ----
mapfile -t needed < <(ldd "$out"/bin/* "$out"/lib/*.so | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u)
for line in "${needed[@]}"; do
    read -r name path <<<"$line"
    [[ $name =~ $of_the_system || -e $out/lib/$name ]] || cp -L "$path" "$out/lib/$name"
done

# RPATH and not RUNPATH: it counts for the libraries of libraries too.
mapfile -t files < <(find "$out/bin" "$out/lib" -type f)
for file in "${files[@]}"; do
    chmod u+w,a+rx "$file"
    strip --strip-unneeded "$file"
    # shellcheck disable=SC2016 # the loader knows $ORIGIN, not the shell
    patchelf --force-rpath --set-rpath '$ORIGIN:$ORIGIN/../lib' "$file"
done

# ---- is it what it should be? ----
for file in "${files[@]}"; do
    while read -r name; do
        [[ $name =~ $of_the_system || -e $out/lib/$name ]] || die "${file#"$out"/} needs $name, which is not there"
    done < <(objdump -p "$file" | awk '$1 == "NEEDED" { print $2 }')
    glibc=$(objdump -T "$file" | awk 'match($0, /GLIBC_2\.[0-9]+/) { print substr($0, RSTART, RLENGTH) }' | sort -uV | tail -n 1)
    [[ -z $glibc || $(printf '%s\n' "${glibc#GLIBC_}" "$newest_glibc" | sort -V | tail -n 1) == "$newest_glibc" ]] ||
        die "${file#"$out"/} needs $glibc: it would not run where glibc is $newest_glibc"
done
env -i "$out/bin/ep-server" --version >/dev/null || die "$out/bin/ep-server does not run"

bytes=$(du -sb "$out" | cut -f 1)
((bytes < most_bytes)) || die "$out has $bytes bytes: at most $most_bytes are wanted"
say "$out: ${#files[@]} programs and libraries, $((bytes / 1024 / 1024)) MiB"
