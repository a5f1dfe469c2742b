"""Models of a family's architecture that are trained for something else, refused by what they say of themselves."""

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

# Keys of a file's metadata. Not read of FLUX.2, where "klein-4b" is what all of that size are called there.
NAMED_IN = ("modelspec.title", "modelspec.architecture")
# Names of marker tensors. A prefix may stand before them.
EDM_MARKERS = {"CosXL": ("edm_vpred.sigma_max", "edm_vpred.sigma_min"), "Playground 2.5": ("edm_mean", "edm_std")}


def check_scheduler(scheduler: Mapping[str, Any], family: str, allowed: Collection[str]) -> None:
    """Refuse a scheduler config whose class is not one of `allowed`."""
    name = scheduler.get("_class_name")
    if isinstance(name, str) and name in allowed:
        return
    own = {start for start in SCHEDULERS for known in allowed if known.startswith(start)}
    kinds = (f", {kind}" for start, kind in SCHEDULERS.items() if start not in own and str(name).startswith(start))
    raise UserError(
        f"the model's scheduler_config.json has _class_name = {name!r}{next(kinds, '')}, which is not trained as {family}; "
        f"{family} has one of {', '.join(sorted(allowed))}"
    )


@dataclass(frozen=True)
class DenoiserOrigin:
    """The place that a denoiser comes from. names: of file, folder or repository, and of the folder around a file. folder:
    that may have a pipeline's index. whole: it has one."""

    names: tuple[str, ...]
    folder: Path | None
    whole: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def place_of(root: Path, name: str, override: Path | None, file: TensorFile | None, *, embedded: bool) -> DenoiserOrigin:
    """The place of a denoiser. root: of the model's configs. name: of folder or repository. override: where the denoiser is
    from, if from elsewhere. file: a single one. embedded: whether the configs come with the program."""
    folder = None if embedded else root
    if override is not None:
        around = [folder for folder in (override.parent, override.parent.parent) if index_of(folder).is_file()]
        if around:
            return DenoiserOrigin((around[0].name,), around[0], whole=True)
        if not override.is_file():
            return DenoiserOrigin((override.name,), None)
        file, folder = TensorFile(override), None
    if file is not None:
        return DenoiserOrigin((file.path.stem, file.path.parent.name), folder, metadata=file.metadata)
    return DenoiserOrigin((name,), folder, whole=not embedded)


@dataclass(frozen=True)
class Variant:
    """One of `VariantPart.every`. name: None where nothing says which. why: a phrase. certain: index, tensors or
    `model.variant` say it, and no name alone. unlike: whether tensors alone would say another. otherwise: a name that says
    another, with the words for it."""

    name: str | None = None
    why: str = ""
    certain: bool = False
    unlike: bool = False
    otherwise: str = ""


def variant_of(
    family: Family, asked: str | None, place: DenoiserOrigin, config: Mapping[str, Any] = MappingProxyType({})
) -> Variant:
    """The one of `family.variants.every` that the index of the denoiser's pipeline or its tensors tell, else that is asked
    for, else that a name tells. Base and editing model have the same tensors: of these it is the one asked for, first of all.
    config: the denoiser's, where it is known. Raises UserError where index or tensors say otherwise than is asked for."""
    if not (known := family.variants).names:
        return Variant()
    base, distilled = known.names
    path = None if place.folder is None else index_of(place.folder)
    index = read_json(path) if path is not None and path.is_file() else {}
    said, pipeline = index.get("is_distilled"), class_in(index)
    sure, why = known.of_config(config), "its tensors show"
    if said is not None:
        sure, why = distilled if said else base, f"{path} says (is_distilled = {str(said).lower()})"
    elif known.editing and pipeline == known.editing_pipeline:
        sure, why = known.editing, f"{path} says (_class_name = {pipeline!r})"
    if known.editing and asked != sure and {asked, sure} == {base, known.editing}:
        sure, why = asked, "model.variant says"
    words = [("name", name) for name in place.names]
    words += [(key, place.metadata[key]) for key in NAMED_IN if known.presumed and key in place.metadata]
    named = next(((found, f"its {what} says ({word})") for what, word in words if (found := known.of_name(word))), None)
    if sure is not None:
        if asked not in (None, sure):
            raise UserError(f"model.variant = {asked!r}: the model is {sure}, as {why}; leave it out")
        otherwise = f"{named[0]}, as {named[1]}" if named and named[0] != sure else ""
        return Variant(sure, why, certain=True, unlike=sure == known.editing, otherwise=otherwise)
    usual = known.presumed or (base if place.whole else None)
    found, why = (asked, "model.variant says") if asked else named or (usual, "nothing says which it is")
    return Variant(found, why, certain=bool(asked), unlike=known.presumed not in (None, found))


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
    """Refuse a denoiser that does not read and predict just the VAE's latents, or these normalised channel by channel, or
    that reads other numbers than the text encoders give.

    inputs: channels that its first layer reads. fold: of them for one of the VAE's (Flux packs 2 x 2). kinds: what models
    are that read another number. texts: by the denoiser's key, the text encoders' keys whose sum it is.
    shifted: whether the latents are shifted, too. A config with `_assumed` stands for one that is not known yet.
    """
    vae = configs["vae"]
    _check_vae(vae, shifted)
    latent = vae["latent_channels"]
    wanted = latent * fold
    outputs = configs[denoiser].get("out_channels") or wanted
    if (inputs, outputs) != (wanted, wanted):
        packed = f" (each in {fold})" if fold > 1 else ""
        raise UserError(
            f"the {denoiser} reads {inputs} channels and predicts {outputs} (out_channels), the vae gives {latent}{packed}: "
            + (f"it is {kinds[inputs]}, which is not trained here" if inputs in kinds else "they do not belong together")
            + f"; use a {denoiser} that reads and predicts {wanted}"
        )
    for key in ("latents_mean", "latents_std"):
        if vae.get(key) is not None:
            normalised = "latents normalised channel by channel, as Playground 2.5 (an EDM model) has them"
            raise UserError(f"the vae's config.json has {key} = {vae[key]}: {normalised}, are not trained here")
    for key, given in texts.items():
        read, sizes = configs[denoiser].get(key), [configs[encoder].get(own) for encoder, own in given]
        known = not all(configs[encoder].get("_assumed") for encoder, _ in given)
        if known and isinstance(read, int) and None not in sizes and sum(sizes) != read:
            encoders = " and ".join(dict.fromkeys(f"the {encoder}'s config.json ({own})" for encoder, own in given))
            raise UserError(
                f"the {denoiser}'s config.json has {key} = {read}, the numbers of text that it reads, and {encoders} give "
                f"{' + '.join(map(str, sizes))}: they do not belong together; use the text encoders of this model"
            )


def _check_vae(vae: Mapping[str, Any], shifted: bool) -> None:
    """Refuse a VAE whose latents would be zero or infinite, or are of another size than masks and plan are made for."""
    # By key: the class's own value, what the number must be, the least one.
    numbers = {"scaling_factor": (1.0, "a number above 0", 0.0), "shift_factor": (None, "a number", -math.inf)}
    for key, (usual, what, least) in list(numbers.items())[: 1 + shifted]:
        value = vae.get(key, usual)
        if not is_number(value) or value <= least:
            made = f"latents are made with it, so it is {what}; {RESTORE}"
            raise UserError(f"the vae's config.json has {key} = {value!r:.80}: {made}")
    channels, wanted = vae["block_out_channels"], LATENT_SIDE
    if (side := 2 ** (len(channels) - 1)) != wanted:
        raise UserError(
            f"the vae's config.json has block_out_channels = {channels!r:.80}: {len(channels)} levels give one latent for "
            f"{side} x {side} pixels; use a VAE of {wanted.bit_length()} levels, for {wanted} x {wanted}"
        )


def edm_marker(names: Collection[str]) -> str | None:
    """The first tensor that says EDM and the model it is known of, for a message; None where there is none."""
    found = (
        f"{name!r} ({model})"
        for name in sorted(names)
        for model, markers in EDM_MARKERS.items()
        if any(is_marker(name, marker) for marker in markers)
    )
    return next(found, None)


def is_marker(name: str, marker: str) -> bool:
    """Whether the tensor is the marker, with or without a prefix."""
    return name == marker or name.endswith(f".{marker}")
