#!/bin/sh
# How soon it is known that a server is gone, and all is well after its return: see detect.py.
#   tests/faults/detect.sh [--times N]
exec /usr/bin/python3 -B "$(dirname "$0")/detect.py" "$@"
