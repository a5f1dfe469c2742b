#!/usr/bin/env bash
# Writes constraints.txt anew: the newest versions that pyproject.toml allows, on the Python of the tests and of the image.
# Look at what changed (git diff) and run the tests before you commit it.
#   constraints.sh [FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to="${1:-constraints.txt}"
# torch's CUDA wheels ask for exactly this one, its CPU wheel for none (docker/Dockerfile has them all).
triton=3.7.1
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
"${PYTHON:-python3.11}" -m venv "$fresh"
"$fresh/bin/pip" install --quiet --disable-pip-version-check -e '.[dev,s3,gcs,azure]' "triton==$triton"
# Without what torch's CUDA wheels bring, which they pin themselves, and without the name of a build (+cpu, +cu130).
frozen="$("$fresh/bin/pip" freeze --all --exclude-editable | grep -viE '^(pip|nvidia|cuda)[-_=]' | sed 's/+[a-z0-9.]*$//')"
cat > "$to" << HEAD
# The versions that the tests run on, of every package and of what it needs: scripts/setup.sh installs from here, and so does
# docker/Dockerfile. So the image of a commit is the image of its tests. Not needed for a plain pip install -e .
# Made by scripts/constraints.sh, on Python 3.11.
HEAD
printf '%s\n' "$frozen" >> "$to"
