#!/usr/bin/env bash
# Installs build/ into a prefix inside it and builds an example against what was installed: with pkg-config and with
# the CMake package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$PWD/build/install-test
prefix=$work/prefix
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

say() { printf -- '-- %s\n' "$*"; }
die() { printf 'install test: %s\n' "$*" >&2; exit 1; }

say 'everything goes below the prefix'
cmake --install build --prefix "$prefix" >"$work/install.log"
outside=$(grep -v "^$prefix/" build/install_manifest.txt || true)
[[ -z $outside ]] || die "installed outside the prefix:
$outside"

say 'the programs run from there'
version=$(sed -n 's/^project(ep-server VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
for program in ep-server ep-admin ep-bench; do
    "$prefix/bin/$program" --help >"$work/help" || die "$program --help ended with exit code $?"
    [[ -s $work/help ]] || die "$program --help says nothing"
done
"$prefix/bin/ep-server" --version | grep -qF "$version" || die "ep-server --version does not say $version"

say 'the unit starts the program that was installed'
unit=$(find "$prefix" -name ep-server.service)
[[ $(grep -c "^ExecStart.*=$prefix/bin/ep-server " "$unit") == 2 ]] || die "$unit: $(grep ^ExecStart "$unit")"
if command -v systemd-analyze >/dev/null; then
    systemd-analyze verify "$unit" >"$work/verify.log" 2>&1 || die "systemd-analyze verify: $(cat "$work/verify.log")"
fi

say 'libepclient exports ep_ names only'
library=$(find "$prefix" -name 'libepclient.so')
foreign=$(nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | grep -v '^ep_' || true)
[[ -z $foreign ]] || die "it also exports: $foreign"
libdir=$(dirname "$library")

say 'libnccl-net-ep.so exports what NCCL looks up'
exported=$(nm -D --defined-only "$libdir/libnccl-net-ep.so" | awk '{ print $3 }' | sort | xargs)
[[ $exported == 'ncclGinPlugin_v11 ncclNetPlugin_v11 ncclRmaPlugin_v13 ncclRmaPlugin_v14' ]] ||
    die "it exports: $exported"

# Runs a program that must start and then find no server: the library was found, loaded and called.
finds_no_server() {
    local code=0
    EP_SERVER=unix:$work/none.sock LD_LIBRARY_PATH=$libdir timeout 20 "$@" >"$work/run.log" 2>&1 || code=$?
    ((code != 0 && code < 124)) && grep -q none.sock "$work/run.log" ||
        die "$* ended with exit code $code: $(cat "$work/run.log")"
}

say 'the examples build, as C11 and nothing more, and run with pkg-config'
export PKG_CONFIG_PATH=$libdir/pkgconfig
[[ $(pkg-config --modversion epclient) == "$version" ]] || die 'epclient.pc has another version'
read -ra flags <<<"$(pkg-config --cflags --libs epclient)"
for example in hello_dispatch worker; do
    cc -std=c11 -Wall -Wextra -Wpedantic -Werror -o "$work/$example" "client/examples/$example.c" "${flags[@]}" -pthread -lm
done
finds_no_server "$work/hello_dispatch"

say 'the header compiles as C++'
if command -v c++ >/dev/null; then
    read -ra flags <<<"$(pkg-config --cflags epclient)"
    echo '#include <ep_client.h>' | c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only -x c++ "${flags[@]}" -
fi

say 'the examples build and run with the CMake package'
cp -r client/examples "$work/examples"
cmake -G Ninja -S "$work/examples" -B "$work/examples-build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log"
cmake --build "$work/examples-build" >>"$work/cmake.log"
finds_no_server "$work/examples-build/hello_dispatch"
