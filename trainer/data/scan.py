"""The training photos: found, read in full and checked before anything else happens. All problems are reported at once."""

import os
import sys
from collections import Counter
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
from trainer.data.images.kinds import IMAGES, MASK_ENDINGS
from trainer.data.layouts import apart
from trainer.data.layouts.records import JsonCaption, unwrapped
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
    """The sound photos of the sources, in order of source, then of name, and all problems of the others.

    Every image is decoded in full, once of equal bytes, but for those that `memo` knows. With `strict_captions` a missing or
    empty caption is a problem. outputs: folders in which the run writes, which hold no photos.
    """
    memo = memo or Memo()
    listings = [layouts.listing(source, apart.exclusions_of(source, sources, outputs), memo.layouts) for source in sources]
    problems = [problem for each in listings for problem in each.problems]
    read = partial(_read, memo=memo, strict_captions=strict_captions)
    photos: list[Photo] = []
    count, photos_listed = sum(len(each.photos) for each in listings), _taken(listings)
    with phases("scanning photos", count, "photo") as phase, closing(in_threads(read, photos_listed)) as results:
        for result in results:
            phase.advance()
            if isinstance(result, Photo):
                photos.append(result)
            else:
                problems += result
    entries = [Entry(Heading.USED, "", count=len(photos), noun="photo")]
    entries += [Entry(Heading.USED, "", count=count - len(photos), noun="damaged photo")]
    account = Account([*entries, *(entry for each in listings for entry in each.account)])
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
    """Enter what is trained and looks unintended, of all photos together."""
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
    given = [photo for photo in photos if photo.caption and photo.caption_from not in layouts.CAPTIONS_OF_NAMES]
    counts = Counter(photo.caption for photo in given)
    if same := [str(photo.image) for photo in given if counts[photo.caption] > 2]:
        heading = Heading.WARNING if len(counts) == 1 else Heading.NOTE
        account.add(heading, "one caption is that of three photos or more", same, noun="photo")


def _taken(listings: Sequence[Listing]) -> Iterator[ListedPhoto]:
    """Each in order, and removed from its listing: with a hundred thousand photos, only the photos stay in memory."""
    for each in listings:
        each.photos.reverse()
        while each.photos:
            yield each.photos.pop()


@contextmanager
def _noting(problems: list[str], file: object, more: str = "") -> Iterator[None]:
    """A block that reads a file. What it raises becomes a problem. more: for the line of a damaged file."""
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
    seen, mask, notes = None, None, ()
    with _noting(problems, name):
        seen = memo.facts(source, "photo", listed.image, partial(_photo, source))
        notes = (*seen.notes, *_misnamed(listed.name, seen.format))
    if seen is not None and source.masks == "alpha" and seen.black is not None:
        mask = Mask(listed.image, seen.sha256)
        notes = (*notes, *_black(seen, source))
    if seen is not None and listed.mask is not None:
        with _noting(problems, listed.mask):
            white = memo.facts(source, "mask", listed.mask, _mask)
            if white.size != seen.size:
                pixels = "{} x {} pixels, its photo {} x {}".format(*white.size, *seen.size)
                problems.append(f"{listed.mask}: the mask has {pixels}; save it at the photo's size")
            mask = Mask(listed.mask, white.sha256)
            notes = (*notes, *_black(white, source))
    read = (_read_reference(listed, place, number, memo, problems) for number, place in enumerate(listed.references, 1))
    references = [each for each in read if each is not None]
    notes = (*notes, *(note for each in references for note in each.notes))
    text, field = _read_caption(listed, problems)
    notes = (*notes, f"its caption is the field {field} of a JSON text") if field else notes
    caption = None if text is None else visible(text).strip()
    if text and (dropped := invisible(text)):
        notes = (*notes, f"its caption had invisible characters ({dropped}), dropped")
    if caption and len(caption) > LONGEST_CAPTION:
        problems.append(f"{name}: its caption has {len(caption):,} characters; {LONGEST_CAPTION:,} are the most")
    why = strict_problem(listed.source, caption, memo.layouts) if strict_captions else ""
    if why and (caption is None or not problems):
        place = listed.image if caption is None or isinstance(listed.caption, str) else listed.caption
        problems.append(f"{place}: {why}")
    if problems or seen is None:
        return problems
    return Photo(
        sample=listed.sample,
        source=listed.source,
        image=listed.image,
        size=seen.size,
        caption=caption or "",
        repeats=listed.source.repeats * listed.repeats,
        sha256=seen.sha256,
        choices=seen.choices,
        extras=Extras(mask, tuple(references), listed.loss_weight),
        look=seen.look,
        caption_from="" if caption is None else listed.caption_from,
        notes=tuple(map(sys.intern, notes)),  # a hundred thousand photos share a few
    )


def strict_problem(source: Source, caption: str | None, others: Sequence[SourceReader]) -> str:
    """Why strict mode refuses a caption (None: there is none); "" if it does not. others: the layouts besides folders."""
    if caption is None and source.captions != "none":
        return f"no caption for it ({layouts.caption_places(source, others)})"
    return "the caption is empty" if caption == "" else ""


def _photo(source: Source, data: bytes, sha256: str) -> Facts:
    seen = decode(data, background=source.background)
    black = None if seen.alpha is None else not seen.alpha.getextrema()[1]
    look = near_duplicates.look(seen.image)
    return Facts(sha256, seen.image.size, seen.format, seen.choices, seen.notes, black, look)


def _mask(data: bytes, sha256: str) -> Facts:
    mask = decode_mask(data)
    return Facts(sha256, mask.size, black=not mask.getextrema()[1])


def _read_reference(listed: ListedPhoto, place: Place, number: int, memo: Memo, problems: list[str]) -> Photo | None:
    """A reference, without a caption; None where there is a problem with it."""
    with _noting(problems, place, f" (reference {number} of {listed.image})"):
        seen = memo.facts(listed.source, "photo", place, partial(_photo, listed.source))
        buckets.reference_bucket(*seen.size, step=1)
        name = f"{listed.sample}, reference {number}"
        notes = tuple(f"reference {number}: {note}" for note in (*seen.notes, *_misnamed(str(place), seen.format)))
        return Photo(name, listed.source, place, seen.size, "", 1, seen.sha256, seen.choices, notes=notes)
    return None


def _black(mask: Facts, source: Source) -> tuple[str, ...]:
    return (BLACK,) if mask.black and not source.unmasked_weight else ()


def _misnamed(name: str, kind: str) -> tuple[str, ...]:
    """A note, if the file's suffix is that of another format."""
    suffix = os.path.splitext(name)[1].lower()
    return () if IMAGES.get(suffix, kind) == kind else (f"its name ends in {suffix}, its bytes are {kind}",)


def _read_caption(listed: ListedPhoto, problems: list[str]) -> tuple[str | None, str]:
    """(the caption, None if there is none; the field that it is of a text that is JSON)."""
    given = listed.caption
    with _noting(problems, listed.image if given is None or isinstance(given, str) else given):
        data = given if given is None or isinstance(given, str) else given.read()
        text = decoded(data) if isinstance(data, bytes) else data
        if not text or isinstance(given, JsonCaption):
            return text, ""
        try:
            return unwrapped(text, listed.source.caption_column)
        except ValueError as error:
            table = f" (from {listed.caption_from})" if isinstance(given, str) else ""  # else its own file is named
            raise ValueError(f"{error}{table}") from error
    return "", ""
