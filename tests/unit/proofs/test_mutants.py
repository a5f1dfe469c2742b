"""The catalogue of faults fits the tree, and the tool tells a fault that is seen from one that is not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.proofs import mutants


@pytest.fixture(scope="module")
def catalogue() -> list[mutants.Mutant]:
    return mutants.read()


def test_every_fault_has_its_place_once(catalogue: list[mutants.Mutant]) -> None:
    counts = {mutant.fault: (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.before) for mutant in catalogue}
    assert {fault: count for fault, count in counts.items() if count != 1} == {}


@pytest.mark.slow
def test_every_fault_is_another_program(catalogue: list[mutants.Mutant]) -> None:
    for mutant in catalogue:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        applied = mutant.applied(text)
        parsed = (lambda each: ast.dump(ast.parse(each))) if mutant.file.endswith(".py") else str  # a template is no program
        assert parsed(applied) != parsed(text), mutant.fault
    again = Counter((mutant.file, mutant.before, mutant.after) for mutant in catalogue)
    assert max(again.values()) == 1 and max(Counter(mutant.fault for mutant in catalogue).values()) == 1


def test_every_package_has_its_faults(catalogue: list[mutants.Mutant]) -> None:
    assert len(catalogue) >= 150
    by_package = Counter(mutant.package for mutant in catalogue)
    packages = {
        str(path.parent.relative_to(ROOT)).removeprefix("trainer/")
        for package in mutants.PROGRAM
        for path in (ROOT / package).glob("*/**/*.py")
        if path.read_text(encoding="utf-8").count("\n") > 1
    }
    assert packages and {package: by_package[package] for package in packages if by_package[package] < 4} == {}


def test_the_tests_that_should_see_it_are_there(catalogue: list[mutants.Mutant]) -> None:
    texts: dict[str, str] = {}
    for mutant in catalogue:
        assert mutant.tests, mutant.fault
        for test in mutant.tests:
            file, _, name = test.partition("::")
            if file not in texts:
                texts[file] = (ROOT / file).read_text(encoding="utf-8")
            function = name.partition("[")[0]
            assert not name or re.search(rf"^def {re.escape(function)}\(", texts[file], re.MULTILINE), test


def test_the_commits_that_mended_them_are_there(catalogue: list[mutants.Mutant]) -> None:
    named = [mutant.commit for mutant in catalogue if mutant.commit]
    assert len(named) >= 60
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("the history is not here: a shallow clone, or files without one")
    log = subprocess.run([*git, "log", "--format=%H"], capture_output=True, text=True, check=True).stdout.split()
    assert {commit for commit in named if not any(known.startswith(commit) for known in log)} == set()


FAULTS = """
[[mutant]]
file = "trainer/sums/numbers.py"
before = "a + b"
after = "a - b"
fault = "seen"
tests = ["tests/test_numbers.py"]
[[mutant]]
file = "trainer/sums/numbers.py"
before = "    return a * b"
after = "    while True:\\n        a += b"
fault = "without an end"
tests = ["tests/test_numbers.py::test_product"]
[[mutant]]
file = "trainer/sums/numbers.py"
before = "def product(a, b):"
after = "def product(a, b, c=0):"
fault = "not seen"
tests = ["tests/test_numbers.py"]
"""
# A small tree in the place of this one, without the libraries, which take seconds to import.
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.proofs import forks, mutants
forks.LIBRARIES = ()
mutants.ROOT = Path.cwd()
sys.exit(mutants.main(["--catalogue", "faults.toml", "--seconds", "2", *sys.argv[2:]]))
"""


def tried(tree: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT), *more], cwd=tree, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_seen_is_killed_and_what_is_not_needs_a_reason(tmp_path: Path) -> None:
    for name, text in {
        "trainer/__init__.py": "", "trainer/sums/__init__.py": "", "tests/__init__.py": "", "faults.toml": FAULTS,
        "trainer/sums/numbers.py": "def total(a, b):\n    return a + b\n\n\ndef product(a, b):\n    return a * b\n",
        "tests/test_numbers.py": "from trainer.sums.numbers import product, total\n\n\ndef test_total():\n"
        "    assert total(2, 3) == 5\n\n\ndef test_product():\n    assert product(2, 3) == 6\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = (tmp_path / "trainer/sums/numbers.py").read_text()

    assert tried(tmp_path, "--check")[0] == 0
    status, said = tried(tmp_path, "--jobs", "2")
    lines = {line.partition("numbers.py: ")[2].partition("  [")[0]: line for line in said.splitlines() if ".py: " in line}
    assert {fault: line.split()[0] for fault, line in lines.items() if fault.count(":") == 0} == {
        "seen": "killed", "without an end": "killed", "not seen": "survived",
    }  # fmt: skip
    assert "[tests/test_numbers.py::test_total]" in lines["seen"]
    assert status == 1 and "not seen: survived; write a test that sees it, or the reason" in said
    assert re.search(r"sums +2 of +3 killed +66\.7%", said) and "97% is the least" in said
    assert tried(tmp_path, "--only", "s?en")[0] == 0 and tried(tmp_path, "--package", "words")[0] == 2
    assert (tmp_path / "trainer/sums/numbers.py").read_text() == before, "the tree itself is never touched"

    (tmp_path / "faults.toml").write_text(FAULTS.replace('"a + b"', '"a+b"'))
    status, said = tried(tmp_path)
    assert status == 2 and "there 0 times, not once" in said
    (tmp_path / "faults.toml").write_text(FAULTS)
    (tmp_path / "trainer/sums/numbers.py").write_text(before.replace("a + b", "a + b + 1"))
    status, said = tried(tmp_path, "--check")
    assert status == 2 and "test_total" in said
