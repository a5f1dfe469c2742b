#!/usr/bin/env bash
# Sets up and runs the tests: the quick suite, or with --all everything that needs no GPU and has no short form in it
# (tests/README.md). Other arguments go to pytest: scripts/test.sh -m slow tests/integration/test_kill.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --all ]; then
    shift
    set -- -m "not proof and not gpu" "$@"
fi
bash scripts/setup.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Side by side, a worker on each core and one thread in each: more of either wait for each other (tests/__init__.py). Not on
# every core of a large machine: each worker makes tiny models of its own.
export OMP_NUM_THREADS=1
TIMEFORMAT="%U s and %S s of processor time (user, system), %R s to the end"
time .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal "$@"
