#!/usr/bin/env bash
# From nothing to a pretrained model that gets better at sums: environment, model, training, report.
#
# usage: bash launch/quickstart.sh [RUN_DIR] [further arguments of jaxrl-llm train]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
run_dir="${1:-runs/quickstart}"
bash launch/setup.sh
bash launch/fetch_model.sh
# Huge pages spare the kernel most page faults of the large buffers: a tenth of an update on a CPU.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
.venv/bin/jaxrl-llm train --config=configs/quickstart.py --run-dir="$run_dir" "${@:2}"
.venv/bin/jaxrl-llm report "$run_dir" --out "$run_dir/report.html"
