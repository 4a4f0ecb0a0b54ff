#!/usr/bin/env bash
# Makes .venv with the versions that CI ran, and installs the project in it.
#
# usage: bash launch/setup.sh [EXTRAS]     for example: bash launch/setup.sh test
#
# PYTHON names the interpreter of a new environment (3.11 or newer).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extras="${1:-}"

find_python() {
  local name
  for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python bash launch/local.sh" >&2
  return 1
}

if [[ ! -x "$root/.venv/bin/python" ]]; then
  python="$(find_python)"
  "$python" -m venv "$root/.venv"
fi
"$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  -c "$root/.ci/constraints.txt" -e "$root${extras:+[$extras]}"
