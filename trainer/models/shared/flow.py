"""What Flux and FLUX.2 share: the objective, its shift by the resolution, times that stay exact, a transformer's sizes."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.models import variants
from trainer.models.names import ComponentConfig, Shape, how_many
from trainer.objectives import KEYS, Flow, Loss, Noise, Times, from_choices

SCHEDULERS = frozenset({"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"})
TIMESTEPS = ("logit_normal", "uniform", "sigmoid", "mode", "cosmap", "power")
READS = (*KEYS, "objective.mode_scale", "objective.shift")


def resolution_shift(tokens: int) -> float:
    """e^mu, mu = 0.5 + 0.65 (tokens - 256) / 3840, as Flux's released sampler: 1.88 at 1024 tokens (512 px), 3.16 at 4096."""
    return float(torch.tensor(0.5 + 0.65 * (tokens - 256) / 3840, dtype=torch.float64).exp())


def flow(
    scheduler: ComponentConfig,
    family: str,
    *,
    timesteps: str,
    unshifted: Collection[str] = ("sigmoid",),
    shift: Literal["auto"] | float = "auto",
    stratified: bool = False,
    **choices: Any,
) -> Flow:
    """An objective that is shifted by the resolution, if not asked otherwise, and but for times that are `unshifted`
    ("sigmoid" is the name of such). Raises UserError for an impossible choice, and for a scheduler of another kind."""
    variants.check_scheduler(scheduler, family, SCHEDULERS)
    if shift == "auto":
        shift = 1.0 if timesteps in unshifted else resolution_shift
    return Flow(
        times=from_choices(Times, choices, timesteps=timesteps),
        shift=shift,
        loss=from_choices(Loss, choices),
        noise=from_choices(Noise, choices),
        stratified=stratified,
    )


def as_scheduled(scheduler: ComponentConfig, family: str, *, timesteps: str, shift: Any = "auto", **choices: Any) -> Flow:
    """`flow`, shifted as the model's scheduler shifts, whatever the resolution, but for "sigmoid"."""
    if shift == "auto" and timesteps != "sigmoid":
        shift = float(scheduler.get("shift", 1.0))
    return flow(scheduler, family, timesteps=timesteps, shift=shift, **choices)


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """The values of the transformer's config that its tensors' shapes tell, by Flux's original names; {} where they are of
    something else."""
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    if norm not in shapes:
        return {}
    (head,) = shapes[norm]
    if head != sum(base["axes_dims_rope"]):
        raise UserError(
            f"the transformer of this file has heads of {head} (the published models: {sum(base['axes_dims_rope'])}), "
            "and how its rotary embedding divides them is written nowhere in it; give its config with model.config"
        )
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
    embedding: the layer that takes them first, which has a `timestep_embedder`, whose input keeps the activations' dtype.
    """
    exact: dict[str, Any] = {}

    def remember(module, args, kwargs):
        exact["time"], exact["guidance"] = kwargs["timestep"], kwargs.get("guidance")

    def restore(module, args):
        exact["dtype"] = args[0].dtype
        given = [exact["time"] * 1000]
        if exact["guidance"] is not None:
            given.append(exact["guidance"] * 1000)
        return (*given, *args[len(given) :])

    def narrow(module, args):
        return (args[0].to(exact["dtype"]), *args[1:])

    transformer.register_forward_pre_hook(remember, with_kwargs=True)
    embedding.register_forward_pre_hook(restore)
    embedding.timestep_embedder.register_forward_pre_hook(narrow)
