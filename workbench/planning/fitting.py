"""What a run gives up to fit into the memory there is: `memory.fit`, by what `memory.fit_by` names, and `resident_blocks`."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer import optim
from trainer.base.errors import UserError
from trainer.base.files import parse_size
from trainer.base.protocols import Kernels
from trainer.base.tensorfile import size_text
from trainer.plan import optimizer_rules
from trainer.plan.run_plan import RunPlan, with_config
from trainer.runtime.streaming import device_bytes
from workbench.planning.dry_run import Rehearsal, without_values
from workbench.planning.estimate import Forecast, forecast
from workbench.planning.suggestions import PRICES, changes, streamed, unstreamed, with_checkpointing, with_resident

# Of memory.gradient_checkpointing, the fastest first: none, every fourth block, ..., all. They change no byte of a run.
CHECKPOINTING: tuple[bool | int, ...] = (False, 4, 3, 2, True)


@dataclass(frozen=True)
class Lever:
    """What may be changed for memory. name: as memory.fit_by has it.

    settings: the cheapest first. applied: (a plan, a setting) -> the plan with it. keys: a setting as keys of a config, in
    words. least: what its last setting is, in words.
    """

    name: str
    settings: tuple[Any, ...]
    applied: Callable[[RunPlan, Any], RunPlan]
    keys: Callable[[Any], str]
    least: str


@dataclass
class Fitting:
    """The search for the settings of some levers. plan: before any is used. memory: bytes.

    forecasts: of the settings that were tried, but for how many blocks stay: that is worked out.
    """

    plan: RunPlan
    kernels: Kernels
    memory: int
    base: Callable[[], int] | None
    levers: tuple[Lever, ...]
    forecasts: dict[tuple[Any, ...], Forecast] = field(default_factory=dict)

    def planned(self, settings: tuple[Any, ...]) -> RunPlan:
        """The plan with a setting of each lever."""
        plan = self.plan
        for lever, setting in zip(self.levers, settings, strict=True):
            plan = lever.applied(plan, setting)
        return plan

    def forecast(self, settings: tuple[Any, ...]) -> Forecast:
        """What the run would take with them."""
        resident = {lever.name: setting for lever, setting in zip(self.levers, settings, strict=True)}.get("resident_blocks")
        pairs = zip(self.levers, settings, strict=True)
        counted = tuple(0 if lever.name == "resident_blocks" and setting is not None else setting for lever, setting in pairs)
        if counted not in self.forecasts:
            self.forecasts[counted] = forecast(self.planned(counted), self.kernels, base=self.base)
        found = self.forecasts[counted]
        return with_resident(found, self.plan.model.family.denoiser, resident) if resident else found

    def fits(self, settings: tuple[Any, ...]) -> bool:
        """Whether the run fits with them."""
        return self.forecast(settings).fits(self.memory)

    def cheapest(self) -> tuple[Any, ...] | None:
        """The settings that fit: the last lever is used as little as can be, then the one before it. None where none do."""
        chosen = [lever.settings[0] for lever in self.levers]
        used = 0
        for used in range(len(self.levers)):
            chosen[used] = self.levers[used].settings[-1]
            if self.fits(tuple(chosen)):
                break
        else:
            return tuple(chosen) if not self.levers and self.fits(()) else None
        for place in reversed(range(used + 1)):
            settings = self.levers[place].settings

            def fits(setting: Any, place: int = place) -> bool:
                return self.fits((*chosen[:place], setting, *chosen[place + 1 :]))

            # None needs more than the one before it, and the last is known to fit.
            chosen[place] = settings[bisect_left(settings[:-1], True, key=fits)]
        return tuple(chosen)


def fitted(
    plan: RunPlan,
    kernels: Kernels,
    memory: int,
    *,
    base: Callable[[], int] | None,
    kept: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> RunPlan:
    """The plan with the keys that are chosen by the memory there is, each as cheap as fits.

    memory: bytes of the device; a size in memory.fit goes before. base: what this process takes on a CPU; None: an
    accelerator. kept: names of memory.fit_by that may not be changed any more. say: told each choice, and its price. Raises
    UserError where nothing is small enough.
    """
    chosen = plan.config.memory
    budget = memory if chosen.fit in (None, "auto") else parse_size(chosen.fit)
    if chosen.fit is not None:
        plan = _fitted_by_levers(plan, kernels, budget, base=base, kept=kept, say=say)
        chosen = plan.config.memory
    if chosen.offload == "blocks" and chosen.resident_blocks == "auto":
        plan = _fitted_by_resident_blocks(plan, kernels, budget, base=base)
    elif chosen.offload == "blocks" and base is None:
        _check_slots(plan, kernels, budget)
    return plan


def _fitted_by_levers(
    plan: RunPlan,
    kernels: Kernels,
    memory: int,
    *,
    base: Callable[[], int] | None,
    kept: Collection[str],
    say: Callable[[str], None],
) -> RunPlan:
    asked = plan.config.memory.fit_by
    there = {lever.name: lever for lever in _levers(plan, on_cpu=base is not None) if lever.name not in kept}
    fitting = Fitting(plan, kernels, memory, base, tuple(there[name] for name in asked if name in there))
    settings = fitting.cheapest()
    if settings is None:
        raise UserError(_too_small(fitting))
    for lever, setting in zip(fitting.levers, settings, strict=True):
        if setting != lever.settings[0]:
            say(f"memory.fit = {plan.config.memory.fit!r}: {lever.keys(setting)} ({PRICES[lever.name]})")
    return fitting.planned(settings)


def _levers(plan: RunPlan, *, on_cpu: bool) -> Iterator[Lever]:
    """Those that can change anything. On a CPU what streams lies in the same memory, and 8-bit states are decoded whole."""
    config, family = plan.config, plan.model.family
    if family.blocks:
        key = "memory.gradient_checkpointing"
        yield Lever(
            "checkpointing", CHECKPOINTING, with_checkpointing, lambda every: f"{key} = {str(every).lower()}",
            "every block recomputed",
        )  # fmt: skip
    if family.blocks and not on_cpu:
        module = plan.model.source.build(family.denoiser)
        count = len(family.ordered_blocks(family.denoiser, module))
        yield Lever(
            "resident_blocks", (None, *range(count - 1, -1, -1)), _with_streaming,
            lambda stay: f"memory.offload = 'blocks', memory.resident_blocks = {stay}", "every block streamed",
        )  # fmt: skip
    in_8_bits = optim.in_8_bits(config.optimizer.name)
    if in_8_bits is not None and not on_cpu and _takes(plan, in_8_bits):
        names = (config.optimizer.name, in_8_bits)
        yield Lever(
            "optimizer_bits", names, _with_optimizer, lambda name: f"optimizer.name = {name!r}",
            "the optimizer's state in 8 bits",
        )  # fmt: skip
    count = config.data.batch_size
    if count > 1:
        yield Lever(
            "batch", tuple(size for size in range(count, 0, -1) if count % size == 0), _with_batch_size,
            lambda size: f"data.batch_size = {size}, step.accumulation = {config.step.accumulation * count // size}",
            "one photo at a time",
        )  # fmt: skip


def _with_streaming(plan: RunPlan, resident: int | None) -> RunPlan:
    return unstreamed(plan) if resident is None else streamed(plan, resident)


def _with_optimizer(plan: RunPlan, name: str) -> RunPlan:
    """Raises UserError where that one does not take the options of the plan's."""
    if name == plan.config.optimizer.name:
        return plan
    config = plan.config.model_copy(update={"optimizer": plan.config.optimizer.model_copy(update={"name": name})})
    optimizer_rules.check(config)
    return with_config(plan, config)


def _takes(plan: RunPlan, optimizer: str) -> bool:
    try:
        _with_optimizer(plan, optimizer)
    except UserError:
        return False
    return True


def _with_batch_size(plan: RunPlan, size: int) -> RunPlan:
    config = plan.config
    if size == config.data.batch_size:
        return plan
    accumulation = config.step.accumulation * config.data.batch_size // size
    data, step = (
        config.data.model_copy(update={"batch_size": size}),
        config.step.model_copy(update={"accumulation": accumulation}),
    )
    return with_config(plan, config.model_copy(update={"data": data, "step": step}))


def _too_small(fitting: Fitting) -> str:
    asked, plan = fitting.plan.config.memory, fitting.planned(tuple(lever.settings[-1] for lever in fitting.levers))
    found = forecast(plan, fitting.kernels, base=fitting.base)
    least = ", ".join(lever.least for lever in fitting.levers) or "nothing that memory.fit_by may change"
    advice = "".join(
        f"\n- {change.what} ({change.price})" for change in changes(plan, fitting.kernels, found, fitting.memory)
    )
    size = f" ({size_text(fitting.memory)})" if asked.fit == "auto" else ""
    larger = "use a larger card" if asked.fit == "auto" else "raise memory.fit"
    return (
        f"memory.fit = {asked.fit!r}{size}: with {least} the run needs {size_text(found.total)}, in {found.largest.name}; "
        f"{larger}, or{advice or ' choose smaller photos'}"
    )


def _fitted_by_resident_blocks(plan: RunPlan, kernels: Kernels, memory: int, *, base: Callable[[], int] | None) -> RunPlan:
    least = streamed(plan, 0)
    if base is not None:  # of a CPU: what streams lies in the same memory
        return least
    found = forecast(least, kernels)
    if not found.fits(memory):
        advice = "".join(f"\n- {change.what} ({change.price})" for change in changes(least, kernels, found, memory))
        raise UserError(
            f"memory.offload = 'blocks': with every block streamed the run needs {size_text(found.total)}, in "
            f"{found.largest.name}, and there are {size_text(memory)}; use a larger card, or{advice or ' smaller photos'}"
        )
    assert found.streaming is not None
    denoiser, most = plan.model.family.denoiser, len(found.streaming.blocks)
    return streamed(plan, next(n for n in range(most, -1, -1) if with_resident(found, denoiser, n).fits(memory)))


def _check_slots(plan: RunPlan, kernels: Kernels, memory: int) -> None:
    """Raises UserError where the blocks that stay, and room for those that pass, are by themselves more than there is."""
    name = plan.model.family.denoiser
    with without_values():
        components = Rehearsal(plan, kernels=kernels).components
        components.load(name)
        sizes, asked = components.streamers[name].sizes, plan.model.resident[name]
    if (size := device_bytes(sizes, asked)) > memory:
        remedy = "not even two blocks fit; use a larger card"
        if device_bytes(sizes, 0) <= memory:
            fewer = _fitted_by_resident_blocks(plan, kernels, memory, base=None)
            remedy = f"use at most {fewer.config.memory.resident_blocks}, or 'auto'"
        raise UserError(
            f"memory.resident_blocks = {asked}: these blocks of the {name}, and two that pass, take {size_text(size)}, and "
            f"there are {size_text(memory)}; {remedy}"
        )
