#!/usr/bin/env bash
# Everything that only a CUDA device can show, the most important first: whole steps of the full-size models beside diffusers +
# PEFT's, the tests marked gpu, every kind of attention, each fused kernel against its plain twin, the adapted layers of Flux and
# SDXL against PEFT's, from which layer shape on a float8 product pays, and what run.deterministic costs.
# One run takes under 10 minutes: the limits of its parts add up to 585 s. Run again, it goes on: with the steps that were not
# measured yet, and the parts that had no time or failed. A short table comes last; GPU-DATE.json has all of it, and
# `python benchmarks/gpu_page.py GPU-DATE.json` makes a page of that.
#   gpu_suite.sh [FOLDER]     FOLDER: where the results go (docs/benchmarks); its gpu-parts has what was measured so far
# Exit status: 0 all tests passed and every part ran; 1 otherwise, the results are written all the same; 2 without a device, and
# where gpu-parts is of another device, commit or torch.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-docs/benchmarks}"
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python="${PYTHON:-python3}"; fi
about="$("$python" -c 'import torch, sys; print(torch.cuda.get_device_name(), torch.__version__)' 2> /dev/null)" || {
  echo "error: no CUDA device is visible to $python; check nvidia-smi and that torch is a CUDA build" >&2
  exit 2
}
about="$about, commit $(git rev-parse HEAD 2> /dev/null || echo unknown)"
parts="$out/gpu-parts"
mkdir -p "$parts"
if [ -e "$parts/about" ] && [ "$(cat "$parts/about")" != "$about" ]; then
  echo "error: $parts has what was measured with $(cat "$parts/about"), and this is $about; move it away" >&2
  exit 2
fi
echo "$about" > "$parts/about"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

part() { # NAME SECONDS COMMAND...: run it, unless it ended well before
  local name="$1" limit="$2"
  shift 2
  echo "== $name"
  if [ "$(cat "$parts/$name.status" 2> /dev/null)" = 0 ]; then
    echo "done before"
    return
  fi
  timeout -s INT -k 15 "$limit" "$@"
  echo "$?" > "$parts/$name.status"
}

part steps 270 "$python" benchmarks/bench_step.py --seconds 215 --json "$parts/steps.json"
# Most of the time goes into compiling kernels: side by side where pytest-xdist is there. Interrupted, pytest still reports.
"$python" -c 'import xdist' 2> /dev/null && workers="-n $(nproc)" || workers=""
# shellcheck disable=SC2086
part tests 140 "$python" -m pytest -m gpu $workers --junitxml "$parts/tests.xml" --durations=5
part attention 20 "$python" benchmarks/bench_attention.py --kinds --json "$parts/attention.json"
part kernels 45 "$python" benchmarks/bench_kernels.py --seconds 28 --json "$parts/kernels.json"
part layers 40 "$python" benchmarks/bench_dora.py --device cuda --seconds 28 --json "$parts/layers.json"
part shared 20 "$python" benchmarks/bench_dora.py --device cuda --shared-input --json "$parts/shared.json"
part float8 15 "$python" benchmarks/bench_float8.py --json "$parts/float8.json"
part deterministic 35 "$python" benchmarks/bench_deterministic.py --device cuda --seconds 22 --json "$parts/deterministic.json"
"$python" benchmarks/gpu_report.py "$parts" "$out"
