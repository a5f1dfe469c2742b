"""A key that is set and that the family does not read is refused; what a run writes as its config is not."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.config import ScheduleTable
from trainer.models import FAMILIES
from trainer.models.base import MemoryPart
from trainer.models.variants import Variant
from trainer.optim import SCHEDULES
from trainer.plan.requirements import CFG, FAMILY_KEYS, family_options, refuse_unread, refuse_unread_by_model

SET = {
    "model.prediction": "v",
    "model.allow_distilled": True,
    "model.zero_terminal_snr": False,
    "objective.timesteps": "uniform",
    "objective.shift": 3.0,
    "objective.logit_mean": 0.5,
    "objective.logit_std": 2.0,
    "objective.mode_scale": 0.5,
    "objective.power": 2.0,
    "objective.t_range": (0.1, 0.9),
    "objective.stratified": True,
    "objective.loss": "huber",
    "objective.huber_c": 0.2,
    "objective.huber_schedule": "constant",
    "objective.weighting": "debiased",
    "objective.min_snr_gamma": 5.0,
    "objective.p2_gamma": 0.5,
    "objective.p2_k": 2.0,
    "objective.noise_offset": 0.05,
    "objective.multires_noise_iterations": 6,
    "objective.multires_noise_discount": 0.4,
    "objective.input_perturbation": 0.1,
    "objective.guidance": 2.0,
    "data.text_length": 64,
    "data.clip_chunks": 2,
    "data.weighted_captions": True,
    "data.sources.*.references": "files",
    "validation.samples.*.references": ["a.png"],
    "validation.samples.*.negative": "blurred",
    "validation.samples.*.cfg": 4.0,
}

# What a key needs beside it to be read.
BESIDE_IT = {
    "objective.logit_mean": {"objective.timesteps": "logit_normal"},
    "objective.logit_std": {"objective.timesteps": "logit_normal"},
    "objective.mode_scale": {"objective.timesteps": "mode"},
    "objective.power": {"objective.timesteps": "power"},
    "objective.huber_c": {"objective.loss": "smooth_l1"},
    "objective.huber_schedule": {"objective.loss": "huber"},
    "objective.p2_gamma": {"objective.weighting": "p2"},
    "objective.p2_k": {"objective.weighting": "p2"},
    "objective.multires_noise_discount": {"objective.multires_noise_iterations": 6},
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
    if key in FAMILIES[family].reads:
        with_cfg = {CFG: SET[CFG]} if CFG in FAMILIES[family].reads and key.endswith(".negative") else {}
        given = config(family, key, SET[key], BESIDE_IT.get(key, {}) | with_cfg)
        refuse_unread(given, FAMILIES[family])
        assert "*" in key or family_options(given, FAMILIES[family])[key.rpartition(".")[2]] == SET[key]
    else:
        given = config(family, key, SET[key])
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


# (key of the objective, a value, the timesteps that read it)
OF_TIMESTEPS = [
    ("logit_mean", 0.5, ("logit_normal", "sigmoid")), ("logit_std", 2.0, ("logit_normal", "sigmoid")),
    ("mode_scale", 0.5, ("mode",)), ("power", 2.0, ("power",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "key", "value", "of"),
    [(name, *row) for name, family in FAMILIES.items() for row in OF_TIMESTEPS if f"objective.{row[0]}" in family.reads],
)
def test_the_key_of_one_kind_of_timesteps_is_refused_with_others(family: str, key: str, value: float, of: tuple) -> None:
    chosen_family = FAMILIES[family]
    for timesteps in ("auto", *chosen_family.images.timesteps):
        tried = config(family, f"objective.{key}", value, {"objective.timesteps": timesteps})
        meant = chosen_family.images.timesteps[0] if timesteps == "auto" else timesteps
        if meant in of:
            refuse_unread(tried, chosen_family)
            continue
        shown = f"objective.{key} = {value} has no effect with {meant} timesteps; leave it out, or set "
        with pytest.raises(UserError, match=f"^{re.escape(shown)}objective.timesteps = '{of[0]}'$"):
            refuse_unread(tried, chosen_family)
    refuse_unread(config(family, "objective.timesteps", "uniform"), chosen_family)


@pytest.mark.parametrize(("page", "table"), [("objectives", "objective"), ("optimizers", "schedule")])
def test_a_page_explains_every_key_of_its_table(page: str, table: str) -> None:
    """docs/keys.md has their defaults, out of the schema."""
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    keys = {key.removeprefix(f"{table}.") for key in configs.known_keys() if key.startswith(f"{table}.")}
    named = {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}
    assert keys - named == set()


def test_a_family_refuses_timesteps_of_another_and_says_its_own() -> None:
    shown = "objective.timesteps = 'mode' is not for sdxl; use 'uniform', 'logit_normal', 'power'"
    with pytest.raises(UserError, match=f"^{shown}$"):
        refuse_unread(config("sdxl", "objective.timesteps", "mode"), FAMILIES["sdxl"])


def test_a_list_that_is_not_read_is_refused_as_one() -> None:
    """All its values are one choice."""
    given, deaf = config("flux", "objective.t_range", [0.0, 0.5]), replace(FAMILIES["flux"], reads=())
    with pytest.raises(
        UserError, match=r"^objective\.t_range = \[0\.0, 0\.5\] has no effect on flux; leave it out \(only [^\n]+$"
    ):
        refuse_unread(given, deaf)
    refuse_unread(config("flux", "objective.t_range", [0.0, 1.0]), deaf)


def test_guidance_is_refused_where_the_model_has_no_embedding_of_it() -> None:
    def model(embeds: bool) -> Any:
        config = {"guidance_embeds": embeds}
        return SimpleNamespace(family=FAMILIES["flux"], config=lambda name: config, variant=Variant("dev"))

    for embeds, guidance in ((True, 1.0), (True, 2.0), (False, 1.0)):
        refuse_unread_by_model(config("flux", "objective.guidance", guidance), model(embeds))
    given, source = config("flux", "objective.guidance", 2.0), model(embeds=False)
    shown = "objective.guidance = 2.0 has no effect on this model; leave it out (only models with a guidance embedding "
    of_a_sample = config("flux", "validation.samples.*.guidance", 3.0)
    with pytest.raises(UserError, match=r"^validation\.samples\.0\.guidance = 3\.0 has no effect on this model"):
        refuse_unread_by_model(of_a_sample, source)
    with pytest.raises(UserError, match=f"^{re.escape(shown)}read it\\)$"):
        refuse_unread_by_model(given, source)


def test_the_negative_of_a_flux_is_read_with_cfg_alone_whatever_guidance_it_is_told() -> None:
    def asked(family: str, **sample: object) -> None:
        more = {f"validation.samples.0.{key}": value for key, value in sample.items()}
        refuse_unread(config(family, more=more), FAMILIES[family])

    for guidance in (None, 1.0, 3.5):
        told = {} if guidance is None else {"guidance": guidance}
        asked("flux", negative="fur", cfg=4.0, **told)
        with pytest.raises(
            UserError, match=r"^validation\.samples\.0\.negative = 'fur' has no effect (on flux without cfg|with)"
        ):
            asked("flux", negative="fur", **told)
    for family in ("sdxl", "flux2"):
        with pytest.raises(UserError, match=rf"^validation\.samples\.0\.cfg = 4\.0 has no effect on {family}; leave it out"):
            asked(family, cfg=4.0)
    with pytest.raises(UserError, match="cfg"):
        config("flux", more={"validation.samples.0.cfg": 1.0})


# (what is set, beside what it has no effect, beside what it has one)
BESIDE = [
    ("precision.loss_scale", 1024.0, {"precision.compute": "bf16"}, {"precision.compute": "fp16"}),
    ("step.max_skipped", 3, {}, {"step.non_finite": "skip"}),
    ("export.dora_scale", "magnitude", {"adapter.type": "lora"}, {"adapter.type": "dora"}),
    ("export.dora_scale", "magnitude", {"adapter.type": "dora", "export.formats": ["diffusers"]}, {"adapter.type": "dora"}),
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
    ("objective.huber_c", 0.2, {"objective.loss": "mse"}, {"objective.loss": "huber"}),
    ("objective.huber_schedule", "constant", {}, {"objective.loss": "smooth_l1"}),
    ("objective.min_snr_gamma", 5.0, {"objective.weighting": "none"}, {}),
    ("objective.min_snr_gamma", 5.0, {"objective.weighting": "debiased"}, {"objective.weighting": "soft_min_snr"}),
    ("objective.p2_k", 2.0, {"objective.weighting": "min_snr"}, {"objective.weighting": "p2"}),
    ("objective.p2_gamma", 0.5, {}, {"objective.weighting": "p2"}),
    ("objective.multires_noise_discount", 0.4, {}, {"objective.multires_noise_iterations": 6}),
    ("adapter.init_resize", True, {}, {"adapter.init_from": "a.safetensors"}),
    ("optimizer.magnitude_lr", 1e-3, {"adapter.type": "lora"}, {"adapter.type": "dora"}),
    ("ema.decay", 0.9, {}, {"ema.kind": "constant"}),
    ("data.cache_limit", "1GB", {"data.cache": "memory"}, {}),
    ("validation.samples.0.negative", "fur", {"validation.samples.0.guidance": 1.0}, {"validation.samples.0.guidance": 4.0}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "beside", "other"), BESIDE)
def test_a_key_that_another_choice_makes_idle_is_refused(key: str, value: object, beside: dict, other: dict) -> None:
    refuse_unread(config("sdxl", more={key: value} | other), FAMILIES["sdxl"])
    with pytest.raises(
        UserError, match=f"^{re.escape(key)}(\\.0)? = .* has no effect (with|without|in|beside|where) .*; leave it out"
    ):
        refuse_unread(config("sdxl", more={key: value} | beside), FAMILIES["sdxl"])


REMEDIES = [
    ("step.max_skipped", 3, {}, "with step.non_finite = 'stop'; leave it out, or set step.non_finite = 'skip'"),
    ("objective.p2_k", 2.0, {}, "without objective.weighting; leave it out, or set objective.weighting = 'p2'"),
    ("data.sources.0.keep", 2, {}, "without shuffle or tag_dropout; leave it out, or set one of them"),
    ("adapter.init_resize", True, {}, "without adapter.init_from; leave it out, or set it"),
    ("data.short_batches", "merge", {}, "with data.batch_size = 1; leave it out, or raise data.batch_size above 1"),
    ("model.components.unet.exclude", ["*"], {"model.components.unet.dtype": "bf16"},
     "with dtype = 'bf16'; leave it out, or set dtype = 'fp8_e4m3'"),
    ("export.dora_scale", "magnitude", {"adapter.type": "dora", "export.formats": ["diffusers"]},
     "without 'comfyui' in export.formats; leave it out, or add it there"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "beside", "said"), REMEDIES)
def test_an_idle_key_is_told_with_what_would_make_it_read(key: str, value: object, beside: dict, said: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(f'{key} = {value!r} has no effect {said}')}$"):
        refuse_unread(config("sdxl", more={key: value} | beside), FAMILIES["sdxl"])


def test_a_choice_names_keys_and_values_that_there_are() -> None:
    """What an annotation asks for is a key of its table or of the contract, which may have each of the values."""
    known = dict(configs.fields())
    for key, field in known.items():
        for choice in configs.choices(field):
            for named in choice.keys.split():
                other = known[named if "." in named else f"{key.rpartition('.')[0]}.{named}"]
                taken = TypeAdapter(other.annotation)
                for value in choice.values:
                    taken.validate_python((value,) if isinstance(other.default, tuple) else value)  # else ValidationError


def test_the_keys_of_a_schedule_are_read_with_the_schedules_that_read_them() -> None:
    for key in ScheduleTable.model_fields.keys() & {key for descent in SCHEDULES.values() for key in descent.reads}:
        (choice,) = configs.choices(ScheduleTable.model_fields[key])
        assert set(choice.values) == {name for name, descent in SCHEDULES.items() if key in descent.reads}


@pytest.mark.parametrize(("key", "value"), [("memory.gradient_checkpointing", True), ("step.compile", "blocks")])
def test_what_is_done_with_blocks_is_refused_for_a_family_that_names_none(key: str, value: object) -> None:
    given, family = config("sdxl", key, value), FAMILIES["sdxl"]
    refuse_unread(given, family)
    with pytest.raises(UserError, match=rf"^{re.escape(key)} = {value!r} has no effect on sdxl, which names no blocks"):
        refuse_unread(given, replace(family, memory=MemoryPart()))


def test_all_mistakes_are_told_at_once() -> None:
    given = config("sdxl", "objective.shift", 3.0)
    given = given.model_copy(update={"data": given.data.model_copy(update={"text_length": 64})})
    with pytest.raises(UserError, match=r"(?s)data\.text_length = 64.*\nobjective\.shift = 3\.0|shift.*\n.*text_length"):
        refuse_unread(given, FAMILIES["sdxl"])
