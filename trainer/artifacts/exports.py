"""Writes a run's results: samples, adapter files and the report."""

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
from trainer.base.errors import Interrupted, NotTrained, PeerStopped, is_out_of_memory
from trainer.base.files import FileGroup, Write, write_atomic
from trainer.base.memory import give_back
from trainer.base.pictures import THUMBNAIL, first_sample, thumbnail
from trainer.base.run_layout import AVERAGE
from trainer.base.signals import Signals
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

# Time for files after a signal. A process that is stopped usually has ten seconds (docker stop), of which step and checkpoint
# have taken some. The checkpoint is on the disk by then: being killed meanwhile loses nothing.
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Artifacts:
    """The results of a run. The main process writes them; the others wait. page: None if the run has no pages."""

    plan: RunPlan
    components: Components
    reader: Reader
    state: TrainState
    origin: Origin
    context: RunContext
    page: Page | None

    def draw_samples(self, at: Position) -> None:
        """Draw the step's samples, unless an earlier start did. After a stop the next start draws them."""
        components, requests, folder = self.components, self.plan.data.requests, self.context.layout.samples_of(at.step)
        if not at.fresh and folder.exists():
            return
        weights = self.state.weights_for_use()
        if at.step == 0:
            weights.pop(AVERAGE, None)  # there is no average yet

        def sample(request):
            # The strength holds during encoding, too: a text encoder may be adapted.
            with self.state.adapter.at_strength(request.strength), components.without_below():
                prompts = [prompt_conditioning(components, self.reader, text) for text in (request.prompt, request.negative)]
                return components.family.images.draw(components.model, request, *prompts)

        evaluations = len(weights) * sum(request.steps for request in requests)
        # Hooks between modules: one image may take longer than a spot machine's notice.
        with (
            self.context.phases("drawing samples", evaluations, "evaluation", event=f"samples step {at.step}") as phase,
            phase.between_modules(),
            components.load(components.family.denoiser).register_forward_hook(lambda *_: phase.advance()),
        ):
            # Before the samples, whose folder tells the next start that the step's drawing is complete.
            sampling.keep_truths(requests, self.plan.truths, self.context.layout.truths)
            sampling.keep_references(requests, self.context.layout.references)
            sampling.draw_samples(requests, sample=sample, folder=folder, weights=weights)
        give_back()

    def export_step(self, at: Position) -> None:
        """Write the adapter files with the step in their names, unless an earlier start did."""
        stem, folder = f"{self.plan.config.run.name}-{at.step:08d}", self.context.layout.adapters
        names = [name for ending in self.state.weights_for_use() for name in self._names(stem + ending, self._formats)]
        if not at.fresh and all((folder / name).exists() for name in names):
            return
        try:
            with FileGroup() as group:
                self.export(stem, group.write)
        except NotTrained as error:
            self.context.processes.say(f"warning: {error}")

    def _names(self, stem: str, formats: Sequence[str] = export.FORMATS) -> list[str]:
        """The adapter files of a stem, relative to their folder."""
        model = self.plan.model
        return list(export.file_names(stem, formats, model.adapted, model.family.adapters.peft).values())

    @property
    def _formats(self) -> tuple[str, ...]:
        kind = kind_named(self.plan.config.adapter.type).in_files
        return self.plan.model.family.file_formats(kind, self.plan.config.export.formats)

    def export(self, stem: str, write: Write = write_atomic, folder: Path | None = None) -> dict[str, Path]:
        """Write the files of adapter and average. Returns format ("FORMAT, average") -> path. folder: None: the run's own."""
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
        paths: dict[str, Path] = {}
        with self.context.phases("exporting", count, "layer") as phase:
            for ending, in_use in weights.items():
                # Only on request: otherwise the files' bytes would depend on whether samples are drawn.
                picture = config.export.thumbnail and first_sample(layout.samples_of(state.progress.step), ending)
                with in_use():
                    norms = state.norms.now(phase.advance)
                    write_as = partial(of_adapter, adapter, norms, advance=lambda count: phase.check())
                    by_format = export.write_files(
                        files,
                        stem + ending,
                        replace(about, average=described(config.ema.decay) if ending else ""),
                        write_as,
                        norms,
                        thumbnail=thumbnail(picture, THUMBNAIL) if picture else "",
                        advance=phase.advance,
                    )
                paths |= {format + (", average" if ending else ""): path for format, path in by_format.items()}
        return paths

    def export_newest(self) -> dict[str, Path]:
        """Write the files without a step in their names, with the model card: all of one step, or all stay as they were.
        Files of an earlier stop or end in formats that are no longer asked for are deleted."""
        note = ""
        with FileGroup() as group:
            paths = self.export(self.plan.config.run.name, group.write)
            for name in self._newest_names() if paths else ():
                if (path := self.context.layout.adapters / name) not in paths.values():
                    group.remove(path)
            if paths and self.page is not None:
                note = self.page.write_card(self.origin.about(), paths, group)
        if note:
            self.context.processes.say(f"note: {note}")
        return paths

    def leave_files(self) -> None:
        """Write the adapter files and their card after a stop. The next stop, or the end, overwrites them."""
        if not self.context.processes.is_main:
            return
        try:
            paths = self.export_newest()
        except NotTrained as error:
            self.context.processes.say(f"warning: {error}")
            return
        step = self.state.progress.step
        self.context.processes.say(f"adapter files of step {step} (overwritten at the next stop or at the end):")
        self._say_usage(paths)

    def leave_report(self) -> None:
        """Write the report after a stop."""
        if self.context.processes.is_main and self.page is not None:
            with self.context.phases("writing the report") as phase:
                path = self.page.stopped(phase.check)
            self.context.processes.say(f"report of step {self.state.progress.step}: {path}")

    def _newest_names(self) -> list[str]:
        """The adapter files without a step in their names, in all formats."""
        return [name for ending in self.state.weights_for_use() for name in self._names(self.plan.config.run.name + ending)]

    def existing_names(self) -> list[str]:
        """The adapter files and the card that exist, without a step in their names."""
        folder = self.context.layout.adapters
        return [name for name in (*self._newest_names(), self.context.layout.card.name) if (folder / name).exists()]

    def _say_usage(self, paths: Mapping[str, Path]) -> None:
        """Print the files, and how to load them. paths: format -> path, from `export`."""
        say = self.context.processes.say
        for format, path in paths.items():
            if format.startswith("comfyui"):
                # A path has its own line, to be copied.
                say(f"adapter ({format}): copy this file into ComfyUI/models/loras (Forge: models/Lora)")
                say(f"    {path}", whole=True)
                if (kind := self.state.adapter.kind).module:
                    unsupported = "not for A1111, InvokeAI, sd-scripts"
                    say(f"    as a {kind.word} {unsupported}: merge or convert --to lora (scripts/adapter.py)")
                if phrase := TensorFile(path).metadata.get(sd_scripts.ENTRY):
                    say(f"note: {sd_scripts.sentence(phrase)}")
            elif format.startswith("peft"):
                component = format.removeprefix("peft ").partition(",")[0]
                say(f"adapter ({format}): diffusers does not load it from a file of its own for this model; load it with")
                say(f'    peft.PeftModel.from_pretrained(pipe.{component}, "{path.parent}")', whole=True)
            else:
                say(f"adapter ({format}): load it with")
                say(f'    pipe.load_lora_weights("{path}")', whole=True)
        layers = [n for n in self.state.adapter.layers if n.partition(".")[0] not in self.plan.model.family.adapters.peft]
        for sentence in export.not_loaded_by_diffusers(layers) if "diffusers" in paths else ():
            say(f"note: {sentence}")

    def finish(self) -> None:
        """Write the results of a training: adapter files, verdict, report. Without an update raises NotTrained at the end."""
        say, page = self.context.processes.say, self.page
        if not self.context.processes.is_main:
            return
        paths, not_trained = dict[str, Path](), None
        try:
            paths = self.export_newest()
        except NotTrained as error:
            not_trained = error
        if page is not None:
            page.judge(self.state, paths)  # before what may fail: a full disk, say
        self._say_usage(paths)
        if (samples := self.context.layout.samples_of(self.state.progress.step)).exists():
            say(f"samples: {samples}", whole=True)
        if page is not None:
            page.end()
        if not_trained is not None:
            raise not_trained


def leave_in_time(artifacts: Artifacts, signals: Signals) -> None:
    """Write the adapter files and the report after a signal (export.on_stop): within STOP_SECONDS and until a second signal,
    else not at all. Failures are printed: the run ends by its signal. All processes call it, and wait for the main one."""
    processes, step = artifacts.context.processes, artifacts.state.progress.step
    signals.promise = f"leaving at once; step {step} is saved"
    names, reason, has_files = artifacts.existing_names(), None, False
    try:
        with signals.last_work(STOP_SECONDS):
            artifacts.leave_files()
            has_files = True
            artifacts.leave_report()
    except PeerStopped:
        raise
    except Interrupted:
        reason = "a second signal, or too little time"
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        # Among them UserError, NonFiniteError, torch's out of memory, and Pillow's errors.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"out of memory: {reason}" if is_out_of_memory(error) else reason
    if reason is not None:
        old = f"{', '.join(names)} are still those of an earlier step" if names else "there are none"
        state = f"the adapter files are of step {step}, the report is older"
        state = state if has_files else f"no adapter files of this step, {old}"
        remedy = "`python scripts/adapter.py export` makes the files of its checkpoint"
        processes.say(f"{state} ({reason}); step {step} is saved, and {remedy}")
    processes.wait()
