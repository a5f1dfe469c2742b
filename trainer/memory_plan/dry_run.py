"""A run's own code on tensors without values: at full size it costs seconds, and next to no memory.

They are torch's meta tensors. Tests use the same on an accelerator that is not there, with fake tensors (tests/pretend.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainer import optim
from trainer.adapters import Adapter
from trainer.adapters.norms import Norms
from trainer.base.progress import QUIET
from trainer.base.protocols import Kernels
from trainer.base.types import Batch, Conditioning, Occurrence
from trainer.checkpoint.pieces import Pieces
from trainer.ema import Averages
from trainer.engine.assembly import build_adapter, build_step
from trainer.engine.components import Components
from trainer.engine.held_out_loss import squared_errors
from trainer.engine.step import Step, StepResult
from trainer.kernels import scratch
from trainer.memory_plan.op_trace import Remembering
from trainer.models.base import SampleRequest
from trainer.models.tokenizers import load_tokenizer
from trainer.plan.run_plan import Plan
from trainer.resume import start_point
from trainer.runtime.attention import few_tokens_in_fp32
from trainer.runtime.processes import Processes

META = torch.device("meta")


@contextmanager
def without_values(*, on_cpu: bool = False) -> Iterator[None]:
    """Inside, what reads a value where a run has to does without: meta tensors go through everything below.

    on_cpu: operators as a CPU has them, else as a GPU.

    A step makes its gradients, and finds them not finite: there is no update (`forecast` looks at the optimizer apart).
    """
    from bitsandbytes import functional
    from diffusers import EulerDiscreteScheduler as Euler
    from diffusers import FlowMatchEulerDiscreteScheduler as FlowEuler

    reading = {Euler: ("__init__", "scale_model_input", "step"), FlowEuler: ("__init__", "step")}
    with ExitStack() as stack:
        for owner, name, value in (
            (scratch, "_buffers", {}),
            (Step, "_read", read_nothing(finite=False)),
            (Tensor, "cpu", _stay(Tensor.cpu)),
            # On the meta device torch would take attention apart, whose scores alone would be gigabytes.
            (nn.functional, "scaled_dot_product_attention", _whole(nn.functional.scaled_dot_product_attention)),
            (nn.functional, "rms_norm", nn.functional.rms_norm if on_cpu else _fused(nn.functional.rms_norm)),
            (functional, "create_dynamic_map", _with_values(functional.create_dynamic_map)),
            (Tensor, "numpy", _zeros(Tensor.numpy)),
            *((each, name, _with_values(getattr(each, name))) for each, names in reading.items() for name in names),
            *((each, "set_timesteps", _timed(each.set_timesteps)) for each in reading),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def read_nothing(*, finite: bool) -> Callable[..., tuple[list[float], float, float]]:
    """What a step reads (Step._read): that all went well, but for the gradient where it is not `finite`."""

    def read(step: Step, told: Tensor, norm: Tensor) -> tuple[list[float], float, float]:
        return [1.0] + [0.0] * (len(told) - 1), 1.0 if finite else torch.inf, 2.0**16

    return read


def _stay(cpu: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor if tensor.is_meta else cpu(tensor)


def _zeros(numpy: Callable[..., Any]) -> Callable[..., Any]:
    """Of the picture at the end of a sample."""
    return lambda tensor, **keys: numpy(torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor, **keys)


def _whole(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention as one operator that keeps its output and a row of sums, as the fused ones of GPUs do."""

    def whole(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not query.is_meta:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    return whole


def _fused(rms_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """RMSNorm as GPUs have it: one operator that keeps its input and a sum for each row. Without values torch would take it
    apart, and keep two fp32 copies of the input. A layer norm keeps the same, and stands in for it."""

    def fused(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not x.is_meta:
            return rms_norm(x, shape, weight, eps)
        return nn.functional.layer_norm(x, shape, weight, None, eps or 0.0)

    return fused


def _with_values(method: Callable) -> Callable:
    """Of what reads a table that it makes: a sampler's noise levels, the codes of an 8-bit optimizer. These have values."""

    @wraps(method)
    def wrapped(*arguments: Any, **keys: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **keys)

    return wrapped


def _timed(set_timesteps: Callable[..., None]) -> Callable[..., None]:
    """A sampler's method. The noise levels of its steps keep their values; the times that the model sees have none."""

    @wraps(set_timesteps)
    def wrapped(sampler: Any, *arguments: Any, device: Any = None, **keys: Any) -> None:
        with unset_fake_temporarily():
            set_timesteps(sampler, *arguments, device="cpu", **keys)
            sampler.set_begin_index(0)
        sampler.timesteps = torch.empty_like(sampler.timesteps, device=device)

    return wrapped


class Unfetched:
    """Stands for a tokenizer that is not on this machine yet: every text is as long as can be."""

    model_max_length = 512  # of T5, the only one whose file is too large to come with the program

    def __call__(self, texts: Sequence[str], *, max_length: int, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.zeros(len(texts), max_length, dtype=torch.int64))


class Unread(Components):
    """Components whose weights have the form that they would have in memory, and no values: no file of weights is opened."""

    def tokenizers(self) -> dict[str, Any]:
        if self.source.fetched:
            return super().tokenizers()
        folders = {name: self.source.tokenizer_folder(name) for name in self.family.tokenizers}
        return {name: load_tokenizer(folder, name) if folder.is_dir() else Unfetched() for name, folder in folders.items()}

    def load(self, name: str) -> nn.Module:
        if name not in self.model.modules:
            storage, held = self.plan.components[name], self.source.held(name)
            swap = partial(storage.swap, held=held, kernels=self.kernels)
            module = self.source.empty(name, swap=swap, device=self.model.device)
            self.model.modules[name] = self.source.finished(name, module)
        return self.model.modules[name]

    def let_go(self, names: Collection[str]) -> None:
        """Empty them: modules know each other in circles, and looking for those in all that the libraries made takes longer
        than the rest."""
        for name in names:
            module = self.model.modules.pop(name, None)
            for part in module.modules() if module is not None else ():
                tensors = *part.named_parameters(recurse=False), *part.named_buffers(recurse=False)
                for tensor, _ in tensors:
                    delattr(part, tensor)


class Rehearsal:
    """A run's parts, and what it does with them. Everything happens inside `without_values`.

    kernels: those that it would choose. device: where the run computes. on_cpu: whether that stands for a CPU.
    host: where its data comes from.
    """

    def __init__(self, plan: Plan, *, kernels: Kernels, device: torch.device = META, on_cpu: bool = False) -> None:
        alone = SimpleNamespace(device=device, num_processes=1, process_index=0, is_main_process=False)
        processes = Processes(alone)
        self.plan, self.device, self.on_cpu = plan, device, on_cpu
        self.host = device if device == META else torch.device("cpu")
        self.channels = 0  # of latents: known once images were encoded
        self.components = Unread(plan, kernels=kernels, digests=None, processes=processes, phases=QUIET)  # type: ignore[arg-type]

    def encode_prompts(self, texts: Sequence[str]) -> Conditioning:
        """As they come from the cache: on the host."""
        return self.components.encode_prompts(list(texts)).to(self.host)

    def encode_text(self, name: str, texts: Sequence[str]) -> Mapping[str, Tensor]:
        """What one text encoder gives, which is gone after that."""
        with self.components.text_encoder(name) as encode:
            return encode(list(texts))

    def encode_images(self, width: int, height: int, count: int) -> torch.Tensor:
        """Latents fp32 [count, C, h, w] on the host."""
        latents = self.components.encode_images(torch.empty(count, 3, height, width, device=self.host)).to(self.host)
        self.channels = latents.shape[1]
        return latents

    @cached_property
    def trained(self) -> tuple[Adapter, Norms, optim.OptimizerState, Averages, Step]:
        """The adapter in its layers, the norms for its files, optimizer, averages and step; the denoiser is loaded."""
        with Remembering():
            return self._build()

    def _build(self) -> tuple[Adapter, Norms, optim.OptimizerState, Averages, Step]:
        plan, pieces = self.plan, Pieces(None, start_point.census(self.plan.config))
        for name in (plan.family.denoiser, *(() if plan.cache_text else plan.family.text_encoders)):
            self.components.load(name)
        adapter, norms = build_adapter(plan, self.components, pieces)
        if self.on_cpu:
            few_tokens_in_fp32(self.components.load(plan.family.denoiser), plan.family.attention, torch.device("cpu"))
        optimizer, averages, step = build_step(self.components, adapter, pieces, start_point.first_progress(plan), then=None)
        adapter.refresh()
        return adapter, norms, optimizer, averages, step

    def batch(self, width: int, height: int, conditioning: Conditioning | None, count: int, first: int = 0) -> Batch:
        """A micro-batch of one bucket, once images were encoded.

        conditioning: of as many captions; None where the run encodes them live.
        """
        side = self.plan.family.latent_side
        with unset_fake_temporarily():
            size = torch.tensor([[height, width]] * count)
            corner = torch.zeros_like(size)
        return Batch(
            occurrences=tuple(Occurrence(0, f"0/{first + index}.png", 0) for index in range(count)),
            latents=torch.empty(count, self.channels, height // side, width // side, device=self.host),
            captions=("",) * count,
            conditioning=conditioning,
            original_size=size,
            crop_top_left=corner,
            target_size=size,
        )

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One update from these micro-batches."""
        step = self.trained[-1]
        return step.run(1, batches, [occurrence for batch in batches for occurrence in batch.occurrences])

    def held_out_loss(self, batch: Batch, count: int) -> None:
        """Of so many draws of one photo."""
        noise = torch.empty(count, *batch.latents.shape[1:], device=self.host)
        with unset_fake_temporarily():
            shares = torch.linspace(0.1, 0.9, count, dtype=torch.float64)
        squared_errors(self.components)(batch, shares, noise)

    def sample(self, request: SampleRequest, conditioning: Conditioning, negative: Conditioning) -> Any:
        """The image that would be drawn."""
        self.components.load(self.plan.family.vae)
        told = (each.to(self.device) for each in (conditioning, negative))
        with torch.no_grad():
            return self.components.family.sample(self.components.model, request, *told)
