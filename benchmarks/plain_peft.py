"""A denoiser as diffusers and PEFT train it: what the benchmarks put beside ours. Fp32 adapters over a base in one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer import optim
from trainer.engine.step import Losses
from trainer.run.run import Run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def adapt(module: nn.Module, names: Sequence[str], *, rank: int, dora: bool) -> list[nn.Parameter]:
    """Put PEFT's adapter into the layers of that name, each of `module`. Returns its parameters, fp32; the rest is frozen."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(names), use_dora=dora))
    cast_training_params(module, dtype=torch.float32)
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def under_autocast(predict: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """predict, computed as such a loop computes it."""

    def cast(*inputs: Any) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return predict(*inputs)

    return cast


def update(
    loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
) -> None:
    """One step: no more than such a loop needs."""
    optimizer.zero_grad(set_to_none=True)
    loss().backward()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()


def run_losses(run: Run, batch: Any, predict: Callable[..., torch.Tensor], objective: Any, seed: int) -> torch.Tensor:
    """fp32 [B]."""
    losses = Losses(
        objective=objective,
        predict=predict,
        tokens=lambda texts: run.family.all_tokens(run.model, texts),
        encode=lambda tokens: run.family.encode_tokens(run.model, tokens),
        image_tokens=run.family.images.image_tokens,
        seed=seed,
        device=run.context.processes.device,
    )
    return losses(batch)


def beside(run: Run, base: str = "bf16") -> tuple[Callable[[int, Sequence[Any]], None], Callable[..., Tensor]]:
    """(a step, predict) of a plain diffusers + PEFT loop with a run's model, data, adapter and optimizer. base: its dtype."""
    chosen, family, device, dtype = run.plan.config, run.family, run.context.processes.device, DTYPES[base]
    torch.manual_seed(chosen.run.seed)
    denoiser = type(run.model.modules[family.denoiser])
    module = denoiser.from_pretrained(chosen.model.path, subfolder=family.denoiser, torch_dtype=dtype).to(device)
    names = [name.removeprefix(f"{family.denoiser}.") for name in run.adapter.layers]
    parameters = adapt(module, names, rank=chosen.adapter.rank, dora=chosen.adapter.type == "dora")
    optimizer = torch.optim.AdamW(
        parameters,
        lr=chosen.optimizer.lr,
        betas=chosen.optimizer.betas,
        eps=chosen.optimizer.eps,
        weight_decay=chosen.optimizer.weight_decay,
        fused=True,
    )
    model = replace(run.model, modules=run.model.modules | {family.denoiser: module})
    length, falls = chosen.run.max_steps, chosen.schedule
    counted = {key: optim.steps_of(getattr(falls, key), length) for key in ("warmup", "decay")}
    shape = {key: getattr(falls, key) for key in ("end", "cycles", "power")}
    schedule = optim.build_schedule(falls.name, optimizer, total_steps=length, **counted, **shape)
    predict = under_autocast(lambda *inputs: family.images.predict(model, *inputs), device, dtype)

    def step(number: int, micro_batches: Sequence[Any]) -> None:
        (micro_batch,) = micro_batches
        batch = run.reader[micro_batch]
        loss = lambda: run_losses(run, batch, predict, run.plan.model.objective, chosen.run.seed).mean()  # noqa: E731
        update(loss, optimizer, parameters, chosen.step.max_grad_norm)
        schedule.step()

    return step, predict
