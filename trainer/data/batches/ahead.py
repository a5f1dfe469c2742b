"""The order of an epoch as numbers, and a process that draws the next one while the present one is trained."""

import atexit
import multiprocessing
import os
import signal
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection

from trainer.base import draws, signals
from trainer.base.errors import DataError
from trainer.data.examples import Example
from trainer.data.threads import starting

MANY = 10_000  # appearances in an epoch: to order them takes a quarter of a second, and more from here on


def drawn(examples: Sequence[Example], seed: int, epoch: int) -> array:
    """The appearances of the epoch, numbered example by example, in the order of their draws."""
    every = ((each.sample, repeat, number) for number, (each, repeat) in enumerate(numbered(examples)))
    order = sorted((draws.uniform(seed, "order", epoch, *each[:2]), *each) for each in every)
    return array("L", (number for *_, number in order))


def numbered(examples: Sequence[Example]) -> list[tuple[Example, int]]:
    """Every (example, repeat): its place is its number."""
    return [(example, repeat) for example in examples for repeat in range(example.photo.repeats)]


def orders(examples: Sequence[Example], seed: int, epoch: int) -> Iterator[array]:
    """What `drawn` gives for each epoch from this one on. Of MANY appearances each later one is there before it is asked
    for: a process draws it. Raises DataError where that died."""
    if sys.platform != "linux" or sum(example.photo.repeats for example in examples) < MANY:
        while True:
            yield drawn(examples, seed, epoch)
            epoch += 1
    here, there = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=_draw_ahead, args=(here, there, examples, seed, epoch + 1))
    with starting(1), signals.blocked():
        worker.start()
    there.close()
    with ExitStack() as held:
        atexit.register(held.close)  # Python would wait for the process where nobody closes this generator
        for call in (partial(atexit.unregister, held.close), here.close, worker.join, worker.kill):  # from the last on
            held.callback(call)
        yield drawn(examples, seed, epoch)
        while True:
            try:
                yield array("L", here.recv_bytes())
            except EOFError as error:
                raise DataError("the process that orders the epochs was killed; if memory ran out, free some") from error


def _draw_ahead(here: Connection, there: Connection, examples: Sequence[Example], seed: int, epoch: int) -> None:
    """Send the order of one epoch after another, each as soon as the one before is taken."""
    here.close()
    for signum in signals.HANDLED:  # the main process ends it
        signal.signal(signum, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        while True:
            there.send_bytes(drawn(examples, seed, epoch))
            epoch += 1
    os._exit(0)
