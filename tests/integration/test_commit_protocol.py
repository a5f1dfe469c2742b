"""The commit protocol against disks that fail, processes that are killed and power that goes.

Every call to the system that a save makes is seen by `System`, which keeps a model of the disk beside the real folder. From
it come, before every call, the trees that a crash there can leave:

killed: every call before has its effect, a write perhaps half of it. Nothing after it runs, clean-up included.

power lost: what was synced is on the disk, and of all else any part. What was written to a file since its last sync is
there, or half of it, or zeros, or nothing. Of the names made, renamed and removed in a folder since its last sync any may
be there and any missing, in each folder apart; only changes of the same name keep their order. A file's sync does not keep
its name. Journaling file systems lose less than that (ext4 and XFS keep the order of all such changes). Taken for granted:
a sync that returned holds, and a rename is done or not.

After each: the newest valid checkpoint is the one before or the new one, with the right bytes; none that is listed is half
there; the next start sweeps, saves and prunes, and leaves nothing else.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer.base import files
from trainer.checkpoint import store
from trainer.checkpoint.saver import Saver
from trainer.monitoring.metrics import Metrics

CALLS = ("open", "write", "fsync", "close", "replace", "mkdir", "unlink", "rmdir")
REAL = {name: getattr(os, name) for name in CALLS}
Tree = tuple  # of (name, bytes of a file or Tree of a folder), sorted


def contents(step: int) -> dict[str, list[bytes]]:
    """Files of two pieces each, different at every step."""
    return {name: [name.encode() * step, bytes(range(step, 50))] for name in ("adapter.safetensors", "state.json")}


# --- a model of the disk ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    """seen: what processes read. synced: what the disk is known to hold."""

    seen: bytes = b""
    synced: bytes = b""

    def after_power_loss(self) -> set[bytes]:
        assert self.seen.startswith(self.synced), "files are only ever appended to"
        rest = self.seen[len(self.synced) :]
        return {self.synced + end for end in (b"", rest, rest[: len(rest) // 2], bytes(len(rest)))}


@dataclass(eq=False)
class Folder:
    """seen: the names that processes see. synced: those at the last sync. changes: since then, each {name: node or None}."""

    seen: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        self.changes.append(names)
        _apply(self.seen, names)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.seen), []

    def after_power_loss(self) -> set[Tree]:
        trees = set()
        for surviving in _orders_kept(self.changes):
            names = dict(self.synced)
            for change in surviving:
                _apply(names, change)
            states = [[(name, state) for state in node.after_power_loss()] for name, node in sorted(names.items())]
            trees |= set(itertools.product(*states))
        return trees

    def as_seen(self) -> Tree:
        return tuple(
            (name, node.as_seen() if isinstance(node, Folder) else node.seen) for name, node in sorted(self.seen.items())
        )


def _apply(names: dict, change: dict) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _orders_kept(changes: list[dict]) -> Iterator[list[dict]]:
    """Every subset in which nothing survives that came after a lost change of the same name."""
    for chosen in itertools.product((True, False), repeat=len(changes)):
        lost: set[str] = set()
        for change, survives in zip(changes, chosen, strict=True):
            if survives and lost & change.keys():
                break
            lost |= set() if survives else change.keys()
        else:
            yield [change for change, survives in zip(changes, chosen, strict=True) if survives]


def make(tree: Tree, path: Path) -> Path:
    path.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            make(content, path / name)
    return path


def read(path: Path) -> Tree:
    return tuple((p.name, read(p) if p.is_dir() else p.read_bytes()) for p in sorted(path.iterdir()))


def all_synced(tree: Tree) -> Folder:
    names = {name: File(at, at) if isinstance(at, bytes) else all_synced(at) for name, at in tree}
    return Folder(dict(names), dict(names))


# --- the calls --------------------------------------------------------------------------------------------------------


class System:
    """Stands between this process and the system for all below `base`. Inside `with`, calls go through it.

    calls: (what, path) in order. moments: the model before each call, and in the middle of each write. Nothing is really
    synced. fails: (number, what) -> the error number that this call meets with. idle: the number of a sync that does nothing.
    at_most: bytes that one write takes. watch: whether moments are kept.
    """

    def __init__(
        self,
        base: Path,
        disk: Folder | None = None,
        *,
        fails: Callable[[int, str], int | None] = lambda number, what: None,
        idle: int | None = None,
        at_most: int = 1 << 30,
        watch: bool = False,
    ) -> None:
        self.base, self.disk = base, disk or all_synced(read(base))
        self.fails, self.idle, self.at_most, self.watch = fails, idle, at_most, watch
        self.calls: list[tuple[str, Path]] = []
        self.moments: list[Folder] = []
        self.paths: dict[int, Path] = {}

    def __enter__(self) -> System:
        self.outside = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, getattr(self, name))
        return self

    def __exit__(self, *error) -> None:
        for name, call in self.outside.items():
            setattr(os, name, call)

    def path(self, given, dir_fd: int | None = None) -> Path | None:
        """Relative to `base`; None for what lies elsewhere."""
        path = (self.base / self.paths[dir_fd] if dir_fd in self.paths else Path.cwd()) / given
        return path.relative_to(self.base) if path.is_relative_to(self.base) else None

    def node(self, path: Path):
        node = self.disk
        for part in path.parts:
            node = node.seen[part]
        return node

    def called(self, what: str, path: Path, *, of_descriptor: bool = False) -> None:
        if self.watch:
            self.moments.append(copy.deepcopy(self.disk))
        number = len(self.calls)
        self.calls.append((what, path))
        code = self.fails(number, what)
        if code is not None:
            raise OSError(code, os.strerror(code), *([] if of_descriptor else [str(self.base / path)]))

    def open(self, given, flags, mode=0o777, *, dir_fd=None):
        path = self.path(given, dir_fd)
        if path is not None:
            self.called("open", path)
        descriptor = REAL["open"](given, flags, mode, dir_fd=dir_fd)
        if path is not None:
            self.paths[descriptor] = path
            if flags & os.O_CREAT:
                self.node(path.parent).change({path.name: File()})
        return descriptor

    def write(self, descriptor, data):
        path = self.paths.get(descriptor)
        if path is None:
            return REAL["write"](descriptor, data)
        self.called("write", path, of_descriptor=True)
        data, file = bytes(data)[: self.at_most], self.node(path)
        before = file.seen
        if self.watch:
            file.seen = before + data[: len(data) // 2]
            self.moments.append(copy.deepcopy(self.disk))
        file.seen = before + data
        return REAL["write"](descriptor, data)

    def fsync(self, descriptor):
        path = self.paths.get(descriptor)
        if path is None:  # opened by Python's own `open`, which goes past us
            path = self.path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path is None:
                return
            folder, seen = self.node(path.parent), (self.base / path).read_bytes()
            if path.name not in folder.seen:
                folder.change({path.name: File()})
            folder.seen[path.name].seen = seen
        self.called("fsync", path, of_descriptor=True)
        node = self.node(path)
        if len(self.calls) - 1 == self.idle:
            return
        if isinstance(node, Folder):
            node.sync()
        else:
            node.synced = node.seen

    def close(self, descriptor):
        path = self.paths.pop(descriptor, None)
        REAL["close"](descriptor)
        if path is not None and isinstance(self.node(path), File):  # what was only read has nothing left to fail at
            self.called("close", path, of_descriptor=True)

    def replace(self, source, target):
        old, new = self.path(source), self.path(target)
        if old is None:
            return REAL["replace"](source, target)
        assert old.parent == new.parent
        self.called("replace", old)
        REAL["replace"](source, target)
        self.node(old.parent).change({old.name: None, new.name: self.node(old)})

    def mkdir(self, given, mode=0o777):
        path = self.path(given)
        if path is not None:
            self.called("mkdir", path)
        REAL["mkdir"](given, mode)
        if path is not None:
            self.node(path.parent).change({path.name: Folder()})

    def _gone(self, what: str, given, dir_fd) -> None:
        path = self.path(given, dir_fd)
        if path is not None:
            self.called(what, path)
        REAL[what](given, dir_fd=dir_fd)
        if path is not None:
            self.node(path.parent).change({path.name: None})

    def unlink(self, given, *, dir_fd=None):
        self._gone("unlink", given, dir_fd)

    def rmdir(self, given, *, dir_fd=None):
        self._gone("rmdir", given, dir_fd)


# --- what is tried ----------------------------------------------------------------------------------------------------

ROOT = Path("outputs", "bear", "checkpoints")


@dataclass(frozen=True)
class Scenario:
    """there: the steps that are saved already. step: the one that is saved. leave: what else a run before left."""

    there: tuple[int, ...]
    step: int
    keep_last: int
    leave: Callable[[Path], None] = lambda root: None
    instead: bool = False

    @property
    def before(self) -> int | None:
        """The newest valid checkpoint before the save."""
        return max((step for step in self.there if step < self.step or self.instead), default=None)

    def save(self, base: Path, step: int | None = None) -> None:
        if self.instead and step is None:
            store.save(base / ROOT, self.step, contents(self.step), instead=True)
            return
        saver = Saver(base / ROOT, keep_last=self.keep_last, background=False)
        saver.save(step or self.step, contents(step or self.step))
        if (failure := saver.join()) is not None:
            raise failure


def damage(root: Path) -> None:
    (root / "step-00000002" / "state.json").write_bytes(b"damaged")


def leave_temporaries(root: Path) -> None:
    for name in (".step-00000004.new.tmp", ".step-00000001.old.tmp"):
        (root / name).mkdir()
        (root / name / "state.json").write_bytes(b"{")


def leave_other(root: Path) -> None:
    """The checkpoint of step 3, with other contents than are saved now."""
    files.remove_folder(root / "step-00000003")
    store.save(root, 3, OTHER)


def leave_copy(root: Path) -> None:
    leave_other(root)
    shutil.copytree(root / "step-00000003", root / "superseded-step-00000003")


OTHER = {"adapter.safetensors": [b"other"], "state.json": [b"{}"]}
SCENARIOS = {
    "the first": Scenario((), 1, 1),
    "keep_last = 1": Scenario((1,), 2, 1),
    "keep_last = 2": Scenario((1, 2), 3, 2),
    "nothing to prune": Scenario((1,), 2, 3),
    "two to prune": Scenario((1, 2), 3, 1),
    "over a damaged one": Scenario((1, 2), 2, 1, damage),
    "with leftovers": Scenario((3,), 4, 1, leave_temporaries),
    "another in its place": Scenario((3,), 3, 3, leave_other, instead=True),
    "another in its place, with an older one": Scenario((2, 3), 3, 3, leave_other, instead=True),
    "another in its place, set aside before": Scenario((3,), 3, 3, leave_copy, instead=True),
    "the same in its place": Scenario((3,), 3, 3, instead=True),
}
every_scenario = pytest.mark.parametrize("name", SCENARIOS)


def start(root: Path, newest: int | None) -> None:
    """What a run does before it saves (run.open_output)."""
    store.settle(root)
    store.set_aside(root, after=newest or 0)


def step_in(folder: Path | None) -> int | None:
    return None if folder is None else int(re.fullmatch(r"(?:\.)?step-(\d{8})(?:\.new\.tmp)?", folder.name)[1])


def holds(folder: Path, pieces: dict[str, list[bytes]]) -> bool:
    """Whether it is a valid checkpoint of this."""
    held = {name: b"".join(some) for name, some in pieces.items()}
    return store.problem(folder) is None and all((folder / name).read_bytes() == data for name, data in held.items())


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("superseded-"))


class Bench:
    """Folders to try things in, and what the trees lead to that crashes leave. Equal trees are tried once."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp, self.numbers = tmp_path, itertools.count()
        self.known: dict[tuple[Tree, Scenario], tuple[int | None, str | None]] = {}

    def folder(self) -> Path:
        return self.tmp / str(next(self.numbers))

    def start(self, scenario: Scenario) -> Path:
        base = self.folder()
        base.mkdir()
        for step in scenario.there:
            store.save(base / ROOT, step, contents(step))
        scenario.leave(base / ROOT)
        return base

    def watch(self, scenario: Scenario, **options) -> System:
        """The scenario's save, without faults."""
        system = System(self.start(scenario), watch=True, **options)
        with system:
            scenario.save(system.base)
        system.moments.append(system.disk)
        return system

    def restart(self, tree: Tree, scenario: Scenario) -> tuple[int | None, str | None]:
        """(the newest valid step in a tree that a crash left, what is wrong with the tree or with going on from it)."""
        if (tree, scenario) not in self.known:
            base = make(tree, self.folder())
            self.known[tree, scenario] = self.go_on(base, scenario)
        return self.known[tree, scenario]

    def go_on(self, base: Path, scenario: Scenario) -> tuple[int | None, str | None]:
        root = base / ROOT
        folder, passed = store.newest_valid(root)
        newest = step_in(folder)
        others = [root / store.folder_name(3), *root.glob("superseded-*"), *root.glob(".*.new.tmp")]
        if scenario.leave in (leave_other, leave_copy) and not any(holds(path, OTHER) for path in others):
            return newest, "what was replaced is lost"
        if newest and not any(holds(folder, pieces) for pieces in (contents(newest), OTHER)[: 1 + scenario.instead]):
            return newest, f"{folder.name} has other bytes"
        if scenario.leave is not damage and any(store.problem(root / store.folder_name(s)) for s in store.steps(root)):
            return newest, f"half there: {passed}"
        following = (newest or 0) + 1
        start(root, newest)
        scenario.save(base, following)
        left = visible(root)
        if left != [store.folder_name(step) for step in store.steps(root)]:
            return newest, f"after the next save there are {left}"
        if store.newest_valid(root)[0].name != store.folder_name(following):
            return newest, f"after the next save the newest valid is {store.newest_valid(root)}"
        if len(left) > scenario.keep_last:
            return newest, f"after the next save {left} are kept"
        return newest, None

    def complaints(self, scenario: Scenario, system: System, trees: Callable[[Folder], set[Tree]]) -> Iterator[str]:
        """What is wrong with any tree that a crash at any of the system's moments leaves."""
        for number, disk in enumerate(system.moments):
            done = number == len(system.moments) - 1
            allowed = {scenario.step} if done else {scenario.before, scenario.step}
            for tree in trees(disk):
                newest, complaint = self.restart(tree, scenario)
                if complaint is not None or newest not in allowed:
                    yield f"moment {number}: the newest is {newest}, not of {allowed}; {complaint}; {tree}"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch) -> Bench:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return Bench(tmp_path)


@pytest.mark.slow
@every_scenario
def test_power_lost_or_killed_at_any_moment(bench: Bench, name: str) -> None:
    scenario = SCENARIOS[name]
    system = bench.watch(scenario)
    assert not list(bench.complaints(scenario, system, lambda disk: disk.after_power_loss() | {disk.as_seen()}))
    assert read(system.base) == system.disk.as_seen(), "the model lost sight of the disk"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the first", "keep_last = 1"])
def test_no_sync_can_be_left_out(bench: Bench, name: str) -> None:
    """None is there for nothing; and the model does find fault where one is missing."""
    scenario = SCENARIOS[name]
    for number, (what, path) in enumerate(bench.watch(scenario).calls):
        # The output folder's sync only matters where the folder of checkpoints is new to it, or the log is.
        if what == "fsync" and not (scenario.there and path == ROOT.parent):
            system = bench.watch(scenario, idle=number)
            assert next(bench.complaints(scenario, system, Folder.after_power_loss), None), f"idle: {what} {path}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the first", "keep_last = 1", "over a damaged one", "with leftovers"])
@pytest.mark.parametrize("again", [False, True], ids=["goes on", "saves the same step again"])
def test_killed_and_started_and_power_lost(bench: Bench, name: str, again: bool) -> None:
    """What a killed process left unsynced is not lost either, once the next one has saved."""
    scenario = SCENARIOS[name]
    for disk in bench.watch(scenario).moments:
        system = System(make(disk.as_seen(), bench.folder()), copy.deepcopy(disk))
        root = system.base / ROOT
        with system:
            newest = step_in(store.newest_valid(root)[0]) or 0
            step = newest if again and newest else newest + 1
            start(root, newest)
            scenario.save(system.base, step)
        for tree in system.disk.after_power_loss():
            assert bench.restart(tree, scenario) == (step, None)


def test_what_is_set_aside_stays_so(bench: Bench) -> None:
    system = System(bench.start(Scenario((1, 2, 3), 4, 3)))
    with system:
        store.set_aside(system.base / ROOT, after=1)
    for tree in system.disk.after_power_loss():
        assert store.steps(make(tree, bench.folder()) / ROOT) == [1]


def test_the_log_is_on_the_disk_before_the_checkpoint(bench: Bench) -> None:
    """A start cuts metrics.jsonl to the checkpoint's step; a line that is missing before it would be missing for ever."""
    base, scenario = bench.folder(), SCENARIOS["keep_last = 1"]
    (base / ROOT.parent).mkdir(parents=True)
    system = System(base, watch=True)
    with system:
        log = Metrics(base / ROOT.parent / "metrics.jsonl", total_steps=2, initial_step=0, enabled=True)
        saver = Saver(base / ROOT, keep_last=1, background=False, before=log.sync)
        for step in (1, 2):
            log.log({"step": step, "loss": 0.5, "lr": 1e-4})
            saver.save(step, contents(step))
            assert saver.join() is None
        log.close()
    order = [(what, path.name) for what, path in system.calls]
    for step in (1, 2):
        synced = order.index(("fsync", "metrics.jsonl"))
        assert synced < order.index(("mkdir", f".step-{step:08d}.new.tmp"))
        order[synced] = ("", "")
    for disk in [*system.moments, system.disk]:
        for tree in disk.after_power_loss():
            newest, complaint = bench.restart(tree, scenario)
            bear = dict(dict(dict(tree)["outputs"])["bear"])
            lines = bear.get("metrics.jsonl", b"").count(b"\n")
            assert complaint is None and lines >= (newest or 0)


# --- calls that fail --------------------------------------------------------------------------------------------------


def saved_under(system: System, scenario: Scenario) -> OSError | None:
    with system:
        try:
            scenario.save(system.base)
        except OSError as error:
            return error
    return None


def check_after_failure(bench: Bench, scenario: Scenario, base: Path) -> None:
    """The checkpoints before are valid, or the new one is; a second try succeeds and leaves nothing else."""
    assert step_in(store.newest_valid(base / ROOT)[0]) in (scenario.before, scenario.step)
    _, complaint = bench.restart(read(base), scenario)
    assert complaint is None
    scenario.save(base)
    left = visible(base / ROOT)
    assert left[-1] == store.folder_name(scenario.step) and store.problem(base / ROOT / left[-1]) is None
    assert len(left) <= scenario.keep_last and not [name for name in left if name.startswith(".")]


@pytest.mark.slow
@every_scenario
def test_any_call_may_fail(bench: Bench, name: str) -> None:
    scenario, code = SCENARIOS[name], errno.EIO
    tried = bench.watch(scenario).calls
    for number, (what, path) in enumerate(tried):
        system = System(bench.start(scenario), fails=lambda n, what, number=number: code if n == number else None)
        there = {p.name for p in (system.base / ROOT).glob(".*")}
        error = saved_under(system, scenario)
        assert system.calls[number] == (what, path)
        if error is None:  # leftovers that another save will delete
            assert there & set(path.parts), f"the failure of {what} {path} was swallowed"
        else:
            assert error.errno == code and error.filename and str(system.base / path).startswith(error.filename)
            assert os.strerror(code) in str(error) and (system.base / ROOT.parent).exists() <= ("outputs" in str(error))
        assert not {p.name for p in (system.base / ROOT).glob(".*")} - there, f"after {what} {path}"
        check_after_failure(bench, scenario, system.base)


@pytest.mark.slow
@every_scenario
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["a full disk", "a dead disk"])
def test_all_calls_fail_from_one_on(bench: Bench, name: str, code: int) -> None:
    """Nothing can be cleaned up on a dead disk; once it is mended the next save does."""
    scenario = SCENARIOS[name]
    needs_space = ("write", "fsync", "mkdir")
    tried = bench.watch(scenario).calls
    for number in range(len(tried)):
        system = System(
            bench.start(scenario),
            fails=lambda n, what, number=number: code if n >= number and (code == errno.EIO or what in needs_space) else None,
        )
        error = saved_under(system, scenario)
        assert error is not None or (code == errno.ENOSPC and not {what for what, _ in tried[number:]} & set(needs_space))
        assert error is None or (error.errno == code and error.filename)
        check_after_failure(bench, scenario, system.base)


@pytest.mark.parametrize("name", ["keep_last = 1", "over a damaged one"])
def test_short_writes(bench: Bench, name: str) -> None:
    """A system may take a part of what it is given: the rest follows, until it cannot."""
    scenario = SCENARIOS[name]
    whole, short = bench.watch(scenario), System(bench.start(scenario), at_most=7)
    assert saved_under(short, scenario) is None
    assert short.disk.as_seen() == read(short.base) == whole.disk.as_seen()
    writes = [number for number, (what, _) in enumerate(short.calls) if what == "write"]
    assert len(writes) > 5 * len([what for what, _ in whole.calls if what == "write"])
    for number in writes:
        system = System(
            bench.start(scenario), at_most=7, fails=lambda n, what, number=number: errno.ENOSPC if n == number else None
        )
        error = saved_under(system, scenario)
        assert error is not None and error.filename == str(system.base / system.calls[number][1])
        check_after_failure(bench, scenario, system.base)


def test_a_file_is_there_whole_or_not_at_all(bench: Bench) -> None:
    """Adapters, configs, cache entries: a single file, atomic by its rename."""

    def start(**options) -> System:
        base = bench.folder()
        base.mkdir()
        (base / "file").write_bytes(b"old")
        return System(base, **options)

    whole = start(watch=True)
    with whole:
        files.write_atomic(whole.base / "file", [b"new", b"er"])
    for disk in [*whole.moments, whole.disk]:
        for tree in {disk.as_seen()} | disk.after_power_loss():
            assert dict(tree)["file"] in (b"old", b"newer")
    assert read(whole.base) == (("file", b"newer"),)
    for number, (what, path) in enumerate(whole.calls):
        if what == "mkdir":  # the folder is there
            continue
        system = start(fails=lambda n, what, number=number: errno.ENOSPC if n == number else None)
        with system, pytest.raises(OSError, match="No space left") as failed:
            files.write_atomic(system.base / "file", [b"new", b"er"])
        assert Path(failed.value.filename).name.startswith(".file."), f"{what} {path}"
        assert read(system.base) == (("file", b"old"),), f"{what} {path}"
