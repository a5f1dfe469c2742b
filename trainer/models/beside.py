"""Discovery of the parts that a single file lacks: in its own folder, and in the folders of ComfyUI and others.

Names only decide where to look. The header decides whether a file is the missing part.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, is_safetensors
from trainer.models import tokenizers
from trainer.models.kinds import kind_of
from trainer.models.loading import ModelSource

# Folders of encoders and VAEs in ComfyUI and Forge, in lower case. They lie beside the model's own, or above it.
FOLDERS = ("text_encoders", "clip", "text_encoder", "vae")
ABOVE = 3  # folders
# Words in a file name that suggest a component.
LIKELY = re.compile(r"(^|[^a-z])(clip|te|text.?enc\w*|t5\w*|qwen\w*|vae|ae)([^a-z]|$)", re.IGNORECASE)
MOST = 200  # files whose headers are read


def complete(source: ModelSource) -> ModelSource:
    """The source with the parts that its single file lacks, each from the only file or folder that fits.

    Raises one UserError for all parts and tokenizers that are missing or ambiguous.
    """
    missing = [component.name for component in source.family.components if source.lacks(component.name)]
    if not missing:
        return source
    assert source.single_file is not None
    path = source.single_file.path
    if kind_of(source.single_file.shapes) is None:
        source.verify(source.family.denoiser)
    candidates, parts, questions = list(_candidates(path)), {}, []
    for name in missing:
        folder = path.parent / name  # in a whole diffusers repository that also holds the single file
        fitting = [folder] if _fits(source, name, folder) else [file for file in candidates if _fits(source, name, file)]
        if len(fitting) == 1:
            parts[name] = fitting[0]
        else:
            questions.append(_question(source, name, fitting))
    source = source.with_parts(parts)
    for name in source.family.files.tokenizers:
        if not tokenizers.is_usable(source.tokenizer_folder(name), chat=name in source.family.files.chat_templates):
            place = source.overrides.get(source.family.files.tokenizers[name], path).parent / name
            questions.append(f"{name}: none in {place}; copy that folder of the model's repository there")
    if questions:
        present = ", ".join(component.name for component in source.family.components if component.name not in missing)
        folders = ", ".join(str(folder) for folder in _folders(path))
        raise UserError(
            "\n".join(
                [
                    f"model.path = {str(path)!r} holds {present} alone, not {', '.join(missing)}; still to be given:",
                    *questions,
                    *(f"{name}: found, {place}" for name, place in parts.items()),
                    f"looked in {folders}; a key is given in the config, or as --set KEY=VALUE",
                ]
            )
        )
    return source


def _question(source: ModelSource, name: str, fitting: list[Path]) -> str:
    component = source.family.component(name)
    key = f"model.components.{name}.path"
    if not fitting:
        return f'{name} ({component.class_name}): nothing beside it fits; {key} = "FOLDER/{component.file}"'
    return f'{name}: {", ".join(map(str, fitting))} all fit; choose one, {key} = "{fitting[0].as_posix()}"'


def _fits(source: ModelSource, name: str, place: Path) -> bool:
    """Whether the component can be read from that file or folder, and fits the denoiser. Reads headers only."""
    if not (place.is_file() or (place / "config.json").is_file()):
        return False
    try:
        if place.is_file():
            kind = kind_of(TensorFile(place).shapes)
            if kind is None or not kind.part or not source.family.component(name).class_name.startswith(kind.part):
                return False
        trial = source.with_parts({name: place})
        trial.verify(name)
        trial.check_kind()
    except UserError:
        return False
    return True


def _candidates(model: Path) -> Iterator[Path]:
    """Files that may be parts, each once, in the order of `_folders`."""
    paths = {model.resolve()}
    for folder in _folders(model):
        mixed = folder.resolve() == model.parent.resolve()
        for file in sorted(filter(is_safetensors, folder.glob("*") if mixed else folder.rglob("*"))):
            if file.is_file() and file.resolve() not in paths and (not mixed or LIKELY.search(file.stem)):
                if len(paths) > MOST:
                    return
                paths.add(file.resolve())
                yield file


def _folders(model: Path) -> list[Path]:
    """The model's own folder first, then those of encoders and VAEs in it, beside it and above it."""
    above = model.absolute().parent
    levels = [above, *above.parents][: ABOVE + 1]
    folders = [above, *(child for level in levels for child in _children(level) if child.name.lower() in FOLDERS)]
    once = {folder.resolve(): folder for folder in reversed(folders)}
    return [folder if model.is_absolute() else Path(os.path.relpath(folder)) for folder in reversed(once.values())]


def _children(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir()) if os.access(folder, os.R_OK | os.X_OK) else []
