"""What the photos of a run are: one digest of them all, and of each enough to say which changed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.examples import Example
from trainer.data.identity import differences, fingerprint, photo_digests
from trainer.data.sources import File, Photo, Source

SOURCE = Source(index=0, path="photos")


def example(name: str, content: str = "0", caption: str = "text", repeats: int = 1, bucket=(64, 64), at: str = "") -> Example:
    place = File("photos", name)
    photo = Photo(f"0/{name}", SOURCE, place, (64, 64), caption, repeats, content)
    return Example(photo.sample + at, photo, bucket, (caption,))


def changed(then: list[Example], now: list[Example]) -> dict[str, list[str]]:
    return differences(photo_digests(then), photo_digests(now))


def test_each_way_to_differ_is_named() -> None:
    then = [example(f"{letter}.jpg", content=letter) for letter in "abcdef"]
    now = [*then[1:], example("g.jpg")]
    now[0] = example("b.jpg", content="other", caption="other too")
    now[1] = example("c.jpg", content="c", caption="another")
    now[2] = example("d.jpg", content="d", repeats=2)
    now[3] = example("e.jpg", content="e", bucket=(80, 48))
    assert changed(then, now) == {
        "added": ["0/g.jpg"],
        "removed": ["0/a.jpg"],
        "other contents": ["0/b.jpg"],
        "other captions": ["0/c.jpg"],
        "other repeats": ["0/d.jpg"],
        "other buckets": ["0/e.jpg"],
    }


def test_another_resolution_is_no_other_photo() -> None:
    then = [example("a.jpg"), example("b.jpg")]
    now = [
        example(name, at=at, bucket=size)
        for name in ("a.jpg", "b.jpg")
        for at, size in (("@64", (64, 64)), ("@96", (96, 96)))
    ]
    assert changed(then, now) == {"other buckets": ["0/a.jpg", "0/b.jpg"]}


names = st.lists(
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1), unique=True, min_size=1
)


@pytest.mark.slow
@given(names, st.randoms())
def test_what_changed_is_named_and_nothing_else(names, random):
    then = [example(name, content=f"then {name}") for name in names]
    assert changed(then, then) == {}
    kinds = {name: random.choice(["same", "removed", "contents", "captions", "added"]) for name in names}
    before = [e for e, name in zip(then, names, strict=True) if kinds[name] != "added"] + [example("kept beside them")]
    now = [example("kept beside them")]
    for name in names:
        if kinds[name] != "removed":
            now.append(
                example(
                    name,
                    content="now" if kinds[name] == "contents" else f"then {name}",
                    caption="now" if kinds[name] == "captions" else "text",
                )
            )
    random.shuffle(now)
    found = changed(before, now)
    for kind, how in (
        ("added", "added"),
        ("removed", "removed"),
        ("contents", "other contents"),
        ("captions", "other captions"),
    ):
        assert sorted(found.get(how, [])) == sorted(f"0/{name}" for name in names if kinds[name] == kind)
    assert (fingerprint(before) == fingerprint(now)) <= (not found), "what is named, the digest has seen"


def test_it_is_small() -> None:
    photos = [example(f"holiday/2024/IMG_{index:06}.jpg", content=f"{index:064x}") for index in range(10_000)]
    size = sum(tensor.nbytes for tensor in photo_digests(photos).values())
    assert size <= 10_000 * (16 + 8), "four digests of four bytes, and what is left of a name"


@pytest.mark.parametrize(
    "damage",
    [
        {"photos": torch.zeros(4, dtype=torch.uint8)},
        {"captions": torch.zeros(2, 4)},
        {"captions": torch.zeros(3, 4, dtype=torch.uint8)},
        {"captions": torch.zeros(8, dtype=torch.uint8)},
    ],
)
def test_a_damaged_one_is_no_difference(damage) -> None:
    sound = photo_digests([example("a.jpg"), example("b.jpg")])
    with pytest.raises(ValueError):
        differences(sound | damage, sound)


def test_the_digest_is_that_of_runs_before() -> None:
    """Pinned by checkpoints: it must not change where the photos did not."""
    one = example("a.jpg", content="ab" * 32)
    assert {name: digest[:8] for name, digest in fingerprint([one, replace(one, sample="0/b.jpg")]).items()} == DIGESTS


DIGESTS = {
    "photos": "d2bd4d8e",
    "contents of the photos": "29e8801d",
    "captions": "ac19b001",
    "repeats": "e718fe8e",
    "buckets": "5b0aafe5",
}
