"""Draws images of a model with adapter files, as a run draws its samples. Several LoRAs become one LoRA with the sum of
their ranks; other cases (a DoRA beside others, magnitudes of the input axis) need the merged model. The adapters of a run's
steps are compared this way: is step 300 better than step 200?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.adapters import Adapter
from trainer.adapters.norms import Norms
from trainer.adapters.portable import Factors, Portable, derived
from trainer.artifacts import sampling
from trainer.artifacts.ports import Ports
from trainer.base.errors import UserError
from trainer.base.files import refuse_taken, write_atomic
from trainer.base.pictures import png, pngs, request_of
from trainer.base.progress import QUIET, Phases
from trainer.base.run_layout import Layout, step_of
from trainer.base.text import visible
from trainer.checkpoint.state import Pieces
from trainer.config import Config, with_values
from trainer.engine.assembly import build_adapter
from trainer.engine.components import Components
from trainer.engine.encoding import conditionings
from trainer.models.base import SampleRequest
from trainer.models.loading import ModelSource
from trainer.plan import storage
from trainer.plan.data_sources import resolutions
from trainer.plan.requirements import family_options, unread_by_model
from trainer.plan.run_plan import ModelPlan, fetched, find_objective
from trainer.plan.samples import check_references, check_sizes, references
from trainer.resume.initial_adapter import Start
from trainer.run.session import Session
from workbench.adapter_files.opening import OpenedAdapter, model_of, open_adapter
from workbench.hub import hub
from workbench.pages.before_after import scaled, table
from workbench.pages.rendering import embedded, render
from workbench.summary import prompts


@dataclass(frozen=True)
class CommandSample(SampleRequest):
    """A sample of the command line. model, adapters: as the command names them, for the PNG's text "request"."""

    model: str = ""
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """The images to draw: every prompt with every seed, with each title's adapters, at every strength. None: the value of the
    config's samples."""

    prompts: Sequence[str]
    negative: str = ""
    seeds: Sequence[int] = (0,)
    strengths: Sequence[float] = (1.0,)
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    references: Sequence[str] = ()
    cfg: float | None = None

    def requests(self, config: Config, adapters: Sequence[tuple[Path, float]]) -> list[CommandSample]:
        """The samples with these adapters, by prompt, then seed, then strength."""
        side = config.validation.resolution or max(resolutions(config.data.resolution))
        steps = self.steps or config.validation.steps
        pictures = {"references": tuple(self.references), "images": references(self.references, "--references")}
        with_ = tuple(path.name if strength == 1 else f"{path.name}:{strength:g}" for path, strength in adapters)
        return [
            CommandSample(
                visible(prompt), visible(self.negative), self.width or side, self.height or side, seed, steps, self.guidance,
                strength,
                **pictures, cfg=self.cfg, model=config.model.path, adapters=with_,
            )
            for prompt in self.prompts for seed in self.seeds for strength in self.strengths
        ]  # fmt: skip


def draw(
    config: Config,
    adapters: Mapping[str, Sequence[tuple[Path, float]]],
    drawing: Drawing,
    out: Path,
    *,
    grid: bool = False,
    phases: Phases = QUIET,
) -> list[Path]:
    """Write NN.png for every image to the new folder `out`, with its settings, and the contact sheet; returns the files.

    config: of the model and its storage; its data and training are not read. adapters: by title, (file, strength) of the
    adapters that are applied together; all titles need adapters of one form. Raises UserError for what cannot be drawn.
    """
    refuse_taken(out, place="folder with --out")
    session = Session.open(config, only="measure", ports=Ports(hub=hub))
    config, source = session.config, session.source
    _refuse_unread(drawing, source)
    requests = [request for files in adapters.values() for request in drawing.requests(config, files)]
    check_sizes(requests, source.family.images.size_multiple)
    model = model_of(source, config.model.path)
    read = [[(open_adapter(path, [model]), strength) for path, strength in files] for files in adapters.values()]
    by_files = dict(zip(dict.fromkeys(request.adapters for request in requests), map(as_one, read), strict=True))
    first, (portable, _) = next(iter(by_files.items()))
    for names, (other, _) in by_files.items():
        if names != first and (portable is None or other is None or other.targets != portable.targets):
            raise UserError(f"{names[0]} adapts other layers, or by another rank, than {first[0]}; draw with each by itself")
    kind, rslora = (portable.kind.name, portable.rslora) if portable else ("lora", False)
    values = {"adapter.type": kind, "adapter.rslora": rslora, "adapter.dropout": 0.0, "adapter.under": None}
    config = with_values(config, values)
    plan, peers = _plan(config, source, portable), session.processes
    lines = dict.fromkeys(line for files in read for opened, _ in files for line in opened.read.account.lines())
    for line in (*lines, *(f"warning: {doubt}" for doubt in prompts.unread((*drawing.prompts, drawing.negative)))):
        peers.say(line)
    plan = fetched(plan, peers, phases)
    components = session.components(plan, phases)
    texts = conditionings(components, [text for request in requests for text in (request.prompt, request.negative)])
    loaded = _loaded(config, components, portable)
    applied = first  # the adapters in the layers

    def sample(request: CommandSample):
        nonlocal applied
        if loaded is None:
            return plan.family.images.draw(components.model, request, texts(request.prompt), texts(request.negative))
        adapter, norms = loaded
        portable, strength = by_files[request.adapters]
        if request.adapters != applied:
            applied = request.adapters
            Start("the adapter", "", portable).apply(adapter, norms, lambda line: None)
        with adapter.at_strength(request.strength * strength):
            return plan.family.images.draw(components.model, request, texts(request.prompt), texts(request.negative))

    with (
        phases("drawing", sum(request.steps for request in requests), "evaluation") as phase,
        phase.between_modules(),
        components.load(plan.family.denoiser).register_forward_hook(lambda *_: phase.advance()),
    ):
        sampling.draw_samples(requests, sample=sample, folder=out)
    files = sorted(out.glob("*.png"))
    return [*files, _sheet(out, drawing, [*adapters], files)] if grid else files


def _refuse_unread(drawing: Drawing, source: ModelSource) -> None:
    reads, name = set(source.family.reads) - unread_by_model(source).keys(), source.family.name
    if drawing.negative and "validation.samples.*.negative" not in reads:
        raise UserError(f"--negative {drawing.negative!r}: {name} has no negative prompt; leave it out")
    takes_cfg = "validation.samples.*.cfg" in reads
    if drawing.cfg is not None and not (takes_cfg and drawing.cfg > 1):
        raise UserError(f"--cfg {drawing.cfg:g}: it is above 1, of a Flux whose distillation was undone; leave it out")
    if drawing.negative and takes_cfg and drawing.cfg is None:
        raise UserError(f"--negative {drawing.negative!r} has no effect on {name} without --cfg; leave it out, or give both")
    if drawing.references and "validation.samples.*.references" not in reads:
        names = " ".join(drawing.references)
        raise UserError(f"--references {names}: this model of {name} is shown no images; leave it out")
    check_references([("--references", len(drawing.references))], source.family.images)


def as_one(opened: Sequence[tuple[OpenedAdapter, float]]) -> tuple[Portable | None, float]:
    """(the adapters as one, or None; its strength). opened: (adapter, strength). Raises UserError if they cannot be one."""
    for each, _ in opened:
        for name, factors in each.portable.layers.items():
            if factors.magnitude is not None and (len(opened) > 1 or factors.axis == "input"):
                kind = "a DoRA beside others" if len(opened) > 1 else f"a DoRA of the input axis ({name})"
                remedy = "merge it into the model (python scripts/adapter.py merge), and draw with that"
                raise UserError(f"{each.path}: {kind} is not drawn from its file; {remedy}")
    if len(opened) == 1 and not opened[0][0].portable.kind.form:
        return opened[0][0].portable, opened[0][1]
    if not opened:
        return None, 1.0
    layers: dict[str, list[tuple[Factors, float]]] = {}
    for each, strength in opened:
        for name, factors in each.portable.layers.items():
            layers.setdefault(name, []).append((factors, strength))
    return Portable({name: _summed(parts) for name, parts in layers.items()}), 1.0


def _summed(parts: Sequence[tuple[Factors, float]]) -> Factors:
    """One LoRA that is the sum of all, each at its strength: of scale 1, with the scales in B."""
    first, rank = parts[0][0], sum(factors.rank for factors, _ in parts)

    def a(_: torch.Tensor) -> torch.Tensor:
        return torch.cat([factors.a.make().float() for factors, _ in parts])

    def b(_: torch.Tensor) -> torch.Tensor:
        return torch.cat([factors.b.make().float() * (strength * factors.scaling) for factors, strength in parts], 1)

    shape_a, shape_b = (rank, *first.a.shape[1:]), (first.rows, rank, *first.b.shape[2:])
    wide_a, wide_b = (replace(tensor, dtype=torch.float32) for tensor in (first.a, first.b))
    return Factors(derived(wide_a, shape_a, a), derived(wide_b, shape_b, b), float(rank))


def _plan(config: Config, source: ModelSource, portable: Portable | None) -> ModelPlan:
    family, options = source.family, family_options(config, source.family)
    options |= {"allow_distilled": True} if "model.allow_distilled" in family.reads else {}  # nothing is trained
    targets = tuple(portable.targets) if portable else ()
    stored = storage.storages(config, family)
    source.check_tokenizers()
    for component in stored.values():
        storage.check(source, component)
    return ModelPlan(
        source=source,
        storage=stored,
        objective=find_objective(source, options),
        options=options,
        targets=targets,
        cache_text=not any(target.component in family.text_encoders for target in targets),
        converted=config.model.cache_dir,
        resident=storage.resident_blocks(config, source, {target.component for target in targets}),
    )


def _loaded(config: Config, components: Components, portable: Portable | None) -> tuple[Adapter, Norms] | None:
    """Load the modules, with the adapter in their layers; returns (adapter, norms), or None without an adapter."""
    plan, family = components.plan, components.family
    for name in (*plan.in_steps, family.vae):
        components.load(name)
    if portable is None:
        for module in components.model.modules.values():
            module.eval()
        denoiser = components.model.modules[family.denoiser]
        components.attention.give(denoiser, family.memory.attention, components.model.device, components.kernels)
        return None
    adapter, norms = build_adapter(config, components, Pieces(None))
    Start("the adapter", "", portable).apply(adapter, norms, lambda line: None)
    return adapter, norms


def _sheet(folder: Path, drawing: Drawing, titles: Sequence[str], files: Sequence[Path]) -> Path:
    """The contact sheet: a column for every strength, a row for every prompt and seed, and in it for every title."""
    from PIL import Image

    columns, seeds = len(drawing.strengths), [f"(seed {seed})" for _ in drawing.prompts for seed in drawing.seeds]
    rows = []
    for place, seed in enumerate(seeds):
        for count, title in enumerate(titles):
            start = (count * len(seeds) + place) * columns
            pictures = [Image.open(path) for path in files[start : start + columns]]
            text = f"{pictures[0].info['prompt']} {seed}"
            rows.append((f"{title}: {text}" if title else text, [scaled(picture) for picture in pictures]))
    path = folder / Layout(folder.parent).sheet.name
    write_atomic(path, [png(table([f"strength {strength:g}" for strength in drawing.strengths], rows))])
    return path


def step_files(layout: Layout, name: str, steps: Sequence[str]) -> dict[str, Path]:
    """The adapter files of the run `name`, by title. steps: numbers, or "all"; empty: the end's alone. Raises UserError for a
    step without a file."""
    files, numbers = layout.adapter_files(name), {int(step) for step in steps if step.isdecimal()}
    available = ", ".join(str(step) for step in files if step is not None) or "none"
    if odd := [step for step in steps if not step.isdecimal() and step != "all"]:
        raise UserError(f"--steps {odd[0]}: give all, or numbers of steps; {layout.adapters} has the files of {available}")
    if missing := numbers - {step for step in files if step is not None}:
        remedy = "export.every_steps or export.every_epochs writes some in a new run"
        raise UserError(f"--steps {min(missing)}: {layout.adapters} has no file of it, only of {available}; {remedy}")
    subset = {step: path for step, path in files.items() if "all" in steps or step in numbers or (step is None and not steps)}
    if not subset:
        raise UserError(f"{layout.adapters} has no adapter file of {name}; train first, or give FILE")
    return {"the end" if step is None else f"step {step:,}": path for step, path in subset.items()}


def prompts_of(config: Config, layout: Layout) -> tuple[str, ...]:
    """The prompts of a run's samples, from its config, else from the newest samples."""
    samples = config.validation
    if samples.prompts != "captions" and (samples.prompts or samples.samples):
        return tuple(dict.fromkeys((*samples.prompts, *(sample.prompt for sample in samples.samples))))
    steps = [step for path in layout.samples.glob("*") if (step := step_of(path.name)) is not None]
    files = pngs(layout.samples_of(max(steps))) if steps else ()
    return tuple(dict.fromkeys(str(request_of(file)["prompt"]) for file in files))


def show_in_report(layout: Layout) -> bool:
    """Put the grid into the run's report; returns whether there is one."""
    if not layout.report.exists():
        return False
    before, _, rest = layout.report.read_text(encoding="utf-8").partition('<div id="grid">')
    _, end, after = rest.partition("</div>")
    if not end:
        return False
    write_atomic(layout.report, [f"{before}{render('grid.html', sheet=embedded(layout.sheet)).strip()}{after}".encode()])
    return True
