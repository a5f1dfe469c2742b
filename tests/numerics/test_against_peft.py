"""Five optimizer steps of our DoRA beside PEFT's and beside a dense fp64 reference, over both families' tiny models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import DENOISER, Workbench, built
from tests.integration.test_export import inputs_for
from tests.numerics.test_step_oracle import GRADIENT_TOLERANCE
from trainer.adapters import ADAPTER_NAME

STEPS, RANK, ALPHA, LR = 5, 4, 2.0, 1e-3


class DenseDora(nn.Module):
    """y = x (g * (W + s B A))^T + b with everything dense and in fp64, as the paper writes it."""

    def __init__(self, base: nn.Linear, a: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(a.double())
        self.b = nn.Parameter(torch.zeros(base.weight.shape[0], RANK, dtype=torch.float64))
        self.m = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.base.weight + ALPHA / RANK * self.b @ self.a
        return F.linear(x, (self.m / v.detach().norm(dim=1))[:, None] * v, self.base.bias)


def train(model: nn.Module, inputs: dict, target: torch.Tensor, groups: list, after_update=lambda: None) -> None:
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        (model(**inputs).sample.to(target.dtype) - target).square().mean().backward()
        optimizer.step()
        after_update()


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    return {
        name: cast(value, dtype) if isinstance(value, dict) else value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("sdxl", "fp32"),
        ("flux", "bf16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sdxl", "bf16"), ("flux", "fp32"))),
    ],
)
def test_five_steps(bench: Workbench, family: str, dtype: str) -> None:
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel
    from peft import LoraConfig, inject_adapter_in_model

    denoiser = DENOISER[family]
    kind = {"sdxl": UNet2DConditionModel, "flux": FluxTransformer2DModel}[family]
    storage = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    config = bench.config(
        family, adapter__type="dora", adapter__rank=RANK, adapter__alpha=ALPHA, precision__compute=dtype,
        model__components={denoiser: {"dtype": dtype}},
    )  # fmt: skip
    with built(config) as run:
        inputs = inputs_for(family, run)
        if family == "flux":
            # Exact in bf16 also times 1000, where diffusers rounds them and we do not: that is not what is compared here.
            inputs |= {"timestep": torch.tensor([0.125, 0.5]), "guidance": torch.tensor([1.0, 4.0])}
        layers = {name.removeprefix(f"{denoiser}."): layer for name, layer in run.adapter.layers.items()}
        start = {name: layer.lora_A[ADAPTER_NAME].weight.detach().clone() for name, layer in layers.items()}
        folder = bench.models / family / denoiser

        with torch.no_grad():
            stock = kind.from_pretrained(folder, torch_dtype=storage).double().requires_grad_(False)
            wide = cast(inputs, torch.float64)
            # What a step can reach: the base's own output, moved.
            base = stock(**wide).sample
            target = base + 0.5 * base.std() * torch.randn(base.shape, generator=torch.Generator().manual_seed(2)).double()
        for name, a in start.items():
            parent, _, leaf = name.rpartition(".")
            setattr(stock.get_submodule(parent), leaf, DenseDora(stock.get_submodule(name), a))
        dense = {name: stock.get_submodule(name) for name in start}
        train(stock, wide, target, [
            {"params": [p for layer in dense.values() for p in (layer.a, layer.b)]},
            {"params": [layer.m for layer in dense.values()], "weight_decay": 0.0},
        ])  # fmt: skip
        expected = {name: (layer.a, layer.b, layer.m) for name, layer in dense.items()}

        theirs = kind.from_pretrained(folder, torch_dtype=storage).requires_grad_(False)
        peft_config = LoraConfig(r=RANK, lora_alpha=ALPHA, use_dora=True, target_modules=list(start))
        theirs = inject_adapter_in_model(peft_config, theirs).train()
        peft = {}
        for name, a in start.items():
            layer = theirs.get_submodule(name)
            m = layer.lora_magnitude_vector["default"].weight
            peft[name] = (layer.lora_A["default"].weight, layer.lora_B["default"].weight, m)
            for parameter in peft[name]:
                parameter.data = parameter.data.float()
            peft[name][0].data.copy_(a)
        train(theirs, cast(inputs, storage), target.float(), [
            {"params": [p for a, b, _ in peft.values() for p in (a, b)]},
            {"params": [m for _, _, m in peft.values()], "weight_decay": 0.0},
        ])  # fmt: skip

        ours = {
            name: (*layer.factors(ADAPTER_NAME), layer.lora_magnitude_vector[ADAPTER_NAME].weight)
            for name, layer in layers.items()
        }
        train(
            run.model.modules[denoiser], inputs, target.float(),
            [{"params": [g["params"][0]], "weight_decay": g["weight_decay"]} for g in run.step.optimizer.param_groups],
            run.adapter.mark_stale,
        )  # fmt: skip

    def distance(one: dict, other: dict) -> float:
        """Of all adapter parameters together, over how far the reference moved from the start."""
        moved = apart = 0.0
        for name, parameters in expected.items():
            origin = (start[name].double(), torch.zeros_like(parameters[1]), dense[name].base.weight.norm(dim=1))
            for exact, begin, p, q in zip(parameters, origin, one[name], other[name], strict=True):
                moved += float((exact - begin).detach().square().sum())
                apart += float((p.detach().double() - q.detach().double()).square().sum())
        return (apart / moved) ** 0.5

    off, peft_off = distance(ours, expected), distance(peft, expected)
    print(f"{family}, {dtype} base, distance to the fp64 reference after {STEPS} steps: ours {off:.2e}, PEFT {peft_off:.2e}")
    if dtype == "fp32":
        assert off < GRADIENT_TOLERANCE and distance(ours, peft) < GRADIENT_TOLERANCE
    else:
        # Rounding every activation to bf16 leaves both a fifth of the way off. PEFT computes the adapter's own products in
        # fp32, ours in bf16, and must not pay for that: over SDXL ours is the closer one, over Flux they are even (to 1 %).
        assert off <= 1.05 * peft_off
        if family == "sdxl":
            assert off < peft_off
