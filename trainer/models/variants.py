"""A family's variants, and refusal of models of its architecture that are trained for something else."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.models.base import LATENT_SIDE, Family
from trainer.models.config_files import RESTORE, index_of, is_number, read_json
from trainer.models.kinds import SCHEDULERS, class_in

# Keys of a file's metadata that name a variant. FLUX.2's are not read: all models of one size are called "klein-4b" there.
NAMED_IN = ("modelspec.title", "modelspec.architecture")
# Names of marker tensors, with or without a prefix.
EDM_MARKERS = {"CosXL": ("edm_vpred.sigma_max", "edm_vpred.sigma_min"), "Playground 2.5": ("edm_mean", "edm_std")}


def check_scheduler(scheduler: Mapping[str, Any], family: str, allowed: Collection[str]) -> None:
    """Refuse a scheduler config whose class is not one of `allowed`."""
    name = scheduler.get("_class_name")
    if isinstance(name, str) and name in allowed:
        return
    trained = {start for start in SCHEDULERS if any(n.startswith(start) for n in allowed)}
    kinds = (f", {kind}" for start, kind in SCHEDULERS.items() if start not in trained and str(name).startswith(start))
    raise UserError(
        f"the model's scheduler_config.json has _class_name = {name!r}{next(kinds, '')}, which is not trained as {family}; "
        f"{family} has one of {', '.join(sorted(allowed))}"
    )


@dataclass(frozen=True)
class DenoiserOrigin:
    """The place of a denoiser. names: its file's, folder's or repository's, and that of a file's folder. folder: one that may
    have a pipeline's index. whole: whether it has one. metadata: the file's."""

    names: tuple[str, ...]
    folder: Path | None
    whole: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def place_of(root: Path, name: str, override: Path | None, file: TensorFile | None, *, embedded: bool) -> DenoiserOrigin:
    """The denoiser's place. root: folder of the model's configs. name: of folder or repository. override: the denoiser's own
    path, if any. file: a single file. embedded: whether the configs come with the program."""
    folder = None if embedded else root
    if override is not None:
        for parent in (override.parent, override.parent.parent):
            if index_of(parent).is_file():
                return DenoiserOrigin((parent.name,), parent, whole=True)
        if not override.is_file():
            return DenoiserOrigin((override.name,), None)
        file, folder = TensorFile(override), None
    if file is not None:
        return DenoiserOrigin((file.path.stem, file.path.parent.name), folder, metadata=file.metadata)
    return DenoiserOrigin((name,), folder, whole=not embedded)


@dataclass(frozen=True)
class Variant:
    """One of `VariantPart.every`. name: None if unknown. reason: a phrase. certain: whether index, tensors or `model.variant`
    say it, not a name alone. unlike: whether tensors alone would say another. otherwise: another variant that a name says,
    with the words for it."""

    name: str | None = None
    reason: str = ""
    certain: bool = False
    unlike: bool = False
    otherwise: str = ""


def variant_of(
    family: Family, request: str | None, place: DenoiserOrigin, config: Mapping[str, Any] = MappingProxyType({})
) -> Variant:
    """The model's variant: by the index of the denoiser's pipeline or its tensors, else by `request` (model.variant), else by
    a name. Base and editing model have the same tensors: between these the request decides first. config: the denoiser's, if
    known. Raises UserError if index or tensors contradict the request."""
    if not (part := family.variants).names:
        return Variant()
    base, distilled = part.names
    path = None if place.folder is None else index_of(place.folder)
    index = read_json(path) if path is not None and path.is_file() else {}
    is_distilled, pipeline = index.get("is_distilled"), class_in(index)
    variant, reason = part.of_config(config), "its tensors show"
    if is_distilled is not None:
        variant, reason = distilled if is_distilled else base, f"{path} says (is_distilled = {str(is_distilled).lower()})"
    elif part.editing and pipeline == part.editing_pipeline:
        variant, reason = part.editing, f"{path} says (_class_name = {pipeline!r})"
    if part.editing and request != variant and {request, variant} == {base, part.editing}:
        variant, reason = request, "model.variant says"
    words = [("name", name) for name in place.names]
    words += [(key, place.metadata[key]) for key in NAMED_IN if part.presumed and key in place.metadata]
    by_name = next(((match, f"its {source} says ({word})") for source, word in words if (match := part.of_name(word))), None)
    if variant is not None:
        if request not in (None, variant):
            raise UserError(f"model.variant = {request!r}: the model is {variant}, as {reason}; leave it out")
        otherwise = f"{by_name[0]}, as {by_name[1]}" if by_name and by_name[0] != variant else ""
        return Variant(variant, reason, certain=True, unlike=variant == part.editing, otherwise=otherwise)
    usual = part.presumed or (base if place.whole else None)
    variant, reason = (request, "model.variant says") if request else by_name or (usual, "nothing says which it is")
    return Variant(variant, reason, certain=bool(request), unlike=part.presumed not in (None, variant))


def check_latents(
    configs: Mapping[str, Mapping[str, Any]],
    inputs: int,
    *,
    denoiser: str = "transformer",
    fold: int,
    kinds: Mapping[int, str] = {},
    texts: Mapping[str, Collection[tuple[str, str]]],
    shifted: bool = False,
) -> None:
    """Refuse a denoiser that does not read and predict just the VAE's latents, or has them normalised channel by channel, or
    whose text width is not the text encoders'.

    inputs: channels that its first layer reads. fold: denoiser channels for each of the VAE's (Flux packs 2 x 2). kinds:
    models with another number of inputs, for the message. texts: the denoiser's key -> the text encoders' keys whose sum it
    is. shifted: whether the latents are also shifted. A config with `_assumed` stands for an unknown one.
    """
    vae = configs["vae"]
    _check_vae(vae, shifted)
    latent = vae["latent_channels"]
    expected = latent * fold
    outputs = configs[denoiser].get("out_channels") or expected
    if (inputs, outputs) != (expected, expected):
        packed = f" (each in {fold})" if fold > 1 else ""
        raise UserError(
            f"the {denoiser} reads {inputs} channels and predicts {outputs} (out_channels), the vae gives {latent}{packed}: "
            + (f"it is {kinds[inputs]}, which is not trained here" if inputs in kinds else "they do not belong together")
            + f"; use a {denoiser} that reads and predicts {expected}"
        )
    for key in ("latents_mean", "latents_std"):
        if vae.get(key) is not None:
            normalised = "latents normalised channel by channel, as Playground 2.5 (an EDM model) has them"
            raise UserError(f"the vae's config.json has {key} = {vae[key]}: {normalised}, are not trained here")
    for key, parts in texts.items():
        read, sizes = configs[denoiser].get(key), [configs[encoder].get(size_key) for encoder, size_key in parts]
        stated = not all(configs[encoder].get("_assumed") for encoder, _ in parts)
        if stated and isinstance(read, int) and None not in sizes and sum(sizes) != read:
            encoders = " and ".join(dict.fromkeys(f"the {encoder}'s config.json ({size_key})" for encoder, size_key in parts))
            raise UserError(
                f"the {denoiser}'s config.json has {key} = {read}, the numbers of text that it reads, and {encoders} give "
                f"{' + '.join(map(str, sizes))}: they do not belong together; use the text encoders of this model"
            )


def _check_vae(vae: Mapping[str, Any], shifted: bool) -> None:
    """Refuse a VAE whose latents would be zero or infinite, or of another size than masks and plan assume."""
    # Key -> (the class's default, requirement, lower bound).
    numbers = {"scaling_factor": (1.0, "a number above 0", 0.0), "shift_factor": (None, "a number", -math.inf)}
    for key, (default, requirement, bound) in list(numbers.items())[: 1 + shifted]:
        value = vae.get(key, default)
        if not is_number(value) or value <= bound:
            rule = f"latents are made with it, so it is {requirement}; {RESTORE}"
            raise UserError(f"the vae's config.json has {key} = {value!r:.80}: {rule}")
    channels, expected = vae["block_out_channels"], LATENT_SIDE
    if (side := 2 ** (len(channels) - 1)) != expected:
        raise UserError(
            f"the vae's config.json has block_out_channels = {channels!r:.80}: {len(channels)} levels give one latent for "
            f"{side} x {side} pixels; use a VAE of {expected.bit_length()} levels, for {expected} x {expected}"
        )


def edm_marker(names: Collection[str]) -> str | None:
    """The first EDM marker among these tensors and its model, for a message; None if there is none."""
    for name in sorted(names):
        for model, markers in EDM_MARKERS.items():
            if any(is_marker(name, marker) for marker in markers):
                return f"{name!r} ({model})"
    return None


def is_marker(name: str, marker: str) -> bool:
    """Whether the tensor is the marker, with or without a prefix."""
    return name == marker or name.endswith(f".{marker}")
