"""The keys of adapter files, taken apart: which module a key is about, and which tensor of it.

    unet.mid_block...to_q . lora_A.weight      lora_unet_middle_block_1_..._to_q . lora_down.weight      ... . alpha

What stands for the module ("stem") is looked up in a table that a model family gives; what follows it is the same in all.
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

# keys.json: the ends of keys by what they are (a name between A and weight is PEFT's adapter name), and of other methods why
# they are no plain LoRA or DoRA, with the programs that write them.
_KNOWN = read_json(Path(__file__).with_name("keys.json"))
_SUFFIXES = _KNOWN["suffixes"] | {end: rf"\.{end}" for end in lokr.ENDS}
_KEY = re.compile("|".join(f"(?P<{role}>{pattern})$" for role, pattern in _SUFFIXES.items()))
_OTHER: dict[str, str] = _KNOWN["other_methods"]
_WORDS = re.compile(r"^bundle_emb\.|^emb_params$|^string_to_param")  # embeddings: OneTrainer bundles them with a LoRA
INSTEAD = (
    "merge it into its model with a program that reads it (ComfyUI: Load LoRA, then Save Checkpoint), and make a LoRA of the "
    "difference, whose error is printed: python scripts/adapter.py extract MERGED MODEL OUT --rank 32"
)
# Of diffusers before 0.22: the attention's processor had the adapter.
_PROCESSOR = re.compile(r"\.processor\.(to_out|to_q|to_k|to_v|to_add_out|add_\w_proj)$")


@dataclass(frozen=True)
class Module:
    """What a stem stands for: its layers by full name, whose rows its own are, and whose files call it so."""

    link: Link
    convention: str


KeyTable = Mapping[str, Module]  # by stem


def key_table(
    styles: Sequence[KeyStyle], layers: Mapping[str, Iterable[str]], modules: Mapping[str, Sequence[Link]]
) -> dict[str, Module]:
    """All stems of a model, one to one. layers: component -> its adaptable layers. modules: component -> those of its
    original layout (splitting.fused_modules)."""
    table: dict[str, Module] = {}
    for style in styles:
        known = set(layers.get(style.component, ()))
        if style.original:
            own = modules.get(style.component, ())
            links = [link for link in (style.links(own) if style.links else own) if known.issuperset(link.parts)]
        else:
            links = [Link(name, (name,)) for name in sorted(known)]
        for link in links:
            stem = style.key(link.original)
            full = Link(stem, tuple(f"{style.component}.{part}" for part in link.parts), link.op)
            found = table.setdefault(stem, Module(full, style.convention))
            assert (found.link.parts, found.link.op) == (full.parts, full.op), f"{stem} has two meanings"
    return table


def taken_apart(keys: Iterable[str], where: object) -> dict[str, dict[str, str]]:
    """Stem -> role (of `_SUFFIXES`) -> key, without the keys of `embeddings_in`. Raises UserError for keys of another
    method, and for those of none."""
    stems: dict[str, dict[str, str]] = {}
    other: dict[str, list[str]] = {}
    words = embeddings_in(keys := list(keys))
    if len(words) == len(keys) > 0:
        raise UserError(f"{where} is a textual inversion (embeddings of words), and no adapter: {some(words)}")
    for key in (key for key in keys if not _WORDS.search(key)):
        found = _KEY.search(key)
        if found is None:
            what = next((what for what, pattern in _OTHER.items() if re.search(pattern, key)), "")
            other.setdefault(what, []).append(key)
            continue
        stem, role = _modern(key[: found.start()]), str(found.lastgroup)
        twice = stems.setdefault(stem, {}).setdefault(role, key)
        if twice != key:
            raise UserError(f"{where} has one tensor twice, as {twice!r} and as {key!r}; which of them counts is not known")
    for what in (what for what in _OTHER if what in other):
        instead = "" if "Control" in what else f"; {INSTEAD}"
        kind = f"{what}, which is neither LoRA, DoRA nor LoKr and is not read"
        raise UserError(f"{where} is {kind}: {some(other[what])}{instead}")
    if other:
        raise UserError(f"{where} has keys that no adapter file has: {some(other[''])}")
    return stems


def embeddings_in(keys: Iterable[str]) -> list[str]:
    """The keys of embeddings of words, which may lie beside an adapter."""
    return [key for key in keys if _WORDS.search(key)]


def _modern(stem: str) -> str:
    """The stem without what wrappers of the module, and some programs, put around it."""
    stem = stem.replace("_orig_mod.", "").removeprefix("module.").removesuffix("_")
    stem = stem.replace(".base_model.model.", ".")  # of PEFT's model within a pipeline's component
    stem = stem.removeprefix("model.") if stem.startswith("model.diffusion_model.") else stem
    found = _PROCESSOR.search(stem)
    if found is None:
        return stem
    return f"{stem[: found.start()]}.{found[1]}{'.0' if found[1] == 'to_out' else ''}"
