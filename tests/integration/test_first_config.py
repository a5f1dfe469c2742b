"""`--new` writes a config for a folder of photos as people have it, and that config trains."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from scripts import data as data_script
from tests import hub as stand_in
from tests.harness import PHOTOS, ROOT, Workbench
from trainer import config as configs
from trainer.base import console
from workbench.commands import main as cli
from workbench.commands import new_config

POCKET = ROOT / "examples" / "pocket_sdxl"


def captions_beside(folder: Path) -> str:
    shutil.copytree(PHOTOS, folder / "bear photos")
    return "bear photos"


def metadata(folder: Path) -> str:
    (folder / "table").mkdir()
    lines = []
    for photo in sorted(PHOTOS.glob("*.jpg")):
        shutil.copy(photo, folder / "table")
        lines.append(json.dumps({"file_name": photo.name, "text": photo.with_suffix(".txt").read_text().strip()}))
    (folder / "table" / "metadata.jsonl").write_text("\n".join(lines))
    return "table"


def kohya(folder: Path) -> str:
    inner = folder / "set" / "3_sks bear"
    inner.mkdir(parents=True)
    for photo in PHOTOS.glob("*.jpg"):
        shutil.copy(photo, inner)
    return "set"


def without_captions(folder: Path) -> str:
    (folder / "my_bear" / "garden").mkdir(parents=True)
    for photo in PHOTOS.glob("*.jpg"):
        shutil.copy(photo, folder / "my_bear" / "garden")
    return "my_bear"


LAYOUTS = {
    captions_beside: ("bear_photos", "sks plush bear"), metadata: ("table", "sks plush bear"), kohya: ("set", None),
    without_captions: ("my_bear", "my bear"),
}  # fmt: skip


def new(bench: Workbench, monkeypatch, photos: str, *more: str, model: Path | str = POCKET) -> int:
    monkeypatch.chdir(bench.tmp)
    return cli.main(["--new", photos, "--model", str(model), *more])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_config_trains_to_the_end_unchanged(bench: Workbench, monkeypatch, capsys, layout) -> None:
    """Its length and the steps of its samples alone are set for the test, where --new chooses them. What is trained is the
    same of every layout (test_layouts.py), so one is."""
    monkeypatch.setattr(new_config, "STEPS", (5, 5))
    photos = layout(bench.tmp)
    name, trigger = LAYOUTS[layout]
    assert new(bench, monkeypatch, photos, "--set", "validation.steps=2") == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"start: python train.py --config {name}.toml --resume_from auto"
    assert "captions of 5 photos: " in said and "\nfits: " in said
    assert len(re.findall(r"^data \d", said, re.MULTILINE)) == 1, "what it trains on is told once"
    assert len(re.findall(r"\d (?:missing|empty)", said)) == 2 and "missing or empty" not in said, (
        "one count of blank captions"
    )
    assert "no caption for it" not in said, "each is named once"
    assert (bench.tmp / "outputs" / name / "data_report.html").is_file()
    config = tomllib.loads((bench.tmp / f"{name}.toml").read_text())
    given = config["data"]["sources"][0].get("trigger")
    assert given == trigger or trigger is None
    assert f'\ntrigger "{given}": name it in your prompts; a caption without it gets it\n' in said
    assert config["data"]["resolution"] == 64 and config["validation"]["prompts"]
    if layout is captions_beside:
        assert cli.main(["--config", f"{name}.toml", "--resume_from", "auto"]) == 0
        assert (bench.tmp / "outputs" / name / "adapters" / f"{name}.safetensors").is_file()


@pytest.mark.slow
def test_it_takes_the_config_of_a_cards_size_and_keeps_its_comments(bench: Workbench, monkeypatch, capsys) -> None:
    photos = captions_beside(bench.tmp)
    for size, preset in (("11.7GiB", "sdxl_12gb"), ("4GiB", "sdxl_8gb")):
        assert new(bench, monkeypatch, photos, "--plan_memory", size) == 0
        text = (bench.tmp / "bear_photos.toml").read_text()
        assert f"from configs/{preset}.toml" in text.splitlines()[0]
        assert '"] # better: something that no photo shows\n' in text, "no blanks of the preset's own comment before it"
        written, taken = configs.load("bear_photos.toml", []), configs.load(f"{preset}.toml", [])
        for table in ("model.components", "adapter", "optimizer", "memory", "step", "objective", "precision"):
            first, *rest = table.split(".")
            one, other = getattr(written, first), getattr(taken, first)
            for each in rest:
                one, other = getattr(one, each), getattr(other, each)
            assert one == other, table
        (bench.tmp / "bear_photos.toml").unlink()
    assert "# every block is recomputed" in text
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_lines_are_broken_between_words_and_the_command_can_be_copied(bench: Workbench, monkeypatch, capsys, columns) -> None:
    """Of --new and of data.py report."""
    photos = captions_beside(bench.tmp)
    (bench.tmp / photos / "00.txt").write_text("a bear of many words, " * 40)
    monkeypatch.setattr(console, "width", lambda stream: columns)
    model = bench.models / "sdxl"
    assert new(bench, monkeypatch, photos, "--plan_memory", "80GiB", model=model) == 0
    *said, config, start = capsys.readouterr().out.splitlines()
    assert (config, start) == (
        "config: bear_photos.toml", "start: python train.py --config bear_photos.toml --resume_from auto"
    )  # fmt: skip
    assert data_script.main(["report", "--config", "bear_photos.toml", "--out", str(bench.tmp / "report")]) == 3
    said += capsys.readouterr().out.splitlines()
    assert [line for line in said if "data_report.html" in line] == [
        "data report: outputs/bear_photos/data_report.html", f"data report: {bench.tmp}/report/data_report.html"
    ]  # fmt: skip
    assert [line for line in said if len(line) > columns and " " in line.strip() and "data_report.html" not in line] == []


@pytest.mark.parametrize(
    ("slow", "memory", "given", "compute"),
    [(True, None, [], "fp32"), (False, None, [], "bf16"), (True, 8 * 2**30, [], "bf16"), (True, None, ["fp16"], "fp16")],
    ids=["slow", "fast", "for a card", "asked for"],
)
def test_on_a_cpu_without_16_bits_it_computes_in_fp32(bench: Workbench, monkeypatch, slow, memory, given, compute) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(bench.tmp)
    monkeypatch.setattr(new_config, "slow_in", lambda dtype: slow and dtype == torch.bfloat16)
    path = new_config.write_first_config(
        captions_beside(bench.tmp), model=str(POCKET), memory=memory, folder=bench.tmp, show=lambda *_: True,
        overrides=[f"precision.compute={each}" for each in given],
    )  # fmt: skip
    assert configs.load(str(path), []).precision.compute == compute
    assert path.read_text().count("# this CPU is slow in bf16") == (compute == "fp32")


@pytest.mark.slow
def test_without_the_models_tokenizers_it_plans_all_the_same(bench: Workbench, monkeypatch, capsys) -> None:
    """The published Flux, of which the configs are embedded, where the hub has nothing."""
    photos = captions_beside(bench.tmp)
    with stand_in.serve({}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        assert new(bench, monkeypatch, photos, "--plan_memory", "16GiB", model="black-forest-labs/FLUX.1-dev") == 0
    said = capsys.readouterr()
    assert "warning: no data report: the model has no tokenizer_2" in said.err
    assert said.out.splitlines()[-1] == "start: python train.py --config bear_photos.toml --resume_from auto"
    assert "\nfits: " in said.out
    assert configs.load("bear_photos.toml", []).model.family == "flux"


@pytest.mark.slow
def test_many_photos_hold_some_out(bench: Workbench, monkeypatch, capsys) -> None:
    (bench.tmp / "many").mkdir()
    for index in range(20):
        Image.new("RGB", (80, 80), (index * 12, 255 - index * 9, 90)).save(bench.tmp / "many" / f"a bear {index}.png")
    assert new(bench, monkeypatch, "many") == 0
    config = configs.load("many.toml", [])
    assert config.data.held_out == 4 and config.validation.loss_every_steps > 0
    cpu = (
        r"(?s)no GPU was found: this would train on the CPU; .*time: about \S+ to \S+ s a step on this CPU, .+ "
        rf"for {config.run.max_steps} steps \("
    )
    found = len(re.findall(cpu, capsys.readouterr().out))
    assert cli.main(["--config", "many.toml", "--plan"]) == 0
    assert found == len(re.findall(cpu, capsys.readouterr().out)) == (not torch.cuda.is_available())


@pytest.mark.parametrize("command", ["--new", "--plan"])
def test_the_plan_begins_before_a_part_of_the_model_is_built_or_a_tokenizer(
    bench: Workbench, monkeypatch, capsys, command: str
) -> None:
    """The first lines name the CPU, and the config of --new is on the disk."""
    photos, config = captions_beside(bench.tmp), bench.write(bench.tree(run__device="auto"))

    def stop(*_: Any) -> None:
        assert (bench.tmp / "bear_photos.toml").exists() == (command == "--new")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for place in ("workbench.commands.check_data.without_modules", "trainer.models.loading.ModelSource.build"):
        monkeypatch.setattr(place, stop)
    ended = new(bench, monkeypatch, photos) if command == "--new" else cli.main(["--config", str(config), command])
    assert ended == 130
    assert not (bench.tmp / "outputs").exists()
    run, model, cpu, *trigger = capsys.readouterr().out.splitlines()
    assert len(trigger) == (command == "--new") and all(line.startswith('trigger "') for line in trigger)
    assert run.startswith("run ") and model.startswith("model sdxl from ")
    assert cpu == "no GPU was found: this would train on the CPU; the time that it takes is estimated below"


@pytest.mark.slow
def test_its_length_shows_each_photo_as_often_as_is_said(bench: Workbench, monkeypatch, capsys) -> None:
    """Photos of several shapes make short batches, and a folder's own repeats count."""
    for layout, repeats in ((captions_beside, 1), (kohya, 3)):
        photos = layout(bench.tmp)
        assert new(bench, monkeypatch, photos) == 0
        name = LAYOUTS[layout][0]
        config = configs.load(f"{name}.toml", [])
        (epochs,) = re.findall(rf"; {config.run.max_steps} steps = ([\d.]+) epochs", capsys.readouterr().out)
        (times,) = re.findall(r"each about (\d+) times", (bench.tmp / f"{name}.toml").read_text())
        assert int(times) == round(float(epochs) * repeats)
        assert config.run.max_steps == new_config.STEPS[0] or abs(int(times) - new_config.VIEWS) <= 10


def test_what_is_there_is_kept(bench: Workbench, monkeypatch, capsys) -> None:
    photos = captions_beside(bench.tmp)
    (bench.tmp / "bear_photos.toml").write_text("mine")
    assert new(bench, monkeypatch, photos) == 2
    assert "bear_photos.toml is there; train with it (--config bear_photos.toml)" in capsys.readouterr().err
    assert (bench.tmp / "bear_photos.toml").read_text() == "mine"


@pytest.mark.slow
def test_what_cannot_be_used_leaves_no_config(bench: Workbench, monkeypatch, capsys) -> None:
    photos = captions_beside(bench.tmp)
    (bench.tmp / "empty").mkdir()
    for given, model, said in (
        ("nowhere", POCKET, "error: --new nowhere: no photos can be read there; give a folder that holds some\n"),
        ("nowhere", POCKET, "nowhere: no such folder\n"),
        ("empty", POCKET, "error: --new empty: no photos can be read there; give a folder that holds some\n"),
        (photos, "no/model/here", "'no/model/here' does not exist"),
    ):  # fmt: skip
        assert new(bench, monkeypatch, given, model=model) == 2
        assert said in capsys.readouterr().err
    (bench.tmp / photos / "broken.jpg").write_bytes(b"no photo")
    assert new(bench, monkeypatch, photos) == 2
    assert "broken.jpg" in capsys.readouterr().err
    assert not list(bench.tmp.glob("*.toml")) and not (bench.tmp / "outputs").exists()


@pytest.mark.slow
def test_what_is_set_stands_in_the_config(bench: Workbench, monkeypatch, capsys) -> None:
    """In place of what is chosen here and of the preset's values, whose comments go."""
    photos = captions_beside(bench.tmp)
    weights = POCKET / "text_encoder"
    asked = {
        "model.path": str(POCKET), "model.components.unet.dtype": "bf16", "model.components.text_encoder.path": str(weights),
        "run.epochs": 7, "run.name": "my_bear", "adapter.rank": 3, "adapter.targets": ["*.to_q"],
        "objective.min_snr_gamma": None, "validation.every_steps": 0, "data.sources.0.trigger": "zwx toy",
    }  # fmt: skip
    keys = [f"{key}={'' if value is None else str(value).replace(chr(39), chr(34))}" for key, value in asked.items()]
    monkeypatch.chdir(bench.tmp)
    assert cli.main(["--new", photos, "--plan_memory", "8GiB", "--set", *keys]) == 0
    text = (bench.tmp / "my_bear.toml").read_text()
    tree = tomllib.loads(text)
    for key, value in asked.items():
        node: Any = tree
        for part in key.split("."):
            node = node[int(part)] if isinstance(node, list) else node.get(part)
        assert node == value, key
    assert "max_steps" not in tree["run"] and tree["run"]["output_dir"] == "outputs/my_bear"
    assert text.count("# as --set said\n") == len(asked) - 1 and "half of what bf16 takes" not in text
    assert "; 21 steps = 7 epochs" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_set_wrongly_is_refused_as_elsewhere(bench: Workbench, monkeypatch, capsys) -> None:
    photos = captions_beside(bench.tmp)
    config = bench.write(bench.tree())
    for wrong, said in (
        ("adapter.rnk=4", "did you mean adapter.rank?"),
        ("adapter.rank=many", "adapter.rank = 'many'"),
        ("rank", "--set 'rank': write it as table.key=VALUE"),
        ("data.sources.3.repeats=2", "'3' is not an index into a list of 1"),
    ):
        assert cli.main(["--config", str(config), "--plan", "--set", wrong]) == 2
        elsewhere = capsys.readouterr().err
        assert said in elsewhere
        assert new(bench, monkeypatch, photos, "--set", wrong) == 2
        assert capsys.readouterr().err == elsewhere
    for wrong, said in (
        ("model.path=x", f"--model {POCKET} and --set model.path=x both name the model; give one"),
        ("model.family=flux", f"model.family = 'flux': the model at {POCKET} is one of sdxl; leave the key out"),
        ("model.components.te.dtype=fp32", "model.components.te is not a component of sdxl"),
        ("model.components.vae.path=no/vae", "model.components.vae.path = 'no/vae' does not exist"),
    ):
        assert new(bench, monkeypatch, photos, "--set", wrong) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in bench.tmp.glob("*.toml")] == ["run.toml"]


TRIED_FIRST = (("sdxl", "file", True), ("flux", "folder", True), ("flux", "hub", False))


@pytest.fixture(scope="module")
def without_t5(models: Path, tmp_path_factory) -> Path:
    """The tiny Flux, as a folder and as a file, without T5's tokenizer."""
    folder = tmp_path_factory.mktemp("without_t5")
    for name in ("flux", "flux-one"):
        shutil.copytree(models / name, folder / name, ignore=shutil.ignore_patterns("tokenizer_2"))
    shutil.copy(models / "flux-one.safetensors", folder / "flux-one.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "kind", "whole"),
    # The quick suite has each family, each kind and each answer once.
    [
        pytest.param(family, kind, whole, marks=() if (family, kind, whole) in TRIED_FIRST else pytest.mark.slow)
        for family, whole in (("sdxl", True), ("flux", True), ("flux", False))
        for kind in ("folder", "hub", "file")
    ],
)
def test_every_family_is_planned_from_everywhere(
    bench: Workbench, without_t5: Path, monkeypatch, capsys, family: str, kind: str, whole: bool
) -> None:
    """--new, --plan and data.py report. What lacks T5's tokenizer is refused by all three, and leaves nothing."""
    models = bench.models if whole else without_t5
    photos = captions_beside(bench.tmp)
    monkeypatch.chdir(bench.tmp)
    with stand_in.serve({f"someone/tiny-{family}": models / family}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        model = {
            "folder": str(models / family), "hub": f"someone/tiny-{family}", "file": str(models / f"{family}-one.safetensors")
        }[kind]  # fmt: skip
        status = cli.main(["--new", photos, "--model", model, "--plan_memory", "16GiB", "--set", "data.resolution=64"])
        said = capsys.readouterr()
        config = bench.tmp / "bear_photos.toml"
        if whole:
            assert status == 0, said.err
            assert "captions of 5 photos: 0 missing" in said.out and "\nfits: " in said.out and config.is_file()
        else:
            assert status == 2 and "the model has no tokenizer_2" in said.err
            assert not config.exists() and not list(bench.tmp.rglob("data_report.html"))
            config = bench.write(bench.tree(family, model__path=model))
        for command in (
            lambda: cli.main(["--config", str(config), "--plan", "--plan_memory", "16GiB"]),
            lambda: data_script.main(["report", "--config", str(config), "--out", str(bench.tmp / "report")]),
        ):
            status = command()
            said = capsys.readouterr()
            assert status == (0 if whole else 2), said.err
            assert whole or "the model has no tokenizer_2" in said.err
        assert (bench.tmp / "report" / "data_report.html").is_file() == whole


@pytest.mark.slow
@pytest.mark.parametrize("place", ["workbench.commands.plan_command.describe", "workbench.commands.plan_command.forecast"])
def test_what_fails_later_leaves_no_file(bench: Workbench, monkeypatch, capsys, place: str) -> None:
    """Also what is no mistake of the user; the same command line then works."""
    photos = captions_beside(bench.tmp)

    def fail(*_: Any, **__: Any) -> None:
        assert tomllib.loads((bench.tmp / "bear_photos.toml").read_text())["run"]["name"] == "bear_photos"
        raise KeyError("transformer")

    with monkeypatch.context() as broken:
        broken.setattr(place, fail)
        with pytest.raises(KeyError):
            new(bench, broken, photos)
    assert ("trainable parameters" in capsys.readouterr().out) == place.endswith("forecast"), "the first lines come first"
    assert [path.name for path in bench.tmp.iterdir()] == ["bear photos"]
    assert new(bench, monkeypatch, photos, "--plan_memory", "8GiB") == 0
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_is_stopped_leaves_no_file(bench: Workbench, monkeypatch, capsys, signum: int) -> None:
    photos, before = captions_beside(bench.tmp), signal.getsignal(signal.SIGTERM)
    # What is started in the background of a script ignores SIGINT.
    here = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stopped(*_: Any, **__: Any) -> None:
        assert (bench.tmp / "bear_photos.toml").exists()
        # Where nobody handles it, the process would be gone: as an error it is this test's alone.
        assert signal.getsignal(signum) != signal.SIG_DFL
        signal.raise_signal(signum)

    monkeypatch.setattr("workbench.commands.plan_command.describe", stopped)
    try:
        assert new(bench, monkeypatch, photos) == 128 + signum
    finally:
        signal.signal(signal.SIGINT, here)
    assert "--resume_from" not in capsys.readouterr().err
    assert not [path for path in bench.tmp.rglob("*") if path.is_file() and "bear photos" not in path.parts]
    assert signal.getsignal(signal.SIGTERM) == before
