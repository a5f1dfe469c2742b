"""What processes of one run may not differ in, and what they may; that real ones end so is in integration/test_unlike.py."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import Workbench
from tests.unit.runtime.test_processes import pair, side_by_side  # noqa: F401
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.checkpoint.state import Pieces, Pin
from trainer.resume.unlike import DERIVED, MAY_DIFFER, refuse_unlike_configs, refuse_unlike_states


@pytest.fixture
def compared(pair, tmp_path: Path):  # noqa: F811
    """What both say of configs with these keys."""

    def compare(one: dict[str, Any], other: dict[str, Any]) -> list[object]:
        parsed = [Workbench(Path("models"), tmp_path).config(**keys) for keys in (one, other)]
        works = [lambda view, _, config=config: refuse_unlike_configs(view, config) for config in parsed]
        return side_by_side(pair, *works)

    return compare


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ({"run__seed": 7}, {"run__seed": 8}, "run.seed: 7 in process 0, 8 in process 1"),
        ({"optimizer__lr": 1e-4}, {"optimizer__lr": 5e-3}, "optimizer.lr: 0.0001 in process 0, 0.005 in process 1"),
        ({}, {"run__max_steps": 4}, "run.max_steps: 3 in process 0, 4 in process 1"),
        ({"memory__shard": True}, {}, "memory.shard: True in process 0, False in process 1"),
        ({}, {"run__stop_after": 2}, "run.stop_after: absent in process 0, 2 in process 1"),
        ({}, {"checkpoint__mirror": "s3://a/b"}, "checkpoint.mirror: absent in process 0, 's3://a/b' in process 1"),
        ({}, {"data__cache": "memory"}, "data.cache: 'disk' in process 0, 'memory' in process 1"),
    ],
)
def test_a_key_that_differs_is_named_in_all_with_values_and_ranks(compared, one, other, line: str) -> None:
    refused = compared(one, other)
    assert all(isinstance(error, UserError) for error in refused) and len({*map(str, refused)}) == 1
    assert str(refused[0]).splitlines()[1] == line and len(str(refused[0]).splitlines()) == 3


def test_keys_of_a_machine_may_differ(compared, tmp_path: Path) -> None:
    other = {
        "run__output_dir": "elsewhere", "model__path": "there", "model__cache_dir": "c", "data__cache_dir": "d",
        "data__sources": [{"path": "photos"}], "data__num_workers": 3, "memory__gradient_checkpointing": True,
        "memory__offload": "blocks", "memory__resident_blocks": 1,
    }  # fmt: skip
    assert compared({}, other) == [None, None]


def test_the_keys_that_may_differ_are_these() -> None:
    """Each for a reason that stands beside it, and each a key that there is."""
    patterns = [key.removeprefix("config: ") for key in MAY_DIFFER if key.startswith("config: ")]
    known = [*configs.known_keys()]
    found = {pattern: [key for key in known if fnmatchcase(key, pattern)] for pattern in patterns}
    assert all(found.values()), found
    assert {key for keys in found.values() for key in keys} == {
        "run.output_dir", "model.path", "model.config", "model.revision", "model.variant", "model.cache_dir",
        "model.components.*.path", "data.sources.*.path", "data.sources.*.references", "data.sources.*.masks",
        "data.sources.*.held_out", "data.cache_dir", "data.num_workers",
        "adapter.init_from", "adapter.under", "memory.gradient_checkpointing", "memory.offload", "memory.resident_blocks",
        "validation.samples.*.references", "validation.samples.*.truth",
    }  # fmt: skip


def pieces_of(**values: dict[str, Any]) -> Pieces:
    pieces = Pieces(None)
    for name, value in values.items():
        pieces.enter(name, Pin(value, lambda saved, now: None))
    return pieces


def states_refused(pair, one: Pieces, other: Pieces, *, deterministic: bool = False) -> str:  # noqa: F811
    config = SimpleNamespace(run=SimpleNamespace(deterministic=deterministic))
    works = [lambda view, _, own=own: refuse_unlike_states(view, config, own) for own in (one, other)]
    first, second = side_by_side(pair, *works)
    assert str(first) == str(second) and type(first) is type(second)
    return "" if first is None else str(first)


def test_a_tensor_that_differs_in_one_bit_is_named(pair) -> None:  # noqa: F811
    weight = torch.zeros(3)
    base = {"unet.a": {"library": "quanto 1", "relative_error": 0.1, "tensors": {"weight": {"sha256": "a" * 64}}}}
    own = {"adapter": {"a.weight": weight, "b.weight": weight}, "progress": {"step": 4, "started": "2026-01-01"}}
    one = pieces_of(**own, quantization=base)
    base = {"unet.a": base["unet.a"] | {"library": "quanto 2", "relative_error": 0.2}}
    own |= {"progress": {"step": 4, "started": "2026-01-02"}}
    assert not states_refused(pair, one, pieces_of(**own, quantization=base))
    own["adapter"] = {"a.weight": weight, "b.weight": torch.tensor([0.0, 1e-45, 0.0])}
    base = {"unet.a": base["unet.a"] | {"tensors": {"weight": {"sha256": "b" * 64}}}}
    lines = states_refused(pair, one, pieces_of(**own | {"progress": {"step": 2}}, quantization=base)).splitlines()[1:-1]
    assert [re.match(r"\S+: \S+: ", line)[0] for line in lines] == [
        "adapter: b.weight: ", "progress: step: ", "quantization: unet.a.tensors.weight.sha256: "
    ]  # fmt: skip


def test_cards_may_differ_unless_bytes_are_promised(pair) -> None:  # noqa: F811
    one, other = (pieces_of(environment={"torch": "2.9", "device": card}) for card in ("an L4", "an H100"))
    assert not states_refused(pair, one, other)
    said = states_refused(pair, one, other, deterministic=True)
    assert "environment: device: 'an L4' in process 0, 'an H100' in process 1" in said


def test_a_library_may_not_differ(pair) -> None:  # noqa: F811
    one, other = (pieces_of(environment={"torch": version, "device": "an L4"}) for version in ("2.9", "2.8"))
    assert "environment: torch: '2.9' in process 0, '2.8' in process 1" in states_refused(pair, one, other)


def test_one_process_is_asked_for_nothing() -> None:
    def asked(**more: object) -> None:
        pytest.fail("digests cost time")

    refuse_unlike_states(SimpleNamespace(count=1), None, SimpleNamespace(states=asked))
    assert pieces_of(norms={"a": 1}, origin={"b": 2}, adapter={"c": 3}).states(but=DERIVED) == {"adapter": {"c": 3}}
