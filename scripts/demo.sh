#!/usr/bin/env bash
# The main job on a fresh machine: set up, then teach a small SDXL a style that it never saw. A DoRA over its float8 base learns
# from 12 icons; six other subjects are drawn before and after. A second start resumes or finishes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
start=$SECONDS
.venv/bin/python train.py --config pocket_sdxl.toml --resume_from auto "$@"
echo "done in $((SECONDS - start)) s, set-up not counted"
echo "look at outputs/ink/before_after.png: before training, after it, and the truth; then at outputs/ink/report.html"
