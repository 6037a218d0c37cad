#!/bin/sh
# The control plane of many simulated nodes against a real etcd: see scale.py, and sim.h for what is simulated.
#   tests/scale/scale.sh [--nodes N] [--ranks R] [--runs K] [--sweep] [--json] [--check]
exec /usr/bin/python3 -B "$(dirname "$0")/scale.py" "$@"
