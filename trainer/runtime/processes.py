"""Communication between the processes of a run. The only file that calls torch.distributed; accelerate starts it.

Reductions use the process group. Waiting does not: while one process downloads, encodes, draws or saves, the others poll a
store. So no time-out counts that work, signals are handled meanwhile, and a process that fails alone ends the others, too,
with its exit status. A process that is killed or stopped is found by its missing heartbeats.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch

from trainer.base.console import write
from trainer.base.errors import Interrupted, PeerStopped, ending, number_in, reading
from trainer.base.progress import Alive
from trainer.base.signals import Signals
from trainer.runtime.heartbeat import REPLACED, STATUS, Heartbeat
from trainer.runtime.starts import meet, prefix_of, refuse_nameless

# A reduction's: longer than processes can differ in one step (reading, a larger bucket, one micro-batch more). It does not
# detect a dead process: then the connection breaks, the launcher ends the others, and heartbeats are missing.
REDUCTION_TIMEOUT = timedelta(hours=24)
ASK_SECONDS = 0.25  # between two polls of the store
TEXT = 2**20  # characters of one value in the store, whose limit is 8 MiB
SCHEME = "trainer"  # of the URL by which accelerate gets our store


class Processes:
    """This process and its peers. All processes call the methods, except `check`, in the same order.

    store: of this start alone; None for one process. lost_after: seconds without a heartbeat. quiet: print only warnings.
    """

    def __init__(
        self, device: torch.device, rank: int = 0, count: int = 1, store=None, *, lost_after: float, quiet: bool = False
    ) -> None:
        self.device, self.rank, self.count, self.is_main = device, rank, count, rank == 0
        self._quiet = quiet
        self._signals = Signals()
        self._store: Any = store if count > 1 else None
        self._meetings, self._last_poll = 0, 0.0
        self._launched, self._lost_after, self._heartbeat = launched(), lost_after, None
        self._alive: Alive | None = None
        self._lend: Callable[[], bool] | None = None
        self._rounds: Any = None  # the process group of lending rounds: on the host, whatever computes

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print a text once for all processes. whole: without line breaks."""
        if self.is_main and (not self._quiet or text.startswith("warning:")):
            write(text, whole=whole)

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum tensors over the processes, in place."""
        if self.count > 1:
            self.settle()
            for tensor in tensors:
                self._reduce(tensor, torch.distributed.ReduceOp.SUM)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number over the processes, the same in all of them."""
        if self.count == 1:
            return list(numbers)
        self.settle()
        agreed = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._reduce(agreed, torch.distributed.ReduceOp.MAX)
        return agreed.tolist()

    def total(self, *numbers: int) -> list[int]:
        """The sum of each number over the processes."""
        summed = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.sum(summed)
        return summed.tolist()

    # --- values that must agree -----------------------------------------------------------------------------------------

    def differences(self, table: Mapping[str, str]) -> dict[str, list[str | None]]:
        """The keys whose values differ between processes: key -> each's value, or None. Raises what `check` raises."""
        text = json.dumps(table, sort_keys=True)
        if self._store is None or len({*self.exchange(hashlib.sha256(text.encode()).hexdigest())}) == 1:
            return {}
        tables = [json.loads(each) for each in self.exchange(text)]
        values = {key: [each.get(key) for each in tables] for key in sorted({key for each in tables for key in each})}
        return {key: each for key, each in values.items() if len({*each}) > 1}

    def exchange(self, text: str) -> list[str]:
        """The text of each process, in the order of their ranks. Raises what `check` raises."""
        self.settle()
        parts = [text[start : start + TEXT] for start in range(0, len(text), TEXT)]
        meeting = self._meetings + 1
        for number, part in enumerate(parts):
            self._publish(f"{meeting}/{self.rank}/{number}", part)
        self._meet(len(parts), self.check)
        with self._store_errors():
            counts = {f"{meeting}/{rank}": json.loads(self._store.get(f"{meeting}/{rank}")) for rank in range(self.count)}
            keys = [[f"{key}/{number}" for number in range(count)] for key, count in counts.items()]
            return ["".join(json.loads(self._store.get(key)) for key in names) for names in keys]

    # --- tensors of which each process has a part (sharding.py) -------------------------------------------------------

    def lend_with(self, lend: Callable[[], bool] | None) -> None:
        """Have `settle` call `lend` until it returns False; None: no more parts to lend. The first call waits for all
        processes. Raises what `wait` raises, with `obey`."""
        if lend is not None and self._rounds is None:
            self.wait(obey=True)  # torch waits below for the last process, deaf to signals and failures
            self._rounds = torch.distributed.new_group(backend="gloo", timeout=REDUCTION_TIMEOUT)
        self._lend = lend

    def settle(self) -> None:
        """Lend parts until no process requests any. All processes call it before anything else in common."""
        while self._lend is not None and self._lend():
            self._listen()

    def largest_request(self, number: int) -> int:
        """The largest number that any process requests now; 0: none."""
        agreed = torch.tensor([number])
        self._reduce(agreed, torch.distributed.ReduceOp.MAX, self._rounds)
        return int(agreed)

    def gather(self, into: torch.Tensor, part: torch.Tensor) -> Any:
        """Start to gather all processes' parts, in the order of their ranks. Returns the argument of `finish_gather`."""
        with self._peer_errors():
            return torch.distributed.all_gather_into_tensor(into, part, async_op=True)

    def finish_gather(self, work: Any) -> None:
        """Have the device's later work wait for that gather. Raises PeerStopped."""
        with self._peer_errors():
            self._finish(work, self.device)

    # --- work that each process does alone ----------------------------------------------------------------------------

    def takes(self, key: str) -> bool:
        """Whether a piece of work is this process's share. key: its digest, in hexadecimal: shares are even."""
        return int(key[:16], 16) % self.count == self.rank

    @contextmanager
    def attending(self, signals: Signals, alive: Alive | None = None) -> Iterator[None]:
        """A context in which the processes handle signals, a peer that leaves it with an exception, and a lost one. alive:
        records the main process's signs of life (`sign`)."""
        self._signals, self._alive = signals, alive
        if self._store is None:
            yield
            return
        self._heartbeat = Heartbeat(
            self._store.clone(),
            rank=self.rank,
            count=self.count,
            lost_after=self._lost_after,
            broken=torch.distributed.DistError,
            end=_end,
        )
        with self._heartbeat:
            try:
                yield
            except BaseException as error:
                self._announce_end(error)
                raise

    @property
    def undisturbed(self) -> AbstractContextManager[object]:
        """A context in which this process is not ended because of a lost one."""
        return self._heartbeat.undisturbed if self._heartbeat else nullcontext()

    @property
    def replaced(self) -> bool:
        """Whether a launcher may have restarted the run without this process, which then must not write anything."""
        if self._store is None or not self._launched:
            return False
        if self._heartbeat is not None and self._heartbeat.missed:
            return True
        try:
            return self._store.check([REPLACED])
        except torch.distributed.DistError:
            return True

    def check(self) -> None:
        """Raises Interrupted once any process got a signal to stop, PeerStopped once one has failed."""
        self._listen()
        self._signals.check()

    def sign(self, doing: str) -> None:
        """Record progress, as a sign of life. doing: the name of the work."""
        if self._heartbeat is not None:
            self._heartbeat.work += 1
        if self._alive is not None:
            self._alive.sign(doing)

    def wait(self, *, obey: bool = False) -> None:
        """Wait until every process calls this, however long that takes. obey: raise Interrupted for a signal meanwhile.
        Raises PeerStopped if a process failed or is gone."""
        if self._store is not None:
            self.settle()
            self._meet(True, self.check if obey else self._listen)

    def leave_together(self) -> None:
        """Wait, at the end of a run, until every process has finished: one that left would not notice a hanging peer. The
        main process, which may have the store, leaves last. Raises PeerStopped."""
        self.wait()
        if self._store is not None:
            self._publish(f"left/{self.rank}", True)
            if self.is_main:
                self._await([f"left/{rank}" for rank in range(self.count)], self._listen)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A context that the main process runs before the others. Raises what `check` raises."""
        if self._store is None:
            yield
            return
        self._meetings += 1
        if not self.is_main:
            self._await([f"{self._meetings}/0"], self.check)
        yield
        if self.is_main:
            self._publish(f"{self._meetings}/0", True)

    def _meet(self, value: object, check: Callable[[], None]) -> None:
        """Publish a value, and wait until each process has."""
        self._meetings += 1
        self._publish(f"{self._meetings}/{self.rank}", value)
        self._await([f"{self._meetings}/{rank}" for rank in range(self.count)], check)

    def _announce_end(self, error: BaseException) -> None:
        """Publish that this process ends, and its exit status. The main one, if it has the store, waits until the others have
        read it, or one is lost: without the store they would only know that it is gone."""
        with suppress(torch.distributed.DistError, PeerStopped):  # no other error replaces this one
            if not isinstance(error, PeerStopped):
                self._store.set("failed", json.dumps({"rank": self.rank, "status": ending(error)[0]}))
            self._store.set(f"ended/{self.rank}", "")
            end = time.monotonic() + self._lost_after
            waits = self.is_main and not self._launched and not isinstance(error, KeyboardInterrupt)
            while waits and time.monotonic() < end and not self._store.check([f"ended/{n}" for n in range(self.count)]):
                self._heartbeat.answer()
                time.sleep(ASK_SECONDS)

    def _listen(self) -> None:
        """Publish a signal, and poll for the others' signals and failures. Raises PeerStopped."""
        if self._heartbeat is not None:
            self._heartbeat.answer()
        if self._store is None or time.monotonic() < self._last_poll + ASK_SECONDS:
            return
        self._last_poll = time.monotonic()
        with self._store_errors():
            if self._signals.stop is not None:
                self._publish("stop", self._signals.stop)
            elif self._store.check(["stop"]):
                self._signals.stop = json.loads(self._store.get("stop"))
            if self._store.check(["failed"]):
                failure = json.loads(self._store.get("failed"))
                raise PeerStopped(f"process {failure['rank']} could not go on; its message says why", failure["status"])

    def _await(self, keys: list[str], check: Callable[[], None]) -> None:
        """Wait until the store has all keys, even if their process failed since. Others' progress is a sign of life here."""
        pause, work = 0.001, 0
        while not self._has(keys):
            try:
                check()
            except PeerStopped:
                if not self._has(keys):
                    raise
            if self._alive is not None and self._heartbeat is not None and self._heartbeat.work_elsewhere != work:
                work = self._heartbeat.work_elsewhere
                self._alive.sign("waiting for another process")
            time.sleep(pause)
            pause = min(2 * pause, ASK_SECONDS)

    def _has(self, keys: list[str]) -> bool:
        with self._store_errors():
            return self._store.check(keys)

    def _publish(self, key: str, value: object) -> None:
        with self._store_errors():
            self._store.set(key, json.dumps(value))

    def _reduce(self, tensor: torch.Tensor, operation, group=None) -> None:
        """Reduce a tensor in place. Raises PeerStopped."""
        with self._peer_errors():
            self._finish(torch.distributed.all_reduce(tensor, operation, group, async_op=True), tensor.device)

    def _finish(self, work, device: torch.device) -> None:
        while not _is_done(work, device):
            self._listen()

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        """A context of a common operation. Raises PeerStopped if the connection to a process breaks."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerStopped):
                raise
            # Neither backend has an error class for it. gloo: "Connection closed by peer", "Connection reset by peer".
            if "by peer" not in str(error) and "ncclRemoteError" not in str(error):
                raise
            self._last_poll = 0.0
            self._listen()  # it may have published its error
            raise self._broken(f"another process is gone ({error})") from error

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """A context of store calls. Raises PeerStopped if the store ended with its process (the main one if not launched)."""
        try:
            yield
        except torch.distributed.DistError as error:
            raise self._broken(f"the main process is gone ({error})") from error

    def _broken(self, message: str) -> PeerStopped:
        """The error after a connection broke. Raises the lost process's if no launcher ends this process now."""
        if self._launched or self._heartbeat is None:
            return PeerStopped(message, 1)
        self._heartbeat.wait()
        return PeerStopped(message, STATUS)


def _is_done(work, device: torch.device) -> bool:
    """Whether a reduction is done. Waits for gloo's a short while, deaf to signals. NCCL's waits on the device."""
    if device.type != "cpu":
        work.wait()
        return True
    try:
        work.wait(timedelta(seconds=ASK_SECONDS))
    except RuntimeError:
        if not work.is_completed():
            return False  # "Operation timed out": of the wait alone
        work.wait()  # raises what the reduction raised; nothing, if it was done just after the time-out
    return True


def _end(message: str) -> None:
    """End this process at once, from any thread: an orderly end of the process group would wait."""
    write(f"error: {message}", sys.stderr, whole=True)
    os._exit(STATUS)


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate launch) watches this process, and keeps its store across restarts."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def start(device: torch.device, *, lost_after: float, quiet: bool = False) -> Processes:
    """The processes of this start, as accelerate finds them. Raises PeerStopped if not all come, UserError for a launcher
    that does not set torch's variables."""
    refuse_nameless(os.environ)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):  # accelerate and torch read them, too
        number_in(name, 1)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # cpu= is explicit: without a GPU and without `cpu=True`, accelerate makes every process a lone main process.
    store = _open_store() if launched() or number_in("WORLD_SIZE", 1, least=1) > 1 else None
    group = InitProcessGroupKwargs(init_method=f"{SCHEME}://" if store else None, timeout=REDUCTION_TIMEOUT)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[group])
    place = accelerator.device, accelerator.process_index, accelerator.num_processes
    return Processes(*place, store, lost_after=lost_after, quiet=quiet)


def excuse(error: BaseException, status: int) -> None:
    """Tell the other processes that this one ends with that exit status before it met them: they would wait for it."""
    group, is_known = torch.distributed, isinstance(error, (PeerStopped, Interrupted, KeyboardInterrupt))
    if not is_known and group.is_available() and not group.is_initialized():
        with suppress(PeerStopped, group.DistError, ValueError, KeyboardInterrupt):  # ValueError: of the environment
            _open_store(status)


def _open_store(status: int = 0):
    """A store of this start alone. A single process opens it, too: it tells an earlier start of several that it is over."""
    from torch.distributed import PrefixStore, register_rendezvous_handler, rendezvous

    remedy = "set them right for each process; beside another run on this machine MASTER_PORT has to be another one"
    with nullcontext() if launched() else reading("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT", remedy=remedy):
        store, rank, count = next(rendezvous("env://", timeout=REDUCTION_TIMEOUT))
    ours = PrefixStore("trainer", store)
    of_start = PrefixStore(prefix_of(meet(ours, rank=rank, count=count, status=status)), ours)
    register_rendezvous_handler(SCHEME, lambda *_, **__: iter([(of_start, rank, count)]))
    return of_start
