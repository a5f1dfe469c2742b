"""The safetensors reader and writer against the reference library."""

from __future__ import annotations

import os
import time
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scripts.make_model import write_sparse
from trainer.base.errors import UserError
from trainer.base.files import remove_leftovers
from trainer.base.tensorfile import (
    DTYPES,
    Recipe,
    TensorFile,
    count_not_finite,
    is_safetensors,
    refuse_other_format,
    tensor_sha256,
    write_tensors,
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=g)
    if dtype == torch.bool:
        return raw[..., 0] > 127
    return raw.view(dtype)[..., 0] if raw.numel() else torch.empty(shape, dtype=dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-equal: also for NaN and for float8, which has no comparison."""
    return a.dtype == b.dtype and a.shape == b.shape and tensor_sha256(a) == tensor_sha256(b)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda s: s != "__metadata__" and s.isprintable()),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31)),
        max_size=5,
    )
)
def test_round_trip_both_ways_with_the_reference_library(tmp_path_factory, described) -> None:
    folder = tmp_path_factory.mktemp("t")
    tensors = {name: random_tensor(DTYPES[d], tuple(shape), seed) for name, (d, shape, seed) in described.items()}
    write_tensors(folder / "ours", tensors, {"b": "2", "a": "ü"})
    loaded = load_file(folder / "ours")
    assert loaded.keys() == tensors.keys() and all(same(loaded[n], t) for n, t in tensors.items())
    save_file(tensors, folder / "theirs")
    file = TensorFile(folder / "theirs")
    assert file.entries.keys() == tensors.keys() and all(same(file.read(n), t) for n, t in tensors.items())


def test_same_input_same_bytes_and_the_umasks_mode(tmp_path) -> None:
    tensors = {name: torch.randn(3) for name in "cab"}
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "1", tensors, {"x": "1", "y": "2"})
    finally:
        os.umask(before)
    write_tensors(tmp_path / "2", dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert (tmp_path / "1").stat().st_mode & 0o777 == 0o640


def test_tensors_made_while_writing_give_the_same_bytes_and_are_let_go(tmp_path) -> None:
    tensors = {f"{i}": random_tensor(torch.bfloat16, (50, i), i) for i in range(6)}
    alive: list[weakref.ref] = []
    most = 0

    def make(name: str) -> torch.Tensor:
        nonlocal most
        made = tensors[name].clone()
        alive.append(weakref.ref(made.untyped_storage()))
        most = max(most, sum(storage() is not None for storage in alive))
        return made

    recipes = {name: Recipe(t.dtype, tuple(t.shape), partial(make, name)) for name, t in tensors.items()}
    assert write_tensors(tmp_path / "made", recipes) == write_tensors(tmp_path / "given", tensors)
    assert (tmp_path / "made").read_bytes() == (tmp_path / "given").read_bytes()
    assert len(alive) == 6 and most <= 2
    wrong = Recipe(torch.bfloat16, (3,), lambda: torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="odd"):
        write_tensors(tmp_path / "wrong", {"odd": wrong})
    assert not (tmp_path / "wrong").exists()


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    """Damaged contents: test_mutated_files."""
    (tmp_path / "empty").touch()
    for name, expected in (("absent", "cannot read"), (".", "cannot read"), ("empty", "has only 0 bytes")):
        with pytest.raises(UserError, match=expected) as refused:
            TensorFile(tmp_path / name)
        assert str(tmp_path / name) in str(refused.value)


def test_in_a_shared_folder_only_idle_temporaries_are_leftovers(tmp_path) -> None:
    """Two containers have the same process number: what was written a moment ago may be the other's."""
    mine, old = (tmp_path / f".x.{os.getpid()}.{tag}.tmp" for tag in ("0a", "0b"))
    for path in (mine, old):
        path.touch()
    os.utime(old, (time.time() - 700,) * 2)
    remove_leftovers(tmp_path.glob(".*.tmp"), idle=600)
    assert mine.exists() and not old.exists()
    remove_leftovers(tmp_path.glob(".*.tmp"))
    assert not mine.exists()


@pytest.mark.parametrize("gigabytes", [5, 24, 1000])
def test_files_beyond_four_gigabytes(tmp_path, gigabytes) -> None:
    large = gigabytes * 10**9
    path = tmp_path / "large.safetensors"
    shapes = {"large": (large // 2,), "last": (3,)}
    write_sparse(path, {name: Recipe(torch.bfloat16, shape, lambda: torch.empty(0)) for name, shape in shapes.items()})
    with open(path, "r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    opened = TensorFile(path)
    assert opened.entries["large"].bytes == large and opened.entries["large"].shape == (large // 2,)
    assert opened.read("last").tolist() == [1.5, -2.0, 3.0]


@pytest.mark.parametrize("name", ["a.safetensors", "A.SAFETENSORS", "ae.sft", "b.Sft"])
def test_names_of_safetensors_in_any_letters(tmp_path, name: str) -> None:
    assert is_safetensors(name)
    refuse_other_format("model.path", tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.ckpt", b"", "is a pickle, which can run code; convert it"),
        ("a.PTH", b"", "is a pickle"),
        ("a.gguf", b"GGUF", "is not a .safetensors file; .* does not read GGUF: use the 16-bit or float8 file"),
        ("a.safetensors.crdownload", b"", "is an unfinished download; let it finish"),
        ("a.safetensors.part", b"", "is an unfinished download"),
        ("model.safetensors.index.json", b"{}", "is not a .safetensors file; of an index of shards give"),
        ("a.txt", b"hello", r"is not a .safetensors file: is not a complete safetensors file \(it has only 5 bytes\)"),
        ("blob", (2).to_bytes(8, "little") + b"{}", "is a safetensors file .*; rename it to blob.safetensors"),
    ],
)
def test_a_file_of_another_name_gets_one_message_with_the_remedy(tmp_path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^model.path = '.*{name}' {said}"):
        refuse_other_format("model.path", tmp_path / name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it has only 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer; run"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "a web page, .* download the file itself"),
        (b"\xef\xbb\xbf\n <html><body>Sign in</body></html>", "a web page, .* download the file itself"),
        (b'{"error":"Repository not found"}', "it holds JSON text, .*and no weights; download the file itself"),
        (b'\n{\n  "message": "Not Found"\n}', "it holds JSON text"),
        (b"{}", "it holds JSON text"),
        (b"Access to model black-forest-labs/FLUX.1-dev is restricted.", "text 'Access to model black-forest-lab.*download"),
        (b"Entry not found", r"it begins with the text 'Entry not found'\); download or copy it again"),
        (b"GGUF" + bytes(40), "it is GGUF"),
        (b"PK\x03\x04" + bytes(40), "an archive, perhaps a pickle"),
        (b"\xff" * 40, "its header claims .* download or copy it again"),
        # Cut off within headers of these lengths, which begin like text: " {" and "<".
        (int.from_bytes(b" {", "little").to_bytes(8, "little") + b'{"a":', "its header claims 31520 bytes"),
        (b"<".ljust(8, b"\0") + b'{"a":', "its header claims 60 bytes"),
    ],
)
def test_what_lies_under_the_name_of_safetensors_is_named(tmp_path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=f"model.safetensors is not a .*{said}"):
        TensorFile(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_value_that_is_not_finite_is_counted(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-60000, 60000, 999, dtype=torch.float64).to(dtype).reshape(27, 37)
    assert count_not_finite(tensor) == count_not_finite(tensor[:0]) == count_not_finite(torch.arange(3)) == 0
    for count, value in enumerate((float("nan"), float("inf"), -float("inf")), 1):
        tensor[count, 3] = value
        assert count_not_finite(tensor) == count


@pytest.mark.parametrize(
    ("dtype", "codes"), [(torch.float8_e4m3fn, [0x7F, 0xFF]), (torch.float8_e5m2, [0x7C, 0xFC, 0x7D, 0xFF])]
)
def test_every_code_of_float8_that_is_not_finite_is_counted(dtype: torch.dtype, codes: list[int]) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert count_not_finite(every) == int((~torch.isfinite(every.float())).sum()) > 0
    sound = every[torch.isfinite(every.float())]
    assert count_not_finite(sound) == 0
    for code in codes:
        assert count_not_finite(torch.tensor([1, code, 2], dtype=torch.uint8).view(dtype)) == 1
