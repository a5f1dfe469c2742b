"""A store of checkpoints as names and bytes: atomic and verified. A checkpoint is a folder `step-00000500` with a
`manifest.json` of every file's SHA-256 and size, written last. The folder is written under a temporary name, synced, and
renamed when complete, so a save cut off at any point leaves the earlier checkpoints unchanged."""

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
from trainer.base.files import Advance, no_progress
from trainer.base.progress import QUIET, Phases
from trainer.base.run_layout import Layout, folder_name, step_of

MANIFEST = "manifest.json"
NEEDED = ("adapter.safetensors", "state.json")  # in every checkpoint: weights and state
READ = (".json", ".safetensors")  # suffixes of the files that are read
_NEW = re.compile(r"\.step-(\d{8})\.new\.tmp")
_TEMPORARY = re.compile(r"\.step-\d{8}\.(new|old)\.tmp")

Files = Mapping[str, Iterable[memoryview | bytes]]


class NotReadBack(OSError):
    """A checkpoint was written and renamed without an error, but does not match its manifest."""


def save(root: Path, step: int, contents: Files, advance: Advance = no_progress, *, instead: bool = False) -> Path:
    """Write one checkpoint; returns its folder. Raises OSError and leaves the others untouched. A valid checkpoint of that
    step is kept: by contract its bytes are the same. instead: they may differ; then it is set aside once the new one is whole
    on the disk. After a kill between the two renames `settle` does the second."""
    files.make_folder(root)
    final, temporary = root / folder_name(step), root / f".{folder_name(step)}.new.tmp"
    remove_leftovers(root, ignore_errors=True)  # of failed saves; failing to delete them must not stop this save
    if not instead and final.exists() and problem(final) is None:
        files.sync_folder(root)  # its writer may have been killed after the rename
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
            files.sync_folder(root)  # the new name must be on the disk before the old one goes
            aside = _set_aside(root, step)
        elif final.exists():
            remove(root, step)
        os.replace(temporary, final)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                os.replace(aside, final)
                files.sync_folder(root)
        if aside is None or final.exists():  # otherwise only the new one is left, and `settle` names it
            remove_leftovers(root, ignore_errors=True)  # best effort; the next save deletes the rest
        raise
    try:
        files.sync_folder(root)
        if aside is not None and _TEMPORARY.fullmatch(aside.name):
            files.remove_folder(aside)
    except OSError:
        remove_leftovers(root, ignore_errors=True)
        raise
    return final


def remove(root: Path, *removed_steps: int) -> None:
    """Delete the checkpoints of these steps. They are renamed first, and synced, so that no partial one is ever visible."""
    doomed = [_rename_as_leftover(root / folder_name(step), step) for step in removed_steps]
    files.sync_folder(root)
    for folder in doomed:
        files.remove_folder(folder)


def _rename_as_leftover(folder: Path, step: int) -> Path:
    """Rename a checkpoint to the name of a leftover, which is returned."""
    doomed = folder.with_name(f".{folder_name(step)}.old.tmp")
    if doomed.exists():
        files.remove_folder(doomed)
    os.replace(folder, doomed)
    return doomed


def problem(folder: Path, phases: Phases = QUIET) -> str | None:
    """The reason why `folder` is not a valid checkpoint, or None. Reads every byte."""
    part = MANIFEST  # being read
    try:
        if not _is_file(folder / MANIFEST):
            return f"{MANIFEST} is no file"
        text = (folder / MANIFEST).read_bytes()
        manifest = files.read_json(folder / MANIFEST)
        listed = {name: (str(item["sha256"]), int(item["bytes"])) for name, item in manifest["files"].items()}
        # Byte by byte: other bytes with the same meaning are damage, too.
        canonical = files.json_bytes({"files": {n: {"sha256": s, "bytes": b} for n, (s, b) in listed.items()}})
        if text != canonical or not all(map(str.isprintable, listed)):
            return f"{MANIFEST} is damaged (not in the form it was written in)"
        if not listed:
            return f"{MANIFEST} lists no files"
        if missing := [name for name in NEEDED if name not in listed]:
            return f"{MANIFEST} does not list {missing[0]!r}, which every checkpoint has"
        present = sorted(path.name for path in folder.iterdir() if path.suffix in READ)
        if unlisted := [name for name in present if name not in {MANIFEST, *listed}]:
            return f"{MANIFEST} does not list {unlisted[0]!r}"
        for name, (_, size) in listed.items():
            if {"/", "\\"} & set(name) or name in (".", "..", MANIFEST):
                return f"{MANIFEST} lists {name!r}, which is no name of a file of a checkpoint"
            path, part = folder / name, f"{name} (listed in {MANIFEST})"
            if not _is_file(path):
                return f"{name} is no file"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, the manifest says {size}"
        with phases(f"checking {folder.name}", sum(size for _, size in listed.values()), "B") as phase:
            for name, (digest, _) in listed.items():
                path, part = folder / name, f"{name} (listed in {MANIFEST})"
                if files.hash_file(path, phase.advance) != digest:
                    return f"{name} does not match its SHA-256"
    except FileNotFoundError:
        return f"{part} is missing"
    except OSError as error:
        return f"{part} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValueError includes read_json's UserError
        return f"{MANIFEST} is damaged ({error})"
    return None


def _is_file(path: Path) -> bool:
    """Whether `path` is a regular file; reading a pipe could block forever. Raises FileNotFoundError if it does not exist."""
    return stat.S_ISREG(path.stat().st_mode)


def steps(root: Path) -> list[int]:
    """The steps that have a folder, valid or not, ascending."""
    if not root.is_dir():
        return []
    return sorted(step for path in root.iterdir() if (step := step_of(path.name)) is not None)


def unnamed(root: Path) -> dict[int, Path]:
    """Whole checkpoints by step that have no name yet, because of a kill before or between the renames of a save."""
    entries = root.iterdir() if root.is_dir() else ()
    folders = {int(match[1]): path for path in entries if (match := _NEW.fullmatch(path.name))}
    return {
        step: folder
        for step, folder in folders.items()
        if not folder.is_symlink() and not (root / folder_name(step)).exists() and problem(folder) is None
    }


def settle(root: Path) -> dict[Path, Path]:
    """Recover from a kill, while nobody saves: name whole checkpoints and delete other leftovers. Returns {old: new path}."""
    renamed = {folder: root / folder_name(step) for step, folder in unnamed(root).items()}
    for folder, final in renamed.items():
        files.sync_tree(folder)  # the kill may have come before the sync
        os.replace(folder, final)
    if renamed:
        files.sync_folder(root)
    remove_leftovers(root)
    return renamed


def newest_valid(root: Path, phases: Phases = QUIET) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and a line for each newer invalid one, or if a kill left it unnamed."""
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
    """Delete all but the newest `keep_last` checkpoints. Before, raises NotReadBack if the newest does not read back."""
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
    """Delete leftovers of killed or failed saves and prunings. Must not run while another thread or process saves."""
    for path in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            files.remove_folder(path, ignore_errors=ignore_errors)


def set_aside(root: Path, *, after: int) -> list[Path]:
    """Rename checkpoints beyond step `after`, which must not count as newer than those of a run resumed there. Returns their
    new paths. To save disk space, identical copies of a step are kept once, and of others only the first and the newest."""
    later = [step for step in steps(root) if step > after]
    moved = [_set_aside(root, step) for step in later]
    if moved:
        files.sync_folder(root)
    for step in later:
        for folder in list(_asides(root, step).values())[1:-1]:
            _rename_as_leftover(folder, step)
    if moved:
        files.sync_folder(root)
        remove_leftovers(root)
    return [folder for folder in moved if folder.exists()]


def _set_aside(root: Path, step: int) -> Path:
    """Rename the checkpoint; returns its new path: a leftover's if a copy was set aside before."""
    folder, asides = root / folder_name(step), _asides(root, step)
    if any(problem(copy) is None for copy in _copies(folder, asides.values())):
        return _rename_as_leftover(folder, step)
    number = 1 + max(asides, default=0)
    aside = root / f"superseded-{folder_name(step)}{f'-{number}' if number > 1 else ''}"
    os.replace(folder, aside)
    return aside


def _asides(root: Path, step: int) -> dict[int, Path]:
    """The checkpoints of a step that were set aside, by number, in that order."""
    name = re.compile(rf"superseded-{folder_name(step)}(?:-(\d+))?")
    return dict(sorted((int(match[1] or 1), path) for path in root.iterdir() if (match := name.fullmatch(path.name))))


def was_set_aside(root: Path, step: int, folder: Path) -> bool:
    """Whether a copy of the checkpoint in `folder` was set aside before."""
    return bool(_copies(folder, _asides(root, step).values()))


def _copies(folder: Path, others: Iterable[Path]) -> list[Path]:
    """The other folders with the same manifest, and so, if valid, the same bytes."""
    manifest = folder / MANIFEST
    return [o for o in others if manifest.exists() and (o / MANIFEST).exists() and filecmp.cmp(manifest, o / MANIFEST, False)]


def find(root: Path, resume_from: str | None, phases: Phases = QUIET) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume_from auto|latest|DIR` means, or None for a fresh start; and the lines of `newest_valid`.
    Raises UserError for `latest` without a checkpoint, if all checkpoints are invalid, or if DIR is none."""
    if resume_from is None:
        return None, []
    if resume_from not in ("auto", "latest"):
        return checkpoint_at(resume_from, ", or auto with that run.output_dir", phases=phases), []
    folder, passed = newest_valid(root, phases)
    if folder is None:
        reason = ""
        if passed:
            reason = f"no valid checkpoint in {root}: {'; '.join(passed)}. Restore one, or remove the folder to start again"
        elif aside := sorted(root.glob("superseded-step-*")):
            ways = f"go on from one with --resume_from {aside[-1]}, or remove them to start again"
            reason = f"{root} holds only checkpoints that were set aside; {ways}"
        elif resume_from == "latest":
            reason = f"there is no checkpoint in {root}; use --resume_from auto to start fresh"
        if reason:
            raise UserError(f"--resume_from {resume_from}: {reason}")
    return folder, passed


def checkpoint_at(path_text: str, otherwise: str = "", *, option: str = "--resume_from", phases: Phases = QUIET) -> Path:
    """The checkpoint given by an option. otherwise: alternatives, for the message. Raises UserError if it is not valid."""
    folder = Path(path_text)
    if Layout(folder).checkpoints.is_dir() or any((folder / folder_name(step)).is_dir() for step in steps(folder)):
        raise UserError(f"{option} {path_text!r} holds checkpoints, it is none: give one of its step-... folders{otherwise}")
    if not folder.is_dir():
        raise UserError(f"{option} {path_text!r} is not a folder; give a checkpoint's folder{otherwise}")
    if (reason := problem(folder, phases)) is not None:
        raise UserError(f"{option} {path_text!r} is not a valid checkpoint: {reason}")
    return folder
