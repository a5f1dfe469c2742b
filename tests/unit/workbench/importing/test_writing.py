"""Configs of other trainers: each number that their program would use is written, or is said to be missing."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from scripts import import_config
from tests import foreign_configs
from tests.harness import ROOT
from trainer import config as configs
from trainer.base.errors import UserError
from workbench.importing.draft import ABSENT, DIFFERS, FILL, SAME, UNKNOWN
from workbench.importing.writing import config_of, draft_of, text_of

# By trainer, what its own program would do with the config of tests/foreign_configs.py, worked out by hand.
EXPECTED: dict[str, dict[str, Any]] = {
    "sd-scripts": {
        "run.name": "my_lora", "run.epochs": 8, "run.seed": 42, "model.family": "sdxl", "data.batch_size": 4,
        "step.accumulation": 2, "adapter.type": "lora", "adapter.rank": 32, "adapter.alpha": 16.0,
        "adapter.rank_dropout": 0.1, "adapter.rules.0.rank": 8, "adapter.rules.0.alpha": 4.0,
        "adapter.rules.1.component": "text_encoder", "adapter.rules.1.lr": 5e-5, "adapter.rules.2.lr": 3e-5,
        "optimizer.name": "adamw8bit", "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.1, "optimizer.betas.1": 0.99,
        "schedule.name": "cosine_restarts", "schedule.cycles": 3, "schedule.warmup": 10,
        "objective.min_snr_gamma": 5.0, "objective.noise_offset": 0.05, "objective.t_range.0": 0.1,
        # A folder's 5 counts here and not there: 5 x 2 appearances. 888 x 888 is the area of 1024 x 768.
        "data.sources.0.repeats": 2, "data.sources.0.resolution": 888, "data.sources.0.caption_dropout": 0.1,
        "data.sources.0.keep": 1, "data.caption_dropout": 0.0, "data.sources.1.regularisation": True,
        "data.sources.1.repeats": 2, "precision.compute": "bf16", "memory.gradient_checkpointing": True,
        "checkpoint.every_steps": 20, "checkpoint.keep_last": 3, "validation.every_steps": 10,
        "validation.samples.0.width": 768, "validation.samples.0.seed": 7, "validation.samples.0.negative": "blurry, ugly",
    },
    "OneTrainer": {
        "run.name": "bear", "run.epochs": 4, "model.family": "sdxl", "adapter.rank": 16, "adapter.alpha": 1.0,
        # Each photo has one of three sizes an epoch there and all of them here; the rate is times the root of 2 x 8.
        "data.resolution.2": 1024, "optimizer.lr": 4e-4, "data.batch_size": 2, "step.accumulation": 8,
        "optimizer.name": "adamw8bit", "optimizer.betas.1": 0.95, "optimizer.weight_decay": 0.02,
        "schedule.warmup": 5, "objective.weighting": "min_snr", "objective.min_snr_gamma": 5.0,
        "adapter.targets.0": "*attentions*", "adapter.rules.0.component": "text_encoder", "adapter.rules.0.lr": 4e-5,
        "model.components.unet.dtype": "fp8_e4m3", "data.sources.0.repeats": 3, "data.sources.0.flip": True,
        "data.sources.0.keep": 1, "data.sources.1.path": "named", "data.sources.1.captions": "filename",
        "data.sources.1.flip": False, "data.caption_dropout": 0.0, "checkpoint.every_minutes": 5.0,
        "checkpoint.every_steps": 0, "step.max_grad_norm": 1.0,
    },
    "ai-toolkit": {
        "run.name": "bear", "run.max_steps": 100, "step.accumulation": 4, "model.family": "flux", "adapter.rank": 8,
        "adapter.alpha": 4.0, "optimizer.lr": 2e-4, "optimizer.weight_decay": 1e-5, "schedule.warmup": 0,
        "data.batch_size": 2, "data.sources.0.repeats": 3, "data.sources.0.resolution.1": 768,
        "data.sources.0.caption_dropout": 0.05, "data.sources.1.caption_dropout": 0.0, "data.sources.0.trigger": "sks",
        "model.components.transformer.dtype": "fp8_e4m3", "model.components.text_encoder_2.dtype": "fp8_e4m3",
        "objective.timesteps": "uniform", "objective.shift": 1.0, "ema.decay": 0.99, "checkpoint.every_steps": 25,
        "validation.every_steps": 50, "validation.samples.0.prompt": "sks on a beach", "validation.samples.0.height": 768,
        "validation.samples.1.width": 512, "validation.samples.1.seed": 9, "validation.samples.0.seed": 42,
    },
    "SimpleTuner": {
        "run.name": "bear", "run.epochs": 4, "model.family": "flux", "adapter.rank": 8, "adapter.alpha": 8.0,
        "adapter.dropout": 0.1, "optimizer.lr": 3e-4, "schedule.name": "polynomial", "schedule.end": 0.1,
        "schedule.warmup": 4, "data.batch_size": 2, "data.sources.0.repeats": 3, "data.sources.0.resolution": 704,
        "data.sources.0.caption_lines": True, "data.caption_dropout": 0.1, "objective.shift": "auto",
        "objective.timesteps": "logit_normal", "objective.guidance": 1.0, "model.components.transformer.dtype": "int8",
        "validation.samples.0.height": 768, "step.max_grad_norm": 2.0,
    },
}  # fmt: skip


def imported(file: Path, *overrides: str, data: tuple[Path, ...] = ()) -> tuple[Mapping[str, Any], Any]:
    draft = draft_of(file, data=data, overrides=overrides)
    config = config_of(draft, file)
    text = text_of(draft, file)
    assert configs.parse(tomllib.loads(text)) == config  # what is written is what was checked
    return configs.flatten(configs.tree(config)), draft


@pytest.mark.parametrize("trainer", EXPECTED)
def test_the_numbers_are_those_of_the_other_program(tmp_path: Path, trainer: str) -> None:
    found, draft = imported(foreign_configs.write(tmp_path, trainer))
    assert draft.trainer == trainer
    missing = {
        key: (found.get(key), value)
        for key, value in EXPECTED[trainer].items()
        if not (math.isclose(found[key], value) if isinstance(value, float) else found.get(key) == value)
    }
    assert not missing


@pytest.mark.parametrize("trainer", EXPECTED)
def test_every_line_says_where_it_comes_from(tmp_path: Path, trainer: str) -> None:
    file = foreign_configs.write(tmp_path, trainer)
    draft = draft_of(file)
    config_of(draft, file)
    for line in text_of(draft, file).splitlines():
        assert not line or line.startswith(("#", "[")) or line.partition("  # ")[2], line


def test_what_has_no_equivalent_and_what_is_not_known_is_named(tmp_path: Path) -> None:
    _, draft = imported(foreign_configs.write(tmp_path, "sd-scripts"))
    assert any("clip_skip = 2: the last but one layer is read" in note for note in draft.notes[SAME])
    assert draft.notes[UNKNOWN] == ["no_such_option = 3"]
    assert any("regularisation photos are repeated there" in note for note in draft.notes[DIFFERS])
    _, draft = imported(foreign_configs.write(tmp_path, "ai-toolkit"))
    # Flux is drawn without a negative prompt.
    assert any("negative has no effect" in note for note in draft.notes[ABSENT])


def test_set_stands_in_place_of_what_the_file_says(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    found, draft = imported(file, "adapter.rank=2", "data.sources.1.path=there", "run.epochs=3", "validation.prompts=['a']")
    assert found["adapter.rank"] == 2 and draft.keys["adapter.rank"][1] == "as --set said"
    assert found["data.sources.1.path"] == "there" and found["run.epochs"] == 3 and "run.max_steps" not in found
    assert found["validation.prompts.0"] == "a" and "validation.samples.0.prompt" not in found
    with pytest.raises(UserError, match=r"--set data.sources.2.path: there are 2 sources"):
        draft_of(file, overrides=["data.sources.2.path=x"])


# By trainer: what is changed in its config, and what it is here: LyCORIS' rank, factor, pairs and scale.
LYCORIS = {"algo": "lokr", "linear_dim": 6, "linear_alpha": 2, "factor": 16, "multiplier": 1.0,
           "apply_preset": {"target_module": ["Attention", "FeedForward"]}}  # fmt: skip
NETWORK, ARGUMENT = "{type: lora, linear: 8, linear_alpha: 4}", '"rank_dropout=0.1"'
LOKR: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sd-scripts": (
        ARGUMENT, '"algo=lokr" "factor=8" "decompose_both=True" "module_dropout=0.1"',
        {"adapter.rank": 32, "adapter.alpha": 16.0, "adapter.factor": 8, "adapter.decompose": "both",
         "adapter.rules.0.rank": 8},
    ),
    "sd-scripts, whole": (  # the rank is the default's, which has no effect
        ARGUMENT, '"algo=lokr" "full_matrix=True"',
        {"adapter.factor": -1, "adapter.decompose": "none", "adapter.rank": 16, "adapter.rules.0.rank": None},
    ),
    "OneTrainer": (
        '"training_method"', '"peft_type": "LOKR", "lokr_dim": 12, "lora_alpha": 3.0, "lokr_decompose_factor": 4, '
        '"lokr_decompose_both": true, "lokr_vec_trick": true, "training_method"',
        {"adapter.rank": 12, "adapter.alpha": 3.0, "adapter.factor": 4, "adapter.decompose": "both"},
    ),
    "ai-toolkit": (
        NETWORK, "{type: lokr, linear: 8, linear_alpha: 4, lokr_factor: 8}",
        {"adapter.rank": 8, "adapter.alpha": 4.0, "adapter.factor": 8, "adapter.decompose": "w2"},
    ),
    "ai-toolkit, whole": (
        NETWORK, "{type: lokr, lokr_full_rank: true, lokr_factor: 8}",
        {"adapter.rank": 16, "adapter.factor": 8, "adapter.decompose": "none"},
    ),
    "SimpleTuner": (
        '"--lora_rank": 8', '"--lora_type": "lycoris", "--lycoris_config": "config/lycoris.json"',
        {"adapter.rank": 6, "adapter.alpha": 2.0, "adapter.factor": 16, "adapter.targets": "attention+mlp"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOKR)
def test_a_lokr_of_every_program_is_one_here(tmp_path: Path, case: str) -> None:
    before, after, expected = LOKR[case]
    file = foreign_configs.write(tmp_path, case.partition(",")[0])
    (tmp_path / "lycoris.json").write_text(json.dumps(LYCORIS))
    assert before in (text := file.read_text())
    file.write_text(text := text.replace(before, after).replace("networks.lora", "lycoris.kohya"))
    found, draft = imported(file)
    assert found["adapter.type"] == "lokr" and {key: found.get(key) for key in expected} == expected
    notes = [note for each in draft.notes.values() for note in each]
    assert any("module_dropout" in note for note in notes) == ("module_dropout" in text)


@pytest.mark.parametrize(
    ("trainer", "before", "after", "why"),
    [
        ("sd-scripts", '"conv_dim=8"', '"algo=lokr" "use_tucker=True"', "a LoKr with a Tucker core"),
        ("sd-scripts", '"conv_dim=8"', '"algo=lokr" "dora_wd=True"', "a DoRA over a LoKr"),
        ("sd-scripts", '"conv_dim=8"', '"algo=boft"', "take dora, which learns direction and length of rows"),
        ("sd-scripts", '"conv_dim=8"', '"algo=ia3"', "take lora with rank = 1"),
        ("OneTrainer", '"training_method"', '"peft_type": "LOHA", "training_method"', "take lokr, or lora of a higher rank"),
        ("OneTrainer", '"training_method"', '"peft_type": "LOKR", "lokr_dim": 4, "lokr_weight_decompose": true, '
         '"training_method"', "a DoRA over a LoKr"),
        ("SimpleTuner", '"--lora_rank": 8', '"--lora_type": "lycoris", "--lycoris_config": "x.json"', "give it as --data"),
    ],
)  # fmt: skip
def test_what_lycoris_has_beside_that_is_refused_with_what_to_take(
    tmp_path: Path, trainer: str, before: str, after: str, why: str
) -> None:
    file = foreign_configs.write(tmp_path, trainer)
    file.write_text(file.read_text().replace(before, after, 1))
    with pytest.raises(UserError, match="--set adapter.type=") as error:
        draft_of(file)
    assert why in str(error.value)


REFUSED = {
    "sd-scripts": ('network_args "conv_dim=8"', 'network_args "algo=loha"', "adapter.type"),
    "OneTrainer": ("STABLE_DIFFUSION_XL_10_BASE", "STABLE_DIFFUSION_XL_10_BASE_INPAINTING", "model.family"),
    "ai-toolkit": ("arch: flux", "arch: wan21", "model.family"),
    "SimpleTuner": ('"--lora_rank": 8', '"--lora_type": "lycoris"', "adapter.type"),
}


@pytest.mark.parametrize("trainer", REFUSED)
def test_what_would_train_something_else_is_refused_until_it_is_chosen(tmp_path: Path, capsys, monkeypatch, trainer) -> None:
    monkeypatch.chdir(tmp_path)
    before, after, key = REFUSED[trainer]
    file = foreign_configs.write(tmp_path, trainer)
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    there = {*tmp_path.iterdir()}
    assert import_config.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and f"--set {key}=" in said and {*tmp_path.iterdir()} == there
    chosen = {"adapter.type": "lora", "model.family": EXPECTED[trainer]["model.family"]}[key]
    assert import_config.main([str(file), "--set", f"{key}={chosen}", "--out", "made.toml"]) == 0


NOBODYS = {
    "a.yaml": "model: {a: 1}\nlearning_rate: 1e-4\n", "a.json": '{"train_folder": "x"}', "a.toml": "[a]\nb = 1\n",
    "a.sh": "python train.py --config x\n", "broken.json": "{", "broken.yaml": "a: [", "broken.toml": "a = ",
    "list.json": "[]",
    "unset.sh": "accelerate launch sdxl_train_network.py --network_dim=$DIM\n",
    "many.json": '{"pretrained_model_name_or_path": "m", "learning_rate": 1e-4}',
    "data.toml": "[general]\n[[datasets]]\n", "ours.toml": "[run]\nname = 'a'\n[model]\nfamily = 'b'\n",
}  # fmt: skip


def test_a_shells_variables_stand_for_what_the_file_says(tmp_path: Path) -> None:
    lines = ["MODEL='a b.safetensors'", "export DIM=8", "accelerate launch sdxl_train_network.py \\",
             '  --pretrained_model_name_or_path="$MODEL" --network_dim=${DIM} --network_alpha=4 \\',
             "  --train_data_dir=photos --output_dir=out --output_name=x --network_module=networks.lora"]  # fmt: skip
    (tmp_path / "train.sh").write_text("\n".join(lines))
    draft = draft_of(tmp_path / "train.sh")
    assert (draft.value("model.path"), draft.value("adapter.rank")) == ("a b.safetensors", 8)


@pytest.mark.parametrize(
    ("said", "key", "value"),
    [
        ("--train_data_dir 2024_05_01", "data.sources.0.path", "2024_05_01"), ("--output_name 007", "run.name", "007"),
        ("--output_name 1e5", "run.name", "1e5"), ("--output_dir=001", "run.output_dir", "001"),
        ("--output_name true", "run.name", "true"), ("--network_weights 0010", "adapter.init_from", "0010"),
        ("--scale_weight_norms 1", "adapter.max_norm", 1.0), ("--max_data_loader_n_workers 2", "data.num_workers", 2),
        ("--zero_terminal_snr", "model.zero_terminal_snr", True),
        ("--zero_terminal_snr=true", "model.zero_terminal_snr", True),
        ("--lr_scheduler linear --lr_warmup_steps 5%", "schedule.warmup", 0.05),
        ("--learning_rate 1e-4", "optimizer.lr", 1e-4),
        ("--optimizer_args --lr_scheduler linear", "schedule.name", "linear"),
        ("--network_args --network_dim 8", "adapter.rank", 8),
        ("--lr_scheduler_args --text_encoder_lr", "optimizer.lr", 2e-6),
    ],
)  # fmt: skip
def test_a_word_of_a_command_line_is_text_until_a_key_needs_another_kind(
    tmp_path: Path, said: str, key: str, value: object
) -> None:
    needed = "--pretrained_model_name_or_path m --network_module networks.lora --network_train_unet_only --train_data_dir img"
    (file := tmp_path / "train.sh").write_text(f"python sdxl_train_network.py {needed} --unlisted 0 --unnamed false {said}\n")
    found, draft = imported(file)
    assert found[key] == value and type(found[key]) is type(value) and not draft.notes[UNKNOWN]


def test_the_options_of_a_config_file_are_below_those_of_the_command_line(tmp_path: Path) -> None:
    (file := tmp_path / "train.sh").write_text("python sdxl_train_network.py --config_file there/c --network_dim 8\n")
    options = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "img"\n[n]\nnetwork_dim = 4\nnetwork_alpha = RATE\n'
    with pytest.raises(UserError, match='config_file = "there/c": not found, and options stand in it; give it as --data'):
        draft_of(file)
    (tmp_path / "elsewhere").mkdir()
    (config := tmp_path / "elsewhere" / "c.toml").write_text(options.replace("RATE", "2"))
    found, _ = imported(file, data=(config,))
    assert (found["adapter.rank"], found["adapter.alpha"], found["data.sources.0.path"]) == (8, 2.0, "img")
    (tmp_path / "c.toml").write_text(options.replace("RATE", "[]"))
    with pytest.raises(UserError, match=r"train.sh, with .*c.toml: network_alpha = \[\]: it should be a number"):
        draft_of(file)


@pytest.mark.parametrize("name", NOBODYS)
def test_a_config_of_no_trainer_that_is_known_is_refused(tmp_path: Path, capsys, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(NOBODYS[name])
    assert import_config.main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    assert import_config.main([str(file)]) == 0 and (tmp_path / "bear.toml").is_file()
    assert import_config.main([str(file)]) == 2 and "bear.toml is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "key", "value"),
    [
        ('timestep_sampling = "sigma"', "objective.shift", 3.0),
        ('timestep_sampling = "sigma"\nweighting_scheme = "logit_normal"\nlogit_mean = 0.5', "objective.logit_mean", -0.5),
        ('timestep_sampling = "sigmoid"\nsigmoid_scale = 0.5', "objective.logit_std", 0.5),
        ('timestep_sampling = "flux_shift"', "objective.shift", "auto"),
        ('timestep_sampling = "uniform"', "objective.shift", 1.0),
        ("guidance_scale = 1.0", "objective.guidance", 1.0),
        ("", "objective.guidance", 3.5), ("", "optimizer.lr", 2e-6), ("", "adapter.alpha", 1.0), ("", "adapter.rank", 4),
        ("", "run.max_steps", 1600), ("", "precision.compute", "fp32"), ("", "data.caption_dropout", 0.0),
        ("lr_warmup_steps = 50", "schedule.warmup", 0),  # which "constant" does not read there
        ('lr_warmup_steps = 50\nlr_scheduler = "constant_with_warmup"', "schedule.warmup", 50),
        ('lr_warmup_steps = "5%"\nlr_scheduler = "linear"', "schedule.warmup", 0.05),
        ('lr_warmup_steps = "0%"\nlr_scheduler = "linear"', "schedule.warmup", 0),
        ('lr_decay_steps = "10%"\nlr_scheduler = "warmup_stable_decay"', "schedule.decay", 0.1),
    ],
)  # fmt: skip
def test_what_sd_scripts_takes_where_nothing_is_said(tmp_path: Path, said: str, key: str, value: object) -> None:
    file = tmp_path / "a.toml"
    needed = 'pretrained_model_name_or_path = "m"\nnetwork_module = "networks.lora_flux"\ntrain_data_dir = "img"\n'
    file.write_text(f"{needed}network_train_unet_only = true\n{said}\n")
    found, _ = imported(file)
    assert found[key] == value


@pytest.mark.parametrize("stop", ['"stop_training_after": null', '"stop_training_after_unit": "NEVER"'])
def test_null_in_onetrainer_is_not_the_default_of_what_is_left_out(tmp_path: Path, stop: str) -> None:
    file = foreign_configs.write(tmp_path, "OneTrainer")
    _, draft = imported(file)
    assert any("text_encoder.stop_training_after is left out: 30 there" in note for note in draft.notes[DIFFERS])
    text = file.read_text().replace('"text_encoder": {', f'"clip_grad_norm": null, "text_encoder": {{{stop}, ')
    file.write_text(text)
    found, draft = imported(file)
    assert found["step.max_grad_norm"] == 0.0
    assert draft.keys["step.max_grad_norm"][1] == "clip_grad_norm = null: nothing is clipped there"
    assert not any("stop_training_after" in note for notes in draft.notes.values() for note in notes)


def test_onetrainers_photos_for_validation_are_held_out(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "OneTrainer")
    (listed,) = [path for path in tmp_path.glob("*.json") if '"path": "named"' in path.read_text()]
    concepts = json.loads(listed.read_text())
    listed.write_text(
        json.dumps([*concepts, {"path": "later", "type": "VALIDATION"}, {"path": "more", "type": "VALIDATION"}])
    )
    found, draft = imported(file)
    assert found["data.sources.1.held_out"] == "later" and "data.sources.0.held_out" not in found
    assert any("more: photos for validation alone" in note for note in draft.notes[ABSENT])


SUBSETS = """
[[datasets]]
keep_tokens_separator = "|||"
  [[datasets.subsets]]
  image_dir = "a"
  shuffle_caption = true
  conditioning_data_dir = "white"
  [[datasets.subsets]]
  image_dir = "b"
  alpha_mask = true
  caption_separator = ". "
  metadata_file = "meta_lat.json"
"""


@pytest.mark.parametrize("masked", [True, False])
def test_sd_scripts_subsets_have_masks_where_the_loss_is_masked(tmp_path: Path, masked: bool) -> None:
    lines = ['pretrained_model_name_or_path = "sd_xl_base_1.0.safetensors"', 'network_module = "networks.lora"',
             'dataset_config = "data.toml"', "network_dim = 8", "max_train_steps = 10",
             "weighted_captions = true", f"masked_loss = {str(masked).lower()}"]  # fmt: skip
    (tmp_path / "data.toml").write_text(SUBSETS)
    (tmp_path / "train.toml").write_text("\n".join(lines))
    found, draft = imported(tmp_path / "train.toml")
    expected = ("white", "alpha") if masked else (None, None)
    assert (found.get("data.sources.0.masks"), found.get("data.sources.1.masks")) == expected
    assert found["data.weighted_captions"] is True
    # Read where tags are shuffled or dropped, there as here.
    assert found["data.sources.0.keep_separator"] == "|||" and found["data.sources.1.keep_separator"] == ""
    assert any("caption_separator" in note and "read only where tags are" in note for note in draft.notes[SAME])
    assert any("metadata_file" in note and "metadata.jsonl" in note for note in draft.notes[ABSENT])


def test_an_entry_of_samples_stands_before_what_all_samples_share(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    entry = '{prompt: "[trigger] at home --h 640", width: 256, height: 320, seed: 0, neg: false, guidance_scale: 0'
    listed = f"samples: [{entry}, sample_steps: 7, network_multiplier: 0.5, unheard_of: 3}}, {{prompt: a bear}}]"
    file.write_text(re.sub(r"prompts: \[.*\]", listed, file.read_text()))
    found, draft = imported(file)
    expected = {"prompt": "sks at home", "width": 256, "height": 640, "seed": 0, "guidance": 0, "steps": 7, "strength": 0.5}
    assert {key: found[f"validation.samples.0.{key}"] for key in expected} == expected
    shared = {"prompt": "a bear", "width": 1024, "height": 768, "seed": 43, "guidance": 4, "strength": 1.0}
    assert {key: found[f"validation.samples.1.{key}"] for key in shared} == shared
    assert draft.notes[UNKNOWN] == ["sample.samples.unheard_of = 3"]
    assert "sample.samples.width = 256" in text_of(draft, file)
    assert [note for note in draft.notes[ABSENT] if "negative" in note]  # of the second: Flux is drawn without


def test_a_second_pass_of_flux_is_cfg_and_its_guidance_stays(tmp_path: Path) -> None:
    """Of sd-scripts --l beside --g, of which 1 is none there; of SimpleTuner validation_guidance_real."""
    (tmp_path / "prompts.txt").write_text("a dog --g 2 --l 3.5 --n fur\na cat --g 2 --l 1\n")
    file = tmp_path / "flux.sh"
    file.write_text(
        "accelerate launch flux_train_network.py --pretrained_model_name_or_path m.safetensors --train_data_dir img "
        "--output_dir out --output_name dog --max_train_steps 10 --network_module networks.lora_flux --network_dim 4 "
        "--sample_prompts prompts.txt --sample_every_n_steps 5\n"
    )
    found, _ = imported(file)
    assert [found.get(f"validation.samples.0.{key}") for key in ("guidance", "cfg", "negative")] == [2, 3.5, "fur"]
    assert found["validation.samples.1.guidance"] == 2 and "validation.samples.1.cfg" not in found
    file = foreign_configs.write(tmp_path, "SimpleTuner")
    tree = json.loads(file.read_text())
    for real, wanted in ((3.0, 3.0), (1.0, None)):
        file.write_text(json.dumps(tree | {"--validation_guidance_real": real, "--validation_negative_prompt": "fur"}))
        found, draft = imported(file)
        assert found.get("validation.samples.0.cfg") == wanted
        assert found.get("validation.samples.0.negative", "") == ("fur" if wanted else "")


def test_a_config_for_kontext_has_its_variant_and_its_pictures(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    text = file.read_text().replace("arch: flux,", "arch: flux_kontext,").replace("on a beach", "on a beach --ctrl_img a.png")
    file.write_text(text.replace("- folder_path: img\n", "- folder_path: img\n          control_path: before\n"))
    found, _ = imported(file)
    assert found["model.variant"] == "kontext" and found["data.sources.0.references"] == "before"
    assert found["validation.samples.0.references.0"] == "a.png" and found["validation.samples.0.prompt"] == "sks on a beach"


@pytest.mark.parametrize(("arch", "rules"), [("flux", 0), ("zimage", 0), ("sdxl", 1)])
def test_what_ai_toolkits_window_writes_of_convolutions_and_of_files(tmp_path: Path, arch: str, rules: int) -> None:
    """A rank for convolutions whatever the model has, which a run would refuse, and files in 16 bits."""
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    text = (
        file.read_text().replace("arch: flux,", f"arch: {arch},").replace("save_every: 100", "save_every: 100, dtype: bf16")
    )
    file.write_text(text.replace("linear: 8", "conv: 16, conv_alpha: 16, linear: 8"))
    found, draft = imported(file)
    assert found["export.dtype"] == "bf16" and len(draft.rules) == rules
    assert any("has no convolutions" in note for note in draft.notes[SAME]) == (not rules)


def test_ai_toolkits_preservation_is_ours(tmp_path: Path) -> None:
    """Its multiplier and class stand in every config of its window, and say nothing where it is off."""
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    text = file.read_text().replace("steps: 400", "steps: 400\n        diff_output_preservation_multiplier: 0.5\n"
                                    "        diff_output_preservation_class: dog")  # fmt: skip
    file.write_text(text)
    assert "objective.preserve" not in draft_of(file).keys
    file.write_text(text.replace("steps: 400", "steps: 400\n        diff_output_preservation: true"))
    found, _ = imported(file)
    assert (found["objective.preserve"], found["objective.preserve_as"]) == (0.5, "dog")
    file.write_text(text.replace("steps: 400", "steps: 400\n        blank_prompt_preservation: true"))
    draft = draft_of(file)
    assert any(line.startswith("train.blank_prompt_preservation = true: ") for line in draft.notes[ABSENT])


def test_ai_toolkits_window_has_a_folder_for_each_reference(tmp_path: Path) -> None:
    """Its numbered fields stand in the place of the list."""
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    fields = "control_path_1: before\n          control_path_2: style\n          control_path_3: null\n"
    text = file.read_text().replace("arch: flux,", "arch: flux2_klein_4b,")
    file.write_text(text.replace("- folder_path: img\n", f"- folder_path: img\n          {fields}"))
    draft = draft_of(file)
    assert configs.tree(config_of(draft, file))["data"]["sources"][0]["references"] == ["before", "style"]
    assert not [line for line in draft.notes[UNKNOWN] if "control" in line]


def test_a_network_weight_of_ai_toolkit_is_named_unless_it_is_1(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    text = file.read_text()
    for weight, notes in (("1.0", []), ("0.5", ["datasets.network_weight = 0.5"])):
        file.write_text(text.replace("- folder_path: img\n", f"- folder_path: img\n          network_weight: {weight}\n"))
        assert [line for line in draft_of(file).notes[UNKNOWN] if "network_weight" in line] == notes


@pytest.mark.parametrize("named", [True, False])
def test_simpletuners_kontext_has_its_variant_and_its_pictures(tmp_path: Path, named: bool) -> None:
    """By its flavour, beside a path, too; the backend of references is no photos to train."""
    file = foreign_configs.write(tmp_path, "SimpleTuner", "kontext.safetensors")
    tree = json.loads(file.read_text()) | {"--model_family": "flux", "--model_flavour": "kontext"}
    file.write_text(json.dumps({key: value for key, value in tree.items() if named or "pretrained_model" not in key}))
    (backends := tmp_path / "backends.json").write_text(json.dumps([
        {"id": "after", "type": "local", "instance_data_dir": "after", "conditioning_data": "before"},
        {"id": "before", "type": "local", "instance_data_dir": "before", "conditioning_type": "reference_loose"},
    ]))  # fmt: skip
    draft = draft_of(file, data=[backends])
    found = configs.flatten(configs.tree(config_of(draft, file)))
    assert found["model.variant"] == "kontext" and not [line for line in draft.notes[UNKNOWN] if "condition" in line]
    assert found["model.path"] == ("kontext.safetensors" if named else "black-forest-labs/FLUX.1-Kontext-dev")
    assert found["data.sources.0.references"] == "before" and "data.sources.1.path" not in found


def test_simpletuners_flux2_edits_with_every_folder_of_references(tmp_path: Path) -> None:
    """Its documentation's own form of a backend: a list (SimpleTuner#1711)."""
    file = foreign_configs.write(tmp_path, "SimpleTuner", "klein.safetensors")
    tree = json.loads(file.read_text()) | {"--model_family": "flux2", "--conditioning_multidataset_sampling": "random"}
    file.write_text(json.dumps(tree))
    backends, beside = tmp_path / "backends.json", {"dataset_type": "conditioning", "conditioning_type": "reference_strict"}
    for shown in (["one"], ["one", "two"]):
        backends.write_text(json.dumps([
            {"id": "after", "type": "local", "instance_data_dir": "after", "conditioning_data": shown},
            *({"id": name, "type": "local", "instance_data_dir": f"photos/{name}", **beside} for name in shown),
        ]))  # fmt: skip
        draft = draft_of(file, data=[backends])
        found = configs.flatten(configs.tree(config_of(draft, file)))
        assert found["data.sources.0.path"] == "after" and "data.sources.1.path" not in found
        several = len(shown) > 1
        assert configs.tree(config_of(draft, file))["data"]["sources"][0]["references"] == (
            ["photos/one", "photos/two"] if several else "photos/one"
        )
        assert any("all of them here" in note for note in draft.notes[DIFFERS]) == several
        assert not any("guidance" in note for notes in draft.notes.values() for note in notes)
        assert not [line for line in draft.notes[UNKNOWN] if "condition" in line]


def test_null_is_no_entry_of_a_list(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "ai-toolkit")
    text = file.read_text().replace('prompts: ["[trigger] on a beach", ', "prompts: [null, ")
    file.write_text(text.replace("- folder_path: img\n", "- folder_path: img\n          control_path: [null]\n"))
    found, _ = imported(file)
    assert found["validation.samples.0.seed"] == 9 and "validation.samples.1.prompt" not in found
    assert not found.get("data.sources.0.references")


def test_a_list_of_data_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    file = foreign_configs.write(tmp_path, "SimpleTuner")
    moved = (tmp_path / "backends.json").rename(tmp_path / "elsewhere")
    found, draft = imported(file)
    assert found["data.sources.0.path"] == "data/my_photos" and "give it as --data" in draft.notes[FILL][0]
    (data := tmp_path / "mine.json").write_text(moved.read_text())
    found, draft = imported(file, data=(data,))
    assert found["data.sources.0.path"] == "img" and not draft.notes[FILL]


def test_the_page_shows_what_the_program_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    (command,), (written,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("sh", "toml"))
    Path("train.sh").write_text(command)
    assert import_config.main(["train.sh"]) == 0 and Path("bear.toml").read_text() == written


def test_the_page_has_the_numbers_of_the_published_configs() -> None:
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    for name, numbers in PUBLISHED.items():
        file = name.partition("/")[2]
        assert f"`{file}`" in page
        if not isinstance(numbers, str):
            rank, alpha, rate, size, batch, (unit, length), repeats = numbers
            told = {"max_steps": "steps", "epochs": "epochs"}[unit]
            row = f"| `{file}` | {rank} / {alpha:g} | {float(rate)} | {size} | {batch} | {length} {told} | {repeats} |"
            assert row in re.sub(r"\b\de-\d\b", lambda found: str(float(found[0])), page)


# Of the published configs: rank, alpha, rate, resolution, batch, length and repeats, or the key that has no value.
Numbers = tuple[int, float, float, object, int, tuple[str, int], int]
PUBLISHED: dict[str, Numbers | str] = {
    "ai-toolkit/train_lora_flex2_24gb.yaml": "model.family",
    "ai-toolkit/train_lora_flux_24gb.yaml": (16, 16.0, 1e-4, [512, 768, 1024], 1, ("max_steps", 2000), 1),
    "ai-toolkit/train_lora_flux_kontext_24gb.yaml": (16, 16.0, 1e-4, [512, 768], 1, ("max_steps", 3000), 1),
    "ai-toolkit/train_lora_flux_schnell_24gb.yaml": (16, 16.0, 1e-4, [512, 768, 1024], 1, ("max_steps", 2000), 1),
    "onetrainer/Flux_2__flux2_LoRA_16GB.json": (16, 1.0, 3e-5, 512, 2, ("epochs", 100), 1),
    "onetrainer/Flux_2__flux2_LoRA_8GB.json": (16, 1.0, 3e-5, 512, 2, ("epochs", 100), 1),
    "onetrainer/Flux_Dev.1__flux_LoRA.json": (16, 1.0, 3e-4, 768, 4, ("epochs", 100), 1),
    "onetrainer/SDXL__sdxl_1.0_LoRA.json": (16, 1.0, 3e-4, 1024, 4, ("epochs", 100), 1),
    "onetrainer/SDXL__sdxl_1.0_inpaint_LoRA.json": "model.family",
    "simpletuner/flux.peft-lora.json": (16, 16.0, 1e-4, 512, 1, ("max_steps", 100), 1),
    "simpletuner/flux.peft-lora_TREAD.json": (16, 16.0, 1e-4, 512, 1, ("max_steps", 100), 1),
    "simpletuner/flux2.peft-lora.json": "model.path",
    "simpletuner/sdxl.lycoris-lokr.json": "adapter.type",
}


@pytest.mark.skipif(not foreign_configs.SHARED.is_dir(), reason="the published configs are not beside the checkout")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_numbers_of_its_program_or_is_refused_by_key(name: str) -> None:
    file, expected = foreign_configs.SHARED / name, PUBLISHED[name]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"--set {expected}="):
            draft_of(file)
        return
    draft = draft_of(file)
    config = config_of(draft, file)
    source = config.data.sources[0]
    resolution = config.data.resolution if source.resolution is None else source.resolution
    length = next((name, value) for name in ("max_steps", "epochs") if (value := getattr(config.run, name)) is not None)
    resolution = list(resolution) if isinstance(resolution, tuple) else resolution
    adapter = config.adapter
    numbers = (adapter.rank, adapter.alpha, config.optimizer.lr, resolution, config.data.batch_size, length, source.repeats)
    assert numbers == expected
    assert config.step.accumulation == 1 and not draft.refusals


@pytest.mark.skipif(not foreign_configs.SHARED.is_dir(), reason="the published configs are not beside the checkout")
def test_every_published_config_is_in_the_table() -> None:
    files = {str(path.relative_to(foreign_configs.SHARED)) for path in foreign_configs.SHARED.glob("*/*")}
    assert files - {*PUBLISHED} == {"simpletuner/multidatabackend-small-dreambooth-512px.json"}


@pytest.mark.parametrize(
    ("name", "content", "targets"),
    [
        # Its preset's own regular expressions leave out the refiners, whose names end as the blocks' do (OneTrainer #1195).
        ("z.json", {"training_method": "LORA", "model_type": "Z_IMAGE", "base_model_name": "Tongyi-MAI/Z-Image",
                    "layer_filter_preset": "attn-mlp", "layer_filter_regex": True,
                    "layer_filter": "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*",
                    "concepts": [{"path": "img"}], "__version": 10},
         ["*layers.*.attention*", "*layers.*.feed_forward*"]),
        ("z.yaml", {"job": "extension", "config": {"name": "z", "process": [{
            "type": "sd_trainer", "network": {"type": "lora", "linear": 8, "linear_alpha": 8},
            "datasets": [{"folder_path": "img", "resolution": [512]}], "train": {"steps": 10, "lr": 1e-4},
            "model": {"name_or_path": "Tongyi-MAI/Z-Image", "arch": "zimage"}}]}}, ["layers.*"]),
    ],
)  # fmt: skip
def test_z_image_is_imported(tmp_path: Path, monkeypatch, name: str, content: dict[str, Any], targets: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    Path(name).write_text(json.dumps(content))  # which is YAML, too
    draft = draft_of(Path(name))
    config = config_of(draft, Path(name))
    assert (config.model.family, config.model.path) == ("zimage", "Tongyi-MAI/Z-Image")
    assert list(config.adapter.targets) == targets
    layers = [f"{block}.0.{layer}" for block in ("layers", "noise_refiner", "context_refiner")
              for layer in ("attention.to_q", "feed_forward.w2")]  # fmt: skip
    taken = {layer for layer in layers if any(fnmatchcase(layer, pattern) for pattern in targets)}
    assert taken == {"layers.0.attention.to_q", "layers.0.feed_forward.w2"}


def test_of_flux_3_what_was_not_looked_up_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    model = {"name_or_path": "black-forest-labs/flux-3-image-klein-base", "arch": "flux3"}
    process = {"type": "sd_trainer", "network": {"type": "lora", "linear": 8}, "datasets": [{"folder_path": "img"}],
               "train": {"steps": 10}, "model": model}  # fmt: skip
    Path("x.yaml").write_text(json.dumps({"job": "extension", "config": {"name": "x", "process": [process]}}))
    draft = draft_of(Path("x.yaml"))
    assert [draft.keys[key][0] for key in ("model.family", "model.path")] == ["flux3", model["name_or_path"]]
    assert "adapter.targets" not in draft.keys
    content = {"model_type": "lora", "model_family": "flux3", "data_backend_config": "backend.json"}
    Path("st.json").write_text(json.dumps(content))
    Path("backend.json").write_text(json.dumps([{"id": "a", "type": "local", "instance_data_dir": "img"}]))
    with pytest.raises(UserError, match='model_flavour is left out: "one" there: which model that is was not looked up'):
        config_of(draft_of(Path("st.json")), Path("st.json"))
