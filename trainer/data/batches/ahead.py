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


def draw_order(examples: Sequence[Example], seed: int, epoch: int) -> array:
    """The appearances of the epoch, numbered example by example, in the order of their draws."""
    every = ((example.sample, repeat, number) for number, (example, repeat) in enumerate(numbered(examples)))
    order = sorted((draws.uniform(seed, "order", epoch, *appearance[:2]), *appearance) for appearance in every)
    return array("L", (number for *_, number in order))


def numbered(examples: Sequence[Example]) -> list[tuple[Example, int]]:
    """Every (example, repeat); an appearance's number is its index."""
    return [(example, repeat) for example in examples for repeat in range(example.photo.repeats)]


def orders(examples: Sequence[Example], seed: int, epoch: int) -> Iterator[array]:
    """The order of each epoch from `epoch` on. With MANY appearances another process draws the next order in advance; raises
    DataError if that process died."""
    if sys.platform != "linux" or sum(example.photo.repeats for example in examples) < MANY:
        while True:
            yield draw_order(examples, seed, epoch)
            epoch += 1
    receiver, sender = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=_draw_ahead, args=(receiver, sender, examples, seed, epoch + 1))
    with starting(1), signals.blocked():
        worker.start()
    sender.close()
    with ExitStack() as stack:
        atexit.register(stack.close)  # Python would wait for the process if nobody closes this generator
        for call in (partial(atexit.unregister, stack.close), receiver.close, worker.join, worker.kill):  # from the last on
            stack.callback(call)
        yield draw_order(examples, seed, epoch)
        while True:
            try:
                yield array("L", receiver.recv_bytes())
            except EOFError as error:
                raise DataError("the process that orders the epochs was killed; if memory ran out, free some") from error


def _draw_ahead(receiver: Connection, sender: Connection, examples: Sequence[Example], seed: int, epoch: int) -> None:
    """Send the order of one epoch after another, each as soon as the one before is received."""
    receiver.close()
    for signum in signals.HANDLED:  # the main process ends it
        signal.signal(signum, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        while True:
            sender.send_bytes(draw_order(examples, seed, epoch))
            epoch += 1
    os._exit(0)
