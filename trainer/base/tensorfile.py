"""The only safetensors reader and writer (https://huggingface.co/docs/safetensors). The library's writer orders metadata at
random, leaves temporary files when killed and ignores the umask; its reader maps the file, whose pages count as resident."""

import codecs
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.base.errors import UserError
from trainer.base.files import CHUNK_BYTES, Advance, Write, no_progress, refuse_irregular, write_atomic

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # limit of the format's reference implementation
MAX_DIMENSIONS = 64  # numpy takes no more, and multiplying a million sizes would take hours
SUFFIXES = (".safetensors", ".sft")  # in any letter case
# Messages about files of other formats, by suffix and by first bytes.
_FORMATS = json.loads(Path(__file__).with_name("file_formats.json").read_text(encoding="utf-8"))
OTHER_SUFFIXES = {suffix: text for suffixes, text in _FORMATS["suffixes"].items() for suffix in suffixes.split()}
PICKLES = tuple(suffix for suffix, text in OTHER_SUFFIXES.items() if "pickle" in text)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in a file. start: offset from the beginning of the file; bytes: size."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


def is_safetensors(path: Path | str) -> bool:
    """Whether the file name is a safetensors file's."""
    return Path(path).suffix.lower() in SUFFIXES


def refuse_other_format(key: str, path: Path) -> None:
    """Raises UserError, with the remedy, unless the file is named as safetensors. key: the config key that names it."""
    if is_safetensors(path):
        return
    text = OTHER_SUFFIXES.get(path.suffix.lower())
    if text is None:
        try:
            TensorFile(path)
            text = f"is a safetensors file under another name; rename it to {path.name}{SUFFIXES[0]}"
        except UserError as error:
            text = f"is not a .safetensors file: {str(error).removeprefix(str(path)).strip()}"
    raise UserError(f"{key} = {str(path)!r} {text}")


def count_not_finite(tensor: torch.Tensor) -> int:
    """The number of NaN and infinite values; one pass over memory if there are none."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        least = 0x7F if tensor.dtype is torch.float8_e4m3fn else 0x7C  # smallest non-finite code, sign bit removed
        pieces = tensor.reshape(-1).view(torch.uint8).split(CHUNK_BYTES)
        return sum(int((piece & 0x7F).ge_(least).sum()) for piece in pieces)
    least, most = tensor.aminmax()  # both are NaN if any value is
    if math.isfinite(least) and math.isfinite(most):
        return 0
    return int((~torch.isfinite(tensor)).sum())


class TensorFile:
    """A safetensors file, read tensor by tensor without mapping it. Raises UserError if it is missing or damaged."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        refuse_irregular(self.path)
        try:
            with open(self.path, "rb") as file:
                total = os.fstat(file.fileno()).st_size
                self.metadata, self.entries = _parse_header(self.path, file, total)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}. Give the path of a .safetensors file.") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str, advance: Advance = no_progress) -> torch.Tensor:
        """One tensor, in freshly allocated memory. Raises KeyError for an unknown name."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.bytes:
            # A flat byte view works for every dtype and shape, also float8 and 0-d.
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            with open(self.path, "rb", buffering=0) as file:
                file.seek(entry.start)
                position = 0
                while position < entry.bytes:
                    count = file.readinto(view[position : position + CHUNK_BYTES])
                    if not count:
                        raise UserError(f"{self.path} ends inside tensor {name!r}; download or copy the file again.")
                    position += count
                    advance(count)
        return tensor

    def read_all(self, advance: Advance = no_progress) -> dict[str, torch.Tensor]:
        """Every tensor, by name."""
        return {name: self.read(name, advance) for name in self.entries}


def parse(data: bytearray | memoryview, path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(metadata, tensors sharing the writable memory of `data`) of a file's bytes. Raises UserError if they are damaged."""
    metadata, entries = _parse_header(path, io.BytesIO(data), len(data))

    def tensor(entry: TensorEntry) -> torch.Tensor:
        count = math.prod(entry.shape)
        flat = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=entry.start) if count else torch.empty(0)
        return flat.to(entry.dtype).reshape(entry.shape)

    return metadata, {name: tensor(entry) for name, entry in entries.items()}


def _parse_header(path: Path, file, total: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    def broken(detail: str) -> UserError:
        return UserError(f"{path} is not a complete safetensors file ({detail}); download or copy it again.")

    start = file.read(32)
    length = int.from_bytes(start[:8], "little")
    if total < 8 or length > min(MAX_HEADER_BYTES, total - 8):
        text = start.removeprefix(codecs.BOM_UTF8).lstrip()
        for beginning, message in _FORMATS["beginnings"].items():
            # A length field may begin with "{" or "<" by chance; it then has a NUL, which no text has.
            if text.startswith(beginning.encode()) and (len(beginning) > 1 or b"\0" not in start[:8]):
                raise UserError(f"{path} is not a safetensors file: {message}")
        if total >= 8 and start.isascii() and (begin := " ".join(start.decode().split())).isprintable():
            raise broken(f"it begins with the text {begin!r}")
        raise broken(f"it has only {total} bytes" if total < 8 else f"its header claims {length} bytes, the file has {total}")
    file.seek(8)
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:  # bad UTF-8 or JSON; nested a thousand deep
        raise broken("its header is not JSON") from error
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken("its metadata is not a map of strings")
    try:  # JSON can escape lone surrogates; a file with such a name could not be written again
        "".join([*header, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:
        raise broken("its header has names that are not Unicode") from error
    entries, spans, data_bytes = {}, [], total - 8 - length
    for name, item in header.items():
        if isinstance(item, dict) and isinstance(dtype_name := item.get("dtype"), str) and dtype_name not in DTYPES:
            remedy = f"use a 16-bit file (supported: {', '.join(DTYPES)})"
            raise UserError(f"{path}: tensor {name!r} has dtype {dtype_name!r}, which is not supported; {remedy}")
        try:
            dtype, shape, (start, end) = DTYPES[item["dtype"]], item["shape"], item["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise broken(f"the entry of tensor {name!r} is malformed or has an unknown dtype") from error
        if not _is_shape(shape) or not _is_size(start) or not _is_size(end):
            raise broken(f"the shape or the offsets of tensor {name!r} are not sizes")
        if end - start != math.prod(shape) * dtype.itemsize or end > data_bytes:
            raise broken(f"tensor {name!r} lies outside the file or has the wrong size")
        entries[name] = TensorEntry(dtype, tuple(shape), 8 + length + start, end - start)
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise broken("its tensors overlap or leave holes")
        position = end
    if position != data_bytes:
        raise broken(f"{data_bytes - position} bytes belong to no tensor")
    return metadata, entries


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _is_shape(sizes: object) -> bool:
    """Whether torch's 64-bit strides can hold that shape; they count sizes of zero as one."""
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMENSIONS or not all(map(_is_size, sizes)):
        return False
    return math.prod(max(n, 1) for n in sizes) < 2**63


@dataclass(frozen=True)
class Recipe:
    """A tensor computed by `make` when it is written, so that a file may exceed the memory; at most two are held at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


Tensors = Mapping[str, torch.Tensor | Recipe]


def serialize(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The file's bytes in pieces: the header, then every tensor, wider dtypes first, then by name. Same input, same bytes."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    # Wider dtypes first, then by name: every tensor starts aligned, as in the reference writer.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    position = 0
    for name in order:
        tensor = tensors[name]
        shape, span = list(tensor.shape), [position, position + math.prod(tensor.shape) * tensor.dtype.itemsize]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": span}
        position = span[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = tensors[name]
        if isinstance(tensor, Recipe):
            entry, tensor = tensor, tensor.make()
            assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), name
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        del tensor
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())
        del flat


def write_tensors(
    path: Path | str,
    tensors: Tensors,
    metadata: Mapping[str, str] | None = None,
    advance: Advance = no_progress,
    write: Write = write_atomic,
) -> tuple[str, int]:
    """Write a safetensors file atomically; returns (sha256, bytes). Equal tensors and metadata give equal bytes."""
    return write(path, serialize(tensors, metadata), advance)


def tensor_sha256(tensor: torch.Tensor, advance: Advance = no_progress) -> str:
    """SHA-256 of a tensor's bytes, row-major."""
    flat, digest = tensor.detach().to("cpu").contiguous().reshape(-1), hashlib.sha256()
    view = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    while view:
        piece, view = view[:CHUNK_BYTES], view[CHUNK_BYTES:]
        digest.update(piece)
        advance(len(piece))
    return digest.hexdigest()


def size_text(count: int) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
