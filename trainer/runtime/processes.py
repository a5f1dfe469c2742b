"""What the processes of a run say to one another. The only file that calls torch.distributed; accelerate starts it.

Reductions go through the process group. Waiting does not: while one process downloads, encodes, draws or saves, the others
ask a store now and then. So nobody's time-out counts that work, signals are heard meanwhile, and a process that fails alone
takes the others with it, with its exit status. One that is killed or stopped is missed by its signs of life.
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

# Of a reduction: longer than processes can differ in one step (reading, a larger bucket, one micro-batch more). It does not
# serve to find a process that died: the connection breaks then, the launcher ends the others, and signs of life are missed.
REDUCTION_TIMEOUT = timedelta(hours=24)
ASK_SECONDS = 0.25  # between two looks at the store
TEXT = 2**20  # letters of one value in the store, which takes 8 MiB
SCHEME = "trainer"  # of the address under which accelerate asks for our store


class Processes:
    """This process among its equals: device, rank, count. Methods but `check` are called by all of them in the same order.

    store: of this start alone; None where there is one process. lost_after: seconds without a sign of life. quiet: what they
    say is left out, but for warnings.
    """

    def __init__(
        self, device: torch.device, rank: int = 0, count: int = 1, store=None, *, lost_after: float, quiet: bool = False
    ) -> None:
        self.device, self.rank, self.count, self.is_main = device, rank, count, rank == 0
        self._quiet = quiet
        self._signals = Signals()
        self._store: Any = store if count > 1 else None
        self._meetings, self._asked = 0, 0.0
        self._launched, self._lost_after, self._heartbeat = launched(), lost_after, None
        self._alive: Alive | None = None
        self._lend: Callable[[], bool] | None = None
        self._rounds: Any = None  # the process group of rounds: they go by the host, whatever computes

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print what the run says, once. whole: no line is broken."""
        if self.is_main and (not self._quiet or text.startswith("warning:")):
            write(text, whole=whole)

    def sum(self, *tensors: torch.Tensor) -> None:
        """Over the processes, in place."""
        if self.count > 1:
            self.settle()
            for tensor in tensors:
                self._reduce(tensor, torch.distributed.ReduceOp.SUM)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number in any process: what all of them agree on."""
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

    # --- what must be the same in all of them ---------------------------------------------------------------------------

    def differences(self, mine: Mapping[str, str]) -> dict[str, list[str | None]]:
        """The keys of a table that differ between processes: by key, its value in each; None where it has none. Raises what
        `check` raises."""
        text = json.dumps(mine, sort_keys=True)
        if self._store is None or len({*self.exchange(hashlib.sha256(text.encode()).hexdigest())}) == 1:
            return {}
        tables = [json.loads(each) for each in self.exchange(text)]
        values = {key: [table.get(key) for table in tables] for key in sorted({key for table in tables for key in table})}
        return {key: each for key, each in values.items() if len({*each}) > 1}

    def exchange(self, text: str) -> list[str]:
        """The text of each process, in the order of their ranks. Raises what `check` raises."""
        self.settle()
        parts = [text[start : start + TEXT] for start in range(0, len(text), TEXT)]
        here = self._meetings + 1
        for number, part in enumerate(parts):
            self._tell(f"{here}/{self.rank}/{number}", part)
        self._meet(len(parts), self.check)
        with self._reached():
            counts = {f"{here}/{rank}": json.loads(self._store.get(f"{here}/{rank}")) for rank in range(self.count)}
            keys = [[f"{key}/{number}" for number in range(count)] for key, count in counts.items()]
            return ["".join(json.loads(self._store.get(key)) for key in names) for names in keys]

    # --- what lies in parts in all of them (sharding.py) --------------------------------------------------------------

    def lend_with(self, lend: Callable[[], bool] | None) -> None:
        """Have `settle` call `lend` until it says that nobody wants anything; None: nothing lies in parts any more. At first
        all meet here. Raises as `wait`, with `obey`."""
        if lend is not None and self._rounds is None:
            self.wait(obey=True)  # torch waits there for the last one, and hears of no signal and no failure meanwhile
            self._rounds = torch.distributed.new_group(backend="gloo", timeout=REDUCTION_TIMEOUT)
        self._lend = lend

    def settle(self) -> None:
        """Lend what lies in parts until no process wants any. All come here before they do anything else in common."""
        while self._lend is not None and self._lend():
            self._listen()

    def wanted(self, number: int) -> int:
        """The largest number that any process wants now; 0: none."""
        agreed = torch.tensor([number])
        self._reduce(agreed, torch.distributed.ReduceOp.MAX, self._rounds)
        return int(agreed)

    def gather(self, into: torch.Tensor, part: torch.Tensor) -> Any:
        """Start to bring the parts of all processes together, in the order of their ranks. Returns what `gathered` takes."""
        with self._connected():
            return torch.distributed.all_gather_into_tensor(into, part, async_op=True)

    def gathered(self, work: Any) -> None:
        """Have all that the device is asked to compute from now on wait for that gather. Raises PeerStopped."""
        with self._connected():
            self._finish(work, self.device)

    # --- what each does alone -----------------------------------------------------------------------------------------

    def takes(self, key: str) -> bool:
        """Whether a piece of work is this process's share. key: its digest, in hexadecimal, so that shares are even."""
        return int(key[:16], 16) % self.count == self.rank

    @contextmanager
    def attending(self, signals: Signals, alive: Alive | None = None) -> Iterator[None]:
        """A block in which the processes hear of signals, of a process that leaves it with an exception, and of a lost one.
        alive: takes the main process's signs of life (`sign`)."""
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
                self._part(error)
                raise

    @property
    def undisturbed(self) -> AbstractContextManager[object]:
        """A block in which this process is not ended because another one is lost."""
        return self._heartbeat.undisturbed if self._heartbeat else nullcontext()

    @property
    def replaced(self) -> bool:
        """Whether a launcher may have started the run again without this process. Then nothing is for it to write."""
        if self._store is None or not self._launched:
            return False
        if self._heartbeat is not None and self._heartbeat.missed:
            return True
        try:
            return self._store.check([REPLACED])
        except torch.distributed.DistError:
            return True

    def check(self) -> None:
        """Raises Interrupted once any process was asked to stop, PeerStopped once one has failed."""
        self._listen()
        self._signals.check()

    def sign(self, doing: str) -> None:
        """Give a sign of life: what this process does gets on. doing: its name."""
        if self._heartbeat is not None:
            self._heartbeat.work += 1
        if self._alive is not None:
            self._alive.sign(doing)

    def wait(self, *, obey: bool = False) -> None:
        """Wait until every process is here, however long that takes. obey: a stop is raised as Interrupted meanwhile. Raises
        PeerStopped where a process failed or is gone."""
        if self._store is not None:
            self.settle()
            self._meet(True, self.check if obey else self._listen)

    def leave_together(self) -> None:
        """Wait, at the end of a run, until every process is done with it: who had left would not miss one that hangs. The
        main process, which may have the store, leaves last. Raises PeerStopped."""
        self.wait()
        if self._store is not None:
            self._tell(f"left/{self.rank}", True)
            if self.is_main:
                self._await([f"left/{rank}" for rank in range(self.count)], self._listen)

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

    def _meet(self, value: object, check: Callable[[], None]) -> None:
        """Tell the others a value, and wait until each has told one."""
        self._meetings += 1
        self._tell(f"{self._meetings}/{self.rank}", value)
        self._await([f"{self._meetings}/{rank}" for rank in range(self.count)], check)

    def _part(self, error: BaseException) -> None:
        """Tell the others that this process ends, and its status. The main one, where it has the store, stays until they have
        heard of it, or one is lost: without the store they would only know that it is gone."""
        with suppress(torch.distributed.DistError, PeerStopped):  # nothing takes the place of the error
            if not isinstance(error, PeerStopped):
                self._store.set("failed", json.dumps({"rank": self.rank, "status": ending(error)[0]}))
            self._store.set(f"ended/{self.rank}", "")
            end = time.monotonic() + self._lost_after
            stays = self.is_main and not self._launched and not isinstance(error, KeyboardInterrupt)
            while stays and time.monotonic() < end and not self._store.check([f"ended/{n}" for n in range(self.count)]):
                self._heartbeat.answer()
                time.sleep(ASK_SECONDS)

    def _listen(self) -> None:
        """Tell the others of a signal, and hear of theirs. Raises PeerStopped."""
        if self._heartbeat is not None:
            self._heartbeat.answer()
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
        """Until all the keys are there, whatever became of one since. Another process that gets on is a sign of life here."""
        pause, work = 0.001, 0
        while not self._there(keys):
            try:
                check()
            except PeerStopped:
                if not self._there(keys):
                    raise
            if self._alive is not None and self._heartbeat is not None and self._heartbeat.work_elsewhere != work:
                work = self._heartbeat.work_elsewhere
                self._alive.sign("waiting for another process")
            time.sleep(pause)
            pause = min(2 * pause, ASK_SECONDS)

    def _there(self, keys: list[str]) -> bool:
        with self._reached():
            return self._store.check(keys)

    def _tell(self, key: str, value: object) -> None:
        with self._reached():
            self._store.set(key, json.dumps(value))

    def _reduce(self, tensor: torch.Tensor, operation, group=None) -> None:
        """In place. Raises PeerStopped."""
        with self._connected():
            self._finish(torch.distributed.all_reduce(tensor, operation, group, async_op=True), tensor.device)

    def _finish(self, work, device: torch.device) -> None:
        while not _waited(work, device):
            self._listen()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A block of what is done in common. Raises PeerStopped where the connection to a process breaks."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerStopped):
                raise
            # Neither has a class of its own for it. gloo: "Connection closed by peer", "Connection reset by peer".
            if "by peer" not in str(error) and "ncclRemoteError" not in str(error):
                raise
            self._asked = 0.0
            self._listen()  # it may have said why
            raise self._gone(f"another process is gone ({error})") from error

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """The store ends with the process that holds it, the main one where no launcher does."""
        try:
            yield
        except torch.distributed.DistError as error:
            raise self._gone(f"the main process is gone ({error})") from error

    def _gone(self, what: str) -> PeerStopped:
        """What to raise after a connection broke. Raises it for the lost process where no launcher ends this one now."""
        if self._launched or self._heartbeat is None:
            return PeerStopped(what, 1)
        self._heartbeat.wait()
        return PeerStopped(what, STATUS)


def _waited(work, device: torch.device) -> bool:
    """Whether a reduction is done: gloo's after a while, as nothing is heard meanwhile. NCCL's waits on the device."""
    if device.type != "cpu":
        work.wait()
        return True
    try:
        work.wait(timedelta(seconds=ASK_SECONDS))
    except RuntimeError:
        if not work.is_completed():
            return False  # "Operation timed out": only the wait
        work.wait()  # raises what the reduction failed with, not that it was done just after the wait was over
    return True


def _end(message: str) -> None:
    """End this process from any thread. Libraries want to end the process group in an orderly way, which would wait."""
    write(f"error: {message}", sys.stderr, whole=True)
    os._exit(STATUS)


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate launch) watches this process, and keeps its store when it starts it again."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def start(device: torch.device, *, lost_after: float, quiet: bool = False) -> Processes:
    """The processes of this start, as accelerate finds them. Raises PeerStopped where not all come, UserError where they were
    started in a way that is not torch's."""
    refuse_nameless(os.environ)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):  # which accelerate and torch read, too
        number_in(name, 1)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # Said in so many words: without a GPU and without `cpu=True`, accelerate makes every process a lone main process.
    store = _open_store() if launched() or number_in("WORLD_SIZE", 1, least=1) > 1 else None
    patient = InitProcessGroupKwargs(init_method=f"{SCHEME}://" if store else None, timeout=REDUCTION_TIMEOUT)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[patient])
    there = accelerator.device, accelerator.process_index, accelerator.num_processes
    return Processes(*there, store, lost_after=lost_after, quiet=quiet)


def excuse(error: BaseException, status: int) -> None:
    """Tell the others of a run that this process ends with that exit status before it met them: they would wait for it."""
    group, heard = torch.distributed, isinstance(error, (PeerStopped, Interrupted, KeyboardInterrupt))
    if not heard and group.is_available() and not group.is_initialized():
        with suppress(PeerStopped, group.DistError, ValueError, KeyboardInterrupt):  # ValueError: of the environment
            _open_store(status)


def _open_store(status: int = 0):
    """A store of this start alone. One process asks for it, too: an earlier start of more is told that it is over."""
    from torch.distributed import PrefixStore, register_rendezvous_handler, rendezvous

    remedy = "set them right for each process; beside another run on this machine MASTER_PORT has to be another one"
    with nullcontext() if launched() else reading("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT", remedy=remedy):
        store, rank, count = next(rendezvous("env://", timeout=REDUCTION_TIMEOUT))
    ours = PrefixStore("trainer", store)
    apart = PrefixStore(prefix_of(meet(ours, rank=rank, count=count, status=status)), ours)
    register_rendezvous_handler(SCHEME, lambda *_, **__: iter([(apart, rank, count)]))
    return apart
