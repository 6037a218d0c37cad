#!/bin/sh
# Changes in random order of a group over several ep-servers, which workers follow: see reconfigure.py.
#   tests/faults/reconfigure.sh [--changes N] [--seed S]
exec /usr/bin/python3 -B "$(dirname "$0")/reconfigure.py" "$@"
