"""The model's loaded components: the one place that loads them, encodes with them, and frees them."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import quantization
from trainer.base.digests import FileDigests
from trainer.base.files import make_folder
from trainer.base.memory import give_back
from trainer.base.progress import Phases
from trainer.base.protocols import BaseLayer, Kernels
from trainer.base.types import Conditioning
from trainer.engine.below import FrozenAdapter
from trainer.models.base import Model
from trainer.models.loading import ModelSource, load_tokenizers
from trainer.plan.run_plan import ModelPlan
from trainer.plan.storage import held_as
from trainer.quantization import ConvertedWeights
from trainer.runtime import precision
from trainer.runtime.attention import TORCHS_OWN, Attention
from trainer.runtime.compilation import Compiler
from trainer.runtime.processes import Processes
from trainer.runtime.sharding import Sharder
from trainer.runtime.streaming import Streamer


def without_modules(source: ModelSource, options: Mapping[str, Any], tokenizers: dict[str, Any] | None = None) -> Model:
    """The model without weights, enough to count a caption's tokens. options: the config's choices that the family reads.
    tokenizers: replace the source's."""
    return Model(
        modules={},
        configs={component.name: source.config(component.name) for component in source.family.components},
        tokenizers=load_tokenizers(source.family, source) if tokenizers is None else tokenizers,
        scheduler={},
        compute={},
        device=torch.device("cpu"),
        options={"distillation": source.markers.distillation, **options},
    )


class Components:
    """The model's components, each loaded at its first use. plan: of a model with its files here. digests: theirs.

    model: the argument of the family's functions. storage: the format of each component that was quantised here. streamers:
    by component, of those in memory whose blocks are streamed. frozen_adapter: the one below the trained adapter, or None.
    """

    def __init__(
        self,
        plan: ModelPlan,
        *,
        kernels: Kernels,
        digests: FileDigests,
        processes: Processes,
        phases: Phases,
        attention: Attention = TORCHS_OWN,
        compiler: Compiler | None = None,
    ) -> None:
        self.plan, self.family, self.source = plan, plan.family, plan.source
        self.kernels, self.digests, self.processes, self.phases = kernels, digests, processes, phases
        self.attention, self.compiler = attention, compiler
        self.storage: dict[str, quantization.Stored] = {}
        self.streamers: dict[str, Streamer] = {}
        self.frozen_adapter: FrozenAdapter | None = None
        self.model = replace(
            without_modules(plan.source, {"objective": plan.objective, **plan.options}, self.tokenizers()),
            scheduler=plan.source.scheduler,
            compute={name: storage.compute for name, storage in plan.storage.items()},
            device=processes.device,
        )

    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name."""
        return load_tokenizers(self.family, self.source)

    def load(self, name: str) -> torch.nn.Module:
        """The component; its first use reads and quantises it."""
        if name in self.model.modules:
            return self.model.modules[name]
        storage = self.plan.storage[name]
        converted = self._converted(name) if storage.format.quantised and not self.source.held(name) else None
        module = self.model.modules[name] = self.source.load(
            name,
            swap=partial(self.swap, name),
            device=self.model.device,
            fill=partial(converted.fill, phases=self.phases) if converted else lambda module: (),
            phases=self.phases,
        )
        give_back()
        if converted is not None and self.processes.is_main:
            self.processes.say(f"{name}: {converted.hits} of {converted.total} converted weights were in model.cache_dir")
            converted.store(module, phases=self.phases)
        if isinstance(self.streamers.get(name), Sharder):
            self.processes.settle()  # all processes load it, and the main one may store all of it
        in_file = held_as(self.source, name)
        if in_file and not storage.format.quantised:
            self.processes.say(f"{name}: held as {in_file[0]} in the model's file, widened to {storage.format.name}")
        if (stored := quantization.stored_as(module)) is not None:
            self.storage[name] = stored
            self.processes.say(f"{name}: {stored}")
        if storage.scaled_matmul:
            self.processes.say(f"{name}: {quantization.scaled_layers(module)}")
        if name in self.streamers:
            self.processes.say(f"{name}: {self.streamers[name]}")
        return module

    def swap(self, name: str, module: torch.nn.Module) -> Collection[torch.Tensor]:
        """Freeze a component's layers, and stream its blocks as planned. Returns the tensors that stay off the device."""
        self.plan.storage[name].swap(module, held=self.source.held(name), kernels=self.kernels)
        streamer = self.streamer(name, module)
        if streamer is None:
            return ()
        self.streamers[name] = streamer
        return streamer.at_home()

    def streamer(self, name: str, module: torch.nn.Module) -> Streamer | None:
        """The Streamer of a component's blocks, or the Sharder that splits them among processes; None unless planned."""
        shared = self.plan.parts > 1 and name == self.family.denoiser
        if not shared and name not in self.plan.resident:
            return None
        blocks, device = self.family.ordered_blocks(name, module), self.model.device
        if shared:
            peers = self.processes if self.processes.count > 1 else None
            return Sharder(blocks, device, parts=self.plan.parts, peers=peers)
        return Streamer(blocks, self.plan.resident[name], device)

    def streamed_blocks(self, names: Collection[str]) -> dict[str, torch.nn.Module]:
        """The streamed blocks of these components, by full name."""
        streamers = {name: self.streamers[name] for name in names if name in self.streamers}
        return {f"{name}.{block}": module for name, each in streamers.items() for block, module in each.blocks.items()}

    def enter(self, owner: str) -> None:
        """Bring a streamed block to the device, as its forward does. owner: a full name; any other name does nothing."""
        name, _, block = owner.partition(".")
        if name in self.streamers and block in self.streamers[name].blocks:
            self.streamers[name].enter_block(block)

    def _converted(self, name: str) -> ConvertedWeights | None:
        """The cache of a component's converted weights; None unless model.cache_dir is set."""
        folder = self.plan.converted
        if folder is None:
            return None
        make_folder(Path(folder), "model.cache_dir")
        return ConvertedWeights(
            Path(folder),
            fingerprint=self.source.fingerprint(name, self.digests.of),
            library=quantization.library(self.plan.storage[name].format),
        )

    def unload(self, names: Collection[str]) -> None:
        """Free these components; a later use loads them again."""
        for streamer in [self.streamers.pop(name) for name in names if name in self.streamers]:
            streamer.close()
        if [name for name in names if self.model.modules.pop(name, None) is not None]:
            gc.collect()
            give_back()

    def put_below(self, path: str | None) -> None:
        """Put the plan's frozen adapter, if any, into the denoiser's layers. path: its file, for messages."""
        if self.plan.under is not None:
            denoiser = self.model.modules[self.family.denoiser]
            self.frozen_adapter = FrozenAdapter(denoiser, self.plan.under, self.model.device, path)

    def without_below(self) -> AbstractContextManager[None]:
        """A context in which the frozen adapter, if any, is off, as when images are drawn."""
        return nullcontext() if self.frozen_adapter is None else self.frozen_adapter.off()

    def layer(self, name: str) -> BaseLayer:
        """The frozen layer of a full name ("unet.conv_in"), below its adapter if it has one."""
        component, _, layer = name.partition(".")
        module = self.model.modules[component].get_submodule(layer)
        return module.get_base_layer() if hasattr(module, "get_base_layer") else module

    @torch.no_grad()
    def encode_images(self, pixels: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """ImagePart.encode with the VAE. exact: never in TF32, whatever the plan says."""
        self.load(self.family.vae)
        with nullcontext() if exact or not self.plan.storage[self.family.vae].tf32 else precision.in_tf32():
            return self.family.images.encode(self.model, pixels)

    @contextmanager
    def text_encoder(self, name: str) -> Iterator[Callable[[list[str]], Mapping[str, torch.Tensor]]]:
        """A context with Family.encode of one encoder, without gradients; the encoder is freed afterwards."""

        @torch.no_grad()
        def encode(texts: list[str]) -> Mapping[str, torch.Tensor]:
            self.load(name)
            return self.family.encode(self.model, name, texts)

        try:
            yield encode
        finally:
            self.unload([name])

    @torch.no_grad()
    def encode_prompts(self, texts: list[str]) -> Conditioning:
        """Family.encode_prompts without gradients; all text encoders stay in memory."""
        for name in self.family.text_encoders:
            self.load(name)
        return self.family.encode_prompts(self.model, texts)

    def fingerprint(self, name: str) -> str:
        """An encoding component's fingerprint: its files' digest, and all else that changes its numbers."""
        storage = self.plan.storage[name]
        parts = [self.source.fingerprint(name, self.digests.of), storage.format.name, storage.compute, storage.keep]
        if storage.format.quantised:
            parts += [quantization.library(storage.format), self.model.device.type]
        if storage.tf32:
            parts.append("tf32")
        return ":".join(map(str, parts))

    def text_fingerprint(self) -> str:
        """The fingerprint of the text encoders and the tokenizers."""
        encoders = [self.fingerprint(name) for name in self.family.text_encoders]
        counted = {name: (counts[0], limit) for name, (counts, limit) in self.family.text.count(self.model, [""]).items()}
        tokenizers = [self.source.tokenizer_fingerprint, str(counted)]
        tokenizers += ["weighted"] if self.model.options.get("weighted_captions") else []
        return " ".join(encoders + tokenizers)
