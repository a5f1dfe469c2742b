"""Facts of image files from their last full read, so that a start skips files whose size, inode and times are unchanged. A
change under equal times is detected when the file is read to be trained (`read_unchanged`)."""

import hashlib
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Lock

from trainer.base.console import printable
from trainer.base.digests import Stamp, is_settled
from trainer.base.errors import UserError
from trainer.base.files import make_folder, remove_leftovers, write_atomic
from trainer.data.sources import Place, Source, SourceReader

VERSION = 1  # raise it when the same bytes give other `Facts`
DECODERS = ("pillow", "pillow-heif", "pillow-jxl-plugin")


def read_unchanged(place: Place, sha256: str) -> bytes:
    """The bytes of a file that has this digest. Raises OSError, and UserError if it changed after the scan."""
    data = place.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        reason = "changed since the start looked at it, or under equal times before that; start again with --verify"
        raise UserError(f"{place} {reason}")
    return data


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the bytes of an image. sha256: of the bytes. size, format, choices, notes: of decode.Decoded. black:
    whether its mask, or its transparency, is black all over; None: it has none. look: its perceptual hash."""

    sha256: str
    size: tuple[int, int]
    format: str = ""
    choices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    black: bool | None = None
    look: bytes = b""


_Page = dict[str, tuple[Stamp, Facts]]  # by kind and place


class Memo:
    """Facts by file, in one page (a file of JSON lines) for each source. folder: of the pages; None: facts are shared within
    one start alone. trusted: whether pages of an earlier start count. layouts: readers of sources that are no folders.
    Nothing is written before `save`."""

    def __init__(self, folder: Path | None = None, *, trusted: bool = True, layouts: Sequence[SourceReader] = ()) -> None:
        self.folder, self.trusted, self.layouts, self.damaged = folder, trusted, layouts, list[str]()
        self.reused = self.read = 0  # files
        self._pages: dict[str, tuple[_Page, _Page]] = {}  # (of an earlier start, of this one) by file name
        self._copies: dict[tuple[str, str, str], Facts] = {}
        self._lock = Lock()  # photos are read by several threads

    def facts(self, source: Source, kind: str, place: Place, examine: Callable[[bytes, str], Facts]) -> Facts:
        """The facts of a file: remembered, or `examine(bytes, digest)`, called once for equal bytes. kind: "photo" or "mask".
        Raises OSError, and ValueError of `examine`: a damaged file is read again at every start."""
        earlier, current = self._page(source)
        key = f"{kind} {str(place).removeprefix(printable(source.path))}"
        stamp = None if self.folder is None else place.stamp()
        if key in earlier and earlier[key][0] == stamp:
            self.reused += 1
            current[key] = earlier[key]
            return current[key][1]
        settled = stamp is not None and is_settled(stamp)  # else it may change again without a newer time
        data = place.read()
        sha256 = hashlib.sha256(data).hexdigest()
        copy = (kind, source.background, sha256)
        self._copies[copy] = facts = self._copies.get(copy) or examine(data, sha256)
        self.read += 1
        if stamp is not None and settled:
            current[key] = stamp, facts
        return facts

    def lines(self) -> list[str]:
        """Lines for a start's log: the damaged pages, and the count of files that were not read."""
        counts = f"{self.reused:,} of {self.reused + self.read:,} image files are as an earlier start read them"
        return [*self.damaged, *([f"photos: {counts} (--verify reads all)"] if self.reused else [])]

    def save(self) -> None:
        """Write the pages that changed, each whole or not at all. Starts that write one page at the same time lose nothing
        that cannot be read again."""
        for name, (earlier, current) in self._pages.items():
            if self.folder is not None and current and current != earlier:
                first, rows = dict[Facts, str](), []  # copies name the first key instead of the facts
                for key, (stamp, facts) in sorted(current.items()):
                    original = first.setdefault(facts, key)
                    rows.append(json.dumps([key, stamp, *(_row(facts) if key == original else [original])]))
                body = "".join(f"{row}\n" for row in rows).encode()
                make_folder(self.folder)
                remove_leftovers(self.folder.glob(".*.tmp"), idle=60)
                write_atomic(self.folder / name, [f"{json.dumps(_head(body))}\n".encode(), body], sync=False)

    def _page(self, source: Source) -> tuple[_Page, _Page]:
        about = json.dumps([str(Path(source.path).absolute()), source.background])
        name = f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.jsonl"
        with self._lock:
            if name not in self._pages:
                self._pages[name] = (self._read_page(name) if self.folder is not None and self.trusted else {}), {}
            return self._pages[name]

    def _read_page(self, name: str) -> _Page:
        path = Path(self.folder or "", name)
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            actual, expected = json.loads(head), _head(body)
            if actual["sha256"] != expected["sha256"]:
                raise ValueError("its lines are not those that were written")
            page: _Page = {}
            rows = body.splitlines() if actual == expected else ()  # pages of other decoders count as empty
            for key, stamp, *row in map(json.loads, rows):
                page[key] = tuple(stamp), page[row[0]][1] if len(row) == 1 else _facts(*row)
            return page
        except FileNotFoundError:
            return {}
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"is damaged ({error})"
        self.damaged.append(f"warning: {path} {reason} and counts as empty: every photo is read")
        return {}


@cache
def _decoders() -> list[object]:
    installed = {name: [package.version for package in metadata.distributions(name=name)] for name in DECODERS}
    return [VERSION, installed]


def _head(body: bytes) -> dict[str, object]:
    return {"decoders": _decoders(), "sha256": hashlib.sha256(body).hexdigest()}


def _row(facts: Facts) -> tuple[object, ...]:
    return *astuple(facts)[:-1], b64encode(facts.look).decode()


def _facts(sha256: str, size: list[int], kind: str, choices: list[str], notes: list[str], black: bool | None, look: str):
    shared = tuple(map(sys.intern, choices)), tuple(map(sys.intern, notes))
    return Facts(sha256, (size[0], size[1]), kind, *shared, black, b64decode(look))
