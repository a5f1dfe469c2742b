"""What must not have changed since a run stopped: the base's bytes, not the library that made them; the attention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import Workbench
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.checkpoint.state import Pin
from trainer.resume.allowed_changes import Allowance
from trainer.resume.pins import pin_environment, pin_quantization, refuse_changes, share_out

LAYER: dict[str, Any] = {
    "format": "int4", "library": "quanto 0.2", "relative_error": 0.01, "tensors": {"weight": "a" * 64, "bias": "b" * 64},
}  # fmt: skip
BASE = {"unet.a": LAYER, "unet.b": LAYER}


@pytest.mark.parametrize("other", [{"library": "quanto 9.9"}, {"relative_error": 0.011}, {}])
def test_a_base_of_the_same_bytes_is_the_same(other: dict[str, Any]) -> None:
    pin_quantization(BASE | {"unet.b": LAYER | other}).load_state_dict(dict(BASE))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            {"unet.b": LAYER | {"tensors": {"weight": "c" * 64, "bias": "b" * 64}}},
            "unet.b has other bytes now: the model's file",
        ),
        ({"unet.b": LAYER | {"tensors": {"weight": "a" * 64}}}, "unet.b has other bytes now: the model's file changed"),
        ({"unet.b": LAYER | {"tensors": {}, "library": "quanto 9.9"}}, r"changed \(quanto 0.2 then, quanto 9.9 now\)"),
        ({"unet.b": LAYER | {"format": "int8", "tensors": {}}}, "unet.b is stored as int4 in the checkpoint, as int8 now"),
        ({"unet.c": LAYER}, "unet.c was not there then"),
        ({"unet.a": LAYER | {"format": "int8"}, "unet.b": LAYER | {"format": "int8"}}, "unet.a is stored as int4"),
    ],
)
def test_another_base_is_refused_with_the_first_layer_that_differs(now: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        pin_quantization(BASE | now).load_state_dict(dict(BASE))
    with pytest.raises(UserError, match="unet.b is not there now"):
        pin_quantization({"unet.a": LAYER}).load_state_dict(dict(BASE))


def environment(attention: str, *, said: list[str], **keys: Any) -> Pin:
    config = configs.parse(Workbench(Path("models"), Path("out")).tree(**keys))
    names = {"kernels": "torch", "attention": attention}
    return pin_environment(config, torch.device("cpu"), **names, processes=1, say=said.append)


def test_another_attention_is_told_and_refused_where_bytes_are_promised() -> None:
    said: list[str] = []
    before = environment("cudnn, flash, efficient, math", said=said)
    before.load_state_dict(dict(before.value))
    assert not said
    environment("math", said=said).load_state_dict(dict(before.value))
    assert len(said) == 1 and "attention: cudnn, flash, efficient, math -> math. State and draws are the same" in said[0]
    with pytest.raises(UserError, match=r"run\.deterministic = true.*: attention: cudnn, .* -> math; restore it"):
        environment("math", run__deterministic=True, said=said).load_state_dict(dict(before.value))
    refuse_changes({"step.attention": "math"}, {"step.attention": "auto"}, "the checkpoint", allowed=Allowance())


def test_a_checkpoint_from_before_there_was_a_choice_had_torchs_own() -> None:
    said: list[str] = []
    older = environment("torch's own", said=said).value
    older = {key: value for key, value in older.items() if key not in ("attention", "compiled")}
    environment("torch's own", run__deterministic=True, said=said).load_state_dict(older)
    assert not said
    environment("math", said=said).load_state_dict(older)
    assert len(said) == 1 and "checkpoint's: attention: torch's own -> math. " in said[0]


def test_compiled_blocks_that_recompute_otherwise_are_told() -> None:
    """Elsewhere a block has the same bytes, recomputed or not."""
    said: list[str] = []
    before = environment("math", step__compile="blocks", memory__gradient_checkpointing=False, said=said)
    environment("math", step__compile="blocks", memory__gradient_checkpointing=True, said=said).load_state_dict(
        dict(before.value)
    )
    assert len(said) == 1 and "compiled: blocks, gradient_checkpointing = False -> blocks, gradient" in said[0]


def shared(micro_batches: int, given: int | None, now: int, processes: int, *allowed: str) -> tuple[int, list[str]]:
    """(the accumulation of a resumed run, what was said). given, now: the config's, then and now."""
    tree = Workbench(Path("models"), Path("out")).tree(step__accumulation=now, data__batch_size=3)
    saved, said = SimpleNamespace(values=lambda name: {"micro_batches": micro_batches, "accumulation": given}), []
    kept = share_out(configs.parse(tree), saved, processes, Allowance(allowed), said.append)  # type: ignore[arg-type]
    assert kept.data.batch_size == 3
    return kept.step.accumulation, said


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
def test_another_number_of_processes_keeps_the_update_and_the_config_needs_no_edit(processes: int) -> None:
    """The config has an accumulation of 2, for six processes."""
    kept, said = shared(12, 2, 2, processes)
    assert kept * processes == 12
    many = f"{processes} process{'es' if processes > 1 else ''}"
    what = f"an update keeps its 12 micro-batches of data.batch_size = 3, shared by {many}"
    assert said == ([] if processes == 6 else [f"step.accumulation: 2 -> {kept}: {what}"])


@pytest.mark.parametrize(("processes", "numbers"), [(5, "1, 2, 3, 4, 6 or 12"), (24, "1, 2, 3, 4, 6 or 12")])
def test_a_number_that_cannot_share_the_update_is_refused_with_those_that_can(processes: int, numbers: str) -> None:
    refused = f"an update has 12 micro-batches of data.batch_size = 3, which {processes} processes cannot share evenly; "
    with pytest.raises(UserError, match=f"^{refused}start {numbers} processes, or .*--allow step.accumulation"):
        shared(12, 2, 2, processes)


@pytest.mark.parametrize(
    ("given", "now", "processes", "allowed"),
    [
        (2, 4, 2, ()),  # the person asks for another update
        (2, 2, 5, ("step.accumulation",)),  # and it is allowed
        (None, 2, 2, ()),  # a checkpoint that does not say what the config had
        (2, 12, 1, ()),  # the same update, by hand
    ],
)
def test_what_the_person_asks_for_is_not_changed(given: int | None, now: int, processes: int, allowed: tuple) -> None:
    assert shared(12, given, now, processes, *allowed) == (now, [])
