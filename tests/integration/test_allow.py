"""--allow: a run goes on with other photos or settings, and from there on it is resumed byte for byte as any other."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PHOTOS, Workbench, metrics_of
from tests.integration import test_processes as processes
from tests.proofs.forks import Server
from trainer import config as configs
from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint import store
from trainer.plan.run_plan import open_source
from workbench.commands import main as cli

NEW = {"data__resolution": [64, 96], "data__bucket_step": 16, "data__short_batches": "merge"}


def tree(bench: Workbench, out: str, **overrides: Any) -> dict[str, Any]:
    """Seven steps on photos of the test's own: four an epoch, and three once they are changed."""
    photos = bench.tmp / "photos"
    if not photos.exists():
        shutil.copytree(PHOTOS, photos)
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 7, "adapter__targets": ["*attn1.to_q"],
            "data__flip": True, "data__caption_dropout": 0.3, "data__sources": [{"path": str(photos)}],
            "optimizer__lr": 1e-2, "checkpoint__keep_last": 9, "checkpoint__every_steps": 1,
            "export__formats": ["diffusers"],
        } | overrides
    )  # fmt: skip


def train(tree: dict[str, Any], resume_from: str | None = None, allow: str | None = None) -> None:
    from trainer.resume import allowed_changes
    from workbench.commands import launch

    launch.train(configs.parse(tree), resume_from=resume_from, allowed=allowed_changes.parse(allow, resume_from))


def change_photos(bench: Workbench) -> None:
    photos = bench.tmp / "photos"
    (photos / "00.txt").write_text("another caption")
    (photos / "01.jpg").write_bytes((photos / "02.jpg").read_bytes())
    shutil.copy(photos / "03.jpg", photos / "05.jpg")
    (photos / "04.jpg").unlink()


def progress(folder: Path) -> dict[str, Any]:
    return files.read_json(folder / "state.json")["pieces"]["progress"]["state"]


@pytest.mark.slow
def test_other_photos(bench: Workbench, capsys) -> None:
    train(tree(bench, "out", run__stop_after=3))
    out, root = bench.tmp / "out", bench.tmp / "out" / "checkpoints"
    change_photos(bench)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refused:
        train(tree(bench, "out"), "auto")
    assert str(refused.value).splitlines() == [
        "the data are not those of the checkpoint (5 photos then, 5 now):",
        "added: 0/05.jpg",
        "removed: 0/04.jpg",
        "other contents: 0/01.jpg",
        "other captions: 0/00.jpg",
        "restore them (--plan names what is left out now, and why; the version that began the run still trains it), or end "
        "the present epoch here and start a new one over these: --resume_from auto --allow data, or start a new run (another "
        "run.output_dir)",
    ]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, "a refused start writes nothing"

    shutil.copytree(out, bench.tmp / "whole")
    capsys.readouterr()
    train(tree(bench, "whole"), "auto", "data")
    said = capsys.readouterr().out
    assert "changed after step 3, as --allow says; epoch 2 begins:\n  photos: 5 photos then, 5 now\n  added: 0/05.jpg" in said
    # Stopped before its first step, and after two more, each time without --allow: the same bytes.
    train(tree(bench, "out", run__stop_after=3), "auto", "data")
    for stop in (5, 7):
        train(tree(bench, "out", run__stop_after=stop), "auto")
    whole = metrics_of(bench.tmp / "whole")
    assert metrics_of(out) == whole and [line["step"] for line in whole] == list(range(1, 8))
    assert [line["epoch"] for line in whole] == [1, 1, 1, 2, 2, 2, 3], "three steps of four, then whole epochs of the new"
    for name in ("checkpoints/step-00000007/adapter.safetensors", "checkpoints/step-00000007/optimizer.safetensors",
                 "checkpoints/step-00000007/data.safetensors", "adapters/bear.safetensors"):  # fmt: skip
        assert (out / name).read_bytes() == (bench.tmp / "whole" / name).read_bytes(), name
    # The training went on from where it was: the checkpoint in the old one's place holds its tensors.
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert (root / "step-00000003" / name).read_bytes() == (root / "superseded-step-00000003" / name).read_bytes()
    assert progress(root / "superseded-step-00000003")["changes"] == []
    (change,) = progress(root / "step-00000007")["changes"]
    assert (change["step"], change["epoch"]) == (3, 1)
    header = TensorFile(out / "adapters" / "bear.safetensors").metadata
    (told,) = json.loads(header["changed_in_mid_run"])
    assert (told["step"], told["epoch"], told["what"][0]) == (3, 1, "photos: 5 photos then, 5 now")
    assert "added" in told["what"] and "05.jpg" in str(change) and ".jpg" not in str(header), "no name of a file is published"
    assert "Changed in mid-run" in (out / "report.html").read_text()


class Killed(BaseException):
    """Nothing of the run sees it, as nothing sees SIGKILL."""


@pytest.mark.slow
def test_a_kill_while_the_checkpoint_is_replaced(bench: Workbench, monkeypatch, capsys) -> None:
    """The next start goes on from the step that was reached, and needs no --allow; starts that are repeated add no copies."""
    train(tree(bench, "out", run__stop_after=3, optimizer__lr=5e-3))
    root, replace = bench.tmp / "out" / "checkpoints", os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(source).name == ".step-00000003.new.tmp":
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killed)
        train(tree(bench, "out", run__stop_after=3), "auto", "optimizer")
    left = [".step-00000003.new.tmp", "step-00000001", "step-00000002", "superseded-step-00000003"]
    assert sorted(path.name for path in root.iterdir()) == left
    with pytest.raises(UserError, match="already holds this run's checkpoints"):
        train(tree(bench, "out"))
    capsys.readouterr()
    train(tree(bench, "out", run__stop_after=3), "auto")
    assert ".step-00000003.new.tmp is whole: a kill came before it had its name" in capsys.readouterr().out
    assert sorted(path.name for path in root.iterdir()) == [*left[1:3], "step-00000003", left[3]]
    assert [change["step"] for change in progress(root / "step-00000003")["changes"]] == [3]
    for _ in range(3):
        train(tree(bench, "out", run__stop_after=3), str(root / "superseded-step-00000003"), "optimizer")
        assert sorted(path.name for path in root.iterdir()) == [*left[1:3], "step-00000003", left[3]]


@pytest.mark.slow
def test_other_settings(bench: Workbench, capsys) -> None:
    train(tree(bench, "out", run__stop_after=3))
    new = {"optimizer__lr": 5e-3, "schedule__name": "linear", "schedule__total_steps": 20} | NEW
    with pytest.raises(UserError, match=r"--resume_from auto --allow data,optimizer.lr,schedule.name,schedule.total_steps"):
        train(tree(bench, "out", **new), "auto")
    shutil.copytree(bench.tmp / "out", bench.tmp / "whole")
    train(tree(bench, "whole", **new), "auto", "data,optimizer.lr,schedule")
    train(tree(bench, "out", run__stop_after=5, **new), "auto", "data,optimizer.lr,schedule")
    train(tree(bench, "out", **new), "auto")
    whole = metrics_of(bench.tmp / "whole")
    assert metrics_of(bench.tmp / "out") == whole
    rates = [line["lr"] for line in whole]
    assert rates[:3] == [1e-2] * 3
    assert rates[3:] == pytest.approx([5e-3 * (1 - done / 20) for done in range(3, 7)]), "from the next step"
    capsys.readouterr()
    train(tree(bench, "out", **new), "auto", "optimizer")
    assert "--allow optimizer: nothing that needs it has changed" in capsys.readouterr().out


def kept_for_each(folder: Path, layers: list[str], rate_of: Callable[[str], object]) -> dict[str, dict[str, bytes]]:
    """What the optimizer keeps of each parameter, cut out of its groups. layers: in the model's order."""
    entries = TensorFile(folder / "adapter.safetensors").entries
    sizes = {name: -(-math.prod(entry.shape) // 256) for name, entry in entries.items()}
    tensors = TensorFile(folder / "optimizer.safetensors").read_all()
    groups: dict[object, list[str]] = {}
    for name in sorted(sizes, key=lambda name: (layers.index(name.partition(".lora_")[0]), name)):
        groups.setdefault(rate_of(name), []).append(name)
    kept: dict[str, dict[str, bytes]] = {name: {} for name in sizes}
    for text, tensor in tensors.items():
        group, key = text.split("|")
        names = groups[list(groups)[int(group.removeprefix("group."))]]
        blocks = sum(sizes[name] for name in names)
        start = 0
        for name in names:
            alone = key.startswith(("step", "qmap"))
            part = tensor if alone else tensor.view(blocks, -1)[start : start + sizes[name]]
            kept[name][key] = part.numpy().tobytes()
            start += sizes[name]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_other_rates_of_a_rule(bench: Workbench, optimizer: str) -> None:
    """A rule's rate comes, goes and changes, and so do the optimizer's groups: each parameter keeps its own moments."""
    root = bench.tmp / "out" / "checkpoints"

    def start(stop: int, allow: str | None = None, **rates: float) -> None:
        rule = {"component": "unet", "match": "*attn1.to_k"} | rates
        wanted = {"adapter__targets": ["*attn1.to_q", "*attn1.to_k"], "adapter__rules": [rule], "adapter__type": "dora",
                  "optimizer__name": optimizer, "run__stop_after": stop}  # fmt: skip
        train(tree(bench, "out", **wanted), None if stop == 2 else "auto", allow)

    def same(name: str) -> tuple[bool, bool]:
        return "to_k" in name, name.endswith("magnitude_vector")

    def together(name: str) -> bool:
        return name.endswith("magnitude_vector")

    start(2)
    layers = [f"unet.{name}" for name, _ in open_source(configs.parse(tree(bench, "out"))).build("unet").named_modules()]
    course = [({"lr": 3e-3}, same), ({"lr": 5e-3}, same), ({"lr": 1e-2}, together), ({"weight_decay": 0.5}, None)]
    before = together
    for step, (rates, after) in enumerate(course, 2):
        after = after or (lambda name: "magnitudes" if together(name) else same(name))
        with pytest.raises(UserError, match="--allow adapter.rules"):
            start(step + 1, **rates)
        start(step + 1, "adapter.rules", **rates)
        moments = kept_for_each(root / f"superseded-step-{step:08d}", layers, before)
        assert (
            kept_for_each(root / f"step-{step:08d}", layers, after) == moments and len(set(map(str, moments.values()))) > 20
        )
        before = after
        lrs = files.read_json(root / f"step-{step:08d}" / "state.json")["pieces"]["schedule"]["state"]["_last_lr"]
        assert set(lrs) == {1e-2, rates.get("lr", 1e-2)}
    start(7, **course[-1][0])
    assert store.steps(root)[-1] == 7


@pytest.mark.slow
def test_the_command_line(bench: Workbench, capsys) -> None:
    train(tree(bench, "out", run__stop_after=1))
    path = str(bench.write(tree(bench, "out", run__max_steps=2, optimizer__lr=5e-3, adapter__rank=8)))
    assert cli.main(["--config", path, "--resume_from", "auto", "--allow", "optimizer.lr,adapter"]) == 2
    said = capsys.readouterr().err
    assert "adapter.rank: 4 -> 8 (never: the saved adapter would not fit" in said and "optimizer.lr" not in said
    assert cli.main(["--config", path, "--allow", "optimizer.lr"]) == 2
    path = str(bench.write(tree(bench, "out", run__max_steps=2, optimizer__lr=5e-3)))
    assert cli.main(["--config", path, "--resume_from", "auto", "--allow", "optimizer.lr"]) == 0
    assert [line["lr"] for line in metrics_of(bench.tmp / "out")] == [1e-2, 5e-3]
    assert store.steps(bench.tmp / "out" / "checkpoints") == [1, 2]


@pytest.mark.slow
def test_several_processes_agree(server: Server, bench: Workbench) -> None:
    """Two processes end the epoch where one does, and one goes on from what they saved."""
    one, two = ({"step__accumulation": count, "run__max_steps": 5} for count in (2, 1))
    train(tree(bench, "one", run__stop_after=1, **one))
    shutil.copytree(bench.tmp / "one", bench.tmp / "two")
    change_photos(bench)
    train(tree(bench, "one", **one), "auto", "data")
    more = ["--resume_from", "auto", "--allow", "data"]
    processes.run_both(server, bench, tree(bench, "two", run__stop_after=3, **two), *more)
    train(tree(bench, "two", **one), "auto")
    processes.assert_same_course(bench, "one", "two")
    assert [line["epoch"] for line in metrics_of(bench.tmp / "two")] == [1, 2, 2, 3, 3]
