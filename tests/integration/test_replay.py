"""`scripts/replay.py` on runs of the tiny models: what a run logged is explained, and three kinds of tampering are named."""

from __future__ import annotations

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from scripts import make_model, replay
from tests.harness import PHOTOS, Workbench, built, pairs, reseal
from tests.integration.test_compiled import traced_only
from trainer import config as configs
from trainer import kernels
from trainer.adapters.layers import AdaptedLayer
from trainer.base import files
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.checkpoint import store
from trainer.checkpoint.state import STATE
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from workbench.commands import main as cli

pytestmark = pytest.mark.tool("replay")

STEPS, BEGUN = 5, 2  # of a run, and at its first checkpoint


def trained(
    bench: Workbench, name: str = "run", *, family: str = "flux", steps: int = STEPS, stop: int | None = None, **more
) -> Path:
    """The checkpoint at step BEGUN of a run of a DoRA in bf16, one photo a step, over photos of its own."""
    photos = bench.tmp / "photos"
    if not photos.exists():
        shutil.copytree(PHOTOS, photos)
    keys = {
        "adapter__type": "dora", "precision__compute": "bf16", "optimizer__lr": 1e-3, "run__max_steps": steps,
        "run__output_dir": str(bench.tmp / name), "data__sources": [{"path": str(photos)}], "data__batch_size": 1,
    }  # fmt: skip
    tree = bench.tree(family, **keys | more)
    config = ["--config", str(bench.write(tree, f"{name}.toml"))]
    # A stop writes a checkpoint, and so does the end.
    assert cli.main([*config, "--set", f"run.stop_after={BEGUN}"]) == 0
    assert cli.main([*config, "--resume_from", "auto", *([] if stop is None else ["--set", f"run.stop_after={stop}"])]) == 0
    return bench.tmp / name / "checkpoints" / store.folder_name(BEGUN)


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def ran(capsys, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    status = replay.main([*arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.slow
def test_what_a_run_logged_is_explained_and_tampering_is_named(bench: Workbench, capsys, monkeypatch) -> None:
    folder = trained(bench, ema__kind="constant")
    before = contents(folder.parent.parent)
    status, said = ran(capsys, str(folder), "--all", "--plot", str(bench.tmp / "steps.png"))
    assert status == 0 and "3 of 3 steps explained by rounding" in said, said
    assert "3 of 3 steps have the very numbers of the log" in said and "step-00000005, bit for bit" in said
    assert "average 0." in said and "is not judged" not in said
    assert contents(folder.parent.parent) == before, "nothing of the run is written"
    assert Image.open(bench.tmp / "steps.png").size[0] > 400

    # A kernel that is wrong now: of the step as it was logged, and of its gradient in fp64.
    right = dora_torch.adapter_gradients

    def wrong(*given):
        db, dm, sb = right(*given)
        return db, dm, -sb

    with monkeypatch.context() as patch:
        patch.setattr(dora_torch, "adapter_gradients", wrong)
        status, said = ran(capsys, str(folder))
    assert status == replay.NOT_EXPLAINED and "step 3 is NOT EXPLAINED" in said and "gradients of layers are off" in said

    # A tensor of the checkpoint, sealed again: no step after it is what was logged.
    other = bench.tmp / "tampered"
    shutil.copytree(folder.parent.parent, other)
    forged = other / "checkpoints" / folder.name
    adapter = TensorFile(forged / "adapter.safetensors")
    tensors = adapter.read_all()
    name = sorted(name for name in tensors if name.endswith("lora_B.weight"))[0]
    write_tensors(adapter.path, tensors | {name: tensors[name] * 1.1}, adapter.metadata)
    reseal(forged)
    status, said = ran(capsys, str(forged), "--step", "4")
    assert status == replay.NOT_EXPLAINED and "step 3 is NOT EXPLAINED" in said, said

    # Of the next one: the steps are as logged, and it does not hold what they make.
    shutil.copytree(folder, forged, dirs_exist_ok=True)
    following = forged.with_name(store.folder_name(STEPS))
    for piece, ending in (("adapter", "lora_B.weight"), ("optimizer", "exp_avg_sq"), ("ema", "lora_A.weight")):
        file = TensorFile(following / f"{piece}.safetensors")
        tensors = file.read_all()
        name = sorted(name for name in tensors if name.endswith(ending))[0]
        write_tensors(file.path, tensors | {name: tensors[name] * 1.1}, file.metadata)
    reseal(following)
    status, said = ran(capsys, str(forged), "--step", str(STEPS))
    assert status == replay.NOT_EXPLAINED and "3 tensors differ, " in said, said


@pytest.mark.slow
def test_a_scale_that_is_wrong_in_run_and_replay_is_named(bench: Workbench, capsys, monkeypatch) -> None:
    right = AdaptedLayer.update_layer

    def wrong(self, name, *given, **more):
        right(self, name, *given, **more)
        self.scaling[name] *= 2

    monkeypatch.setattr(AdaptedLayer, "update_layer", wrong)
    status, said = ran(capsys, str(trained(bench, adapter__targets=["*attn.to_q"], steps=BEGUN + 1)))
    assert status == replay.NOT_EXPLAINED and "gradients of layers are off" in said, said
    assert "done again here, 1 of 1 steps have the very numbers of the log" in said


@pytest.mark.slow
def test_a_photo_that_was_changed_is_named_or_its_step(bench: Workbench, capsys) -> None:
    folder = trained(bench)
    with built(configs.load(str(bench.tmp / "run.toml"), [f"run.output_dir={bench.tmp / 'plan'}"])) as run:
        seen = [update[0][0].sample for update in islice(run.updates(), STEPS)]
    assert len(set(seen)) == STEPS, "each photo once"
    step = STEPS - 1
    photo = bench.tmp / "photos" / seen[step - 1].removeprefix("0/")
    Image.open(photo).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(photo, quality=95)
    status, said = ran(capsys, str(folder))
    assert status == 2 and f"other contents: 0/{photo.name}" in said and said.count("error:") == 1
    assert "Loading weights" not in said and "--allow" not in said
    # With the digests of the new photos in the checkpoint, too: a step that saw it is not what was logged.
    donor = trained(bench, "donor")
    shutil.copy(donor / "data.safetensors", folder / "data.safetensors")
    state, taken = (files.read_json(each / STATE) for each in (folder, donor))
    state["pieces"]["data"] = taken["pieces"]["data"]
    (folder / STATE).write_bytes(files.json_bytes(state))
    reseal(folder)
    status, said = ran(capsys, str(folder), "--step", str(step))
    assert status == replay.NOT_EXPLAINED and f"step {step} is NOT EXPLAINED" in said, said
    assert ran(capsys, str(folder), "--step", str(step - 1))[0] == 0
    shutil.rmtree(bench.tmp / "photos")
    status, said = ran(capsys, str(folder))
    assert status == 2 and said.count("error:") == 1 and str(bench.tmp / "photos") in said


@pytest.mark.slow
def test_a_kernel_that_was_wrong_in_the_run_is_named_by_its_first_step(bench: Workbench, capsys, monkeypatch) -> None:
    right = dora_torch.compose
    folder = trained(bench, stop=3)
    with monkeypatch.context() as patch:
        # Its g is off by a hundredth.
        patch.setattr(dora_torch, "compose", lambda z, t, sb, g, *rest: right(z, t, sb, g * 1.01, *rest))
        assert cli.main(["--config", str(bench.tmp / "run.toml"), "--resume_from", "auto"]) == 0
    assert ran(capsys, str(folder), "--all")[0] == 0, "step 3 was made by the right one"
    status, said = ran(capsys, str(folder.with_name(store.folder_name(3))), "--step", "4")
    assert status == replay.NOT_EXPLAINED and "step 4 is NOT EXPLAINED" in said, said


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--plot", "."], "--plot .: give the path of a .png file"), (["--plot", "x.pdf"], "--plot x.pdf: give the path"),
     (["--layers", "-1"], "--layers -1: give a number of gradients to list"), ([], "is not a folder")],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_anything_is_read(tmp_path: Path, capsys, more: list[str], said: str) -> None:
    status, told = ran(capsys, str(tmp_path / "gone"), *more)
    assert status == 2 and said in told and told.count("error: ") == 1


FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4", "fp8 products")
# Float8 products are refused where anything but bf16 is computed in.
CELLS = pairs(("lora", "dora"), ("fp32", "bf16", "fp16"), FORMATS[:-1]) | {
    (kind, "bf16", FORMATS[-1]) for kind in ("lora", "dora")
}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "kind", "compute", "stored"),
    [*(("flux", *cell) for cell in sorted(CELLS)), ("sdxl", "dora", "bf16", "bf16"), ("sdxl", "lora", "fp32", "fp32"),
     ("flux2", "dora", "bf16", "fp8_e4m3")],
)  # fmt: skip
def test_twenty_of_twenty_steps_in_every_precision(
    bench: Workbench, capsys, monkeypatch, family: str, kind: str, compute: str, stored: str
) -> None:
    """Each also prints the row of the table in docs/benchmarks/replay.md."""
    more, held, model = {}, stored, bench.models / family
    if not model.exists():
        assert make_model.main(["--size", "tiny", "--family", family, "--layout", "diffusers", str(model)]) == 0
    if stored == "fp8 products":
        monkeypatch.setattr(kernels, "FP8_MIN_WEIGHTS", 1)
        monkeypatch.setattr(kernels, "FP8_MIN_ROWS", 1)
        held, more = "fp8_e4m3", {"precision__matmul": "fp8"}
    components = {FAMILIES[family].denoiser: {"dtype": held}}
    folder = trained(
        bench, family=family, steps=BEGUN + 20, adapter__type=kind, precision__compute=compute, model__components=components,
        **more,
    )  # fmt: skip
    status, said = ran(capsys, str(folder), "--all")
    assert status == 0 and "20 of 20 steps explained by rounding" in said, said
    assert "done again here, 20 of 20 steps have the very numbers of the log" in said, said
    most = re.search("largest error / bound: loss (.*), gradient norm (.*), gradient of the worst layer (.*)", said)
    assert most is not None
    print("|", " | ".join((family, kind, compute, stored, *most.groups())), "|")


@pytest.mark.slow
def test_where_roundings_need_not_repeat_only_the_bounds_count(bench: Workbench, capsys, monkeypatch) -> None:
    """Of a run that compiled its blocks, and of one that went on in another environment before its next checkpoint."""
    traced_only(monkeypatch)
    few = {"adapter__targets": ["*attn.to_q"], "step__compile": "blocks"}
    folder = trained(bench, "compiled", steps=BEGUN + 1, **few)
    status, said = ran(capsys, str(folder))
    assert status == 0 and "blocks were compiled there, and are not here" in said, said
    folder = trained(bench, "moved", steps=BEGUN + 1)
    following = folder.with_name(store.folder_name(BEGUN + 1))
    state = json.loads((following / "state.json").read_text())
    state["pieces"]["environment"]["state"]["torch"] = "2.0"
    (following / "state.json").write_text(json.dumps(state))
    reseal(following)
    status, said = ran(capsys, str(folder))
    assert status == 0 and "went on in another environment before its next checkpoint" in said, said
