"""A signal in each long phase of a run: the time to its acknowledgement and to the end of the process.

The quick suite does it with a tiny model and a phase that is made slow, `slow` with three phases; `proof` with the true SDXL
and all phases that are long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.followed import follow, stop_in
from tests.harness import PHOTOS, ROOT, Workbench
from trainer import signals

ACKNOWLEDGED, OBEYED = 0.5, 2.0  # seconds


@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        pytest.param("encoding captions", signals.STOP[0], marks=pytest.mark.slow),
        ("drawing samples", signals.STOP[1]),
        pytest.param("exporting", signals.STOP[-1], marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_the_middle_of_a_phase_ends_the_process_at_once(bench: Workbench, phase: str, signum: int) -> None:
    tree = bench.tree(
        run__max_steps=1, adapter__targets=["*attn1.to_q"], adapter__type="dora",
        data__cache_dir=str(bench.tmp / "cache"), validation__every_steps=1,
        validation__samples=[{"prompt": "a bear", "width": 64, "height": 64, "steps": 3}],
    )  # fmt: skip
    path = str(bench.write(tree))
    run = follow(bench.tmp, "--config", path, "--resume_from", "auto", slow=phase)
    obeyed = stop_in(run, f"<{phase}", signum, delay=0.25, timeout=60)
    assert obeyed.status == 128 + signum, f"{phase}\n{obeyed.text}"
    assert f"</{phase}>" in obeyed.text and "\r" not in obeyed.text and "Traceback" not in obeyed.text
    assert obeyed.acknowledged < ACKNOWLEDGED and obeyed.left < OBEYED, (phase, obeyed)
    assert not list((bench.tmp / "out").rglob("*.tmp"))


# In the order in which a run meets them: what an earlier start did is cached, drawn or saved. Seconds into the phase.
PHASES = {
    "hashing model": 0.05, "encoding photos": 1.0, "encoding captions": 1.0, "loading unet": 1.0,
    "hashing the frozen weights": 1.0, "reading converted weights": 0.5, "injecting the adapter": 0.5,
    "norms of the adapted layers": 0.5, "drawing samples": 1.0, "step 1": 2.0, "saving step 2": 0.05,
    "exporting": 0.5, "measuring the adapter": 0.5, "writing the report": 0.0,
}  # fmt: skip


@pytest.mark.proof
def test_signals_in_each_long_phase_of_full_size_sdxl(tmp_path: Path, capsys) -> None:
    """The model is made (7 GB), or taken from FULL_SIZE_DIR/sdxl."""
    model = Path(os.environ.get("FULL_SIZE_DIR", tmp_path)) / "sdxl"
    if not model.exists():
        free = shutil.disk_usage(tmp_path).free / 1e9
        if free < 10:
            pytest.skip(f"the model has 7 GB, and {tmp_path} has {free:.0f} GB free")
        command = [sys.executable, "scripts/make_model.py", "--size", "full", "--family", "sdxl"]
        subprocess.run([*command, "--layout", "diffusers", str(model)], cwd=ROOT, check=True)
    bench, photos = Workbench(tmp_path, tmp_path), tmp_path / "photos"
    photos.mkdir()
    for name in ("00.jpg", "00.txt"):
        shutil.copyfile(PHOTOS / name, photos / name)
    tree = bench.tree(
        run__max_steps=2, run__device="cpu", model__path=str(model), model__components={"unet": {"dtype": "fp8_e4m3"}},
        precision__compute="bf16", adapter__type="dora", adapter__rank=16, adapter__targets="attention+mlp",
        data__resolution=256, data__batch_size=1, data__sources=[{"path": str(photos)}],
        data__cache_dir=str(tmp_path / "cache"), model__cache_dir=str(tmp_path / "converted"),
        memory__gradient_checkpointing=True, validation__every_steps=2, export__on_stop=False,
        validation__samples=[{"prompt": "a bear", "width": 256, "height": 256, "steps": 2}],
    )  # fmt: skip
    arguments = ["--config", str(bench.write(tree)), "--resume_from", "auto"]
    table = {}
    for index, (phase, delay) in enumerate(PHASES.items()):
        signum = signals.STOP[index % len(signals.STOP)]
        saved = phase in ("step 1", "saving step 2")
        run = follow(tmp_path, *arguments)
        begins = "</drawing samples" if phase == "step 1" else f"<{phase}"
        table[phase] = obeyed = stop_in(run, begins, signum, delay=delay, saved=saved, timeout=600)
        with capsys.disabled():
            print(
                f"{phase:30} acknowledged {obeyed.acknowledged:.2f} s, seen to its end {obeyed.seen_to_its_end:.2f} s, "
                f"then {obeyed.left:.2f} s to the exit ({obeyed.status})"
            )
        assert obeyed.status == 128 + signum, f"{phase}\n{obeyed.text}"
        if phase == "step 1":
            assert "stopping after this step" in obeyed.text and obeyed.seen_to_its_end > 1, obeyed.text
        assert not list((tmp_path / "out").rglob("*.tmp")), phase
    last = follow(tmp_path, *arguments)
    assert last.process.wait(timeout=600) == 0, last.text
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    late = {phase: o for phase, o in table.items() if o.acknowledged > ACKNOWLEDGED or o.left > OBEYED}
    assert not late, late
