"""The story of a run, in the order the data flows:

config -> model family -> quantise -> adapters -> data -> step -> checkpoint -> adapter files
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from trainer import config as configs
from trainer import files, kernels, metrics, optim, outcome, precision, processes, quantization, resume, validation
from trainer.adapters import Adapter, export, inject, norms
from trainer.checkpoint import state, store
from trainer.checkpoint.saver import Saver
from trainer.config import Config
from trainer.data import cache as caches
from trainer.data import captions, loader, sampler
from trainer.digests import FileDigests
from trainer.errors import DataError, Interrupted, NonFiniteError, OutOfMemory, UserError
from trainer.memory import checkpoint_blocks, find_blocks, is_out_of_memory, what_would_fit
from trainer.models.base import Model
from trainer.models.loading import load_tokenizers
from trainer.phases import FILE as PHASES
from trainer.phases import QUIET, Phases, Record
from trainer.plan import (
    Plan,
    check_files,
    check_objective,
    check_storage,
    describe,
    held_storage,
    make_plan,
    open_source,
    resolve,
    total_updates,
)
from trainer.processes import Processes
from trainer.quantization import FrozenConv2d, FrozenLinear
from trainer.report import write_report
from trainer.signals import Signals
from trainer.step import Step, batch_losses
from trainer.terminal import write
from trainer.types import Batch, Conditioning


def plan(config: Config) -> None:
    """Print what a run would do."""
    source = open_source(config)
    config = resolve(config, source)
    check_device(config)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    write(describe(make_plan(config, source, processes=processes, phases=Phases(show=True)), sizes=True))


def train(config: Config, *, resume_from: str | None) -> None:
    """Train to the end, to `run.stop_after`, or until a signal. Raises what cli.py turns into exit statuses."""
    source = open_source(config)
    config = resolve(config, source)
    # Before the signal handlers: a process that waits for its peers has nothing to lose and should just end.
    peers = start_processes(config)
    with Signals() as signals, peers.attending(signals):
        phases = Phases(check=peers.check, show=peers.is_main, record=Record() if peers.is_main else None)
        saved, passed_over = resume.find_start(config, resume_from, phases)
        plan = make_plan(config, source, processes=peers.count, phases=phases)
        run = Run(plan, peers, signals, phases)
        for line in passed_over:
            run.say(f"warning: {line}")
        asked = config.adapter.kernels
        run.say(
            f"device {peers.device}, {peers.count} process(es); kernels: {run.kernels.name}"
            + (" (adapter.kernels = 'auto')" if asked == "auto" else "")
        )
        run.say(describe(plan, sizes=False))
        run.open_model()
        run.read_checkpoint(saved)
        run.encode_data()
        run.build_adapter()
        run.build_step()
        run.open_output()
        # Off since the process started (cli.py).
        gc.enable()
        with run.exclusive:
            run.loop()
            if run.finished:
                signals.promise = "stopping; the last step is saved"
                try:
                    run.finish()
                except Interrupted as error:
                    raise Interrupted(
                        error.signum, "after the last step, which is saved; adapter files or the report may be missing"
                    ) from None


def check_device(config: Config) -> torch.device:
    """The device that this process of a run would have. config: as `resolve` gives.

    Sets up torch for it. Raises UserError where this machine lacks what the config asks for.
    """
    if config.run.deterministic:
        precision.be_deterministic()
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = 'cuda', but no CUDA device is visible; check nvidia-smi, or use 'auto'")
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    # As accelerate gives them out: not the first for all.
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    precision.prepare_device(device, {component.compute for component in config.model.components.values()})
    chosen = kernels.choose(config.adapter.kernels, device)
    precision.check_scaled_matmul(config.precision.matmul, chosen, device)
    return device


def start_processes(config: Config) -> Processes:
    """The processes of this run, on the devices that the config asks for."""
    return processes.start(check_device(config))


def make_folder(folder: Path, key: str) -> None:
    """Raises UserError where it cannot be made; a full or broken disk stays an OSError."""
    try:
        files.make_folder(folder)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"{key} = {str(folder)!r} cannot be made: {error.strerror}; give another folder") from error


def remove_leftovers(output_dir: Path) -> None:
    """Delete temporary files of a process that was killed while writing here; the cache and the store mind their own."""
    for pattern in (".*.tmp", "adapters/.*.tmp"):
        files.remove_leftovers(output_dir.glob(pattern))
    for path in (output_dir / "samples").glob(".step-????????.tmp"):
        shutil.rmtree(path)


# What is said of a stop once there is a step to keep.
SAVED = "stopping; a checkpoint is written"


class Run:
    """One run's objects, built in order by the methods below.

    pieces: what a checkpoint is made of, by name (checkpoint/state.py); each is entered where it is built.
    """

    def __init__(self, plan: Plan, processes: Processes, signals: Signals, phases: Phases = QUIET) -> None:
        self.plan, self.config, self.family = plan, plan.config, plan.family
        self.phases = phases
        self.processes, self.signals = processes, signals
        self.device: torch.device = processes.device
        self.kernels = kernels.choose(plan.config.adapter.kernels, self.device)
        self.output_dir = Path(plan.config.run.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"
        self.source = plan.source
        self.finished = False
        self.exclusive = ExitStack()  # what this process holds alone, until the run ends
        self.pending: Exception | None = None
        self.storage: dict[str, quantization.Stored] = {}
        self.pieces: dict[str, state.Provider] = {"config": resume.pin_config(self.config)}

    def say(self, line: str) -> None:
        if self.processes.is_main:
            write(line)

    # --- output -------------------------------------------------------------------------------------------------------

    def open_model(self) -> None:
        """Fetch a hub id's weights, of which only configs are here so far; tokenizers; what they say of the captions."""
        if self.source.repository is not None:
            with self.processes.main_first():
                self.source = self.source.fetch(phases=self.phases)
            for component in self.plan.components.values():
                check_files(self.source, component)
                check_storage(self.source, component)
            check_objective(self.config, self.source, self.plan.objective)
        config, plan = self.config, self.plan
        self.model = Model(
            modules={},
            configs={c.name: self.source.config(c.name) for c in self.family.components},
            tokenizers=load_tokenizers(self.family, self.source),
            scheduler=self.source.scheduler,
            compute={name: component.compute for name, component in plan.components.items()},
            device=self.device,
            options={
                "objective": plan.objective,
                "guidance": config.objective.guidance,
                "text_length": config.data.text_length,
            },
        )
        self.report_captions([photo for photo, _ in plan.photos])

    def read_checkpoint(self, saved: state.Saved | None) -> None:
        """Where the run stands: at the checkpoint to go on from, or at its beginning."""
        # A date for reproducible files: https://reproducible-builds.org/specs/source-date-epoch/
        clock = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
        self.progress = state.Progress(
            step=0, images=0, non_finite=0, total_steps=total_updates(self.plan),
            started=datetime.fromtimestamp(clock, UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        self.pieces |= {
            "progress": self.progress,
            "data": resume.pin_data(
                digests=sampler.fingerprint(self.plan.photos),
                samples=len(self.plan.photos),
                micro_batches=self.config.step.accumulation * self.plan.processes,
            ),
            "environment": resume.pin_environment(
                self.processes, kernels=self.kernels.name, deterministic=self.config.run.deterministic, say=self.say
            ),
        }
        self.saved, self.resumed = saved, saved.folder if saved else None
        if saved is not None:
            saved.restore(**{name: self.pieces[name] for name in ("progress", "data", "environment")})
            if self.plan.max_steps < self.progress.step:
                raise UserError(
                    f"the run's length is {self.plan.max_steps} steps, but {saved.folder} is at step {self.progress.step}; "
                    "raise run.max_steps or run.epochs"
                )
            self.say(f"resuming {saved.folder} at step {self.progress.step}")
        if self.processes.is_main:
            make_folder(self.output_dir, "run.output_dir")

    def open_output(self) -> None:
        """Write the resolved config; drop what a killed start left behind.

        After all that can refuse the run: a refused one leaves the output as it was.
        """
        if self.processes.is_main:
            self.exclusive.enter_context(files.locked(self.output_dir))
            if self.phases.record is not None:
                self.phases.record.open(self.output_dir / PHASES)
            make_folder(self.checkpoints, "run.output_dir")
            remove_leftovers(self.output_dir)
            store.remove_leftovers(self.checkpoints)
            files.write_atomic(self.output_dir / "config.toml", [configs.dumps(self.config).encode()])
            # In this order no kill in between loses what is resumed or a line of the log: first a checkpoint from elsewhere
            # becomes the run's own, then what later steps left goes aside, then later checkpoints lose their names, by which
            # the next start would know of them, then the log loses their lines.
            own = self.checkpoints / store.folder_name(self.progress.step)
            if self.resumed is not None and self.resumed.resolve() != own.resolve():
                store.save(self.checkpoints, self.progress.step, state.pack(self.pieces))
            if store.steps(self.checkpoints)[-1:] > [self.progress.step]:
                aside = resume.set_aside_results(self.output_dir, name=self.config.run.name, after=self.progress.step)
                if aside is not None:
                    self.say(f"warning: samples, adapter files and the log of later steps are set aside in {aside}")
            for moved in store.set_aside(self.checkpoints, after=self.progress.step):
                self.say(f"warning: a later checkpoint is set aside as {moved}")
            metrics.cut(self.output_dir, self.progress.step)
            # Of steps that a killed start made after its last checkpoint, perhaps with other prompts: they are made again.
            # So are their adapter files, each in the place of the old one.
            for folder in (self.output_dir / "samples").glob("step-????????"):
                if folder.name > store.folder_name(self.progress.step) or self.progress.step == 0:
                    shutil.rmtree(folder)
        self.processes.wait(obey=True)

    # --- model and data -----------------------------------------------------------------------------------------------

    def encode_data(self) -> None:
        """Fill the caches of latents and text; load an encoder only for what is missing, and let it go again."""
        config, plan = self.config, self.plan
        cache_dir = Path(config.data.cache_dir or self.output_dir / "cache")
        make_folder(cache_dir, "data.cache_dir")
        self.cache = caches.Cache(cache_dir)
        self.digests = FileDigests(cache_dir / "digests.json", self.phases)
        vae = next(c.name for c in self.family.components if c.role == "vae")
        cached = (vae, *(self.family.text_encoders if plan.cache_text else ()))
        self.pieces["model"] = resume.pin_model(
            self.source.contents(cached, self.digests.of), cached=cached, snapshots=self.source.snapshots
        )
        if self.saved is not None:
            self.saved.restore(model=self.pieces["model"])
        latent_fingerprint = self.fingerprint(vae)
        text_fingerprint = (
            " ".join(
                [*map(self.fingerprint, self.family.text_encoders), self.source.tokenizer_fingerprint]
                + [str(self.family.count_tokens(self.model, ""))]
            )
            if plan.cache_text
            else None
        )
        self.text_fingerprint = text_fingerprint
        photos = [photo for photo, _ in plan.photos]
        with self.processes.main_first():
            made = caches.fill_latents(
                self.cache, plan.photos, fingerprint=latent_fingerprint, flip=config.data.flip,
                encode=lambda pixels: self.encode_images(vae, pixels), on_non_finite=self.not_finite_entry,
                phases=self.phases,
            )  # fmt: skip
            texts = 0
            if text_fingerprint is not None:
                prompts = [p for request in plan.requests for p in (request.prompt, request.negative)]
                for some, on_non_finite in (
                    ([photo.caption for photo in photos], self.not_finite_entry),
                    (
                        prompts,
                        lambda what: self.say(f"warning: {what} are not finite; samples of that prompt will be black"),
                    ),
                ):
                    texts += caches.fill_text(
                        self.cache, some, fingerprint=text_fingerprint, encode=self.encode_prompts,
                        on_non_finite=on_non_finite, phases=self.phases,
                    )  # fmt: skip
        self.say(f"cache: {made} latents and {texts} texts encoded, the rest was there")
        done = [*(self.family.text_encoders if plan.cache_text else ()), *(() if plan.requests else (vae,))]
        if [name for name in done if self.model.modules.pop(name, None) is not None]:
            gc.collect()
        self.reader = loader.Reader(
            plan.photos, self.cache, seed=config.run.seed, flip=config.data.flip,
            caption_dropout=config.data.caption_dropout, latent_fingerprint=latent_fingerprint,
            text_fingerprint=text_fingerprint,
        )  # fmt: skip

    def not_finite_entry(self, what: str) -> None:
        """The policy for an encoding that is not finite."""
        message = f"{what} are not finite; look at the file and at the encoder's compute dtype"
        if self.config.step.non_finite == "stop":
            raise NonFiniteError(f"{message}, or leave out every update it is in with step.non_finite = 'skip'")
        self.say(f"warning: {message}; every update it is in will be skipped")

    def fingerprint(self, name: str) -> str:
        """Of an encoder, for the cache of what it encodes: its files, and whatever changes its numbers."""
        component = self.plan.components[name]
        parts = [
            self.source.fingerprint(name, self.digests.of),
            component.format.name,
            component.compute,
            component.keep,
        ]
        if component.format.quantised:
            parts += [quantization.library(component.format), self.device.type]
        return ":".join(map(str, parts))

    def report_captions(self, photos) -> None:
        def counter(tokenizer: str):
            return lambda caption: self.family.count_tokens(self.model, caption)[tokenizer][0]

        limits = self.family.count_tokens(self.model, "")
        report = captions.report(photos, encoders={name: (counter(name), limit) for name, (_, limit) in limits.items()})
        if self.config.data.strict_captions:
            captions.refuse_truncated(report)
        self.say(str(report))

    def load(self, name: str) -> torch.nn.Module:
        if name not in self.model.modules:
            component = self.plan.components[name]
            held = self.source.held(name)
            converted = self.converted_weights(name) if component.format.quantised and not held else None
            module = self.model.modules[name] = self.source.load(
                name, swap=partial(component.swap, held=held, kernels=self.kernels), device=self.device,
                fill=partial(converted.fill, phases=self.phases) if converted else lambda module: (), phases=self.phases,
            )  # fmt: skip
            if converted is not None and self.processes.is_main:
                self.say(f"{name}: {converted.found} of {converted.wanted} converted weights were in model.cache_dir")
                converted.store(module, phases=self.phases)
            held_as = held_storage(self.source, name)
            if held_as and not component.format.quantised:
                self.say(f"{name}: held as {held_as[0]} in the model's file, widened to {component.format.name}")
            stored = quantization.stored_as(module)
            if stored is not None:
                self.storage[name] = stored
                self.say(f"{name}: {stored}")
            if component.scaled_matmul:
                self.say(f"{name}: {quantization.scaled_layers(module)}")
        return self.model.modules[name]

    def converted_weights(self, name: str) -> quantization.ConvertedWeights | None:
        """The cache of a component's converted weights, where the config asks for one."""
        folder = self.config.model.cache_dir
        if folder is None:
            return None
        make_folder(Path(folder), "model.cache_dir")
        return quantization.ConvertedWeights(
            Path(folder), fingerprint=self.source.fingerprint(name, self.digests.of),
            library=quantization.library(self.plan.components[name].format),
        )  # fmt: skip

    @torch.no_grad()
    def encode_images(self, vae: str, pixels: torch.Tensor) -> torch.Tensor:
        self.load(vae)
        return self.family.encode_images(self.model, pixels)

    @torch.no_grad()
    def encode_prompts(self, texts: list[str]) -> Conditioning:
        for name in self.family.text_encoders:
            self.load(name)
        return self.family.encode_prompts(self.model, texts)

    def conditioning(self, text: str) -> Conditioning:
        """Of one validation prompt: from the cache, or live where a text encoder is trained."""
        if self.text_fingerprint is None:
            return self.family.encode_prompts(self.model, [text])
        key = caches.text_key(text, fingerprint=self.text_fingerprint)
        return Conditioning.from_tensors(self.cache.get(key)).to(self.device)

    # --- adapter, optimizer, step -------------------------------------------------------------------------------------

    def build_adapter(self) -> None:
        config, plan = self.config, self.plan
        self.load(self.family.denoiser)
        if not plan.cache_text:
            for name in self.family.text_encoders:
                self.load(name)
        if plan.requests:
            self.load(next(c.name for c in self.family.components if c.role == "vae"))
        # The VAE is left out: it is loaded only to draw samples.
        trained = (self.family.denoiser, *(() if plan.cache_text else self.family.text_encoders))
        record = quantization.record(((name, self.model.modules[name]) for name in trained), self.phases)
        self.pieces["quantization"] = resume.pin_quantization(record, snapshots=self.source.snapshots)
        with self.phases("injecting the adapter", len(plan.targets), "layer") as phase:
            self.adapter: Adapter = inject(
                {name: self.model.modules[name] for name in plan.adapted},
                plan.targets,
                linear_class=FrozenLinear,
                conv_class=FrozenConv2d,
                dora=config.adapter.type == "dora",
                rslora=config.adapter.rslora,
                dropout=config.adapter.dropout,
                seed=config.run.seed,
                advance=phase.advance,
            )
        for module in self.model.modules.values():
            module.eval()
        links = {name: self.family.module_links(name, self.model.configs[name]) for name in plan.adapted}
        self.fused = {name: export.fused_modules(component_links) for name, component_links in links.items()}
        held = {name: kind[0] for name in plan.adapted if (kind := held_storage(self.source, name))}
        if self.adapter.dora and held:
            self.say(f"the DoRA's files are made for {norms.made_for(held)}")
        beside = {name: self.base_layer(name) for name in export.fused_with(self.adapter, self.fused)}
        read = len(beside) if self.adapter.dora else 0
        with self.phases("norms of the layers beside the adapted ones", read, "layer") as phase:
            self.pieces["norms"] = self.norms = norms.Norms(self.adapter, beside, held, phase.advance)
        for name in plan.adapted:
            self.adapter.share_inputs(name, self.family.shared_inputs.get(name, ()))
        denoiser = self.family.denoiser
        blocks = find_blocks(self.model.modules[denoiser], self.family.blocks)
        self.adapter.refresh_before(
            {name: self.model.modules[name] for name in plan.adapted}
            | {f"{denoiser}.{name}": block for name, block in blocks.items()}
        )
        recomputed = checkpoint_blocks(blocks, config.memory.gradient_checkpointing, self.family.unread)
        if recomputed:
            self.say(f"gradient checkpointing: {recomputed} blocks are recomputed in the backward pass")

    def build_step(self) -> None:
        config, plan = self.config, self.plan
        groups = self.adapter.parameter_groups(lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay)
        self.optimizer = optim.build_optimizer(
            config.optimizer.name, groups, betas=config.optimizer.betas, eps=config.optimizer.eps,
            min_8bit_size=config.optimizer.min_8bit_size,
        )  # fmt: skip
        self.schedule = optim.build_schedule(
            config.schedule.name, self.optimizer, total_steps=self.progress.total_steps,
            warmup=optim.warmup_steps(config.schedule.warmup, self.progress.total_steps),
        )  # fmt: skip
        self.scaler = precision.loss_scaler(
            plan.scales_loss, self.device, initial_scale=config.precision.loss_scale,
            growth_interval=config.precision.loss_scale_growth_interval,
        )  # fmt: skip
        self.pieces |= {
            "adapter": self.adapter,
            "optimizer": optim.OptimizerState(self.optimizer),
            "schedule": optim.ScheduleState(self.schedule),
            "scaler": precision.ScalerState(self.scaler),
        }
        if self.saved is not None:
            names = ("quantization", "norms", "adapter", "optimizer", "schedule", "scaler")
            self.saved.restore(**{name: self.pieces[name] for name in names})
            self.saved.finish()
            self.saved = None
        if self.adapter.dora:
            # They would be made in the first step, which a stop has to wait for.
            with self.phases("norms of the adapted layers", len(self.adapter.layers), "layer") as phase:
                self.adapter.refresh_norms(phase.advance)

        def losses(batch):
            return batch_losses(
                batch, objective=plan.objective, image_tokens=self.family.image_tokens, seed=config.run.seed,
                predict=lambda *inputs: self.family.predict(self.model, *inputs), device=self.device,
                encode=lambda texts: self.family.encode_prompts(self.model, texts),
            )  # fmt: skip

        dropout = self.adapter.dropout(config.run.seed)
        self.step = Step(
            losses=losses,
            optimizer=self.optimizer,
            schedule=self.schedule,
            scaler=self.scaler,
            max_grad_norm=config.step.max_grad_norm,
            after_update=self.adapter.mark_stale,
            sum=self.processes.sum,
            # By the micro-batch's place in the update, whichever process has it.
            dropout=lambda step, index: dropout(step, index * self.processes.count + self.processes.rank),
        )

    # --- loop ---------------------------------------------------------------------------------------------------------

    def updates(self) -> Iterator[list[sampler.MicroBatch]]:
        """Every update's micro-batches, from the present step on, over the epochs."""
        config, plan = self.config, self.plan
        epoch, skip = sampler.update_at(self.progress.step, steps_per_epoch=plan.steps_per_epoch)
        while True:
            batches = sampler.epoch_batches(
                plan.photos, seed=config.run.seed, epoch=epoch, batch_size=config.data.batch_size
            )
            groups = sampler.updates(batches, accumulation=config.step.accumulation, processes=plan.processes)
            yield from groups[skip:]
            epoch, skip = epoch + 1, 0

    def loop(self) -> None:
        """Steps until the end, `stop_after` or a signal; each ends with its log line, samples, export, checkpoint."""
        config, progress, last = self.config, self.progress, self.plan.max_steps
        stop_after = min(config.run.stop_after or last, last)
        self.log = metrics.Metrics(
            self.output_dir, open_tracker=self.open_tracker if config.logging.tensorboard else None, total_steps=last,
            initial_step=progress.step, enabled=self.processes.is_main,
            # It is shown, no more: the loop looks at signals between two steps, and the log itself tells what they took.
            phases=Phases(show=self.phases.show),
        )  # fmt: skip
        self.saver = Saver(
            self.checkpoints, keep_last=config.checkpoint.keep_last, background=config.checkpoint.background,
            before=self.log.sync,
        )  # fmt: skip
        mine = (
            sampler.share(update, processes=self.plan.processes, rank=self.processes.rank) for update in self.updates()
        )
        batches_of = loader.iterate(mine, self.reader, num_workers=config.data.num_workers)
        self.saver.step = progress.step
        self.signals.promise = SAVED
        at_once = False
        try:
            self.after_step(again=True)  # step 0, or what a stop cut off
            for update in self.updates():
                if progress.step >= stop_after:
                    break
                batches = self.read(batches_of)
                self.agree()
                self.one_step(update, batches)
                if _due(config.checkpoint.every_steps, progress.step):
                    self.save()
                if progress.step in (last, stop_after):
                    self.save(final=True)
                self.after_step()
            self.agree()
            self.finished = progress.step >= last
            if not self.finished:
                self.log.write(f"stopped after step {progress.step} as asked; go on with --resume_from auto")
        except (Interrupted, NonFiniteError, OutOfMemory, DataError) as error:
            # Between two steps, or a step that changed nothing: what was trained is whole, and kept. All processes are here,
            # and leave together: whoever ended first would have the launcher stop the one that saves.
            self.save(final=True)
            if isinstance(error, Interrupted):
                where = (f"after step {progress.step}, which is saved",) if progress.step else ()
                raise Interrupted(error.signum, *where) from None
            raise
        except KeyboardInterrupt:
            at_once = True
            raise
        finally:
            batches_of.close()
            if not at_once and (failure := self.saver.join()) is not None:
                self.say(f"warning: a checkpoint could not be written: {failure}")
            self.log.close()

    def read(self, batches_of: Iterator[list[Batch]]) -> list[Batch]:
        """The next update's micro-batches; what stands in the way is told in `agree`, to all processes."""
        try:
            return next(batches_of)
        except DataError as error:
            self.pending = error
            return []

    def agree(self) -> None:
        """Do between two steps what any process was asked to do or met with, in all of them at the same step.

        Raises Interrupted for a signal, OSError for a checkpoint that could not be written, what is pending. Only what was
        agreed counts: a signal that comes in the meantime is told to the others before the next step.
        """
        kinds = (None, DataError, OutOfMemory)
        signum, save, failed, kind = self.processes.largest(
            self.signals.stop or 0, int(self.signals.save), int(self.saver.failed), kinds.index(type(self.pending))
            if self.pending else 0,
        )  # fmt: skip
        if failed:
            with self.failure_policy():
                self.saver.wait()
                if not self.processes.is_main:
                    raise OSError(errno.EIO, "the main process could not write a checkpoint")
        if kind:
            raise self.pending or kinds[kind]("another process could not go on; its message says why")
        if signum:
            raise Interrupted(signum)
        if save:
            self.signals.save = False
            saved = self.saver.step == self.progress.step
            self.save()
            self.log.write(f"SIGUSR1: step {self.progress.step} is {'saved already' if saved else 'being saved'}")

    def one_step(self, update, batches) -> None:
        progress = self.progress
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # `peak_bytes` is this step's
        occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
        self.signals.promise = f"stopping after this step; {SAVED.removeprefix('stopping; ')}"
        try:
            result = self.step.run(progress.step + 1, batches, occurrences)
        except OutOfMemory as error:
            denoiser = self.family.denoiser
            raise OutOfMemory(f"{error}\n" + what_would_fit(
                recomputed=self.config.memory.gradient_checkpointing, batch_size=self.config.data.batch_size,
                resolution=self.config.data.resolution, rank=self.config.adapter.rank, denoiser=denoiser,
                dtype=self.plan.components[denoiser].format.name,
            )) from None  # fmt: skip
        finally:
            self.signals.promise = SAVED
        if result.refused:
            self.not_finite(f"step {progress.step + 1}: {result.refused}; the adapter is unchanged")
            progress.non_finite += 1
        progress.step += 1
        progress.images += len(occurrences)
        seconds = time.perf_counter() - start
        entry = {
            "step": progress.step,
            "epoch": occurrences[0].epoch + 1,
            "loss": result.loss,
            "lr": result.lr[0],
            "grad_norm": result.grad_norm,
            "images": progress.images,
            "skipped": not result.updated,
            "seconds": round(seconds, 6),
            "images_per_second": round(len(occurrences) / seconds, 3),
            "time": round(time.time(), 3),
        }
        if self.scaler.is_enabled():
            entry["loss_scale"] = result.loss_scale
        if result.refused:
            entry["non_finite"] = result.refused
        if self.device.type == "cuda":
            entry["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self.log.log(entry)

    def not_finite(self, what: str) -> None:
        """The policy for a value that is not finite: raises NonFiniteError, or says that the update is skipped."""
        policy, limit, done = self.config.step.non_finite, self.config.step.max_skipped, self.progress.non_finite
        if policy == "stop":
            raise NonFiniteError(
                f"{what}\nlook at these samples and at the compute dtypes; with step.non_finite = 'skip' and "
                "--resume_from auto the run goes on without such updates"
            )
        if done >= limit:
            raise NonFiniteError(
                f"{what}\n{done} updates were skipped before it, and step.max_skipped = {limit} allows no more"
            )
        self.log.write(f"warning: {what}; the update is skipped ({done + 1} of at most {limit})")

    def open_tracker(self):
        """TensorBoard's writer; what a killed run logged beyond the checkpoint is purged.

        Not accelerate's tracker: that one flushes after every step, which costs a small model two milliseconds of it.
        """
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.output_dir / "tensorboard"), purge_step=self.progress.step)

    # --- samples, checkpoints, adapter files --------------------------------------------------------------------------

    def after_step(self, *, again: bool = False) -> None:
        """Export and draw what is due at the present step. again: as far as it is not there yet."""
        config, step = self.config, self.progress.step
        done = step == self.plan.max_steps
        name = f"{config.run.name}-{step:08d}"
        names = export.file_names(name, config.export.formats)
        if not done and _due(config.export.every_steps, step):
            if not (again and all((self.output_dir / "adapters" / file).exists() for file in names.values())):
                with suppress(Interrupted):  # the next start makes them; all processes stop together, in `agree`
                    self.export(name)
            self.processes.wait()
        due = step == 0 or done or _due(config.validation.every_steps, step)
        if self.plan.requests and due:
            there = again and validation.sample_folder(self.output_dir, step).exists()
            if self.processes.is_main and not there:
                self.draw_samples()
            self.processes.wait()

    def draw_samples(self) -> None:
        """Of the present step. What stands in the way is told in `agree`: of several processes none may stop on its own."""

        def sample(request):
            # Around the encoding too: an adapted text encoder has a strength as well.
            with self.adapter.at_strength(request.strength):
                conditioning, negative = self.conditioning(request.prompt), self.conditioning(request.negative)
                return self.family.sample(self.model, request, conditioning, negative)

        denoiser = self.model.modules[self.family.denoiser]
        folder = validation.sample_folder(self.output_dir, self.progress.step)
        evaluations = sum(request.steps for request in self.plan.requests)
        try:
            # An image may take longer than a spot machine gives.
            with (
                self.phases("drawing samples", evaluations, "evaluation") as phase, phase.between_modules(),
                denoiser.register_forward_hook(lambda *_: phase.advance()),
            ):  # fmt: skip
                validation.draw_samples(self.plan.requests, sample=sample, folder=folder)
        except Interrupted:
            pass  # the next start draws the samples
        except DataError as error:
            self.pending = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.pending = OutOfMemory(
                f"step {self.progress.step}: out of memory while samples were drawn\n{error}\ngo on with --resume_from auto "
                "and smaller samples (width, height of validation.samples), or with validation.every_steps = 0"
            )

    def save(self, *, final: bool = False) -> None:
        """Hand the present state to the saver, unless it has it. final: wait until it is on the disk.

        Raises NonFiniteError, in all processes, where the state is not worth keeping; the checkpoints before it stand.
        """
        step, saver = self.progress.step, self.saver
        if step > saver.step and not self.pieces["optimizer"].is_finite():
            raise NonFiniteError(
                f"step {step}: the adapter or the optimizer's state is not finite after the update; it is not saved, and the "
                f"checkpoints before it stand\nstart a new run with a lower optimizer.lr than {self.config.optimizer.lr:g}"
            )
        if self.processes.is_main:
            # Seen to its end whatever signal comes. Beside the training it is not waited for, and shows nothing.
            with self.phases(f"saving step {step}", unit="B", obey=False) as phase:
                if final and (failure := saver.join(phase.advance)) is not None:
                    self.log.write(f"warning: an earlier checkpoint could not be written ({failure})")
                if step > saver.step:
                    saver.save(step, state.pack(self.pieces), phase.advance)
                if final:
                    with self.failure_policy(final=True):
                        saver.wait(phase.advance)
        if final or not self.config.checkpoint.background:
            self.processes.wait()

    @contextmanager
    def failure_policy(self, *, final: bool = False) -> Iterator[None]:
        """checkpoint.on_failure for a save that met with an OSError. final: where the step itself is saved, all is well."""
        try:
            yield
        except OSError as error:
            if self.saver.step < self.progress.step if final else self.config.checkpoint.on_failure == "stop":
                raise
            self.log.write(
                f"warning: a checkpoint could not be written, or older ones not deleted ({error}); training goes on"
            )

    def export(self, stem: str) -> dict[str, Path]:
        """Write the adapter's files; returns them by format."""
        if not self.processes.is_main:
            return {}
        config, size = self.config, self.config.data.resolution
        tags: dict[str, int] = {}
        for photo, _ in self.plan.photos:
            tags[photo.caption] = tags.get(photo.caption, 0) + photo.repeats
        prediction = getattr(self.plan.objective, "prediction", "velocity")
        about = export.About(
            name=config.run.name, started=self.progress.started, step=self.progress.step,
            epoch=max(0, self.progress.step - 1) // self.plan.steps_per_epoch + 1, learning_rate=config.optimizer.lr,
            train_images=sum(photo.repeats for photo, _ in self.plan.photos), resolution=f"{size}x{size}",
            tag_frequency=tags, trigger_phrase=config.export.trigger_phrase, seed=config.run.seed,
            dora_base=norms.made_for(self.norms.held),
            family=self.family.metadata(self.model.configs[self.family.denoiser], prediction),
        )  # fmt: skip
        layers = len(self.adapter.layers)
        with self.phases("exporting", layers * (len(config.export.formats) + self.adapter.dora), "layer") as phase:
            return export.write_files(
                self.adapter, self.output_dir / "adapters", stem, about, formats=config.export.formats,
                fused=self.fused, prefixes=self.family.kohya_prefix,
                rows=lambda name: self.base_layer(name).weight_shape[0], norms=self.norms.now(phase.advance),
                dora_scale=config.export.dora_scale, advance=phase.advance,
            )  # fmt: skip

    def base_layer(self, name: str):
        component, _, layer = name.partition(".")
        module = self.model.modules[component].get_submodule(layer)
        return module.get_base_layer() if hasattr(module, "get_base_layer") else module

    def finish(self) -> None:
        """The adapter files, the "did it take?" table and the report."""
        if not self.processes.is_main:
            return
        written = self.export(self.config.run.name)
        moved = outcome.weight_change(self.adapter, self.phases)
        diverged = outcome.too_far(moved)
        table = outcome.change_table(moved, dora=self.adapter.dora)
        sections = {"Did it take?": table | ({"notes": [f"Warning: {diverged}."]} if diverged else {})}
        rows = []
        for before, after in validation.pairs(self.output_dir, self.progress.step):
            rows.append([f"sample {after.stem} moved by (relative L2 of pixels)",
                         f"{validation.image_distance(before, after):.3%}"])  # fmt: skip
        if "diffusers" in written:
            with self.phases("reading the adapter file back", written["diffusers"].stat().st_size, "B") as phase:
                live = export.diffusers_tensors(self.adapter, self.norms.now(), lambda count: phase.check())
                read = outcome.read_back(written["diffusers"], live, phase.advance)
            magnitudes = " (magnitudes: as made for the file's base)" if self.adapter.dora else ""
            rows.append([f"exported file, read back, against the live adapter{magnitudes}", read])
        if self.progress.non_finite:
            rows.append(["updates skipped because a value was not finite (see metrics.jsonl)",
                         f"{self.progress.non_finite} of {self.progress.step}"])  # fmt: skip
        sections["Effect"] = {"columns": ["what", "value"], "rows": rows}
        if self.storage:
            sections["Frozen weights"] = {
                "columns": ["component", *quantization.REPORT_COLUMNS],
                "rows": [[name, *stored.row()] for name, stored in self.storage.items()],
            }
        if diverged:
            self.say(f"warning: {diverged}")
        if outcome.did_nothing(self.adapter):
            self.say("warning: every B is zero: the adapter changes nothing; train longer or raise optimizer.lr")
        with self.phases("writing the report") as phase:
            report = write_report(self.output_dir, name=self.config.run.name, outcome=sections, check=phase.check)
        self.say(outcome.render(sections))
        for kind, path in written.items():
            self.say(f"adapter ({kind}): {path}")
        for path in sorted(validation.sample_folder(self.output_dir, self.progress.step).glob("*.png")):
            self.say(f"sample: {path}")
        self.say(f"report: {report}")


def _due(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
