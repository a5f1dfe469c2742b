"""Opens adapter files and checkpoints: finds the model by their keys, and reads the internal form (adapters/portable.py)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from trainer import ema, quantization
from trainer.adapters import export
from trainer.adapters.export import About
from trainer.adapters.kinds import AdapterKind, kind_named
from trainer.adapters.norms import read_norms
from trainer.adapters.peft_config import WEIGHTS, is_peft_folder
from trainer.adapters.portable import AllNorms, DoraScale, Portable, of_state
from trainer.adapters.targets import Rates, Rule, Target, adaptable_layers, fused_modules, grouped, with_rates
from trainer.base.console import some
from trainer.base.errors import UserError
from trainer.base.files import Write
from trainer.base.pictures import THUMBNAIL, first_sample, thumbnail
from trainer.base.run_layout import Layout, folder_name
from trainer.base.tensorfile import TensorFile, is_safetensors
from trainer.base.types import Link, Recognised
from trainer.checkpoint import store
from trainer.checkpoint.state import STATE, Saved
from trainer.models import FAMILIES, family_named
from trainer.models.base import Family
from trainer.models.building import build
from trainer.models.config_files import PUBLISHED
from trainer.models.kinds import OfAnotherFamily
from trainer.models.loading import ModelSource
from trainer.models.opening import open_model
from trainer.optim.state import weights_for_use
from trainer.optim.table import OPTIMIZERS
from trainer.runtime.precision import COMPUTE_DTYPES
from workbench.adapter_files.keys import Module, key_table
from workbench.adapter_files.reading import ReadAdapter, Shapes, read_adapter, stems_of
from workbench.hub import hub

HINTS = ("modelspec.architecture", "ss_base_model_version")


@dataclass(frozen=True, eq=False)
class NamedModel:
    """The names and shapes of a model's layers. label: a published model's name, else its path. config(component) -> its
    config.json. source: of the weights; None for a published model."""

    family: Family
    label: str
    config: Callable[[str], Mapping[str, Any]]
    source: ModelSource | None = None
    _layers: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict, repr=False)
    _tables: dict[tuple[str, ...], dict[str, Module]] = field(default_factory=dict, repr=False)

    def layers(self, name: str) -> dict[str, tuple[int, ...]]:
        """The weight shapes of a component's adaptable layers, by name in the component, in order."""
        if name not in self._layers:
            component, config = self.family.component(name), self.config(name)
            if component.role == "denoiser" and component.names is not None:
                # Faster than building the module: weights of two and four dimensions are the Linears and convolutions.
                shapes = component.names(config).shapes
                layers = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if len(shape) > 1}
            else:
                layers = adaptable_layers(build(component, config))
            self._layers[name] = layers
        return self._layers[name]

    def full_layers(self, components: list[str]) -> dict[str, tuple[int, ...]]:
        """The weight shapes of the components' layers, by full name."""
        return {f"{c}.{layer}": shape for c in components for layer, shape in self.layers(c).items()}

    def modules(self, name: str) -> list[Link]:
        """The modules in the component's original layout."""
        return fused_modules(self.family.module_links(name, self.config(name)))

    @property
    def adaptable(self) -> list[str]:
        """The components that an adapter may change."""
        return [self.family.denoiser, *self.family.text_encoders]

    def named_in(self, stems: Mapping[str, object]) -> list[str]:
        """The components that keys may be about: the denoiser, and those with the prefix of a key."""
        denoiser, styles = self.family.denoiser, self.family.adapter_keys
        return [
            name
            for name in self.adaptable
            if name == denoiser
            or any(stem.startswith(style.prefix) for style in styles if style.component == name for stem in stems)
        ]

    def table(self, components: list[str]) -> dict[str, Module]:
        """The key table of these components."""
        if (key := tuple(components)) not in self._tables:
            styles = [style for style in self.family.adapter_keys if style.component in components]
            layers, modules = ({c: of(c) for c in components} for of in (self.layers, self.modules))
            self._tables[key] = key_table(styles, layers, modules)
        return self._tables[key]

    @cached_property
    def hints(self) -> dict[str, str]:
        """The entries of adapter files' headers that name the model."""
        return self.family.adapters.metadata(dict(self.config(self.family.denoiser)), "")


@cache
def published(name: str) -> tuple[NamedModel, ...]:
    """The published models of the family `name`, whose configs are embedded."""
    family, empty = family_named(name), Recognised({}, frozenset())
    labels = dict.fromkeys(family.files.hub_ids.values())
    sources = {label: ModelSource(family, root=PUBLISHED / label, recognise=lambda entries: empty) for label in labels}
    return tuple(NamedModel(family, label, source.config) for label, source in sources.items())


def model_of(source: ModelSource, label: str) -> NamedModel:
    """The model of a source. label: its path."""
    return NamedModel(source.family, label, source.config, source)


def models_at(path: str, **keys: Any) -> list[NamedModel]:
    """The model at `path`, once for each family that it may be of. keys: of `open_model`. Raises UserError for no family."""
    models, refusals = [], []
    for family in FAMILIES.values():
        try:
            model = model_of(open_model(family, path, hub=hub, recognise=quantization.recognise, **keys), path)
            model.config(family.denoiser)
            models.append(model)
        except UserError as error:
            refusals.append(error)
    if not models:
        raise next((refusal for refusal in refusals if not isinstance(refusal, OfAnotherFamily)), refusals[0])
    return models


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter file, read by the names of `model`. labels: of all models whose names and shapes it fits."""

    path: Path
    model: NamedModel
    labels: tuple[str, ...]
    read: ReadAdapter

    @property
    def portable(self) -> Portable:
        """The adapter in the internal form."""
        return self.read.portable

    @property
    def components(self) -> list[str]:
        """The components that it adapts, in the file's order."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.portable.layers))


def looks_like_an_adapter(path: Path) -> bool:
    """Whether a .safetensors file holds an adapter and no model. Reads its header."""
    if not is_safetensors(path) or not path.is_file():
        return False
    try:
        return bool(stems_of(TensorFile(path)))
    except UserError:
        return False


def open_adapter(
    path: Path | str, models: list[NamedModel] | None = None, *, family: str | None = None, any_size: bool = False
) -> OpenedAdapter:
    """Read an adapter file and find its model. path: a file, or a folder that PEFT saved. models: candidates; None: the
    published ones, of all families or of `family`. any_size: a LoRA or DoRA of other weight shapes is read with its own
    shapes, and has no label. Raises UserError if the file is of another kind, fits no model, or fits several families."""
    path = Path(path)
    if path.is_dir() and is_peft_folder(path):
        path /= WEIGHTS
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if is_safetensors(file))
        if (path / STATE).exists():
            remedy = f"it is a checkpoint; make its adapter files first: python scripts/adapter.py export {path} FOLDER"
        else:
            remedy = f"give one of its files: {', '.join(names[:10])}" if names else "it holds no .safetensors file"
        raise UserError(f"{path} is a folder; {remedy}")
    if not is_safetensors(path):
        raise UserError(f"{path} is not a .safetensors file; adapters in other formats are not read, as they may run code")
    file = TensorFile(path)
    stems = stems_of(file)
    if models is None:
        families = [family_named(family).name] if family else FAMILIES
        models = [model for name in families for model in published(name)]
    elif family:
        models = [model for model in models if model.family.name == family]
    tables = {model: model.table(model.named_in(stems)) for model in models}
    matches = [model for model in models if tables[model].keys() >= stems.keys()]
    if not matches:
        raise _no_match(path, stems, tables)
    hints = {key: file.metadata[key] for key in HINTS if key in file.metadata}
    fitting = [m for m in matches if all(m.hints.get(key, hint) == hint for key, hint in hints.items())] or matches
    shapes = {model: model.full_layers(model.named_in(stems)) for model in fitting}
    sizes = {model: _sizes_in(file, stems, tables[model], layers) for model, layers in shapes.items()}
    fitting = [model for model in fitting if sizes[model].items() <= shapes[model].items()] or fitting
    matching = sorted({model.family.name for model in fitting})
    if len(matching) > 1:
        alike = f"its keys are those of {' and '.join(matching)} alike, and its metadata do not say which"
        raise UserError(f"{path}: {alike}; give --family")
    model = fitting[0]
    layers = shapes[model] | (sizes[model] if any_size else {})
    read = read_adapter(file, stems, tables[model], layers, _advice(models))
    used = {name: layers[name] for name in read.portable.layers}
    labels = tuple(m.label for m in fitting if used.items() <= shapes[m].items())
    return OpenedAdapter(path, model, labels, read)


def _sizes_in(file: TensorFile, stems: Mapping, table: Mapping[str, Module], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The layers' weight shapes by A and B. A fused module is split as in `shapes` if its rows and columns are in the same
    proportion; else each part gets all rows, which fits no model."""
    sizes: dict[str, tuple[int, ...]] = {}
    for stem, keys in stems.items():
        a, b = (file.entries[keys[role]].shape if role in keys else () for role in "ab")
        parts = {name: shapes[name] for name in table[stem].link.parts}
        rows, columns = sum(shape[0] for shape in parts.values()), shapes[table[stem].link.parts[0]][1]
        for name, shape in parts.items() if len(a) > 1 < len(b) else ():
            even = len(parts) > 1 and b[0] * columns == rows * a[1]
            sizes[name] = b[0] * shape[0] // rows if even else b[0], a[1], *shape[2:]
    return sizes


def _no_match(path: Path, stems: Mapping, tables: Mapping[NamedModel, Mapping]) -> UserError:
    nearest = max(tables, key=lambda model: len(stems.keys() & tables[model].keys()))
    unknown = sorted(stems.keys() - tables[nearest].keys())
    if len(unknown) == len(stems):
        keys = [key for stem in unknown for key in stems[stem].values()]
        labels = ", ".join(dict.fromkeys(model.label for model in tables))
        return UserError(f"{path}: its keys are those of no model that is known here ({labels}): {some(keys)}")
    part = f"{len(stems) - len(unknown)} of its {len(stems)} modules are those of {nearest.label}, the others are not"
    return UserError(f"{path}: {part}: {some(unknown)}{_advice(tables)}")


def _advice(models: Iterable[NamedModel]) -> str:
    return "; for a model of another size give it with --base" if all(model.source is None for model in models) else ""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint's adapter, and the settings of the files that its run exports."""

    folder: Path
    about: About
    model: NamedModel
    dora_scale: DoraScale
    thumbnail: bool
    dtype: torch.dtype
    norms: AllNorms
    kind: AdapterKind
    rslora: bool
    _state: Mapping[str, torch.Tensor] = field(repr=False)
    _targets: list[Target] = field(repr=False)

    def portable(self, meaning: DoraScale) -> Portable:
        """The adapter in the internal form, with magnitudes of that meaning."""
        return of_state(self._state, self._targets, self.norms, meaning, kind=self.kind, rslora=self.rslora)

    @property
    def components(self) -> list[str]:
        """The components that it adapts."""
        return list(dict.fromkeys(target.component for target in self._targets))

    @property
    def layers(self) -> list[str]:
        """The adapted layers, by full name."""
        return [f"{target.component}.{target.name}" for target in self._targets]

    @property
    def formats(self) -> tuple[str, ...]:
        """The file formats that its norms suffice for: magnitudes may need the norms of the adapted weights."""
        adapted = [self.norms[layer] for layer in self.layers if layer in self.norms]
        of_weights = all(norms.adapted is not None for norms in adapted)
        by_definition = of_weights or all(norms.original is None for norms in adapted)
        enough: dict[DoraScale, bool] = {"comfyui_released": of_weights, "magnitude": by_definition}
        meanings: dict[str, DoraScale] = {"diffusers": "magnitude", "comfyui": self.dora_scale}
        possible = [format for format, meaning in meanings.items() if enough[meaning]]
        return self.model.family.file_formats(self.kind.in_files, possible)

    def averaged(self) -> "OpenedCheckpoint | None":
        """The checkpoint with its average as the adapter, without adapted norms (`formats`); None if it has no average."""
        if "ema" not in (saved := Saved(self.folder, census=None)).pieces:
            return None
        average, decay = saved.state("ema"), saved.state("config")["ema"]["decay"]
        state = {name: average[key] for name in self._state if (key := ema.OF + name) in average}
        if {k: t.shape for k, t in state.items()} != {k: t.shape for k, t in self._state.items()}:
            power = "one of ema.kind = 'power' is exported by commit 028b4cb"
            raise UserError(f"{self.folder}: its average is not of its adapter; {power}")
        norms = {layer: replace(norm, adapted=None) for layer, norm in self.norms.items()}
        return replace(self, _state=state, norms=norms, about=replace(self.about, average=ema.described(decay)))

    def sample(self, ending: str = "") -> Path | None:
        """The first sample of this step at full strength, if the run's files have a thumbnail. ending: "", or AVERAGE."""
        layout, step = Layout(self.folder.absolute().parent.parent), self.about.step
        is_here = self.folder.absolute() == (layout.checkpoints / folder_name(step)).absolute()
        return first_sample(layout.samples_of(step), ending) if is_here and self.thumbnail else None

    def export(self, folder: Path, write: Write, stem: str = "", sample: Path | None = None) -> dict[str, Path]:
        """Write the files that the run itself would write at this step, byte for byte; returns them by format (`formats`).
        stem: of their names; "": the run's name. sample: for the thumbnail."""
        shapes = self.model.full_layers(self.components)
        files = export.AdapterFiles(
            folder=folder,
            formats=self.formats,
            dora_scale=self.dora_scale,
            fused={name: self.model.modules(name) for name in self.components},
            prefixes=self.model.family.kohya_prefixes(self.model.config),
            rows=lambda name: shapes[name][0],
            not_behind_lycoris=self.model.family.adapters.not_behind_lycoris,
            not_in_sd_scripts=self.model.family.adapters.not_in_sd_scripts,
            peft=self.model.family.adapters.peft,
            write=write,
            dtype=self.dtype,
        )
        picture = thumbnail(sample, THUMBNAIL) if sample else ""
        return export.write_files(files, stem or self.about.name, self.about, self.portable, self.norms, thumbnail=picture)


def open_checkpoint(folder: Path) -> OpenedCheckpoint:
    """Read the checkpoint in `folder`. Raises UserError if it is invalid, or lacks what its adapter files need."""
    if not folder.is_dir():
        names = [folder_name(step) for step in store.steps(folder.parent)]
        others = f"; {folder.parent} has {', '.join(names)}" if names else ""
        raise UserError(f"{folder} does not exist{others}")
    if (reason := store.problem(folder)) is not None:
        raise UserError(f"{folder} is not a valid checkpoint: {reason}")
    saved = Saved(folder, census=None)
    config, norms, origin, state = map(saved.state, ("config", "norms", "origin", "adapter"))
    try:
        alphas = {str(name): float(alpha) for name, alpha in origin["alphas"]}
        split = {name: name.partition(".") for name in alphas}
        kind = kind_named(config["adapter"]["type"])
        ranks = {name: kind.rank({end: v.shape for end, v in kind.values(state, name).items()}) for name in alphas}
        targets = [Target(split[name][0], split[name][2], ranks[name], alpha) for name, alpha in alphas.items()]
        about, configs = About(**origin["about"]), dict(origin["configs"])
        model = NamedModel(family_named(origin["family"]), str(folder), configs.__getitem__)
        optimizer = config["optimizer"]
        if optimizer["name"] in OPTIMIZERS and OPTIMIZERS[optimizer["name"]].modes:
            rated = with_rates(targets, [Rule(**rule) for rule in config["adapter"]["rules"]])
            groups = grouped(
                [f"{layer}.{end}" for layer in alphas for end in kind.ends],
                dict(zip(alphas, rated, strict=True)),
                Rates.read(optimizer, model.family.text_encoders),
            )
            state |= weights_for_use(state, saved.state("optimizer"), list(groups.values()), optimizer["betas"][0])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: what it says of its adapter files does not fit: {error!r:.500}") from error
    export_table = config["export"]
    dtype = COMPUTE_DTYPES[export_table.get("dtype", "fp32")]
    settings = export_table["dora_scale"], export_table.get("thumbnail", False), dtype, read_norms(norms)
    return OpenedCheckpoint(folder, about, model, *settings, kind, config["adapter"]["rslora"], state, targets)
