#!/usr/bin/env bash
# Installs what ep-server is built from, on Debian 12 and Ubuntu 24.04 (CMake 3.25, gRPC 1.51).
# When everything is there it changes nothing and needs neither root nor network.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: deploy/setup.sh [--tests] [--check]

Installs the missing packages with apt-get (as root, or through sudo).

  --tests   also what the tests need: cmocka, clang with libFuzzer, valgrind, spin, tcc, openssl, python3,
            iproute2, patchelf, xz-utils, ccache, etcd (which the package starts as a service where systemd runs; the
            tests start their own)
  --check   install nothing; list what is missing and exit 1 if anything is
  --help    this text
TEXT
}

# What each is for: the table in README.md.
build_packages=(
    build-essential cmake ninja-build pkg-config git
    libgrpc-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libprotobuf-dev
    libuv1-dev libsqlite3-dev libyaml-dev libjansson-dev libmicrohttpd-dev
    libsmartcols-dev libsystemd-dev libxxhash-dev libibverbs-dev libcrypt-dev
)
test_packages=(
    libcmocka-dev clang valgrind spin tcc openssl python3 python3-grpcio python3-protobuf iproute2 patchelf xz-utils
    etcd-server ccache
)

lock_wait_s=300 # how long another apt or dpkg may keep us waiting

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Prints those of its arguments that are not installed.
missing_of() {
    local package
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) == 'install ok installed' ]] || echo "$package"
    done
}

check_system() {
    local ID='' ID_LIKE='' PRETTY_NAME='an unknown system'
    if [[ -r /etc/os-release ]]; then
        # shellcheck disable=SC1091
        . /etc/os-release
    fi
    command -v apt-get >/dev/null && command -v dpkg-query >/dev/null ||
        die "this is $PRETTY_NAME, and packages are installed with apt-get only: install by hand what README.md lists"
    [[ " $ID $ID_LIKE " == *' debian '* || " $ID $ID_LIKE " == *' ubuntu '* ]] ||
        say "not tried on $PRETTY_NAME; going on"
}

# Sets as_root to the words that make a command run as root.
find_root() {
    if [[ $(id -u) == 0 ]]; then
        as_root=()
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
        as_root=(sudo)
    else
        die "packages are missing and you are neither root nor able to use sudo; as root, run:
    apt-get install --no-install-recommends $*"
    fi
}

apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get -qq -o "DPkg::Lock::Timeout=$lock_wait_s" "$@"
}

# apt-get update does not wait for the lock of the package lists; an interrupted network is tried again too.
update_lists() {
    local deadline=$((SECONDS + lock_wait_s)) log
    until log=$(apt update 2>&1); do
        [[ $log == *'lock'* ]] && ((SECONDS < deadline)) || die "apt-get update failed:
$log"
        sleep 2
    done
}

install() {
    local log
    find_root "$@"
    say "installing $*"
    if ((!lists_fresh)); then
        update_lists
        lists_fresh=1
    fi
    log=$(apt install -y --no-install-recommends "$@" 2>&1) || die "apt-get install failed:
$(tail -n 30 <<<"$log")"
}

# The libFuzzer and sanitizer runtimes of the installed clang are a package of its version.
fuzzer_runtime_package() {
    local version
    compgen -G "$(clang -print-resource-dir)/lib/*/libclang_rt.fuzzer*.a" >/dev/null && return
    version=$(clang -dumpversion)
    echo "libclang-rt-${version%%.*}-dev"
}

want=("${build_packages[@]}")
tests=0 check=0 lists_fresh=0
for argument in "$@"; do
    case $argument in
    --tests) tests=1 ;;
    --check) check=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; die "unknown argument '$argument'" ;;
    esac
done
((tests)) && want+=("${test_packages[@]}")

check_system
mapfile -t missing < <(missing_of "${want[@]}")
if ((check)); then
    ((${#missing[@]} == 0)) || die "missing: ${missing[*]}"
elif ((${#missing[@]} > 0)); then
    install "${missing[@]}"
fi
if ((tests)); then
    runtime=$(fuzzer_runtime_package)
    if [[ -n $runtime ]]; then
        ((check)) && die "missing: $runtime"
        install "$runtime"
    fi
fi
say 'all packages are there'
