"""At initialisation an adapted model is its base, bit for bit, for every storage and compute dtype."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.harness import DENOISER, Workbench, built
from tests.integration.test_export import inputs_for
from trainer.kernels import dora_torch
from trainer.runtime.attention import TORCHS_OWN

# Of SDXL, whose hundreds of layers take seconds each time, what Flux has not: convolutions, in 16 bits and converted.
CASES = [("flux", kind, dtype) for kind in ("lora", "dora") for dtype in ("fp32", "bf16", "fp16", "fp8_e4m3")]
CASES += [("sdxl", "dora", "bf16"), ("sdxl", "lora", "fp8_e4m3")]


@pytest.mark.parametrize(("family", "kind", "dtype"), CASES)
def test_adapted_output_is_the_base_output(bench: Workbench, family: str, kind: str, dtype: str) -> None:
    compute = {"fp32": "fp32", "fp16": "fp16"}.get(dtype, "bf16")
    denoiser = DENOISER[family]
    components = {denoiser: {"dtype": dtype, "compute": compute}}
    config = bench.config(family, adapter__type=kind, adapter__targets="all", model__components=components)
    with built(config) as run:
        model, inputs = run.model.modules[denoiser], inputs_for(family, run)
        swap = partial(run.plan.model.storage[denoiser].swap, kernels=dora_torch)
        base = run.plan.model.source.load(denoiser, swap=swap, device=run.context.processes.device)
        TORCHS_OWN.give(base, run.plan.model.family.memory.attention, run.context.processes.device)
        with torch.no_grad():
            expected, got = base(**inputs).sample, model(**inputs).sample
        assert torch.isfinite(expected).all() and expected.abs().max() > 0
        assert torch.equal(got, expected)
        # and a changed adapter is another function, so that equality says something
        with torch.no_grad():
            for layer in run.adapter.layers.values():
                layer.lora_B["default"].weight.fill_(1e-2)
            run.adapter.mark_stale()
            assert not torch.equal(model(**inputs).sample, expected)


@pytest.mark.slow
def test_merge_equals_unmerged_and_unmerge_is_exact(bench: Workbench) -> None:
    """Merging computes with a dense fp32 copy; the float8 payload is never touched."""
    config = bench.config(adapter__type="dora", model__components={"unet": {"dtype": "fp8_e4m3"}})
    with built(config) as run:
        model, inputs = run.model.modules["unet"], inputs_for("sdxl", run)
        with torch.no_grad():
            for layer in run.adapter.layers.values():
                layer.lora_B["default"].weight.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
                layer.lora_magnitude_vector["default"].weight.mul_(1.1)
            run.adapter.mark_stale()
            base_output = None
            with run.adapter.at_strength(0.0):
                base_output = model(**inputs).sample
            unmerged = model(**inputs).sample
            payloads = {n: x.get_base_layer().payload_weight.clone() for n, x in run.adapter.layers.items()}
            for layer in run.adapter.layers.values():
                layer.merge()
            merged = model(**inputs).sample
            for layer in run.adapter.layers.values():
                layer.unmerge()
            again = model(**inputs).sample
        assert (merged - unmerged).norm() <= 1e-3 * (merged - base_output).norm()
        assert torch.equal(again, unmerged)
        for name, layer in run.adapter.layers.items():
            now = layer.get_base_layer().payload_weight
            assert torch.equal(now.view(torch.uint8), payloads[name].view(torch.uint8))
