"""A run whose frozen blocks are streamed: the bytes of one that holds them all, whatever it stores, adapts or recomputes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import DENOISER, Workbench, built, metrics_of, pairs, take_step
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.kernels import dora_torch
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.runtime.device import Memory
from trainer.runtime.streaming import BACK, FORWARD, ROUND, Streamer, device_bytes
from workbench.commands import launch
from workbench.planning import estimate, fitting
from workbench.planning.estimate import STEP, Forecast, Stage, forecast
from workbench.planning.fitting import fitted
from workbench.planning.suggestions import ladder, lowered, with_keys

pytestmark = pytest.mark.usefixtures("few_draws")

STREAMED = {"memory__offload": "blocks", "memory__resident_blocks": 0}
STATE = ("adapter.safetensors", "optimizer.safetensors", "norms.safetensors")


def config_of(bench: Workbench, family: str, out: str, **more: Any) -> configs.Config:
    return bench.config(
        family, run__output_dir=str(bench.tmp / out), adapter__targets="attention+mlp", precision__compute="bf16", **more
    )


def gradients(config: configs.Config, copies: int = 0) -> list[torch.Tensor]:
    """Of the first micro-batches of two updates, from an adapter that the first one moved. copies: that are made at least."""
    with built(config) as run:
        updates, found = run.updates(), []
        for step in (1, 2):
            result = take_step(run, step, next(updates))
            found += [torch.tensor([result.loss, result.grad_norm]), *(p.grad.clone() for p in run.step.parameters)]
        named = run.adapter.named_parameters().items()
        assert all(p.any() for name, p in named if "lora_B" in name), "ai-toolkit #1054: blocks that no gradient reached"
        streamers = run.components.streamers
        assert bool(streamers) == bool(copies) and sum(each.copies for each in streamers.values()) >= copies
        return found


FACTORS = (tuple(DENOISER), ("bf16", "fp8_e4m3", "int8", "nf4"), ("lora", "dora", "lokr"), (False, True))
QUICK = {("fp8_e4m3", "dora", True), ("bf16", "lora", False)}
FEW = pairs(*FACTORS)


def marked(cell: tuple[Any, ...]) -> Any:
    """Two cells of each family are quick, and every two levels meet in the slow ones."""
    marks = () if cell[1:] in QUICK else (pytest.mark.slow if cell in FEW else pytest.mark.proof)
    return pytest.param(*cell, marks=marks)


@pytest.mark.parametrize(
    ("family", "storage", "adapter", "recomputed"),
    [
        *(marked(cell) for cell in product(*FACTORS[:-1], (False, True, 2))),
        pytest.param("flux", "fp8_e4m3", "dora", "selective", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_is_that_of_a_resident_base(
    bench: Workbench, family: str, storage: str, adapter: str, recomputed: bool | int | str
) -> None:
    more: dict[str, Any] = {
        "adapter__type": adapter, "memory__gradient_checkpointing": recomputed,
        "model__components": {DENOISER[family]: {"dtype": storage}},
    }  # fmt: skip
    resident = gradients(config_of(bench, family, "resident", **more))
    streamed = gradients(config_of(bench, family, "streamed", **more, **STREAMED), copies=8)
    assert all(torch.equal(one, other) for one, other in zip(resident, streamed, strict=True))


@pytest.mark.parametrize(
    "storage",
    [
        *("fp8_e4m3", "int8"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16", "fp8_e5m2", "int4", "nf4")),
    ],
)
def test_magnitudes_over_a_streamed_base_start_in_fp32_as_its_norms(bench: Workbench, storage: str) -> None:
    """OneTrainer #1571: codes lay on one device, their scales on another. #1672: magnitudes had the codes' dtype."""
    keys = {"adapter__type": "dora", "model__components": {"transformer": {"dtype": storage}}}
    with built(config_of(bench, "flux", "out", **keys, **STREAMED)) as run:
        assert run.components.streamers and run.adapter.layers
        for name, layer in run.adapter.layers.items():
            magnitude = layer.lora_magnitude_vector["default"].weight
            norms = layer.get_base_layer().dequantize(torch.float32).double().norm(dim=1)
            assert magnitude.dtype == torch.float32 and torch.allclose(magnitude.double(), norms, rtol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_blocks_are_used_in_the_order_in_which_they_are_copied(bench: Workbench, monkeypatch, family: str) -> None:
    """Another order would be right, too, and each copy would be waited for. Modules of a U-Net lie in another order."""
    entered: dict[int, list[int]] = {FORWARD: [], BACK: [], ROUND: []}
    enter = Streamer.enter

    def noting(self: Streamer, place: int, way: int) -> None:
        entered[way].append(place)
        enter(self, place, way)

    monkeypatch.setattr(Streamer, "enter", noting)
    with built(config_of(bench, family, "out", adapter__type="lora", **STREAMED)) as run:
        entered[ROUND].clear()
        take_step(run, 1, next(run.updates()))
        count = run.components.streamers[run.family.denoiser].count
    assert entered[FORWARD] == [*range(count)] and count > 3
    back = [*dict.fromkeys(entered[BACK])]
    assert back == [*range(count)][::-1][: len(back)] and len(back) > 3, "no gradient goes to the first ones of SDXL"


@pytest.mark.slow
def test_a_plan_counts_no_block_on_the_device_that_only_passes(bench: Workbench, monkeypatch) -> None:
    """With the plain kernels, which look into the weights themselves. And all that lies on the host at a time."""
    keys: dict[str, Any] = {"adapter__type": "dora", "model__components": {"transformer": {"dtype": "fp8_e4m3"}}}

    def planned(**more: Any) -> tuple[RunPlan, Forecast]:
        config = config_of(bench, "flux", "out", **keys, **more)
        source = open_source(config)
        plan = make_plan(resolve(config, source), source, processes=1)
        return plan, forecast(plan, dora_torch)

    def step(found: Forecast) -> int:
        return max(phase.peak for phase in found.phases if phase.name.startswith(STEP))

    (_, resident), (plan, streamed) = planned(), planned(**STREAMED)
    assert streamed.streaming is not None
    blocks = streamed.streaming.blocks
    assert step(streamed) == pytest.approx(step(resident) - sum(blocks) + device_bytes(blocks, 0), rel=0.01)
    alone = streamed.host["streamed blocks"]
    _, together = planned(**STREAMED, data__cache="none", data__cache_dir=None)
    assert alone < together.host["streamed blocks"]
    # What fits beside all else that the run needs, not the blocks alone. The margin of a card is larger than this model.
    monkeypatch.setattr(estimate, "CONTEXT", 0)
    three = with_keys(plan, {"memory.resident_blocks": 3})
    kept = forecast(three, dora_torch)
    (shares,) = [shares for remedy, _, shares in ladder(three, dora_torch, kept) if remedy.name == "resident_blocks"]
    assert lowered(kept, shares).total == forecast(plan, dora_torch).total < kept.total
    with pytest.raises(UserError, match=r"with every block streamed the run needs"):
        fitted(three, Memory(device_bytes(blocks, 1), None, dora_torch))
    weights = [Stage("", {"weights": size}, {"transformer": size}) for size in [device_bytes(blocks, 0)]]
    monkeypatch.setattr(fitting, "forecast", lambda *_, **__: replace(streamed, phases=tuple(weights)))
    monkeypatch.setattr(estimate, "SHARE", 0)
    with pytest.raises(UserError, match=r"= 3: these blocks of the transformer, and two that pass, .* at most 1, or 'auto'"):
        fitted(three, Memory(device_bytes(blocks, 1), None, dora_torch))
    with pytest.raises(UserError, match=r"resident_blocks = 0: .* not even two blocks fit"):
        fitted(plan, Memory(1000, None, dora_torch))
    assert fitted(plan, Memory(2**40, None, dora_torch)) is plan


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_streamed_text_encoders_give_the_same_encodings(bench: Workbench, family: str, capsys) -> None:
    """Each run with a cache of its own, whose entries are compared."""
    entries = []
    for out, way in (("resident", {}), ("streamed", STREAMED)):
        cache = bench.tmp / f"cache-{out}"
        launch.train(config_of(bench, family, out, run__max_steps=1, data__cache_dir=str(cache), **way), resume_from=None)
        files = [path for path in cache.rglob("*.safetensors") if path.is_file()]
        entries.append({path.relative_to(cache): path.read_bytes() for path in files})
    assert entries[0] == entries[1] and len(entries[0]) == 2, "a file of latents and one of texts"
    assert "text_encoder_2: " in (said := capsys.readouterr().out) and said.count("blocks are streamed") == 3


@pytest.mark.proof
def test_compiled_blocks_compute_with_what_passes_by(bench: Workbench) -> None:
    """The programs save the slots, which hold other blocks before the backward pass."""
    more: dict[str, Any] = {
        "adapter__type": "dora", "memory__gradient_checkpointing": True, "step__compile": "blocks",
        "model__components": {"transformer": {"dtype": "fp8_e4m3"}}, "data__cache_dir": str(bench.tmp / "cache"),
    }  # fmt: skip
    resident = gradients(config_of(bench, "flux", "resident", **more))
    streamed = gradients(config_of(bench, "flux", "streamed", **more, **STREAMED), copies=8)
    assert all(torch.equal(one, other) for one, other in zip(resident, streamed, strict=True))


def whole_run(bench: Workbench, family: str, out: str, steps: int, **more: Any) -> Path:
    """With samples, a held-out loss, accumulation, clipping, and files. Returns its folder."""
    config = config_of(
        bench, family, out, run__max_steps=steps, step__accumulation=2, adapter__type="dora", checkpoint__every_steps=2,
        validation__every_steps=2, validation__prompts=["a bear"], validation__steps=2, validation__loss_every_steps=2,
        data__held_out=1, model__components={DENOISER[family]: {"dtype": "fp8_e4m3"}}, **more,
    )  # fmt: skip
    launch.train(config, resume_from="auto")
    return bench.tmp / out


def left(folder: Path, step: int) -> dict[str, bytes]:
    """What a run leaves that must not depend on where its base lay."""
    checkpoint = folder / "checkpoints" / f"step-{step:08}"
    files = [
        *(checkpoint / name for name in STATE),
        *(folder / "adapters").glob("*.safetensors"),
        *(folder / "samples").rglob("*.png"),
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "family", [pytest.param("sdxl", marks=pytest.mark.proof), pytest.param("flux", marks=pytest.mark.slow)]
)
def test_runs_end_in_the_same_bytes_from_one_to_the_other(bench: Workbench, family: str) -> None:
    """Resident; streamed; and each gone on from a checkpoint of the other."""
    told = ("loss", "grad_norm", "held_out_loss")
    resident = whole_run(bench, family, "resident", 4)
    expected, losses = left(resident, 4), [{key: row.get(key) for key in told} for row in metrics_of(resident)]
    assert any("held_out" in key for row in metrics_of(resident) for key in row)
    for out, ways in {
        "streamed": (STREAMED,), "to streamed": ({}, STREAMED), "to resident": (STREAMED, {}),
        "partly": ({**STREAMED, "memory__resident_blocks": 1},),
    }.items():  # fmt: skip
        for steps, way in zip((2, 4) if len(ways) == 2 else (4,), ways, strict=True):
            folder = whole_run(bench, family, out, 4, **({"run__stop_after": 2} if steps == 2 else {}), **way)
        assert left(folder, 4) == expected, out
        assert [{key: row.get(key) for key in told} for row in metrics_of(folder)] == losses
