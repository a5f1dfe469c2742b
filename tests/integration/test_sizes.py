"""Several resolutions, small photos, short batches and held-out photos in whole runs."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from tests.harness import PHOTOS, Workbench
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from workbench.summary.data import data_account
from workbench.summary.plan import describe


def planned(bench: Workbench, **overrides) -> RunPlan:
    config = configs.parse(bench.tree(**overrides))
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


def test_every_photo_at_each_resolution_of_its_source(bench: Workbench) -> None:
    sources = [{"path": str(PHOTOS)}, {"path": str(PHOTOS), "resolution": 128, "flip": True, "caption_dropout": 0.5}]
    plan = planned(bench, data__resolution=[128, 64], data__sources=sources, validation__prompts=["a"],
                   validation__every_steps=1)  # fmt: skip
    assert len(plan.data.photos) == 10 and len(plan.data.examples) == 15
    assert [example.sample for example in plan.data.examples[:2]] == ["0/00.jpg@64", "0/00.jpg@128"]
    assert plan.config.data.bucket_step == 16, "of the smallest resolution"
    assert (plan.data.requests[0].width, plan.data.requests[0].height) == (128, 128), "of the largest"
    said = describe(plan, sizes=False)
    assert "dropped with probability 0.05/0.5; flip on/off;" in said


def test_a_resolution_below_the_bucket_step_is_named(bench: Workbench) -> None:
    with pytest.raises(UserError, match=r"data\.bucket_step = 32 does not suit sdxl at data\.resolution = 16"):
        planned(bench, data__bucket_step=32, data__resolution=[64, 16])


def test_what_is_cropped_and_what_is_stretched_is_told(bench: Workbench, tmp_path: Path) -> None:
    for name, size in {"a": (300, 100), "b": (400, 100), "c": (200, 100), "d": (150, 100)}.items():
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / f"{name}.png")
    told = partial(planned, bench, data__sources=[{"path": str(tmp_path)}], data__bucket_step=16)
    plain = "\n".join(data_account(told().data).lines())
    assert f"1 photo: its shape is beyond data.max_aspect = 2, to which it is cropped ({tmp_path}/a.png)" in plain
    assert f"1 photo: the crop keeps less than half of it ({tmp_path}/b.png: 42%)" in plain
    longer = told(data__max_aspect=4.0)
    assert "max_aspect" not in "".join(data_account(longer.data).lines())
    assert {e.sample: e.bucket for e in longer.data.examples}["0/b.png"] == (128, 32)
    whole = told(data__max_aspect=4.0, data__crop="none").data
    assert [example.bucket for example in whole.examples] == [example.bucket for example in longer.data.examples]
    lines = "\n".join(data_account(whole).lines())
    assert "nothing is cut (data.crop = 'none'); aspect ratios change by up to 33.3%" in lines
    for other in ({"data__crop_jitter": 0.1}, {"data__short_batches": "merge", "data__batch_size": 2}):
        with pytest.raises(UserError, match=next(iter(other)).replace("__", ".") + ".*data.crop = 'none'"):
            told(data__max_aspect=4.0, data__crop="none", **other)


@pytest.mark.parametrize("enlarge", [False, True])
def test_small_photos_are_told(bench: Workbench, enlarge: bool) -> None:
    plan = planned(bench, data__resolution=1024, data__enlarge=enlarge)
    assert all(e.small and (e.bucket > (768, 768)) == enlarge for e in plan.data.examples if len(set(e.photo.size)) == 1)
    said = describe(plan, sizes=False)
    how = "enlarged" if enlarge else r"trained in a smaller one (data.enlarge = true enlarges them)"
    assert f"; 5 smaller than the bucket of their shape: {how}" in said


@pytest.mark.parametrize("photos", [1, 2])
def test_one_photo_alone_is_warned_of(bench: Workbench, photos: int) -> None:
    """Of the subject: one for the prior is not counted."""
    folders = [bench.tmp / "subject", bench.tmp / "prior"]
    for folder in folders:
        folder.mkdir()
    for name in ("00.jpg", "01.jpg")[:photos]:
        shutil.copy(PHOTOS / name, folders[0])
    shutil.copy(PHOTOS / "02.jpg", folders[1])
    sources = [{"path": str(folder), "regularisation": folder.name == "prior"} for folder in folders]
    said = describe(planned(bench, data__sources=sources), sizes=False)
    warning = "\n  warning: this is one photo alone, and the adapter learns to draw just that picture; 10 to 30 are usual\n"
    assert (warning in said) == (photos == 1)


@pytest.mark.slow
def test_short_batches_are_told_with_what_fills_them(bench: Workbench) -> None:
    kept = describe(planned(bench), sizes=False)
    assert (
        "\n  short batches: 3 of an epoch's 4 batches have fewer than 2 photos (48x80: 1 photo, 64x64: 1 photo, 80x48: 1 "
        "photo); to fill them: data.batch_size = 1, 2 x the repeats, or data.short_batches = 'merge'\n"
    ) in kept
    filled = planned(bench, data__sources=[{"path": str(PHOTOS), "repeats": 2}])
    assert "\n  short batches: none of an epoch's 5 batches\n" in describe(filled, sizes=False)
    merged = planned(bench, data__short_batches="merge", data__resolution=128, data__bucket_step=16)
    assert merged.length.steps_per_epoch == 3
    assert (
        "\n  short batches: none of an epoch's 3 batches; merged: 3 moved to another bucket, 1 more appearances\n"
        in describe(merged, sizes=False)
    )


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "said"),
    [
        (1, 1, "5 steps an epoch; a step has 1 image; "),
        (2, 1, "4 steps an epoch; a step has up to 2 images of one shape; "),
        (2, 3, "2 steps an epoch; a step has up to 3 batches (step.accumulation) of up to 2 images of one shape; "),
    ],
)
def test_what_a_step_has_is_told(bench: Workbench, batch_size: int, accumulation: int, said: str) -> None:
    plan = planned(bench, data__batch_size=batch_size, step__accumulation=accumulation)
    assert f"\ndata 5 images: {said}" in describe(plan, sizes=False)


def test_held_out_photos_are_told_and_not_trained_on(bench: Workbench) -> None:
    plan = planned(bench, data__held_out=2)
    kept = [example.sample for example in plan.data.held_out]
    assert len(kept) == 2 and len(plan.data.examples) == len(plan.data.photos) == 3
    assert not {example.sample for example in plan.data.examples} & set(kept)
    said = describe(plan, sizes=False)
    assert f"\n  held out, never trained on: 2 of 5 photos: {', '.join(kept)}" in said and "data 3 images: " in said


def test_a_folder_of_held_out_photos_is_never_trained_on(bench: Workbench, tmp_path: Path) -> None:
    """It may lie within the source, and has captions of its own."""
    photos = shutil.copytree(PHOTOS, tmp_path / "photos")
    (photos / "later").mkdir()
    for name in ("00", "01"):
        (photos / f"{name}.jpg").rename(photos / "later" / f"{name}.jpg")
        (photos / f"{name}.txt").rename(photos / "later" / f"{name}.txt")
    sources = [{"path": str(photos), "held_out": str(photos / "later"), "repeats": 2}]
    plan = planned(bench, data__sources=sources, validation__loss_every_steps=5)
    assert [example.sample for example in plan.data.held_out] == ["0.held_out/00.jpg", "0.held_out/01.jpg"]
    assert all(example.photo.caption for example in plan.data.held_out)
    assert {example.sample for example in plan.data.examples} == {f"0/{name}.jpg" for name in ("02", "03", "04")}
    said = describe(plan, sizes=False)
    assert "\n  held out, never trained on: 2 of 5 photos: 0.held_out/00.jpg, 0.held_out/01.jpg" in said
    assert "loss at fixed draws of 2 held-out and 2 trained photos" in said
    shutil.copy(photos / "later" / "00.jpg", photos / "copy.jpg")
    with pytest.raises(UserError, match=r"1 photo both trained and held out.*\n  .*copy.jpg = .*later/00.jpg$"):
        planned(bench, data__sources=sources)


@pytest.mark.parametrize(
    ("more", "data", "said"),
    [
        ({"regularisation": True}, {}, "regularisation images are never held out"),
        ({}, {"data__held_out": 2}, "data.held_out and a source's own held_out are both set; leave one out"),
    ],
)
def test_what_a_folder_of_held_out_photos_does_not_go_with(bench: Workbench, more: dict, data: dict, said: str) -> None:
    sources = [{"path": str(PHOTOS)}, {"path": str(PHOTOS), "held_out": "later"} | more]
    with pytest.raises(UserError, match=said):
        planned(bench, data__sources=sources, **data)


@pytest.mark.parametrize("held_out", [0, 1, 3, 4])
def test_too_few_held_out_photos_to_tell_by_are_warned_of(bench: Workbench, held_out: int) -> None:
    said = describe(planned(bench, data__held_out=held_out, validation__loss_every_steps=5), sizes=False)
    assert ("warning: no photo is held out" in said) == (held_out == 0)
    assert ("warning: the held-out loss of one photo decides nothing" in said) == (held_out in (1, 3))
