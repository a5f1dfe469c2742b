"""Processes whose configs, photos, models or checkpoints differ end with status 2, in all of them, and train nothing.

As on two machines of which one has a stale copy; without a launcher, where the main process has the store, and with one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import PHOTOS, Workbench
from tests.integration.test_processes import run_both, start_both, tree
from tests.proofs.forks import Server
from trainer.base.tensorfile import TensorFile

SAME = "the processes of this run do not train the same:"


def last_byte(file: Path) -> None:
    """Change it: the header stays as it is."""
    with open(file, "r+b") as opened:
        opened.seek(-1, 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 2)
        opened.write(bytes([byte ^ 1]))


def unlike_model(bench: Workbench, file: str) -> str:
    """A copy of the model with one other byte in that file, for process 1."""
    shutil.copytree(bench.models / "sdxl", bench.tmp / "model")
    last_byte(bench.tmp / "model" / file)
    return f"arguments += ['--set', {f'model.path={bench.tmp}/model'!r}] * rank"


def unlike_photos(bench: Workbench, what: str) -> str:
    photos = shutil.copytree(PHOTOS, bench.tmp / "photos")
    first = min(photos.glob("*.jpg"))
    if what == "photo":
        shutil.copy(max(photos.glob("*.jpg")), first)
    else:
        first.unlink()
        first.with_suffix(".txt").unlink()
    return f"""arguments += ['--set', 'data.sources=[{{path="{photos}"}}]'] * rank"""


CASES = {
    "seed": (lambda bench: "arguments += ['--set', 'run.seed=8'] * rank", "run.seed: 7 in process 0, 8 in process 1"),
    "photo": (lambda bench: unlike_photos(bench, "photo"), "photos of process 1, beside those of process 0: other contents"),
    "less": (lambda bench: unlike_photos(bench, "less"), "photos of process 1, beside those of process 0: removed: 0/"),
    "base": (lambda bench: unlike_model(bench, "unet/diffusion_pytorch_model.safetensors"), "quantization: unet."),
    "encoder": (lambda bench: unlike_model(bench, "text_encoder/model.safetensors"), "model: text_encoder: '"),
    "tokenizer": (lambda bench: unlike_model(bench, "tokenizer/merges.txt"), "model: tokenizers: '"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "launched", "more"),
    [
        ("seed", False, {}),
        ("photo", False, {"data__held_out": 1}),
        ("less", True, {"memory__shard": True}),
        ("base", True, {"memory__shard": True}),
        ("encoder", False, {}),
        ("tokenizer", True, {}),
    ],
)
def test_what_differs_is_named_by_all_and_nothing_is_trained(
    server: Server, bench: Workbench, case: str, launched: bool, more: dict
) -> None:
    patch, line = CASES[case]
    config = tree(bench, "two", processes=2, **more)
    statuses, said = start_both(server, bench, config, patch=patch(bench), launched=launched).wait()
    assert statuses == [2, 2] and said.count(SAME) == 2 and said.count(f"       {line}") >= 2, f"{statuses}\n{said[-3000:]}"
    assert "Traceback" not in said
    left = {path.name for path in (bench.tmp / "two").rglob("*")}
    assert not left & {"config.toml", "checkpoints", "adapters", "metrics.jsonl"}, left


@pytest.mark.slow
def test_a_checkpoint_that_one_of_them_lacks_is_named_by_its_step(server: Server, bench: Workbench) -> None:
    """Each has a folder of its own, and only the main one's has checkpoints."""
    config = tree(bench, "two", processes=2, run__stop_after=2)
    apart = f"arguments += ['--set', {f'run.output_dir={bench.tmp}/alone'!r}] * rank"
    run_both(server, bench, config, patch=apart)
    said = run_both(server, bench, config, "--resume_from", "auto", patch=apart, status=2)
    assert said.count("       progress: step: 2 in process 0, 0 in process 1\n") == 2, said[-3000:]
    shutil.copytree(bench.tmp / "two/checkpoints", bench.tmp / "alone/checkpoints")
    config["run"].pop("stop_after")
    run_both(server, bench, config, "--resume_from", "auto", patch=apart)
    assert TensorFile(bench.tmp / "two/adapters/bear.safetensors").metadata["ss_steps"] == "6"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "key"), [(0, "model.path=nowhere.safetensors"), (1, "run.device=cuda")])
def test_one_that_refuses_before_they_meet_leaves_nobody_waiting(
    server: Server, bench: Workbench, victim: int, key: str
) -> None:
    """The others would wait ten minutes for it."""
    patch = f"arguments += ['--set', {key!r}] * (rank == {victim})"
    statuses, said = start_both(server, bench, tree(bench, "two", processes=2), patch=patch, launched=False).wait()
    assert statuses == [2, 2] and said.count(f"error: process {victim} could not go on; its message says why") == 1, said
    assert "Traceback" not in said and not (bench.tmp / "two").exists()
