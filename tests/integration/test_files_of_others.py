"""Every file of others, with one value changed, is read or refused in one sentence that names the file and the key.

What our own code raises meanwhile is a fault of ours, and no sentence about the file.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import tomli_w
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from scripts import make_model
from tests import foreign_configs
from tests.harness import ROOT, Workbench
from trainer.base.errors import UserError, ending
from trainer.base.tensorfile import write_tensors
from trainer.data import scan
from trainer.data.sources import Source
from trainer.models import FAMILIES
from trainer.models.config_files import published_config, shards
from trainer.models.loading import ModelSource
from trainer.models.opening import open_model
from trainer.models.tokenizers import load_tokenizer
from workbench.adapter_files.opening import open_adapter
from workbench.importing.writing import draft_of

ODD: tuple[Any, ...] = (
    None, True, 1, -1, 0, 1.5, 10**30, float("inf"), "x", "", [24], [], [[1]], {}, {"a": 1},
)  # fmt: skip
KINDS = (None, True, -1, 10**30, "x", [24])  # one of each, where every value is changed
SEEDED = 300


@dataclass(frozen=True)
class Change:
    """One value in one JSON file of a model. path: of the value."""

    family: str
    file: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        return f"{self.family} {self.file} {'.'.join(map(str, self.path))} = {self.value!r}"

    @property
    def key(self) -> str:
        """The last name in the path: the values of a list have its name."""
        return next(part for part in reversed(self.path) if isinstance(part, str))

    def write(self, root: Path, original: Any) -> None:
        (root / self.file).write_text(json.dumps(changed(original, self.path, self.value)))


def changed(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """The tree with another value at the path."""
    result = node = copy.deepcopy(tree)
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return result


def paths_of(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every value but those of a vocabulary, of lists the first two."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, value in items:
        if path[:1] == ("model",) and key in ("vocab", "merges"):
            yield (*path, key)
        elif not str(key).startswith("_") or key == "_class_name":
            yield (*path, key)
            yield from paths_of(value, (*path, key)) if len(path) < 3 else ()


def files_of(root: Path) -> list[str]:
    names = ("model_index.json", "config.json", "scheduler_config.json", "tokenizer.json", "tokenizer_config.json",
             "special_tokens_map.json")  # fmt: skip
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.json") if path.name in names)


def every_change(root: Path, family: str, values: tuple[Any, ...]) -> list[Change]:
    trees = {file: json.loads((root / file).read_text()) for file in files_of(root)}
    return [Change(family, file, path, odd) for file, tree in trees.items() for path in paths_of(tree) for odd in values]


def readers(root: Path, family: str, file: str) -> list[Callable[[], Any]]:
    """What a run reads of the file, before any weight."""

    def source() -> ModelSource:
        return open_model(FAMILIES[family], str(root))

    part = Path(file).parts[0]
    if file == "model_index.json":
        return [source]
    if part == "scheduler":
        return [lambda: source().scheduler]
    if file.endswith("/config.json"):
        return [lambda: source().check_kind(), lambda: source().verify(part), lambda: source().build(part)]
    return [lambda: source().check_tokenizers(), lambda: encoded(source(), family, root / part)]


def encoded(source: ModelSource, family: str, folder: Path) -> None:
    """A caption in the tokens of the folder's tokenizer, as the family takes them, which the encoder must have."""
    encoder = source.family.files.tokenizers[folder.name]
    config = source.config(encoder, whole=True)
    tokenizer = load_tokenizer(folder, folder.name, config)
    model = SimpleNamespace(tokenizers=defaultdict(lambda: tokenizer), options={}, configs=defaultdict(dict))
    for ids in FAMILIES[family].text.tokens(model, encoder, ["a cup"]):
        assert int(ids.max()) < config["vocab_size"] and ids.shape[-1] <= config.get("max_position_embeddings", 512)


def fault(change: Change, root: Path) -> str:
    """What is wrong with how the changed file is read; "" where nothing is."""
    for read in readers(root, change.family, change.file):
        try:
            read()
        except UserError as error:
            said, tokenizer, part = str(error), "token" in change.file, (root / change.file).parent
            name = part.name if tokenizer else Path(change.file).name
            if name not in said or (str(part) not in said and f"the {part.name}'s {name}" not in said):
                return f"{change}: no file in {said!r}"
            # A value that the published model has, too: its weights are at fault.
            usual = published_config(tuple(FAMILIES[change.family].files.hub_ids.values()), part.name).get(change.key)
            if not tokenizer and change.key not in said and (change.value is None or change.value != usual):
                return f"{change}: no key in {said!r}"
            return ""
        except Exception as error:
            return f"{change}: {type(error).__name__}: {error}"
    return ""


def faults(changes: list[Change], roots: dict[str, Path]) -> list[str]:
    wrong = []
    for change in changes:
        root = roots[change.family]
        original = (root / change.file).read_bytes()
        change.write(root, json.loads(original))
        wrong.append(fault(change, root))
        (root / change.file).write_bytes(original)
    return [each for each in wrong if each]


@pytest.fixture
def roots(bench: Workbench) -> dict[str, Path]:
    made = {family: bench.models / family for family in FAMILIES} | {"flux2": ROOT / "examples" / "pocket_flux2"}
    for family, root in made.items():
        wanted = ["--size", "tiny", "--family", family, "--layout", "diffusers", str(root)]
        assert root.exists() or make_model.main(wanted) == 0
    return {family: shutil.copytree(root, bench.tmp / family) for family, root in made.items()}


def test_a_changed_value_is_read_or_named(roots: dict[str, Path]) -> None:
    changes = [change for family, root in roots.items() for change in every_change(root, family, ODD)]
    assert len(changes) > 5 * SEEDED
    wrong = faults(random.Random(48).sample(changes, SEEDED), roots)
    assert not wrong, "\n".join(wrong)


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILIES)
def test_every_changed_value_is_read_or_named(roots: dict[str, Path], family: str) -> None:
    wrong = faults(every_change(roots[family], family, KINDS), roots)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", ["trainer.models.config_files.check_values", "trainer.models.tokenizers._made"])
def test_a_mistake_of_ours_is_not_blamed_on_a_file(roots: dict[str, Path], place: str, monkeypatch) -> None:
    """It keeps its traceback, and status 1."""

    def mistaken(*given: Any, **keys: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(place, mistaken)
    source = open_model(FAMILIES["sdxl"], str(roots["sdxl"]))
    with pytest.raises(TypeError, match="planted") as error:
        source.check_kind()
        load_tokenizer(roots["sdxl"] / "tokenizer", "tokenizer")
    assert ending(error.value)[0] == 1


def surveyed(folder: Path) -> list[str]:
    """The problems of a folder of photos."""
    return list(scan.survey([Source(index=0, path=str(folder), resolutions=(64,))]).damaged)


def of_photos(folder: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (64, 64), "red").save(folder / f"{name}.png")


def table(folder: Path) -> Path:
    """A table of images, of one row."""
    of_photos(folder)
    file = folder / "metadata.jsonl"
    file.write_text(json.dumps({"file_name": "a.png", "text": "a cup"}))
    return file


def caption(folder: Path) -> Path:
    """A caption in JSON."""
    of_photos(folder)
    file = folder / "a.json"
    file.write_text(json.dumps({"caption": "a cup", "tags": ["cup"]}))
    return file


def peft(folder: Path) -> Path:
    """What PEFT writes beside a LoRA."""
    layer = "base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 1280), f"{layer}.lora_B.weight": torch.ones(1280, 4)}
    write_tensors(folder / "adapter_model.safetensors", tensors)
    file = folder / "adapter_config.json"
    fields = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["to_q"], "use_dora": False, "bias": "none",
        "rank_pattern": {"to_q": 4}, "alpha_pattern": {}, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip
    file.write_text(json.dumps(fields))
    return file


def index(folder: Path) -> Path:
    """An index of shards."""
    (folder / "one.safetensors").write_bytes(b"")
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": {"a": "one.safetensors"}}))
    return file


def csv(folder: Path) -> Path:
    """A table of images with cells of text, which is all that CSV has."""
    of_photos(folder)
    (folder / "metadata.csv").write_text("file_name,text\na.png,a cup\n")
    return folder / "metadata.csv"


def parquet(folder: Path) -> Path:
    """A table of images with columns that have types."""
    of_photos(folder)
    return folder / "metadata.parquet"


def header(folder: Path) -> Path:
    """An adapter whose header has what kohya's scripts and diffusers note."""
    layer = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 1280), f"{layer}.lora_B.weight": torch.ones(1280, 4)}
    write_tensors(folder / "lora.safetensors", tensors)
    return folder / "lora.safetensors"


NOTED: dict[str, Any] = {
    "ss_network_args": {"algo": "lora", "dora_scale": "magnitude"}, "ss_base_model_version": "sdxl_base_v1-0",
    "modelspec.architecture": "stable-diffusion-xl-v1-base/lora", "ss_network_alpha": "4", "ss_network_dim": "4",
    "lora_adapter_metadata": {"unet.lora_alpha": 4, "unet.r": 4, "unet.alpha_pattern": {"to_q": 4}, "unet.use_rslora": False},
}  # fmt: skip


def rewritten(file: Path, tree: Any) -> None:
    """The file with this content, in its own format."""
    if file.suffix == ".csv":
        file.write_text("".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in (tree.keys(), tree.values())))
    elif file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([tree]), file)
    elif file.suffix == ".safetensors":
        stored = load_file(file)
        write_tensors(file, stored, {key: v if isinstance(v, str) else json.dumps(v) for key, v in tree.items()})
    else:
        file.write_text({".json": json.dumps, ".yaml": yaml.safe_dump, ".toml": tomli_w.dumps}[file.suffix](tree))


@pytest.mark.parametrize(
    ("make", "tree"),
    [(csv, {"file_name": "a.png", "text": "a cup"}), (parquet, {"file_name": "a.png", "text": "a cup"}), (header, NOTED)],
    ids=["csv", "parquet", "header"],
)
def test_files_that_are_no_json_are_read_or_named(tmp_path: Path, make: Callable, tree: dict[str, Any]) -> None:
    file, wrong = make(tmp_path), []
    for path in paths_of(tree):
        for odd in ODD:
            try:
                rewritten(file, changed(tree, path, odd))
            except (OverflowError, pyarrow.ArrowException):
                continue  # Parquet has no such value
            try:
                said = surveyed(tmp_path) if file.suffix != ".safetensors" else bool(open_adapter(file)) and []
            except UserError as error:
                said = [str(error)]
            name = str(next(part for part in reversed(path) if isinstance(part, str)))
            named = [line.replace(f"names {str(odd)!r}", name) for line in said]  # a row that names no file
            wrong += [f"{path} = {odd!r}: {line}" for line in named if file.name not in line or name not in line]
    assert not wrong, "\n".join(wrong)


# By key of a file, the option that it becomes or decides, which the message names in its place.
BECOMES = {
    "LoRA_type": "algo", "max_resolution": "resolution", "sdxl": "train_network.py", "network_module": "algo",
    "process": "arch", "pretrained_model_name_or_path": "model.family",
}  # fmt: skip
READERS = {".json": json.loads, ".yaml": yaml.safe_load, ".toml": tomllib.loads}


def configs_of_trainers(folder: Path) -> Iterator[tuple[Path, Path]]:
    """(a config, a file of it that is a tree) of every trainer."""
    for trainer in foreign_configs.MADE:
        (folder / trainer).mkdir()
        main = foreign_configs.write(folder / trainer, trainer)
        yield from ((main, file) for file in sorted(main.parent.iterdir()) if file.suffix in READERS)
    for name in ("old.toml", "window.json"):
        (folder / name).write_text(foreign_configs.WINDOWS[name])
        yield folder / name, folder / name


@pytest.mark.parametrize("count", [150, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_configs_of_trainers_are_read_or_named(tmp_path: Path, count: int | None) -> None:
    files = list(configs_of_trainers(tmp_path))
    trees = {file: READERS[file.suffix](file.read_text()) for _, file in files}
    changes = [(*each, path, odd) for each in files for path in paths_of(trees[each[1]]) for odd in ODD]
    wrong = []
    for main, file, path, odd in random.Random(48).sample(changes, count) if count else changes:
        if file.suffix == ".toml" and odd is None:
            continue  # TOML has no null
        original = file.read_bytes()
        rewritten(file, changed(trees[file], path, odd))
        try:
            draft_of(main)
        except UserError as error:
            names = [str(part).lstrip("-") for part in path if isinstance(part, str)][-1:]
            if file.name not in str(error) or not all(n in str(error) or BECOMES.get(n, n) in str(error) for n in names):
                wrong.append(f"{file.name} {path} = {odd!r}: {error}")
        file.write_bytes(original)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (table, lambda file: surveyed(file.parent)), (caption, lambda file: surveyed(file.parent)),
        (peft, lambda file: open_adapter(file.parent / "adapter_model.safetensors")), (index, shards),
    ],
    ids=["table", "caption", "adapter_config", "index"],
)  # fmt: skip
def test_other_files_are_read_or_named(tmp_path: Path, make: Callable, read: Callable) -> None:
    file = make(tmp_path)
    tree, wrong = json.loads(file.read_text()), []
    assert not read(file) or make is peft or make is index
    for path in paths_of(tree):
        for odd in ODD:
            change = Change("", file.name, path, odd)
            change.write(tmp_path, tree)
            try:
                told = read(file) if make in (table, caption) else not read(file) and []
            except UserError as error:
                told = [str(error)]
            # Infinity is no JSON: no key of it is read.
            parts = {file.name, change.key} if odd != float("inf") else {file.name}
            shown = {line: line.replace(repr(odd), change.key) for line in told or []}  # a value tells its key, too
            wrong += [f"{change}: {line}" for line, of in shown.items() if not all(part in of for part in parts)]
    assert not wrong, "\n".join(wrong)
