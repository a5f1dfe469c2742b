"""The rules of the house: what belongs in which room of trainer/, and which room may import which.

A room is a file or a folder of trainer/. The source is read, not run. An import counts wherever it stands: at the top of a
file, inside a function, under `if TYPE_CHECKING`. Prose (comments and docstrings) may name anything.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import pytest

from tests.harness import ROOT

# --- the rules, as data -----------------------------------------------------------------------------------------------

# What every room may use. These import nothing but one another.
SHARED = {
    "digests", "draws", "errors", "files", "kernels", "layout", "memory", "patterns", "phases", "protocols", "signals",
    "tensorfile", "terminal", "types",
}  # fmt: skip

# Rooms that do one thing each: what they import besides the shared ones. All others wire these together.
WORKSHOPS: dict[str, set[str]] = {
    "adapters": set(),
    "checkpoint": set(),
    "config": set(),
    "data": set(),
    "metrics": set(),
    "models": {"objectives"},
    "objectives": set(),
    "optim": set(),
    "precision": set(),
    "processes": set(),
    "quantization": set(),
    "report": set(),
    "step": {"objectives"},
    "validation": set(),
}

# Of the others, who alone may import a room. The config does not leak below what resolves it and what starts a run.
ONLY_FOR: dict[str, set[str]] = {
    "cli": set(),
    "run": {"cli"},
    "config": {"choices", "cli", "devices", "output", "plan", "resume", "run", "storage"},
}

# What a room must not know: the loop has neither a config nor a model family, and nor have those that it calls.
KEPT_FROM: dict[str, set[str]] = {
    room: {"config", "plan", "models", "components", "encoding", "resume"} for room in ("loop", "saving", "outcome")
}

# Libraries that one room knows. A pattern is a file's path below trainer/.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "accelerate": ("processes.py", "models/building.py"),
    "bitsandbytes": ("quantization/bitsandbytes.py", "optim.py", "optim/*"),
    "diffusers": ("models/*", "optim.py", "optim/*"),
    "huggingface_hub": ("models/*",),
    "optimum": ("quantization/quanto.py",),
    "peft": ("adapters/*",),
    "safetensors": (),  # its own writer orders metadata at random: tensorfile.py reads and writes
    "tomli_w": ("config.py", "config/*"),
    "tomllib": ("config.py", "config/*"),
    "transformers": ("models/*",),
    "triton": ("kernels/*_triton.py",),
}

# Calls, by a pattern of how they are written.
CALLS: dict[str, tuple[str, ...]] = {
    r"\bGradScaler": ("precision.py",),
    r"\bautocast": ("precision.py",),
    r"\.backward": ("step.py",),
    r"optimizer\.step": ("step.py",),
}

# Where a dtype below fp32 is chosen or read: the rooms of storage, and of bytes. Losses, draws and sums are fp32 everywhere.
LOW_DTYPES = {
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "half", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip
DTYPES_IN = (
    "precision.py", "storage.py", "quantization/*", "kernels/*", "tensorfile.py",
    "config.py", "config/*",  # the words that a user may write
    "models/weight_sets.py",  # the words that the hub's file names have
)  # fmt: skip

# Words of a model family. In prose of a message they may stand: "SDXL" is the reader's word, "sdxl" the program's.
FAMILY = re.compile(r"sdxl|flux")

PATHS = {"checkpoints", "adapters", "samples", "metrics.jsonl", "report.html", "phases.jsonl", "config.toml"}

PRIVATE = r"_(?!_)"

LINES = 400

# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file of trainer/. path: below trainer/."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        return ".".join(["trainer", *self.path.removesuffix(".py").split("/")]).removesuffix(".__init__")

    @property
    def room(self) -> str:
        return self.path.partition("/")[0].removesuffix(".py")

    def is_in(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(self.path, pattern) for pattern in patterns)

    def at(self, node: ast.AST | int, what: str) -> str:
        return f"trainer/{self.path}:{node if isinstance(node, int) else node.lineno}: {what}"

    def imports(self) -> Iterator[tuple[ast.stmt, str, str]]:
        """(statement, module, name taken from it or "") of every import, wherever it stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((node, module, alias.name) for alias in node.names)

    def constants(self) -> Iterator[ast.Constant]:
        """Every string but docstrings."""
        prose = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr) and is_string(node.value)}
        yield from (node for node in ast.walk(self.tree) if is_string(node) and id(node) not in prose)


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


Sources = Mapping[str, Source]  # by module
Rule = Callable[[Sources], Iterator[str]]


def sources(files: Mapping[str, str]) -> Sources:
    """files: text by path below trainer/."""
    read = [Source(path, text) for path, text in files.items()]
    return {source.module: source for source in read}


@pytest.fixture(scope="module")
def house() -> Sources:
    folder = ROOT / "trainer"
    files = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    assert len(files) > 50
    return sources(files)


def edges(house: Sources) -> Iterator[tuple[Source, ast.stmt, str]]:
    """(source, statement, imported module of trainer) of every import within it."""
    for source in house.values():
        for node, module, name in source.imports():
            if module.partition(".")[0] == "trainer":
                inner = f"{module}.{name}"
                yield source, node, inner if inner in house else module


# --- the rules, one function each -------------------------------------------------------------------------------------


def imports_between_rooms(house: Sources) -> Iterator[str]:
    for source, node, target in edges(house):
        here, there = source.room, (target.split(".") + ["__init__"])[1]
        if here == there:
            continue
        if here in SHARED and there not in SHARED:
            yield source.at(node, f"{here} is shared by all rooms and must not import {there}")
        elif here in WORKSHOPS and there not in SHARED | WORKSHOPS[here]:
            allowed = ", ".join(sorted(WORKSHOPS[here])) or "nothing"
            yield source.at(node, f"{here} must not import {there}: besides the shared rooms it knows {allowed}")
        elif there in ONLY_FOR and here not in ONLY_FOR[there]:
            yield source.at(node, f"{here} must not import {there}; {sorted(ONLY_FOR[there])} may")
        elif there in KEPT_FROM.get(here, ()):
            yield source.at(node, f"{here} must not know {there}")


def circles(house: Sources) -> Iterator[str]:
    """Each file that can come back to itself by imports. A package is no circle with the files that it gathers."""
    uses = defaultdict(dict)
    for source, node, target in edges(house):
        uses[source.module].setdefault(target, node)
    for start in house:
        ways = [[start]]
        seen = set()
        while ways:
            way = ways.pop()
            if start in uses[way[-1]]:
                circle = " -> ".join([*way, start])
                yield house[start].at(uses[start][([*way, start])[1]], f"a circle of imports: {circle}")
                break
            new = [target for target in uses[way[-1]] if target not in seen]
            seen.update(new)
            ways += [[*way, target] for target in new]


def libraries(house: Sources) -> Iterator[str]:
    for source in house.values():
        for node, module, _ in source.imports():
            name = module.partition(".")[0]
            if name in LIBRARIES and not source.is_in(LIBRARIES[name]):
                yield source.at(node, f"{name} belongs in {' or '.join(LIBRARIES[name]) or 'no room'}")


def calls(house: Sources) -> Iterator[str]:
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                for pattern, rooms in CALLS.items():
                    if re.search(f"{pattern}$", text) and not source.is_in(rooms):
                        yield source.at(node, f"{text}() belongs in {' or '.join(rooms)}")


def dtypes(house: Sources) -> Iterator[str]:
    for source in house.values():
        if source.is_in(DTYPES_IN):
            continue
        named = [node for node in source.constants() if node.value in LOW_DTYPES]
        named += [n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and n.attr in LOW_DTYPES]
        yield from (source.at(node, f"{ast.unparse(node)}: a dtype is chosen in precision.py") for node in named)


def families(house: Sources) -> Iterator[str]:
    for source in house.values():
        if source.room == "models":
            continue
        words = [(node, node.value) for node in source.constants()]
        for node in ast.walk(source.tree):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            name = name or (getattr(node, "name", None) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None)
            words += [(node, name.lower())] if name else []
        for node, module, name in source.imports():
            words.append((node, f"{module}.{name}"))
        yield from (
            source.at(node, f"{word!r}: a model family is known in trainer/models/ alone")
            for node, word in words
            if FAMILY.search(word)
        )


def private_names(house: Sources) -> Iterator[str]:
    """`_name` of another file. A package's own files are no exception."""
    for source in house.values():
        aliases = set()
        for node, module, name in source.imports():
            if module.partition(".")[0] == "trainer" and name:
                if f"{module}.{name}" in house:
                    aliases.add(name)
                if re.match(PRIVATE, name):
                    yield source.at(node, f"{module}.{name} is private to its file")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and re.match(PRIVATE, node.attr):
                if not isinstance(node.value, ast.Name) or node.value.id not in aliases:
                    continue
                yield source.at(node, f"{ast.unparse(node)} is private to its file")


def second_names(house: Sources) -> Iterator[str]:
    """A name is imported from the file that defines it, or from that file's package."""
    for source in house.values():
        for node, module, name in source.imports():
            if module in house and name and f"{module}.{name}" not in house:
                there = house[module]
                known = {node.name for node in ast.walk(there.tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
                known |= {n.id for n in ast.walk(there.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                if there.path.endswith("__init__.py"):
                    known |= {taken for _, inside, taken in there.imports() if inside.startswith(f"{module}.")}
                if name not in known:
                    yield source.at(node, f"{name} is not {module}'s: import it from where it is defined")


def paths(house: Sources) -> Iterator[str]:
    """As a key of a dictionary such a word names data, no path."""
    for source in house.values():
        if source.path == "layout.py":
            continue
        keys = {id(key) for node in ast.walk(source.tree) if isinstance(node, ast.Dict) for key in node.keys}
        keys |= {id(node.slice) for node in ast.walk(source.tree) if isinstance(node, ast.Subscript)}
        for node in source.constants():
            if id(node) not in keys and PATHS & set(node.value.split("/")):
                yield source.at(node, f"{node.value!r}: paths of the output folder stand in layout.py")


def lengths(house: Sources) -> Iterator[str]:
    for source in house.values():
        count = len(source.text.splitlines())
        if count > LINES:
            yield source.at(count, f"{count} lines, more than {LINES}")


def class_names(house: Sources) -> Iterator[str]:
    found = defaultdict(list)
    for source in house.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.at(node, f"class {node.name} has a namesake"))
    yield from (where for places in found.values() if len(places) > 1 for where in places)


def attributes(house: Sources) -> Iterator[str]:
    """An attribute is declared in the class's body or assigned in its constructor, before any other method assigns it."""
    for source in house.values():
        for owner in (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)):
            born = {name.id for node in owner.body if isinstance(node, (ast.Assign, ast.AnnAssign)) for name in targets(node)}
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            assigned = [
                (method.name, target)
                for method in methods
                for node in ast.walk(method)
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
                for target in targets(node)
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
            ]
            born |= {target.attr for method, target in assigned if method in ("__init__", "__post_init__")}
            for method, target in assigned:
                if target.attr not in born:
                    yield source.at(target, f"self.{target.attr} of {owner.name} is born in {method}")


def targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.Name | ast.Attribute]:
    given = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [
        inner
        for target in given
        for inner in ast.walk(target)
        if isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(inner.ctx, ast.Store)
    ]


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        imports_between_rooms, circles, libraries, calls, dtypes, families, private_names, second_names, paths, lengths,
        class_names, attributes,
    )
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule: str, house: Sources) -> None:
    broken = list(RULES[rule](house))
    assert not broken, "\n".join([f"{rule}:", *broken])


def test_every_room_of_the_rules_is_there(house: Sources) -> None:
    """A room under another name would be free of its rules."""
    rooms = {source.room for source in house.values()}
    named = {*SHARED, *WORKSHOPS, *ONLY_FOR, *KEPT_FROM}
    assert named <= rooms, f"not in trainer/: {', '.join(sorted(named - rooms))}"


# What each rule is there to find: (rule, file, its text, the line).
BREAKS = [
    ("imports_between_rooms", "models/flux.py", "from trainer.quantization import FORMATS", 1),
    ("imports_between_rooms", "quantization/cache.py", "from trainer.models.base import Family", 1),
    ("imports_between_rooms", "adapters/export.py", "import trainer.models.base", 1),
    ("imports_between_rooms", "data/cache.py", "def encode():\n    from trainer import models", 2),
    ("imports_between_rooms", "checkpoint/state.py", "if TYPE_CHECKING:\n    from trainer.adapters import Adapter", 2),
    ("imports_between_rooms", "checkpoint/state.py", "from ..data import cache", 1),
    ("imports_between_rooms", "types.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "models/base.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "step.py", "from trainer.adapters import Adapter", 1),
    ("imports_between_rooms", "encoding.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "loop.py", "from trainer.models.base import Family", 1),
    ("imports_between_rooms", "artifacts.py", "from trainer.run import Run", 1),
    ("circles", "step.py", "import trainer.step", 1),
    ("libraries", "plan.py", "import tomllib", 1),
    ("libraries", "kernels/dora_torch.py", "import triton", 1),
    ("libraries", "kernels/__init__.py", "def choose():\n    from triton import knobs", 2),
    ("libraries", "adapters/export.py", "from safetensors.torch import save_file", 1),
    ("libraries", "outcome.py", "import diffusers.models", 1),
    ("calls", "loop.py", "loss.backward()", 1),
    ("calls", "loop.py", "self.optimizer.step()", 1),
    ("calls", "step.py", "with torch.autocast('cuda'):\n    pass", 1),
    ("calls", "run.py", "scaler = torch.amp.GradScaler('cpu')", 1),
    ("dtypes", "plan.py", "x = 1\ny = x.to(torch.bfloat16)", 2),
    ("dtypes", "data/loader.py", "x.half()", 1),
    ("dtypes", "run.py", "if dtype == 'fp16':\n    pass", 1),
    ("families", "run.py", "if family.name == 'sdxl':\n    pass", 1),
    ("families", "adapters/export.py", "from trainer.models import flux", 1),
    ("families", "objectives.py", "def flux_shift():\n    pass", 1),
    ("families", "objectives.py", "class FluxShift:\n    pass", 1),
    ("families", "plan.py", "def shift(flux_only):\n    pass", 1),
    ("families", "plan.py", "f(sdxl=1)", 1),
    ("private_names", "models/flux.py", "from trainer.files import _hidden", 1),
    ("private_names", "models/flux.py", "from trainer import files\nfiles._hidden()", 2),
    ("second_names", "loop.py", "from trainer.step import torch", 1),
    ("paths", "resume.py", "folder = root / 'checkpoints'", 1),
    ("paths", "report/page.py", "link = f'adapters/{name}'", 1),
    ("paths", "metrics.py", "open(root / 'metrics.jsonl')", 1),
    ("lengths", "loop.py", "x = 1\n" * 401, 401),
    ("class_names", "step.py", "class Loop:\n    pass", 1),
    ("attributes", "metrics.py", "class A:\n    def open(self):\n        self.file = 1", 3),
    ("attributes", "metrics.py", "class A:\n    def open(self):\n        self.a, (self.b, _) = 1, (2, 3)", 3),
]  # fmt: skip
AROUND = {
    "step.py": "import torch\n\nclass Step:\n    pass",
    "loop.py": "from trainer.step import Step\n\nclass Loop:\n    pass",
    "files.py": "def _hidden():\n    pass",
    "models/base.py": "class Family:\n    pass\n\nclass Model:\n    pass",
}


@pytest.mark.parametrize(
    ("rule", "path", "text", "line"), [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(BREAKS)]
)
def test_a_break_is_found_and_named(rule: str, path: str, text: str, line: int) -> None:
    assert list(RULES[rule](sources(AROUND))) == []
    broken = list(RULES[rule](sources(AROUND | {path: text})))
    assert any(said.startswith(f"trainer/{path}:{line}: ") for said in broken), broken


def test_every_rule_has_been_seen_to_find_something() -> None:
    assert {rule for rule, *_ in BREAKS} == RULES.keys()


@pytest.mark.parametrize("late", ["from trainer.loop import Loop", "import trainer.loop", "from trainer import loop"])
@pytest.mark.parametrize("place", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "], ids=["top", "function", "types"])
def test_a_circle_is_found_wherever_its_imports_stand(place: str, late: str) -> None:
    rest = {"loop.py": "from trainer.saving import Saves", "saving.py": "import trainer.step"}
    where = f"trainer/step.py:{2 if place else 1}: "
    circle = "a circle of imports: trainer.step -> trainer.loop -> trainer.saving -> trainer.step"
    assert where + circle in circles(sources({"step.py": place + late} | rest))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("imports_between_rooms", "run.py", "from trainer.models import base\nfrom trainer.config import Config"),
        ("imports_between_rooms", "models/flux.py", "from trainer.models.base import Family\nfrom .base import Model"),
        ("circles", "step.py", "from trainer.models.base import Family"),
        ("libraries", "config.py", "import tomllib"),
        ("libraries", "config/read.py", "import tomllib"),
        ("libraries", "kernels/fp8_triton.py", "import triton"),
        ("calls", "run.py", "def f(scaler: torch.amp.GradScaler): ctx.save_for_backward(schedule.step())"),
        ("dtypes", "step.py", '"""In bf16."""\nx = torch.zeros(1, dtype=torch.float32)  # not fp16'),
        ("families", "cli.py", '"""sdxl"""\nhelp = "Adapters for SDXL and Flux"  # flux'),
        ("private_names", "step.py", "from trainer import __version__\nself._hidden = 1"),
        ("second_names", "run.py", "from trainer.models.base import Model"),
        ("paths", "resume.py", "pin = {'samples': 3}\npin['samples'] = 'more samples'"),
        ("attributes", "metrics.py", "class A:\n x: int\n def __init__(self): self.y = 1\n def f(self): self.x = self.y"),
    ],
)  # fmt: skip
def test_what_is_allowed_passes(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule](sources(AROUND | {path: text}))) == []
