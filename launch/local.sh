#!/usr/bin/env bash
# Starts or resumes a run on this machine.
#
# usage: bash launch/local.sh [--dry-run] --config=FILE[:RECIPE] --run-dir=DIR [--set a.b=value]...
#
# Makes .venv beside this folder if it is missing. --dry-run prints the commands and runs none.
# EXTRAS=cuda or EXTRAS=tpu chooses the accelerator of a new environment; PYTHON its interpreter (3.11 or newer).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
dry_run=false
if [[ "${1:-}" == "--dry-run" ]]; then
  dry_run=true
  shift
fi
if [[ $# -eq 0 ]]; then
  sed -n 's/^# usage/usage/p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi

show() {
  printf '%q ' "$@" | sed 's/ $/\n/'
}

run() {
  show "$@"
  $dry_run || "$@"
}

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

# The console script appears last, so an installation that was interrupted is taken up again.
if [[ ! -x "$root/.venv/bin/jaxrl-llm" ]]; then
  python="$(find_python)"
  run "$python" -m venv "$root/.venv"
  run "$root/.venv/bin/pip" install --quiet -c "$root/.ci/constraints.txt" -e "$root${EXTRAS:+[$EXTRAS]}"
fi
show "$root/.venv/bin/jaxrl-llm" train "$@"
$dry_run || exec "$root/.venv/bin/jaxrl-llm" train "$@" # exec: Ctrl-C and SIGTERM reach the run itself
