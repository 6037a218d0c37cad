#!/usr/bin/env bash
# Makes certificates for trying out and testing mutual TLS: an authority, a server's, an operator's, a viewer's.
#
#   certs.sh [--days N] DIR [NAME ...]
#
# DIR gets ca.pem ca.key, server.pem server.key, client.pem client.key, viewer.pem viewer.key.  NAMEs are
# the host names and addresses that clients reach the server by; localhost, 127.0.0.1, ::1 and this host's
# name are always among them.  The server's certificate is also what it shows to other servers of a cluster;
# the viewer's, with the unit (OU) "viewer" in its subject, is good for looking only.  What is there and
# still good for a day stays as it is, so running it again changes nothing; a certificate that is about to
# expire or lacks a NAME is made anew by the same authority.
#
#   certs.sh certs node1.example
#   ep-server --listen=0.0.0.0:7300 --tls-ca=certs/ca.pem --tls-cert=certs/server.pem --tls-key=certs/server.key
#   ep-admin --server node1.example:7300 --tls-ca=certs/ca.pem --tls-cert=certs/client.pem \
#       --tls-key=certs/client.key group list
#
# A server reads its certificate again when the file changes.  The keys are not encrypted and the
# authority lies beside them: for production use your own authority.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit "$1"
}

days=365
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage 0 ;;
    --days)
        [ $# -ge 2 ] || usage 2 >&2
        days=$2
        shift 2
        ;;
    --) shift && break ;;
    -*) echo "certs.sh: there is no option $1" >&2 && usage 2 >&2 ;;
    *) break ;;
    esac
done
[ $# -ge 1 ] || usage 2 >&2
case $days in '' | *[!0-9]*) echo "certs.sh: --days is \"$days\": must be a number" >&2 && exit 2 ;; esac
command -v openssl >/dev/null || { echo "certs.sh: openssl is not installed" >&2 && exit 1; }

dir=$1
shift
umask 077
mkdir -p "$dir"

work=$(mktemp -d "$dir/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT

quietly() {
    local log
    log=$("$@" 2>&1) || { printf 'certs.sh: %s failed:\n%s\n' "$1 $2" "$log" >&2 && exit 1; }
}

# Is there a pair that is good for another day, made by our authority?
is_good() {
    [ -s "$dir/$1.pem" ] && [ -s "$dir/$1.key" ] &&
        openssl x509 -in "$dir/$1.pem" -noout -checkend 86400 >/dev/null 2>&1 &&
        openssl verify -CAfile "$dir/ca.pem" "$dir/$1.pem" >/dev/null 2>&1 &&
        [ "$(openssl x509 -in "$dir/$1.pem" -noout -pubkey)" = "$(openssl pkey -in "$dir/$1.key" -pubout 2>/dev/null)" ]
}

# Key first: whoever sees the new certificate finds its key there.
install_pair() {
    chmod 644 "$work/$1.pem"
    mv "$work/$1.key" "$dir/$1.key"
    mv "$work/$1.pem" "$dir/$1.pem"
    echo "made $dir/$1.pem"
}

new_key() {
    quietly openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/$1.key"
}

make_ca() {
    new_key ca
    quietly openssl req -x509 -new -key "$work/ca.key" -sha256 -days "$days" -out "$work/ca.pem" \
        -subj "/CN=ep-server test authority" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
    install_pair ca
}

# make_pair FILE SUBJECT PURPOSE [ALT_NAMES]
make_pair() {
    new_key "$1"
    quietly openssl req -new -key "$work/$1.key" -sha256 -subj "$2" -out "$work/$1.csr"
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$3"
        [ -z "${4:-}" ] || echo "subjectAltName=$4"
    } >"$work/$1.ext"
    quietly openssl x509 -req -in "$work/$1.csr" -CA "$dir/ca.pem" -CAkey "$dir/ca.key" -sha256 \
        -set_serial "0x$(openssl rand -hex 16)" -days "$days" -extfile "$work/$1.ext" -out "$work/$1.pem"
    install_pair "$1"
}

alt_names() {
    local name list="" kind
    for name in localhost 127.0.0.1 ::1 "$(hostname)" "$@"; do
        kind=DNS
        case $name in *:*) kind=IP ;; *[!0-9.]*) ;; *) kind=IP ;; esac
        case ",$list," in *",$kind:$name,"*) ;; *) list=${list:+$list,}$kind:$name ;; esac
    done
    echo "$list"
}

# May it be shown when its owner calls others, as the servers of a cluster do?
is_for_calls() {
    openssl verify -purpose sslclient -CAfile "$dir/ca.pem" "$dir/$1.pem" >/dev/null 2>&1
}

# Does the server's certificate have all the names?
has_names() {
    local entry
    IFS=, read -ra entries <<<"$1"
    for entry in "${entries[@]}"; do
        case $entry in
        IP:*) openssl x509 -in "$dir/server.pem" -noout -checkip "${entry#IP:}" | grep -q "does match" || return 1 ;;
        *) openssl x509 -in "$dir/server.pem" -noout -checkhost "${entry#DNS:}" | grep -q "does match" || return 1 ;;
        esac
    done
}

is_good ca || make_ca
names=$(alt_names "$@")
{ is_good server && is_for_calls server && has_names "$names"; } ||
    make_pair server /OU=server/CN=ep-server serverAuth,clientAuth "$names"
is_good client || make_pair client /CN=ep-admin clientAuth
is_good viewer || make_pair viewer /OU=viewer/CN=ep-viewer clientAuth
