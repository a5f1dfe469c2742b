"""Averages that were set aside, as files: found by their steps, each average once, and damage is seen."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, serialize, write_tensors
from trainer.ema import Averages, power_function, snapshots


def set_aside(folder: Path, steps: int, skipped: tuple[int, ...] = ()) -> Averages:
    parameter = nn.Parameter(torch.zeros(3))
    kept = Averages(
        {"net.lora_A.weight": parameter}, {"0.100": power_function(0.1), "0.050": power_function(0.05)}, lambda: None
    )
    for step in range(1, steps + 1):
        if step not in skipped:
            with torch.no_grad():
                parameter.fill_(step)
            kept.update()
        snapshots.write(folder, step, 0, kept, lambda own: {"net": torch.ones(2, 1)})
    return kept


def test_what_is_read_is_each_average_once_up_to_the_step(tmp_path: Path) -> None:
    kept = set_aside(tmp_path, 5, skipped=(2, 5))
    told = [(each.profile.updates, each.profile.length, each.file.path.name[:13]) for each in snapshots.read(tmp_path, 5)]
    assert told == [
        (updates, length, f"step-{step:08d}") for updates, step in ((1, 2), (2, 3), (3, 5)) for length in (0.05, 0.10)
    ]
    assert {each.profile.updates for each in snapshots.read(tmp_path, 3)} == {1, 2}
    stored = snapshots.read(tmp_path, 5)
    shares = [0.0, 0.0, 0.0, 0.0, 0.25, 0.75]
    made = snapshots.combined(stored, shares)["net.lora_A.weight"]
    expected = 0.25 * kept.of("0.050")["net.lora_A.weight"].double() + 0.75 * kept.of("0.100")["net.lora_A.weight"].double()
    assert torch.allclose(made, expected, rtol=1e-12)
    snapshots.remove_after(tmp_path, 3)
    assert list(snapshots.steps(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("place", [-1, 20])
def test_damage_is_seen_and_written_again(tmp_path: Path, place: int) -> None:
    kept = set_aside(tmp_path, 2)
    path = snapshots.steps(tmp_path)[2]
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    assert snapshots.problem(path) is not None
    with pytest.raises(UserError, match="is damaged"):
        snapshots.read(tmp_path, 2)
    snapshots.write(tmp_path, 2, 0, kept, lambda own: {"net": torch.ones(2, 1)})
    assert path.read_bytes() == sound


def test_no_bit_of_the_header_can_be_another(tmp_path: Path) -> None:
    """Each is refused by name, whatever else it makes the file say: other updates, exchanged tensors, another step."""
    set_aside(tmp_path, 1)
    path = snapshots.steps(tmp_path)[1]
    sound = path.read_bytes()
    length = 8 + int.from_bytes(sound[:8], "little")
    assert length < len(sound) < length + 100, "nearly all of the file"
    for place in range(8 * length):
        damaged = bytearray(sound)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path.name} is damaged: "):
            snapshots.read(tmp_path, 1)


def test_a_file_of_an_earlier_version_is_named_for_what_it_is(tmp_path: Path) -> None:
    """As commit 5ba361e wrote them: the digest is of the tensors alone. What is damaged besides is called so."""
    kept = set_aside(tmp_path, 1)
    path = snapshots.steps(tmp_path)[1]
    file = TensorFile(path)
    tensors = file.read_all()
    _, *held = serialize(tensors)
    write_tensors(path, tensors, file.metadata | {"sha256": hashlib.sha256(b"".join(held)).hexdigest()})
    with pytest.raises(UserError, match="was written by an earlier version .*; make the average with that version, or move"):
        snapshots.read(tmp_path, 1)
    snapshots.write(tmp_path, 1, 0, kept, lambda own: {"net": torch.ones(2, 1)})
    assert snapshots.problem(path) is None, "a run that comes there again writes it anew"
    write_tensors(path, tensors, file.metadata | {"sha256": hashlib.sha256(b"".join(held)).hexdigest()})
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="is damaged: it does not match its SHA-256"):
        snapshots.read(tmp_path, 1)
