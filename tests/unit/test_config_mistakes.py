"""Mistakes in a config, and what is said of each: the key, the value, what to write."""

from __future__ import annotations

import copy
import json
import re
import runpy
import traceback
from importlib import resources

import pytest

from tests.foreign_configs import FACTS
from trainer import config as configs
from trainer.base import other_trainers
from trainer.base.errors import UserError
from workbench.commands import main as cli

MINIMAL = {
    "run": {"name": "bear", "output_dir": "out", "max_steps": 1},
    "model": {"family": "sdxl", "path": "model"},
    "data": {"sources": [{"path": "photos"}]},
}
FP8 = 'write dtype = "fp8_e4m3" in [model.components.unet] (of Flux: transformer)'
UNET = 'write a dtype, for example "fp8_e4m3", in [model.components.unet] (of Flux: transformer)'
DTYPES = "'fp32', 'bf16', 'fp16', 'fp8_e4m3', 'fp8_e5m2', 'int8', 'int4', 'int2', 'nf4', 'fp4'"
# Of a config: the key, with dots, its value, and the first line that is said.
MISTAKES = [
    ("data.cache_dir", "o" * 300,
     f"data.cache_dir = '{'o' * 300}': a name in it has 300 bytes, and file systems take 255; shorten it"),
    # names of other trainers
    ("learning_rate", 1e-4, "unknown key learning_rate; did you mean optimizer.lr?"),
    ("optimizer.learning_rate", 1e-4, "unknown key optimizer.learning_rate; did you mean optimizer.lr?"),
    ("adapter.network_dim", 8, "unknown key adapter.network_dim; did you mean adapter.rank?"),
    ("adapter.lora_alpha", 8, "unknown key adapter.lora_alpha; did you mean adapter.alpha?"),
    ("adapter.use_dora", True, 'unknown key adapter.use_dora; write type = "dora" in [adapter]'),
    ("data.train_batch_size", 2, "unknown key data.train_batch_size; did you mean data.batch_size?"),
    ("step.gradient_accumulation_steps", 2, "unknown key step.gradient_accumulation_steps; did you mean step.accumulation?"),
    ("run.max_train_steps", 9, "unknown key run.max_train_steps; did you mean run.max_steps?"),
    ("steps", 9, "unknown key steps; did you mean run.max_steps?"),
    ("model.pretrained_model_name_or_path", "m", "unknown key model.pretrained_model_name_or_path; did you mean model.path?"),
    ("model.fp8_base", True, f"unknown key model.fp8_base; {FP8}"),
    ("precision.mixed_precision", "bf16", "unknown key precision.mixed_precision; did you mean precision.compute?"),
    ("data.train_data_dir", "x", "unknown key data.train_data_dir; did you mean data.sources.0.path?"),
    ("data.captions", ".txt", "unknown key data.captions; did you mean data.sources.0.captions?"),
    ("data.enable_bucket", True, "unknown key data.enable_bucket; leave it out: photos always go to buckets of their shape"),
    ("objective.snr_gamma", 5, "unknown key objective.snr_gamma; did you mean objective.min_snr_gamma?"),
    ("checkpoint.save_every_n_steps", 5,
     "unknown key checkpoint.save_every_n_steps; did you mean checkpoint.every_steps?"),
    ("validation.sample_prompts", ["a"], "unknown key validation.sample_prompts; did you mean validation.prompts?"),
    ("lr_scheduler", "cosine", "unknown key lr_scheduler; did you mean schedule.name?"),
    ("network", {"type": "lora", "linear": 16, "linear_alpha": 16},
     "unknown table network; write adapter.type for type, adapter.rank for linear, adapter.alpha for linear_alpha"),
    ("train", {"batch_size": 1, "lr": 1e-4},
     "unknown table train; write data.batch_size for batch_size, optimizer.lr for lr"),
    ("adapter.conv_dim", 4, "unknown key adapter.conv_dim; add a rule: [[adapter.rules]] with component = \"unet\", match = "
     "\"*conv*\" and a rank"),
    ("memory.blocks_to_swap", 8, "unknown key memory.blocks_to_swap; write offload = \"blocks\" in [memory]"),
    ("objective.noising_bias", 0.5, "unknown key objective.noising_bias; did you mean objective.logit_mean?"),
    ("model.clip_skip", 2, "unknown key model.clip_skip; leave it out: the last but one layer is read, as SDXL was trained"),
    ("vae_batch_size", 4, "unknown key vae_batch_size; leave it out: photos are encoded one at a time"),
    ("data.vae_batch_size", 4, "unknown key data.vae_batch_size; leave it out: photos are encoded one at a time"),
    ("data.text_encoder_batch_size", 4, "unknown key data.text_encoder_batch_size; leave it out: captions are encoded "
     "together where that changes no bit"),
    ("train.dtype", "bf16", "unknown table train; write precision.compute for dtype"),
    ("beta1", 0.9, "unknown key beta1; write betas = [0.9, 0.999] in [optimizer]"),
    ("adapter.block_dims", "4,8", "unknown key adapter.block_dims; write rank in a rule of [[adapter.rules]]"),
    ("dataloader_threads", 2, "unknown key dataloader_threads; did you mean data.num_workers?"),
    ("step.gradient_precision", "fp32", "unknown key step.gradient_precision; leave it out: an adapter is trained in fp32, "
     "whatever precision.compute is"),
    # names that are spelt like a key that means something else
    ("data.eval_batch_size", 4, "unknown key data.eval_batch_size; there is none: held-out photos pass in batches of "
     "data.batch_size"),
    ("objective.num_train_timesteps", 1000, "unknown key objective.num_train_timesteps; leave it out: the model's own noise "
     "schedule is trained"),
    ("data.caption_dropout_every_n_epochs", 2, "unknown key data.caption_dropout_every_n_epochs; there is none: "
     "caption_dropout in [data] is a share of all appearances"),
    ("data.keep_tokens_separator", "|||", "unknown key data.keep_tokens_separator; did you mean "
     "data.sources.0.keep_separator?"),
    ("memory.cpu_offload_checkpointing", True, "unknown key memory.cpu_offload_checkpointing; there is none: nothing is "
     "moved to the host; write gradient_checkpointing = true in [memory]"),
    ("step.sdpa", True, 'unknown key step.sdpa; leave it out: step.attention = "auto" takes the kernel that suits the card'),
    ("train.xformers", True, "unknown table train; for xformers: leave it out: step.attention = \"auto\" takes the kernel "
     "that suits the card"),
    ("step.attention_mechanism", "sdpa", "unknown key step.attention_mechanism; did you mean step.attention?"),
    ("step.attention", "xformers", "step.attention = 'xformers': did you mean 'efficient'? The values are 'auto', 'flash', "
     "'cudnn', 'efficient', 'math'"),
    ("step.attention", "sdpa", "step.attention = 'sdpa': did you mean 'auto'? The values are 'auto', 'flash', 'cudnn', "
     "'efficient', 'math'"),
    ("optimizer.text_encoder_lr1", 1e-5, "unknown key optimizer.text_encoder_lr1; write lr in a rule of [[adapter.rules]] "
     'with component = "text_encoder" or "text_encoder_2"'),
    ("optimizer.d_coef", 2.0, "unknown key optimizer.d_coef; write it in optimizer.options, for an optimizer that takes it"),
    ("validation.negative_prompt", "blur", "unknown key validation.negative_prompt; write negative in "
     "[[validation.samples]]"),
    ("validation.walk_seed", True, "unknown key validation.walk_seed; write seed in [[validation.samples]]"),
    ("revision", "main", "unknown key revision; did you mean model.revision?"),
    ("quantization", "int8", f"unknown key quantization; {UNET}"),
    ("sample", {"guidance_scale": 4, "width": 512},
     "unknown table sample; write validation.samples.0.width for width; for guidance_scale: write guidance in "
     "[[validation.samples]]"),
    ("logging.use_wandb", True, "unknown key logging.use_wandb; did you mean logging.wandb?"),
    # of no key at all: the table's own name makes them no nearer
    ("model.components.unet.highvram", True,
     "unknown key model.components.unet.highvram; see docs/keys.md for the keys that there are"),
    ("checkpoint.divisor", 8, "unknown key checkpoint.divisor; see docs/keys.md for the keys that there are"),
    # misspelt, or in another table
    ("dtype", "nf4", "unknown key dtype; did you mean model.components.unet.dtype?"),
    ("run.epoch", 3, "unknown key run.epoch; did you mean run.epochs?"),
    ("optimzer", {"lr": 3}, "unknown key optimzer; did you mean optimizer?"),
    ("adapter.targts", "all", "unknown key adapter.targts; did you mean adapter.targets?"),
    ("run.lr", 1e-4, "unknown key run.lr; did you mean optimizer.lr?"),
    ("train.accumulation", 2, "unknown table train; write step.accumulation for accumulation"),
    ("nothing.of_ours", 2, "unknown key nothing; see docs/keys.md for the keys that there are"),
    # two keys for one thing
    ("run.epochs", 3, "give exactly one of run.max_steps and run.epochs; both are given; --set run.epochs= takes out "
     "the one, --set run.max_steps= the other"),
    # values of other trainers
    ("model.components.unet.dtype", "float8_e4m3fn",
     f"model.components.unet.dtype = 'float8_e4m3fn': did you mean 'fp8_e4m3'? The values are {DTYPES}"),
    ("model.components.unet.dtype", "qint8", "model.components.unet.dtype = 'qint8': did you mean 'int8'? "
     f"The values are {DTYPES}"),
    ("precision.compute", "bfloat16",
     "precision.compute = 'bfloat16': did you mean 'bf16'? The values are 'fp32', 'bf16', 'fp16'"),
    ("precision.compute", "no", "precision.compute = 'no': did you mean 'fp32'? The values are 'fp32', 'bf16', 'fp16'"),
    ("adapter.type", "DoRA", "adapter.type = 'DoRA' is not known; did you mean 'dora'?"),
    ("optimizer.name", "AdamW8bit", "optimizer.name = 'AdamW8bit' is not known; did you mean 'adamw8bit'?"),
    ("optimizer.name", "AdamW", "optimizer.name = 'AdamW' is not known; did you mean 'adamw'?"),
    ("model.family", "SDXL", "model.family = 'SDXL' is not known; did you mean 'sdxl'?"),
    ("model.family", "flux1", "model.family = 'flux1' is not known; did you mean 'flux'?"),
    ("adapter.type", "LoKr", "adapter.type = 'LoKr' is not known; did you mean 'lokr'?"),
    ("adapter.type", "LoHa", "adapter.type = 'LoHa' is not known; there is none: a LoHa needs W + dW made in every step; "
     "take lokr, or lora of a higher rank"),
    ("run.device", "gpu", "run.device = 'gpu': did you mean 'cuda'? The values are 'auto', 'cpu', 'cuda'"),
    ("schedule.name", "cosine_with_restarts", "schedule.name = 'cosine_with_restarts': did you mean 'cosine_restarts'? "
     "The values are 'constant', 'linear', 'cosine', 'cosine_restarts', 'polynomial', 'rex', 'wsd'"),
    ("objective.loss", "l3", "objective.loss = 'l3': use one of 'mse', 'huber', 'smooth_l1'"),
    # a path that Windows wrote, in double quotes: the test has what TOML makes of "C:\\new" and "D:\\train"
    ("model.path", "C:\new", r"model.path = 'C:\new': in double quotes TOML reads \n as one character; write / or use single "
     "quotes"),
    ("checkpoint.every_minutes", -1.0, "checkpoint.every_minutes = -1.0: must be greater than or equal to 0"),
    ("checkpoint.every_minutes", float("inf"), "checkpoint.every_minutes = inf: must be a finite number"),
    ("checkpoint.every_minutes", float("nan"), "checkpoint.every_minutes = nan: must be a finite number"),
    ("run.lost_after", 4.9, "run.lost_after = 4.9: must be greater than or equal to 5"),
    ("run.lost_after", float("inf"), "run.lost_after = inf: must be a finite number"),
    # types
    ("adapter.rank", "16", "adapter.rank = '16': write 16 without quotes"),
    ("adapter.rank", 16.0, "adapter.rank = 16.0: write 16 without a point"),
    ("adapter.rank", "many", "adapter.rank = 'many': give a whole number"),
    ("optimizer.lr", "1e-4", "optimizer.lr = '1e-4': write 1e-4 without quotes"),
    ("optimizer.lr", "fast", "optimizer.lr = 'fast': give a number"),
    ("logging.tensorboard", "true", "logging.tensorboard = 'true': write true without quotes"),
    ("data.flip", 1, "data.flip = 1: give true or false"),
    (
        "memory.gradient_checkpointing",
        "yes",
        "memory.gradient_checkpointing = 'yes': give 'selective', or true or false, or a whole number",
    ),
    ("model.zero_terminal_snr", "yes", "model.zero_terminal_snr = 'yes': give 'auto', or true or false"),
    ("schedule.warmup", "10%", "schedule.warmup = '10%': give a number"),
    ("validation.prompts", "a bear", "validation.prompts = 'a bear': give 'captions', or a list, for example [\"a bear\"]"),
    ("data.sources", {"path": "x"}, "data.sources = {'path': 'x'}: give a list of tables, [[data.sources]]"),
    ("adapter", "dora", "adapter = 'dora': give a table"),
    ("run.name", 7, "run.name = 7: give text in quotes"),
    # out of range
    ("data.batch_size", 0, "data.batch_size = 0: must be greater than or equal to 1"),
    ("data.resolution", 1001, "data.resolution = 1001: must be a multiple of 8"),
    ("data.resolution", [512, "a"], "data.resolution.1 = 'a': give a whole number"),
    ("optimizer.lr", 0, "optimizer.lr = 0: must be greater than 0"),
    ("optimizer.betas", [0.9], "optimizer.betas = [0.9]: give at least 2 values, not 1"),
    ("objective.t_range", [0.5], "objective.t_range = [0.5]: give one more value"),
    ("data.sources", [], "data.sources = []: give at least one"),
    ("model.path", "", "model.path = '': must not be empty"),
    ("run.name", "my bear",
     "run.name = 'my bear': use letters, digits, '.', '_' and '-', a letter or digit first; files are named by it"),
    ("data.background", "white", "data.background = 'white': write a colour as \"#rrggbb\", for example \"#ffffff\""),
]  # fmt: skip


def with_key(key: str, value: object) -> dict:
    tree = copy.deepcopy(MINIMAL)
    *tables, leaf = key.split(".")
    node = tree
    for table in tables:
        node = node.setdefault(table, {})
    node[leaf] = value
    return tree


@pytest.mark.parametrize(("key", "value", "said"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_told_with_what_to_write(tmp_path, capsys, key: str, value: object, said: str) -> None:
    import tomli_w

    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(with_key(key, value)), encoding="utf-8")
    assert cli.main(["--config", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: {said}"


@pytest.mark.parametrize("meant", sorted({meant for meant in other_trainers.tables().keys.values() if " " not in meant}))
def test_a_name_of_another_trainer_stands_for_a_key_that_there_is(meant: str) -> None:
    assert configs.generic(meant) in configs.known_keys()


@pytest.mark.parametrize("sentence", sorted({meant for meant in other_trainers.tables().keys.values() if " " in meant}))
def test_a_sentence_names_keys_that_there_are(sentence: str) -> None:
    tables = {key.rpartition(".")[0] for key in configs.known_keys()}
    for named in re.findall(r"\[+([a-z_.]+)\]+", sentence):
        assert configs.generic(named) in {table.removesuffix(".*") for table in tables} | tables, named
    if write := re.match(r"(?:write )(\w+) = .* in (\[+)([a-z_.]+)\]+", sentence):
        item = ".*" if write[2] == "[[" else ""
        assert f"{configs.generic(write[3])}{item}.{write[1]}" in configs.known_keys()


def test_a_value_of_another_trainer_stands_for_one_that_there_is() -> None:
    from trainer.adapters.kinds import KINDS
    from trainer.models import FAMILIES
    from trainer.optim.table import OPTIMIZERS

    def values(node: object) -> set[str]:
        """Of a JSON schema: all that an enum has."""
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        own = {*node.get("enum", ()), *([node["const"]] if "const" in node else [])} if isinstance(node, dict) else set()
        return own.union(*map(values, inner))

    known = values(configs.Config.model_json_schema()) | {*OPTIMIZERS, *FAMILIES, *KINDS}
    assert not set(other_trainers.tables().values) - known


def test_no_hint_repeats_the_mistake() -> None:
    for key, value, said in MISTAKES:
        with pytest.raises(UserError) if " is not known" not in said else pytest.MonkeyPatch.context():
            configs.parse(with_key(key, value))
        assert f"did you mean {key}?" not in said and f"did you mean {value!r}" not in said


def test_a_config_that_is_not_there_is_answered_with_the_one_that_was_meant() -> None:
    for name, remedy in (("sdxl_dora_fp.toml", "did you mean sdxl_dora_fp8.toml?"), ("bear.toml", "--new PHOTOS writes one")):
        with pytest.raises(UserError) as refused:
            configs.load(name, [])
        assert str(refused.value).splitlines()[0].endswith(remedy)


def test_a_config_of_ones_own_is_meant_before_one_of_the_project(tmp_path) -> None:
    (tmp_path / "my_photo.toml").touch()
    for name, remedy in (("my_photos.toml", f"did you mean {tmp_path / 'my_photo.toml'}?"), ("my_sdxl.toml", "writes one")):
        with pytest.raises(UserError) as refused:
            configs.load(str(tmp_path / name), [])
        assert str(refused.value).splitlines()[0].endswith(remedy)


@pytest.mark.parametrize(("name", "keys"), [("no.toml", []), ("tiny_sdxl.toml", ["optimizer.rl=1"])])
def test_a_notebook_shows_no_error_of_a_library_before_the_message(name: str, keys: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        configs.load(name, keys)
    told = "".join(traceback.format_exception(refused.value))
    assert told.count("Traceback") == 1 and "trainer.base.errors.UserError: " in told


@pytest.mark.parametrize(
    ("name", "kind"), [("flux.yaml", "YAML"), ("flux.yml", "YML"), ("flux.json", "JSON"), ("flux.toml", "")]
)
def test_a_config_of_another_trainer_is_told_where_its_keys_are(tmp_path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("job: extension" if "y" in name else '{"a": 1}')
    with pytest.raises(UserError, match="not valid TOML") as refused:
        configs.load(str(tmp_path / name), [])
    assert (f"a config is TOML, not {kind}; python scripts/import_config.py" in str(refused.value)) == bool(kind)


def test_the_names_of_other_trainers_are_read_for_a_mistake_alone(monkeypatch, capsys) -> None:
    def tables():
        raise AssertionError("read")

    monkeypatch.setattr(other_trainers, "tables", tables)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0 and "--config" in capsys.readouterr().out
    configs.parse(with_key("adapter.rank", 8))
    with pytest.raises(AssertionError, match="read"):
        configs.parse(with_key("adapter.network_dim", 8))
    monkeypatch.setattr(resources, "files", lambda package: tables())
    runpy.run_path(other_trainers.__file__)  # nor when it is imported


def test_every_row_of_other_trainers_names_is_of_trainers_that_there_are() -> None:
    tables = other_trainers.tables()
    for row in (row for rows in tables.names.values() for row in rows):
        assert row["here"] and row.keys() > {"here"} and row.keys() <= {"here", *tables.trainers}
        assert all(value == " ".join(value.split()) for value in row.values())


@pytest.mark.skipif(not FACTS.is_file(), reason="the lists of the programs' options are not beside the checkout")
def test_every_name_was_looked_up_at_the_commit_or_is_marked() -> None:
    tables = other_trainers.tables()
    rows = [row for rows in tables.names.values() for row in rows]
    listed = json.loads(FACTS.read_text(encoding="utf-8"))
    assert len(listed) == len(tables.trainers)
    for trainer, (program, options) in zip(tables.trainers, listed.items(), strict=True):
        assert program.endswith(tables.commits[trainer]) and trainer.startswith(program.split()[0])
        names = [name for row in rows for name in row.get(trainer, "").split()]
        unknown = {name for name in names if name.rpartition(".")[2] not in options}
        assert {*tables.not_looked_up[trainer].split()} == unknown


# As the programs' own sources have them, and some that they have not, which people write all the same.
REAL = {
    "sd-scripts": "train_blocks train_t5xxl block_dims network_reg_dims network_reg_lrs loraplus_unet_lr_ratio "
    "secondary_separator",
    "OneTrainer": "dataloader_threads beta1 beta2 tensorboard stochastic_rounding fused_back_pass lora_decompose_output_axis "
    "only_cache",
    "ai-toolkit": "train.dtype sample.width sample.height train.diff_output_preservation train.do_cfg",
    "SimpleTuner": "minimum_image_size grad_clip_method gradient_precision",
}
GUESSED = {
    "sd-scripts": "sdxl network_rank token_string stop_text_encoder_training block_lr learning_rate_te1 learning_rate_te2 "
    "split_attn",
    "OneTrainer": "image_caching text_caching caching_threads prefetch_next_batch",
    "ai-toolkit": "network_type",
    "SimpleTuner": "text_encoder_2_precision",
}


@pytest.mark.parametrize("trainer", REAL)
def test_a_name_stands_under_a_program_that_has_it(trainer: str) -> None:
    tables = other_trainers.tables()
    *_, others_of = tables.trainers
    rows = [row for rows in tables.names.values() for row in rows]
    listed, others = ({name for row in rows for name in row.get(column, "").split()} for column in (trainer, others_of))
    assert set(REAL[trainer].split()) <= listed
    assert not set(GUESSED[trainer].split()) & listed and set(GUESSED[trainer].split()) <= others


@pytest.mark.parametrize(
    ("line", "written"),
    [(r'path = "C:\Users\me\model"', r"'C:\Users\me\model'"), (r'path = "D:\models"', r"'D:\models'"), ('path = "x', "")],
)
def test_a_windows_path_that_is_no_toml_is_told_how_to_be_written(tmp_path, line: str, written: str) -> None:
    (tmp_path / "run.toml").write_text(f'[model]\nfamily = "sdxl"\n{line}\n')
    with pytest.raises(UserError) as refused:
        configs.load(str(tmp_path / "run.toml"), [])
    first, *rest = str(refused.value).splitlines()
    assert "not valid TOML" in first
    assert rest == ([f"write that path with /, or in single quotes: {written}"] if written else [])


@pytest.mark.parametrize("given", [r'"C:\Users\me\sdxl"', r'"D:\models"', r'["C:\Users\me"]', '"one" and "other"'])
def test_a_value_of_set_that_is_no_toml_is_not_taken_with_its_quotes(given: str) -> None:
    tree = copy.deepcopy(MINIMAL)
    with pytest.raises(UserError, match="--set .*not valid TOML") as refused:
        configs.override(tree, [f"model.path={given}"])
    path = given.strip('[]"')
    assert str(refused.value).endswith(f"write that path with /, or in single quotes: '{path}'") == ("\\" in given)
    assert tree == MINIMAL
    configs.override(tree, [f"model.path='{path}'"])
    assert tree["model"]["path"] == path
    configs.override(tree, [f"model.path={path}"])  # a bare word
    assert tree["model"]["path"] == path
