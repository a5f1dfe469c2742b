"""What a run leaves for people: samples, adapter files and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainer.adapters import export, sd_scripts
from trainer.adapters.kinds import kind_named
from trainer.adapters.portable import of_adapter
from trainer.artifacts import sampling
from trainer.artifacts.ports import Page
from trainer.artifacts.provenance import Origin
from trainer.base.errors import NotTrained
from trainer.base.files import FileGroup, Write, write_atomic
from trainer.base.memory import give_back
from trainer.base.pictures import THUMBNAIL, first_sample, thumbnail
from trainer.base.run_layout import AVERAGE
from trainer.base.tensorfile import TensorFile
from trainer.data.batches.loader import Reader
from trainer.ema import described
from trainer.engine.assembly import TrainState
from trainer.engine.components import Components
from trainer.engine.encoding import prompt_conditioning
from trainer.plan.run_plan import RunPlan
from trainer.runtime.context import RunContext
from trainer.runtime.jobs import Position
from trainer.runtime.precision import COMPUTE_DTYPES


@dataclass(frozen=True)
class Artifacts:
    """Made by the main process; the others wait. page: None where the run has none."""

    plan: RunPlan
    components: Components
    reader: Reader
    state: TrainState
    origin: Origin
    context: RunContext
    page: Page | None

    def draw_samples(self, at: Position) -> None:
        """Draw the step's samples, unless an earlier start did. A stop leaves them to the next start."""
        components, requests, folder = self.components, self.plan.data.requests, self.context.layout.samples_of(at.step)
        if not at.fresh and folder.exists():
            return
        weights = self.state.weights_for_use()
        if at.step == 0:
            weights.pop(AVERAGE, None)  # nothing is averaged yet

        def sample(request):
            # Around the encoding too: an adapted text encoder has a strength as well.
            with self.state.adapter.at_strength(request.strength), components.without_below():
                prompts = [prompt_conditioning(components, self.reader, text) for text in (request.prompt, request.negative)]
                return components.family.images.draw(components.model, request, *prompts)

        evaluations = len(weights) * sum(request.steps for request in requests)
        # An image may take longer than a spot machine gives.
        with (
            self.context.phases("drawing samples", evaluations, "evaluation", event=f"samples step {at.step}") as phase,
            phase.between_modules(),
            components.load(components.family.denoiser).register_forward_hook(lambda *_: phase.advance()),
        ):
            # Before the samples: where these are, the next start takes the step's drawing for done.
            sampling.keep_truths(requests, self.plan.truths, self.context.layout.truths)
            sampling.keep_references(requests, self.context.layout.references)
            sampling.draw_samples(requests, sample=sample, folder=folder, weights=weights)
        give_back()

    def export_step(self, at: Position) -> None:
        """Write the adapter files that have the step in their names, unless an earlier start did."""
        stem, folder = f"{self.plan.config.run.name}-{at.step:08d}", self.context.layout.adapters
        stems = [stem + ending for ending in self.state.weights_for_use()]
        if not at.fresh and all((folder / file).exists() for each in stems for file in self._names(each, self._formats)):
            return
        try:
            with FileGroup() as group:
                self.export(stem, group.write)
        except NotTrained as error:
            self.context.processes.say(f"warning: {error}")

    def _names(self, stem: str, formats: Sequence[str] = export.FORMATS) -> list[str]:
        """The adapter files of a stem, below their folder."""
        model = self.plan.model
        return list(export.file_names(stem, formats, model.adapted, model.family.adapters.peft).values())

    @property
    def _formats(self) -> tuple[str, ...]:
        kind = kind_named(self.plan.config.adapter.type).in_files
        return self.plan.model.family.file_formats(kind, self.plan.config.export.formats)

    def export(self, stem: str, write: Write = write_atomic, folder: Path | None = None) -> dict[str, Path]:
        """Write the adapter's files, and those of its average; returns them by format, the average's by "FORMAT, average".
        folder: None is the run's own."""
        components, plan, config, state = self.components, self.plan, self.plan.config, self.state
        if not self.context.processes.is_main:
            return {}
        about = self.origin.about()
        adapter, weights, layout = state.adapter, state.weights_for_use(), self.context.layout
        count = len(adapter.layers) * (len(self._formats) + adapter.kind.magnitudes) * len(weights)
        files = export.AdapterFiles(
            folder=folder or layout.adapters,
            formats=self._formats,
            dora_scale=config.export.dora_scale,
            fused=plan.model.fused,
            prefixes=plan.model.family.kohya_prefixes(plan.model.source.config),
            rows=lambda name: components.layer(name).weight_shape[0],
            not_behind_lycoris=plan.model.family.adapters.not_behind_lycoris,
            not_in_sd_scripts=plan.model.family.adapters.not_in_sd_scripts,
            peft=plan.model.family.adapters.peft,
            write=write,
            dtype=COMPUTE_DTYPES[config.export.dtype],
        )
        written = {}
        with self.context.phases("exporting", count, "layer") as phase:
            for ending, used in weights.items():
                # Only where it is asked for: else the files' bytes would depend on whether samples are drawn.
                drawn = config.export.thumbnail and first_sample(layout.samples_of(state.progress.step), ending)
                with used():
                    norms = state.norms.now(phase.advance)
                    write_as = partial(of_adapter, adapter, norms, advance=lambda count: phase.check())
                    made = export.write_files(
                        files,
                        stem + ending,
                        replace(about, average=described(config.ema.decay) if ending else ""),
                        write_as,
                        norms,
                        thumbnail=thumbnail(drawn, THUMBNAIL) if drawn else "",
                        advance=phase.advance,
                    )
                written |= {format + (", average" if ending else ""): path for format, path in made.items()}
        return written

    def export_newest(self) -> dict[str, Path]:
        """Write the files that have no step in their names, with the model card: all of one step, or all stay as they
        were. Files that an earlier stop or end left in a format that is not asked for any more are deleted."""
        name, note = self.plan.config.run.name, ""
        with FileGroup() as group:
            written = self.export(name, group.write)
            for ending in self.state.weights_for_use() if written else ():
                for file in self._names(name + ending):
                    if (path := self.context.layout.adapters / file) not in written.values():
                        group.remove(path)
            if written and self.page is not None:
                note = self.page.write_card(self.origin.about(), written, group)
        if note:
            self.context.processes.say(f"note: {note}")
        return written

    def leave_files(self) -> None:
        """Write the adapter files and their card of the present step, where the training was stopped. The next stop, or
        the end, overwrites them."""
        if not self.context.processes.is_main:
            return
        try:
            written = self.export_newest()
        except NotTrained as error:
            self.context.processes.say(f"warning: {error}")
            return
        step = self.state.progress.step
        self.context.processes.say(f"adapter files of step {step} (overwritten at the next stop or at the end):")
        self._say_where(written)

    def leave_report(self) -> None:
        """Write the report of the present step, where the training was stopped."""
        if self.context.processes.is_main and self.page is not None:
            with self.context.phases("writing the report") as phase:
                path = self.page.stopped(phase.check)
            self.context.processes.say(f"report of step {self.state.progress.step}: {path}")

    def earlier(self) -> list[str]:
        """The names of adapter files and card that are there, without a step in their names."""
        stems = [self.plan.config.run.name + ending for ending in self.state.weights_for_use()]
        names = [name for stem in stems for name in self._names(stem)]
        return [name for name in (*names, self.context.layout.card.name) if (self.context.layout.adapters / name).exists()]

    def _say_where(self, written: Mapping[str, Path]) -> None:
        """The files to load, and where to put them. written: as `export` gives it."""
        say = self.context.processes.say
        for kind, path in written.items():
            if kind.startswith("comfyui"):
                # Each a line of its own, to be copied.
                say(f"adapter ({kind}): copy this file into ComfyUI/models/loras (Forge: models/Lora)")
                say(f"    {path}", whole=True)
                if (adapted := self.state.adapter.kind).module:
                    beside = "not for A1111, InvokeAI, sd-scripts"
                    say(f"    as a {adapted.word} {beside}: merge or convert --to lora (scripts/adapter.py)")
                if phrase := TensorFile(path).metadata.get(sd_scripts.ENTRY):
                    say(f"note: {sd_scripts.sentence(phrase)}")
            elif kind.startswith("peft"):
                component = kind.removeprefix("peft ").partition(",")[0]
                say(f"adapter ({kind}): diffusers does not load it from a file of its own for this model; load it with")
                say(f'    peft.PeftModel.from_pretrained(pipe.{component}, "{path.parent}")', whole=True)
            else:
                say(f"adapter ({kind}): load it with")
                say(f'    pipe.load_lora_weights("{path}")', whole=True)
        layers = [n for n in self.state.adapter.layers if n.partition(".")[0] not in self.plan.model.family.adapters.peft]
        for sentence in export.not_loaded_by_diffusers(layers) if "diffusers" in written else ():
            say(f"note: {sentence}")

    def finish(self) -> None:
        """Leave what a whole training leaves: the adapter files, what it changed and the report. Raises NotTrained, after all
        else is done, for an adapter that no update has reached."""
        say, page = self.context.processes.say, self.page
        if not self.context.processes.is_main:
            return
        written, nothing = {}, None
        try:
            written = self.export_newest()
        except NotTrained as error:
            nothing = error
        if page is not None:
            page.judge(self.state, written)  # before what may fail: a full disk, say
        self._say_where(written)
        if (samples := self.context.layout.samples_of(self.state.progress.step)).exists():
            say(f"samples: {samples}", whole=True)
        if page is not None:
            page.end()
        if nothing is not None:
            raise nothing
