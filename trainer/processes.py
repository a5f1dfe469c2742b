"""What the processes of a run say to one another. The only file that knows torch.distributed; accelerate starts it.

Reductions go through the process group. Waiting does not: while one process downloads, encodes, draws or saves, the others
ask the group's store now and then. So nobody's time-out counts that work, signals are heard meanwhile, and a process that
fails alone takes the others with it, with its exit status.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from trainer.errors import PeerStopped, ending
from trainer.signals import Signals
from trainer.terminal import write

# Of a reduction: longer than processes can differ in one step (reading, a larger bucket, one micro-batch more). It does not
# serve to find a process that died: the launcher ends the others then, and the connection breaks.
REDUCTION_TIMEOUT = timedelta(hours=24)
ASK_SECONDS = 0.25  # between two looks at the store
# A process gives a sign of life; without one for so long it is gone. Launcher and connections tell of a death on this machine
# at once, so this serves for one on another, where minutes cost little. A live process can be silent, too: in a debugger,
# while it swaps, or where it holds Python's lock and waits for a file of a server that does not answer.
BEAT_SECONDS, PATIENCE_SECONDS = 2.0, 600.0


class Processes:
    """This process among its equals: device, count, rank. Methods are called by all of them in the same order.

    `check` may be called at any time.
    """

    def __init__(self, accelerator) -> None:
        self.device: torch.device = accelerator.device
        self.count: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process
        self._signals = Signals()
        self._store, self._meetings, self._asked = None, 0, 0.0
        if self.count > 1:
            from torch.distributed import PrefixStore
            from torch.distributed.distributed_c10d import _get_default_store

            self._store = PrefixStore("trainer", _get_default_store())

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print what the run says, once. whole: as of terminal.write."""
        if self.is_main:
            write(text, whole=whole)

    def sum(self, tensor: torch.Tensor) -> None:
        """Over the processes, in place."""
        if self.count > 1:
            self._reduce(tensor, torch.distributed.ReduceOp.SUM)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number in any process: what all of them agree on."""
        if self.count == 1:
            return list(numbers)
        agreed = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._reduce(agreed, torch.distributed.ReduceOp.MAX)
        return agreed.tolist()

    def total(self, *numbers: int) -> list[int]:
        """The sum of each number over the processes."""
        summed = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.sum(summed)
        return summed.tolist()

    def takes(self, key: str) -> bool:
        """Whether a piece of work is this process's share. key: its digest, in hexadecimal, so that shares are even."""
        return int(key[:16], 16) % self.count == self.rank

    @contextmanager
    def attending(self, signals: Signals) -> Iterator[None]:
        """In the block the processes hear of each other's signals, and of one that leaves the block with an exception."""
        self._signals = signals
        if self._store is None:
            yield
            return
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), name="signs of life", daemon=True)
        beating.start()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, PeerStopped):
                self._tell("failed", {"rank": self.rank, "status": ending(error)[0]})
            raise
        finally:
            over.set()
            beating.join()

    def check(self) -> None:
        """Raises Interrupted once any process was asked to stop, PeerStopped once one has failed."""
        self._listen()
        self._signals.check()

    def wait(self, *, obey: bool = False) -> None:
        """Until every process is here, however long that takes. obey: a stop is raised as Interrupted meanwhile.

        Raises PeerStopped where a process failed or is gone.
        """
        if self._store is not None:
            self._meetings += 1
            self._tell(f"{self._meetings}/{self.rank}", True)
            self._await([f"{self._meetings}/{rank}" for rank in range(self.count)], self.check if obey else self._listen)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the block before the others. Raises what `check` raises."""
        if self._store is None:
            yield
            return
        self._meetings += 1
        if not self.is_main:
            self._await([f"{self._meetings}/0"], self.check)
        yield
        if self.is_main:
            self._tell(f"{self._meetings}/0", True)

    def _listen(self) -> None:
        """Tell the others of a signal, and hear of theirs. Raises PeerStopped."""
        now = time.monotonic()
        if self._store is None or now < self._asked + ASK_SECONDS:
            return
        self._asked = now
        with self._reached():
            if self._signals.stop is not None:
                self._tell("stop", self._signals.stop)
            elif self._store.check(["stop"]):
                self._signals.stop = json.loads(self._store.get("stop"))
            if self._store.check(["failed"]):
                failed = json.loads(self._store.get("failed"))
                raise PeerStopped(f"process {failed['rank']} could not go on; its message says why", failed["status"])

    def _await(self, keys: list[str], check: Callable[[], None]) -> None:
        """Until all the keys are there: of each the last part is the rank that sets it."""
        pause, beats, silent = 0.001, {}, {}
        while True:
            with self._reached():
                missing = [key for key in keys if not self._store.check([key])]
            if not missing:
                return
            check()
            for rank in (key.rpartition("/")[2] for key in missing):
                with self._reached():
                    beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else None
                # In own pauses, not by the clock: whoever was stopped for an hour has not listened meanwhile.
                silent[rank] = silent.get(rank, 0.0) + pause if beats.get(rank) == beat else 0.0
                beats[rank] = beat
                if silent[rank] > PATIENCE_SECONDS:
                    raise PeerStopped(f"process {rank} has given no sign of life for {PATIENCE_SECONDS:.0f} s", 1)
            time.sleep(pause)
            pause = min(2 * pause, ASK_SECONDS)

    def _tell(self, key: str, value: object) -> None:
        with self._reached():
            self._store.set(key, json.dumps(value))

    def _beat(self, over: threading.Event) -> None:
        count = 0
        while not over.wait(BEAT_SECONDS if count else 0):
            count += 1
            try:
                self._tell(f"beat/{self.rank}", count)
            except PeerStopped:  # told by whoever waits
                return

    def _reduce(self, tensor: torch.Tensor, operation) -> None:
        """In place. It ends with the connection to a process that ended: in gloo at once, in NCCL mostly by the launcher."""
        try:
            torch.distributed.all_reduce(tensor, operation)
        except RuntimeError as error:
            # Neither has a class of its own for it. gloo: "Connection closed by peer", "Connection reset by peer".
            if "by peer" not in str(error) and "ncclRemoteError" not in str(error):
                raise
            self._asked = 0.0
            self._listen()  # it may have said why
            raise PeerStopped(f"another process is gone ({error})", 1) from error

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """The store ends with the process that holds it, the main one where no launcher does."""
        try:
            yield
        except torch.distributed.DistError as error:
            raise PeerStopped(f"the main process is gone ({error})", 1) from error


def start(device: torch.device) -> Processes:
    """accelerate's view of devices and processes. It computes nothing for us: mixed precision is ours."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # Said in so many words: without a GPU and without `cpu=True`, accelerate makes every process a lone main process.
    patient = InitProcessGroupKwargs(timeout=REDUCTION_TIMEOUT)
    return Processes(Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[patient]))
