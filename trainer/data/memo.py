"""What image files came to when they were last read in full, so that a start reads none whose size, inode and times are as
they were. What changed under equal times is met when it is read to be trained (`read_unchanged`)."""

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

VERSION = 1  # raise it when `Facts` of the same bytes would be others
DECODERS = ("pillow", "pillow-heif", "pillow-jxl-plugin")


def read_unchanged(place: Place, sha256: str) -> bytes:
    """The bytes of a file that has this digest. Raises OSError, and UserError where it changed after the scan."""
    data = place.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        changed = "changed since the start looked at it, or under equal times before that; start again with --verify"
        raise UserError(f"{place} {changed}")
    return data


@dataclass(frozen=True, slots=True)
class Facts:
    """What the bytes of an image came to. sha256: of the bytes. size, format, choices, notes: as `decode` gives them.
    black: whether its mask, or its transparency, counts nowhere; None: it has none. look: its perceptual hash."""

    sha256: str
    size: tuple[int, int]
    format: str = ""
    choices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    black: bool | None = None
    look: bytes = b""


_Page = dict[str, tuple[Stamp, Facts]]  # by kind and place


class Memo:
    """Facts by file, a page (a file of JSON lines) for each source. folder: of the pages; None: of copies within one start
    alone. trusted: whether what an earlier start wrote counts. layouts: read the sources that are no folders. Nothing is
    written before `save`."""

    def __init__(self, folder: Path | None = None, *, trusted: bool = True, layouts: Sequence[SourceReader] = ()) -> None:
        self.folder, self.trusted, self.layouts, self.damaged = folder, trusted, layouts, list[str]()
        self.known = self.read = 0  # files
        self._pages: dict[str, tuple[_Page, _Page]] = {}  # what an earlier start knew, and what this one does
        self._copies: dict[tuple[str, str, str], Facts] = {}
        self._lock = Lock()  # photos are read by several threads

    def facts(self, source: Source, kind: str, place: Place, look: Callable[[bytes, str], Facts]) -> Facts:
        """The facts of a file, known or by `look` of its bytes and their digest, once of equal bytes. kind: what the image is
        read as. Raises OSError, and ValueError of `look`: a damaged file is read again at every start."""
        before, now = self._page(source)
        key = f"{kind} {str(place).removeprefix(printable(source.path))}"
        stamp = None if self.folder is None else place.stamp()
        if key in before and before[key][0] == stamp:
            self.known += 1
            now[key] = before[key]
            return now[key][1]
        settled = stamp is not None and is_settled(stamp)  # else it may change again without a newer time
        data = place.read()
        sha256 = hashlib.sha256(data).hexdigest()
        copy = (kind, source.background, sha256)
        self._copies[copy] = facts = self._copies.get(copy) or look(data, sha256)
        self.read += 1
        if stamp is not None and settled:
            now[key] = stamp, facts
        return facts

    def lines(self) -> list[str]:
        """What a start says: which pages are damaged, and how many files it did not read."""
        known = f"{self.known:,} of {self.known + self.read:,} image files are as an earlier start read them"
        return [*self.damaged, *([f"photos: {known} (--verify reads all)"] if self.known else [])]

    def save(self) -> None:
        """Write the pages that changed, each whole or not at all. Starts that write one page at the same time lose nothing
        that cannot be read again."""
        for name, (before, now) in self._pages.items():
            if self.folder is not None and now and now != before:
                first = dict[Facts, str]()  # of copies the first key stands in the place of the facts
                each = ((key, *known, first.setdefault(known[1], key)) for key, known in sorted(now.items()))
                rows = (json.dumps([k, stamp, *(_row(facts) if k == one else [one])]) for k, stamp, facts, one in each)
                body = "".join(f"{row}\n" for row in rows).encode()
                make_folder(self.folder)
                remove_leftovers(self.folder.glob(".*.tmp"), idle=60)
                write_atomic(self.folder / name, [f"{json.dumps(_head(body))}\n".encode(), body], sync=False)

    def _page(self, source: Source) -> tuple[_Page, _Page]:
        about = json.dumps([str(Path(source.path).absolute()), source.background])
        name = f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.jsonl"
        with self._lock:
            if name not in self._pages:
                self._pages[name] = (self._written(name) if self.folder is not None and self.trusted else {}), {}
            return self._pages[name]

    def _written(self, name: str) -> _Page:
        path = Path(self.folder or "", name)
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            given, wanted = json.loads(head), _head(body)
            if given["sha256"] != wanted["sha256"]:
                raise ValueError("its lines are not those that were written")
            page: _Page = {}
            for key, stamp, *row in map(json.loads, body.splitlines() if given == wanted else ()):  # none of other decoders
                page[key] = tuple(stamp), page[row[0]][1] if len(row) == 1 else _facts(*row)
            return page
        except FileNotFoundError:
            return {}
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"is damaged ({error})"
        self.damaged.append(f"warning: {path} {why} and counts as empty: every photo is read")
        return {}


@cache
def _decoders() -> list[object]:
    installed = {name: [each.version for each in metadata.distributions(name=name)] for name in DECODERS}
    return [VERSION, installed]


def _head(body: bytes) -> dict[str, object]:
    return {"decoders": _decoders(), "sha256": hashlib.sha256(body).hexdigest()}


def _row(facts: Facts) -> tuple[object, ...]:
    return *astuple(facts)[:-1], b64encode(facts.look).decode()


def _facts(sha256: str, size: list[int], kind: str, choices: list[str], notes: list[str], black: bool | None, look: str):
    shared = tuple(map(sys.intern, choices)), tuple(map(sys.intern, notes))
    return Facts(sha256, (size[0], size[1]), kind, *shared, black, b64decode(look))
