"""A key that is set and that the family does not read is refused; what a run writes as its config is not."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import config as configs
from trainer.choices import FAMILY_KEYS, chosen, refuse_unread, refuse_unread_by_model
from trainer.errors import UserError
from trainer.models import FAMILIES

SET = {
    "model.prediction": "v",
    "model.zero_terminal_snr": False,
    "objective.timesteps": "uniform",
    "objective.shift": 3.0,
    "objective.logit_mean": 0.5,
    "objective.logit_std": 2.0,
    "objective.min_snr_gamma": 5.0,
    "objective.guidance": 2.0,
    "data.text_length": 64,
    "data.clip_chunks": 2,
    "validation.samples.*.negative": "blurred",
}


def config(family: str, key: str = "", value: object = None, more: dict[str, object] | None = None) -> configs.Config:
    tree = {
        "run": {"name": "a", "output_dir": "out", "max_steps": 1},
        "model": {"family": family, "path": "model"},
        "data": {"sources": [{"path": "photos"}]},
        "validation": {"samples": [{"prompt": "a"}]},
    }
    for path, chosen_value in ((more or {}) | ({key: value} if key else {})).items():
        *tables, leaf = path.split(".")
        node = tree
        for table in tables:
            node = node[0] if table in ("*", "0") else node.setdefault(table, {})
        node[leaf] = chosen_value
    return configs.parse(tree)


def test_every_such_key_is_one_of_the_config() -> None:
    assert SET.keys() == FAMILY_KEYS.keys() <= configs.known_keys().keys()
    for family in FAMILIES.values():
        assert set(family.reads) <= FAMILY_KEYS.keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", SET)
def test_a_key_is_read_or_refused(family: str, key: str) -> None:
    given = config(family, key, SET[key])
    if key in FAMILIES[family].reads:
        refuse_unread(given, FAMILIES[family])
        assert "*" in key or chosen(given, FAMILIES[family])[key.rpartition(".")[2]] == SET[key]
    else:
        shown = f"{key.replace('*', '0')} = {SET[key]!r} has no effect on {family}; leave it out (only "
        shown += f"{FAMILY_KEYS[key]} read it)"
        with pytest.raises(UserError, match=f"^{re.escape(shown)}$"):
            refuse_unread(given, FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_that_are_written_out_are_accepted(family: str) -> None:
    """Every default stands in the config.toml of a run."""
    written = configs.parse(tomllib.loads(configs.dumps(config(family))))
    refuse_unread(written, FAMILIES[family])
    assert {"logit_mean", "guidance"} <= written.objective.model_fields_set


@pytest.mark.parametrize(("key", "value"), [("logit_mean", 0.5), ("logit_std", 2.0)])
def test_the_logit_normal_is_refused_with_uniform_timesteps(key: str, value: float) -> None:
    given = config("flux", f"objective.{key}", value)
    for timesteps, refused in (("auto", False), ("logit_normal", False), ("uniform", True)):
        objective = given.objective.model_copy(update={"timesteps": timesteps})
        tried = given.model_copy(update={"objective": objective})
        if not refused:
            refuse_unread(tried, FAMILIES["flux"])
            continue
        shown = f"objective.{key} = {value} has no effect with uniform timesteps; leave it out, or set "
        with pytest.raises(UserError, match=f"^{re.escape(shown)}objective.timesteps = 'logit_normal'$"):
            refuse_unread(tried, FAMILIES["flux"])
    refuse_unread(config("flux", "objective.timesteps", "uniform"), FAMILIES["flux"])


@pytest.mark.parametrize(("embeds", "guidance"), [(True, 1.0), (True, 2.0), (False, 1.0), (False, 2.0)])
def test_guidance_is_refused_where_the_model_has_no_embedding_of_it(embeds: bool, guidance: float) -> None:
    source: Any = SimpleNamespace(family=FAMILIES["flux"], config=lambda name: {"guidance_embeds": embeds})
    given = config("flux", "objective.guidance", guidance)
    if embeds or guidance == 1.0:
        refuse_unread_by_model(given, source)
        return
    shown = "objective.guidance = 2.0 has no effect on this model; leave it out (only models with a guidance embedding "
    of_a_sample = config("flux", "validation.samples.*.guidance", 3.0)
    with pytest.raises(UserError, match=r"^validation\.samples\.0\.guidance = 3\.0 has no effect on this model"):
        refuse_unread_by_model(of_a_sample, source)
    with pytest.raises(UserError, match=f"^{re.escape(shown)}read it\\)$"):
        refuse_unread_by_model(given, source)


# (what is set, beside what it has no effect, beside what it has one)
BESIDE = [
    ("precision.loss_scale", 1024.0, {"precision.compute": "bf16"}, {"precision.compute": "fp16"}),
    ("precision.loss_scale_growth_interval", 9, {}, {"model.components.unet.compute": "fp16"}),
    ("step.max_skipped", 3, {}, {"step.non_finite": "skip"}),
    ("export.dora_scale", "magnitude", {"adapter.type": "lora"}, {"adapter.type": "dora"}),
    ("export.dora_scale", "magnitude", {"adapter.type": "dora", "export.formats": ["diffusers"]}, {"adapter.type": "dora"}),
    ("optimizer.min_8bit_size", 16, {}, {"optimizer.name": "adamw8bit"}),
    ("model.components.vae.exclude", ["*"], {"model.components.vae.dtype": "bf16"}, {"model.components.vae.dtype": "int8"}),
    ("schedule.end", 0.1, {"schedule.name": "constant"}, {"schedule.name": "rex"}),
    ("schedule.cycles", 3, {"schedule.name": "cosine"}, {"schedule.name": "cosine_restarts"}),
    ("schedule.power", 3.0, {}, {"schedule.name": "polynomial"}),
    ("schedule.decay", 0.5, {"schedule.name": "linear"}, {"schedule.name": "wsd"}),
    ("data.short_batches", "merge", {"data.batch_size": 1}, {"data.batch_size": 2}),
    ("data.flip", True, {"data.sources.0.flip": False}, {}),
    ("data.caption_dropout", 0.5, {"data.sources.0.caption_dropout": 0.0}, {"data.sources.0.flip": False}),
    ("data.sources.0.caption_column", "said", {"data.sources.0.captions": "folder"}, {"data.sources.0.captions": "auto"}),
    ("data.sources.0.keep", 2, {}, {"data.sources.0.shuffle": True}),
    ("data.sources.0.separator", "|", {}, {"data.sources.0.trigger": "sks"}),
    ("data.sources.0.separator", "|", {"data.sources.0.wildcards": True}, {"data.sources.0.tag_dropout": 0.1}),
    ("data.caption_variants", 4, {"data.sources.0.trigger": "sks"}, {"data.sources.0.wildcards": True}),
    ("data.masks", "files", {"data.sources.0.masks": "alpha"}, {}),
    ("data.unmasked_weight", 0.5, {}, {"data.sources.0.masks": "alpha"}),
    ("data.sources.0.unmasked_weight", 0.5, {}, {"data.masks": "files"}),
    ("data.image_variants", 8, {}, {"data.colour_jitter": 0.1}),
    ("validation.samples.0.negative", "fur", {"validation.samples.0.guidance": 1.0}, {"validation.samples.0.guidance": 4.0}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "beside", "other"), BESIDE)
def test_a_key_that_another_choice_makes_idle_is_refused(key: str, value: object, beside: dict, other: dict) -> None:
    refuse_unread(config("sdxl", more={key: value} | other), FAMILIES["sdxl"])
    with pytest.raises(
        UserError, match=f"^{re.escape(key)}(\\.0)? = .* has no effect (with|without|in|beside|where) .*; leave it out"
    ):
        refuse_unread(config("sdxl", more={key: value} | beside), FAMILIES["sdxl"])


def test_recomputing_is_refused_for_a_family_that_names_no_blocks() -> None:
    given, family = config("sdxl", "memory.gradient_checkpointing", True), FAMILIES["sdxl"]
    refuse_unread(given, family)
    with pytest.raises(
        UserError, match=r"^memory\.gradient_checkpointing = True has no effect on sdxl, which names no blocks"
    ):
        refuse_unread(given, replace(family, blocks=()))


def test_all_mistakes_are_told_at_once() -> None:
    given = config("sdxl", "objective.shift", 3.0)
    given = given.model_copy(update={"data": given.data.model_copy(update={"text_length": 64})})
    with pytest.raises(UserError, match=r"(?s)data\.text_length = 64.*\nobjective\.shift = 3\.0|shift.*\n.*text_length"):
        refuse_unread(given, FAMILIES["sdxl"])
