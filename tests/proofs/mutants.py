"""Do the tests see faults? Each mutant of a catalogue puts one into a copy of the tree, and tests of its room have to fail.

    python tests/proofs/mutants.py                          # the whole catalogue, mutants.toml
    python tests/proofs/mutants.py --package optim          # of one package
    python tests/proofs/mutants.py --only '*resum*'         # whose file or fault matches
    python tests/proofs/mutants.py --check                  # no mutant: that all of their tests pass without one, as is
                                                              # tried before the others, too

A mutant is data: `file`; `before`, text that stands in it once; `after`, what stands there instead; `tests`, files or node
ids of pytest; `fault`, in words; `commit`, where it restores a fault that this commit mended; `reason`, where no test sees
it and that is right. A package is a folder of trainer/.

A mutant is killed where a test fails, or where the tests take more than --seconds of processor time: what a fault makes
endless is seen, too. Each mutant is tried in a fork of a process that has imported the libraries, and nothing of the tree.

Exit status 1: less than 97 % are killed, one survives without a reason, or one with a reason is killed; 2: no such mutant, a
`before` that is not there once, or a test that fails without a mutant. Linux.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).with_name("mutants.toml")
LEAST = 0.97  # of the catalogue is killed
PROGRAM = ("trainer", "workbench")
OURS = (*PROGRAM, "scripts", "benchmarks", "examples", "tests")
# Asleep it takes no processor time. A mutant is given up after so many times --seconds by the clock.
PATIENCE = 10
# One failure is enough; no files beside the tests; the same random examples for each mutant.
PYTEST = (
    "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "-m", "not proof and not gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    fault: str
    package: str
    commit: str = ""
    reason: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault in it. Raises ValueError where `before` does not stand there once."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.file}: there {count} times, not once:\n{self.before}")
        return text.replace(self.before, self.after)


def read(path: Path = CATALOGUE) -> list[Mutant]:
    """The faults of a catalogue, in its order."""
    mutants = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        package = entry["file"].removeprefix("trainer/").rpartition("/")[0]
        mutants.append(Mutant(**entry | {"tests": tuple(entry["tests"])}, package=package))
    return mutants


class Copy:
    """The tree's files in a folder of their own, compiled. root: a checkout; what git ignores is left out."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to((root / ".venv").resolve())
        compiled = [sys.executable, "-m", "compileall", "-q", *(part for part in OURS if (folder / part).is_dir())]
        subprocess.run(compiled, check=True, cwd=folder)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the fault is there. Python takes compiled code by a file's size and its time in seconds: none is left."""
        path = self.folder / mutant.file
        original = path.read_text(encoding="utf-8")
        times = path.stat()
        kept = [(compiled, compiled.read_bytes()) for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")]
        for compiled, _ in kept:
            compiled.unlink()
        path.write_text(mutant.applied(original), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for compiled, code in kept:
                compiled.write_bytes(code)


def fork_tests(folder: Path, tests: Collection[str], log: Path, seconds: float, arguments: Sequence[str] = PYTEST) -> int:
    """Start pytest in a fork, in `folder`, with what it says in `log`. Returns the process id, which is a group's."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(written, descriptor)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        os.chdir(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True
        found = importlib.util.find_spec(PROGRAM[0])
        assert found is not None and found.origin is not None and Path(found.origin).is_relative_to(folder), found
        import pytest

        status = int(pytest.main([*arguments, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def preload(libraries: Sequence[str]) -> None:
    for name in libraries:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in PROGRAM]
    assert not ours, f"{ours} would be this tree's in every fork"
    assert threading.active_count() == 1, "a fork would lose a thread"


# Of pytest's exit statuses: 1 a failure, 2 a test file that cannot be read any more.
FATES = {0: "survived", 1: "killed", 2: "killed"}


def fate(status: int) -> str:
    """Of what `os.waitpid` gives. A signal: the limit of the processor time, or the fault ends the process."""
    code = os.waitstatus_to_exitcode(status)
    return "killed" if code < 0 else FATES.get(code, f"pytest ended with {code}")


def tried(mutants: Sequence[Mutant], root: Path, jobs: int, seconds: float) -> Iterator[tuple[Mutant, str, float, str]]:
    """(mutant, its fate, processor seconds, what pytest said) of each, in the order in which they end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary)
        copies = [Copy(root, folder / f"copy-{number}") for number in range(min(jobs, len(mutants)))]
        waiting = list(reversed(mutants))
        running: dict[int, tuple[Mutant, Copy, ExitStack, float]] = {}
        try:
            while waiting or running:
                while waiting and copies:
                    mutant, copy, stack = waiting.pop(), copies.pop(), ExitStack()
                    stack.enter_context(copy.mutated(mutant))
                    pid = fork_tests(copy.folder, mutant.tests, copy.folder / "log", seconds)
                    running[pid] = mutant, copy, stack, time.monotonic() + PATIENCE * seconds
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if not pid:
                    for late in (pid for pid, (*_, until) in running.items() if time.monotonic() > until):
                        os.killpg(late, 9)
                    time.sleep(0.05)
                    continue
                mutant, copy, stack, _ = running.pop(pid)
                stack.close()
                copies.append(copy)
                said = (copy.folder / "log").read_text(errors="replace")
                yield mutant, fate(status), used.ru_utime + used.ru_stime, said
        finally:
            for pid, (_, _, stack, _) in running.items():
                os.killpg(pid, 9)
                os.waitpid(pid, 0)
                stack.close()


def failing(mutants: Sequence[Mutant], root: Path) -> str:
    """What pytest says of all tests of the mutants without a mutant, where one fails; "" where none does."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Copy(root, Path(temporary) / "copy")
        arguments = [each for each in PYTEST if each != "-x"]
        pid = fork_tests(copy.folder, tests, copy.folder / "log", 3600, arguments)
        _, status = os.waitpid(pid, 0)
        return "" if status == 0 else (copy.folder / "log").read_text(errors="replace")


def table(fates: Mapping[Mutant, str]) -> list[str]:
    """A line for each package, and one for all."""
    packages = sorted({mutant.package for mutant in fates})
    width = max(map(len, (*packages, "in all")))
    lines = []
    for package in (*packages, "in all"):
        of_it = [fate for mutant, fate in fates.items() if package in (mutant.package, "in all")]
        killed = of_it.count("killed")
        lines.append(f"{package:<{width}} {killed:>4} of {len(of_it):>3} killed  {killed / len(of_it):>6.1%}")
    return lines


def verdict(fates: Mapping[Mutant, str]) -> list[str]:
    """What is wrong with the outcome; empty where nothing is."""
    share = list(fates.values()).count("killed") / len(fates)
    wrong = [f"{share:.1%} are killed, and {LEAST:.0%} is the least"] if share < LEAST else []
    for mutant, fate in fates.items():
        if fate == "killed" and mutant.reason:
            wrong.append(f"{mutant.file}: {mutant.fault}: killed, although a reason says why it is not")
        elif fate == "survived" and not mutant.reason:
            wrong.append(f"{mutant.file}: {mutant.fault}: survived; write a test that sees it, or the reason")
        elif fate not in ("killed", "survived"):
            wrong.append(f"{mutant.file}: {mutant.fault}: {fate}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="mutants whose file or fault matches")
    parser.add_argument("--package", help="mutants of one package")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time that a mutant's tests may take")
    parser.add_argument("--check", action="store_true", help="run the tests of the mutants without one, and end")
    chosen = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in read(chosen.catalogue)
        if chosen.package in (None, mutant.package)
        and any(fnmatchcase(text, chosen.only) for text in (mutant.file, mutant.fault))
    ]
    if not mutants:
        print("no mutant of the catalogue matches", file=sys.stderr)
        return 2
    for mutant in mutants:
        try:
            mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
        except (ValueError, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    from tests.proofs.forks import LIBRARIES

    preload([*LIBRARIES, "pytest", "hypothesis.strategies", "tomli_w", "pydantic"])
    # What fails anyway would count as killed.
    said = failing(mutants, ROOT)
    if said or chosen.check:
        print(said or f"all tests of {len(mutants)} mutants pass without one")
        return 2 if said else 0
    fates: dict[Mutant, str] = {}
    for mutant, found, seconds, said in tried(mutants, ROOT, chosen.jobs, chosen.seconds):
        fates[mutant] = found
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE) if found == "killed" else None
        print(f"{found:<9} {seconds:>5.1f} s  {mutant.file}: {mutant.fault}" + (f"  [{by[1]}]" if by else ""), flush=True)
        if found == "survived" and mutant.reason:
            print(f"  reason: {mutant.reason}")
        elif found not in ("killed", "survived"):
            print(said)
    print("", *table(fates), sep="\n")
    wrong = verdict(fates)
    print("", *wrong, sep="\n") if wrong else None
    return 1 if wrong else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # libraries complain at an orderly exit
