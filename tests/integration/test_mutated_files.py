"""Damaged and malicious files: a checkpoint's damage is always seen, and any file loads well-formed or is refused.

Mutants are read in a process of their own that may take MEMORY bytes more than it has when it starts, and SECONDS for each:
one that makes the reader allocate what a header claims, or multiply numbers of a million digits, ends it.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import ROOT
from trainer import config as configs
from trainer import optim
from trainer.adapters.kinds import kind_named
from trainer.adapters.norms import Norms
from trainer.base.errors import UserError
from trainer.base.tensorfile import DTYPES, TensorFile, serialize, tensor_sha256, write_tensors
from trainer.checkpoint import state, store
from trainer.data.examples import Example
from trainer.data.sources import File, Photo, Source
from trainer.resume import pins
from trainer.resume.allowed_changes import Allowance
from trainer.runtime import precision

MEMORY = 64 << 20
SECONDS = 20


def put(path: Path, data: bytes) -> None:
    """A new file: ext4 writes a file that was cut to nothing and written again to the disk at once, and we do it a lot."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# --- files to start from ----------------------------------------------------------------------------------------------


class Adapter:
    """Stands for the adapter, whose own reader (names and shapes) needs a model."""

    tensors = {"unet.a.lora_A.weight": torch.arange(12.0).view(3, 4), "unet.a.lora_magnitude_vector": torch.ones(3)}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, loaded) -> None:
        if loaded.keys() != self.tensors.keys():
            raise UserError(f"odd names: {sorted(loaded.keys() ^ self.tensors.keys())}")


def dora_norms() -> Norms:
    """Of a layer with an adapter and of one beside it."""
    norms = torch.tensor([1.0, 2.0, 3.0])
    layer = SimpleNamespace(
        base_norm_sq=norms.square(), norm=norms, part=lambda: None,
        get_base_layer=lambda: SimpleNamespace(original_norms=norms),
    )  # fmt: skip
    beside = SimpleNamespace(row_norms=lambda: norms, original_norms=norms)
    return Norms(SimpleNamespace(layers={"unet.a": layer}, kind=kind_named("dora")), {"unet.b": beside}, {})


def pieces_of_a_run() -> dict[str, Any]:
    """Every piece of a checkpoint as a run has it, but for the adapter."""
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [p], "lr": 1e-3, "weight_decay": 0.0, "magnitudes": False} for p in parameters]
    optimizer = optim.build_optimizer("adamw", groups)
    for parameter in parameters:
        parameter.grad.fill_(1)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: min(1.0, (n + 1) / 10)] * 2)
    config = {
        "run": {"name": "bear", "output_dir": "out", "max_steps": 4},
        "model": {"family": "sdxl", "path": "models/tiny-sdxl"},
        "data": {"sources": [{"path": "photos"}]},
    }
    record = {
        f"unet.{name}": {
            "format": "fp8_e4m3", "backend": "native", "library": "torch 2", "shape": [3, 4], "relative_error": 0.01,
            "tensors": {"weight": {"dtype": "F8_E4M3", "sha256": name * 64}},
        }
        for name in "ab"
    }  # fmt: skip
    source = Source(index=0, path="photos")
    photos = [
        Example(f"0/{n}.jpg", Photo(f"0/{n}.jpg", source, File("photos", f"{n}.jpg"), (64, 64), "", 1, "0"), (64, 64), ("",))
        for n in range(5)
    ]
    plan = SimpleNamespace(
        config=configs.parse(config | {"step": {"accumulation": 2}}),
        data=SimpleNamespace(examples=photos, photos=photos),
        length=SimpleNamespace(processes=1, steps_per_epoch=3),
    )
    return {
        "adapter": Adapter(),
        "config": pins.pin_config(configs.parse(config), allowed=Allowance()),
        "data": pins.pin_data(plan, accumulation=2, allowed=Allowance()),  # type: ignore[arg-type]
        "environment": pins.pin_environment(
            configs.parse(config), torch.device("cpu"), kernels="plain", attention="torch's own", processes=1, say=len
        ),
        "model": pins.pin_model({"vae": "f" * 64, "tokenizers": "0" * 64}),
        "norms": dora_norms(),
        "optimizer": optim.OptimizerState(optimizer, "adamw"),
        "origin": state.Pin({"about": {"name": "bear", "step": 1}, "alphas": [["unet.a", 2.0]]}, lambda *_: None),
        "progress": state.Progress(step=1, images=2, non_finite=0, total_steps=4, started="2025-01-01T00:00:00+00:00"),
        "quantization": pins.pin_quantization(record),
        "scaler": precision.ScalerState(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)),
        "schedule": optim.ScheduleState(schedule),
    }


def of_every_dtype() -> bytes:
    """A safetensors file with scalars, empty tensors and metadata."""
    shapes = ((), (3,), (2, 3), (0, 4), (1,))
    tensors = {
        f"{name}.{len(shape)}": torch.arange(6)[: max(1, torch.Size(shape).numel())].to(dtype).repeat(1).reshape(-1)
        for (name, dtype), shape in zip(sorted(DTYPES.items()), shapes * 3, strict=False)
    }
    tensors["scalar"], tensors["empty"], tensors["matrix"] = torch.tensor(3.5), torch.empty(0, 4), torch.ones(2, 3)
    return b"".join(map(bytes, serialize(tensors, {"format": "pt", "who": "ü"})))


# --- a checkpoint's damage --------------------------------------------------------------------------------------------


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Another content: bits flipped; bytes replaced, inserted, deleted, moved, repeated; cut or continued."""
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 100))
    kind = rng.randrange(9)
    if kind == 0:
        new = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        new = data[:at] + rng.randbytes(length) + data[at + length :]
    elif kind == 2:
        new = data[:at] + rng.randbytes(length) + data[at:]
    elif kind == 3:
        new = data[:at] + data[at + length :]
    elif kind == 4:
        new = data[: rng.randrange(len(data))]
    elif kind == 5:
        new = data + rng.choice((b"\0", b" ", b"\n", rng.randbytes(length)))
    elif kind == 6:
        source = rng.randrange(len(data))
        new = data[:at] + data[source : source + length] + data[at + length :]
    elif kind == 7:
        new = data[:at] + data[at : at + length] * rng.choice((2, 3, 50)) + data[at + length :]
    else:
        new = data[:at] + bytes(length) + data[at + length :]
    return bytes(new) if bytes(new) != data else changed_bytes(data, rng)


def damage(folder: Path, rng: random.Random) -> tuple[str, ...]:
    """Damages one file, or swaps two; returns their names."""
    name, other = rng.sample(sorted(p.name for p in folder.iterdir()), 2)
    path = folder / name
    kind = rng.choice(["bytes"] * 8 + ["gone", "swapped", "empty", "folder", "dangling", "loop"])
    if kind == "bytes":
        put(path, changed_bytes(path.read_bytes(), rng))
    elif kind == "empty":
        put(path, b"")
    elif kind == "swapped":
        data = path.read_bytes()
        put(path, (folder / other).read_bytes())
        put(folder / other, data)
        return name, other
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind != "gone":
            path.symlink_to(folder / "nowhere" if kind == "dangling" else path)
    return (name,)


@pytest.fixture
def no_sync(monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def listing(root: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(root.rglob("*"))]


@pytest.mark.slow
def test_a_thousand_corruptions_are_seen(tmp_path: Path, no_sync) -> None:
    """The checkpoint before is taken, the damaged one named with the file, and nothing is deleted."""
    rng, contents = random.Random(10), state.pack(pieces_of_a_run())
    older, newer = store.save(tmp_path, 1, contents), store.save(tmp_path, 2, contents)
    whole = {path.name: path.read_bytes() for path in newer.iterdir()}
    hit: Counter[str] = Counter()
    for _ in range(1000):
        names = damage(newer, rng)
        hit.update(names)
        before = listing(tmp_path)
        folder, passed = store.find(tmp_path, "auto")
        assert folder == older and listing(tmp_path) == before
        assert len(passed) == 1 and passed[0].startswith(f"{newer} is not valid: ")
        # Where the manifest's own digits are damaged, what it says of a file is told.
        said = passed[0].replace("the manifest says", store.MANIFEST).replace("its SHA-256", store.MANIFEST)
        assert any(name in said for name in names), f"{names}: {passed}"
        with pytest.raises(UserError, match="is not a valid checkpoint"):
            store.find(tmp_path, str(newer))
        for name in names:
            if (newer / name).is_dir():
                (newer / name).rmdir()
            put(newer / name, whole[name])
    assert store.find(tmp_path, "auto") == (newer, [])
    assert hit.keys() == whole.keys() and min(hit.values()) > 100


@pytest.mark.slow
def test_any_change_of_the_manifest_is_seen(tmp_path: Path, no_sync) -> None:
    """Every bit flipped, every byte gone, and what JSON would forgive put in at every place."""
    folder = store.save(tmp_path, 1, {"state.json": [b"x"], "adapter.safetensors": []})
    path = folder / store.MANIFEST
    whole = path.read_bytes()
    changes = [whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :] for i in range(len(whole)) for bit in range(8)]
    changes += [whole[:i] + whole[i + 1 :] for i in range(len(whole))]
    changes += [whole[:i] + put + whole[i:] for i in range(len(whole) + 1) for put in (b" ", b"\n", b"0", b".0", b"e0")]
    changes += [re.sub(rb"\b1\b", put, whole) for put in (b"true", b"1.0", b'"1"', b"[1]", b"null", b"-1", b"1e999")]
    changes += [whole.replace(b"0\n", put + b"\n") for put in (b"false", b"0.0", b"-0", b"NaN", b"{}", b'""')]
    changes += [
        whole.replace(b"state.json", put)
        for put in (b"\\u0073tate.json", b"s\\ud800", b"s\\udc80", b"s\\u0000", b"s\\n", b"..")
    ]
    for data in set(changes) - {whole}:
        put(path, data)
        assert store.problem(folder), data
        assert store.problem(folder).isprintable()
    put(path, whole)
    assert store.problem(folder) is None


# --- mutants ----------------------------------------------------------------------------------------------------------

DIGITS = "9" * 5000
# Texts of JSON values, where another is meant.
ODD = (
    "null", "true", "false", "0", "-0", "1", "-1", "2", "1.0", "-1.5", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "2147483648", "9007199254740993", "4611686018427387904", "9223372036854775807", "9223372036854775808", "1" + "0" * 30,
    "1" + "0" * 4000, DIGITS, f"{DIGITS}.5", f"0.{DIGITS}", "01", "1_0", "'a'", "", '""', '"F32"', '"F4"', '"weight"',
    '"\\u0000"', '"\\ud800"', '"\\udc80"', '"2025-13-01"', '"' + "x" * 5000 + '"', "[]", "[[]]", "[1]", "[0]", "[-1, 4]",
    "[0, 0]", "[2, 2.0]", "[true, true]", "[4611686018427387904, 0]", "[" + ", ".join(["1"] * 100) + "]",
    "[" + ", ".join(["9" * 4000] * 50) + "]", "{}", '{"a": 1}', '{"a": 1, "a": 2}',
    '{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}', "[" * 900 + "]" * 900, "[" * 985 + "]" * 985,
    '{"a":' * 960 + "1" + "}" * 960, "[" * 100_000, '{"a":' * 60_000,
)  # fmt: skip
KEYS = ('"__metadata__"', '""', '"\\u0000"', '"\\ud800"', '"a\\u0000b"', '"dtype"', '"version"', '"x"', "1", "null")


def paths_of(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths_of(value, (*path, key))


def with_texts(tree: Any, texts: dict[str, str]) -> str:
    """The tree's JSON, where strings that are keys of `texts` become those texts."""
    text = json.dumps(tree)
    for mark, put in texts.items():
        text = text.replace(f'"{mark}"', put)
    return text


def changed_tree(tree: Any, path: tuple, kind: str, rng: random.Random, odd: str | None = None) -> str:
    """The JSON of a tree in which the value or the key at `path` is another, is gone, or is there twice."""
    tree = json.loads(json.dumps(tree))
    texts = {"@value": odd if odd is not None else rng.choice(ODD), "@key": rng.choice(KEYS)}
    if not path:
        return with_texts("@value", texts)
    *above, last = path
    node = tree
    for key in above:
        node = node[key]
    if kind == "value" or isinstance(node, list):
        node[last] = "@value"
    elif kind == "gone":
        del node[last]
    elif kind == "key":
        node["@key"] = node.pop(last)
    else:  # twice
        texts["@key"] = json.dumps(last)
        node["@key"] = rng.choice(("@value", node[last]))
    return with_texts(tree, texts)


def json_mutant(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return changed_bytes(data, rng)
    tree = json.loads(data)
    kind = rng.choice(("value", "value", "gone", "key", "twice"))
    return changed_tree(tree, rng.choice(list(paths_of(tree))), kind, rng).encode()


def tensor_mutant(data: bytes, rng: random.Random) -> bytes:
    """Of a safetensors file: its bytes, its header's length, its header's text, or a value or name in the header."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.choice(("bytes", "length", "text", "tree", "tree", "tree", "offsets", "dtype"))
    if kind == "bytes":
        return changed_bytes(data, rng)
    if kind == "length":
        lie = rng.choice((0, 1, length - 1, length + 1, len(data), len(data) - 8, 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1))
        return lie.to_bytes(8, "little") + data[8:]
    if kind == "text":
        header = changed_bytes(header, rng)
    else:
        tree = json.loads(header)
        if kind == "dtype":
            name = rng.choice([name for name in tree if name != "__metadata__"])
            size = DTYPES[tree[name]["dtype"]].itemsize
            tree[name]["dtype"] = rng.choice([other for other, dtype in DTYPES.items() if dtype.itemsize == size])
            tree[name]["shape"].insert(rng.randrange(len(tree[name]["shape"]) + 1), 1)
            header = json.dumps(tree).encode()
        elif kind == "tree":
            path = rng.choice(list(paths_of(tree)))
            header = changed_tree(tree, path, rng.choice(("value", "value", "gone", "key", "twice")), rng).encode()
        else:
            names = [name for name in tree if name != "__metadata__"]
            for name in rng.sample(names, 2):
                tree[name][rng.choice(("shape", "data_offsets"))] = [
                    rng.choice((0, 1, 2, 3, 4, 8, 16, 24, len(body), 2**62)) for _ in range(rng.randrange(4))
                ]
            header = json.dumps(tree).encode()
    return len(header).to_bytes(8, "little") + header + body


def tensor_file(header: str, body: int) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(body)


def hostile_files() -> Iterator[bytes]:
    """Safetensors files that are consistent, or nearly, and claim what no memory holds."""
    for dtype, shape, size in (
        ("U8", "[4611686018427387904, 4, 0]", 0), ("U8", "[0, 4611686018427387904, 4611686018427387904]", 0),
        ("F64", "[9223372036854775807, 0]", 0), ("U8", "[0, 9223372036854775808]", 0), ("F32", "[4611686018427387904]", 0),
        ("U8", "[4294967296, 4294967296]", 0), ("F32", "[1099511627776]", 1 << 42), ("U8", "[1099511627776]", 1 << 40),
        ("U8", "{}", 1), ("U8", '""', 1), ("U8", "[true]", 1), ("U8", "[1.0]", 1), ("U8", "[-1, -1]", 1),
        ("F32", "[" + "1," * 70 + "1]", 4), ("U8", "[" + "9223372036854775807," * 300_000 + "0]", 0),
        ("F32", "[" + "1," * 100_000 + "1]", 4), ("U8", "[" + ("9" * 4000 + ",") * 1000 + "0]", 0),
        ("U8", "[" + ("9" * 4000 + ",") * 1000 + "1]", 1),
    ):  # fmt: skip
        yield tensor_file(f'{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [0, {size}]}}}}', min(size, 8))
    whole = '{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    yield tensor_file(f'{{"a": {whole}, "b": {whole}}}', 4)
    yield tensor_file(f'{{"a": {whole}, "a": {whole.replace("[0, 4]", "[4, 8]")}}}', 8)
    yield tensor_file(f'{{"a": {whole.replace("[0, 4]", "[4, 8]")}}}', 8)
    yield tensor_file("{" + ",".join(f'"{n}": {whole.replace("4", "0")}' for n in range(5000)) + "}", 0)
    yield tensor_file("[" * 100_000, 0)
    yield tensor_file('{"__metadata__": {"\\ud800": ""}}', 0)


class Reader:
    """Reads mutants as a start would. What is refused ends in one UserError; what loads is well-formed, or this raises."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pieces = folder / "checkpoint", pieces_of_a_run()
        self.folder.mkdir()
        self.whole = {name: b"".join(map(bytes, given)) for name, given in state.pack(self.pieces).items()}
        written = store.save(folder / "store", 1, {name: [data] for name, data in self.whole.items()})
        self.stored, self.manifest = written, (written / store.MANIFEST).read_bytes()
        self.whole["tensors"] = of_every_dtype()
        for name, data in self.whole.items():
            (self.folder / name).write_bytes(data)

    def read(self, name: str, mutant: bytes) -> bool:
        """Whether it loads; a mutant of a manifest always is refused."""
        if name == store.MANIFEST:
            put(self.stored / name, mutant)
            reason = store.problem(self.stored)
            assert isinstance(reason, str) and reason.isprintable() or mutant == self.manifest
            return mutant == self.manifest
        path = self.folder / name
        put(path, mutant)
        try:
            self.read_tensors(path, mutant) if name == "tensors" else self.read_checkpoint()
        except UserError as error:
            assert type(error) is UserError and str(error).encode(), "it cannot be printed"
            return False
        finally:
            put(path, self.whole[name])
        return True

    def read_tensors(self, path: Path, mutant: bytes) -> None:
        file = TensorFile(path)
        tensors = file.read_all()
        data = len(mutant) - 8 - int.from_bytes(mutant[:8], "little")
        assert sum(tensor.nbytes for tensor in tensors.values()) == data
        for name, tensor in tensors.items():
            assert (tensor.dtype, tuple(tensor.shape)) == (file.entries[name].dtype, file.entries[name].shape)
        again = path.with_name("again")
        write_tensors(again, tensors, file.metadata)
        read = TensorFile(again)
        assert read.metadata == file.metadata and read.entries.keys() == tensors.keys()
        for name, tensor in read.read_all().items():
            assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
            assert tensor_sha256(tensor) == tensor_sha256(tensors[name])

    def read_checkpoint(self) -> None:
        saved = state.Saved(self.folder, state.PIECES)
        for name in state.PIECES:
            assert all(type(key) is str for key in saved.state(name))
        saved.restore(**self.pieces)
        saved.finish()
        optimizer, schedule = self.pieces["optimizer"].optimizer, self.pieces["schedule"].schedule
        progress, scaler = self.pieces["progress"], self.pieces["scaler"].scaler
        for parameter, held in optimizer.state.items():
            assert all(held[key].dtype == torch.float32 for key in held)
            assert held["exp_avg"].shape == held["exp_avg_sq"].shape == parameter.shape and held["step"].shape == ()
        counts = [progress.step, progress.images, progress.non_finite, progress.total_steps, schedule.last_epoch]
        assert all(type(count) is int and 0 <= count < 2**53 for count in counts) and type(progress.started) is str
        assert all(0 <= group["lr"] < math.inf for group in optimizer.param_groups)
        assert 0 < float(scaler.scale(torch.ones(()))) < math.inf
        settings = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        assert settings == (2.0, 0.5, 100)
        # Goes on: an update, and a checkpoint of it.
        optimizer.step()
        schedule.step()
        progress.step += 1
        state.pack(self.pieces)


def mutants(reader: Reader, count: int) -> Iterator[tuple[str, str, bytes]]:
    """(what, file, content): hostile ones, then by turns odd values at every place of state.json and random ones.

    The places that a run counts with come first.
    """
    names = [
        "tensors",
        "tensors",
        "adapter.safetensors",
        "norms.safetensors",
        "optimizer.safetensors",
        "quantization.json",
        "state.json",
        store.MANIFEST,
    ]
    tree = json.loads(reader.whole["state.json"])
    places = [(path, odd) for path in paths_of(tree) for odd in ODD]
    random.Random(1).shuffle(places)
    places.sort(key=lambda place: place[0][1:2] in (("progress",), ("schedule",), ("scaler",)))  # popped from the end
    hostile = list(hostile_files())
    for number in range(count):
        rng = random.Random(number)
        if number < len(hostile):
            yield f"{number} (hostile)", "tensors", hostile[number]
            continue
        if number % 2 and places:
            path, odd = places.pop()
            yield f"{number}: {path} = {odd[:60]}", "state.json", changed_tree(tree, path, "value", rng, odd).encode()
            continue
        name = names[number // 2 % len(names)]
        data = reader.manifest if name == store.MANIFEST else reader.whole[name]
        mutant = json_mutant(data, rng) if name.endswith(".json") else tensor_mutant(data, rng)
        yield f"{number}", name, mutant


def main(count: int, folder: Path) -> None:
    """In a process of its own: reads `count` mutants and prints how many were refused, by file."""
    os.fsync = lambda descriptor: None
    reader, refused, read = Reader(folder), Counter(), Counter()
    for name, data in reader.whole.items():
        assert reader.read(name, data), f"the whole {name} is refused"
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, resource.RLIM_INFINITY))
    which = (folder / "which").open("w")
    for what, name, mutant in mutants(reader, count):
        which.seek(0)
        which.truncate()
        print(what, "in", name, file=which, flush=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # its signal ends the process
        try:
            refused[name] += not reader.read(name, mutant)
        except BaseException:
            traceback.print_exc()
            sys.exit(f"mutant {what} in {name}: {mutant[:300]!r}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        read[name] += 1
    print(json.dumps({"read": read, "refused": refused}))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.proof)])
def test_mutants_load_well_formed_or_are_refused(tmp_path: Path, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_mutated_files", str(count), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    which = (tmp_path / "which").read_text() if (tmp_path / "which").exists() else "none"
    assert done.returncode == 0, f"at mutant {which}: status {done.returncode}\n{done.stderr[-4000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts["read"].values()) == count
    for name, read in counts["read"].items():
        assert counts["refused"][name] > read / 4, f"{name}: {counts}"


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
