"""A model's files (hub id, diffusers folder, single file, a component's own path), and the loading of components: each tensor
is read, converted and placed in memory of the final form. Files are never mapped, so the peak stays below the final size plus
the largest tensor.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.protocols import Repository
from trainer.base.tensorfile import PICKLES, TensorFile, is_safetensors
from trainer.base.types import HeldWeight, Link
from trainer.models import config_files, kinds, tokenizers, variants
from trainer.models.base import Family, Markers
from trainer.models.building import Swap, allocate, build, shapes_of
from trainer.models.names import Shape
from trainer.models.weight_sets import WEIGHT_STEMS, Wanted, WeightChoice, choose, weight_sets
from trainer.models.weights import Read, Recognise, Weights, plan_reads


@dataclass(frozen=True)
class ModelSource:
    """A model opened for reading: configs and file headers have been read, weights have not.

    root: diffusers folder, or a single file's folder of configs. published: the published model's configs, for what a folder
    beside the single file lacks; None if the user gave the folder. overrides: the components' own paths. found: the part of
    them that was discovered beside the single file (beside.complete), not set by the user. wanted: chooses among several
    files of a component. repository: a hub id's. fetched: False for a hub id whose weights are not all on this machine.
    embedded: the reason why its configs are the embedded ones.
    """

    family: Family
    root: Path
    recognise: Recognise
    single_file: TensorFile | None = None
    published: Path | None = None
    overrides: Mapping[str, Path] = field(default_factory=dict)
    found: Mapping[str, Path] = field(default_factory=dict)
    wanted: Wanted = Wanted()
    repository: Repository | None = None
    fetched: bool = True
    embedded: str | None = None
    _shapes: dict[str, dict[str, Shape]] = field(default_factory=dict, repr=False)  # the modules' parameters' shapes, cached

    def beside(self, relative: str) -> Path:
        """The path of a file or folder of configs."""
        path = self.root / relative
        return path if path.exists() or self.published is None else self.published / relative

    @cached_property
    def scheduler(self) -> dict[str, Any]:
        """The scheduler's config."""
        path = self.beside("scheduler/scheduler_config.json")
        config = config_files.read_json(path, self.family.files.scheduler)
        config_files.check_values(path, config)
        return config

    @cached_property
    def markers(self) -> Markers:
        """The files' markers: v and zero SNR in the denoiser's files, EDM in any file that is read."""
        files = {c.name: self.weights(c.name).files for c in self.family.components if self.is_here(c.name)}
        names = [name for file in files.get(self.family.denoiser, ()) for name in file.entries]
        edm_markers = {file.path: variants.edm_marker(file.entries) for component in files.values() for file in component}
        edm = next((f"{path} holds {marker}" for path, marker in edm_markers.items() if marker), None)
        v, zero_snr = (any(variants.is_marker(name, marker) for name in names) for marker in ("v_pred", "ztsnr"))
        return Markers(v, zero_snr, edm, self.variant.name)

    @cached_property
    def place(self) -> variants.DenoiserOrigin:
        """The folder, repository or file of the denoiser."""
        name = self.root.name if self.repository is None else self.repository.hub_id
        override, embedded = self.overrides.get(self.family.denoiser), config_files.PUBLISHED in self.root.parents
        return variants.place_of(self.root, name, override, self.single_file, embedded=embedded)

    @cached_property
    def variant(self) -> variants.Variant:
        """The variant of the family that this model is, or is made of."""
        return variants.variant_of(self.family, self.wanted.distillation, self.place, self.config(self.family.denoiser))

    def config(self, name: str, *, whole: bool = False) -> dict[str, Any]:
        """The component's config.json with the family's defaults; for a single file without one, by its shapes. whole: also
        check values that the library's class alone reads, which imports it."""
        component, path = self.family.component(name), self.config_file(name)
        config = {**component.defaults, **self._config(name)}
        usual = self._published(name)
        checked = {key: value for key, value in config.items() if whole or key in usual or key in component.defaults}
        config_files.check_values(path, checked, component, usual)
        return config

    def config_file(self, name: str) -> Path:
        """The path of the component's config.json, which may not exist. Raises UserError if a folder of its own has none."""
        override = self.overrides.get(name)
        if override is None or not override.is_dir():
            return self.beside(f"{name}/config.json")
        for folder in (override, override / name):
            if (folder / "config.json").exists():
                return folder / "config.json"
        raise UserError(f"model.components.{name}.path = {str(override)!r}: no config.json there, nor in {name}/")

    def _config(self, name: str) -> dict[str, Any]:
        override, path = self.overrides.get(name), self.config_file(name)
        config = config_files.text_part(config_files.read_json(path))
        embedded = config_files.PUBLISHED in path.parents
        if embedded and (file := TensorFile(override) if override else self.single_file) is not None:
            component = self.family.component(name)
            prefix = component.prefix_in(file.entries) or ""
            entries = {k.removeprefix(prefix): e for k, e in file.entries.items() if k.startswith(prefix)}
            packed = [key for key, weight in self.recognise(entries).weights.items() if weight.shape is None]
            if packed:
                raise UserError(
                    f"{file.path}: the quantised tensor {prefix + packed[0]!r} does not show its shape, by which the model "
                    "is told; use a model in diffusers' layout, or the 16-bit file"
                )
            with config_files.blamed_on(file.path, component):
                config |= component.inferred({key: entry.shape for key, entry in entries.items()}, config)
        return config

    @property
    def snapshots(self) -> Path | None:
        """The folder of all fetched versions in the hub's cache; None without a hub id."""
        return None if self.repository is None else self.repository.snapshot.parent

    def is_here(self, name: str) -> bool:
        """Whether the component's files are on this machine."""
        return self.fetched or name in self.overrides

    def weights(self, name: str) -> Weights:
        """The component's tensors, unread. Raises UserError if a file is missing or is a pickle."""
        if name not in self._opened:
            self._opened[name] = Weights(*self._files(name), self.recognise)
        return self._opened[name]

    @cached_property
    def _opened(self) -> dict[str, Weights]:
        return {}

    def _files(self, name: str) -> tuple[tuple[TensorFile, ...], str, tuple[Link, ...] | None]:
        """(files, prefix, links) of the component's weights."""
        component, override = self.family.component(name), self.overrides.get(name)
        folder = self._folder(name)
        if folder is not None:
            files = self._choose(name, folder).files
            names = config_files.shards(folder / files.index) if files.index else files.names
            return tuple(TensorFile(folder / file) for file in names), "", None
        file = TensorFile(override) if override is not None else self.single_file
        assert file is not None
        prefix = component.prefix_in(file.entries)
        if prefix is None and override is None and component.role != "denoiser":
            raise UserError(f"{file.path} holds no {name}; set model.components.{name}.path")
        prefix = prefix or ""
        links = component.names(self.config(name)).links if component.names else ()
        # Otherwise one component in diffusers' layout. Names of both layouts, as "encoder.conv_in.weight", decide nothing.
        original = any(prefix + link.original in file.entries for link in links if link.original not in link.parts)
        return (file,), prefix, tuple(links) if original else None

    def _folder(self, name: str) -> Path | None:
        """The component's folder of weights under diffusers' names; None if they are in a single file."""
        override, folder = self.overrides.get(name), self.root / name
        if override is not None:
            inner = override / name
            return (inner if inner.is_dir() else override) if override.is_dir() else None
        if self.single_file is None:
            return folder
        # A single file that holds the denoiser alone; the folder of its configs may hold the other components.
        return folder if self._is_apart(name) and any(map(is_safetensors, folder.glob("*"))) else None

    def _is_apart(self, name: str) -> bool:
        """Whether there is a single file that does not hold the component."""
        component, file = self.family.component(name), self.single_file
        return file is not None and component.role != "denoiser" and component.prefix_in(file.entries) is None

    def lacks(self, name: str) -> bool:
        """Whether the component is neither in the single file, nor in the folder of its configs, nor set by the user."""
        return name not in self.overrides and self._is_apart(name) and self._folder(name) is None

    def with_parts(self, found: Mapping[str, Path]) -> Self:
        """This source with components from discovered paths."""
        shapes = {name: shapes for name, shapes in self._shapes.items() if name not in found}
        return replace(self, overrides={**self.overrides, **found}, found={**self.found, **found}, _shapes=shapes)

    def check_kind(self) -> None:
        """Refuse a model trained for something else, and present parts that do not belong together."""
        configs = {c.name: self.config(c.name) | {"_assumed": self.lacks(c.name)} for c in self.family.components}
        for name in (self.family.denoiser, self.family.vae):
            kinds.refuse_part(self.config_file(name), configs[name], self.family.component(name))
        denoiser, inputs = self.family.denoiser, configs[self.family.denoiser].get("in_channels")
        if self.is_here(denoiser):
            shape = self.weights(denoiser).shapes.get(self._tensors(denoiser).get(self.family.files.input_layer, ""))
            inputs = shape[1] if shape else inputs
        self.family.files.check(configs, inputs)

    def weight_choice(self, name: str) -> WeightChoice | None:
        """The component's files to read in its folder; None for a single file, and without a hub's listing. Raises UserError
        if the folder holds no weights, or only pickles."""
        folder = self._folder(name)
        return None if folder is None or self.unlisted(name) else self._choose(name, folder)

    def unlisted(self, name: str) -> bool:
        """Whether the hub could not be asked for the component's files, and no whole set of them is on this machine."""
        repository = None if name in self.overrides else self.repository
        if repository is None or repository.unreachable is None:
            return False
        return not any(weights.whole for weights in weight_sets(repository.listing(name)))

    def _choose(self, name: str, folder: Path) -> WeightChoice:
        repository = None if name in self.overrides else self.repository
        if repository is not None:
            listing, place = repository.listing(name), f"{repository.hub_id}/{name}"
        else:
            paths = folder.iterdir() if folder.is_dir() else ()
            listing, place = {path.name: path.stat().st_size for path in paths if path.is_file()}, str(folder)
        sets = weight_sets(listing)
        if repository is not None and repository.unreachable is not None:
            sets = [weights for weights in sets if weights.whole]  # others are left of an interrupted download
        if sets:
            stored = self.wanted.stored.get(name, "fp32")
            return choose(sets, variant=self.wanted.variant, stored=stored, where=place)
        pickles = sorted(file for file in listing if file.endswith(PICKLES))
        pickle = f"; {pickles[0]} there is a pickle, which can run code: convert it" if pickles else ""
        usual = f"{place}/{WEIGHT_STEMS[0]}.safetensors (or {WEIGHT_STEMS[1]}.safetensors)"
        raise UserError(f"component {name!r} of the model has no weights: {usual} is missing{pickle}")

    def weight_names(self) -> list[str]:
        """The repository's files of the chosen weights; none for a component that is not listed."""
        choices = {c.name: self.weight_choice(c.name) for c in self.family.components if c.name not in self.overrides}
        sets = {name: choice.files for name, choice in choices.items() if choice is not None}
        return [f"{name}/{file}" for name, files in sets.items() for file in (*files.names, files.index) if file]

    def to_fetch(self) -> int:
        """Bytes to download before the model can be loaded, as far as the hub lists them."""
        return 0 if self.fetched else self.repository.to_fetch(self.weight_names())

    def fetch(self, *, phases: Phases) -> Self:
        """This source with its weights downloaded. Raises UserError and OSError."""
        if self.fetched:
            return self
        if self.repository.unreachable is not None:
            raise self.repository.refusal()
        names = [*config_files.read_of(self.family, self.repository.files), *self.weight_names()]
        root = self.repository.fetch(names, phases=phases)
        return replace(self, root=root, fetched=True, embedded=None, _shapes={})

    def held(self, name: str) -> dict[str, HeldWeight | torch.dtype]:
        """The weights that the files hold quantised, and the dtype of all others, by layer of the module; empty if none is
        quantised, or that is unknown yet. Reads headers only."""
        if not self.is_here(name) or not self.weights(name).recognised.weights:
            return {}
        weights = self.weights(name)
        return {
            parameter.removesuffix(".weight"): weights.recognised.weights.get(tensor) or weights.entry(tensor).dtype
            for parameter, tensor in self._tensors(name).items()
            if parameter.endswith(".weight")
        }

    def _tensors(self, name: str) -> dict[str, str]:
        """The file's tensor that each parameter of the module is read from."""
        weights = self.weights(name)
        links = [link for link in weights.links_to(self._expected(name)) if link.original in weights.shapes]
        return {part: link.original for link in links for part in link.parts}

    def _expected(self, name: str) -> dict[str, Shape]:
        if name not in self._shapes:
            component = self.family.component(name)
            config = self.config(name, whole=component.names is None)
            self._shapes[name] = shapes_of(component, config, self.config_file(name))
        return self._shapes[name]

    def fingerprint(self, name: str, digest: Callable[[Path], str]) -> str:
        """SHA-256 over the component's file contents (`digest` of each) and its config."""
        total = hashlib.sha256(json.dumps(self.config(name), sort_keys=True).encode())
        for file in self.weights(name).files:
            total.update(digest(file.path).encode())
        return total.hexdigest()

    def contents(self, encoders: Collection[str], digest: Callable[[Path], str]) -> dict[str, str]:
        """SHA-256 of everything in the model that a step depends on, except loaded tensors: by component, and of
        "tokenizers", "scheduler" and "markers". The files' places do not count.

        encoders: components whose encodings are cached: their files count. The others count by their configs, which decide
        what is computed with their tensors.
        """
        digests = {}
        for name in (component.name for component in self.family.components):
            config = {key: value for key, value in self.config(name).items() if not key.startswith("_")}
            digests[name] = self.fingerprint(name, digest) if name in encoders else _json_sha256(config)
        scheduler = {key: value for key, value in self.scheduler.items() if key != "_diffusers_version"}
        digests["tokenizers"], digests["scheduler"] = self.tokenizer_fingerprint, _json_sha256(scheduler)
        digests["markers"] = _json_sha256(asdict(replace(self.markers, distillation=None)))
        return digests | ({"variant": self.variant.name} if self.variant.unlike else {})

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256 over the tokenizers' files, and how they are read."""
        digest = hashlib.sha256()
        for name in self.family.files.tokenizers:
            digest.update(tokenizers.padding_rule(self.tokenizer_folder(name)))
            for path in sorted(self.tokenizer_folder(name).glob("*")):
                if path.is_file() and not path.name.startswith("."):
                    digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def tokenizer_folder(self, name: str) -> Path:
        """The tokenizer's folder: beside its text encoder in the model, or beside the encoder's own path; else ComfyUI's own,
        if a file lies in ComfyUI's folder."""
        encoder = self.family.files.tokenizers[name]
        override, usual = self.overrides.get(encoder), self.beside(name)
        places = [override / name, override.parent / name] if override is not None else []
        first = next((place for place in places if place.is_dir()), usual)
        files = [file for file in (override, self.single_file and self.single_file.path) if file is not None]
        chat = name in self.family.files.chat_templates
        if not files or tokenizers.is_usable(first, chat=chat):
            return first
        return tokenizers.beside(files, name, self.family.component(encoder).class_name, chat=chat) or first

    def build(self, name: str) -> nn.Module:
        """The component in eval mode, its parameters on the meta device."""
        return build(self.family.component(name), self.config(name, whole=True), self.config_file(name))

    def check_tokenizers(self) -> None:
        """Refuse a model that lacks a tokenizer. A hub id's come with its configs, if the hub could be asked."""
        complete = self.repository is None or (self.embedded is None and self.repository.unreachable is None)
        for name in self.family.files.tokenizers if self.fetched or complete else ():
            tokenizers.check_tokenizer(self.tokenizer_folder(name), name, chat=name in self.family.files.chat_templates)

    def verify(self, name: str) -> None:
        """Refuse a component with a missing, unexpected or wrongly shaped tensor. Reads headers only."""
        self.reads(name)

    def load(
        self,
        name: str,
        *,
        swap: Swap,
        device: torch.device,
        fill: Callable[[nn.Module], Collection[str]] = lambda module: (),
        phases: Phases = QUIET,
    ) -> nn.Module:
        """Build, swap and fill one component on `device`.

        fill: fills parameters from elsewhere (a cache of converted weights), and returns their names. Raises UserError for a
        missing, wrongly shaped or unexpected tensor, naming it.
        """
        reads = self.reads(name)
        module = self.empty(name, swap=swap, device=device)
        filled = frozenset(fill(module))
        remaining = [read for read in reads if not filled.issuperset(read.link.parts)]
        with phases(f"loading {name}", sum(read.bytes for read in remaining), "B") as phase:
            for read in remaining:
                read.place(module, device, phase)
        return self.finished(name, module)

    def empty(self, name: str, *, swap: Swap, device: torch.device) -> nn.Module:
        """The component with memory for its final form, and no values."""
        module = self.build(name)
        allocate(module, device, swap(module) or ())
        return module

    def finished(self, name: str, module: nn.Module) -> nn.Module:
        """The component after its tensors were placed."""
        if hasattr(module, "tie_weights"):
            module.tie_weights()  # T5 lists its embedding table twice; two copies would be half a gigabyte
        self.family.images.adjust(name, module)
        return module

    def reads(self, name: str) -> list[Read]:
        """The reads that fill the component. Reads headers only; raises UserError for a tensor that is missing or wrong."""
        others = [c for c in self.family.components if c.name != name and c.role != "denoiser"]
        prefixes = [prefix for c in others for prefix in (*c.prefixes, f"{c.name}.")]
        harmless = self.family.files.harmless
        try:
            return plan_reads(name, self.weights(name), self._expected(name), others=prefixes, harmless=harmless)
        except UserError as error:
            config = config_files.described(self.config_file(name), self.config(name), self._published(name))
            raise UserError(f"{error}{config}") from error

    def _published(self, name: str) -> dict[str, Any]:
        return config_files.published_config(tuple(self.family.files.hub_ids.values()), name)


def _json_sha256(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def load_tokenizers(family: Family, source: ModelSource) -> dict[str, Any]:
    """The family's tokenizers by name, from the model's folder or, for a published model, the embedded one."""
    return {
        name: tokenizers.load_tokenizer(source.tokenizer_folder(name), name, source.config(encoder))
        for name, encoder in family.files.tokenizers.items()
    }
