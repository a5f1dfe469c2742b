"""Shared by the rectified-flow families: objective, positions, captions of several lengths, pipeline, names in files."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from trainer.base.types import Conditioning
from trainer.models import base, variants
from trainer.models.base import Component, Model, SampleRequest
from trainer.models.names import ComponentConfig, Shape, check_head, how_many
from trainer.models.shared import vae
from trainer.objectives import KEYS, Flow, Loss, Noise, Times, from_choices

Pick = Callable[[torch.Tensor], torch.Tensor]
SCHEDULERS = frozenset({"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"})
TIMESTEPS = ("logit_normal", "uniform", "sigmoid", "mode", "cosmap", "power")
READS = (*KEYS, "objective.mode_scale", "objective.shift")
# Streams of Flux's and FLUX.2's double blocks: original name, the module's suffix, q/k/v, output, norms of q and k.
STREAMS = (
    ("img", "", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k")),
    ("txt", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", ("norm_added_q", "norm_added_k")),
)


def resolution_shift(tokens: int) -> float:
    """e^mu, mu = 0.5 + 0.65 (tokens - 256) / 3840, as Flux's released sampler: 1.88 at 1024 tokens (512 px), 3.16 at 4096."""
    return float(torch.tensor(0.5 + 0.65 * (tokens - 256) / 3840, dtype=torch.float64).exp())


def beginning_with(usual: str) -> tuple[str, ...]:
    """The family's TIMESTEPS, its default first."""
    return (usual, *(name for name in TIMESTEPS if name != usual))


def transformer(class_name: str, names: Any, sensitive: tuple[str, ...]) -> Component:
    """The denoiser as a component. names: the family's module of names. sensitive: as in Component."""
    return Component(
        "transformer", "diffusers", class_name, "denoiser", sensitive, names.transformer_names, names.DEFAULTS,
        names.infer_transformer, ("model.diffusion_model.",),
    )  # fmt: skip


def objective(
    scheduler: ComponentConfig,
    family: str,
    usual: str,
    *,
    timesteps: str = "auto",
    unshifted: Collection[str] = ("sigmoid",),
    scheduled: bool = False,
    shift: Literal["auto"] | float = "auto",
    **choices: Any,
) -> Flow:
    """The family's objective. Raises UserError for an impossible choice, and for a scheduler of another kind.

    usual: the distribution of times that "auto" means. unshifted: distributions that shift = "auto" leaves alone ("sigmoid"
    means without a shift). scheduled: "auto" shifts others by the scheduler's own number, else by the resolution.
    """
    variants.check_scheduler(scheduler, family, SCHEDULERS)
    timesteps = usual if timesteps == "auto" else timesteps
    if shift == "auto" and timesteps in unshifted:
        shift = 1.0
    elif shift == "auto":
        shift = float(scheduler.get("shift", 1.0)) if scheduled else resolution_shift
    return Flow(
        times=from_choices(Times, choices, timesteps=timesteps),
        shift=shift,
        loss=from_choices(Loss, choices),
        noise=from_choices(Noise, choices),
        stratified=choices.get("stratified", False),
    )


def positions(image: int, *counts: int, device: torch.device | str) -> torch.Tensor:
    """fp32 [product of the counts, 1 + their number]: each token's (image, index on each axis), the last axis fastest."""
    ids = torch.full((*counts, 1 + len(counts)), float(image), device=device)
    for axis, count in enumerate(counts, 1):
        ids[..., axis] = torch.arange(count, device=device).view(-1, *(1 for _ in counts[axis:]))
    return ids.view(-1, 1 + len(counts))


# Captions of several numbers of rows, for denoisers that take those of one number at once: a mask would change last bits.


def collate(parts: Sequence[Conditioning]) -> Conditioning:
    """Several captions' conditioning side by side, with the rows of each."""
    return replace(base.collate(parts), lengths=tuple(part.sequence.shape[1] for part in parts))


def by_length(conditioning: Conditioning, forward: Callable[[int, Pick], Iterable[torch.Tensor]]) -> torch.Tensor:
    """The outputs of a batch, computed length by length. forward: (rows, a function that picks the captions of so many from a
    batch's tensor) -> their outputs."""
    lengths = conditioning.lengths or (conditioning.sequence.shape[1],) * len(conditioning.sequence)
    outputs: dict[int, torch.Tensor] = {}
    for length in dict.fromkeys(lengths):
        indices = [index for index, each in enumerate(lengths) if each == length]
        outputs |= zip(indices, forward(length, partial(_picked, indices=indices)), strict=True)
    return torch.stack([outputs[index] for index in range(len(outputs))])


def _picked(tensor: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """The tensor's rows at these indices, without an index tensor on its device."""
    return tensor if len(indices) == len(tensor) else torch.cat([tensor[index : index + 1] for index in indices])


def pipeline(model: Model, request: SampleRequest, name: str, **others: Any) -> Any:
    """diffusers' pipeline `name` for one image, without encoders. others: its further arguments."""
    import diffusers

    return getattr(diffusers, name)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(dict(model.scheduler)),
        vae=vae.for_size(model.modules["vae"], request.width, request.height),
        transformer=model.modules["transformer"],
        **{"text_encoder": None, "tokenizer": None} | others,
    )


def metadata(architecture: str, implementation: str, version: str, module: str = "") -> dict[str, str]:
    """Metadata of the family's adapter files. module: sd-scripts' network module, if it has one."""
    entries = {
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": f"https://github.com/{implementation}",
        "modelspec.prediction_type": "velocity",
        "ss_base_model_version": version,
    }
    return entries | ({"ss_network_module": module} if module else {})


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values from the tensors' shapes, by Flux's original names; {} for tensors of something else."""
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    if norm not in shapes:
        return {}
    (head,) = shapes[norm]
    check_head(head, base["axes_dims_rope"])
    width, inputs = shapes["img_in.weight"]
    outputs = shapes["final_layer.linear.weight"][0]
    return {
        "attention_head_dim": head,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "in_channels": inputs,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "num_attention_heads": width // head,
        "num_layers": how_many(shapes, "double_blocks."),
        "num_single_layers": how_many(shapes, "single_blocks."),
        "out_channels": None if outputs == inputs else outputs,
    }


def keep_time_exact(transformer: nn.Module, embedding: nn.Module) -> None:
    """Let the sinusoidal embedding see t and guidance in fp32.

    diffusers casts both to the activations' dtype before it multiplies by 1000: in bf16 a t of 0.501 becomes 0.5.
    embedding: the layer that takes them first; the input of its `timestep_embedder` keeps the activations' dtype.
    """
    exact: dict[str, Any] = {}

    def remember(module, args, kwargs):
        exact["time"], exact["guidance"] = kwargs["timestep"], kwargs.get("guidance")

    def restore(module, args):
        exact["dtype"] = args[0].dtype
        scaled = [value * 1000 for value in (exact["time"], exact["guidance"]) if value is not None]
        return (*scaled, *args[len(scaled) :])

    def narrow(module, args):
        return (args[0].to(exact["dtype"]), *args[1:])

    transformer.register_forward_pre_hook(remember, with_kwargs=True)
    embedding.register_forward_pre_hook(restore)
    embedding.timestep_embedder.register_forward_pre_hook(narrow)
