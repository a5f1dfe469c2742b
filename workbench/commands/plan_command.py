"""Prints a run's plan, and whether it fits into memory: `--plan`, `--plan_memory` and the end of `--new`."""

from dataclasses import replace

from trainer import kernels
from trainer.base.console import write
from trainer.base.errors import UserError, number_in
from trainer.base.progress import Phases
from trainer.base.tensorfile import size_text
from trainer.config import Config
from trainer.run.session import Session
from trainer.run.setup import Launch, begin, disk_needs, shortages, warn_of_disk
from trainer.runtime.device import Memory, check_device
from workbench.commands.launch import make_launch
from workbench.commands.ports import PORTS
from workbench.planning.describe import describe_memory, describe_time
from workbench.planning.estimate import forecast
from workbench.planning.suggestions import changes
from workbench.summary.plan import describe, describe_head


def preview(
    config: Config,
    memory: int | None = None,
    *,
    head: bool = True,
    data: bool = True,
    launch: Launch | None = None,
    otherwise: str | None = None,
) -> bool:
    """Print a run's plan; returns whether it fits into memory. memory: bytes of the accelerator to plan for; None: this
    machine's. head: print `write_head`, too; without it, or for another accelerator, shortages of this machine are warnings.
    data: print the photos. otherwise: printed if the run does not fit. launch: None: a fresh run."""
    elsewhere = memory is not None or not head
    session = Session.open(config, only="measure", ports=PORTS)
    config = session.config
    if head:
        write_head(config, memory)
    device = check_device(config) if memory is None else None
    target = Memory(memory, None, kernels.planned(config.adapter.kernels)) if device is None else Memory.of(device, config)
    beginning = begin(
        config,
        session.source,
        target,
        replace(launch or make_launch(None), planned=True, elsewhere=elsewhere),
        processes=number_in("WORLD_SIZE", 1, least=1),
        phases=Phases(show=True, every=config.logging.every_seconds),
        say=write,
    )
    plan = beginning.plan
    write(describe(plan, sizes=True, data=data))
    needs = forecast(plan, target.kernels, base=target.base)
    if config.checkpoint.mirror is not None:
        write(f"mirror: about {size_text(needs.checkpoint)} for each checkpoint; a run asks first whether it can be written")
    fits = needs.fits(target.size)
    if not fits and otherwise is not None:
        write(f"does not fit: {size_text(needs.total)} of {size_text(target.size)} are needed; {otherwise}")
        return False
    disk = disk_needs(plan, needs.checkpoint, needs.adapter, needs.cache)
    if elsewhere:
        warn_of_disk(disk, write)
    write(describe_time(plan, needs, device, start_step=beginning.progress.step))
    smaller = [] if fits else changes(plan, target.kernels, needs, target.size)
    write(describe_memory(needs, target.size, smaller, accumulation=config.step.accumulation))  # ends with whether it fits
    if not elsewhere and (short := shortages(disk)):
        raise UserError("\n".join(short))
    return fits


def write_head(config: Config, memory: int | None) -> None:
    """Print the first lines of a plan, which need only the config. memory: None: this machine's device."""
    write(describe_head(config, on_cpu=memory is None and check_device(config).type == "cpu"))
