"""This tree trains the bytes of the last commit before its rooms were rebuilt: tests/proofs/same_bytes.py, some cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.proofs import same_bytes
from tests.proofs.shared import worktree
from trainer.base.tensorfile import write_tensors

needs_history = pytest.mark.skipif(
    not same_bytes.has(same_bytes.BEFORE),
    reason=f"this clone has no commit {same_bytes.BEFORE}; a shallow one gets it by: git fetch --unshallow",
)
SOME = ("sdxl-dora-fp8_e4m3-adamw-split-sample", "flux-dora-int8-adamw8bit-worker")


def cells(*names: str) -> list[same_bytes.Cell]:
    found = [cell for cell in same_bytes.CELLS if cell.name in names]
    assert len(found) == len(names)
    return found


def test_the_cells_have_every_level() -> None:
    assert len({cell.name for cell in same_bytes.CELLS}) == 12
    levels = {(cell.family, cell.kind, cell.storage) for cell in same_bytes.CELLS}
    assert {(family, kind) for family, kind, _ in levels} == {(f, k) for f in ("sdxl", "flux") for k in ("lora", "dora")}
    for family in ("sdxl", "flux"):
        of = [cell for cell in same_bytes.CELLS if cell.family == family]
        assert {cell.storage for cell in of} == {"fp32", "fp8_e4m3", "nf4", "int8"}
        assert {cell.optimizer for cell in of} == {"adamw", "adamw8bit"}
        for key in ("adapter.rules", "adapter.dropout", "step.accumulation"):
            assert any(key in cell.more for cell in of)


def test_a_difference_is_named(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.arange(6.0).reshape(2, 3)}
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"

    def told(changed: dict[str, torch.Tensor], metadata: dict[str, str]) -> str | None:
        write_tensors(one, tensors, {"k": "v"})
        write_tensors(other, changed, metadata)
        return same_bytes.difference(one, other)

    assert told(tensors, {"k": "v"}) is None
    assert told(tensors, {"k": "w"}) == "metadata 'k' is 'v' and 'w'"
    assert told(tensors | {"b": tensors["b"] + 0.5}, {"k": "v"}) == "tensor b differs, by 0.5 at most"
    # Equal as numbers, not as bytes.
    assert told(tensors | {"a": torch.tensor([-0.0, 1, 2, 3])}, {"k": "v"}) == "tensor a differs, by 0 at most"
    assert told({"a": tensors["a"]}, {"k": "v"}) == "tensor b is in one of them only"
    assert "and torch.float32 (6,)" in str(told(tensors | {"b": torch.arange(6.0)}, {"k": "v"}))


def test_only_the_named_metadata_may_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    tensors = {"a": torch.arange(4.0)}
    write_tensors(one, tensors, {"k": "v", "more": "x"})

    def told(changed: dict[str, torch.Tensor], metadata: dict[str, str]) -> str | None:
        write_tensors(other, changed, metadata)
        return same_bytes.difference(one, other, ("more", "note"))

    assert told(tensors, {"k": "v", "note": "longer than the other header"}) is None
    assert told(tensors, {"k": "w", "more": "y"}) == "metadata 'k' is 'v' and 'w'"
    assert told(tensors, {"k": "v", "odd": "y"}) == "metadata 'odd' is None and 'y'"
    assert told({"a": torch.arange(4.0) + 1}, {"k": "v", "more": "x"}) == "tensor a differs, by 1 at most"
    # The same entries in another order are other bytes.
    content = one.read_bytes()
    other.write_bytes(content.replace(b'"k":"v","more":"x"', b'"more":"x","k":"v"'))
    assert (
        same_bytes.difference(one, other, ("note",))
        == "the tensors and the metadata are equal, their order in the file is not"
    )


@pytest.mark.slow
@needs_history
def test_the_bytes_of_the_commit_before(tmp_path: Path, capsys) -> None:
    failed = same_bytes.prove(same_bytes.BEFORE, cells(SOME[0]), tmp_path)
    assert not failed, capsys.readouterr().out


@pytest.mark.proof
@needs_history
def test_other_draws_are_noticed(tmp_path: Path, capsys) -> None:
    with worktree("HEAD", tmp_path / "changed") as code:
        with open(code / "trainer" / "base" / "draws.py", "a") as draws:
            draws.write("\n\nours = generator\n\n\ndef generator(seed, *keys):\n    return ours(seed + 1, *keys)\n")
        failed = same_bytes.prove(same_bytes.BEFORE, cells(SOME[1]), tmp_path, code=code)
    assert failed == [SOME[1]]
    assert "checkpoints/step-00000001/adapter.safetensors: tensor " in capsys.readouterr().out
