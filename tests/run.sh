#!/usr/bin/env bash
# Installs what the tests need and runs them all; see --help and tests/run.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case " $* " in
*' --help '* | *' -h '*) ;;
*) bash "$here/../deploy/setup.sh" --tests ;;
esac
# The packaged python, which has the packaged grpc module.
exec /usr/bin/python3 -B "$here/run.py" "$@"
