#!/usr/bin/env bash
# Sets up what the tests need, checks format and lint, and runs the tests.
#
# usage: bash launch/test.sh [arguments of pytest]     for example: bash launch/test.sh -m slow
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test
bash launch/fetch_model.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python -m pytest "$@"
