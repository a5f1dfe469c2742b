"""The optimizer of a run in lines for people, and what of its keys works together badly."""

import torch

from trainer.config import Config
from trainer.optim.table import optimizer_named

# In fewer steps an optimizer that finds its rate may not come to it: from Prodigy's default the pocket SDXL learned next to
# nothing in 30 (docs/optimizers.md). This one is a guess.
SHORT = 300


def optimizer_lines(config: Config, steps: int) -> list[str]:
    """Rates and options beyond the usual, and warnings. config: the resolved one. steps: in all."""
    table = config.optimizer
    rates = [f"{key} {rate:g}" for key in ("text_encoder_lr", "magnitude_lr") if (rate := getattr(table, key)) is not None]
    rates += [f"lora_plus {table.lora_plus:g} (B's rate over A's)"] if table.lora_plus != 1 else []
    options = [f"{key} = {value!r}" for key, value in table.options.items()]
    return [
        *(", ".join(each) for each in (rates, options) if each),
        *(f"warning: {line}" for line in warnings(config, steps)),
    ]


def warnings(config: Config, steps: int) -> list[str]:
    """Sentences about what works together, and badly. config: the resolved one."""
    table, entry = config.optimizer, optimizer_named(config.optimizer.name)
    lines, finds = [], entry.finds
    if finds and not table.options.get(finds.guard):
        restarts = "schedule.name = 'cosine_restarts'" if config.schedule.name == "cosine_restarts" else ""
        if low := "schedule.warmup" if config.schedule.warmup else restarts:
            why = f"the estimate of {table.name} divides by the low rates and grows too far"
            lines.append(f"{low} with optimizer.options.{finds.guard} = false: {why}; set it to true")
    if finds and finds.start not in table.options and steps < SHORT:
        low = "whose default is so low that it may hardly have grown by the end; raise it, for example to 1e-4"
        lines.append(f"a run of {steps} steps: {table.name} finds its rate from optimizer.options.{finds.start} on, {low}")
    if entry.paged and (config.run.device == "cpu" or not torch.cuda.is_available()):
        lines.append(f"{table.name} pages its state only on CUDA; on a CPU it is {table.name.removeprefix('paged_')}")
    return lines
