"""A store of checkpoints that knows only names and bytes: atomic, verified, marker last. A checkpoint is a folder
`step-00000500` with a `manifest.json` that gives every file's SHA-256 and size. It is written under a temporary name, synced,
and renamed when complete, so every prefix of a save leaves the earlier ones as they were."""

import contextlib
import errno
import filecmp
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.run_layout import Layout, folder_name, step_of

MANIFEST = "manifest.json"
NEEDED = ("adapter.safetensors", "state.json")  # in every checkpoint: what was trained, and what the run is
READ = (".json", ".safetensors")  # ends of the names of what is read of a checkpoint
_NEW = re.compile(r"\.step-(\d{8})\.new\.tmp")
_TEMPORARY = re.compile(r"\.step-\d{8}\.(new|old)\.tmp")

Files = Mapping[str, Iterable[memoryview | bytes]]


class NotReadBack(OSError):
    """A checkpoint was written and renamed without an error, and does not match its manifest."""


def save(root: Path, step: int, contents: Files, advance: files.Advance = files.unheard, *, instead: bool = False) -> Path:
    """Write one checkpoint; returns its folder. Raises OSError and leaves the others untouched.

    A valid checkpoint of that step stays: by contract its bytes are the same. instead: they may not be; then it is set aside
    once the new one is whole on the disk. After a kill between the two renames `settle` makes the second.
    """
    files.make_folder(root)
    final, temporary = root / folder_name(step), root / f".{folder_name(step)}.new.tmp"
    remove_leftovers(root, ignore_errors=True)  # of failed saves; what cannot be deleted is no reason to write no more
    if not instead and final.exists() and problem(final) is None:
        files.sync_folder(root)  # whoever wrote it may have been killed after the rename
        return final
    if temporary.exists():
        files.remove_folder(temporary)
    os.mkdir(temporary)
    aside: Path | None = None
    try:
        listed = {}
        for name, pieces in contents.items():
            digest, size = files.write(temporary / name, pieces, advance)
            listed[name] = {"sha256": digest, "bytes": size}
        files.write(temporary / MANIFEST, [files.json_bytes({"files": listed})])
        files.sync_folder(temporary)
        if instead and final.exists():
            if _copies(final, [temporary]) and problem(final) is None:
                files.remove_folder(temporary)
                files.sync_folder(root)
                return final
            files.sync_folder(root)  # the new one's name is on the disk before the old one's goes
            aside = _set_aside(root, step)
        elif final.exists():
            remove(root, step)
        os.replace(temporary, final)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                os.replace(aside, final)
                files.sync_folder(root)
        if aside is None or final.exists():  # otherwise the new one is all that goes on: `settle` gives it its name
            remove_leftovers(root, ignore_errors=True)  # as far as the disk lets us; the next save sweeps up the rest
        raise
    try:
        files.sync_folder(root)
        if aside is not None and _TEMPORARY.fullmatch(aside.name):
            files.remove_folder(aside)
    except OSError:
        remove_leftovers(root, ignore_errors=True)
        raise
    return final


def remove(root: Path, *which: int) -> None:
    """Delete the checkpoints of these steps. They lose their names first, on the disk too: no moment shows half of one."""
    doomed = [_doom(root / folder_name(step), step) for step in which]
    files.sync_folder(root)
    for folder in doomed:
        files.remove_folder(folder)


def _doom(folder: Path, step: int) -> Path:
    """Rename to a leftover's name; returns it."""
    doomed = folder.with_name(f".{folder_name(step)}.old.tmp")
    if doomed.exists():
        files.remove_folder(doomed)
    os.replace(folder, doomed)
    return doomed


def problem(folder: Path, phases: Phases = QUIET) -> str | None:
    """Why `folder` is not a valid checkpoint, or None. Reads every byte."""
    what = MANIFEST  # is being read
    try:
        if not _is_file(folder / MANIFEST):
            return f"{MANIFEST} is no file"
        text = (folder / MANIFEST).read_bytes()
        manifest = files.read_json(folder / MANIFEST)
        listed = {name: (str(item["sha256"]), int(item["bytes"])) for name, item in manifest["files"].items()}
        # Byte by byte: a manifest that reads the same and is not the same was damaged, too.
        canonical = files.json_bytes({"files": {n: {"sha256": s, "bytes": b} for n, (s, b) in listed.items()}})
        if text != canonical or not all(map(str.isprintable, listed)):
            return f"{MANIFEST} is damaged (not in the form it was written in)"
        if not listed:
            return f"{MANIFEST} lists no files"
        if lost := [name for name in NEEDED if name not in listed]:
            return f"{MANIFEST} does not list {lost[0]!r}, which every checkpoint has"
        there = sorted(path.name for path in folder.iterdir() if path.suffix in READ)
        if unlisted := [name for name in there if name not in {MANIFEST, *listed}]:
            return f"{MANIFEST} does not list {unlisted[0]!r}"
        for name, (_, size) in listed.items():
            if {"/", "\\"} & set(name) or name in (".", "..", MANIFEST):
                return f"{MANIFEST} lists {name!r}, which is no name of a file of a checkpoint"
            path, what = folder / name, f"{name} (listed in {MANIFEST})"
            if not _is_file(path):
                return f"{name} is no file"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, the manifest says {size}"
        with phases(f"checking {folder.name}", sum(size for _, size in listed.values()), "B") as phase:
            for name, (digest, _) in listed.items():
                path, what = folder / name, f"{name} (listed in {MANIFEST})"
                if files.hash_file(path, phase.advance) != digest:
                    return f"{name} does not match its SHA-256"
    except FileNotFoundError:
        return f"{what} is missing"
    except OSError as error:
        return f"{what} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValueError: UserError of read_json included
        return f"{MANIFEST} is damaged ({error})"
    return None


def _is_file(path: Path) -> bool:
    """Raises FileNotFoundError where nothing is there. What is neither file nor folder may keep its reader forever."""
    return stat.S_ISREG(path.stat().st_mode)


def steps(root: Path) -> list[int]:
    """Steps that have a folder, valid or not, ascending."""
    if not root.is_dir():
        return []
    return sorted(step for path in root.iterdir() if (step := step_of(path.name)) is not None)


def unnamed(root: Path) -> dict[int, Path]:
    """The whole checkpoints that a kill kept from their names, by step: between the renames of a save, or before them."""
    there = root.iterdir() if root.is_dir() else ()
    folders = {int(named[1]): path for path in there if (named := _NEW.fullmatch(path.name))}
    return {
        step: folder
        for step, folder in folders.items()
        if not folder.is_symlink() and not (root / folder_name(step)).exists() and problem(folder) is None
    }


def settle(root: Path) -> dict[Path, Path]:
    """End what a kill cut off, while nobody saves: whole checkpoints get their names, and other leftovers go. Returns the new
    names by the old ones."""
    named = {folder: root / folder_name(step) for step, folder in unnamed(root).items()}
    for folder, final in named.items():
        files.sync_tree(folder)  # the kill may have come before
        os.replace(folder, final)
    if named:
        files.sync_folder(root)
    remove_leftovers(root)
    return named


def newest_valid(root: Path, phases: Phases = QUIET) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and one line for every newer one that was passed over, or that a kill left unnamed."""
    passed = []
    present = {step: root / folder_name(step) for step in steps(root)} | unnamed(root)
    for _, folder in sorted(present.items(), reverse=True):
        reason = problem(folder, phases)
        if reason is None:
            if step_of(folder.name) is None:
                passed.append(f"{folder} is whole: a kill came before it had its name, which it gets now")
            return folder, passed
        passed.append(f"{folder} is not valid: {reason}")
    return None, passed


def prune(root: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints, once the newest has been read back and is valid. Raises NotReadBack
    where it is not, and deletes nothing."""
    present = steps(root)
    if len(present) <= keep_last:
        return
    newest = root / folder_name(present[-1])
    if (reason := problem(newest)) is not None:
        raise NotReadBack(errno.EIO, f"the checkpoint does not read back ({reason}), older ones are kept", str(newest))
    try:
        remove(root, *present[:-keep_last])
    except OSError:
        remove_leftovers(root, ignore_errors=True)
        raise


def remove_leftovers(root: Path, *, ignore_errors: bool = False) -> None:
    """Delete what killed or failed saves and prunings left. Not while another thread or process saves."""
    for path in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            files.remove_folder(path, ignore_errors=ignore_errors)


def set_aside(root: Path, *, after: int) -> list[Path]:
    """Rename checkpoints beyond step `after`: a run that goes on from an earlier one must not be overtaken by them. Returns
    their new names. So that repeated starts do not fill the disk, of one step no copy is kept twice, and only the first and
    the newest."""
    later = [step for step in steps(root) if step > after]
    moved = [_set_aside(root, step) for step in later]
    if moved:
        files.sync_folder(root)
    for step in later:
        for folder in list(_asides(root, step).values())[1:-1]:
            _doom(folder, step)
    if moved:
        files.sync_folder(root)
        remove_leftovers(root)
    return [folder for folder in moved if folder.exists()]


def _set_aside(root: Path, step: int) -> Path:
    """Returns its new name: of a leftover, where a copy of it was set aside before."""
    folder, asides = root / folder_name(step), _asides(root, step)
    if any(problem(copy) is None for copy in _copies(folder, asides.values())):
        return _doom(folder, step)
    again = 1 + max(asides, default=0)
    aside = root / f"superseded-{folder_name(step)}{f'-{again}' if again > 1 else ''}"
    os.replace(folder, aside)
    return aside


def _asides(root: Path, step: int) -> dict[int, Path]:
    """By number, in the order in which they were set aside."""
    name = re.compile(rf"superseded-{folder_name(step)}(?:-(\d+))?")
    return dict(sorted((int(match[1] or 1), path) for path in root.iterdir() if (match := name.fullmatch(path.name))))


def was_set_aside(root: Path, step: int, folder: Path) -> bool:
    """Whether the checkpoint of that step in `folder` was set aside before."""
    return bool(_copies(folder, _asides(root, step).values()))


def _copies(folder: Path, others: Iterable[Path]) -> list[Path]:
    """Those that have its manifest: as far as they are valid, the same bytes."""
    manifest = folder / MANIFEST
    return [o for o in others if manifest.exists() and (o / MANIFEST).exists() and filecmp.cmp(manifest, o / MANIFEST, False)]


def find(root: Path, resume_from: str | None, phases: Phases = QUIET) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume_from auto|latest|DIR` means, or None for a fresh start; and what was passed over. Raises
    UserError: `latest` without any checkpoint, checkpoints that are all invalid, a DIR that is none."""
    if resume_from is None:
        return None, []
    if resume_from not in ("auto", "latest"):
        return named(resume_from, ", or auto with that run.output_dir", phases=phases), []
    folder, passed = newest_valid(root, phases)
    if folder is None:
        why = ""
        if passed:
            why = f"no valid checkpoint in {root}: {'; '.join(passed)}. Restore one, or remove the folder to start again"
        elif aside := sorted(root.glob("superseded-step-*")):
            ways = f"go on from one with --resume_from {aside[-1]}, or remove them to start again"
            why = f"{root} holds only checkpoints that were set aside; {ways}"
        elif resume_from == "latest":
            why = f"there is no checkpoint in {root}; use --resume_from auto to start fresh"
        if why:
            raise UserError(f"--resume_from {resume_from}: {why}")
    return folder, passed


def named(given: str, otherwise: str = "", *, option: str = "--resume_from", phases: Phases = QUIET) -> Path:
    """The checkpoint in the folder that an option gives. otherwise: what could be given in its place. Raises UserError for a
    folder that is none."""
    folder = Path(given)
    if Layout(folder).checkpoints.is_dir() or any((folder / folder_name(step)).is_dir() for step in steps(folder)):
        raise UserError(f"{option} {given!r} holds checkpoints, it is none: give one of its step-... folders{otherwise}")
    if not folder.is_dir():
        raise UserError(f"{option} {given!r} is not a folder; give a checkpoint's folder{otherwise}")
    if (reason := problem(folder, phases)) is not None:
        raise UserError(f"{option} {given!r} is not a valid checkpoint: {reason}")
    return folder
