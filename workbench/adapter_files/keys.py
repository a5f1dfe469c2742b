"""Parses the keys of adapter files: the module that a key is about, and its tensor.

    unet.mid_block...to_q . lora_A.weight      lora_unet_middle_block_1_..._to_q . lora_down.weight      ... . alpha

The module's part ("stem") is looked up in a table of the model family; the endings are the same for all.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.adapters import lokr
from trainer.base.console import some
from trainer.base.errors import UserError
from trainer.base.files import read_json
from trainer.base.types import KeyStyle, Link

# keys.json: the endings of keys by role (a name between A and weight is PEFT's adapter name); patterns of other methods, with
# the programs that write them.
_TABLES = read_json(Path(__file__).with_name("keys.json"))
_SUFFIXES = _TABLES["suffixes"] | {end: rf"\.{end}" for end in lokr.ENDS}
_KEY = re.compile("|".join(f"(?P<{role}>{pattern})$" for role, pattern in _SUFFIXES.items()))
_OTHER: dict[str, str] = _TABLES["other_methods"]
_WORDS = re.compile(r"^bundle_emb\.|^emb_params$|^string_to_param")  # textual inversions: OneTrainer bundles them with a LoRA
INSTEAD = (
    "merge it into its model with a program that reads it (ComfyUI: Load LoRA, then Save Checkpoint), and make a LoRA of the "
    "difference, whose error is printed: python scripts/adapter.py extract MERGED MODEL OUT --rank 32"
)
# In diffusers before 0.22 the attention's processor had the adapter.
_PROCESSOR = re.compile(r"\.processor\.(to_out|to_q|to_k|to_v|to_add_out|add_\w_proj)$")


@dataclass(frozen=True)
class Module:
    """A stem's module: the layers, by full name, whose rows it holds, and the convention that uses this stem."""

    link: Link
    convention: str


KeyTable = Mapping[str, Module]  # by stem


def key_table(
    styles: Sequence[KeyStyle], layers: Mapping[str, Iterable[str]], modules: Mapping[str, Sequence[Link]]
) -> dict[str, Module]:
    """All stems of a model, one to one. layers: component -> its adaptable layers. modules: component -> the modules of its
    original layout (targets.fused_modules)."""
    table: dict[str, Module] = {}
    for style in styles:
        names = set(layers.get(style.component, ()))
        if style.original:
            originals = modules.get(style.component, ())
            links = [link for link in (style.links(originals) if style.links else originals) if names.issuperset(link.parts)]
        else:
            links = [Link(name, (name,)) for name in sorted(names)]
        for link in links:
            stem = style.key(link.original)
            full = Link(stem, tuple(f"{style.component}.{part}" for part in link.parts), link.op)
            module = table.setdefault(stem, Module(full, style.convention))
            assert (module.link.parts, module.link.op) == (full.parts, full.op), f"{stem} has two meanings"
    return table


def parsed(keys: Iterable[str], file: object) -> dict[str, dict[str, str]]:
    """Stem -> role (of `_SUFFIXES`) -> key, without the keys of `embeddings_in`. Raises UserError for keys of another
    method, and for unknown keys."""
    stems: dict[str, dict[str, str]] = {}
    other: dict[str, list[str]] = {}
    words = embeddings_in(keys := list(keys))
    if len(words) == len(keys) > 0:
        raise UserError(f"{file} is a textual inversion (embeddings of words), and no adapter: {some(words)}")
    for key in (key for key in keys if not _WORDS.search(key)):
        match = _KEY.search(key)
        if match is None:
            method = next((method for method, pattern in _OTHER.items() if re.search(pattern, key)), "")
            other.setdefault(method, []).append(key)
            continue
        stem, role = _modern(key[: match.start()]), str(match.lastgroup)
        twice = stems.setdefault(stem, {}).setdefault(role, key)
        if twice != key:
            raise UserError(f"{file} has one tensor twice, as {twice!r} and as {key!r}; which of them counts is not known")
    for method in filter(other.get, _OTHER):
        instead = "" if "Control" in method else f"; {INSTEAD}"
        kind = f"{method}, which is neither LoRA, DoRA nor LoKr and is not read"
        raise UserError(f"{file} is {kind}: {some(other[method])}{instead}")
    if other:
        raise UserError(f"{file} has keys that no adapter file has: {some(other[''])}")
    return stems


def embeddings_in(keys: Iterable[str]) -> list[str]:
    """The keys of embeddings of words, which may be bundled with an adapter."""
    return [key for key in keys if _WORDS.search(key)]


def _modern(stem: str) -> str:
    """The stem without the additions of module wrappers and of some programs."""
    stem = stem.replace("_orig_mod.", "").removeprefix("module.").removesuffix("_")
    stem = stem.replace(".base_model.model.", ".")  # of PEFT's model within a pipeline's component
    stem = stem.removeprefix("model.") if stem.startswith("model.diffusion_model.") else stem
    match = _PROCESSOR.search(stem)
    if match is None:
        return stem
    return f"{stem[: match.start()]}.{match[1]}{'.0' if match[1] == 'to_out' else ''}"
