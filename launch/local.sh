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

# The console script appears last, so an installation that was interrupted is taken up again.
if [[ ! -x "$root/.venv/bin/jaxrl-llm" ]]; then
  run bash "$root/launch/setup.sh" "${EXTRAS:-}"
fi
# Huge pages spare the kernel most page faults of the large buffers: a tenth of an update on a CPU.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
show "$root/.venv/bin/jaxrl-llm" train "$@"
$dry_run || exec "$root/.venv/bin/jaxrl-llm" train "$@" # exec: Ctrl-C and SIGTERM reach the run itself
