"""What is in a checkpoint, and whether it is valid; or which checkpoints a run has.

    python scripts/inspect_checkpoint.py outputs/bear/checkpoints/step-00000500
    python scripts/inspect_checkpoint.py outputs/bear          # or its checkpoints folder: one line each

Reads every byte and changes none. What can be read of a damaged checkpoint is shown, too. Exit status: 0 valid, of a run:
there is one to go on from; 2 otherwise, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from trainer.base import files  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from trainer.base.tensorfile import NAMES, TensorFile  # noqa: E402
from trainer.checkpoint import store  # noqa: E402
from trainer.checkpoint.state import LAYOUT_VERSION, QUANTIZATION, STATE, TENSOR_FILES, Piece, Saved, own_census  # noqa: E402
from trainer.config import flatten  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402

Table = list[Sequence[object]]
# Damage takes any form: a section that meets with it says so, and the others are shown.
DAMAGE = (UserError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, MemoryError)
# What else lies beside checkpoints: (pattern of the name, what it is).
BESIDE = (
    (re.compile(r"superseded-step-(\d{8})(-\d+)?"), "set aside: the run went on from an earlier step"),
    (re.compile(r"\.step-(\d{8})\.new\.tmp"), "left by a save that was killed; the next start ends it, or deletes it"),
    (re.compile(r"\.step-(\d{8})\.old\.tmp"), "left by a deletion that was killed; the next start deletes it"),
)
STEP = re.compile(r"step-(\d{8})")
LONGEST = 400  # characters shown of a value


def plain(value: object) -> str:
    """A value as one line of text, whatever a damaged file holds."""
    text = f"{value:,}".replace(",", " ") if type(value) is int else str(value)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return text if text.isprintable() else ascii(text)


def show(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> None:
    """Aligned columns, two blanks apart. Whole numbers stand right, in groups of three digits."""
    cells = [[*map(plain, row)] for row in ([header] if header else []) + [*rows]]
    if len(cells) == bool(header):
        print("nothing")
        return
    number = re.compile(r"\d[\d ]*|-?")
    numbers = [all(number.fullmatch(row[i]) for row in cells[bool(header) :]) for i in range(len(cells[0]))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        columns = zip(row, widths, numbers, strict=True)
        print("  ".join(f"{cell:>{w}}" if right else f"{cell:<{w}}" for cell, w, right in columns).rstrip())


def section(title: str, content: Callable[[], None]) -> str | None:
    """Print a part, or what is wrong with it, which it returns."""
    print(f"\n{plain(title)}")
    try:
        content()
    except DAMAGE as error:
        reason = plain(error if isinstance(error, UserError) else repr(error))
        print(f"cannot be read: {reason}")
        return reason
    return None


def size(folder: Path) -> int:
    """Bytes of all files in it; a run that prunes it meanwhile is no error."""
    total = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            total += path.stat().st_size if path.is_file() else 0
    return total


def pieces_of(folder: Path) -> tuple[object, dict[str, Any]]:
    """The layout and the pieces that the checkpoint's state.json lists, as far as it can be read."""
    tree: Any = {}
    with suppress(UserError):  # `files` says so
        tree = files.read_json(folder / STATE)
    tree = tree if isinstance(tree, dict) else {}
    pieces = tree.get("pieces")
    return tree.get("layout"), pieces if isinstance(pieces, dict) else {}


def problem(folder: Path) -> str | None:
    """Why a run cannot go on from `folder`, or None: other bytes than its manifest says, or another version's."""
    reason = store.problem(folder)
    if reason is None:
        try:
            Saved(folder, census=None)
        except UserError as error:
            reason = str(error).removeprefix(f"{folder} ").removeprefix(f"{folder}: ")
    return reason


# --- a run ------------------------------------------------------------------------------------------------------------


def inspect_run(root: Path) -> str | None:
    """One line for each checkpoint under `root`. Returns why a run could not go on from there, or None."""
    rows: Table = []
    problems = {store.folder_name(step): problem(root / store.folder_name(step)) for step in store.steps(root)}
    chosen, _ = store.newest_valid(root)
    for name, reason in problems.items():
        note = "--resume_from auto goes on from here" if chosen is not None and chosen.name == name else ""
        step = int(name.removeprefix("step-"))
        rows.append([name, step, size(root / name), "yes" if reason is None else f"no: {reason}", note])
    for path in sorted(root.iterdir()):
        for pattern, what in BESIDE:
            if match := pattern.fullmatch(path.name):
                reason = problem(path)
                rows.append([path.name, int(match[1]), size(path), "yes" if reason is None else f"no: {reason}", what])
    print(f"{plain(root)}\n")
    if rows:
        show(rows, ("name", "step", "bytes", "valid", ""))
    if not problems:
        return f"there is no checkpoint in {root}; --resume_from auto starts from the beginning"
    if chosen is None:
        return f"no checkpoint in {root} is valid; --resume_from auto refuses to start"
    if problems[chosen.name] is not None:
        return f"--resume_from auto refuses to go on from {chosen}: {problems[chosen.name]}"
    return None


# --- a checkpoint -----------------------------------------------------------------------------------------------------


def inspect_checkpoint(folder: Path) -> str | None:
    """Everything in one checkpoint. Returns why it is not valid, or None."""
    reason = problem(folder)
    print(plain(folder))
    print("valid: every byte is as its manifest says" if reason is None else f"NOT VALID: {plain(reason)}")
    written, pieces = pieces_of(folder)
    known = own_census(pieces)

    def state(name: str) -> dict[str, Any]:
        piece = pieces.get(name)
        values = piece.get("state") if isinstance(piece, dict) else None
        if not isinstance(values, dict):
            raise UserError(f"{STATE} has no {name}")
        return values

    def listed(name: str) -> object:
        piece = pieces.get(name)
        return piece.get("tensors") if isinstance(piece, dict) else None

    parts: dict[str, Callable[[], None]] = {"files": lambda: show_files(folder)}
    if pieces:
        layout = f"pieces (layout {plain(written)}, this version reads {LAYOUT_VERSION})"
        parts = {
            "progress": lambda: show_progress(state("progress")),
            "config": lambda: show_config(state("config")),
            "environment": lambda: show(sorted(state("environment").items())),
            **parts,
            layout: lambda: show_pieces(pieces, known),
        }
    for name, file in ((name, piece.file) for name, piece in known.items() if piece.file):
        parts[file] = lambda name=name, file=file: show_tensors(folder / file, listed(name))
    parts[f"{QUANTIZATION}: the frozen base"] = lambda: show_quantization(folder)
    found = [section(title, content) for title, content in parts.items()]
    # What the manifest vouches for can still be no checkpoint of this program.
    return reason or next((each for each in found if each), None)


def refusal(folder: Path) -> str | None:
    reason = inspect_checkpoint(folder)
    return None if reason is None else f"{folder} is not a valid checkpoint: {reason}"


def show_progress(state: dict[str, Any]) -> None:
    rows = [("step", "step"), ("length of the schedule", "total_steps"), ("images", "images")]
    rows += [("updates skipped as not finite", "non_finite"), ("started", "started")]
    changes = [("changed in mid-run", f"after step {c['step']}: {'; '.join(c['what'])}") for c in state["changes"]]
    show([*((label, plain(state[key])) for label, key in rows), *changes])


def show_config(config: dict[str, Any]) -> None:
    def chosen(table: str, *keys: str) -> str:
        return ", ".join(f"{key} {config[table].get(key, '-')}" for key in keys)

    rows = [
        ("run", f"{config['run']['name']} in {config['run']['output_dir']}"),
        ("model", f"{config['model']['family']} from {config['model']['path']}"),
        ("adapter", chosen("adapter", "type", "rank", "alpha", "targets")),
        ("optimizer", chosen("optimizer", "name", "lr", "weight_decay")),
        ("schedule", chosen("schedule", "name", "warmup")),
        ("data", chosen("data", "resolution", "batch_size")),
    ]
    for name, component in sorted(config["model"]["components"].items()):
        rows.append((name, f"stored as {component['dtype']}, computes in {component['compute']}"))
    show(rows)


def show_files(folder: Path) -> None:
    """Each file as it is, beside what the manifest says of it."""
    try:
        listed = files.read_json(folder / store.MANIFEST)["files"]
        listed = {name: (item["sha256"], item["bytes"]) for name, item in listed.items()}
    except DAMAGE:
        listed = None
    rows: Table = []
    names = {path.name for path in folder.iterdir() if path.is_file()} | (listed or {}).keys()
    for name in sorted(names, key=plain):
        path, verdict = folder / name, ""
        if Path(name).name != name or not path.is_file():
            rows.append([name, "", "", "missing"])
            continue
        with open(path, "rb") as file:
            digest, count = hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
        if listed is not None and name != store.MANIFEST:
            verdict = "not in the manifest" if name not in listed else "as listed"
            if verdict == "as listed" and listed[name] != (digest, count):
                verdict = f"NOT as listed: {plain(listed[name][1])} bytes, {plain(listed[name][0])[:12]}"
        rows.append([name, count, digest[:12], verdict])
    show(rows, ("file", "bytes", "sha256", "manifest"))


def show_pieces(pieces: Mapping[str, Any], known: Mapping[str, Piece]) -> None:
    rows: Table = []
    for name in sorted(pieces.keys() | known.keys(), key=plain):
        piece = pieces.get(name)
        if not isinstance(piece, dict):
            rows.append([name, "", "missing" if name not in pieces else "damaged"])
            continue
        values = flatten(piece.get("state") or {})
        texts = [f"{key} {short(value)}" for key, value in values.items()]
        contents = texts if len(texts) <= 6 else [f"{len(texts)} values"]
        if isinstance(listed := piece.get("tensors"), list):
            contents.insert(0, f"{len(listed)} tensors in {known[name].file if name in known else '?'}")
        if name == "quantization":
            contents.append(f"in {QUANTIZATION}")
        version = piece.get("version")
        reads = known[name].version if name in known else "no such piece"
        differs = "" if version == reads else f"this version reads {reads}; "
        rows.append([name, version, differs + (", ".join(contents) or "empty")])
    show(rows, ("piece", "version", "contents"))


def short(value: object) -> str:
    """A digest by its first 12 digits."""
    text = plain(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


def show_tensors(path: Path, listed: object) -> None:
    """By dtype: how many tensors, of which shapes, and which of them hold values that are not finite.

    listed: the names that state.json gives, which must be those; None where it gives none.
    """
    file = TensorFile(path)
    rows: Table = []
    bad: list[str] = []
    for dtype in dict.fromkeys(entry.dtype for entry in file.entries.values()):
        entries = {name: entry for name, entry in file.entries.items() if entry.dtype == dtype}
        found = [name for name in entries if dtype.is_floating_point and not finite(file.read(name))]
        bad += found
        shapes = Counter(str([*entry.shape]) for entry in entries.values()).most_common()
        text = ", ".join(f"{count} of {shape}" for shape, count in shapes[:5])
        more = f", {len(shapes) - 5} more shapes" if len(shapes) > 5 else ""
        bytes_ = sum(entry.bytes for entry in entries.values())
        rows.append([NAMES[dtype], len(entries), bytes_, len(found) if dtype.is_floating_point else "-", text + more])
    show(rows, ("dtype", "tensors", "bytes", "not finite", "shapes"))
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        print(f"values that are NOT FINITE: {', '.join(map(plain, bad[:3]))}{more}")
    if listed is not None and sorted(file.entries) != listed:
        raise UserError(f"{path.name} does not hold the tensors that {STATE} lists")


def finite(tensor: torch.Tensor) -> bool:
    # isfinite knows no float8.
    return bool(torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())


def show_quantization(folder: Path) -> None:
    """Layers by component, format, backend and library; then what has no format: norms, embeddings, buffers."""
    record = files.read_json(folder / QUANTIZATION)
    layers: Counter[tuple] = Counter()
    errors: dict[tuple, list[float]] = {}
    others: Counter[tuple] = Counter()
    for name, entry in record.items():
        component = name.partition(".")[0]
        if "format" not in entry:
            dtypes = sorted({plain(held["dtype"]) for held in entry["tensors"].values()})
            others[component, "-", "-", ", ".join(dtypes)] += 1
            continue
        key = (component, entry["format"], entry["backend"], entry["library"])
        layers[key] += 1
        if isinstance(entry.get("relative_error"), float):
            errors.setdefault(key, []).append(entry["relative_error"])
    rows: Table = [[*key, count, f"{max(errors[key]):.2%}" if key in errors else "-"] for key, count in layers.items()]
    rows += [[*key, count, "no layers: norms, embeddings"] for key, count in others.items()]
    show(rows, ("component", "format", "backend", "library", "layers", "largest relative error"))


# --- command line -----------------------------------------------------------------------------------------------------


def inspect(folder: Path) -> str | None:
    """Print what `folder` holds. Returns why there is nothing valid in it, or None."""
    if not folder.is_dir():
        return f"{folder} is not a folder; give a checkpoint's, or a run's output folder"
    names = {path.name for path in folder.iterdir()}
    patterns = (STEP, *(pattern for pattern, _ in BESIDE))
    if names & {store.MANIFEST, STATE, QUANTIZATION, *TENSOR_FILES.values()}:
        return refusal(folder)
    if (folder / "checkpoints").is_dir():
        return inspect_run(folder / "checkpoints")
    if folder.name == "checkpoints" or any(pattern.fullmatch(name) for pattern in patterns for name in names):
        return inspect_run(folder)
    if any(pattern.fullmatch(folder.name) for pattern in patterns):
        return refusal(folder)
    return f"{folder} is not a checkpoint, and holds none; give a checkpoint's folder, or a run's output folder"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a checkpoint, a run's output folder, or its checkpoints")
    folder = parser.parse_args().folder
    # What the terminal's encoding cannot write is shown by its number.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    return run_tool(lambda: look_at(folder))


def look_at(folder: Path) -> None:
    """Print what is in it. Raises UserError where no run can go on from there."""
    if (reason := inspect(folder)) is not None:
        sys.stdout.flush()
        raise UserError(plain(reason))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
