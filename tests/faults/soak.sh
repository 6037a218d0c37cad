#!/bin/sh
# Faults at random while workers exchange tokens through several ep-servers: see soak.py.
#   tests/faults/soak.sh --seconds N --seed S [--mode ll|ht]
exec /usr/bin/python3 -B "$(dirname "$0")/soak.py" "$@"
