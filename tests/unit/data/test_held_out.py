"""Photos that are kept from the training."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer.base.errors import UserError
from trainer.data.examples import examples
from trainer.data.held_out import ALONE, MOST, measured_examples, split
from trainer.data.sources import File, Photo, Source

SUBJECT, PRIOR = Source(index=0, path="photos"), Source(index=1, path="prior", regularisation=True)


def photo(name: str, content: int, source: Source = SUBJECT) -> Photo:
    sha256 = hashlib.sha256(str(content).encode()).hexdigest()
    return Photo(f"{source.index}/{name}", source, File(source.path, name), (64, 64), "text", 1, sha256)


@st.composite
def collections(draw):
    contents = draw(st.lists(st.integers(0, 30), min_size=2, max_size=40))
    photos = [photo(f"{i}.jpg", content) for i, content in enumerate(contents)]
    prior = draw(st.lists(st.integers(20, 60), max_size=5))
    return photos + [photo(f"{i}.jpg", content, PRIOR) for i, content in enumerate(prior)]


amounts = st.one_of(st.integers(1, 6), st.floats(0.02, 0.9))


def tried(photos, held_out):
    try:
        return split(photos, held_out)
    except UserError:
        assume(False)


def test_a_source_that_is_apart_is_held_out_whole():
    later = replace(SUBJECT, path="later", is_held_out=True)
    photos = [photo("a.jpg", 1), photo("b.jpg", 2), photo("a.jpg", 3, later), photo("p.jpg", 4, PRIOR)]
    assert split(photos, 0) == ((photos[0], photos[1], photos[3]), (photos[2],))
    for same in (photo("c.jpg", 3), photo("c.jpg", 3, PRIOR)):
        with pytest.raises(UserError, match=r"1 photo both trained and held out, byte for byte.*\n  .*c.jpg = later/a.jpg"):
            split([*photos, same], 0)


@pytest.mark.slow
@given(collections(), amounts)
def test_each_photo_stands_on_one_side_and_equal_images_on_the_same(photos, held_out):
    trained, kept = tried(photos, held_out)
    assert [p for p in photos if p in set(trained)] == list(trained) and [p for p in photos if p in set(kept)] == list(kept)
    assert len(trained) + len(kept) == len(photos) and trained and kept
    assert not {p.sha256 for p in trained} & {p.sha256 for p in kept}
    assert not any(p.source.regularisation for p in kept)
    if isinstance(held_out, int):
        assert len({p.sha256 for p in kept}) == held_out or len({p.sha256 for p in photos}) < held_out


@given(collections(), collections(), amounts)
def test_it_is_stable_when_photos_are_added(photos, more, held_out):
    more = [replace(p, sample=f"{p.sample}+") for p in more if not p.source.regularisation]
    before, after = ({p.sha256 for p in tried(some, held_out)[1]} for some in (photos, photos + more))
    if isinstance(held_out, float):
        assert before == after & {p.sha256 for p in photos}, "no photo changes its side"
    else:
        assert len(before - after) <= len({p.sha256 for p in more} - {p.sha256 for p in photos})
        assert after <= before | {p.sha256 for p in more}, "nobody is held out instead but an added one"


def test_a_share_of_many_is_that_share() -> None:
    photos = [photo(f"{i}.jpg", i) for i in range(4000)]
    for share in (0.02, 0.1, 0.5):
        assert abs(len(split(photos, share)[1]) - 4000 * share) <= 5 * (4000 * share * (1 - share)) ** 0.5
    # Of a larger share the smaller one is a part.
    assert set(split(photos, 0.1)[1]) < set(split(photos, 0.5)[1])


@pytest.mark.parametrize("held_out", [1, 0.5])
def test_where_the_prior_holds_every_image_that_is_the_reason(held_out) -> None:
    photos = [photo("a.jpg", 1), photo("b.jpg", 2), photo("a.jpg", 1, PRIOR), photo("b.jpg", 2, PRIOR)]
    with pytest.raises(UserError) as refused:
        split(photos, held_out)
    said = str(refused.value)
    assert said.startswith(f"data.held_out = {held_out} has nothing to hold out: every image is also in a source with regul")
    assert "none of the 0" not in said and "set data.held_out = 0" in said


def test_nothing_is_held_out_unless_asked() -> None:
    photos = [photo("a.jpg", 1)]
    assert split(photos, 0) == split(photos, 0.0) == (tuple(photos), ())


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        (
            1e-9,
            "data.held_out = 1e-09 holds out none of the 3 images (their bytes decide); give a count, as data.held_out = 1",
        ),
        (3, "data.held_out = 3 leaves none of the 3 images to train on; lower it"),
        (9, "data.held_out = 9 leaves none of the 3 images to train on; lower it"),
        (0.999999999, "data.held_out = 0.999999999 leaves none of the 3 images to train on; lower it"),
    ],
)
def test_what_holds_out_none_or_all_is_refused(held_out, said) -> None:
    photos = [photo("a.jpg", 1), photo("b.jpg", 2), photo("c.jpg", 3), photo("again.jpg", 1)]
    with pytest.raises(UserError) as refused:
        split(photos, held_out)
    assert str(refused.value).startswith(said)


@given(collections(), amounts)
def test_what_is_measured(photos, held_out):
    """The held-out ones and as many others, in one fixed form, the same in whatever order the photos come."""
    photos = [replace(p, source=replace(p.source, flip=True, crop_jitter=0.1, caption_dropout=0.5)) for p in photos]
    trained, kept = tried(photos, held_out)
    sized = [examples(some, step=64, enlarge=True, seed=0) for some in (trained, kept)]
    found = measured_examples(*sized)
    subject = [p for p in trained if not p.source.regularisation]
    assert len(found["held_out"]) == min(len(kept), MOST) and len(found["trained"]) == min(
        len(found["held_out"]), len(subject)
    )
    assert {e.sample for e in found["held_out"]} <= {p.sample for p in kept}
    assert {e.sample for e in found["trained"]} <= {p.sample for p in subject}
    for example in (*found["held_out"], *found["trained"]):
        source = example.photo.source
        assert not (source.flip or source.jitters or source.caption_dropout) and len(example.captions) == 1
    assert measured_examples(*(some[::-1] for some in sized)) == found
    alone = measured_examples(sized[0], ())
    assert list(alone) == ["trained"] and len(alone["trained"]) == min(ALONE, len(subject))
