#!/usr/bin/env bash
# Everything that only a CUDA device can show, in under 10 minutes (each part has its time limit): the tests marked gpu, each
# fused kernel against its plain twin, the adapted layers of Flux and SDXL against PEFT's, a step of the full-size models in
# each storage, from which layer shape on a float8 product pays, what run.deterministic costs, and every kind of attention.
# Prints a short table last and writes GPU-DATE.json. The limits add up to 580 s; what is left is for starting Python and for
# stopping a part.
#   gpu_suite.sh [FOLDER]     FOLDER: where the results go (docs/benchmarks)
# Exit status: 0 all tests passed and every part ran; 1 otherwise, the results are written all the same; 2 without a device.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-docs/benchmarks}"
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python="${PYTHON:-python3}"; fi
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "error: no CUDA device is visible to $python; check nvidia-smi and that torch is a CUDA build" >&2
  exit 2
}
mkdir -p "$out"
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

echo "== tests"
# Most of the time goes into compiling kernels: side by side where pytest-xdist is there. Interrupted, pytest still reports.
"$python" -c 'import xdist' 2> /dev/null && workers="-n $(nproc)" || workers=""
timeout -s INT -k 15 200 "$python" -m pytest -m gpu $workers --junitxml "$parts/tests.xml" --durations=5 > "$parts/tests.log" 2>&1
echo "$?" > "$parts/tests.status"
tail -n 60 "$parts/tests.log"
cp "$parts/tests.log" "$out/gpu-tests.log"
echo "== kernels"
timeout 52 "$python" benchmarks/bench_kernels.py --seconds 30 --json "$parts/kernels.json"
echo "$?" > "$parts/kernels.status"
echo "== layers"
timeout 68 "$python" benchmarks/bench_dora.py --device cuda --seconds 48 --json "$parts/layers.json"
echo "$?" > "$parts/layers.status"
echo "== adapters on one input"
timeout 38 "$python" benchmarks/bench_dora.py --device cuda --shared-input --json "$parts/shared.json"
echo "$?" > "$parts/shared.status"
echo "== steps of the full-size models"
timeout 142 "$python" benchmarks/bench_step.py --device cuda --seconds 112 --rounds 5 --json "$parts/steps.json"
echo "$?" > "$parts/steps.status"
echo "== deterministic steps"
timeout 60 "$python" benchmarks/bench_deterministic.py --device cuda --seconds 42 --json "$parts/deterministic.json"
echo "$?" > "$parts/deterministic.status"
echo "== kinds of attention"
timeout 20 "$python" benchmarks/bench_attention.py --kinds --json "$parts/attention.json"
echo "$?" > "$parts/attention.status"
"$python" benchmarks/gpu_report.py "$parts" "$out"
