"""Tools for adapter files.

    python scripts/adapter.py export outputs/bear/checkpoints/step-00000500 exported   # the files of any checkpoint
    python scripts/adapter.py show bear.safetensors --plot bear.png                    # what a file is
    python scripts/adapter.py convert bear.safetensors bear_kohya.safetensors --to kohya
    python scripts/adapter.py merge MODEL bear.safetensors:0.8 merged.safetensors --dtype fp16
    python scripts/adapter.py extract TUNED BASE lora.safetensors --rank 16            # the difference of two models
    python scripts/adapter.py compare A.safetensors B.safetensors
    python scripts/adapter.py resize bear.safetensors small.safetensors --rank 4
    python scripts/adapter.py average mean.safetensors A.safetensors B.safetensors --rank 8   # of several runs
    python scripts/adapter.py push outputs/bear/adapters --repo me/bear                # to the Hugging Face hub, as private

Files of diffusers, PEFT, kohya, LyCORIS, ComfyUI, OneTrainer and ai-toolkit are read, LoRA and DoRA, for SDXL, Flux and
FLUX.2 (docs/adapter_files.md, docs/average.md). --base names the model where weights are needed, and, but for
show, where a file is for another size than the published ones and does not lie where its run wrote it. Exit
status: 0 done; 2 for a file or an argument that cannot be used, with the reason on stderr; 4 for values that are not finite.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from trainer.base.console import write  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402

NOT_WRITTEN = (
    "not written: this DoRA file needs the norms of the averaged weights, which a checkpoint does not have. The run writes "
    "it (export.every_steps, and at its end)"
)


def export(chosen: argparse.Namespace) -> None:
    """Write NAME.safetensors and NAME_comfyui.safetensors of a checkpoint, as its run would, and those of the average that it
    keeps. Reads no weight of the model."""
    from trainer.adapters import sd_scripts
    from trainer.adapters.export import not_loaded_by_diffusers
    from trainer.base.files import FileGroup
    from trainer.base.run_layout import AVERAGE
    from trainer.base.tensorfile import TensorFile
    from workbench.adapter_files.opening import open_checkpoint

    opened, made = open_checkpoint(chosen.checkpoint), {}
    averaged = opened.averaged()
    with FileGroup(keep=True) as group:
        written = opened.export(chosen.folder, group.write, sample=opened.sample())
        if averaged is not None:
            made = averaged.export(chosen.folder, group.write, opened.about.name + AVERAGE, opened.sample(AVERAGE))
    for format, path in written.items():
        write(f"{format}: {path}")
    for sentence in not_loaded_by_diffusers(
        n for n in opened.layers if n.partition(".")[0] not in opened.model.family.adapters.peft
    ):
        write(f"note: {sentence}")
    if (comfyui := written.get("comfyui")) and (said := TensorFile(comfyui).metadata.get(sd_scripts.ENTRY)):
        write(f"note: {sd_scripts.sentence(said)}")
    for format in opened.formats if averaged is not None else ():
        write(f"{format}, average: {made.get(format, NOT_WRITTEN)}")


def show(chosen: argparse.Namespace) -> None:
    """Print what a file is: its kind, ranks, scales, norms and gaps."""
    from workbench.adapters import show as report

    models = models_for(chosen.file, chosen.base, chosen.family)
    opened = opened_at(chosen.file, models, chosen.family, any_size=models is None)
    weight, meaning = base_weight(opened), opened.portable.meaning
    layers = [report.layer_report(name, factors, meaning, weight) for name, factors in opened.portable.layers.items()]
    write("\n".join(report.lines(opened, layers)))
    if chosen.plot:
        chosen.plot.parent.mkdir(parents=True, exist_ok=True)
        try:
            report.plot(layers, opened.path.name, chosen.plot)
        except ModuleNotFoundError as error:
            raise UserError(f"--plot needs {error.name}: pip install 'reference-adapter-trainer[plots]'") from error
        write(f"plot: {chosen.plot}")


def convert(chosen: argparse.Namespace) -> None:
    """Write a file in another format, and say what changed on the way."""
    from trainer.runtime.precision import COMPUTE_DTYPES
    from workbench.adapters.convert import Conversion
    from workbench.adapters.convert import convert as converted

    if chosen.dora_scale and chosen.to != "comfyui":
        raise UserError(f"--dora_scale belongs to --to comfyui; --to {chosen.to} has one meaning")
    opened = opened_file(chosen.file, chosen.base, chosen.family)
    dtype = chosen.dtype and COMPUTE_DTYPES[chosen.dtype]
    wanted = Conversion(chosen.to, chosen.rank, chosen.dora_scale, chosen.for_sd_scripts, dtype)
    done = converted(opened, chosen.out, wanted, base_weight(opened))
    kind = done.portable.kind.word
    write(f"{chosen.to}: {chosen.out}: {kind} for {opened.model.family.name}, {len(done.portable.layers)} layers")
    for note in done.notes:
        write(f"  {note}")


def merge(chosen: argparse.Namespace) -> None:
    """Write the model with adapters in its weights."""
    from trainer.base.progress import Phases
    from workbench.adapter_files.opening import looks_like_an_adapter, open_adapter
    from workbench.adapters.merge import merge

    if looks_like_an_adapter(strength_of(chosen.model)[0]):
        *others, last = chosen.files
        right = shlex.join([last, chosen.model, *others, str(chosen.out)])
        right = "MODEL ADAPTER OUT" if looks_like_an_adapter(Path(last)) else right
        raise UserError(f"{chosen.model} is an adapter file; the model comes first: adapter.py merge {right}")
    model, adapters = whole_model(chosen.model), []
    for given in chosen.files:
        path, strength = strength_of(given)
        if not path.exists() and looks_like_an_adapter(chosen.out):
            raise UserError(
                f"{given} does not exist, and {chosen.out} is an adapter file; OUT comes last: "
                "adapter.py merge MODEL ADAPTER OUT"
            )
        adapters.append((open_adapter(path, [model]), strength))
    for line in (line for opened, _ in adapters for line in opened.read.account.lines()):
        write(line)
    made = merge(model, adapters, chosen.out, dtype=chosen.dtype, phases=Phases(show=True))
    write(f"merged: {made.path}: {len(made.layers)} layers of {model.family.name} changed")
    finer = "; --dtype fp32 keeps it" if made.loss.share > 0.01 and chosen.dtype != "fp32" else ""
    write(f"  {made.loss.share:.3%} of the change is lost by rounding to the file's dtype{finer}")


def extract(chosen: argparse.Namespace) -> None:
    """Write the LoRA that is nearest to the difference of two models."""
    from trainer.base.progress import Phases
    from workbench.adapters.resize import extract

    began = time.monotonic()
    tuned, base = (whole_model(path) for path in (chosen.tuned, chosen.model))
    if tuned.family is not base.family:
        raise UserError(f"{chosen.tuned} is a model of {tuned.family.name}, {chosen.model} of {base.family.name}")
    made = extract(tuned, base, chosen.out, chosen.rank, to=chosen.to, phases=Phases(show=True))
    write(f"{chosen.to}: {chosen.out}: LoRA of rank {chosen.rank} at most, in {time.monotonic() - began:.0f} s")
    for line in made.notes:
        write(f"  {line}")


def compare(chosen: argparse.Namespace) -> None:
    """Say how far apart two adapters are."""
    from trainer.adapters.peft_config import is_peft_folder
    from trainer.base.files import hash_file
    from workbench.adapter_files.opening import open_checkpoint
    from workbench.adapters.base_weights import BaseWeights
    from workbench.adapters.compare import compare

    models, portables = models_of(chosen.base) if chosen.base else None, []
    weight = BaseWeights(models[0].source).weight if models else None
    for path in (chosen.a, chosen.b):
        if path.is_dir() and not is_peft_folder(path):
            portables.append(open_checkpoint(path).portable("magnitude"))
        else:
            opened = opened_file(path, chosen.base, chosen.family)
            portables.append(opened.portable)
            weight = weight or base_weight(opened)
            for line in opened.read.account.lines():
                write(line)
    if chosen.a.is_file() and chosen.b.is_file() and hash_file(chosen.a) == hash_file(chosen.b):
        write("the files are equal, byte for byte")
    write("\n".join(compare(*portables, weight).lines()))


def resize(chosen: argparse.Namespace) -> None:
    """Write a file with a lower rank, and say what is lost."""
    from workbench.adapters.resize import resize

    opened = opened_file(chosen.file, chosen.base, chosen.family)
    done = resize(opened, chosen.out, chosen.rank, weight=base_weight(opened))
    write(f"resized: {chosen.out}")
    for note in done.notes:
        write(f"  {note}")


def average(chosen: argparse.Namespace) -> None:
    """Write the mean of several adapters, and say what its rank loses; with a run's config also the held-out losses of all.

    OUT is written once nothing but the loss of the mean is left to do.
    """
    from trainer.base.files import check_folder, refuse_taken
    from trainer.base.progress import Phases
    from workbench.adapters.average import average, shares_of
    from workbench.adapters.base_weights import BaseWeights

    first = "OUT, which comes first: adapter.py average OUT FILE FILE ... --rank R"
    if chosen.out.suffix != ".safetensors":
        raise UserError(f"{chosen.out} is no .safetensors file; give another {first}")
    refuse_taken(chosen.out, place=first)
    check_folder(chosen.out.parent, "the folder of OUT")
    shares, phases, base, config = shares_of(chosen.weights, len(chosen.files)), Phases(show=True), chosen.base, None
    if chosen.config is not None:
        from trainer import config as configs

        config = configs.load(chosen.config, [])
        base = base or config.model.path
    models = models_of(base) if base else None
    adapters = [to_average(path, share, base, chosen.family) for path, share in zip(chosen.files, shares, strict=True)]
    known = [models[0].source] if models else [each.model.source for each in adapters if each.model.source is not None]
    weight = BaseWeights(known[0]).weight if known else None
    losses, measured = [], None
    if config is not None:
        measured = losses_for(config, adapters, chosen.rank, weight, phases)
        losses = [("without an adapter", measured.of(None))]
        losses += [(str(each.path), measured.of(each.portable)) for each in adapters]
    made = average(adapters, chosen.out, chosen.rank, weight=weight, to=chosen.to, phases=phases)
    portable = made.portable
    kind, ranks = portable.kind.word, max(each.rank for each in portable.layers.values())
    write(f"{chosen.to}: {chosen.out}: {kind} of rank {ranks} at most, the mean of {len(adapters)}")
    for line in made.notes:
        write(f"  {line}")
    if measured is not None:
        from workbench.adapters.measured import lines

        for line in lines([*losses, (str(chosen.out), measured.of(portable))]):
            write(f"  {line}", whole=True)


def to_average(path: Path, share: float, base: str | None, family: str | None):
    """A file or a checkpoint that goes into a mean."""
    from trainer.adapters.peft_config import is_peft_folder
    from workbench.adapter_files.opening import open_checkpoint
    from workbench.adapters.average import Averaged, base_of

    if path.is_dir() and not is_peft_folder(path):
        held = open_checkpoint(path)
        return Averaged(path, held.model, held.portable("magnitude"), share, base_of(path))
    opened = opened_file(path, base, family)
    for line in opened.read.account.lines():
        write(line)
    return Averaged(path, opened.model, opened.portable, share, base_of(path))


def losses_for(config, adapters, rank: int, weight, phases):
    """What measures them in the model of a run's config. Raises UserError for all that can be told without its weights."""
    from workbench.adapters.average import check
    from workbench.adapters.measured import HeldOutLosses, plan_losses

    check(adapters, rank, weight)
    return HeldOutLosses(*plan_losses(config, adapters, rank, phases), adapters, phases)


def strength_of(given: str) -> tuple[Path, float]:
    """FILE or FILE:STRENGTH."""
    path, colon, number = given.rpartition(":")
    if not colon or Path(given).exists():
        return Path(given), 1.0
    try:
        strength = float(number)
    except ValueError:
        return Path(given), 1.0
    if not math.isfinite(strength):
        raise UserError(f"{given!r}: a strength is a finite number")
    return Path(path), strength


def push(chosen: argparse.Namespace) -> None:
    """Send a folder of adapter files and its model card to the Hugging Face hub."""
    from trainer.base.progress import Phases
    from workbench.adapters.push import push

    first = next(iter(sorted(chosen.folder.glob("*.safetensors"))), None)
    models = None if first is None else models_for(first, chosen.base, chosen.family)
    phases = Phases(show=True)
    asked = {"public": chosen.public, "replace_card": chosen.replace_card, "models": models, "family": chosen.family}
    pushed = push(chosen.folder, chosen.repo, **asked, phases=phases)
    write(f"pushed: {pushed.url}, {pushed.visibility}, commit {pushed.commit}")
    if chosen.public and pushed.visibility == "private":
        write("  it was there, and stays private: --public is for a repository that is made; change it in its settings")
    for name in pushed.files:
        write(f"  {name}")


def opened_file(path: Path, base: str | None, family: str | None):
    """The adapter file, by the names of the model `base`, or of `models_for` it."""
    return opened_at(path, models_for(path, base, family), family)


def models_for(path: Path, base: str | None, family: str | None):
    """The models that an adapter file may be for: `base`; else None, which is the published ones; else, where it fits none of
    them, its run's model, if it lies where its run wrote it."""
    if base:
        return models_of(base)
    try:
        opened_at(path, None, family)
    except UserError:
        if (base := base_of_run(path)) is not None:
            write(f"model: {base}, as config.toml of its run says")
            return models_of(base)
    return None


def base_of_run(path: Path) -> str | None:
    """`model.path` of the run whose folder of adapter files holds `path`; None where it lies elsewhere."""
    from trainer.base.run_layout import Layout

    layout = Layout(path.absolute().parent.parent)
    if path.absolute().parent != layout.adapters or not layout.config.is_file():
        return None
    from trainer.config.reading import read_resolved  # takes a second to import, and most files need no model

    return read_resolved(layout.config).get("model", {}).get("path")


def opened_at(path: Path, models, family: str | None, *, any_size: bool = False):
    from workbench.adapter_files.opening import open_adapter

    return open_adapter(path, models, family=family, any_size=any_size)


def models_of(path: str):
    """The model there, as every family that it may be of."""
    from workbench.adapter_files.opening import models_at

    return models_at(path)


def base_weight(opened):
    """The function that reads weights of the model given by --base; None without it."""
    from workbench.adapters.base_weights import BaseWeights

    source = opened.model.source
    return BaseWeights(source).weight if source is not None else None


def whole_model(path: str):
    """The model there, with its weights."""
    from workbench.adapters.base_weights import whole_model_at

    return whole_model_at(path)


def reads_a_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="FILE", type=Path, help="an adapter file (.safetensors), or a folder that PEFT saved"
    )
    names_a_model(command)


def names_a_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--base", metavar="MODEL", help="the model that it is for: folder, .safetensors file or hub id")
    command.add_argument("--family", help="where the keys are those of several: sdxl, flux, flux2, flux3 or zimage")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("export", help="the adapter files of a checkpoint")
    command.set_defaults(run=export)
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint's folder")
    command.add_argument("folder", metavar="OUT_FOLDER", type=Path, help="where the files go")
    command = commands.add_parser("show", help="what a file is")
    command.set_defaults(run=show)
    reads_a_file(command)
    command.add_argument("--plot", metavar="PNG", type=Path, help="a picture of every layer's change, too")
    command = commands.add_parser("convert", help="a file in another format")
    command.set_defaults(run=convert)
    reads_a_file(command)
    command.add_argument("out", metavar="OUT", type=Path, help="the file to write (.safetensors)")
    command.add_argument(
        "--to", required=True, choices=("diffusers", "kohya", "comfyui", "onetrainer", "lora"),
        help="lora: kohya's keys without DoRA, for programs that have none; an approximation, whose error is printed",
    )  # fmt: skip
    command.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the matrices, not of a DoRA's magnitudes; default: as they are"
    )
    command.add_argument("--rank", type=int, metavar="R", help="of the approximation; default: each layer's own, of a DoRA")
    command.add_argument(
        "--dora_scale", choices=("comfyui_released", "magnitude"), help="as export.dora_scale (docs/adapter_files.md)"
    )
    command.add_argument(
        "--for_sd_scripts", action="store_true", help="without the layers that sd-scripts would drop without a message"
    )
    command = commands.add_parser("merge", help="a model with adapters in its weights")
    command.set_defaults(run=merge)
    command.add_argument("model", metavar="MODEL", help="folder or .safetensors file")
    command.add_argument("files", metavar="FILE[:STRENGTH]", nargs="+", help="adapter files, in the order they are applied")
    command.add_argument("out", metavar="OUT", type=Path, help="a .safetensors file, or a folder where MODEL is one")
    command.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "fp8"),
        help="of the weights but the VAE's; fp8: ComfyUI's scaled float8; default: as MODEL has them",
    )  # fmt: skip
    command = commands.add_parser("extract", help="the LoRA that is nearest to the difference of two models")
    command.set_defaults(run=extract)
    command.add_argument("tuned", metavar="TUNED", help="the changed model: folder or .safetensors file")
    command.add_argument("model", metavar="BASE", help="the model that it was made from")
    command.add_argument("out", metavar="OUT", type=Path, help="the adapter file to write (.safetensors)")
    command.add_argument("--rank", type=int, required=True, metavar="R")
    command.add_argument("--to", choices=("diffusers", "kohya", "comfyui", "onetrainer"), default="diffusers")
    command = commands.add_parser("compare", help="how far apart two adapters are")
    command.set_defaults(run=compare)
    command.add_argument("a", metavar="A", type=Path, help="an adapter file, or a checkpoint's folder")
    command.add_argument("b", metavar="B", type=Path, help="another")
    command.add_argument("--base", metavar="MODEL", help="the model that they are for; a DoRA needs its weights")
    command.add_argument("--family", help="where the keys are those of several: sdxl, flux, flux2, flux3 or zimage")
    command = commands.add_parser("resize", help="a file with a lower rank")
    command.set_defaults(run=resize)
    reads_a_file(command)
    command.add_argument("out", metavar="OUT", type=Path, help="the file to write (.safetensors)")
    command.add_argument("--rank", type=int, required=True, metavar="R", help="the highest that a layer may have")
    command = commands.add_parser("average", help="the mean of several adapters of one model")
    command.set_defaults(run=average)
    command.add_argument("out", metavar="OUT", type=Path, help="the adapter file to write (.safetensors)")
    command.add_argument("files", metavar="FILE", type=Path, nargs="+", help="adapter files, or checkpoints' folders")
    command.add_argument("--weights", type=float, nargs="+", metavar="W", help="of each, in their order; default: equal")
    command.add_argument("--rank", type=int, required=True, metavar="R", help="the highest that a layer of the mean may have")
    command.add_argument("--to", choices=("diffusers", "kohya", "comfyui", "onetrainer"), default="diffusers")
    command.add_argument("--config", metavar="TOML", help="a run's config: the losses of all on its held-out photos, too")
    names_a_model(command)
    command = commands.add_parser("push", help="a folder of adapter files to the Hugging Face hub")
    command.set_defaults(run=push)
    command.add_argument("folder", metavar="FOLDER", type=Path, help="adapter files, README.md, images/")
    command.add_argument("--repo", required=True, metavar="USER/NAME", help="made where there is none")
    names_a_model(command)
    command.add_argument("--replace_card", action="store_true", help="another README.md that is there may be lost")
    command.add_argument("--public", action="store_true", help="make a public repository; default: a private one")
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
