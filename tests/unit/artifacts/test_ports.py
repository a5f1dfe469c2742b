"""What a run asks of parts that it may be opened without."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest

from tests.harness import ROOT
from trainer import config as configs
from trainer.artifacts.ports import ASKED, Ports, refuse_unserved
from trainer.base.errors import UserError
from trainer.run.session import Session
from workbench.commands.ports import PORTS

MINIMAL = {
    "run": {"name": "bear", "output_dir": "out", "max_steps": 3},
    "model": {"family": "sdxl", "path": "m"},
    "data": {"sources": [{"path": "p"}]},
}
# A value with which each key asks its part for something.
ASKING = {
    "data.sources": {"data": {"sources": [{"path": "hf:a/b"}]}},
    "adapter.init_from": {"adapter": {"init_from": "bear.safetensors"}},
    "adapter.under": {"adapter": {"under": "bear.safetensors"}},
    "memory.fit": {"memory": {"fit": "auto"}},
    "memory.resident_blocks": {"memory": {"offload": "blocks"}},
    "export.base_model": {"export": {"base_model": "a/b"}},
    "logging.tensorboard": {"logging": {"tensorboard": True}},
    "logging.wandb": {"logging": {"wandb": True}},
    "checkpoint.mirror": {"checkpoint": {"mirror": "s3://bucket/prefix"}},
    "step.compile": {"step": {"compile": "auto"}},
}
# Where a part's files are, and keys that are read only beside one that the table has.
FOLDERS = {part: part for part in ("hub", "adapter_files", "planning", "pages", "summary", "trackers", "mirror")}
FOLDERS["layouts"] = "sources"
TELLS = "summary"  # of any key, and does nothing by it
BESIDE = {
    "memory.fit_by": "memory.fit", "checkpoint.mirror_wait": "checkpoint.mirror",
    "adapter.init_resize": "adapter.init_from",
}  # fmt: skip


def keys_read(folder: str) -> set[str]:
    """Keys of the config that files below a folder read as attributes: `config.TABLE.KEY`, or a table's name before one. Not
    those that the config itself reads, or the table of what is asked."""
    known, found = set(configs.known_keys()), set()
    for path in (ROOT / folder).rglob("*.py"):
        if path.parent.name == "config" or path.name == "ports.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                parts = re.findall(r"\w+", ast.unparse(node))
                found |= {f"{table}.{key}" for table, key in zip(parts, parts[1:], strict=False)} & known
    for path in (ROOT / folder).rglob("*.md"):
        found |= set(re.findall(r"\b[a-z]+\.[a-z_]+\b", path.read_text(encoding="utf-8"))) & known
    return found


@pytest.mark.slow
def test_every_key_that_a_part_alone_reads_is_in_the_table() -> None:
    core, everything = keys_read("trainer"), set()
    for part, folder in FOLDERS.items():
        alone = set() if part == TELLS else keys_read(f"workbench/{folder}") - core
        assert {BESIDE.get(key, key) for key in alone} <= ASKED[part].keys(), part
        everything |= alone
    assert everything >= {"checkpoint.mirror_wait", "logging.wandb", "export.base_model"}, "the search finds what it should"
    assert ASKED.keys() == {each.name for each in fields(Ports)} == FOLDERS.keys()


@pytest.mark.parametrize("key", [key for keys in ASKED.values() for key in keys])
def test_what_is_asked_of_a_part_that_is_not_there_is_refused_by_its_key(key: str) -> None:
    config = configs.parse(MINIMAL | ASKING[key])
    with pytest.raises(UserError, match=rf"^{re.escape(key)} = .* this run was opened without; .*workbench import PORTS"):
        refuse_unserved(config, Ports())
    assert refuse_unserved(config, PORTS) == ""


@pytest.mark.parametrize("only", ["train", "measure"])
def test_a_hub_id_is_refused_by_its_key_without_the_hub(only: str) -> None:
    with pytest.raises(UserError, match=r"^model.path = 'a/b' .* this run was opened without; .*workbench import PORTS"):
        Session.open(configs.parse(MINIMAL | {"model": {"family": "sdxl", "path": "a/b"}}), only=only)


def test_what_nobody_asked_for_is_said_and_not_refused() -> None:
    lost = "advice on memory, report, verdict, model card, summary, TensorBoard files"
    assert refuse_unserved(configs.parse(MINIMAL), Ports()) == lost
