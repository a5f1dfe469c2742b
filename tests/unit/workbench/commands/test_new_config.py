"""What a first config takes from captions and names."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit

from tests.harness import by_photo
from trainer.config.reading import CONFIG_FOLDER
from trainer.config.tables import CheckpointTable
from trainer.data.held_out import split
from trainer.plan.run_plan import Length
from workbench.commands import new_config
from workbench.pages.diagnosis import judge


@pytest.mark.parametrize(
    ("captions", "phrase"),
    [
        (["a photo of sks plush bear on a rock", "a photo of sks plush bear on a road"], "sks plush bear"),
        (["zwx candle with a lid, in the grass", "A photo of ZWX candle with a lid"], "zwx candle"),
        (["an automobile, ink style", "a guitar, ink style"], "ink style"),
        (["a photo of a dog", "a photo of a cat"], ""),
        (["zib asleep", *["zib jumps"] * 8, "a red balloon"], "zib"),
        (["zib asleep", *["zib jumps"] * 7, "a red balloon", "a beach"], ""),
        (["Zib"], "Zib"),
        (["a photo of sks plush bear sitting on a rock"], ""),
        ([], ""),
    ],
)
def test_the_phrase_of_nearly_all_captions_is_found(captions: list[str], phrase: str) -> None:
    assert new_config.common_phrase(captions) == phrase


def test_prompts_are_captions_that_hold_the_trigger() -> None:
    captions = ["sks bear on a rock", "on a road", "a beach with a SKS bear"]
    assert new_config.prompts(captions, "sks bear") == ["sks bear on a rock", "sks bear, on a road"]
    assert new_config.prompts(["a rock"], "") == ["a rock"]
    assert new_config.prompts([], "my bear") == ["my bear"]


@pytest.mark.parametrize(
    ("photos", "name"),
    [
        ("data/My Photos/", "My_Photos"), ("/photos/10_sks dog", "sks_dog"), ("hf:someone/bears", "bears"),
        ("photos.v2", "photos"),
        ("shards-{000..003}.tar", "shards-_000_003"), ("/", "adapter"), ("äöü", "adapter"), ("2024", "2024"),
    ],
)  # fmt: skip
def test_a_run_is_named_after_its_folder(photos: str, name: str) -> None:
    assert new_config._name(photos) == name


@pytest.mark.parametrize("photos", [1, 7, 20, 26, 200])
def test_a_checkpoint_comes_at_least_every_fifth_of_the_run(photos: int) -> None:
    data = SimpleNamespace(photos=[SimpleNamespace(repeats=1)] * photos, held_out=())
    for given in (set(), {"checkpoint.every_steps"}):
        document = tomlkit.parse("[run]\n[validation]\n")
        new_config._set_length(document, data, Length(1, photos, 1), given)
        written = document.unwrap()
        every = written.get("checkpoint", {}).get("every_steps", CheckpointTable().every_steps)
        assert given or 0 < every <= written["run"]["max_steps"] / 5
        assert not given or "checkpoint" not in written
        assert written["export"]["every_steps"] == written["run"]["max_steps"] // 5
    document = tomlkit.parse("[run]\nmax_steps = 50\n[export]\nevery_steps = 9\n[validation]\nevery_steps = 8\n")
    assert new_config._override(document, ["export.every_epochs=2"]) == {"export.every_epochs"}
    new_config._set_length(document, data, Length(1, photos, 50), {"run.max_steps", "export.every_epochs"})
    assert document.unwrap()["export"] == {"every_epochs": 2}


def first_config(photos: Sequence[Any]) -> dict[str, Any]:
    config: Any = SimpleNamespace(
        run=SimpleNamespace(name="a"),
        model=SimpleNamespace(path="m"),
        data=SimpleNamespace(sources=[SimpleNamespace(trigger="")]),
    )
    named: Any = SimpleNamespace(config=lambda name: {})
    preset = CONFIG_FOLDER / "sdxl_12gb.toml"
    return new_config._filled(preset, photos="p", config=config, named=named, scanned=photos).unwrap()


@pytest.mark.parametrize("count", [19, 20, 24, 39, 40, 60])
def test_the_verdict_can_tell_by_the_photos_that_are_held_out(count: int) -> None:
    """Of few photos, too. A photo that is there twice is one."""
    source = SimpleNamespace(regularisation=False, is_held_out=False)
    photos: Any = [SimpleNamespace(caption="", sha256=f"{index:064x}", source=source) for index in (*range(count), 0)]
    held_out = first_config(photos)["data"].get("held_out", 0)
    assert held_out == {19: 0, 60: 6}.get(count, 4)
    _, apart = split(photos[:-1], held_out)
    rows = [
        {
            "step": step,
            "images": step,
            "lr": 1e-4,
            "held_out_loss": loss,
            "held_out_photos": len(apart),
            "weight_change": 0.1,
            "held_out_by_photo": by_photo(loss, step, len(apart) or 1),
        }
        for step, loss in ((1, 1.0), (50, 0.97), (100, 0.95))
    ]
    assert not held_out or judge(rows).kind == "learned"


@pytest.mark.parametrize(
    ("trigger", "said"),
    [("blue toy bear", 'trigger "blue toy bear": name it in your prompts; a caption without it gets it'),
     ("", "no trigger: no words are in nearly all captions; name the subject in your prompts as the captions do")],
)  # fmt: skip
def test_the_trigger_that_new_found_is_said(trigger: str, said: str) -> None:
    tree = {"path": "photos"} | ({"trigger": trigger} if trigger else {})
    config = new_config.configs.parse(new_config._minimal("bear", "photos", "m") | {"data": {"sources": [tree]}})
    assert new_config.trigger_line(config) == said
