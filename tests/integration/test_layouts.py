"""What a source holds, as a user is told it: the lines of --plan, refusals, and one run from two layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import PHOTOS, Workbench
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.data.identity import fingerprint
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.resume.allowed_changes import Allowance
from trainer.resume.pins import refuse_changes
from workbench.commands.main import main
from workbench.summary.plan import describe


def planned(bench: Workbench, **overrides) -> RunPlan:
    config = configs.parse(bench.tree(**overrides))
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return shutil.copytree(PHOTOS, tmp_path / "photos", ignore=shutil.ignore_patterns("*.md"))


@pytest.mark.slow
def test_the_plan_tells_where_captions_come_from_and_what_is_left_out(bench: Workbench, photos: Path, capsys) -> None:
    (photos / "03.txt").rename(photos / "03.CAPTION")
    (photos / "04.txt").rename(photos / "four.txt")
    (photos / "2_sks bear").mkdir()
    (photos / "00.jpg").rename(photos / "2_sks bear" / "00.jpg")
    for name in (".DS_Store", "a.psd", "b.psd", "c.psd", "d.psd"):
        (photos / name).touch()
    path = bench.write(bench.tree(data__sources=[{"path": str(photos)}]))
    assert main(["--config", str(path), "--plan"]) == 0
    said = capsys.readouterr().out
    for line in (
        "data 5 images x 1/2 repeats: ",
        "  captions: 1 missing or empty; ",
        f"  captions of {photos}: 1 from .caption, 2 from .txt, 1 from kohya's folder names; 1 images have none\n",
        "  2_sks bear: 2 repeats of 1 images\n",
        "  left out: 7 files\n",
        f"    4 files: .psd images are not read; convert them to PNG or JPEG ("
        f"{photos}/a.psd, {photos}/b.psd, {photos}/c.psd and 1 more)\n",
        "  found: 5 photos, 3 caption files, 7 left out\n",
        f"    2 files: no image has its name ({photos}/00.txt, {photos}/four.txt)\n",
        f"    1 file: hidden ({photos}/.DS_Store)\n",
    ):
        assert f"\n{line}" in said, (line, said)


def test_an_ordinary_folder_leaves_nothing_out(bench: Workbench, photos: Path) -> None:
    said = describe(planned(bench, data__sources=[{"path": str(photos)}]), sizes=False)
    assert f"\n  captions of {photos}: 5 from .txt" in said and "left out" not in said


@pytest.mark.slow
def test_a_run_is_the_same_from_a_folder_and_from_its_metadata(bench: Workbench, photos: Path) -> None:
    plain = planned(bench, data__sources=[{"path": str(photos)}])
    rows = [{"image": path.with_suffix(".jpg").name, "said": path.read_text()} for path in sorted(photos.glob("*.txt"))]
    (photos / "bears.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"path": str(photos / "bears.jsonl"), "image_column": "image", "caption_column": "said"}
    table = planned(bench, data__sources=[keys])
    assert fingerprint(table.data.examples) == fingerprint(plain.data.examples)
    by_name = planned(bench, data__sources=[{"path": str(photos), "captions": "filename"}])
    assert [
        name
        for name, digest in fingerprint(by_name.data.examples).items()
        if digest != fingerprint(plain.data.examples)[name]
    ] == ["captions"]


def test_a_bad_row_ends_with_a_message_and_nothing_written(bench: Workbench, photos: Path, capsys) -> None:
    (photos / "metadata.jsonl").write_text('{"file_name": "00.jpg"}\n{"file_name": "../secret.jpg"}\n')
    assert main(["--config", str(bench.write(bench.tree(data__sources=[{"path": str(photos)}])))]) == 2
    said = capsys.readouterr().err
    assert f"{photos}/metadata.jsonl: row 2: file_name = '../secret.jpg' is not in the table's folder" in said
    assert not (bench.tmp / "out").exists()


def test_another_way_to_captions_is_refused_on_resume(bench: Workbench) -> None:
    saved = configs.tree(bench.config())
    now = configs.tree(bench.config(data__sources=[{"path": str(PHOTOS), "captions": "folder"}]))
    with pytest.raises(UserError, match=r"data\.sources\.0\.captions: 'auto' -> 'folder'"):
        refuse_changes(saved, now, "the checkpoint", allowed=Allowance())
