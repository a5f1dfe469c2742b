"""Converted weights that are found again, over a network of three layers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.numerics.test_adapted_layers import network
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.quantization import FORMATS, ConvertedWeights

LIBRARY = "a library 1.0"


def cache(folder: Path, library: str = LIBRARY) -> ConvertedWeights:
    return ConvertedWeights(folder, fingerprint="the model", library=library)


def stored(folder: Path) -> Path:
    model, made = network(FORMATS["int4"]), cache(folder)
    assert made.fill(model) == set()
    made.store(model)
    return made.path(model)


def test_what_is_found_is_what_would_be_made_and_no_other_librarys(tmp_path: Path) -> None:
    stored(tmp_path)
    exact, found, other = network(FORMATS["int4"]), network(FORMATS["int4"], seed=1), network(FORMATS["int4"], seed=1)
    assert cache(tmp_path).fill(found) == {"2.weight", "3.weight"}  # the convolution has no such format
    assert all(torch.equal(found[i].payload_weight, exact[i].payload_weight) for i in (2, 3))
    assert cache(tmp_path, "a library 2.0").fill(other) == set()


@pytest.mark.parametrize("about", ["[]", "3", "{}", '{"2": {"sha256": 1}}', "{", None])
def test_a_file_that_says_anything_else_is_converted_again(tmp_path: Path, about: str | None) -> None:
    path = stored(tmp_path)
    write_tensors(path, TensorFile(path).read_all(), {} if about is None else {"layers": about})
    assert cache(tmp_path).fill(network(FORMATS["int4"])) == set()


def test_a_layer_that_changed_is_converted_again(tmp_path: Path) -> None:
    path = stored(tmp_path)
    file = TensorFile(path)
    tensors = file.read_all()
    tensors["2.weight"][0] ^= 1
    write_tensors(path, tensors, file.metadata)
    assert cache(tmp_path).fill(network(FORMATS["int4"])) == {"3.weight"}
    assert json.loads(file.metadata["layers"]).keys() == {"2", "3"}


def test_what_another_machine_is_writing_stays(tmp_path: Path) -> None:
    """Its process number says nothing here: only what nobody wrote to for long is a leftover."""
    fresh, old = (tmp_path / f".{name}.safetensors.{2**22 + 1}.abc.tmp" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    stored(tmp_path)
    assert fresh.exists() and not old.exists()
