"""Lists, reads and checks all training photos before a run does anything else. Reports all problems at once."""

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from trainer.base.account import Account, Entry, Heading, counted
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.text import decoded, invisible, visible
from trainer.data import buckets, layouts
from trainer.data.images import near_duplicates
from trainer.data.images.decode import decode, decode_mask
from trainer.data.images.kinds import IMAGES, JSON, MASK_ENDINGS
from trainer.data.layouts import walk
from trainer.data.layouts.table import json_caption, unwrapped
from trainer.data.memo import Facts, Memo
from trainer.data.sources import Extras, ListedPhoto, Listing, Mask, Photo, Place, Scanned, Source, SourceReader
from trainer.data.threads import in_threads

# No text encoder reads a tenth of it, and a tokenizer takes seconds for a file that is no caption.
LONGEST_CAPTION = 2**16
BLACK = "the mask is black all over, so nothing is learnt from it"
WHITE = "white marks what is learnt, and unmasked_weight lets black count, too"


def refuse_damaged(scanned: Scanned) -> None:
    """Raises one UserError that names every problem."""
    if scanned.damaged:
        listed = "\n".join(f"  {problem}" for problem in scanned.damaged)
        raise UserError(f"data.sources: {counted(len(scanned.damaged), 'problem')}; repair or remove these:\n{listed}")


def survey(
    sources: Sequence[Source],
    *,
    strict_captions: bool = False,
    phases: Phases = QUIET,
    outputs: Sequence[str] = (),
    memo: Memo | None = None,
) -> Scanned:
    """The sound photos of the sources, in order of source, then of name, and the problems of all others.

    Every image is decoded in full, equal bytes once, except those that `memo` knows. With `strict_captions` a missing or
    empty caption is a problem. outputs: folders in which the run writes; they hold no photos.
    """
    memo = memo or Memo()
    listings, used_apart = list[Listing](), defaultdict[int, set[str]](set)
    for source in reversed(sources):  # held-out photos, which follow their source, are listed before it
        exclusions = walk.exclusions_of(source, sources, outputs)
        listings.insert(0, layouts.listing(source, exclusions, memo.layouts, used_apart[source.index]))
    problems = [problem for listing in listings for problem in listing.problems]
    read = partial(_read, memo=memo, strict_captions=strict_captions)
    photos: list[Photo] = []
    count = sum(len(listing.photos) for listing in listings)
    with phases("scanning photos", count, "photo") as phase, closing(in_threads(read, _pop_photos(listings))) as results:
        for result in results:
            phase.advance()
            if isinstance(result, Photo):
                photos.append(result)
            else:
                problems += result
    entries = [Entry(Heading.USED, "", count=len(photos), noun="photo")]
    entries += [Entry(Heading.USED, "", count=count - len(photos), noun="damaged photo")]
    account = Account([*entries, *(entry for listing in listings for entry in listing.account)])
    for photo in photos:
        for note in photo.notes:
            heading, remedy = (Heading.WARNING, WHITE) if note == BLACK else (Heading.NOTE, "")
            account.add(heading, note, [str(photo.image)], noun="photo", remedy=remedy)
    subject = [photo for photo in photos if not (photo.source.regularisation or photo.source.is_held_out)]
    if subject and all(BLACK in photo.notes for photo in subject):
        problems.append(f"every photo's mask is black all over, so nothing would be learnt; {WHITE}")
    _warn(account, sources, photos)
    return Scanned(tuple(photos), account, tuple(problems))


def _warn(account: Account, sources: Sequence[Source], photos: Sequence[Photo]) -> None:
    """Enter photos that are trained and look unintended when all are seen together."""
    first: dict[str, int] = {}  # by the digest of a photo's bytes, the source that has it first
    for photo in (photo for photo in photos if not photo.source.is_held_out):
        if (index := first.setdefault(photo.sha256, photo.source.index)) != photo.source.index:
            both = f"data.sources.{photo.source.index} and data.sources.{index} both have them"
            account.add(Heading.WARNING, f"{both}, byte for byte: trained twice", [str(photo.image)], noun="photo")
    masked = Counter(photo.source.index for photo in photos if photo.mask)
    for source in sources:
        key = f"data.sources.{source.index}"
        if source.masks != "none" and not masked[source.index] and not source.regularisation:
            places = {"files": f"NAME{MASK_ENDINGS[0]} beside NAME.jpg", "alpha": "photos with transparency"}
            looked = places.get(source.masks, "NAME.png there for NAME.jpg")
            account.add(Heading.WARNING, f'{key}: masks = "{source.masks}", and no photo has a mask; looked for {looked}')
    captioned = [photo for photo in photos if photo.caption and photo.caption_from not in layouts.CAPTIONS_OF_NAMES]
    counts = Counter(photo.caption for photo in captioned)
    if images := [str(photo.image) for photo in captioned if counts[photo.caption] > 2]:
        heading = Heading.WARNING if len(counts) == 1 else Heading.NOTE
        account.add(heading, "one caption is that of three photos or more", images, noun="photo")


def _pop_photos(listings: Sequence[Listing]) -> Iterator[ListedPhoto]:
    """The photos in order, removed from their listings: of a hundred thousand only the read ones stay in memory."""
    for listing in listings:
        listing.photos.reverse()
        while listing.photos:
            yield listing.photos.pop()


@contextmanager
def _collecting(problems: list[str], file: object, more: str = "") -> Iterator[None]:
    """A block that reads a file: OSError and ValueError become a problem. more: ends the line on a damaged file."""
    try:
        yield
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
    except ValueError as error:
        problems.append(f"{file}: {error}{more}")


def _read(listed: ListedPhoto, *, memo: Memo, strict_captions: bool) -> Photo | list[str]:
    """The photo, or the problems of it, its mask, its references and its caption, one line each."""
    problems: list[str] = []
    name, source = str(listed.image), listed.source
    if any("\ud800" <= character <= "\udfff" for character in source.path + listed.name):  # half a pair: no UTF-8
        problems.append(f"{name}: the file's name is not UTF-8")
    facts, mask, notes = None, None, list[str]()
    with _collecting(problems, name):
        facts = memo.facts(source, "photo", listed.image, partial(_photo, source))
        notes += (*facts.notes, *_format_note(listed.name, facts.format))
    if facts is not None and source.masks == "alpha" and facts.black is not None:
        mask = Mask(listed.image, facts.sha256)
        notes += _black(facts, source)
    if facts is not None and listed.mask is not None:
        with _collecting(problems, listed.mask):
            of_mask = memo.facts(source, "mask", listed.mask, _mask)
            if of_mask.size != facts.size:
                pixels = "{} x {} pixels, its photo {} x {}".format(*of_mask.size, *facts.size)
                problems.append(f"{listed.mask}: the mask has {pixels}; save it at the photo's size")
            mask = Mask(listed.mask, of_mask.sha256)
            notes += _black(of_mask, source)
    read = (_read_reference(listed, place, number, memo, problems) for number, place in enumerate(listed.references, 1))
    references = [reference for reference in read if reference is not None]
    notes += (note for reference in references for note in reference.notes)
    text, field = _read_caption(listed, problems)
    notes += [f"its caption is the field {field} of a JSON text"] if field else []
    caption = None if text is None else visible(text).strip()
    if text and (dropped := invisible(text)):
        notes.append(f"its caption had invisible characters ({dropped}), dropped")
    if caption and len(caption) > LONGEST_CAPTION:
        problems.append(f"{name}: its caption has {len(caption):,} characters; {LONGEST_CAPTION:,} are the most")
    reason = strict_problem(source, caption, memo.layouts) if strict_captions else ""
    if reason and (caption is None or not problems):
        place = listed.image if caption is None or isinstance(listed.caption, str) else listed.caption
        problems.append(f"{place}: {reason}")
    if problems or facts is None:
        return problems
    return Photo(
        sample=listed.sample,
        source=source,
        image=listed.image,
        size=facts.size,
        caption=caption or "",
        repeats=source.repeats * listed.repeats,
        sha256=facts.sha256,
        choices=facts.choices,
        extras=Extras(mask, tuple(references), listed.loss_weight),
        look=facts.look,
        caption_from="" if caption is None else listed.caption_from,
        notes=tuple(map(sys.intern, notes)),  # a hundred thousand photos share a few
    )


def strict_problem(source: Source, caption: str | None, readers: Sequence[SourceReader]) -> str:
    """Why strict mode refuses a caption (None: there is none); "" if it does not. readers: of sources that are no folders."""
    if caption is None and source.captions != "none":
        return f"no caption for it ({layouts.caption_places(source, readers)})"
    return "the caption is empty" if caption == "" else ""


def _photo(source: Source, data: bytes, sha256: str) -> Facts:
    image = decode(data, background=source.background)
    black = None if image.alpha is None else not image.alpha.getextrema()[1]
    look = near_duplicates.look(image.image)
    return Facts(sha256, image.image.size, image.format, image.choices, image.notes, black, look)


def _mask(data: bytes, sha256: str) -> Facts:
    mask = decode_mask(data)
    return Facts(sha256, mask.size, black=not mask.getextrema()[1])


def _read_reference(listed: ListedPhoto, place: Place, number: int, memo: Memo, problems: list[str]) -> Photo | None:
    """A reference, without a caption; None if there is a problem with it."""
    with _collecting(problems, place, f" (reference {number} of {listed.image})"):
        facts = memo.facts(listed.source, "photo", place, partial(_photo, listed.source))
        buckets.reference_bucket(*facts.size, step=1)
        name = f"{listed.sample}, reference {number}"
        notes = tuple(f"reference {number}: {note}" for note in (*facts.notes, *_format_note(str(place), facts.format)))
        return Photo(name, listed.source, place, facts.size, "", 1, facts.sha256, facts.choices, notes=notes)
    return None


def _black(mask: Facts, source: Source) -> tuple[str, ...]:
    return (BLACK,) if mask.black and not source.unmasked_weight else ()


def _format_note(name: str, kind: str) -> tuple[str, ...]:
    """A note, if the file's suffix is that of another format."""
    suffix = os.path.splitext(name)[1].lower()
    return () if IMAGES.get(suffix, kind) == kind else (f"its name ends in {suffix}, its bytes are {kind}",)


def _read_caption(listed: ListedPhoto, problems: list[str]) -> tuple[str | None, str]:
    """(caption; None if there is none, its field if its text is JSON)."""
    place, column = listed.caption, listed.source.caption_column
    with _collecting(problems, listed.image if place is None or isinstance(place, str) else place):
        text = place if place is None or isinstance(place, str) else decoded(place.read())
        if text is not None and listed.caption_from == JSON:
            return json_caption(text, column), ""
        try:
            return unwrapped(text, column) if text else (text, "")
        except ValueError as error:
            table = f" (from {listed.caption_from})" if isinstance(place, str) else ""  # else its own file is named
            raise ValueError(f"{error}{table}") from error
    return "", ""
