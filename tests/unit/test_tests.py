"""A room's tests are found without a search: unit/ mirrors the program and its tools, tests/README.md lists the rest."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from itertools import combinations, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT, pairs

TESTS = ROOT / "tests"
# Of the trees as such, and of no room.
OF_THE_WHOLE = {"test_docs.py", "test_figures.py", "test_rooms.py", "test_tests.py", "test_tools.py"}
# Beside trainer/, whose rooms are folders of unit/ itself: by folder of unit/, where what it tests lies.
TOOLS = {
    "workbench": "workbench", "scripts": "scripts", "benchmarks": "benchmarks", "proofs": "tests/proofs",
    "pocket": "examples/pocket",
}  # fmt: skip
# Rooms whose tests are found by the room; of the others, by the file.
WORKSHOPS = {
    "adapters", "checkpoint", "config", "data", "ema", "kernels", "models", "objectives", "optim", "quantization",
}  # fmt: skip

OWN = {"trainer", "workbench", "scripts", "benchmarks", "examples", "tests"}
CLOCKS = {f"{clock}{unit}" for clock in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")}


def orphans(unit: Path, root: Path) -> list[str]:
    """Tests and folders of `unit` that no file or folder of `root`/trainer, of the workbench or of the tools stands for."""
    found = []
    for path in sorted(unit.rglob("*")):
        place = path.relative_to(unit)
        if "__pycache__" in place.parts or place.name == "__init__.py" or str(place) in OF_THE_WHOLE:
            continue
        top, *below = place.parts
        folder = root.joinpath(*((TOOLS[top], *below) if top in TOOLS else ("trainer", *place.parts))).parent
        if path.is_dir():
            there = (folder / place.name).is_dir()
        else:
            words = place.stem.removeprefix("test_").split("_")
            names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
            there = place.name.startswith("test_") and any(
                (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file() for name in names
            )
        if not there:
            found.append(str(place))
    return found


def test_the_tree_of_the_unit_tests_mirrors_the_programs() -> None:
    assert not orphans(TESTS / "unit", ROOT), "no room of trainer/ and no tool has this name"


@pytest.mark.parametrize(
    ("path", "found"),
    [("test_step.py", False), ("test_wall_paper.py", False), ("data/test_cache.py", False),
     ("data/test_cache_damage.py", False), ("proofs/test_kills.py", False), ("test_stop.py", True),
     ("test_cache.py", True), ("data/test_step.py", True), ("data/helpers.py", True), ("date/__init__.py", True),
     ("scripts/test_kills.py", True)],
)  # fmt: skip
def test_a_test_without_a_room_is_found(tmp_path: Path, path: str, found: bool) -> None:
    for file in ("trainer/step.py", "trainer/data/cache.py", "tests/proofs/kills.py", "trainer/wall/__init__.py",
                 f"tests/unit/{path}"):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert bool(orphans(tmp_path / "tests" / "unit", tmp_path)) == found


@pytest.mark.parametrize("folder", ["integration", "numerics"])
def test_the_readme_lists_every_file_by_what_it_promises(folder: str) -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    section = text.partition(f"## What `{folder}/` promises")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+\.py)` \| \S.* \|$", section, re.MULTILINE)
    assert listed == sorted(path.name for path in (TESTS / folder).glob("test_*.py"))


def test_the_readme_leads_from_every_other_room_to_its_tests() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Rooms without tests in `unit/`")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `([\w/]+)` \| (\S.*) \|$", section, re.MULTILINE))
    unit = TESTS / "unit"
    files = {path.relative_to(ROOT / "trainer").with_suffix("") for path in ROOT.glob("trainer/*/*.py")}
    files |= {path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("workbench/*/*.py")}
    files = {file for file in files if file.name != "__init__"}
    rooms = {str(file) for file in files if file.parts[0] not in WORKSHOPS} | WORKSHOPS
    tested = {str(path.relative_to(unit).with_suffix("")).replace("test_", "", 1) for path in unit.rglob("test_*.py")}
    tested |= {path.name for path in unit.iterdir() if path.is_dir()}
    assert list(listed) == sorted(rooms - tested)
    for room, tests in listed.items():
        files = re.findall(r"`([^`]+)`", tests)
        assert files and all((TESTS / file).is_file() for file in files), room


def test_every_folder_of_tests_is_a_package() -> None:
    """Files of one name in two folders would else be one module."""
    without = {path.parent for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").is_file()}
    assert not without


def durations(source: str) -> list[int]:
    """The lines of assertions about what a clock of `time` says. The limit of a loop that waits is none: `while not done():
    assert time.monotonic() < until`."""

    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("time.") in CLOCKS

    def of_a_clock(node: ast.AST, names: set[str]) -> bool:
        """Whether a value is a reading, or made of readings and numbers."""
        if isinstance(node, ast.BinOp):
            return of_a_clock(node.left, names) or of_a_clock(node.right, names)
        return reads(node) or (isinstance(node, ast.Name) and node.id in names)

    def is_limit(test: ast.AST) -> bool:
        return isinstance(test, ast.Compare) and reads(test.left) and not any(isinstance(n, ast.Sub) for n in ast.walk(test))

    tree, found = ast.parse(source), set()
    waiting = {n for loop in ast.walk(tree) if isinstance(loop, ast.While) for n in ast.walk(loop)}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    pairs = zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
                    names |= {one.id for one, value in pairs if isinstance(one, ast.Name) and of_a_clock(value, names)}
        for node in ast.walk(function):
            said = isinstance(node, ast.Assert) and any(of_a_clock(part, names) for part in ast.walk(node.test))
            if said and not (node in waiting and is_limit(node.test)):
                found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("began = time.monotonic()\nwork()\nassert time.monotonic() - began < 5", True),
        ("began = perf_counter()\nwork()\ntook = 1e3 * (perf_counter() - began)\nassert len(a) == 1 and took < limit", True),
        ("until = time.time() + 5\nwork()\nassert time.time() < until", True),
        ("a, began = 1, time.process_time()\nwhile work():\n    assert time.process_time() - began < 5", True),
        ("until = time.monotonic() + 5\nwhile not done():\n    assert time.monotonic() < until, 'it never ends'", False),
        ("os.utime(path, (time.time() - 100,) * 2)\nassert work() == 3 or step.time(u) < 1", False),
    ],
)
def test_an_assertion_about_a_duration_is_found(source: str, found: bool) -> None:
    inner = "\n".join(f"    {line}" for line in source.splitlines())
    assert bool(durations(f"def test():\n{inner}\n")) == found


def missing(source: str) -> list[str]:
    """The names that a file imports from this project's packages, and that they do not have. What it imports under a
    condition may be for an earlier tree."""
    tree, found = ast.parse(source), []
    conditional = {inner for node in ast.walk(tree) if isinstance(node, ast.If | ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OWN and node not in conditional:
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                file = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                found += [] if file or hasattr(module, name) else [f"{node.module}.{name}"]
    return found


def test_what_no_quick_test_runs_finds_what_it_imports() -> None:
    """Scripts, benchmarks, examples and proofs, when code has moved."""
    folders = [ROOT / folder for folder in ("scripts", "benchmarks", "examples", "tests/proofs")]
    wrong = {path.name: names for folder in folders for path in folder.rglob("*.py") if (names := missing(path.read_text()))}
    assert not wrong
    assert missing("from trainer.base.errors import UserError, Nothing") == ["trainer.base.errors.Nothing"]


def test_no_test_asserts_a_duration() -> None:
    """A machine that is busy with something else is no fault. Durations are measured in benchmarks/."""
    asserted = [f"{p.relative_to(TESTS)}:{n}" for p in TESTS.rglob("*.py") for n in durations(p.read_text(encoding="utf-8"))]
    assert not asserted


def test_what_the_continuous_checks_leave_out_is_marked_so() -> None:
    """`--all` is the quick suite and `slow`: of the markers it leaves out `proof` and `gpu` alone."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert {marker.partition(":")[0] for marker in options["markers"]} == {"slow", "proof", "gpu", "tool(name)"}
    assert "-m 'not slow and not proof and not gpu'" in options["addopts"]
    assert '-m "not proof and not gpu"' in (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    assert "exec bash scripts/test.sh --all\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@given(st.lists(st.integers(2, 4).map(range), min_size=2, max_size=4))
def test_in_pairs_every_two_levels_meet(factors: list[range]) -> None:
    """And no cell is there for nothing."""
    cells = pairs(*factors)

    def met(some: set[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {two for cell in some for two in combinations(enumerate(cell), 2)}

    assert met(cells) == met(set(product(*factors)))
    assert len(cells) < prod(map(len, factors)) or len(factors) == 2
