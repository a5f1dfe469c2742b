"""The published models at their full size, name by name and row by row, against diffusers' own single-file converters.

No weight is made: shapes are asked of the meta device, and where a row comes from of numbers that stand for it, spread over
the row without memory of their own. What converters permute is compared in values at a small size too (test_names.py).
"""

from __future__ import annotations

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders import single_file_utils

from tests.unit.models.test_names import COUNTS, LINKS, class_of, infer_config, parameter_shapes, published
from trainer.base.types import Link
from trainer.models.names import join_parts, split_original

ROW = 2**20  # more than any tensor has rows
# What precedes a component's names in the file it is published in.
PREFIXES = {
    ("sdxl", "unet"): "model.diffusion_model.",
    ("sdxl", "vae"): "first_stage_model.",
    ("sdxl", "text_encoder"): "conditioner.embedders.0.transformer.",
    ("sdxl", "text_encoder_2"): "conditioner.embedders.1.model.",
    ("flux-dev", "transformer"): "",
    ("flux-schnell", "transformer"): "",
    ("flux2-klein-4b", "transformer"): "",
    ("flux2-klein-9b", "transformer"): "",
    ("flux3-klein-base", "transformer"): "",
    ("zimage", "transformer"): "",
    ("flux-dev", "vae"): "",
    ("flux-dev", "text_encoder"): "text_encoders.clip_l.transformer.",
}

# Of each component one or more, which its shapes alone tell.
SIZES = (
    "num_layers",
    "num_single_layers",
    "num_hidden_layers",
    "latent_channels",
    "layers_per_block",
    "vocab_size",
    "n_layers",
)


def links_of(family: str, component: str) -> list[Link]:
    return LINKS[class_of(family, component)[1]](published(family, component))


def module_shapes(family: str, component: str) -> dict[str, tuple[int, ...]]:
    """What the library's class has, built on the meta device."""
    library, class_name = class_of(family, component)
    config = published(family, component)
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], class_name)
    with torch.device("meta"):
        module = cls.from_config(config) if library == "diffusers" else cls(cls.config_class.from_dict(config))
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters(remove_duplicate=False)}


def original_file(family: str, component: str) -> dict[str, torch.Tensor]:
    """The published file's tensors, without memory."""
    shapes = parameter_shapes(class_of(family, component)[1], published(family, component))
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    prefix = PREFIXES[family, component]
    return {
        prefix + link.original: join_parts(link, [meta[part] for part in link.parts]) for link in links_of(family, component)
    }


def diffusers_names(family: str, component: str, file: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The file as diffusers converts it, under the names of the modules."""
    file, config = dict(file), published(family, component)
    if component == "unet":
        return single_file_utils.convert_ldm_unet_checkpoint(file, config)
    if component == "vae":
        return single_file_utils.convert_ldm_vae_checkpoint(file, config)
    if family.startswith("flux2"):
        return single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers(file)
    if family.startswith("flux3"):
        return single_file_utils.convert_flux3_transformer_checkpoint_to_diffusers(file)
    if family == "zimage":
        return single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers(file)
    if component == "transformer":
        return single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(file)
    prefix = PREFIXES[family, component]
    if component == "text_encoder":
        converted = single_file_utils.convert_ldm_clip_checkpoint(file, remove_prefix=prefix)
        # Of transformers before 5.6, whose class had an inner `text_model.`.
        return {name.removeprefix("text_model."): tensor for name, tensor in converted.items()}
    return single_file_utils.convert_open_clip_checkpoint(None, file, prefix)


@pytest.mark.parametrize(("family", "component"), list(PREFIXES))
def test_names_and_shapes_map_one_to_one(family: str, component: str) -> None:
    """Every tensor of the file becomes parameters, every parameter comes of one tensor, shaped as diffusers gives it."""
    file, wanted = original_file(family, component), module_shapes(family, component)
    theirs = {name: tuple(tensor.shape) for name, tensor in diffusers_names(family, component, file).items()}
    assert theirs == wanted
    links, prefix = links_of(family, component), PREFIXES[family, component]
    assert {prefix + link.original for link in links} == file.keys() and len(links) == len(file)
    split = {}
    for link in links:
        rows = [wanted[part][0] for part in link.parts]
        pieces = split_original(link, file[prefix + link.original], rows)
        split |= {part: tuple(piece.shape) for part, piece in zip(link.parts, pieces, strict=True)}
    assert split == wanted and len(split) == sum(len(link.parts) for link in links)
    assert sum(torch.Size(shape).numel() for shape in wanted.values()) == COUNTS[family, component]


@pytest.mark.parametrize(("family", "component"), list(PREFIXES))
def test_every_row_comes_from_where_diffusers_takes_it(family: str, component: str) -> None:
    """Each original tensor n holds n * ROW + r in its row r."""
    file, wanted = original_file(family, component), module_shapes(family, component)
    marked = {}
    for number, (name, tensor) in enumerate(file.items()):
        shape = list(tensor.shape)
        if component == "transformer" and len(shape) == 2:
            shape[1] = 1  # diffusers' converter copies what it takes, and never looks at columns
        rows = number * ROW + torch.arange(shape[0], dtype=torch.int64)
        marked[name] = rows.view(-1, *(1 for _ in shape[1:])).expand(shape)
    prefix, ours = PREFIXES[family, component], {}
    for link in links_of(family, component):
        pieces = split_original(link, marked[prefix + link.original], [wanted[part][0] for part in link.parts])
        ours |= dict(zip(link.parts, pieces, strict=True))
    theirs = diffusers_names(family, component, marked)
    assert ours.keys() == theirs.keys() == wanted.keys()
    for name, tensor in theirs.items():
        assert tensor.shape == ours[name].shape, name
        # Rows differ in their first column; a transposed tensor's columns in its first row.
        for dimension in range(tensor.dim()):
            line = tuple(slice(None) if d == dimension else 0 for d in range(tensor.dim()))
            assert torch.equal(tensor[line], ours[name][line]), name


def test_t5_has_the_names_of_transformers() -> None:
    """Files of T5 hold the module's own names. Its embedding table has two, and is one tensor."""
    names = module_shapes("flux-dev", "text_encoder_2")
    assert names.pop("encoder.embed_tokens.weight", names["shared.weight"]) == names["shared.weight"] == (32128, 4096)
    assert parameter_shapes("T5EncoderModel", published("flux-dev", "text_encoder_2")) == names
    assert sum(torch.Size(shape).numel() for shape in names.values()) == COUNTS["flux-dev", "text_encoder_2"]


@pytest.mark.parametrize(("family", "component"), list(PREFIXES))
def test_the_published_sizes_are_read_from_the_files_shapes(family: str, component: str) -> None:
    """A single file without configs: from any other sizes, its shapes give the published ones."""
    prefix, config = PREFIXES[family, component], published(family, component)
    shapes = {name.removeprefix(prefix): tuple(t.shape) for name, t in original_file(family, component).items()}
    forgotten = {key: 7 for key in config if key in SIZES}
    inferred = infer_config(family.partition("-")[0], component, shapes, config | forgotten)
    assert forgotten and {key: inferred[key] for key in config} == config
