"""Runs a run's own code on meta tensors: at full size it takes seconds, and next to no memory. Tests use it with fake tensors
for an accelerator that is not there (tests/pretend.py)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from trainer import optim
from trainer.adapters import Adapter
from trainer.adapters.norms import Norms
from trainer.base.digests import FileDigests
from trainer.base.memory import find_blocks, recomputing
from trainer.base.progress import QUIET
from trainer.base.protocols import Kernels
from trainer.base.types import Batch, Conditioning, Occurrence
from trainer.checkpoint.state import Pieces
from trainer.data.buckets import ReferenceLayout
from trainer.ema import Average
from trainer.engine.assembly import build_adapter, build_step
from trainer.engine.components import Components
from trainer.engine.held_out_loss import squared_errors
from trainer.engine.step import Step, StepResult
from trainer.kernels import scratch
from trainer.models.base import SampleRequest
from trainer.models.tokenizers import build_clip_tokenizer, load_tokenizer
from trainer.plan.run_plan import RunPlan
from trainer.resume import start_point
from trainer.runtime.attention import only_plain, planned
from trainer.runtime.processes import Processes
from workbench.planning.op_trace import Remembering

META = torch.device("meta")


class WithoutValues(TorchFunctionMode):
    """A block in which functions that read a tensor's values accept meta tensors: a condition is False, a search finds the
    first place, a copy to the CPU is the tensor itself, a picture is black. Fused attention, and on an accelerator RMSNorm,
    are one operator each."""

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self.replacements: dict[Callable, Callable[..., Any]] = {
            Tensor.__bool__: lambda tensor: False,
            Tensor.nonzero: lambda tensor: torch.zeros(1, tensor.dim(), dtype=torch.int64),
            Tensor.cpu: lambda tensor: tensor,
            Tensor.to: _to_except_cpu,
            Tensor.numpy: lambda tensor, **keys: torch.zeros(tensor.shape, dtype=tensor.dtype).numpy(**keys),
            nn.functional.scaled_dot_product_attention: _fused_attention,
        }
        if not on_cpu:
            self.replacements[nn.functional.rms_norm] = fused_rms_norm

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        replacement = self.replacements.get(func)
        if replacement is not None and (args[0] if args else kwargs["query"]).is_meta:
            func = replacement
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values(*, on_cpu: bool = False) -> Iterator[None]:
    """A block in which this module runs on meta tensors. on_cpu: with a CPU's operators, else with a GPU's."""
    with scratch.own_buffers(), WithoutValues(on_cpu=on_cpu):
        yield


def _to_except_cpu(tensor: Tensor, *args: Any, **keys: Any) -> Tensor:
    """`Tensor.to`, which leaves the tensor on its device instead of moving it to the CPU."""
    device = keys.get("device", args[0] if args and isinstance(args[0], (str, torch.device)) else None)
    if device is None or torch.device(device).type != "cpu":
        return tensor.to(*args, **keys)
    dtype = keys.get("dtype", next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype))
    return tensor.to(dtype)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **keys: Any,
) -> Tensor:  # fmt: skip
    """Attention as one operator that saves its output and a row of sums, like the fused kernels of GPUs: on the meta device
    torch would decompose it, with scores of gigabytes, which only the plain kernel has."""
    if only_plain():
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=keys.get("scale"))[0]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=keys.get("scale"))[0]


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMSNorm as on GPUs: one operator that saves its input and a sum for each row. A layer norm, which does the same, stands
    in for it: on meta tensors torch would decompose RMSNorm, and save two fp32 copies of the input."""
    return nn.functional.layer_norm(x, shape, weight, None, eps or 0.0)


class DryStep(Step):
    """A step that computes gradients and takes them for not finite, so that there is no update."""

    def read(self, losses: Tensor, norm: Tensor) -> tuple[list[float], float, float]:
        return [1.0] + [0.0] * (len(losses) - 1), torch.inf, 2.0**16


class Unread(Components):
    """Components on the meta device: no weight file is opened. on_cpu: whether their operators are a CPU's."""

    def __init__(self, *args: Any, on_cpu: bool, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.on_cpu = on_cpu

    def tokenizers(self) -> dict[str, Any]:
        """The local tokenizers. CLIP's, with room for T5's tokens, replaces a hub id's: only the number of tokens matters."""
        folders = {name: self.source.tokenizer_folder(name) for name in self.family.files.tokenizers}
        configs = {name: self.source.config(encoder) for name, encoder in self.family.files.tokenizers.items()}
        tokenizers = {name: load_tokenizer(path, name, configs[name]) for name, path in folders.items() if path.is_dir()}
        if missing := folders.keys() - tokenizers:
            substitute = build_clip_tokenizer(None)
            substitute.model_max_length, substitute.chat_template = 512, "{{ messages[-1].content }}"
            tokenizers |= dict.fromkeys(missing, substitute)
        return tokenizers

    def load(self, name: str) -> nn.Module:
        if name not in self.model.modules:
            module = self.source.empty(name, swap=partial(self.swap, name), device=self.model.device)
            self.model.modules[name] = self.source.finished(name, module)
            if name == self.family.denoiser:
                for block in find_blocks(module, self.family.memory.blocks).values():
                    block.forward = self.with_its_own_mode(block.forward)
        return self.model.modules[name]

    def with_its_own_mode(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward. torch switches modes off in backward, so a recomputed block enters its own."""

        @wraps(forward)
        def wrapped(*arguments: Any, **keys: Any) -> Any:
            with WithoutValues(on_cpu=self.on_cpu) if recomputing() else nullcontext():
                return forward(*arguments, **keys)

        return wrapped

    def unload(self, names: Collection[str]) -> None:
        """Delete the tensors of components: collecting the modules' reference cycles would take longer than the rest."""
        for name in names:
            if name in self.streamers:
                self.streamers.pop(name).close()
            module = self.model.modules.pop(name, None)
            for part in module.modules() if module is not None else ():
                tensors = *part.named_parameters(recurse=False), *part.named_buffers(recurse=False)
                for tensor, _ in tensors:
                    delattr(part, tensor)


class Rehearsal:
    """The parts and actions of a run, inside `without_values`. kernels: the run's. on_cpu: whether the device stands for a
    CPU. host: the device of its data. step: the class of its step."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        kernels: Kernels,
        device: torch.device = META,
        on_cpu: bool = False,
        step: type[Step] = DryStep,
    ) -> None:
        self.plan, self.device, self.on_cpu, self.step_class = plan, device, on_cpu, step
        self.host = device if device == META else torch.device("cpu")
        self.channels = 0  # of latents: set by encode_images
        self.components = Unread(
            plan.model,
            on_cpu=on_cpu,
            kernels=kernels,
            digests=FileDigests(),
            processes=Processes(device, lost_after=plan.config.run.lost_after, quiet=True),
            phases=QUIET,
            attention=planned(plan.config.step.attention),
        )

    def encode_prompts(self, texts: Sequence[str]) -> Conditioning:
        """The conditioning of the texts as it comes from the cache: on the host."""
        return self.components.encode_prompts(list(texts)).to(self.host)

    def encode_text(self, name: str, texts: Sequence[str]) -> Mapping[str, Tensor]:
        """One text encoder's output. The encoder is unloaded afterwards."""
        with self.components.text_encoder(name) as encode:
            return encode(list(texts))

    def encode_images(self, width: int, height: int, count: int) -> torch.Tensor:
        """Latents fp32 [count, C, h, w] on the host."""
        latents = self.components.encode_images(torch.empty(count, 3, height, width, device=self.host)).to(self.host)
        self.channels = latents.shape[1]
        return latents

    @cached_property
    def trained(self) -> tuple[Adapter, Norms, optim.OptimizerState, Average | None, Step]:
        """The adapter in its layers, the norms for its files, optimizer, average and step; the denoiser is loaded."""
        plan, components, pieces = self.plan, self.components, Pieces(None, start_point.census(self.plan.config))
        with Remembering():
            for name in plan.model.in_steps:
                components.load(name)
            adapter, norms = build_adapter(plan.config, components, pieces)
            if self.on_cpu:
                family = plan.model.family
                components.attention.give(components.load(family.denoiser), family.memory.attention, torch.device("cpu"))
            progress = start_point.first_progress(plan)
            state, step = build_step(plan.config, components, adapter, norms, pieces, progress, saved_config=None)
            adapter.refresh()
        dry_step = self.step_class(**{field.name: getattr(step, field.name) for field in fields(step)})
        return adapter, norms, state.optimizer, state.average, dry_step

    def batch(self, layout: ReferenceLayout, conditioning: Conditioning | None, count: int, first: int = 0) -> Batch:
        """A micro-batch of `count` examples of one layout; needs `channels`. conditioning: None: encoded live."""
        side, (width, height) = self.plan.model.family.images.latent_side, layout[0]
        with unset_fake_temporarily():
            size = torch.tensor([[height, width]] * count)
            corner = torch.zeros_like(size)
        latents, *references = (
            torch.empty(count, self.channels, height // side, width // side, device=self.host) for width, height in layout
        )
        return Batch(
            occurrences=tuple(Occurrence(0, f"0/{first + index}.png", 0) for index in range(count)),
            latents=latents,
            captions=("",) * count,
            conditioning=conditioning,
            original_size=size,
            crop_top_left=corner,
            target_size=size,
            references=tuple(references),
            preserved=conditioning if self.plan.config.objective.preserve else None,
        )

    def step(self, batches: Sequence[Batch], losses: Callable[..., Tensor] | None = None) -> StepResult:
        """One update from these micro-batches. losses: replaces the step's own."""
        step = self.trained[-1] if losses is None else replace(self.trained[-1], losses=losses)
        return step.run(1, batches, [occurrence for batch in batches for occurrence in batch.occurrences])

    def held_out_loss(self, batch: Batch, count: int) -> None:
        """Measure the loss of `count` draws of one photo."""
        noise = torch.empty(count, *batch.latents.shape[1:], device=self.host)
        with unset_fake_temporarily():
            shares = torch.linspace(0.1, 0.9, count, dtype=torch.float64)
        squared_errors(self.components)(batch, shares, noise)

    def sample(self, request: SampleRequest, conditioning: Conditioning, negative: Conditioning) -> Any:
        """The image that would be drawn."""
        self.components.load(self.plan.model.family.vae)
        texts = (text.to(self.device) for text in (conditioning, negative))
        with torch.no_grad():
            return self.components.family.images.draw(self.components.model, request, *texts)
