"""Lists the members of a tar archive and their places, from the headers alone: nothing is unpacked.

The format: POSIX.1-2017, "pax Interchange Format" and "ustar Interchange Format"; GNU tar's manual, "Basic Tar Format".
`tarfile` parses single headers: its iteration takes a damaged one for the end, and reads header text of any length.
"""

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from trainer.base.text import refuse_stand_in

BLOCK = 512
MAX_TEXT = 1 << 20  # bytes of a header's text: a name, a pax record
MAX_PADDING = 1 << 20  # writers fill an archive up to a multiple of their buffer

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
NOT_FILES = {
    tarfile.LNKTYPE: "a link to another member",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
SPARSE = "stored as sparse; make the archive without --sparse"


class Member(NamedTuple):
    """A file in an archive. offset, size: of its bytes. unread: why it is not read; None for a plain file."""

    name: str
    offset: int
    size: int
    unread: str | None


def members(file: BinaryIO, length: int) -> Iterator[Member]:
    """All members except folders, in the archive's order. length: of the file, in bytes. Raises OSError, and ValueError with
    the reason if the archive is damaged, cut off or compressed."""
    at, shared, local = 0, {}, {}  # fields of pax headers. local: for the next member; shared: for all that follow
    while True:
        file.seek(at)
        block, data = file.read(BLOCK), at + BLOCK
        header = _header(block, at)
        if header is None:
            return _check_end(file, at)
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
            (shared if header.type == tarfile.XGLTYPE else local).update(_records(_text(file, header.size, at), at))
            at = data + _pad(header.size)
            continue
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            text = _decode(_text(file, header.size, at).partition(b"\0")[0])
            local |= {"path": text} if header.type == tarfile.GNUTYPE_LONGNAME else {}
            at = data + _pad(header.size)
            continue
        fields, local = shared | local, {}
        name = fields.get("path", header.name)
        size = _number(fields["size"], at) if "size" in fields else header.size
        unread = _unread(header.type, fields)
        if header.type == tarfile.GNUTYPE_SPARSE:
            data = _after_sparse_map(file, data, more=block[482])
        if header.type in NOT_FILES or header.type == tarfile.DIRTYPE:
            size = 0  # whatever the header says, no bytes follow
        if size > length - data:
            raise ValueError(f"cut off: {name!r} has {size:,} bytes, {length - data:,} are left; copy or download it again")
        if header.type != tarfile.DIRTYPE:
            yield Member(name, data, size, unread)
        at = data + _pad(size)


def _header(block: bytes, at: int) -> tarfile.TarInfo | None:
    """The header in one block of 512 bytes; None for the end-of-archive block."""
    if block == bytes(BLOCK):
        return None
    if not at:
        _refuse_others(block)
    if len(block) < BLOCK:
        raise ValueError(f"cut off at byte {at + len(block):,}: it has no end mark; copy or download it again")
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        reason = f"damaged at byte {at:,} ({error}); copy or download it again" if at else "not a tar archive"
        raise ValueError(reason) from error
    if info.size < 0:
        raise ValueError(f"damaged at byte {at:,} ({info.name!r} has {info.size} bytes)")
    return info


def _refuse_others(block: bytes) -> None:
    if not block:
        raise ValueError("empty (0 bytes)")
    refuse_stand_in(block)
    if kind := next((kind for magic, kind in COMPRESSED.items() if block.startswith(magic)), None):
        raise ValueError(f"compressed with {kind}, so single photos cannot be read from it; decompress it to a plain .tar")


def _unread(kind: bytes, fields: dict[str, str]) -> str | None:
    if kind == tarfile.GNUTYPE_SPARSE or any(field.startswith("GNU.sparse.") for field in fields):
        return SPARSE
    if kind in FILES:
        return None
    return NOT_FILES.get(kind, f"a member of kind {kind!r}, not a file")


def _text(file: BinaryIO, size: int, at: int) -> bytes:
    if size > MAX_TEXT:
        reason = f"a header with {size:,} bytes of text, more than the limit of {MAX_TEXT:,}"
        raise ValueError(f"damaged at byte {at:,} ({reason})")
    text = file.read(size)
    if len(text) < size:
        raise ValueError(f"cut off at byte {at + BLOCK + len(text):,}, within a header; copy or download it again")
    return text


def _records(text: bytes, at: int) -> dict[str, str]:
    """The records of a pax header, each "LENGTH KEY=VALUE\\n", where LENGTH counts the whole record."""
    fields, start = {}, 0
    while start < len(text) and text[start]:
        length = text[start : start + 20].partition(b" ")[0]
        end = start + _number(_decode(length), at)
        key, equals, value = text[start + len(length) + 1 : end - 1].partition(b"=")
        if not equals or text[end - 1 : end] != b"\n":
            raise ValueError(f"damaged at byte {at:,} (a malformed pax header)")
        fields[_decode(key)], start = _decode(value), end
    return fields


def _number(text: str, at: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"damaged at byte {at:,} ({text[:20]!r} is no number)")
    return int(text)


def _after_sparse_map(file: BinaryIO, data: int, *, more: int) -> int:
    """The offset of a sparse member's bytes in GNU's old format, after the blocks of its map. more: whether there are
    such."""
    file.seek(data)
    while more:
        block = file.read(BLOCK)
        data += BLOCK
        more = len(block) == BLOCK and block[504]
    return data


def _check_end(file: BinaryIO, at: int) -> None:
    file.seek(at)
    rest = file.read(MAX_PADDING + 1)
    if len(rest) > MAX_PADDING or rest.count(0) < len(rest):
        remedy = "give archives one by one, or join them with tar --concatenate"
        raise ValueError(f"continues after its end mark at byte {at:,}; {remedy}")


def _pad(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
