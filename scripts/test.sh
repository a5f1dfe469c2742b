#!/usr/bin/env bash
# Sets up and runs the tests. Arguments go to pytest: scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Side by side, but not on every core of a large machine: each worker makes tiny models of its own.
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
