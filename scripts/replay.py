"""Do a logged step of a run again, in its own precision and in fp64, and say whether rounding explains the log.

    python scripts/replay.py outputs/bear/checkpoints/step-00000500              # the step after it
    python scripts/replay.py outputs/bear/checkpoints/step-00000500 --step 520   # those between are done again first
    python scripts/replay.py outputs/bear/checkpoints/step-00000500 --all        # every step up to the next checkpoint

The photos and the model have to be there; --set says where they lie now. Nothing is written into the run's folder. What the
bound is, and what it can miss: docs/replay.md. Exit status: 0 explained; 3 not explained; 2 for a step or a run that cannot
be done again, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from trainer.base.errors import UserError  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402

if TYPE_CHECKING:
    from workbench.replay.judged import JudgedStep, LayerGradient
    from workbench.replay.replay import Replay, Span

NOT_EXPLAINED = 3
WIDTH, HEIGHT = 8.0, 3.2  # inches of a picture


def replayed(chosen: argparse.Namespace) -> int:
    from trainer.base.progress import Phases
    from workbench.replay.replay import replay, span_of

    if chosen.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'reference-adapter-trainer[plots]'")
    if chosen.plot is not None and (chosen.plot.is_dir() or chosen.plot.suffix.lower() != ".png"):
        raise UserError(f"--plot {chosen.plot}: give the path of a .png file")
    if chosen.layers < 0:
        raise UserError(f"--layers {chosen.layers}: give a number of gradients to list, or 0 for none")
    span = span_of(chosen.checkpoint, chosen.step, every=chosen.all)
    overrides = [item for group in chosen.overrides for item in group]
    found = replay(span, overrides, phases=Phases(show=True))
    print("\n".join(told(span, found, layers=chosen.layers)))
    if chosen.plot is not None:
        chosen.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(found, chosen.plot)
    return 0 if found.explained else NOT_EXPLAINED


def told(span: Span, found: Replay, *, layers: int) -> list[str]:
    """The report, line by line. layers: how many gradients of a step's layers are listed."""
    from workbench.replay.judged import FACTOR, REPETITIONS

    lines = ["", f"{span.folder}, computed in {found.precision}"]
    lines += [
        f"bound: {FACTOR:g} times the root mean square of {REPETITIONS} steps in fp64 with random roundings (docs/replay.md)"
    ]
    if len(found.judgements) > 1:
        most = ", ".join(f"{name} {max(values):.2g}" for name, values in shares(found.judgements).items())
        lines += ["", *table(found.judgements), f"largest error / bound: {most}"]
        shown = [each for each in found.judgements if not each.explained][:1] or found.judgements[-1:]
    else:
        shown = found.judgements
    for judgement in shown:
        lines += ["", *step_told(judgement, layers)]
    return [*lines, "", *verdict(span, found)]


def table(judgements: Sequence[JudgedStep]) -> list[str]:
    """A line for each step."""
    heads = ("loss: log", "fp64", "error/bound", "norm: log", "fp64", "error/bound", "worst layer")
    lines = [f"{'step':>8} " + " ".join(f"{head:>12}" for head in heads)]
    for each in judgements:
        numbers = " ".join(
            f"{number(part.logged):>12} {number(part.exact):>12} {part.share:>12.2g}" for part in (each.loss, each.norm)
        )
        worst = f"{worst_layer(each).share:.2g}" if each.layers else "overflow"
        lines.append(f"{each.number:>8} {numbers} {worst:>12}{'' if each.explained else '  NOT EXPLAINED'}")
    return lines


def shares(judgements: Sequence[JudgedStep]) -> dict[str, list[float]]:
    """What of its bound each step takes."""
    return {
        "loss": [each.loss.share for each in judgements],
        "gradient norm": [each.norm.share for each in judgements],
        "gradient of the worst layer": [worst_layer(each).share if each.layers else 0.0 for each in judgements],
        "update": [each.update.share for each in judgements],
    }


def step_told(judgement: JudgedStep, layers: int) -> list[str]:
    """One step, in full."""
    lines = [f"step {judgement.number}"]
    lines += [f"{'':>14} {'log':>13} {'here':>13} {'fp64':>13} {'log - fp64':>11} {'bound':>11}"]
    for name, part in (("loss", judgement.loss), ("gradient norm", judgement.norm)):
        error = "overflow" if part.logged is None else f"{part.logged - part.exact:.2g}"
        numbers = " ".join(f"{number(each):>13}" for each in (part.logged, part.here, part.exact))
        lines.append(f"{name:<14} {numbers} {error:>11} {part.bound:>11.2g}")
    lines += ["", *update_told(judgement)]
    ordered: list[LayerGradient] = sorted(judgement.layers, key=lambda layer: -layer.share)
    if not ordered:
        return [*lines, "no gradient: the step overflowed at its loss scale, and changed nothing"]
    if layers:
        count = f"the {min(layers, len(ordered))} of {len(ordered)} with the largest error for their bound"
        lines += ["", f"gradient of the layers, here against fp64: {count}"]
        lines.append(f"{'error/size':>11} {'bound':>11} {'along it':>11} {'bound':>11} {'size':>11}  layer")
    for each in ordered[:layers]:
        numbers = (each.error, each.bounds[0], each.along, each.bounds[1], each.size)
        lines.append(" ".join(f"{value:>11.2g}" for value in numbers) + f"  {each.part}  {each.name}")
    return lines


def update_told(judgement: JudgedStep) -> list[str]:
    """What the step did with its gradients, held against the formulas."""
    update = judgement.update
    lines = [f"update: the optimizer's part is not judged: {update.unjudged}"] if update.unjudged else []
    if update.worst:
        parts = ", ".join(f"{what} {share:.2g}" for what, (share, _) in update.worst.items())
        lines.append(f"update, largest error / bound: {parts}")
    return lines


def verdict(span: Span, found: Replay) -> list[str]:
    """What it comes to."""
    lines, count = [], span.last - span.first + 1
    if found.environment:
        lines.append(found.environment)
    lines.append(f"done again here, {count - len(found.unequal)} of {count} steps have the very numbers of the log")
    if found.differing is not None and not found.differing:
        lines.append(f"adapter, optimizer and any average after them are those of {span.following}, bit for bit")
    elif found.differing:
        said = f"{len(found.differing)} tensors differ, {found.differing[0]} first"
        lines.append(f"after them adapter, optimizer or average differ from {span.following}: {said}")
    if found.broken is not None:
        why = "the environment is the checkpoint's, where roundings repeat, and the numbers are others than the log's"
        lines.append(f"step {found.broken} is NOT EXPLAINED by rounding: {why}")
    if found.forged:
        lines.append(f"NOT EXPLAINED: every step is as logged, and {span.following} holds other tensors than they make")
    for each in (each for each in found.judgements if not each.explained):
        lines.append(f"step {each.number} is NOT EXPLAINED by rounding: {'; '.join(reasons(each))}")
    judged = len(found.judgements)
    bad = {*found.unexplained, *(each.number for each in found.judgements if each.number == found.broken)}
    return [*lines, f"{judged - len(bad)} of {judged} steps explained by rounding"]


def reasons(judgement: JudgedStep) -> list[str]:
    """What is beyond its bound."""
    found = []
    for name, part in (("loss", judgement.loss), ("gradient norm", judgement.norm)):
        if part.share > 1:
            how = "is not finite" if part.logged is None else f"is off by {part.share:.3g} bounds"
            found.append(f"the logged {name} {how}")
    beyond = [layer for layer in judgement.layers if layer.share > 1]
    if beyond:
        worst = worst_layer(judgement)
        most = f"{worst.part} of {worst.name} by {worst.share:.3g} bounds"
        found.append(f"here {len(beyond)} gradients of layers are off, most that of {most}")
    for what, (share, name) in judgement.update.worst.items():
        if share > 1:
            found.append(f"here the update's {what} is off, most in {name} by {share:.3g} bounds")
    return found


def worst_layer(judgement: JudgedStep) -> LayerGradient:
    return max(judgement.layers, key=lambda layer: layer.share)


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.8g}"


def plot(found: Replay, path: Path) -> None:
    """A PNG: of every step, what of its bound loss, gradient norm and the worst layer take."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [each.number for each in found.judgements]
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (label, values), marker in zip(shares(found.judgements).items(), "osx+", strict=True):
        axes.plot(steps, values, marker, label=label)
    axes.axhline(1.0, color="black", linewidth=1, label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("error / bound")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint's folder, at its place in the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="up to the next checkpoint's; default: the first one after this")
    which.add_argument("--all", action="store_true", help="every step up to the next checkpoint, or to the log's end")
    parser.add_argument("--dtype", choices=("fp64",), default="fp64", help="what the log is held against; default: fp64")
    parser.add_argument("--layers", type=int, default=10, metavar="N", help="gradients listed; default: 10")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="a picture of the steps' errors, too")
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="where photos or model lie now, or another key that a resume may change",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: replayed(chosen))


if __name__ == "__main__":
    sys.exit(main())
