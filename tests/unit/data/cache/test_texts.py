"""Captions through text encoders: one encoder at a time, in rounds of bounded memory, with the bytes of all at once."""

from contextlib import contextmanager

import pytest
import torch

from trainer.base.tensorfile import serialize
from trainer.base.types import Conditioning
from trainer.data.cache.texts import one_after_another
from trainer.models.base import join

MANY = [f"caption {'x' * (i % 7)}{i}" for i in range(30)]


def product(captions: list[str], *, padded: bool = False, joined: bool = False) -> Conditioning:
    """An encoder. padded: to the longest caption of a batch; joined: its bits depend on its neighbours."""
    length = max(map(len, captions)) if padded else 40
    values = torch.tensor([[float(ord(letter)) for letter in caption.ljust(length)[:length]] for caption in captions])
    if joined:
        values = values + 1e-3 * (len(captions) - 1)
    return Conditioning(values[..., None].bfloat16(), pooled=values.sum(1, keepdim=True))


class House:
    """Encoders, each with the part of `product` that has its name.

    alive: those in memory. log: which was opened when. sizes: of the batches that each got.
    """

    def __init__(self, *names: str, **how: bool) -> None:
        self.how, self.alive, self.log = how, set(), []
        self.sizes: dict[str, list[int]] = {name: [] for name in names}
        self.encoders = {name: lambda name=name: self.open(name) for name in names}

    @contextmanager
    def open(self, name: str):
        assert not self.alive, "another encoder is still there"
        self.alive.add(name)
        self.log.append(name)
        try:
            yield lambda captions: self.encode(name, captions)
        finally:
            self.alive.clear()

    def encode(self, name: str, captions: list[str]) -> dict[str, torch.Tensor]:
        assert self.alive == {name}
        self.sizes[name].append(len(captions))
        return {name: product(captions, **self.how).tensors()[name]}

    def through(self, captions: list[str], **more) -> dict[str, bytes]:
        """By caption, the bytes of its conditioning."""
        given = list(one_after_another(captions, self.encoders, join=join, **more))
        assert not self.alive and len(given) == len(captions)
        return {caption: b"".join(map(bytes, serialize(told.tensors()))) for caption, told in given}


ALONE = {caption: b"".join(map(bytes, serialize(product([caption]).tensors()))) for caption in MANY}


@pytest.mark.parametrize("names", [("sequence", "pooled"), ("pooled", "sequence")])
def test_one_encoder_after_another_gives_what_all_at_once_give(names: tuple[str, str]) -> None:
    house = House(*names)
    assert house.through(MANY) == ALONE
    assert house.log == list(names)


@pytest.mark.parametrize("together", [1, 8])
def test_what_is_kept_between_two_encoders_is_bounded(together: int) -> None:
    """Each round keeps what lies below the bound, and the caption that reaches it."""
    house, most = House("sequence", "pooled"), 10 * 80  # bytes: of ten captions
    assert house.through(MANY, held_bytes=most, together=together) == ALONE
    assert house.log == ["sequence", "pooled"] * 3
    assert House("sequence", "pooled").through([], held_bytes=most) == {}


def test_an_encoder_leaves_when_the_work_is_broken_off() -> None:
    house = House("sequence", "pooled")
    given = one_after_another(MANY, house.encoders, join=join)
    next(given)
    assert house.alive == {"pooled"}
    given.close()
    assert not house.alive


@pytest.mark.parametrize(
    ("part", "neighbours"), [("sequence", {}), ("sequence", {"padded": True}), ("pooled", {"joined": True})]
)
def test_captions_are_encoded_at_once_only_where_that_gives_the_same_bytes(part: str, neighbours: dict[str, bool]) -> None:
    texts, said = [*MANY, ""], []
    one, many, few = (House(part, **neighbours) for _ in range(3))

    def bytes_of(house: House, **more) -> dict[str, list[bytes]]:
        given = one_after_another(texts, house.encoders, join=lambda parts: parts[0], **more)
        return {caption: list(map(bytes, serialize(told))) for caption, told in given}

    alone = bytes_of(one)
    assert bytes_of(many, together=8, say=said.append) == alone and len(alone) == 31
    if neighbours:
        assert said == [f"{part}: captions are encoded one by one: 8 at once give other bits on this machine"]
        assert sorted(many.sizes[part]) == [1] * 31 + [8]
    else:
        assert said == [] and sorted(many.sizes[part]) == [1] * (8 + 7) + [8] * 3
    list(one_after_another(texts[:15], few.encoders, join=lambda parts: parts[0], together=8))
    assert set(few.sizes[part]) == {1}, "not worth the comparison"


def test_an_encoder_that_gives_other_bits_at_once_is_compared_once() -> None:
    """Of three rounds, in the first."""
    texts, said = [*MANY, *(f"another {text}" for text in MANY)], []
    house, singly = (House("pooled", "sequence", joined=True) for _ in range(2))
    expected = singly.through(texts)
    assert house.through(texts, together=8, held_bytes=4 * 20, say=said.append) == expected
    assert house.log == ["pooled", "sequence"] * 3 and len(said) == 1 and said[0].startswith("pooled: ")
    assert house.sizes["pooled"].count(8) == 1 and house.sizes["sequence"].count(8) > 3
