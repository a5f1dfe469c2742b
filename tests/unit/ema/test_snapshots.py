"""Averages that a run set aside: any damage is seen, wherever it is in the file, and ends in one typed error."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.ema import snapshots
from trainer.ema.power import power_function
from trainer.ema.running import Averages
from trainer.errors import UserError
from trainer.tensorfile import serialize


def written(folder: Path, *, step: int = 4, shape: tuple[int, ...] = (3, 5)) -> Path:
    torch.manual_seed(step)
    parameters = {f"{layer}.lora_A.weight": nn.Parameter(torch.randn(shape)) for layer in "ab"}
    averages = Averages(parameters, {"0.050": power_function(0.05), "0.100": power_function(0.1)}, lambda: None)
    for _ in range(step // 2):
        averages.update()
    return snapshots.write(folder, step, 0, averages, lambda own: {})


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    """All of the header's, and a thousand of the rest."""
    path = written(tmp_path)
    good = path.read_bytes()
    assert snapshots.problem(path) is None and len(snapshots.read(tmp_path, 4)) == 2
    header = 8 + int.from_bytes(good[:8], "little")
    rest = random.Random(0).sample(range(8 * header, 8 * len(good)), 500)
    for bit in (*range(8 * header), *rest):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert snapshots.problem(path) is not None, (bit, good[max(0, bit // 8 - 20) : bit // 8 + 20])
    with pytest.raises(UserError, match="step-00000004.safetensors is damaged: "):
        snapshots.read(tmp_path, 4)


def edited(good: bytes, edit) -> bytes:
    """With another header, still a well-formed file."""
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + good[8 + size :]


def exchanged(header: dict) -> None:
    one, other = header["0.050|a.lora_A.weight"], header["0.100|b.lora_A.weight"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


EDITS = {
    "updates": lambda header: header["__metadata__"].update(updates="1"),
    "offsets exchanged": exchanged,
    "an epoch less": lambda header: header["__metadata__"].pop("epoch"),
    "no digest": lambda header: header["__metadata__"].pop("sha256"),
    "another digest": lambda header: header["__metadata__"].update(sha256="0" * 64),
    "an empty one": lambda header: header["__metadata__"].update(sha256=""),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_header_that_was_edited_is_seen(tmp_path: Path, edit: str) -> None:
    path = written(tmp_path)
    path.write_bytes(edited(path.read_bytes(), EDITS[edit]))
    assert snapshots.problem(path) is not None


@pytest.mark.parametrize(
    ("name", "fields"), [("long|a", {}), ("0|a", {}), ("nan|a", {}), ("0.1|a", {"epoch": "x"}), ("0.1|a", {"updates": "0"})]
)
def test_what_no_run_writes_is_a_problem_and_no_exception(tmp_path: Path, name: str, fields: dict[str, str]) -> None:
    """With the right digest."""
    path, said = tmp_path / "step-00000004.safetensors", {"step": "4", "epoch": "0", "updates": "2"} | fields
    tensors = {name: torch.ones(2)}
    digest = snapshots.digest_of(serialize(tensors, said | {"sha256": "0" * 64}))
    path.write_bytes(b"".join(serialize(tensors, said | {"sha256": digest})))
    assert snapshots.problem(path) is not None


def test_a_file_of_another_run_is_named(tmp_path: Path) -> None:
    written(tmp_path, step=4)
    written(tmp_path, step=6, shape=(2, 5))
    with pytest.raises(UserError, match="step-00000006.safetensors has other tensors than the first file: .* another run"):
        snapshots.read(tmp_path, 6)
