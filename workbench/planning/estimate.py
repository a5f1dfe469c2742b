"""How much memory a run will take, phase by phase, and whether it fits: its own code at full size, on tensors without values.

What the tensors take is counted; a margin stands for the device's context, its libraries' workspaces and the allocator's
loss.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import psutil
import torch
from torch import Tensor, nn

from trainer import optim
from trainer.base.protocols import Kernels
from trainer.base.types import Conditioning
from trainer.data import buckets
from trainer.data.buckets import ReferenceLayout, named
from trainer.data.cache import fill
from trainer.data.cache.texts import HELD_BYTES, at_once
from trainer.data.examples import extremes
from trainer.engine.encoding import captions_at_once, captions_of, prompts_of
from trainer.models.base import ImagePart, SampleRequest
from trainer.plan import fixed_draws
from trainer.plan.run_plan import RunPlan
from trainer.run.setup import written_bytes
from trainer.runtime.device import without_graphs
from workbench.planning.dry_run import Rehearsal, without_values
from workbench.planning.op_trace import Cost, Trace

# Of an accelerator: its context (0.4 to 0.8 GiB on CUDA) with the libraries' workspaces, and a share for what the allocator
# loses. Of a CPU: the code that its libraries read in and make as they compute, and what the allocator keeps.
CONTEXT, SHARE = 0.8 * 2**30, 0.03
COMPUTING, KEPT = 0.135 * 2**30, 0.04
# What a forked worker of the data loader takes for itself.
WORKER = 2**25
# The columns of a phase, in the order in which memory is taken.
PARTS = ("weights", "adapter", "gradients", "optimizer", "averages", "checkpoint", "saved", "transient")
# How the names of phases begin.
CAPTIONS, PHOTOS, STEP, SAMPLES = "encoding captions", "encoding photos", "a step at", "samples of"
HELD_OUT = "held-out loss at"
UPDATE = "the update"


@dataclass(frozen=True)
class Stage:
    """What one part of a run takes. parts: bytes by PARTS. loaded: bytes of the components in memory, by name. cost: of a
    step's micro-batch. once: what a step makes anew after an update, without the optimizer's own operators."""

    name: str
    parts: Mapping[str, int]
    loaded: Mapping[str, int] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    once: Cost = field(default_factory=Cost)

    @property
    def peak(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Streaming:
    """How a denoiser's blocks are streamed. blocks: bytes of payload in each of all. resident: how many stay. copied: bytes
    that a step copies. about: all of it in words."""

    blocks: tuple[int, ...]
    resident: int
    copied: int
    about: str


@dataclass(frozen=True)
class Forecast:
    """What a run would take of memory and disk, in bytes. phases: in the order of a run, each at its largest. cache,
    checkpoint, adapter: on the disk, of all entries, of one checkpoint, of the trained weights. base: of the process itself
    on a CPU, 0 of an accelerator. graphs: of the steps' CUDA graphs, beside the rest; without them the steps are eager. host:
    beside an accelerator, by what takes them, at the largest moment. streaming: of the denoiser; None where it is not."""

    phases: tuple[Stage, ...]
    cache: int
    checkpoint: int
    adapter: int = 0
    base: int = 0
    graphs: int = 0
    host: Mapping[str, int] = field(default_factory=dict)
    streaming: Streaming | None = None

    @property
    def largest(self) -> Stage:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def margin(self) -> int:
        """The bytes to leave free beside what was counted."""
        below, share = (COMPUTING, KEPT) if self.base else (CONTEXT, SHARE)
        return int(below + share * self.largest.peak)

    @property
    def total(self) -> int:
        """The memory that a run needs."""
        return self.base + self.largest.peak + self.margin

    def fits(self, memory: int, *, graphs: bool = False) -> bool:
        """Whether the run fits into so many bytes. graphs: with those of its steps."""
        return self.total + graphs * int((1 + SHARE) * self.graphs) <= memory


def forecast(plan: RunPlan, kernels: Kernels, *, base: Callable[[], int] | None = None) -> Forecast:
    """What the planned run would take. kernels: of the device that is planned for. base: on a CPU, what the process itself
    takes, asked at the end, as the rehearsal loads the run's libraries; None: an accelerator."""
    with without_values(on_cpu=base is not None):
        needs = Forecaster(plan, kernels, on_cpu=base is not None).forecast()
    if base is None:
        return replace(needs, host={"the program": psutil.Process().memory_info().rss} | needs.host)
    return replace(needs, base=base())


class Forecaster:
    """The phases of a run, each on its own; inside `without_values`."""

    def __init__(self, plan: RunPlan, kernels: Kernels, *, on_cpu: bool = False) -> None:
        self.plan, self.family, self.on_cpu = plan, plan.model.family, on_cpu
        self.run, self.trace = Rehearsal(plan, kernels=kernels, on_cpu=on_cpu), Trace()
        self.weights: dict[str, int] = {}
        self.held: dict[str, int] = {}  # beside the weights
        self.masters: dict[str, int] = {}  # of components whose blocks are streamed, in host memory
        self.told: Conditioning | None = None  # of one caption
        self.widest = 0  # elements of the largest weight
        self.between = 0  # bytes that all captions have of all text encoders but the last

    def forecast(self) -> Forecast:
        """The forecast: every phase gone through, in the order of a run."""
        config, layouts = self.plan.config, extremes(self.plan.data.examples)
        measured = extremes([example for examples in self.plan.data.measured.values() for example in examples])[:1]
        encoded = {bucket for example in self.plan.data.encoded for bucket in example.layout}
        stay = config.data.cache == "none"
        encoding = [*self.captions(stay=stay), self.photos(*max(encoded, key=lambda bucket: (prod(bucket), bucket)))]
        if not stay:
            self._let_go([self.family.vae])
        self.prepare()
        training = [self.step(layout, config.data.batch_size) for layout in layouts]
        # What a micro-batch takes stays with its graph, and those of all sizes share it.
        kept = max(phase.parts["saved"] + phase.parts["transient"] for phase in training)
        graphs = 0 if self.on_cpu or without_graphs(config, torch.device("cuda")) else kept
        if self.on_cpu:
            training += self.update(max(training, key=lambda phase: phase.peak))
        training += [self.held_out_loss(layout) for layout in measured]
        if stay:  # and encode beside what the steps have
            there = {"weights": sum(self.weights.values())} | self.held
            transient = [{"transient": phase.parts["transient"]} for phase in encoding]
            loaded = dict(self.weights)
            encoding = [replace(p, parts=there | part, loaded=loaded) for p, part in zip(encoding, transient, strict=True)]
        if self.plan.data.requests:
            training.append(self.sample(max(self.plan.data.requests, key=partial(_pixels, images=self.family.images))))
        adapter, *_, step = self.run.trained
        checkpoint, trained = written_bytes(self.plan, adapter, step.optimizer)
        start = trained if config.adapter.init_from else 0  # a run keeps the weights of its start
        if self.on_cpu and start:
            training = [replace(phase, parts=phase.parts | {"adapter": phase.parts["adapter"] + start}) for phase in training]
        if self.on_cpu and config.checkpoint.background and self.plan.saves_before_the_end:
            # A copy that is written while the next steps are made.
            training = [replace(phase, parts=phase.parts | {"checkpoint": checkpoint}) for phase in training]
        cache, phases = self.cache_bytes(), (*encoding, *training)
        host = {} if self.on_cpu else self.host(cache, checkpoint, start)
        return Forecast(phases, cache, checkpoint, trained, graphs=graphs, host=host, streaming=self.streaming())

    # --- phases -------------------------------------------------------------------------------------------------------

    def captions(self, *, stay: bool) -> Iterator[Stage]:
        """The phases of encoding captions: with each text encoder, gone before the next, unless all stay."""
        names = self.family.text_encoders if self.plan.model.cache_text else ()
        texts = fill.texts_wanted((*captions_of(self.plan), *prompts_of(self.plan)), fingerprint="")
        parts = []  # of one caption, of each encoder
        for some in ([names] if names else []) if stay else [(name,) for name in names]:
            self._load(*some)
            with self._phase(f"{CAPTIONS} ({', '.join(some)})") as phases:
                if stay:
                    self.told = self.run.encode_prompts([self._longest()])
                else:
                    states = self.run.encode_text(*some, [self._longest()] * at_once(len(texts), captions_at_once(self.plan)))
            yield from phases
            if not stay:
                self._let_go(some)
                parts.append({name: tensor[:1].clone() for name, tensor in states.items()})
                del states
        if parts:
            self.told = self.family.text.join(parts)
            self.between = len(texts) * sum(tensor.nbytes for part in parts[:-1] for tensor in part.values())

    def photos(self, width: int, height: int) -> Stage:
        """The phase of encoding photos of that size."""
        self._load(self.family.vae)
        with self._phase(f"{PHOTOS} of {width}x{height} ({self.family.vae})") as phases:
            self.run.encode_images(width, height, 1)
        return phases[0]

    def prepare(self) -> None:
        """Load what steps and samples need, once photos were encoded."""
        self._load(*self.plan.model.in_steps)
        if self.plan.data.requests:
            self._load(self.family.vae)
        adapter, _, _, average, step = self.run.trained
        self.held["adapter"] = self.trace.enter(adapter.named_parameters().values())
        self.held["adapter"] += self.trace.enter(t for layer in adapter.layers.values() for t in _own(layer))
        self.held["gradients"] = self.trace.enter(parameter.grad for parameter in step.parameters)
        if average:
            self.held["averages"] = self.trace.enter(average.weights.values())
        self.held["optimizer"] = optim.state_bytes(self.plan.config.optimizer.name, step.optimizer)

    def step(self, layout: ReferenceLayout, count: int) -> Stage:
        """One over a micro-batch of so many images, after what an update made stale is made anew."""
        from trainer.adapters.layers import refresh  # it loads PEFT, which takes a second

        (adapter, *_, step), conditioning = self.run.trained, self._prompts(count) if self.plan.model.cache_text else None
        losses, saved = step.losses, 0

        def noting(*inputs):
            nonlocal saved
            before = self.trace.alive
            losses_B = losses(*inputs)
            saved = self.trace.alive - before
            return losses_B

        with self._phase(f"{STEP} {named(layout)}, batch {count}") as phases:
            adapter.mark_stale()
            for owner, layers in adapter.together.items():
                self.run.components.enter(owner)
                refresh(layers)
            once, self.trace.cost = self.trace.cost, Cost()
            self.run.step([self.run.batch(layout, conditioning, count)], noting)
        (phase,) = phases
        parts = phase.parts | {"saved": saved, "transient": phase.parts["transient"] - saved}
        return replace(phase, parts=parts, once=once)

    def update(self, step: Stage) -> Iterator[Stage]:
        """The phase of the update by an optimizer without a kernel for a CPU. The allocator still has what the step freed."""
        name, parameters = self.plan.config.optimizer.name, self.run.trained[-1].parameters
        scratch = optim.OPTIMIZERS[name].cpu_scratch * max(parameter.numel() for parameter in parameters)
        if scratch:
            freed = step.parts["saved"] + step.parts["transient"]
            parts = {part: size for part, size in step.parts.items() if part != "saved"}
            yield Stage(f"{UPDATE} by {name}", parts | {"transient": freed + scratch}, step.loaded)

    def held_out_loss(self, layout: ReferenceLayout) -> Stage:
        """The phase of the held-out loss, with as many draws as are computed at once."""
        count = fixed_draws.at_once(self.plan.data)
        prompts = self._prompts(1) if self.plan.model.cache_text else None
        with self._phase(f"{HELD_OUT} {named(layout)}, batch {count}") as phases:
            self.run.held_out_loss(self.run.batch(layout, prompts, 1), count)
        return phases[0]

    def sample(self, request: SampleRequest) -> Stage:
        """The phase of drawing a sample."""
        prompts, (adapter, _, _, average, _) = self._prompts(1), self.run.trained
        with self._phase(f"{SAMPLES} {request.width}x{request.height}") as phases, ExitStack() as stack:
            # While an average is drawn with, the weights that train lie beside it.
            if average:
                stack.enter_context(average.used())
            stack.enter_context(adapter.at_strength(request.strength))
            stack.enter_context(self.run.components.without_below())
            self.run.sample(replace(request, steps=1), prompts, prompts)
        return phases[0]

    @contextmanager
    def _phase(self, name: str) -> Iterator[list[Stage]]:
        """Traces what happens inside, and gives the phase that it was."""
        done: list[Stage] = []
        self.trace.reset()
        with self.trace:
            yield done
        weights = sum(self.weights.values())
        # The buffers that steps share (kernels/scratch.py) are still there in the phases after the first step.
        transient = self.trace.peak - weights - sum(size for part, size in self.held.items() if part != "optimizer")
        parts = {"weights": weights} | self.held | {"transient": transient}
        done.append(Stage(name, parts, dict(self.weights), self.trace.cost))

    # --- what is in memory --------------------------------------------------------------------------------------------

    def _load(self, *names: str) -> None:
        for name in names:
            if name not in self.weights:
                module = self.run.components.load(name)
                self.weights[name] = self.trace.enter(self._in_device_memory(name, module))
                self.widest = max(self.widest, *map(_weight, module.modules()))

    def _in_device_memory(self, name: str, module: nn.Module) -> Iterator[Tensor]:
        """The tensors of a loaded component in the device's memory; for streamed blocks the slots and what is kept."""
        streamer = self.run.components.streamers.get(name)
        if streamer is None:
            yield from _tensors(module)
            return
        self.masters[name] = streamer.host
        elsewhere = {id(tensor) for tensor in streamer.at_home()}
        rest = [block.kept for block in streamer.streamed.values()] if self.on_cpu or not streamer.host else []
        yield from (tensor for tensor in (*_tensors(module), *streamer.slots, *rest) if id(tensor) not in elsewhere)

    def streaming(self) -> Streaming | None:
        """How the denoiser's blocks are streamed, if they are."""
        streamer = self.run.components.streamers.get(self.family.denoiser)
        if streamer is None:
            return None
        resident = streamer.count - len(streamer.streamed)
        return Streaming(tuple(streamer.sizes), resident, streamer.copied, str(streamer))

    def _let_go(self, names: Sequence[str]) -> None:
        self.run.components.let_go(names)
        for name in names:
            self.weights.pop(name, None)

    def _prompts(self, count: int) -> Conditioning:
        """What steps and samples get of the cache, or of encoders that are there for it."""
        if self.told is None:
            there = set(self.weights)
            self.told = self.run.encode_prompts([self._longest()])
            self.run.components.let_go([name for name in self.family.text_encoders if name not in there])
        return self.family.text.collate([self.told] * count)

    def _longest(self) -> str:
        """Of the captions: what is encoded may be the longer for it (data.clip_chunks)."""
        return max((text for example in self.plan.data.encoded for text in example.captions), key=len, default="")

    # --- sizes --------------------------------------------------------------------------------------------------------

    def cache_bytes(self) -> int:
        """The bytes of the latents and texts that a run over these photos needs."""
        if self.plan.config.data.cache == "none":
            return 0
        examples, seed = self.plan.data.encoded, self.plan.config.run.seed
        views = fill.latents_wanted(examples, seed=seed, fingerprint="").values()
        total = sum(4 * self.run.channels * prod(example.bucket) // self.family.images.latent_side**2 for example, _ in views)
        if self.plan.model.cache_text:
            texts = fill.texts_wanted(captions_of(self.plan), fingerprint="")
            total += len(texts) * sum(tensor.nbytes for tensor in self._prompts(1).tensors().values())
        return total

    def host(self, cache: int, checkpoint: int, start: int) -> dict[str, int]:
        """What a run takes beside the program itself on an accelerator's host: while it loads and encodes, or in steps."""
        data = self.plan.config.data
        parts = {"the cache": cache} if data.cache == "memory" else {}
        parts["the weights of adapter.init_from"] = start
        # Encoders that encode ahead of the steps are gone before the denoiser comes.
        beside = self.masters if data.cache == "none" else self.plan.model.in_steps
        parts["streamed blocks"] = max([sum(self.masters.get(name, 0) for name in beside), *self.masters.values()])
        starting = {"a weight on its way": 4 * self.widest}  # of a file in fp32; they come one by one
        starting["captions between text encoders"] = min(HELD_BYTES, self.between)
        stepping = {"a checkpoint that is written": checkpoint, "workers": WORKER * data.num_workers}
        if self.plan.config.optimizer.name.startswith("paged"):  # it may be on either side
            stepping["pages of the optimizer"] = self.held["optimizer"]
        largest = max(starting, stepping, key=lambda moment: sum(moment.values()))
        return {what: size for what, size in (parts | largest).items() if size}


def _own(layer: nn.Module) -> Iterator[Tensor]:
    """The tensors of an adapted layer that its frozen layer has not."""
    base = {id(tensor) for tensor in _tensors(layer.get_base_layer())}
    return (tensor for tensor in _tensors(layer) if id(tensor) not in base)


def _weight(module: nn.Module) -> int:
    """Elements of its own largest tensor, as the model's file has it."""
    if isinstance(shape := getattr(module, "weight_shape", None), torch.Size):
        return shape.numel()
    return max((parameter.numel() for parameter in module.parameters(recurse=False)), default=0)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())


def _pixels(request: SampleRequest, images: ImagePart) -> int:
    """The pixels of a sample, and of the references that are shown for it."""
    count = len(request.images)
    sizes = (buckets.reference_size(*each.size, images.references, count, step=1) for each in request.images)
    return request.width * request.height + sum(map(prod, sizes))
