"""Reads a JPEG XL file's header before it is decoded: pillow-jxl-plugin decodes a file when it opens it. So it gets the
picture alone (the codestream of ISO/IEC 18181-1, without the boxes of 18181-2), after its size was checked."""

MAGIC = b"\xff\x0a"
CONTAINER = b"\x00\x00\x00\x0cJXL \r\n\x87\n"
RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}  # width : height


def is_jxl(data: bytes) -> bool:
    """Whether these are the first bytes of a JPEG XL file."""
    return data.startswith((MAGIC, CONTAINER))


def codestream(data: bytes) -> bytes:
    """The picture: the whole file, or its boxes "jxlc" or "jxlp". Raises ValueError if it is truncated."""
    if data.startswith(MAGIC):
        return data
    parts, place = [], 0
    while place < len(data):
        size, kind, start = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8], place + 8
        if size == 1:
            size, start = int.from_bytes(data[place + 8 : place + 16], "big"), place + 16
        end = place + size if size else len(data)
        if end > len(data) or end < start:
            raise ValueError("the file is truncated, or its boxes are damaged")
        if kind == b"jxlc":
            parts.append(data[start:end])
        elif kind == b"jxlp":
            parts.append(data[start + 4 : end])  # behind the part's number
        place = end
    if not parts or not b"".join(parts[:1]).startswith(MAGIC):
        raise ValueError("no picture in the file, or its header is damaged")
    return b"".join(parts)


def size(stream: bytes) -> tuple[int, int]:
    """(width, height) from the stream's header, before its orientation is applied. Its sides are at most 2**30 each."""
    bits = int.from_bytes(stream[2:14], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & ((1 << count) - 1), bits >> count
        return value

    def side(small: int) -> int:
        return (take(5) + 1) * 8 if small else take((9, 13, 18, 30)[take(2)]) + 1

    small = take(1)
    height = side(small)
    ratio = take(3)
    if ratio:
        across, down = RATIOS[ratio]
        return height * across // down, height
    return side(small), height
