"""What a run would do, and whether it fits into memory: `--plan`, `--plan_memory` and the end of `--new`."""

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
from workbench.commands.launch import asked
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
    """Print what a run would do, and whether it fits into memory. Returns whether it does. memory: bytes of the accelerator
    that is planned for; None: of this machine's. head: with what `write_head` prints; without it, as where another
    accelerator is planned for, what this machine lacks is said and not refused. data: with the photos. otherwise: what is
    done where it does not fit. launch: how the run would be started; None: fresh."""
    elsewhere = memory is not None or not head
    session = Session.open(config, only="measure", ports=PORTS)
    config = session.config
    if head:
        write_head(config, memory)
    device = check_device(config) if memory is None else None
    there = Memory(memory, None, kernels.planned(config.adapter.kernels)) if device is None else Memory.of(device, config)
    beginning = begin(
        config,
        session.source,
        there,
        replace(launch or asked(None), planned=True, elsewhere=elsewhere),
        processes=number_in("WORLD_SIZE", 1, least=1),
        phases=Phases(show=True, every=config.logging.every_seconds),
        say=write,
    )
    plan = beginning.plan
    write(describe(plan, sizes=True, data=data))
    found = forecast(plan, there.kernels, base=there.base)
    if config.checkpoint.mirror is not None:
        write(f"mirror: about {size_text(found.checkpoint)} for each checkpoint; a run asks first whether it can be written")
    fits = found.fits(there.size)
    if not fits and otherwise is not None:
        write(f"does not fit: {size_text(found.total)} of {size_text(there.size)} are needed; {otherwise}")
        return False
    needs = disk_needs(plan, found.checkpoint, found.adapter, found.cache)
    if elsewhere:
        warn_of_disk(needs, write)
    write(describe_time(plan, found, device, made=beginning.progress.step))
    smaller = [] if fits else changes(plan, there.kernels, found, there.size)
    write(describe_memory(found, there.size, smaller, updates=config.step.accumulation))  # ends with whether it fits
    if not elsewhere and (short := shortages(needs)):
        raise UserError("\n".join(short))
    return fits


def write_head(config: Config, memory: int | None) -> None:
    """Print the first lines of a plan, which need the config alone. memory: None: of this machine's device."""
    write(describe_head(config, on_cpu=memory is None and check_device(config).type == "cpu"))
