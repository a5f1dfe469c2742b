"""What a run would do, and whether it fits into memory: `--plan`, `--plan_memory` and the end of `--new`."""

import os

from trainer.advice import changes
from trainer.allowance import Allowance
from trainer.beginning import begin
from trainer.config import Config
from trainer.describe import describe, describe_memory
from trainer.devices import Memory, accelerator_of, check_device
from trainer.forecast import forecast
from trainer.phases import Phases
from trainer.plan import open_source, resolve
from trainer.terminal import write


def preview(
    config: Config,
    memory: int | None = None,
    *,
    data: bool = True,
    resume_from: str | None = None,
    allowed: Allowance | None = None,
) -> None:
    """Print what a run would do, and whether it fits into memory.

    memory: bytes of the accelerator that is planned for; None: of the device that this machine has. data: as of
    `describe`.
    """
    source = open_source(config)
    config = resolve(config, source)
    device = check_device(config) if memory is None else None
    there = accelerator_of(config, memory) if device is None else Memory.of(device, config)
    plan = begin(
        config,
        source,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        device=device,
        kernels=there.kernels,
        base=there.base,
        resume_from=resume_from,
        allowed=allowed or Allowance(resume_from=resume_from or "auto"),
        phases=Phases(show=True, every=config.logging.every_seconds),
        say=write,
        planned=True,
    ).plan
    write(describe(plan, sizes=True, data=data))
    found = forecast(plan, there.kernels, base=there.base)
    smaller = [] if found.fits(there.size) else changes(plan, there.kernels, found, there.size)
    write(describe_memory(found, there.size, smaller, updates=config.step.accumulation))
