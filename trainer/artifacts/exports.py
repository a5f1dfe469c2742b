"""What a run leaves for people: samples, adapter files, the "did it take?" table and the report."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import quantization
from trainer.adapters import export, sd_scripts
from trainer.adapters.kinds import kind_named
from trainer.adapters.portable import of_adapter
from trainer.artifacts import sampling
from trainer.artifacts.ports import Page
from trainer.artifacts.provenance import Origin
from trainer.base.console import width
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
from trainer.monitoring import weight_change
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
            with self.state.adapter.at_strength(request.strength):
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
        config = self.plan.config
        stem = f"{config.run.name}-{at.step:08d}"
        stems = [stem + ending for ending in self.state.weights_for_use()]
        files = [file for each in stems for file in self._names(each, self._formats)]
        if not at.fresh and all((self.context.layout.adapters / file).exists() for file in files):
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
        say, step = self.context.processes.say, self.state.progress.step
        if not self.context.processes.is_main:
            return
        try:
            written = self.export_newest()
        except NotTrained as error:
            say(f"warning: {error}")
            return
        say(f"adapter files of step {step} (overwritten at the next stop or at the end):")
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
                fields = TensorFile(path).metadata
                if (adapted := self.state.adapter.kind).module:
                    beside = "not for A1111, InvokeAI, sd-scripts"
                    say(f"    as a {adapted.word} {beside}: merge or convert --to lora (scripts/adapter.py)")
                if phrase := fields.get(sd_scripts.ENTRY):
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
        """Leave what a whole training leaves: the adapter files, the "did it take?" table and the report.

        Raises NotTrained, after all else is done, for an adapter that no update has reached.
        """
        say, phases, page = self.context.processes.say, self.context.phases, self.page
        if not self.context.processes.is_main:
            return
        written, nothing = {}, None
        try:
            written = self.export_newest()
        except NotTrained as error:
            nothing = error
        with self.state.evaluating():
            moved = weight_change.weight_change(self.state.adapter, self.origin.start.weights, phases)
        largest = {block: change.largest for block, change in moved.items()}
        verdict, sentence, bad = ("", "", False) if page is None else page.verdict(largest)
        sections = {
            "Did it take?": weight_change.change_table(moved, drifts=self.state.adapter.kind.magnitudes),
            "Effect": {"columns": ["what", "value"], "rows": self._effects(written)},
        }
        if verdict:
            sections["Did it take?"]["notes"] = [f"{'Warning' if bad else verdict.capitalize()}: {sentence}."]
            sections["Effect"]["rows"].insert(0, ["verdict", verdict])
        if self.state.progress.changes:
            changes = [
                [change["step"], "-" if change["epoch"] is None else change["epoch"] + 1, line]
                for change in self.state.progress.changes
                for line in change["what"]
            ]
            sections["Changed in mid-run"] = {"columns": ["after step", "new epoch", "what"], "rows": changes}
        if self.components.storage:
            sections["Frozen weights"] = {
                "columns": ["component", *quantization.REPORT_COLUMNS],
                "rows": [[component, *stored.row()] for component, stored in self.components.storage.items()],
            }
        if verdict:  # before what may fail: a full disk, say
            say(f"warning: {sentence}" if bad else f"verdict: {verdict}: {sentence}")
        self._say_where(written)
        if (samples := self.context.layout.samples_of(self.state.progress.step)).exists():
            say(f"samples: {samples}", whole=True)
        if page is not None:
            if picture := page.before_after(self._compared(), self.state.progress.step):
                say(f"before and after: {picture}", whole=True)
            with phases("writing the report") as phase:
                report = page.finished(sections, largest, phase.check)
            say(f"report: {report}", whole=True)
        say(weight_change.render(sections, width(sys.stdout)))
        if nothing is not None:
            raise nothing

    def _compared(self) -> list[tuple[Path, Path, Path | None]]:
        layout = self.context.layout
        return sampling.compared(layout.samples_of(0), layout.samples_of(self.state.progress.step), layout.truths)

    def _effects(self, written: Mapping[str, Path]) -> list[list[Any]]:
        """What changed besides the weights. written: as `export` gives it."""
        step, rows = self.state.progress.step, []
        for before, after, _ in self._compared():
            moved = sampling.image_distance(before, after)
            rows.append([f"sample {after.stem} moved by (relative L2 of pixels)", f"{moved:.3%}"])
        for ending, used in self.state.weights_for_use().items():
            of_average = ", average" if ending else ""
            file = written.get(f"diffusers{of_average}")
            if file is None:
                continue
            with self.context.phases("reading the adapter file back", file.stat().st_size, "B") as phase, used():
                whole = of_adapter(self.state.adapter, self.state.norms.now(), "magnitude", lambda count: phase.check())
                layers = whole.rounded(dtype := COMPUTE_DTYPES[self.plan.config.export.dtype])
                if dtype != torch.float32:
                    loss, name = whole.distance(layers)
                    what = f"export.dtype = {self.plan.config.export.dtype!r} takes of a layer's change{of_average}, at most"
                    rows.append([what, f"{loss:.3%} ({name})"])
                layers, _ = layers.parted(self.plan.model.family.adapters.peft)
                live = {name: tensor.make() for name, tensor in export.diffusers_tensors(layers).items()}
                read = weight_change.read_back(file, live, phase.advance)
            magnitudes = " (magnitudes: as made for the file's base)" if self.state.adapter.kind.magnitudes else ""
            rows.append([f"exported file, read back, against the live adapter{of_average}{magnitudes}", read])
        if self.origin.start.path:
            rows.append(["changes are measured from the weights of adapter.init_from", self.origin.start.name])
        if self.state.progress.non_finite:
            skipped = f"{self.state.progress.non_finite} of {step}"
            rows.append(["updates skipped because a value was not finite (see metrics.jsonl)", skipped])
        return rows
