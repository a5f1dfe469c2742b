"""What the rectified-flow families share: objective, positions, pipeline, what their files say, a transformer's sizes."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn

from trainer.models import variants
from trainer.models.base import Model, SampleRequest
from trainer.models.names import ComponentConfig, Shape, check_head, how_many
from trainer.models.shared import vae
from trainer.objectives import KEYS, Flow, Loss, Noise, Times, from_choices

SCHEDULERS = frozenset({"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"})
TIMESTEPS = ("logit_normal", "uniform", "sigmoid", "mode", "cosmap", "power")
READS = (*KEYS, "objective.mode_scale", "objective.shift")
# Of Flux's and FLUX.2's double blocks: original stream, suffix of the module's, q/k/v, output, norms of q and k.
STREAMS = (
    ("img", "", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k")),
    ("txt", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", ("norm_added_q", "norm_added_k")),
)


def resolution_shift(tokens: int) -> float:
    """e^mu, mu = 0.5 + 0.65 (tokens - 256) / 3840, as Flux's released sampler: 1.88 at 1024 tokens (512 px), 3.16 at 4096."""
    return float(torch.tensor(0.5 + 0.65 * (tokens - 256) / 3840, dtype=torch.float64).exp())


def beginning_with(usual: str) -> tuple[str, ...]:
    """TIMESTEPS of a family, the usual one first."""
    return (usual, *(name for name in TIMESTEPS if name != usual))


def objective(
    scheduler: ComponentConfig,
    family: str,
    usual: str,
    *,
    timesteps: str = "auto",
    unshifted: Collection[str] = ("sigmoid",),
    shift: Literal["auto"] | float = "auto",
    **choices: Any,
) -> Flow:
    """An objective that is shifted by the resolution, if not asked otherwise, and but for times that are `unshifted`
    ("sigmoid" is the name of such). usual: the times that "auto" is. Raises UserError for an impossible choice, and for a
    scheduler of another kind."""
    variants.check_scheduler(scheduler, family, SCHEDULERS)
    timesteps = usual if timesteps == "auto" else timesteps
    if shift == "auto":
        shift = 1.0 if timesteps in unshifted else resolution_shift
    return Flow(
        times=from_choices(Times, choices, timesteps=timesteps),
        shift=shift,
        loss=from_choices(Loss, choices),
        noise=from_choices(Noise, choices),
        stratified=choices.get("stratified", False),
    )


def as_scheduled(scheduler: ComponentConfig, family: str, *, timesteps: str = "auto", shift: Any = "auto", **choices) -> Flow:
    """Times of a sigmoid without a shift, if not asked otherwise; all others are shifted as the model's scheduler shifts."""
    if shift == "auto" and timesteps not in ("auto", "sigmoid"):
        shift = float(scheduler.get("shift", 1.0))
    return objective(scheduler, family, "sigmoid", timesteps=timesteps, shift=shift, **choices)


def positions(image: int, *counts: int, device: torch.device | str) -> torch.Tensor:
    """fp32 [product of the counts, 1 + their number]: (image, index on each axis) of every token, the last axis fastest."""
    ids = torch.full((*counts, 1 + len(counts)), float(image), device=device)
    for axis, count in enumerate(counts, 1):
        ids[..., axis] = torch.arange(count, device=device).view(-1, *(1 for _ in counts[axis:]))
    return ids.view(-1, 1 + len(counts))


def pipeline(model: Model, request: SampleRequest, name: str, **others: Any) -> Any:
    """diffusers' pipeline of that name for one image of the model, without encoders. others: of its arguments."""
    import diffusers

    return getattr(diffusers, name)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(dict(model.scheduler)),
        vae=vae.for_size(model.modules["vae"], request.width, request.height),
        transformer=model.modules["transformer"],
        **{"text_encoder": None, "tokenizer": None} | others,
    )


def metadata(architecture: str, implementation: str, version: str, module: str = "") -> dict[str, str]:
    """What adapter files say of a family. module: of sd-scripts, where it has one."""
    entries = {
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": f"https://github.com/{implementation}",
        "modelspec.prediction_type": "velocity",
        "ss_base_model_version": version,
    }
    return entries | ({"ss_network_module": module} if module else {})


def infer_transformer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """The config values that the tensors' shapes tell, by Flux's original names; {} where they are of something else."""
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
