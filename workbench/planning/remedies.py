"""Remedies that save memory: one list for memory.fit, a plan's suggestions, and the message after an out-of-memory error."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer import optim
from trainer.base.errors import UserError
from trainer.config import with_values
from trainer.plan import optimizer_rules
from trainer.plan.changes import Keys, in_words, keeps, never
from trainer.plan.run_plan import RunPlan
from trainer.plan.storage import held_as
from trainer.runtime.precision import COMPUTE_DTYPES, SMALLER_DTYPES, SMALLER_VAE

SMALL = 512  # px: the smallest resolution that is suggested


@dataclass(frozen=True)
class Remedy:
    """A change that saves memory. name: with levels the name in memory.fit_by. price, least (the last level): in words.
    levels: the settings of memory.fit, the cheapest first, beginning without this remedy. ways: the suggestions; None: the
    last level. anew: the suggestion for a new run, in words. on_cpu: whether it helps on a CPU."""

    name: str
    price: str = ""
    levels: Callable[[RunPlan], Sequence[Keys]] = lambda plan: ()
    least: str = ""
    ways: Callable[[RunPlan], Iterable[Keys]] | None = None
    anew: Callable[[RunPlan], str] = lambda plan: ""
    on_cpu: bool = True

    def remaining(self, plan: RunPlan) -> Iterable[Keys]:
        """The changes that a plan does not have yet, the cheapest first."""
        last = self.levels(plan)[-1:]
        return self.ways(plan) if self.ways else [keys for keys in last if with_values(plan.config, keys) != plan.config]


def _checkpointing(plan: RunPlan) -> Sequence[Keys]:
    """Levels from the fastest: no block, every fourth, ..., all."""
    levels = (False, 4, 3, 2, "selective", True) if plan.model.family.memory.blocks else ()
    return [{"memory.gradient_checkpointing": every} for every in levels]


def _streaming(plan: RunPlan) -> Sequence[Keys]:
    family = plan.model.family
    blocks = family.ordered_blocks(family.denoiser, plan.model.source.build(family.denoiser)) if family.memory.blocks else ()
    streamed = [{"memory.offload": "blocks", "memory.resident_blocks": resident} for resident in range(len(blocks))]
    return [{"memory.offload": "none", "memory.resident_blocks": "auto"}, *reversed(streamed)]


def _more_streaming(plan: RunPlan) -> Iterator[Keys]:
    """Streaming with as many resident blocks as fit, then with none."""
    memory, family = plan.config.memory, plan.model.family
    if family.memory.blocks and memory.offload == "none" and not memory.shard and plan.config.step.graphs is not True:
        yield {"memory.offload": "blocks"}
    if plan.model.resident.get(family.denoiser):
        yield {"memory.resident_blocks": 0}


def _batches(plan: RunPlan) -> Sequence[Keys]:
    count, batches = plan.config.data.batch_size, plan.config.step.accumulation
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    return [{"data.batch_size": size, "step.accumulation": batches * count // size} for size in sizes]


def _optimizers(plan: RunPlan) -> Sequence[Keys]:
    levels = [{"optimizer.name": name} for name in (plan.config.optimizer.name, optim.in_8_bits(plan.config.optimizer.name))]
    with suppress(UserError):  # the 8-bit optimizer may not take these options
        if levels[1]["optimizer.name"]:
            optimizer_rules.check(with_values(plan.config, levels[1]))
            return levels
    return ()


def _dtypes(plan: RunPlan, names: Iterable[str]) -> Iterator[Keys]:
    """Each component in the smallest dtypes, unless its file is quantised."""
    for name in names:
        for dtype in SMALLER_DTYPES if held_as(plan.model.source, name) is None else ():
            yield {f"model.components.{name}.dtype": dtype}


def _vae(plan: RunPlan) -> Iterator[Keys]:
    """A bf16 VAE, if it computes in fp32 and the denoiser in bf16."""
    vae, denoiser, storage = plan.model.family.vae, plan.model.family.denoiser, plan.model.storage
    if (storage[vae].compute, storage[denoiser].compute) == (COMPUTE_DTYPES["fp32"], COMPUTE_DTYPES[SMALLER_VAE]):
        yield {f"model.components.{vae}.dtype": SMALLER_VAE}


def _smaller_denoiser(plan: RunPlan) -> str:
    name = plan.model.family.denoiser
    stored = plan.model.storage[name].format
    return "" if stored.dtype_name == SMALLER_DTYPES[-1] else f"a smaller model.components.{name}.dtype than {stored.name}"


# The cheapest first.
REMEDIES = (
    Remedy(
        "checkpointing", "every step takes up to a third longer; no byte changes",
        levels=_checkpointing, least="every block recomputed",
        anew=lambda plan: "memory.gradient_checkpointing = true" * (plan.config.memory.gradient_checkpointing is not True),
    ),
    Remedy(
        "pictures", "no pictures while it trains, or smaller ones; the adapter is the same",
        ways=lambda plan: [never("validation", plan.config.validation)] * bool(plan.data.requests),
    ),
    Remedy(
        "resident_blocks", "the frozen base lies in host memory and is copied to the device in each step; no byte changes",
        levels=_streaming, least="every block streamed", ways=_more_streaming,
        on_cpu=False,  # streamed blocks are in the same memory
    ),
    Remedy(
        "batch", "as many photos in an update, fewer at a time and in another order: slower, and another run",
        levels=_batches, least="one photo at a time",
        anew=lambda plan: f"data.batch_size below {plan.config.data.batch_size}" * (plan.config.data.batch_size > 1),
    ),
    Remedy("vae", "photos are encoded in 16 bits: another run", ways=_vae),
    Remedy(
        "text_encoders", "captions are read in 8 or 4 bits: another run",
        ways=lambda plan: _dtypes(plan, plan.model.family.text_encoders),
    ),
    Remedy(
        "optimizer_bits", "the optimizer's state is rounded to 8 bits: another run",
        levels=_optimizers, least="the optimizer's state in 8 bits",
        anew=lambda plan: "".join(map(in_words, _optimizers(plan)[1:])),
        on_cpu=False,  # bitsandbytes decodes the whole state there, which takes more for a moment than fp32 all the time
    ),
    Remedy(
        "denoiser", "the frozen weights are rounded, see docs/precision.md: another run",
        ways=lambda plan: _dtypes(plan, [plan.model.family.denoiser]), anew=_smaller_denoiser,
    ),
    Remedy(
        "resolution", "the photos are trained at half the size or less: another run",
        ways=lambda plan: [{"data.resolution": SMALL}] * (plan.data.resolution > SMALL),
        anew=lambda plan: f"data.resolution below {plan.data.resolution}",
    ),
    Remedy("rank", anew=lambda plan: f"adapter.rank below {plan.config.adapter.rank}"),
)  # fmt: skip


def remedies(*, on_cpu: bool) -> list[Remedy]:
    """The remedies that help on a CPU, or on an accelerator."""
    return [remedy for remedy in REMEDIES if remedy.on_cpu or not on_cpu]


def what_would_fit(plan: RunPlan, *, on_cpu: bool) -> str:
    """The remedies after a step ran out of memory, in words; first those that keep the run."""
    lines, anew = [], []
    for remedy in remedies(on_cpu=on_cpu):
        if keeps(remedy.name, plan.config.step):
            changes = (in_words(keys).replace(" = ", "=").replace("'", "") for keys in remedy.remaining(plan))
            lines += [f"go on with --resume_from auto --set {change}" for change in changes]
        elif words := remedy.anew(plan):
            anew.append(words)
    return "\nor ".join([*lines, f"start a new run (another run.output_dir) with {', '.join(anew)}"])
