"""Captions from their files to the steps: what varies by draw, and what people are told of it."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from tests.harness import PHOTOS, Workbench, built, metrics_of
from tests.unit.data.cache.test_fill import entries_of
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.data.cache.fill import text_key
from trainer.data.cache.texts import TOGETHER
from trainer.engine import encoding
from workbench.commands import main as cli
from workbench.commands.launch import train
from workbench.summary.plan import describe

EVERY_KEY = {
    "caption_dropout": 0.2, "caption_lines": True, "wildcards": True, "separator": ",", "keep": 1, "tag_dropout": 0.3,
    "shuffle": True, "prefix": "a photo of", "suffix": ", outside", "trigger": "sks plush bear",
}  # fmt: skip

VARIANTS = {"data__caption_variants": 8}  # as by default, where nothing varies
LONG = ", ".join(f"tag {i}" for i in range(30))  # 90 tokens and more


def written(bench: Workbench, caption: str) -> dict[str, Any]:
    """A source: the example photos, each with this caption."""
    folder = bench.tmp / "photos"
    shutil.copytree(PHOTOS, folder, dirs_exist_ok=True)
    for file in folder.glob("*.txt"):
        file.write_text(caption)
    return {"path": str(folder)}


def tree(bench: Workbench, out: str, source: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 5, "adapter__targets": ["*attn2.to_v"],
            "data__sources": [source], "data__caption_variants": 3, "data__cache_dir": str(bench.tmp / "cache"),
        } | overrides
    )  # fmt: skip


@pytest.mark.slow
def test_captions_and_prompts_of_differing_chunks_go_together(bench: Workbench) -> None:
    """Captions of one chunk and of several in one batch; a prompt of three beside an empty negative one."""
    source = written(bench, f"bear, {{sun|rain}}, {LONG}\nplush, {{red|blue}} fur, grass") | EVERY_KEY
    more = {"data__clip_chunks": 3, "validation__every_steps": 2, "validation__steps": 1, "run__max_steps": 2}
    more["validation__prompts"] = [f"{LONG}, {LONG}, {LONG}"]
    train(configs.parse(tree(bench, "out", source, **more)), resume_from=None)
    assert all(entry["loss"] > 0 for entry in metrics_of(bench.tmp / "out"))
    assert (bench.tmp / "out" / "samples" / "step-00000002" / "00.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_every_step_sees_forms_of_its_captions(bench: Workbench, cached: bool) -> None:
    source = written(bench, "bear, {sun|rain}, sea, sand") | EVERY_KEY
    config = configs.parse(tree(bench, "out", source, data__cache_text=cached))
    with built(config) as run:
        updates, seen = run.updates(), set()
        for _ in range(12):
            for micro_batch in next(updates):
                batch = run.reader[micro_batch]
                for occurrence, caption in zip(micro_batch, batch.captions, strict=True):
                    assert caption in ("", *run.reader.examples[occurrence.sample].captions)
                    seen.add(caption)
        assert len(seen) > 4 and "" in seen
        examples = run.plan.data.examples
        variants = {text for example in examples for text in example.captions}
        assert all("sks plush bear" in text for text in variants) and all(
            len(e.captions) == 3 for e in run.plan.data.examples
        )
        texts = len(entries_of(bench.tmp / "cache")) - len(run.plan.data.examples)
        assert texts == (len(variants | {""}) if cached else 0), "equal variants are kept once"


@pytest.mark.slow
def test_a_changed_caption_key_is_another_run(bench: Workbench) -> None:
    source = written(bench, "bear, sun, sea") | {"shuffle": True}
    train(configs.parse(tree(bench, "out", source, run__stop_after=1)), resume_from=None)
    changes = {"shuffle": False, "keep": 1, "tag_dropout": 0.5, "trigger": "sks", "prefix": "a", "caption_dropout": 0.5}
    for key, value in changes.items():
        other = tree(bench, "out", source | {key: value}, data__caption_variants=8 if key == "shuffle" else 3)
        with pytest.raises(UserError, match=rf"data\.sources\.0\.{key}"):
            train(configs.parse(other), resume_from="auto")
    with pytest.raises(UserError, match=r"data\.caption_variants: 3 -> 4"):
        train(configs.parse(tree(bench, "out", source, data__caption_variants=4)), resume_from="auto")


@pytest.mark.slow
def test_more_chunks_reach_the_denoiser_and_are_kept_apart(bench: Workbench) -> None:
    """The end of a long caption counts only with them; entries of one chunk are those of runs without the key."""
    keys = set()
    for chunks in (1, 2):
        sequences = []
        for end in ("sun", "rain"):
            config = configs.parse(tree(bench, "out", written(bench, f"{LONG}, {end}"), data__clip_chunks=chunks, **VARIANTS))
            with built(config) as run:
                fingerprint = run.reader.text_fingerprint
                caption = run.plan.data.examples[0].captions[0]
                keys.add(text_key(caption, fingerprint=fingerprint))
                sequences.append(run.reader.conditioning([caption]).sequence)
                assert fingerprint.endswith(f"{{'tokenizer': (2, {75 * chunks + 2}), 'tokenizer_2': (2, {75 * chunks + 2})}}")
        assert sequences[0].shape[1] == 77 * chunks
        assert bool((sequences[0] == sequences[1]).all()) == (chunks == 1)
    assert len(keys) == 4


@pytest.mark.slow
def test_weights_reach_the_denoiser_and_are_kept_apart(bench: Workbench) -> None:
    """Live and cached alike; without the key brackets are words, and said to be."""
    source, live = written(bench, "a (bear:1.4) on grass"), {}
    for weighted in (False, True):
        for cache_text in (True, False):
            keys = {"data__weighted_captions": weighted, "data__cache_text": cache_text, **VARIANTS}
            with built(configs.parse(tree(bench, "out", source, **keys))) as run:
                caption = run.plan.data.examples[0].captions[0]
                encode = run.reader.conditioning if cache_text else run.components.encode_prompts
                live[weighted, cache_text] = encode([caption]).sequence.detach().clone()
                said = describe(run.plan, sizes=False)
                assert ("captions with weights as (word:1.2), which are trained as words" in said) == (not weighted)
    assert all(torch.equal(live[weighted, True], live[weighted, False]) for weighted in (False, True))
    assert not torch.equal(live[False, True], live[True, True])


@pytest.mark.slow
def test_what_people_are_told(bench: Workbench, capfd: pytest.CaptureFixture[str]) -> None:
    source = written(bench, f"a bear, {LONG}") | {"trigger": "sks"}
    folder = bench.tmp / "photos"
    (folder / "00.txt").unlink()
    (folder / "01.txt").write_text(" ")
    given = tree(bench, "out", source, **VARIANTS, validation__prompts=["a photo of a cat", "a bear", "sks bear"])
    given["validation"]["every_steps"] = 9
    config = str(bench.write(given))
    assert cli.main(["--config", config, "--plan"]) == 0
    planned = capfd.readouterr().out
    assert "the prompt 'a photo of a cat' shares no word with any caption or trigger" in planned
    assert "the prompt 'a bear' has no trigger (sks)" in planned and "'sks bear'" not in planned
    with built(configs.parse(given)):
        told = capfd.readouterr().out
    for line in planned.splitlines():
        if "warning: " in line:
            assert line in told
    assert "captions of 5 photos: 1 missing, 0 empty, 3 truncated by text_encoder, 3 truncated by text_encoder_2" in told
    assert "  missing: 0/00.jpg\n  truncated by text_encoder: 0/02.jpg, 0/03.jpg, 0/04.jpg\n" in told
    assert "missing or empty" not in told, "one count of blank captions"


@pytest.mark.slow
def test_adapter_files_say_tags_and_triggers(bench: Workbench) -> None:
    source = written(bench, "bear, sun") | {"trigger": "sks", "shuffle": True, "repeats": 2}
    train(configs.parse(tree(bench, "out", source, run__max_steps=1)), resume_from=None)
    about = TensorFile(bench.tmp / "out" / "adapters" / "bear_comfyui.safetensors").metadata
    assert about["modelspec.trigger_phrase"] == "sks"
    assert json.loads(about["ss_tag_frequency"]) == {"captions": {"sks": 10, "bear": 10, "sun": 10}}


@pytest.mark.slow
def test_an_entry_of_chunks_does_not_depend_on_its_neighbours(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short caption beside a long one is repeated: so captions are encoded one by one where they may have chunks."""
    together, encode = [], encoding.one_after_another

    def one_after_another(*arguments: Any, **settings: Any) -> Any:
        together.append(settings["together"])
        return encode(*arguments, **settings)

    monkeypatch.setattr(encoding, "one_after_another", one_after_another)
    source = written(bench, f"a bear\n{LONG}") | {"caption_lines": True}
    for chunks, most in ((1, TOGETHER), (2, 1)):
        with built(configs.parse(tree(bench, "out", source, data__clip_chunks=chunks, **VARIANTS))) as run:
            assert [run.reader.conditioning([text]).sequence.shape[1] for text in ("a bear", LONG)] == [77, 77 * chunks]
        assert set(together) == {most}
        together.clear()
