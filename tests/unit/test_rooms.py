"""The rules of the house: what belongs in which room of trainer/ and workbench/, and which floor may import which.

A room is a folder of one of them, and stands on a floor. Paths here are below trainer/; those of workbench/ have that name
before them. The source is read, not run. An import counts wherever it stands: at
the top of a file, inside a function, under `if TYPE_CHECKING`. Prose (comments and docstrings) may name anything.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import pytest

from scripts.floors import FLOORS, PACKAGES, drawing, room_of
from tests.harness import ROOT

# --- the rules, as data; the floors are in scripts/floors.py, which draws them ----------------------------------------

# Within a room the same, of its folders and of the files beside them.
INNER: dict[str, tuple[tuple[str, ...], ...]] = {
    "data": (
        ("batches",),
        ("cache", "captions", "held_out", "identity", "scan"),
        ("layouts",),
        ("images",),
        ("examples", "memo"),
        ("buckets", "sources"),
        ("caption_rules", "threads"),
    )
}

# Files of a room, those of its inner folders apart; of some fewer.
FILES, FEWER = 20, {"engine": 10}
# Lines: of a package, of all, and of what a step is made of (engine/step.py and all that it imports). None may grow beyond.
# Wanted are 28,500 for trainer/ and 41,500 for both.
# The core fell by 2,600 lines when adapter files, datasets and archives, the summary of a plan, its remedies and what a run
# changed got rooms of the workbench; both together rose by the heads of these.
MOST = {"trainer": 29_895, "trainer and workbench": 45_778, "engine.step": 2_000}

# Who alone may import a room. The config does not leak below what resolves it and what starts a run. A pattern is a file's
# path, here and below.
ONLY_FOR: dict[str, tuple[str, ...]] = {
    "config": (
        "workbench/*",
        "artifacts/ports.py",
        "run/output_folder.py",
        "run/run.py",
        "run/session.py",
        "run/setup.py",
        "engine/assembly.py",
        "resume/allowed_changes.py",
        "resume/pins.py",
        "resume/start_point.py",
        "resume/unlike.py",
        "plan/*",
        "runtime/device.py",
    )
}

# What knows less than its floor allows: all that it may import besides its own room, kernels and base.
KNOWS_ONLY: dict[str, set[str]] = {
    "artifacts/sampling.py": set(),
    "engine/step.py": {"objectives"},
    "monitoring/metrics.py": set(),
    "runtime/attention.py": set(),
    "runtime/heartbeat.py": set(),
    "runtime/precision.py": set(),
    "runtime/processes.py": set(),
}

# What a file must not know: the loop has neither a config nor a model family, and nor have those that it calls.
KEPT_FROM: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("run/loop.py", "run/checkpointing.py", "monitoring/weight_change.py"),
    ("config/*", "plan/*", "models/*", "resume/*", "engine/components.py", "engine/encoding.py"),
)

# Libraries that one room knows. A pattern is a file's path.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "accelerate": ("runtime/processes.py", "models/building.py"),
    "bitsandbytes": ("quantization/table.py", "optim/*"),
    "datasets": ("workbench/sources/hf.py",),
    "fsspec": ("workbench/mirror/store.py",),
    "html": (),  # templates escape what is put into them
    "jinja2": ("workbench/pages/rendering.py",),
    "markupsafe": ("workbench/pages/rendering.py",),
    "diffusers": ("models/*",),
    "huggingface_hub": ("workbench/hub/*", "workbench/adapters/push.py"),  # the core opens no connection (transformers and
    # diffusers import it, and are given local folders)
    "optimum": ("quantization/table.py",),
    "peft": ("adapters/*", "runtime/peft_dora.py"),
    "pytorch_optimizer": ("optim/*",),
    "schedulefree": ("optim/*",),
    "pillow_heif": ("data/images/plugins.py",),
    "pillow_jxl": ("data/images/plugins.py",),
    "safetensors": (),  # its own writer orders metadata at random: tensorfile.py reads and writes
    "tomli_w": ("config/*",),
    "tomllib": ("config/*",),
    "transformers": ("models/*", "optim/*"),
    "triton": ("kernels/*_triton.py",),
    "wandb": ("workbench/trackers/trackers.py",),
}

# The one room that may set what belongs to another library, Python's own included. And what nobody may use: a mock replaces
# what a library does for the whole process.
SETS_ATTRIBUTES = ("runtime/*",)
# But for settings that a library offers as an attribute and in no other way, set where they hold for workers, too.
SETTINGS = {
    "data/images/decode.py": {"Image.MAX_IMAGE_PIXELS"},
    "data/images/plugins.py": {"JpegXLImagePlugin.DECODE_THREADS"},
}
NEVER = ("unittest", "mock")

# Calls, by a pattern of how they are written.
CALLS: dict[str, tuple[str, ...]] = {
    r"\bGradScaler": ("runtime/precision.py",),
    r"\bautocast": ("runtime/precision.py", "runtime/peft_dora.py"),  # a PEFT model may be called under its owner's
    r"\.backward": ("engine/step.py",),
    r"optimizer\.step": ("engine/step.py",),
    r"\bopen_source": ("run/session.py",),  # a run has one door
}

# Where a dtype below fp32 is chosen or read: the rooms of storage, and of bytes. Losses, draws and sums are fp32 everywhere.
LOW_DTYPES = {
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "half", "float8_e4m3fn", "float8_e5m2",
    "int8", "int4", "int2", "nf4", "fp4",
}  # fmt: skip
DTYPES_IN = (
    "runtime/precision.py", "plan/storage.py", "quantization/*", "kernels/*", "base/tensorfile.py",
    "config/*", "plan/requirements.py",  # the words that a user may write
    "models/weight_sets.py",  # the words that the hub's file names have
)  # fmt: skip

# Words of a model family. In prose of a message they may stand: "SDXL" is the reader's word, "sdxl" the program's.
FAMILY = re.compile(r"sdxl|flux")

# Folders and files under the output folder; of what has a step in its name, the beginning.
PATHS = re.compile(
    r"checkpoints|adapters|samples|tensorboard|cache|\.lock|metrics\.jsonl|report\.html|phases\.jsonl|config\.toml|step-.*"
)

PRIVATE = r"_(?!_)"
# Torch's own, of which a class here has a namesake.
TORCHS = {"_apply", "_parameters"}
# Of a class, or of a type that stands for one.
CLASS_NAME = r"[A-Z]+[a-z]"

LINES = 400
# Of a function its lines and arguments, of a dataclass its fields. Kernels have as many arguments as they have tensors.
FUNCTION_LINES, ARGUMENTS, FIELDS = 60, 7, 12
# What may be larger: a kernel's signature, and rows of tables (of the optimizers, of [[data.sources]]).
LARGE = {"base/protocols.py:Kernels.adapter_gradients", "data/sources.py:Source", "optim/table.py:OptimizerKind"}


# How no docstring begins: with what is no subject, and with an argument ("root: ...").
NO_SUBJECT = re.compile(
    r"(Of|As|By|To|In|With|Where|Until|From|For|After|Before|On|At|Around|Beside|Under|Inside|Without|And|Which|While|When|Once"
    r"|If|Within|Not|Only|Also|So|Such|Then|Through|Between|Because)\b|\w+(, \w+)*: "
)
# A genitive without its noun, or a clause for a subject, where a sentence or a part of one begins.
RIDDLE = re.compile(
    r"(?:^|[.:;!?] )((?:of (?:one|those|what)|that of|those of|what of|(?-i:What(?! to)|Whose|Whoever|Whatever))\b)", re.I
)
# Participles, adverbs and pronouns are no names: say what is held (text, lines, rows, matches). At most so many are bound.
NO_NOUNS = {
    "asked", "begun", "brought", "built", "caught", "chosen", "cut", "done", "drawn", "found", "given", "gone", "heard",
    "held", "how", "inside", "kept", "known", "lost", "made", "meant", "met", "needed", "own", "put", "said", "seen", "shown",
    "taken", "then", "there", "those", "told", "wanted", "what", "where", "whose", "why", "written",
}  # fmt: skip
BOUND = 20
# What sends the reader to another definition.
ELSEWHERE = re.compile(r"\bas (of|in) (`|\w+\.\w)")
# Classes that do what a protocol says, or another class, without naming it as theirs.
DOES_AS = {
    "FrozenLayer": "BaseLayer", "Folder": "Tree", "Archives": "Tree", "MemoryCache": "Cache",
    "TensorBoard": "Tracker", "WeightsAndBiases": "Tracker",
}  # fmt: skip


def levels(floors: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    """How far down each room is."""
    return {room: level for level, floor in enumerate(floors) for room in floor}


LEVELS = levels(FLOORS)
INNER_LEVELS = {room: levels(floors) for room, floors in INNER.items()}

# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file. path: below trainer/, or one that begins with workbench/."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree's, which every rule looks at."""
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return ".".join(self.file.removesuffix(".py").split("/")).removesuffix(".__init__")

    @property
    def file(self) -> str:
        """The path below the root."""
        return self.path if self.path.startswith("workbench/") else f"trainer/{self.path}"

    @property
    def room(self) -> str:
        return room_of(self.module)

    def is_in(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(self.path, pattern) for pattern in patterns)

    def at(self, node: ast.AST | int, what: str) -> str:
        return f"{self.file}:{node if isinstance(node, int) else node.lineno}: {what}"

    def imports(self) -> Iterator[tuple[ast.stmt, str, str]]:
        """(statement, module, name taken from it or "") of every import, wherever it stands."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((node, module, alias.name) for alias in node.names)

    def constants(self) -> Iterator[ast.Constant]:
        """Every string but docstrings."""
        prose = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr) and is_string(node.value)}
        yield from (node for node in self.nodes if is_string(node) and id(node) not in prose)


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


Sources = Mapping[str, Source]  # by module
Rule = Callable[[Sources], Iterator[str]]


def sources(files: Mapping[str, str]) -> Sources:
    """files: text by path."""
    read = [Source(path, text) for path, text in files.items()]
    return {source.module: source for source in read}


@pytest.fixture(scope="module")
def house() -> Sources:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    files = {str(path.relative_to(ROOT)).removeprefix("trainer/"): path.read_text(encoding="utf-8") for path in found}
    assert len(files) > 50
    return sources(files)


def edges(house: Sources) -> Iterator[tuple[Source, ast.stmt, str]]:
    """(source, statement, imported module) of every import within the house."""
    for source in house.values():
        for node, module, name in source.imports():
            if module.partition(".")[0] in PACKAGES:
                inner = f"{module}.{name}"
                yield source, node, inner if inner in house else module


# --- the rules, one function each -------------------------------------------------------------------------------------


def places(house: Sources) -> Iterator[str]:
    """A package holds folders, and each stands on a floor."""
    for source in house.values():
        if source.module in PACKAGES:
            continue
        if source.file.count("/") == 1:
            yield source.at(1, "the packages hold folders alone: move it into the one whose work it does")
        elif source.room not in LEVELS:
            yield source.at(1, f"{source.room} is on no floor")


def crowds(house: Sources) -> Iterator[str]:
    rooms = defaultdict(list)
    for source in house.values():
        rooms[source.path.rpartition("/")[0]].append(source)
    for room, files in rooms.items():
        most = FEWER.get(room, FILES)
        if len(files) > most:
            yield files[-1].at(1, f"{room} has {len(files)} files, more than {most}")


def imports_between_rooms(house: Sources) -> Iterator[str]:
    for source, node, target in edges(house):
        here, there = source.room, room_of(target)
        path = target.removeprefix("trainer.").replace(".", "/") + ".py"
        if source.file.startswith("trainer/") and target.startswith("workbench"):
            yield source.at(node, "the core imports nothing of the workbench")
        if here and there and here != there:
            if LEVELS.get(here, 0) >= LEVELS.get(there, -1):
                yield source.at(node, f"{here} must not import {there}, which is no floor below it")
            for pattern, known in KNOWS_ONLY.items():
                allowed = {*known, "kernels", "base"}
                if source.is_in((pattern,)) and there not in allowed:
                    yield source.at(node, f"{source.path} must not import {there}: it knows {', '.join(sorted(allowed))}")
            if there in ONLY_FOR and not source.is_in(ONLY_FOR[there]):
                yield source.at(node, f"{source.path} must not import {there}; {', '.join(ONLY_FOR[there])} may")
        if any(fnmatchcase(path, pattern) for pattern in KEPT_FROM.get(source.path, ())):
            yield source.at(node, f"{source.path} must not know {target}")


def imports_within_rooms(house: Sources) -> Iterator[str]:
    for source, node, target in edges(house):
        inner = target.split(".")[2:3]
        if source.room in INNER_LEVELS and f".{source.room}." in f"{target}." and inner and "/" in source.path:
            levels = INNER_LEVELS[source.room]
            here, there = source.path.split("/")[1].removesuffix(".py"), inner[0]
            if here != there and levels.get(here, 0) >= levels.get(there, -1):
                yield source.at(node, f"{here} must not import {there}, which is no floor of {source.room} below it")


def circles(house: Sources) -> Iterator[str]:
    """Each file that can come back to itself by imports. A package is no circle with the files that it gathers.

    Whoever imports a file of a package from outside runs the package, too.
    """
    uses = defaultdict(dict)
    for source, node, target in edges(house):
        if source.module in PACKAGES:  # the door of a package imports what it is asked for when it is asked
            continue
        parts = target.split(".")
        packages = [".".join(parts[:count]) for count in range(2, len(parts))]
        for used in (target, *(each for each in packages if not f"{source.module}.".startswith(f"{each}."))):
            uses[source.module].setdefault(used, node)
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


def mocks(house: Sources) -> Iterator[str]:
    for source in house.values():
        for node, module, _ in source.imports():
            if module.partition(".")[0] in NEVER:
                yield source.at(node, f"{module} is for tests: no room replaces what another does")


def foreign_attributes(house: Sources) -> Iterator[str]:
    """An attribute of an imported module or class is set, or taken away, by `=`, `del`, setattr or delattr.

    What a name stands for is looked up in the whole file: a variable with the name of an import counts as that import.
    """
    for source in house.values():
        if source.is_in(SETS_ATTRIBUTES):
            continue
        foreign = set()
        for statement in (node for node in source.nodes if isinstance(node, (ast.Import, ast.ImportFrom))):
            for alias in statement.names:
                module = alias.name if isinstance(statement, ast.Import) else "." * statement.level + (statement.module or "")
                if module.partition(".")[0] not in ("", *PACKAGES):
                    foreign.add(alias.asname or alias.name.partition(".")[0])
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                owner = node.args[0]
            else:
                continue
            if root(owner) in foreign and ast.unparse(node) not in SETTINGS.get(source.path, ()):
                yield source.at(node, f"{ast.unparse(owner)} belongs to a library: its attributes are set in runtime/ alone")


def root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with, or ""."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def calls(house: Sources) -> Iterator[str]:
    for source in house.values():
        for node in source.nodes:
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
        named += [n for n in source.nodes if isinstance(n, ast.Attribute) and n.attr in LOW_DTYPES]
        yield from (source.at(node, f"{ast.unparse(node)}: a dtype is chosen in runtime/precision.py") for node in named)


def families(house: Sources) -> Iterator[str]:
    for source in house.values():
        if source.room == "models":
            continue
        words = [(node, node.value) for node in source.constants()]
        for node in source.nodes:
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
    """`_name` of another file, or of a class there. A package's own files are no exception."""
    members = {source.path: set(private_members(source)) for source in house.values()}
    everywhere = set().union(*members.values()) - TORCHS
    for source in house.values():
        aliases = set()
        theirs = everywhere - members[source.path]
        for node, module, name in source.imports():
            if module.partition(".")[0] in PACKAGES and name:
                if f"{module}.{name}" in house:
                    aliases.add(name)
                if re.match(PRIVATE, name):
                    yield source.at(node, f"{module}.{name} is private to its file")
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and re.match(PRIVATE, node.attr):
                of_file = isinstance(node.value, ast.Name) and node.value.id in aliases
                if of_file or (node.attr in theirs and not is_self(node.value)):
                    yield source.at(node, f"{ast.unparse(node)} is private to its file")


def private_members(source: Source) -> Iterator[str]:
    for owner in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and is_self(node.value):
                name = node.attr
            else:
                name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
            if re.match(PRIVATE, name):
                yield name


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


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
        if source.path == "base/run_layout.py":
            continue
        keys = {id(key) for node in source.nodes if isinstance(node, ast.Dict) for key in node.keys}
        keys |= {id(node.slice) for node in source.nodes if isinstance(node, ast.Subscript)}
        ends = {id(part) for node in source.nodes if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
        for node in source.constants():
            # What follows a value in an f-string ends a name, and is none.
            names = node.value.split("/")[id(node) in ends :]
            if id(node) not in keys and any(PATHS.fullmatch(name) for name in names):
                yield source.at(node, f"{node.value!r}: paths of the output folder stand in base/run_layout.py")


def lengths(house: Sources) -> Iterator[str]:
    for source in house.values():
        count = len(source.text.splitlines())
        if count > LINES:
            yield source.at(count, f"{count} lines, more than {LINES}")


def sizes(house: Sources) -> Iterator[str]:
    """A function's lines and arguments, without self; a dataclass's fields."""
    for source, node, name in definitions(house):
        if f"{source.path}:{name}" not in LARGE:
            yield from (source.at(node, f"{name} has {said}") for said in too_large(node))


def definitions(house: Sources) -> Iterator[tuple[Source, ast.FunctionDef | ast.ClassDef, str]]:
    """(source, function or class, its name with those of the classes and functions around it)."""
    for source in house.values():
        if source.room == "kernels":
            continue
        left: list[tuple[ast.AST, str]] = [(source.tree, "")]
        while left:
            parent, around = left.pop()
            for node in ast.iter_child_nodes(parent):
                name = around
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    name = f"{around}.{node.name}".removeprefix(".")
                    yield source, node, name
                left.append((node, name))


def too_large(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        counts = {
            "lines": (node.end_lineno - node.lineno + 1, FUNCTION_LINES),
            "arguments": (len([name for name in given if name not in ("self", "cls")]), ARGUMENTS),
        }
    else:
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        is_data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        counts = {"fields": (len(fields) * is_data, FIELDS)}
    yield from (f"{count} {what}, more than {most}" for what, (count, most) in counts.items() if count > most)


def docstrings(house: Sources) -> Iterator[str]:
    """What is public says what it gives, and begins with that. A method may leave it to the method that it overrides."""
    told = {(owner.name, node.name) for _, owner, node in methods(house) if ast.get_docstring(node)}
    bases = defaultdict(set, {name: {other} for name, other in DOES_AS.items()})
    for _, owner, _ in methods(house):
        bases[owner.name] |= {name for base in owner.bases if (name := ast.unparse(base).rpartition(".")[2]) != owner.name}
    above = {name: ancestors(name, bases) for name in bases}
    overriding = {id(n) for _, o, n in methods(house) if any((base, n.name) in told for base in above[o.name])}
    for source, node, name in public(house):
        said = ast.get_docstring(node) or ""
        if not said and id(node) not in overriding:
            yield source.at(node, f"{name} has no docstring: what does it give?")
        elif begins := NO_SUBJECT.match(said):
            yield source.at(node, f"{name}: {begins[0]!r} is no subject: begin with what it gives or does")
        elif other := ELSEWHERE.search(said):
            yield source.at(node, f"{name}: {other[0]!r}: say it here, so that the docstring can stand alone")


def riddles(house: Sources) -> Iterator[str]:
    """No sentence of a docstring, and no part behind a colon or semicolon, begins with a genitive without its noun."""
    for source in house.values():
        for node in source.nodes:
            if isinstance(node, ast.Expr) and is_string(node.value):
                text = " ".join(node.value.value.split())
                yield from (
                    source.at(node, f"{match[1]!r} begins a sentence: name the thing") for match in RIDDLE.finditer(text)
                )


def nouns(house: Sources) -> Iterator[str]:
    """Few bindings (parameters and whatever else is assigned to) have a name that is no noun."""
    names = [(source, node, bound(node)) for source in house.values() for node in source.nodes]
    places = [(source, node, name) for source, node, name in names if name in NO_NOUNS]
    if len(places) > BOUND:
        source, node, name = places[-1]
        yield source.at(
            node, f"{name} is one of {len(places)} names that are no nouns, more than {BOUND}: name what it holds"
        )


def bound(node: ast.AST) -> str:
    """The name that a node binds; "" for others."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def methods(house: Sources) -> Iterator[tuple[Source, ast.ClassDef, ast.FunctionDef]]:
    for source in house.values():
        for owner in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
            yield from ((source, owner, node) for node in owner.body if isinstance(node, ast.FunctionDef))


def ancestors(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    """The classes above one, by name."""
    found, left = set(), {*bases.get(name, ())}
    while left:
        found.add(base := left.pop())
        left |= bases.get(base, set()) - found
    return found


def public(house: Sources) -> Iterator[tuple[Source, ast.FunctionDef | ast.ClassDef, str]]:
    """(source, function, class or method, its name) of all without an underscore, those within functions apart."""
    for source in house.values():
        left: list[tuple[ast.AST, str]] = [(source.tree, "")]
        while left:
            parent, around = left.pop()
            for node in ast.iter_child_nodes(parent):
                if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    left += [(node, around)] if isinstance(node, (ast.If, ast.Try)) else []
                elif not node.name.startswith("_"):
                    name = f"{around}.{node.name}".removeprefix(".")
                    yield source, node, name
                    left += [(node, name)] if isinstance(node, ast.ClassDef) else []


def class_names(house: Sources) -> Iterator[str]:
    """A type that a module names by an assignment is no class, and must not be called as one either."""
    found, classes = defaultdict(list), set()
    for source in house.values():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.at(node, f"class {node.name} has a namesake"))
                classes.add(node.name)
        for node in source.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for name in (name for target in stored(node) if re.match(CLASS_NAME, name := target_name(target))):
                    found[name].append(source.at(node, f"{name} is a class elsewhere"))
    yield from (where for name, places in found.items() if name in classes and len(places) > 1 for where in places)


def attributes(house: Sources) -> Iterator[str]:
    """An attribute has its value in the class's body or from its constructor, before any other method assigns it.

    A dataclass's constructor assigns what its body annotates; elsewhere an annotation is no value.
    """
    for source in house.values():
        for owner in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
            given = [n for n in owner.body if isinstance(n, ast.Assign) or (isinstance(n, ast.AnnAssign) and n.value)]
            given += [node for node in owner.body if isinstance(node, ast.AnnAssign) and owner.decorator_list]
            born = {target_name(target) for node in given for target in stored(node)}
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            assigned = [(method.name, node, name) for method in methods for node, name in own_attributes(method)]
            born |= {name for method, _, name in assigned if method in ("__init__", "__post_init__")}
            for method, node, name in assigned:
                if name not in born:
                    yield source.at(node, f"self.{name} of {owner.name} is born in {method}")


def own_attributes(method: ast.FunctionDef) -> Iterator[tuple[ast.expr, str]]:
    """What a method sets of `self`: by `=`, `for`, `with`, or setattr with a name."""
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node, node.attr
        elif isinstance(node, ast.Call) and re.match(r"setattr\(self, '", text := ast.unparse(node)):
            yield node, text.split("'")[1]


def stored(node: ast.AST) -> list[ast.expr]:
    """The names and attributes that a statement assigns."""
    return [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Store)]


def target_name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        places, crowds, imports_between_rooms, imports_within_rooms, circles,
        libraries, mocks, foreign_attributes, calls, dtypes, families, private_names, second_names, paths, lengths,
        sizes, docstrings, riddles, nouns,
        class_names, attributes,
    )
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule: str, house: Sources) -> None:
    broken = list(RULES[rule](house))
    assert not broken, "\n".join([f"{rule}:", *broken])


def closure(house: Sources, module: str) -> set[str]:
    """A module and all that it imports, directly or not, with the packages around them."""
    uses = defaultdict(set)
    for source, _, target in edges(house):
        uses[source.module].add(target)
    left, seen = [module], set()
    while left:
        if (each := left.pop()) in house and each not in seen:
            seen.add(each)
            parts = each.split(".")
            left += [*uses[each], *(".".join(parts[:count]) for count in range(2, len(parts)))]
    return seen


def test_the_house_is_no_larger_than_it_may_be(house: Sources) -> None:
    def lines(modules: Iterable[str]) -> int:
        return sum(len(house[module].text.splitlines()) for module in modules)

    core = [module for module in house if module.partition(".")[0] == "trainer"]
    step = closure(house, "trainer.engine.step")
    found = {"trainer": lines(core), "trainer and workbench": lines(house), "engine.step": lines(step)}
    assert {name: count for name, count in found.items() if count > MOST[name]} == {}
    assert {"trainer.objectives.losses", "trainer.base.draws"} <= step and "trainer.run.session" not in step
    assert "trainer.models.flux" in closure(house, "trainer.run.session"), "the search goes on through packages"


def test_every_room_of_the_rules_is_there(house: Sources) -> None:
    """A room under another name would be free of its rules."""
    rooms = {source.room for source in house.values()} - {""}
    assert {room for floor in FLOORS for room in floor} == rooms == LEVELS.keys() and len(LEVELS) == sum(map(len, FLOORS))
    for room, floors in INNER.items():
        inner = {source.path.split("/")[1].removesuffix(".py") for source in house.values() if source.room == room}
        assert {each for floor in floors for each in floor} == inner - {"__init__"}, room
    paths = {source.path for source in house.values()}
    named = {*KNOWS_ONLY, *KEPT_FROM, *(p for patterns in (*ONLY_FOR.values(), *LIBRARIES.values()) for p in patterns)}
    named |= {*SETS_ATTRIBUTES, *SETTINGS, *DTYPES_IN, *(pattern for patterns in CALLS.values() for pattern in patterns)}
    assert not {pattern for pattern in named if not any(fnmatchcase(path, pattern) for path in paths)}


@pytest.mark.slow
def test_the_drawing_has_every_import_between_rooms(house: Sources) -> None:
    pairs = {(source.room, room_of(target)) for source, _, target in edges(house)}
    between = {(here, there) for here, there in pairs if here and there and here != there}
    drawn = (ROOT / "docs" / "pictures" / "floors.svg").read_text(encoding="utf-8")
    assert drawn == drawing(), "run scripts/reference_pages.py"
    assert set(re.findall("<title>([a-z_/]+) imports ([a-z_/]+)</title>", drawn)) == between
    names = [room.rpartition("/")[2] for floor in FLOORS for room in floor]
    assert re.findall(r'var\(--name\)">([a-z_]+)</text>', drawn) == names


def test_the_reading_path_goes_from_the_command_to_the_files_in_an_afternoon() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = re.findall(r"^\| `((?:train|workbench)[^`]*\.py)`", text, re.MULTILINE)
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in path)
    told = re.search(r"They have about (\d),(\d00) lines", text)
    assert told and int(told[1] + told[2]) == round(lines, -2) and lines <= 3000, lines
    story = ["train.py", "workbench/commands/main.py", *(f"trainer/{file}" for file in (
        "run/run.py", "run/loop.py", "engine/step.py", "checkpoint/store.py", "adapters/export.py"
    ))]  # fmt: skip
    assert [file for file in path if file in story] == story


def test_what_is_large_as_it_stands_is_so_still(house: Sources) -> None:
    assert {f"{s.path}:{name}" for s, node, name in definitions(house) if list(too_large(node))} == LARGE


# What each rule is there to find: (rule, file, its text, the line).
BREAKS = [
    ("places", "page.py", "x = 1", 1),
    ("places", "attic/page.py", "x = 1", 1),
    ("places", "workbench/page.py", "x = 1", 1),
    ("places", "workbench/attic/page.py", "x = 1", 1),
    ("crowds", "kernels/one_more.py", "x = 1", 1),
    ("imports_between_rooms", "models/flux.py", "from trainer.quantization import FORMATS", 1),
    ("imports_between_rooms", "plan/run_plan.py", "def f():\n    import trainer.engine.step", 2),
    ("imports_between_rooms", "plan/run_plan.py", "from trainer import engine", 1),
    ("imports_between_rooms", "base/types.py", "from trainer.attic import page", 1),
    ("imports_between_rooms", "monitoring/metrics.py", "from trainer.runtime import device", 1),
    ("imports_between_rooms", "run/loop.py", "from trainer.engine.components import Components", 1),
    ("imports_within_rooms", "data/images/views.py", "from trainer.data.batches import sampler", 1),
    ("imports_within_rooms", "data/sources.py", "def f():\n    from . import buckets", 2),
    ("imports_between_rooms", "quantization/cache.py", "from trainer.models.base import Family", 1),
    ("imports_between_rooms", "adapters/export.py", "import trainer.models.base", 1),
    ("imports_between_rooms", "data/cache/fill.py", "def encode():\n    from trainer import models", 2),
    ("imports_between_rooms", "checkpoint/state.py", "if TYPE_CHECKING:\n    from trainer.adapters import Adapter", 2),
    ("imports_between_rooms", "checkpoint/state.py", "from ..data import cache", 1),
    ("imports_between_rooms", "base/types.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "models/base.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "engine/step.py", "from trainer.adapters import Adapter", 1),
    ("imports_between_rooms", "engine/encoding.py", "from trainer.config import Config", 1),
    ("imports_between_rooms", "run/loop.py", "from trainer.models.base import Family", 1),
    ("imports_between_rooms", "artifacts/exports.py", "from trainer.run.run import Run", 1),
    ("imports_between_rooms", "run/run.py", "def f():\n    from workbench.commands import main", 2),
    ("imports_between_rooms", "__init__.py", "def f():\n    from workbench.commands import main", 2),
    ("imports_between_rooms", "workbench/audit/page.py", "from workbench import replay", 1),
    ("circles", "engine/step.py", "import trainer.engine.step", 1),
    ("circles", "engine/step.py", "from trainer.engine.wall.page import PAGE", 1),
    ("libraries", "plan/run_plan.py", "import tomllib", 1),
    ("libraries", "kernels/dora_torch.py", "import triton", 1),
    ("libraries", "kernels/__init__.py", "def choose():\n    from triton import knobs", 2),
    ("libraries", "adapters/export.py", "from safetensors.torch import save_file", 1),
    ("libraries", "monitoring/weight_change.py", "import diffusers.models", 1),
    ("libraries", "data/images/decode.py", "import pillow_heif", 1),
    ("libraries", "report/page.py", "from html import escape", 1),
    ("mocks", "plan/run_plan.py", "from unittest.mock import patch", 1),
    ("mocks", "runtime/device.py", "def f():\n    import unittest", 2),
    ("foreign_attributes", "engine/loop.py", "import torch\ntorch.backends.cudnn.benchmark = True", 2),
    ("foreign_attributes", "engine/loop.py", "from torch import Tensor\nTensor.cpu = None", 2),
    ("foreign_attributes", "engine/loop.py", "from torch.nn import functional as f\ndef g():\n    f.a, x = 1, 2", 3),
    ("foreign_attributes", "engine/loop.py", "def g():\n    from torch import nn\n    setattr(nn.Linear, name, 1)", 3),
    ("foreign_attributes", "engine/loop.py", "import logging\nlogging.lastResort = None", 2),
    ("foreign_attributes", "engine/loop.py", "import torch.nn as nn\ndel nn.Linear.bias", 2),
    ("foreign_attributes", "engine/loop.py", "import torch\ntorch.x += 1", 2),
    ("calls", "engine/loop.py", "loss.backward()", 1),
    ("calls", "workbench/audit/page.py", "source = open_source(config)", 1),
    ("crowds", "engine/ten.py", "x = 1", 1),
    ("calls", "engine/loop.py", "self.optimizer.step()", 1),
    ("calls", "engine/step.py", "with torch.autocast('cuda'):\n    pass", 1),
    ("calls", "run/run.py", "scaler = torch.amp.GradScaler('cpu')", 1),
    ("dtypes", "plan/run_plan.py", "x = 1\ny = x.to(torch.bfloat16)", 2),
    ("dtypes", "data/batches/loader.py", "x.half()", 1),
    ("dtypes", "run/run.py", "if dtype == 'fp16':\n    pass", 1),
    ("dtypes", "plan/run_plan.py", "x = ['int8', 'int4', 'int2',\n'nf4',\n'fp4']", 3),
    ("families", "run/run.py", "if family.name == 'sdxl':\n    pass", 1),
    ("families", "adapters/export.py", "from trainer.models import flux", 1),
    ("families", "objectives/base.py", "def flux_shift():\n    pass", 1),
    ("families", "objectives/base.py", "class FluxShift:\n    pass", 1),
    ("families", "plan/run_plan.py", "def shift(flux_only):\n    pass", 1),
    ("families", "plan/run_plan.py", "f(sdxl=1)", 1),
    ("private_names", "models/flux.py", "from trainer.base.files import _hidden", 1),
    ("private_names", "models/flux.py", "from trainer.base import files\nfiles._hidden()", 2),
    ("private_names", "models/flux.py", "def f(model):\n    return model._kept", 2),
    ("private_names", "models/flux.py", "def f(model):\n    model._told()", 2),
    ("second_names", "engine/loop.py", "from trainer.engine.step import torch", 1),
    ("paths", "resume/pins.py", "folder = root / 'checkpoints'", 1),
    ("paths", "report/page.py", "link = f'adapters/{name}'", 1),
    ("paths", "monitoring/metrics.py", "open(root / 'metrics.jsonl')", 1),
    ("paths", "monitoring/metrics.py", "board = root / 'tensorboard'", 1),
    ("paths", "data/cache/fill.py", "folder = root / 'cache'", 1),
    ("paths", "base/files.py", "lock = folder / '.lock'", 1),
    ("paths", "resume/pins.py", "folder = root / f'step-{step:08d}'", 1),
    ("paths", "report/page.py", "folder.glob('step-*/*.png')", 1),
    ("lengths", "engine/loop.py", "x = 1\n" * 401, 401),
    ("sizes", "engine/loop.py", "def f():\n" + "    x = 1\n" * 60, 1),
    ("sizes", "engine/loop.py", "class A:\n    def f(self, a, b, c, d, *, e, f, g, h):\n        pass", 2),
    ("sizes", "engine/loop.py", "@dataclass\nclass A:\n" + "".join(f"    f{n}: int\n" for n in range(13)), 2),
    ("docstrings", "base/a.py", "def f():\n    pass", 1),
    ("docstrings", "base/a.py", "if x:\n    class A:\n        pass", 2),
    ("docstrings", "base/a.py", "class A:\n    'A.'\n    def f(self):\n        pass", 3),
    ("docstrings", "base/a.py", "def f():\n    'Of a file.'", 1),
    ("docstrings", "base/a.py", "class A:\n    'root, step: of a run.'", 1),
    ("docstrings", "base/a.py", "def f():\n    'A file. path: as of other.read.'", 1),
    ("riddles", "base/a.py", "def f():\n    'A page. time: of one that is read again.'", 2),
    ("riddles", "base/a.py", "x: int = 1\n'That of the last step.'", 2),
    ("nouns", "base/a.py", "found = 1\n" * BOUND + "def f(told): pass", BOUND + 1),
    ("class_names", "engine/step.py", "class Loop:\n    pass", 1),
    ("class_names", "engine/step.py", "Loop = Mapping[str, int]", 1),
    ("attributes", "base/a.py", "class A:\n    def open(self):\n        self.file = 1", 3),
    ("attributes", "base/a.py", "class A:\n    def open(self):\n        self.a, (self.b, _) = 1, (2, 3)", 3),
    ("attributes", "base/a.py", "class A:\n    file: int\n    def open(self):\n        self.file = 1", 4),
    ("attributes", "base/a.py", "class A:\n    def open(self):\n        with f() as self.file:\n            pass", 3),
    ("attributes", "base/a.py", "class A:\n    def open(self):\n        for self.file in f():\n            pass", 3),
    ("attributes", "base/a.py", "class A:\n    def open(self):\n        setattr(self, 'file', 1)", 3),
]  # fmt: skip
AROUND = {
    "engine/step.py": "import torch\n\nclass Step:\n    'One.'",
    "engine/loop.py": "from trainer.engine.step import Step\n\nclass Loop:\n    'All.'",
    "base/files.py": "def _hidden():\n    pass",
    "models/base.py": "class Family:\n    'Some.'\n\nclass Model:\n    'One.'\n    _kept: int = 1\n    def _told(self): pass",
    "engine/wall/__init__.py": "from trainer.engine import saving",
    "engine/wall/page.py": "PAGE = 1",
    "engine/saving.py": "from trainer.engine.step import Step",
    "data/batches/sampler.py": "",
    "data/buckets.py": "",
    "engine/__init__.py": "",
    "models/__init__.py": "",
    "workbench/replay/__init__.py": "",
    **{f"kernels/{number}.py": "" for number in range(FILES)},
    **{f"engine/{number}.py": "" for number in range(FEWER["engine"] - 4)},
}


@pytest.mark.parametrize(
    ("rule", "path", "text", "line"), [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(BREAKS)]
)
def test_a_break_is_found_and_named(rule: str, path: str, text: str, line: int) -> None:
    assert list(RULES[rule](sources(AROUND))) == []
    broken = list(RULES[rule](sources(AROUND | {path: text})))
    assert any(said.startswith(f"{Source(path, text).file}:{line}: ") for said in broken), broken


def test_every_rule_has_been_seen_to_find_something() -> None:
    assert {rule for rule, *_ in BREAKS} == RULES.keys()


@pytest.mark.parametrize(
    "late", ["from trainer.engine.loop import Loop", "import trainer.engine.loop", "from trainer.engine import loop"]
)
@pytest.mark.parametrize("place", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "], ids=["top", "function", "types"])
def test_a_circle_is_found_wherever_its_imports_stand(place: str, late: str) -> None:
    rest = {"engine/loop.py": "from trainer.engine.saving import Saves", "engine/saving.py": "import trainer.engine.step"}
    where = f"trainer/engine/step.py:{2 if place else 1}: "
    circle = "a circle of imports: trainer.engine.step -> trainer.engine.loop -> trainer.engine.saving -> trainer.engine.step"
    assert where + circle in circles(sources({"engine/step.py": place + late} | rest))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("imports_between_rooms", "run/run.py", "from trainer.models import base\nfrom trainer.config import Config"),
        ("imports_between_rooms", "models/flux.py", "from trainer.models.base import Family\nfrom .base import Model"),
        ("circles", "engine/step.py", "from trainer.models.base import Family"),
        ("imports_between_rooms", "artifacts/exports.py", "import trainer.engine.step\nfrom trainer import __version__"),
        ("imports_within_rooms", "data/batches/loader.py", "from trainer.data import buckets\nfrom . import sampler"),
        ("places", "kernels/one.py", ""),
        ("libraries", "config/read.py", "import tomllib"),
        ("libraries", "kernels/fp8_triton.py", "import triton"),
        ("mocks", "run/run.py", "from trainer.unittest import mock"),
        ("foreign_attributes", "runtime/device.py", "import torch\ntorch.backends.cudnn.benchmark = True"),
        ("foreign_attributes", "run/run.py", "import os\nos.environ['A'] = '1'\nx = os.stat('.')\nx.y = torch.z"),
        ("foreign_attributes", "run/run.py", "from trainer.base import signals\nsignals.promise = 1\nself.torch = 1"),
        ("calls", "run/run.py", "def f(scaler: torch.amp.GradScaler): ctx.save_for_backward(schedule.step())"),
        ("dtypes", "engine/step.py", '"""In bf16."""\nx = torch.zeros(1, dtype=torch.float32)  # not fp16'),
        ("families", "workbench/commands/main.py", '"""sdxl"""\nhelp = "Adapters for SDXL and Flux"  # flux'),
        ("private_names", "engine/step.py", "from trainer import __version__\nself._hidden = 1\nx._version"),
        ("private_names", "models/base.py", "class Model:\n def _told(self, other): return other._told()"),
        ("second_names", "run/run.py", "from trainer.models.base import Model"),
        ("paths", "resume/pins.py", "pin = {'samples': 3}\npin['samples'] = 'more samples'\nlock = f'{digest}.lock'"),
        ("sizes", "engine/loop.py", "def f(a, b, c, d, e, f, g):\n" + "    x = 1\n" * 59),
        ("sizes", "engine/loop.py", "class A:\n" + "".join(f"    f{n}: int\n" for n in range(13))),
        ("sizes", "kernels/dora_torch.py", "def f(a, b, c, d, e, f, g, h):\n    pass"),
        ("docstrings", "base/a.py", "def _f(): pass\ndef g():\n    'Offers a file.'\n    def h(): pass"),
        ("docstrings", "base/a.py", "class A:\n 'A.'\n def f(self):\n  'A file.'\nclass B(A):\n 'B.'\n def f(self): pass"),
        ("riddles", "base/a.py", "def f():\n    'The mean of those of one, if that of it.'"),
        ("nouns", "base/a.py", "a.said = a['told'] = f(found=1)\n" * 2 * BOUND),
        ("class_names", "engine/step.py", "Tensors = dict"),
        ("attributes", "base/a.py", "@dataclass\nclass A:\n x: int\n def f(self): self.x = 1"),
        ("attributes", "base/a.py", "class A:\n x: int = 1\n def __init__(self): self.y = 1\n def f(self): self.x = self.y"),
    ],
)  # fmt: skip
def test_what_is_allowed_passes(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule](sources(AROUND | {path: text}))) == []
