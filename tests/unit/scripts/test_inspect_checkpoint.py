"""scripts/inspect_checkpoint.py: says what is there, and no damage makes it raise."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from scripts import inspect_checkpoint
from trainer import config as configs
from trainer.base import files
from trainer.checkpoint import state, store
from trainer.checkpoint.state import Pin, Progress


@pytest.fixture
def inspect(monkeypatch, capsys):
    """folder -> (exit status, what it prints, what it prints on stderr)."""

    def run(folder: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", str(folder)])
        status = inspect_checkpoint.main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


class Piece:
    def __init__(self, **values) -> None:
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, state) -> None: ...


def census(step: int = 40) -> dict[str, state.Provider]:
    """What a run of a small Flux DoRA in float8 saves, with AdamW in 8 bit."""
    config = configs.parse({
        "run": {"name": "bear", "output_dir": "outputs/bear", "max_steps": 1000},
        "model": {
            "family": "flux", "path": "models/flux",
            "components": {"transformer": {"dtype": "fp8_e4m3", "backend": "native", "compute": "bf16"}},
        },
        "data": {"sources": [{"path": "photos"}]},
        "adapter": {"type": "dora", "rank": 4, "alpha": 2.0, "targets": ["*.to_q"]},
        "optimizer": {"name": "adamw8bit"},
    })  # fmt: skip
    layer = "transformer.transformer_blocks.{}.attn.to_q"
    frozen = {
        layer.format(i): {
            "format": "fp8_e4m3", "backend": "native", "library": "torch 2.13.0", "shape": [64, 64],
            "relative_error": 0.02 + i / 1000, "tensors": {"weight": {"dtype": "F8_E4M3", "sha256": "0" * 64}},
        }
        for i in range(3)
    } | {"transformer.norm": {"tensors": {"weight": {"dtype": "F32", "sha256": "1" * 64}}}}  # fmt: skip
    adapter = {}
    for i in range(3):
        adapter |= {
            f"{layer.format(i)}.lora_A.weight": torch.full((4, 64), 0.5),
            f"{layer.format(i)}.lora_B.weight": torch.zeros(64, 4),
            f"{layer.format(i)}.lora_magnitude_vector": torch.ones(64),
        }
    norms = {f"{layer.format(i)}.{kind}_norm": torch.ones(64) for i in range(3) for kind in ("base", "original", "adapted")}
    optimizer = {
        "group.0|step": step, "group.0|state1": torch.zeros(1536, dtype=torch.uint8),
        "group.0|qmap1": torch.linspace(-1, 1, 256), "group.0|absmax1": torch.zeros(6),
    }  # fmt: skip
    return {
        "adapter": Piece(**adapter),
        "config": Pin(configs.tree(config), lambda *_: None),
        "data": Pin({"photos": "ab" * 32, "micro_batches": 2}, lambda *_: None),
        "environment": Pin({"torch": "2.13.0", "device": "a card, CUDA 13.0", "processes": 1}, lambda *_: None),
        "model": Pin({"vae": "cd" * 32, "tokenizers": "ef" * 32}, lambda *_: None),
        "norms": Piece(held={"unet": "nf4"}, **norms),
        "optimizer": Piece(**optimizer),
        "origin": Piece(family="flux", alphas=[["transformer.a", 2.0]]),
        "progress": Progress(step, 2 * step, 1, 1000, "2026-01-02T03:04:05+00:00"),
        "quantization": Pin(frozen, lambda *_: None),
        "scaler": Piece(),
        "schedule": Piece(last_epoch=step - 1, _last_lr=[1e-4, 1e-4]),
    }  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return store.save(tmp_path / "run" / "checkpoints", 40, state.pack(census()))


def rewrite(folder: Path, file: str, data: bytes) -> None:
    """Change a file, and the manifest with it: damage that only reading can find."""
    (folder / file).write_bytes(data)
    manifest = json.loads((folder / store.MANIFEST).read_text())
    contents = {name: [(folder / name).read_bytes()] for name in manifest["files"]}
    step = int(folder.name.removeprefix("step-"))
    shutil.rmtree(folder)
    store.save(folder.parent, step, contents)


def words(line: str) -> list[str]:
    return line.split()


def test_a_valid_checkpoint(inspect, checkpoint: Path) -> None:
    status, printed, errors = inspect(checkpoint)
    assert (status, errors) == (0, "")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    digest = json.loads((checkpoint / "manifest.json").read_text())["files"]["adapter.safetensors"]
    shown_bytes = f"{digest['bytes']:,}".replace(",", " ")
    for expected in (
        "valid: every byte is as its manifest says",
        "step 40",
        "length of the schedule 1 000",
        "images 80",
        "updates skipped as not finite 1",
        "started 2026-01-02T03:04:05+00:00",
        "run bear in outputs/bear",
        "model flux from models/flux",
        "adapter type dora, rank 4, alpha 2.0, targets ['*.to_q']",
        "optimizer name adamw8bit, lr 0.0001, weight_decay 0.01",
        "transformer stored as fp8_e4m3, computes in bf16",
        "device a card, CUDA 13.0",
        f"adapter.safetensors {shown_bytes} {digest['sha256'][:12]} as listed",
        "pieces (layout 6, this version reads 6)",
        "adapter 1 9 tensors in adapter.safetensors",
        "data 1 0 tensors in data.safetensors, micro_batches 2, photos abababababab",
        "model 1 tokenizers efefefefefef, vae cdcdcdcdcdcd",
        "norms 1 9 tensors in norms.safetensors, held.unet nf4",
        "F32 9 2 304 0 9 of [64]",
        "optimizer 1 3 tensors in optimizer.safetensors, group.0|step 40",
        "scaler 1 empty",
        "F32 9 6 912 0 3 of [4, 64], 3 of [64, 4], 3 of [64]",
        "U8 1 1 536 - 1 of [1536]",
        "transformer fp8_e4m3 native torch 2.13.0 3 2.20%",
        "transformer - - F32 1 no layers: norms, embeddings",
    ):
        assert expected in lines, f"{expected!r} is not in\n{printed}"
    assert "NOT" not in printed and "cannot" not in printed


def test_an_optional_piece_that_the_checkpoint_lists_is_part_of_it(inspect, tmp_path: Path) -> None:
    average = state.Piece("average", file="average.safetensors", asked_by="average.decay")
    pieces = census() | {"average": Piece(updates=40, **{"a.lora_A.weight": torch.full((4, 64), float("nan"))})}
    folder = store.save(tmp_path / "checkpoints", 40, state.pack(pieces, state.PIECES | {"average": average}))
    status, printed, errors = inspect(folder)
    assert (status, errors) == (0, "")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "average 1 1 tensors in average.safetensors, updates 40" in lines
    assert "values that are NOT FINITE: a.lora_A.weight" in lines
    assert inspect(folder.parent)[0] == 0
    # As a run of this version lists it: without a key that asks for it, it is unknown.
    tree = json.loads((folder / "state.json").read_text())
    del tree["pieces"]["average"]["asked_by"]
    rewrite(folder, "state.json", files.json_bytes(tree))
    status, _, errors = inspect(folder)
    assert status == 2 and "has an unknown piece, average" in errors


def test_values_that_are_not_finite_are_named(inspect, tmp_path: Path) -> None:
    pieces = census()
    name = "transformer.transformer_blocks.1.attn.to_q.lora_B.weight"
    pieces["adapter"].values[name][3, 1] = float("nan")
    pieces["optimizer"].values["group.0|absmax1"][0] = float("inf")
    status, printed, _ = inspect(store.save(tmp_path, 1, state.pack(pieces)))
    assert status == 0
    assert f"values that are NOT FINITE: {name}\n" in printed
    assert "values that are NOT FINITE: group.0|absmax1\n" in printed


def test_damage_is_named_and_the_rest_is_shown(inspect, checkpoint: Path) -> None:
    path = checkpoint / "adapter.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, printed, errors = inspect(checkpoint)
    assert status == 2
    assert errors == f"error: {checkpoint} is not a valid checkpoint: adapter.safetensors does not match its SHA-256\n"
    assert "NOT VALID: adapter.safetensors does not match its SHA-256\n" in printed
    assert "NOT as listed" in printed and "a card, CUDA 13.0" in printed and "3 of [4, 64]" in printed
    (checkpoint / "state.json").unlink()
    (checkpoint / "surplus.txt").write_text("")
    status, printed, errors = inspect(checkpoint)
    assert status == 2 and "3 of [4, 64]" in printed and "torch 2.13.0" in printed
    lines = [words(line) for line in printed.splitlines()]
    assert ["state.json", "missing"] in lines
    assert any(line[0] == "surplus.txt" and line[-4:] == ["not", "in", "the", "manifest"] for line in lines if line)


def test_what_only_reading_finds(inspect, checkpoint: Path) -> None:
    """A manifest vouches for bytes, not for sense."""
    whole = json.loads((checkpoint / "state.json").read_text())

    def changed(change) -> bytes:
        tree = copy.deepcopy(whole)
        change(tree)
        return files.json_bytes(tree)

    for change, expected in (
        (lambda t: t.update(layout=2), "checkpoint layout 2, this version reads layout 6"),
        (lambda t: t["pieces"].pop("scaler"), "lacks scaler"),
        (lambda t: t["pieces"]["data"].update(version=9), "data has version 9, this version reads 1"),
        (lambda t: t["pieces"]["progress"].update(state=[]), "state.json has no progress"),
        (lambda t: t["pieces"]["adapter"].update(tensors=["one"]), "does not hold the tensors that state.json lists"),
    ):
        rewrite(checkpoint, "state.json", changed(change))
        status, printed, errors = inspect(checkpoint)
        assert status == 2 and expected in errors, expected
        assert "3 of [4, 64]" in printed
    rewrite(checkpoint, "state.json", files.json_bytes(whole))
    rewrite(checkpoint, "quantization.json", b'{"transformer.a": 3}')
    status, _, errors = inspect(checkpoint)
    assert status == 2 and "TypeError" in errors
    nested: object = 1
    for _ in range(700):
        nested = {"a": nested}
    whole["pieces"]["scaler"]["state"] = nested
    rewrite(checkpoint, "state.json", json.dumps(whole).encode())
    rewrite(checkpoint, "adapter.safetensors", empty_tensor([2**62, 2**62, 0]))
    status, printed, errors = inspect(checkpoint)
    assert status == 2 and "RecursionError" in printed
    assert "adapter.safetensors\ncannot be read: " in printed and "a card, CUDA 13.0" in printed


def empty_tensor(shape: list[int]) -> bytes:
    """A well-formed file with one tensor of no elements."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.slow
def test_no_damage_makes_it_raise(inspect, checkpoint: Path) -> None:
    """Random bytes, and random values where the manifest vouches for them."""
    rng = random.Random(0)
    kept = checkpoint.with_name("kept")
    shutil.copytree(checkpoint, kept)
    for _ in range(40):
        path = checkpoint / rng.choice(sorted(p.name for p in kept.iterdir()))
        data = bytearray(path.read_bytes())
        kind = rng.choice(["flip", "truncate", "delete"])
        if kind == "delete":
            path.unlink()
        elif kind == "truncate":
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            for _ in range(rng.choice([1, 30])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        status, _, errors = inspect(checkpoint)
        assert status == 2 and errors.startswith(f"error: {checkpoint} is not a valid checkpoint: "), kind
        shutil.copy(kept / path.name, path)
    assert inspect(checkpoint)[0] == 0
    for file in ("state.json", "quantization.json"):
        whole = json.loads((kept / file).read_text())
        for _ in range(25):
            tree = copy.deepcopy(whole)
            for _ in range(rng.choice([1, 5])):
                node, key = tree, rng.choice(sorted(tree))
                while isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.9:
                    node = node[key]
                    key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
                node[key] = rng.choice([None, -1, 1e300, "\x1b[2J\n\ud800", [], [[1]], {}, {"a": None}, 2**200])
            rewrite(checkpoint, file, json.dumps(tree).encode())
            status, printed, _ = inspect(checkpoint)
            assert status in (0, 2) and "\x1b" not in printed
        rewrite(checkpoint, file, (kept / file).read_bytes())


def test_a_run(inspect, checkpoint: Path) -> None:
    root = checkpoint.parent
    for step in (50, 60):
        store.save(root, step, state.pack(census(step)))
    (root / "step-00000060" / "optimizer.safetensors").write_bytes(b"")
    shutil.copytree(checkpoint, root / "superseded-step-00000070-2")
    (root / ".step-00000080.new.tmp").mkdir()
    for folder in (root.parent, root):
        status, printed, errors = inspect(folder)
        assert (status, errors) == (0, "")
        lines = {line.split()[0]: " ".join(line.split()[1:]) for line in printed.splitlines() if line}
        bytes_ = f"{sum(p.stat().st_size for p in checkpoint.iterdir()):,}".replace(",", " ")
        assert lines["step-00000040"] == f"40 {bytes_} yes"
        assert lines["step-00000050"].endswith("yes --resume_from auto goes on from here")
        assert "no: optimizer.safetensors has 0 bytes, the manifest says" in lines["step-00000060"]
        assert lines["superseded-step-00000070-2"].endswith("yes set aside: the run went on from an earlier step")
        assert "no: manifest.json is missing left by a save that was killed" in lines[".step-00000080.new.tmp"]
        assert printed.count("auto goes on") == 1
    for step in (40, 50):
        (root / store.folder_name(step) / "manifest.json").unlink()
    status, printed, errors = inspect(root)
    assert status == 2 and "auto goes on" not in printed
    assert errors == f"error: no checkpoint in {root} is valid; --resume_from auto refuses to start\n"
    rewritten = json.loads((root / "superseded-step-00000070-2" / "state.json").read_text()) | {"layout": 2}
    adapter = (root / "step-00000060" / "adapter.safetensors").read_bytes()
    store.save(root, 90, {"state.json": [files.json_bytes(rewritten)], "adapter.safetensors": [adapter]})
    status, printed, errors = inspect(root)
    assert status == 2 and "checkpoint layout 2, this version reads layout 6" in errors
    assert f"error: --resume_from auto refuses to go on from {root / 'step-00000090'}: " in errors


def test_what_is_no_checkpoint(inspect, tmp_path: Path) -> None:
    status, _, errors = inspect(tmp_path)
    assert status == 2 and "is not a checkpoint, and holds none" in errors
    status, _, errors = inspect(tmp_path / "nowhere")
    assert status == 2 and "nowhere is not a folder; give a checkpoint's" in errors
    (tmp_path / "checkpoints").mkdir()
    status, _, errors = inspect(tmp_path)
    assert status == 2 and "there is no checkpoint in" in errors and "starts from the beginning" in errors
    (tmp_path / "step-00000001").mkdir()
    status, _, errors = inspect(tmp_path / "step-00000001")
    assert status == 2 and "is not a valid checkpoint: manifest.json is missing" in errors
