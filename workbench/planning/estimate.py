"""Forecasts a run's memory by phase: its own code at full size, on meta tensors. Tensors are counted; a margin stands for the
device's context, library workspaces and the allocator's loss."""

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

# Margins in bytes, and as a share of the largest phase. Accelerator: its context (0.4 to 0.8 GiB on CUDA) with the libraries'
# workspaces, and the allocator's loss. CPU: code that its libraries load and generate, and memory that the allocator keeps.
CONTEXT, SHARE = 0.8 * 2**30, 0.03
CPU_CONTEXT, CPU_SHARE = 0.135 * 2**30, 0.04
WORKER = 2**25  # bytes of a forked worker of the data loader
# The parts of a phase, in the order in which memory is allocated.
PARTS = ("weights", "adapter", "gradients", "optimizer", "averages", "checkpoint", "saved", "transient")
# Prefixes of the phases' names.
CAPTIONS, PHOTOS, STEP, SAMPLES = "encoding captions", "encoding photos", "a step at", "samples of"
HELD_OUT, UPDATE = "held-out loss at", "the update"


@dataclass(frozen=True)
class Stage:
    """The memory of one phase of a run. parts: bytes by PARTS. loaded: bytes of loaded components, by name. cost: of a step's
    micro-batch. once: of the tensors that a step recomputes after an update, without the optimizer's operators."""

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
    """The streaming of a denoiser's blocks. blocks: payload bytes of each. resident: how many stay on the device. copied:
    bytes that a step copies. about: in words."""

    blocks: tuple[int, ...]
    resident: int
    copied: int
    about: str


@dataclass(frozen=True)
class Forecast:
    """A run's memory and disk in bytes. phases: in the order of a run, each at its peak. cache, checkpoint, adapter: on disk:
    all cache entries, one checkpoint, the trained weights. base: the process itself on a CPU; 0 for an accelerator. graphs:
    additional memory of CUDA graphs; without it the steps are eager. host: host memory of an accelerator's run at its peak,
    by use. streaming: None: the denoiser is not streamed."""

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
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def margin(self) -> int:
        """Bytes for everything that is not counted."""
        context, share = (CPU_CONTEXT, CPU_SHARE) if self.base else (CONTEXT, SHARE)
        return int(context + share * self.largest.peak)

    @property
    def total(self) -> int:
        """The memory that a run needs."""
        return self.base + self.largest.peak + self.margin

    def fits(self, memory: int, *, graphs: bool = False) -> bool:
        """Whether the run fits into `memory` bytes. graphs: with its CUDA graphs."""
        return self.total + graphs * int((1 + SHARE) * self.graphs) <= memory


def forecast(plan: RunPlan, kernels: Kernels, *, base: Callable[[], int] | None = None) -> Forecast:
    """The forecast of a plan. kernels: of the planned device. base: on a CPU returns the bytes of the process itself, called
    at the end, when the rehearsal has loaded the run's libraries; None: an accelerator."""
    with without_values(on_cpu=base is not None):
        needs = Forecaster(plan, kernels, on_cpu=base is not None).forecast()
    if base is None:
        return replace(needs, host={"the program": psutil.Process().memory_info().rss} | needs.host)
    return replace(needs, base=base())


class Forecaster:
    """Traces the phases of a run, one by one; inside `without_values`."""

    def __init__(self, plan: RunPlan, kernels: Kernels, *, on_cpu: bool = False) -> None:
        self.plan, self.family, self.on_cpu = plan, plan.model.family, on_cpu
        self.run, self.trace = Rehearsal(plan, kernels=kernels, on_cpu=on_cpu), Trace()
        self.weights: dict[str, int] = {}  # bytes of loaded components
        self.parts: dict[str, int] = {}  # bytes of the other persistent parts
        self.masters: dict[str, int] = {}  # host bytes of streamed components
        self.conditioning: Conditioning | None = None  # of one caption
        self.widest = 0  # elements of the largest weight
        self.between = 0  # bytes of all captions' outputs of all text encoders but the last

    def forecast(self) -> Forecast:
        """The forecast of all phases, in the order of a run."""
        config, layouts = self.plan.config, extremes(self.plan.data.examples)
        measured = extremes([example for examples in self.plan.data.measured.values() for example in examples])[:1]
        encoded = {bucket for example in self.plan.data.encoded for bucket in example.layout}
        stay = config.data.cache == "none"  # encoders stay loaded during steps
        encoding = [*self.captions(stay=stay), self.photos(*max(encoded, key=lambda bucket: (prod(bucket), bucket)))]
        if not stay:
            self._unload([self.family.vae])
        self.prepare()
        training = [self.step(layout, config.data.batch_size) for layout in layouts]
        # A graph keeps the memory of its micro-batch, and the graphs of all sizes share it.
        largest = max(phase.parts["saved"] + phase.parts["transient"] for phase in training)
        graphs = 0 if self.on_cpu or without_graphs(config, torch.device("cuda")) else largest
        if self.on_cpu:
            training += self.update(max(training, key=lambda phase: phase.peak))
        training += [self.held_out_loss(layout) for layout in measured]
        if stay:  # encoding happens while everything of the steps is in memory
            parts, loaded = {"weights": sum(self.weights.values())} | self.parts, dict(self.weights)
            encoding = [
                replace(phase, parts=parts | {"transient": phase.parts["transient"]}, loaded=loaded) for phase in encoding
            ]
        if self.plan.data.requests:
            training.append(self.sample(max(self.plan.data.requests, key=partial(_pixels, images=self.family.images))))
        adapter, *_, step = self.run.trained
        checkpoint, trained = written_bytes(self.plan, adapter, step.optimizer)
        start = trained if config.adapter.init_from else 0  # a run keeps its initial weights
        if self.on_cpu and start:
            training = [replace(phase, parts=phase.parts | {"adapter": phase.parts["adapter"] + start}) for phase in training]
        if self.on_cpu and config.checkpoint.background and self.plan.saves_before_the_end:
            # A copy is written in the background during the next steps.
            training = [replace(phase, parts=phase.parts | {"checkpoint": checkpoint}) for phase in training]
        cache, phases = self.cache_bytes(), (*encoding, *training)
        host = {} if self.on_cpu else self.host(cache, checkpoint, start)
        return Forecast(phases, cache, checkpoint, trained, graphs=graphs, host=host, streaming=self.streaming())

    # --- phases -------------------------------------------------------------------------------------------------------

    def captions(self, *, stay: bool) -> Iterator[Stage]:
        """The phases of encoding captions. One text encoder is loaded at a time, unless all stay."""
        names = self.family.text_encoders if self.plan.model.cache_text else ()
        texts = fill.texts_wanted((*captions_of(self.plan), *prompts_of(self.plan)), fingerprint="")
        outputs = []  # of each encoder, for one caption
        for group in ([names] if names else []) if stay else [(name,) for name in names]:
            self._load(*group)
            with self._phase(f"{CAPTIONS} ({', '.join(group)})") as phases:
                if stay:
                    self.conditioning = self.run.encode_prompts([self._longest()])
                else:
                    count = at_once(len(texts), captions_at_once(self.plan))
                    states = self.run.encode_text(*group, [self._longest()] * count)
            yield from phases
            if not stay:
                self._unload(group)
                outputs.append({name: tensor[:1].clone() for name, tensor in states.items()})
                del states
        if outputs:
            self.conditioning = self.family.text.join(outputs)
            self.between = len(texts) * sum(tensor.nbytes for output in outputs[:-1] for tensor in output.values())

    def photos(self, width: int, height: int) -> Stage:
        """The phase of encoding photos of this size in pixels."""
        self._load(self.family.vae)
        with self._phase(f"{PHOTOS} of {width}x{height} ({self.family.vae})") as phases:
            self.run.encode_images(width, height, 1)
        return phases[0]

    def prepare(self) -> None:
        """Load the components of steps and samples; needs encoded photos."""
        self._load(*self.plan.model.in_steps)
        if self.plan.data.requests:
            self._load(self.family.vae)
        adapter, _, _, average, step = self.run.trained
        self.parts["adapter"] = self.trace.enter(adapter.named_parameters().values())
        self.parts["adapter"] += self.trace.enter(t for layer in adapter.layers.values() for t in _adapter_tensors(layer))
        self.parts["gradients"] = self.trace.enter(parameter.grad for parameter in step.parameters)
        if average:
            self.parts["averages"] = self.trace.enter(average.weights.values())
        self.parts["optimizer"] = optim.state_bytes(self.plan.config.optimizer.name, step.optimizer)

    def step(self, layout: ReferenceLayout, count: int) -> Stage:
        """The phase of a step over a micro-batch of `count` images, with the refresh after an update."""
        from trainer.adapters.layers import refresh  # it loads PEFT, which takes a second

        (adapter, *_, step), conditioning = self.run.trained, self._prompts(count) if self.plan.model.cache_text else None
        losses, saved = step.losses, 0

        def measured_losses(*inputs):
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
            self.run.step([self.run.batch(layout, conditioning, count)], measured_losses)
        (phase,) = phases
        parts = phase.parts | {"saved": saved, "transient": phase.parts["transient"] - saved}
        return replace(phase, parts=parts, once=once)

    def update(self, step: Stage) -> Iterator[Stage]:
        """The phase of the update by an optimizer without a CPU kernel. The allocator still keeps the step's freed memory."""
        name, parameters = self.plan.config.optimizer.name, self.run.trained[-1].parameters
        scratch = optim.OPTIMIZERS[name].cpu_scratch * max(parameter.numel() for parameter in parameters)
        if scratch:
            freed = step.parts["saved"] + step.parts["transient"]
            parts = {part: size for part, size in step.parts.items() if part != "saved"}
            yield Stage(f"{UPDATE} by {name}", parts | {"transient": freed + scratch}, step.loaded)

    def held_out_loss(self, layout: ReferenceLayout) -> Stage:
        """The phase of the held-out loss, with one batch of draws."""
        count = fixed_draws.at_once(self.plan.data)
        prompts = self._prompts(1) if self.plan.model.cache_text else None
        with self._phase(f"{HELD_OUT} {named(layout)}, batch {count}") as phases:
            self.run.held_out_loss(self.run.batch(layout, prompts, 1), count)
        return phases[0]

    def sample(self, request: SampleRequest) -> Stage:
        """The phase of drawing a sample."""
        prompts, (adapter, _, _, average, _) = self._prompts(1), self.run.trained
        with self._phase(f"{SAMPLES} {request.width}x{request.height}") as phases, ExitStack() as stack:
            # With an average in use, the training weights are in memory, too.
            if average:
                stack.enter_context(average.used())
            stack.enter_context(adapter.at_strength(request.strength))
            stack.enter_context(self.run.components.without_below())
            self.run.sample(replace(request, steps=1), prompts, prompts)
        return phases[0]

    @contextmanager
    def _phase(self, name: str) -> Iterator[list[Stage]]:
        """A traced block. The yielded list contains its Stage after the block."""
        phases: list[Stage] = []
        self.trace.reset()
        with self.trace:
            yield phases
        weights = sum(self.weights.values())
        # Transient memory of later phases includes the buffers that steps share (kernels/scratch.py).
        transient = self.trace.peak - weights - sum(size for part, size in self.parts.items() if part != "optimizer")
        parts = {"weights": weights} | self.parts | {"transient": transient}
        phases.append(Stage(name, parts, dict(self.weights), self.trace.cost))

    # --- components in memory -----------------------------------------------------------------------------------------

    def _load(self, *names: str) -> None:
        for name in names:
            if name not in self.weights:
                module = self.run.components.load(name)
                self.weights[name] = self.trace.enter(self._in_device_memory(name, module))
                self.widest = max(self.widest, *map(_largest_weight, module.modules()))

    def _in_device_memory(self, name: str, module: nn.Module) -> Iterator[Tensor]:
        """The tensors of a loaded component in device memory; of streamed blocks the slots, and masters that lie there."""
        streamer = self.run.components.streamers.get(name)
        if streamer is None:
            yield from _tensors(module)
            return
        self.masters[name] = streamer.host
        elsewhere = {id(tensor) for tensor in streamer.at_home()}
        rest = [block.master for block in streamer.streamed.values()] if self.on_cpu or not streamer.host else []
        yield from (tensor for tensor in (*_tensors(module), *streamer.slots, *rest) if id(tensor) not in elsewhere)

    def streaming(self) -> Streaming | None:
        """The streaming of the denoiser's blocks; None if they are not streamed."""
        streamer = self.run.components.streamers.get(self.family.denoiser)
        if streamer is None:
            return None
        resident = streamer.count - len(streamer.streamed)
        return Streaming(tuple(streamer.sizes), resident, streamer.copied, str(streamer))

    def _unload(self, names: Sequence[str]) -> None:
        self.run.components.unload(names)
        for name in names:
            self.weights.pop(name, None)

    def _prompts(self, count: int) -> Conditioning:
        """The conditioning of `count` captions, as steps and samples get it from the cache or from encoders."""
        if self.conditioning is None:
            loaded = set(self.weights)
            self.conditioning = self.run.encode_prompts([self._longest()])
            self.run.components.unload([name for name in self.family.text_encoders if name not in loaded])
        return self.family.text.collate([self.conditioning] * count)

    def _longest(self) -> str:
        """The longest caption, whose encoding may be longer than others (data.clip_chunks)."""
        return max((text for example in self.plan.data.encoded for text in example.captions), key=len, default="")

    # --- sizes --------------------------------------------------------------------------------------------------------

    def cache_bytes(self) -> int:
        """The bytes of the cached latents and texts of a run."""
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
        """Use -> host bytes of an accelerator's run, without the program itself: the larger of its start and its steps."""
        data = self.plan.config.data
        parts = {"the cache": cache} if data.cache == "memory" else {}
        parts["the weights of adapter.init_from"] = start
        # Encoders that encode ahead of the steps are unloaded before the denoiser is loaded.
        together = self.masters if data.cache == "none" else self.plan.model.in_steps
        parts["streamed blocks"] = max([sum(self.masters.get(name, 0) for name in together), *self.masters.values()])
        starting = {"a weight on its way": 4 * self.widest}  # of an fp32 file; weights are loaded one by one
        starting["captions between text encoders"] = min(HELD_BYTES, self.between)
        stepping = {"a checkpoint that is written": checkpoint, "workers": WORKER * data.num_workers}
        if self.plan.config.optimizer.name.startswith("paged"):  # pages may be on either side
            stepping["pages of the optimizer"] = self.parts["optimizer"]
        largest = max(starting, stepping, key=lambda moment: sum(moment.values()))
        return {use: size for use, size in (parts | largest).items() if size}


def _adapter_tensors(layer: nn.Module) -> Iterator[Tensor]:
    """The tensors of an adapted layer without those of its frozen layer."""
    base = {id(tensor) for tensor in _tensors(layer.get_base_layer())}
    return (tensor for tensor in _tensors(layer) if id(tensor) not in base)


def _largest_weight(module: nn.Module) -> int:
    """Elements of the module's own largest tensor, in the shape of the model's file."""
    if isinstance(shape := getattr(module, "weight_shape", None), torch.Size):
        return shape.numel()
    return max((parameter.numel() for parameter in module.parameters(recurse=False)), default=0)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())


def _pixels(request: SampleRequest, images: ImagePart) -> int:
    """The pixels of a sample, with its reference images."""
    count = len(request.images)
    sizes = (buckets.reference_size(*image.size, images.references, count, step=1) for image in request.images)
    return request.width * request.height + sum(map(prod, sizes))
