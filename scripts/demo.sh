#!/usr/bin/env bash
# The main job on a fresh machine: set up, write a tiny SDXL checkpoint of the true architecture, train a DoRA over its
# float8 base on real photos, draw samples, export the adapter, write the report. A second start resumes or finishes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
start=$SECONDS
if [ ! -f models/tiny-sdxl/model_index.json ]; then
  rm -rf models/tiny-sdxl
  .venv/bin/python scripts/make_model.py --size tiny --family sdxl --layout diffusers models/tiny-sdxl
fi
.venv/bin/python train.py --config tiny_sdxl.toml --resume_from auto "$@"
echo "done in $((SECONDS - start)) s, set-up not counted"
