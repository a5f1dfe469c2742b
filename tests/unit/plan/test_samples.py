"""Samples that are asked for: their sizes, and the pictures that belong to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.unit.data.captions.test_captions import SOURCE, example
from trainer.base.errors import UserError
from trainer.config import SampleTable
from trainer.data.examples import Example
from trainer.plan.samples import check_sizes, prompt_examples, references


@pytest.mark.parametrize(
    ("size", "said"), [((1024, 768), ""), ((1024, 764), "use 1024x768"), ((1001, 1020), "use 1000x1024"), ((3, 8), "use 8x8")]
)
def test_a_size_that_the_model_does_not_draw_is_refused_with_the_nearest(size: tuple[int, int], said: str) -> None:
    requests = [SimpleNamespace(width=64, height=64), SimpleNamespace(width=size[0], height=size[1])]
    if not said:
        check_sizes(requests, 8)
        return
    with pytest.raises(UserError, match=f"validation sample 1: {size[0]}x{size[1]} is not a multiple of 8; {said}"):
        check_sizes(requests, 8)


def test_what_no_pipeline_takes_as_a_reference_is_refused_by_its_key(tmp_path: Path) -> None:
    good, narrow, broken = (str(tmp_path / name) for name in ("good.png", "narrow.png", "broken.png"))
    Image.new("RGB", (64, 80)).save(good)
    Image.new("RGB", (640, 64)).save(narrow)
    Path(broken).write_bytes(b"x")
    assert [image.size for image in references([good, good], "key")] == [(64, 80)] * 2
    for path, said in ((narrow, "640 x 64 pixels; a reference has"), (broken, "give an image file"), ("gone.png", "No such")):
        with pytest.raises(UserError, match=rf"key\[1\] = .*{said}"):
            references([good, path], "key")


def test_a_sample_finds_its_pictures_in_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    sample = SampleTable(prompt="a", references=("~/a.png",), truth="~/b.png")
    assert (sample.references, sample.truth) == (("/home/someone/a.png",), "/home/someone/b.png")


def test_prompts_out_of_captions_are_as_they_are_trained_on() -> None:
    """Two that differ, of the subject's photos, with what is put before them."""

    def texts(examples: list[Example]) -> list[str]:
        return [each.captions[0] for each in prompt_examples(examples)]

    told = [example("a.jpg", "a log"), example("b.jpg", ""), example("c.jpg", "grass"), example("d.jpg", "a wall")]
    assert texts(told) == ["a log", "grass"]
    assert texts([example("a.jpg", "a log"), example("b.jpg", "a log")]) == ["a log"]
    assert texts([example("a.jpg", "")]) == []
    prior = example("p.jpg", "a dog", source=replace(SOURCE, regularisation=True))
    assert texts([prior, example("b.jpg", "a log")]) == ["a log"]
