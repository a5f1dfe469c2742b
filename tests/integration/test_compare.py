"""`train.py --compare` on a tiny model: which runs are made, and made again; what a stop leaves; the page."""

from __future__ import annotations

import shlex
import shutil
import signal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from PIL import Image

from tests.harness import PHOTOS, Workbench
from trainer import config as configs
from trainer.base.errors import Interrupted
from trainer.resume.pins import MAY_CHANGE
from workbench.commands import launch
from workbench.commands import main as cli
from workbench.compare import comparison

pytestmark = [pytest.mark.tool("compare"), pytest.mark.usefixtures("few_draws")]

DEFAULT = {"one": {}, "two": {"optimizer": {"lr": 1e-2}}}


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """The folders that were trained in, in order."""
    folders: list[str] = []
    real = launch.train

    def train(config: configs.Config, **given: Any) -> bool:
        folders.append(Path(config.run.output_dir).name)
        return real(config, **given)

    monkeypatch.setattr(launch, "train", train)
    return folders


@pytest.fixture
def photos(bench: Workbench) -> Path:
    return Path(shutil.copytree(PHOTOS, bench.tmp / "photos"))


def compare(bench: Workbench, photos: Path, *arguments: str, variants: dict = DEFAULT, **more: Any) -> int:
    keys = {"run__max_steps": 2, "data__sources": [{"path": str(photos)}], "data__held_out": 2}
    base = bench.tree("flux", **(keys | {"validation__loss_every_steps": 1} | more))
    del base["data"]["cache_dir"]
    bench.write(base, "base.toml")
    asked = {
        "config": str(bench.tmp / "base.toml"), "output_dir": str(bench.tmp / "out"), "seeds": [1, 2],
        "variant": [{"name": name, "set": keys} for name, keys in variants.items()],
    }  # fmt: skip
    (bench.tmp / "compare.toml").write_text(tomli_w.dumps(asked))
    return cli.main(["--compare", str(bench.tmp / "compare.toml"), *arguments])


@pytest.mark.slow
def test_a_run_is_made_once_and_what_changed_is_made_again(
    bench: Workbench, photos: Path, trained, capsys, monkeypatch
) -> None:
    assert compare(bench, photos) == 0
    said = capsys.readouterr().out
    assert [name.rpartition("-")[0] for name in trained] == ["one-1", "two-1", "one-2", "two-2"]
    assert "one is " in said or "one and two are not told apart" in said
    # The plan of the first run, then what differs; the numbers of an optimizer stand in one line.
    assert said.count("parts of the model\n") == said.count("\ndata 3 images: ") == 1
    assert said.count("\noptimizer adamw, lr 0.01, ") == 2 and said.count("\noptimizer adamw, lr 0.0001, ") == 1
    assert said.count("\n  all else as in the plan above\n") == 3
    assert f"comparison: {bench.tmp}/out/comparison.html" in said
    page = (bench.tmp / "out" / "comparison.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in trained) and "one less two" in page
    first = [*trained]
    # Other names of variants, another order, where it reports to, where it stops: no other runs, and one judgement.
    trained.clear()
    assert compare(bench, photos, variants={"2": DEFAULT["two"], "1": {}}, logging__tensorboard=True, run__stop_after=1) == 0
    assert not trained and "2 seeds, step 2)" in capsys.readouterr().out
    # A further variant is one more run of each seed; so is one that starts from an adapter file, and another such file.
    capsys.readouterr()

    def to_be_trained(variants: dict = DEFAULT) -> int:
        assert compare(bench, photos, "--plan", variants=variants) == 0
        return capsys.readouterr().out.count(": to be trained")

    start = bench.tmp / "start.safetensors"
    warm = {"warm": {"adapter": {"init_from": str(start)}}, **DEFAULT}
    shutil.copy(bench.tmp / "out" / first[0] / "adapters" / f"{first[0]}.safetensors", start)
    assert to_be_trained() == 0 and to_be_trained(warm) == 2
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "__version__", "next")
        assert to_be_trained() == 4
    assert compare(bench, photos, variants=warm) == 0
    assert [name.rpartition("-")[0] for name in trained] == ["warm-1", "warm-2"] and to_be_trained(warm) == 0
    shutil.copy(bench.tmp / "out" / first[1] / "adapters" / f"{first[1]}.safetensors", start)
    capsys.readouterr()
    assert to_be_trained(warm) == 2
    picture = next(photos.glob("*.jpg"))
    Image.open(picture).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(picture)
    assert to_be_trained() == 4


@pytest.mark.slow
def test_what_is_stopped_goes_on_and_ends_in_the_bytes_of_its_own_command(
    bench: Workbench, photos: Path, trained, capsys, monkeypatch
) -> None:
    assert compare(bench, photos, "--plan") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python train.py ")]
    assert len(lines) == 4 and not (bench.tmp / "out").exists() and not trained
    assert len({line.partition("run.name=")[2].split()[0] for line in lines}) == 4, (
        "a mirror, a log elsewhere know them apart"
    )
    assert cli.main([*shlex.split(lines[1])[2:], f"--set=run.output_dir={bench.tmp}/alone"]) == 0

    real = launch.train

    def stopped(config: configs.Config, **given: Any) -> bool:
        if "two-1" not in config.run.output_dir:
            return real(config, **given)
        real(config.model_copy(update={"run": config.run.model_copy(update={"stop_after": 1})}), **given)
        raise Interrupted(signal.SIGTERM, "after step 1")

    with monkeypatch.context() as patched:
        patched.setattr(launch, "train", stopped)
        assert compare(bench, photos) == 143
    said = capsys.readouterr()
    assert "stopped by SIGTERM after step 1 (run 2 of 4: two, seed 1); the same command goes on" in said.err
    assert said.err.rstrip().endswith(f"go on: python train.py --compare {bench.tmp}/compare.toml")
    trained.clear()
    assert compare(bench, photos) == 0
    assert [name.rpartition("-")[0] for name in trained] == ["two-1", "one-2", "two-2"]
    assert "resuming" in capsys.readouterr().out
    (folder,) = (bench.tmp / "out").glob("two-1-*")
    for name in (f"adapters/{folder.name}.safetensors", "checkpoints/step-00000002/optimizer.safetensors"):
        assert (folder / name).read_bytes() == (bench.tmp / "alone" / name).read_bytes()


@pytest.mark.slow
def test_a_variant_that_leaves_the_numbers_is_told_and_the_others_go_on(
    bench: Workbench, photos: Path, trained, capsys
) -> None:
    wild = {"optimizer": {"lr": 1e30}}
    assert compare(bench, photos, variants={"one": {}, "wild": wild}, run__max_steps=4) == 0
    assert len(trained) == 4
    said = capsys.readouterr().out
    assert "wild, seed 1: ended: " in said and " are equal" not in said
    assert "wild is not judged: 2 of its 2 runs ended, as a value was not finite." in said
    assert "wild is not judged" in (bench.tmp / "out" / "comparison.html").read_text()
    trained.clear()
    assert compare(bench, photos, variants={"one": {}, "wild": wild}, run__max_steps=4) == 0
    assert not trained and "wild, seed 2: not finite already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"one": {}, "two": {"model": {"components": {"unte": {"dtype": "bf16"}}}}}, "variant 'two': model.components.unte"),
        ({"one": {}, "two": {"adapter": {"targets": ["nothing*"]}}}, "variant 'two': adapter.targets"),
    ],
)
def test_a_variant_that_cannot_be_trained_is_refused_before_anything_is_written(
    bench: Workbench, photos: Path, trained, capsys, variants: dict, said: str
) -> None:
    assert compare(bench, photos, variants=variants) == 2
    assert said in capsys.readouterr().err and not (bench.tmp / "out").exists() and not trained


def test_what_makes_no_other_run_may_change_in_mid_run() -> None:
    """Else an edit that keeps a run's folder would keep the run from going on there. Its name is that of the folder."""
    kept = [key for key in configs.known_keys() if any(fnmatchcase(key, pattern) for pattern in comparison.NO_OTHER_RUN)]
    assert [key for key in kept if not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)] == ["run.name"]


def test_with_a_mirror_each_run_has_its_own(bench: Workbench, photos: Path, capsys) -> None:
    assert compare(bench, photos, "--plan", checkpoint__mirror=f"file://{bench.tmp}/mirror") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python train.py ")]
    names = [line.partition("run.name=")[2].split()[0].strip("'\"") for line in lines]
    assert [f'mirror/{name}"' in line for name, line in zip(names, lines, strict=True)] == [True] * 4


def test_several_processes_are_sent_to_the_commands_of_the_runs(bench: Workbench, photos: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        compare(bench, photos) == 2
        and "each run by its own command, which --compare FILE --plan prints" in capsys.readouterr().err
    )


@pytest.mark.proof
def test_a_planted_difference_is_told_apart_with_three_seeds(bench: Workbench, capsys) -> None:
    """A rate of 3e-4 against 1e-3, on the pocket SDXL, in 30 steps."""
    asked = {
        "config": "pocket_sdxl.toml", "output_dir": str(bench.tmp / "out"), "seeds": [0, 1, 2],
        "set": {"run": {"max_steps": 30}, "data": {"held_out": 4}, "validation": {"loss_every_steps": 30, "every_steps": 0}},
        "variant": [{"name": name, "set": {"optimizer": {"lr": lr}}} for name, lr in (("slow", 3e-4), ("fast", 1e-3))],
    }  # fmt: skip
    (bench.tmp / "compare.toml").write_text(tomli_w.dumps(asked))
    assert cli.main(["--compare", str(bench.tmp / "compare.toml")]) == 0
    assert "slow is worse than fast: the held-out loss of slow is higher by" in capsys.readouterr().out
