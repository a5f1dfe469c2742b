"""Removes large text and profiles from PNG files. Pillow inflates all of them, and refuses a sound photo for the size of its
text (a workflow of ComfyUI) or of its colour profile (a screen's)."""

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
TEXT = (b"tEXt", b"zTXt", b"iTXt")
ORIENTATION = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")  # keywords of text that may have the orientation
PILLOWS_LIMIT, LIMIT = 1 << 20, 32 << 20  # bytes of one inflated chunk


def lean(data: bytes) -> tuple[bytes, bytes | None, bool]:
    """(a file's bytes without its text; its colour profile if that is too large for Pillow; whether text with the orientation
    was too large, too). A damaged file keeps the bytes after the damage."""
    if not data.startswith(SIGNATURE):
        return data, None, False
    chunks, profile, unread_exif, begin, at = [], None, False, 0, len(SIGNATURE)
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body, start, at = data[at + 8 : at + 8 + length] if kind in (*TEXT, b"iCCP") else b"", at, at + 12 + length
        if at > len(data) or kind == b"IEND":
            break
        drop = kind in TEXT
        if kind == b"iCCP":
            profile = _too_large(body) or profile
            drop = profile is not None
        elif body.startswith(ORIENTATION):
            drop = length > LIMIT or _too_large(body) is not None
            unread_exif = unread_exif or drop
        if drop:
            chunks.append(data[begin:start])
            begin = at
    return b"".join((*chunks, data[begin:])) if chunks else data, profile, unread_exif


def _too_large(body: bytes) -> bytes | None:
    """The inflated data of a chunk if it is too large for Pillow, at most LIMIT bytes; else None. It begins at the first
    place that begins a zlib stream (RFC 1950) and inflates."""
    for header in range(body.find(b"\0") + 1, min(len(body), 200)):
        if body[header] & 15 == 8 and int.from_bytes(body[header : header + 2]) % 31 == 0:
            try:
                inflated = zlib.decompressobj().decompress(memoryview(body)[header:], LIMIT)
            except zlib.error:
                continue
            return inflated if len(inflated) > PILLOWS_LIMIT else None
    return None
