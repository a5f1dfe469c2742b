"""A store of checkpoints that knows only names and bytes: atomic, verified, marker last.

A checkpoint is a folder `step-00000500` with a `manifest.json` that gives every file's SHA-256 and size. It is written
under a temporary name, synced, and renamed when complete, so every prefix of a save leaves the earlier ones as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.errors import UserError
from trainer.tensorfile import write_atomic

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")
_TEMPORARY = re.compile(r"\.step-\d{8}\.tmp")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def save(root: Path, step: int, files: Mapping[str, Iterable[memoryview | bytes]]) -> Path:
    """Write one checkpoint; returns its folder. Raises OSError and leaves the others untouched."""
    root.mkdir(parents=True, exist_ok=True)
    final, temporary = root / folder_name(step), root / f".{folder_name(step)}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        listed = {}
        for name, pieces in files.items():
            digest, size = write_atomic(temporary / name, pieces)
            listed[name] = {"sha256": digest, "bytes": size}
        write_atomic(temporary / MANIFEST, [json.dumps({"files": listed}, indent=1, sort_keys=True).encode()])
        sync_folder(temporary)
        if final.exists():
            # A step that was saved before an interruption and is reached again: the bytes are the same by contract.
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; a no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problem(folder: Path) -> str | None:
    """Why `folder` is not a valid checkpoint, or None. Reads every byte."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if not listed:
            return f"{MANIFEST} lists no files"
        for name, item in listed.items():
            path = folder / name
            if path.stat().st_size != item["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, the manifest says {item['bytes']}"
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != item["sha256"]:
                    return f"{name} does not match its SHA-256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({error})"
    return None


def steps(root: Path) -> list[int]:
    """Steps that have a folder, valid or not, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(m[1]) for p in root.iterdir() if (m := _NAME.fullmatch(p.name)))


def newest_valid(root: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and one line for every newer one that was passed over."""
    passed = []
    for step in reversed(steps(root)):
        folder = root / folder_name(step)
        reason = problem(folder)
        if reason is None:
            return folder, passed
        passed.append(f"{folder} is not valid: {reason}")
    return None, passed


def prune(root: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints, once the newest has been verified; and own leftovers."""
    present = steps(root)
    if present and problem(root / folder_name(present[-1])) is None:
        for step in present[:-keep_last]:
            shutil.rmtree(root / folder_name(step))
    for path in root.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path)


def set_aside(root: Path, *, after: int) -> None:
    """Rename checkpoints beyond step `after`: a run that goes on from an earlier one must not be overtaken by them."""
    for step in steps(root):
        if step > after:
            target = root / f"superseded-{folder_name(step)}"
            shutil.rmtree(target, ignore_errors=True)
            os.replace(root / folder_name(step), target)


def find(root: Path, resume_from: str | None) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume_from auto|latest|DIR` means, or None for a fresh start; and what was passed over.

    Raises UserError: `latest` without any checkpoint, checkpoints that are all invalid, a DIR that is none.
    """
    if resume_from is None:
        return None, []
    if resume_from in ("auto", "latest"):
        folder, passed = newest_valid(root)
        if folder is None and passed:
            raise UserError(
                f"--resume_from {resume_from}: no valid checkpoint in {root}: {'; '.join(passed)}. "
                "Restore one, or remove the folder to start again"
            )
        if folder is None and resume_from == "latest":
            raise UserError(
                f"--resume_from latest: there is no checkpoint in {root}; use --resume_from auto to start fresh"
            )
        return folder, passed
    folder = Path(resume_from)
    if not folder.is_dir():
        raise UserError(f"--resume_from {resume_from!r} is not a folder; give auto, latest or a checkpoint's folder")
    reason = problem(folder)
    if reason is not None:
        raise UserError(f"--resume_from {resume_from!r} is not a valid checkpoint: {reason}")
    return folder, []
