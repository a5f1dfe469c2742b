"""How the processes of one start find one another, in a store that outlives them.

What an earlier start left in a launcher's store looks like the present one's, and the launcher's count of restarts may differ
between machines, and stands still when one comes or goes. So each start is given a number here.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.base.errors import PeerStopped, UserError
from trainer.runtime.heartbeat import REPLACED, STATUS

if TYPE_CHECKING:
    from torch.distributed import Store

STARTS = "starts"  # how many there were
PAUSE = 0.02  # seconds between two looks
# From the first process that is there to the last: they import libraries, on a cold disk for minutes.
PATIENCE = 600.0
HEARING = 10.0  # seconds for the others to hear of one that ends: they look every PAUSE

# What MPI's launchers and Slurm's `srun` say of how many processes they started.
COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def refuse_nameless(environment: Mapping[str, str]) -> None:
    """Raises UserError where a launcher started several processes without torch's variables: each would train alone."""
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return
    for name in COUNTS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{name} = {count}: several processes were started without RANK and WORLD_SIZE; start one for each machine: "
                "torchrun --nnodes NODES --nproc_per_node CARDS train.py ..., or set RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT for each"
            )


def prefix_of(number: int) -> str:
    """The prefix of the keys of a start."""
    return f"start/{number}"


def meet(store: Store, *, rank: int, count: int, patience: float = PATIENCE, status: int = 0) -> int:
    """The number of this start, the same for all its processes and for those of no other. Waits until they are all there.

    Process 0 draws it, and tells it to those that have come; each knows by a name of its own that it is meant, and not an
    earlier one of its rank. status: not 0 of a process that comes only to say that it ends. Raises PeerStopped where one does
    not come, or ends.
    """
    end = time.monotonic() + patience
    if rank == 0:
        number = store.add(STARTS, 1)
        store.set(f"{prefix_of(number - 1)}/{REPLACED}", "")
        came = {other: f"{prefix_of(number)}/came/{other}" for other in range(1, count)}
        while came and not store.check(list(came.values())):
            missing = [other for other, key in came.items() if not store.check([key])]
            _pause(end, f"of {count} processes {', '.join(map(str, missing))} did not come within {patience:g} s")
        every = {"0": ["", status]} | {str(other): json.loads(store.get(key)) for other, key in came.items()}
        store.set(f"{prefix_of(number)}/all", json.dumps(every))
        return _unless_ended(store, number, rank, every)
    name, latest = uuid.uuid4().hex, 0
    while True:
        number = store.add(STARTS, 0)
        if number > latest:
            store.set(f"{prefix_of(number)}/came/{rank}", json.dumps([name, status]))
            latest = number
        key = f"{prefix_of(number)}/all"
        if number and store.check([key]) and (every := json.loads(store.get(key))).get(str(rank), [""])[0] == name:
            return _unless_ended(store, number, rank, every)
        _pause(end, f"process 0, which all others wait for, did not come within {patience:g} s")


def _unless_ended(store: Store, number: int, rank: int, every: Mapping[str, Sequence]) -> int:
    """The number of the start. every: name and status of its processes by rank. Raises PeerStopped where one ends; in process
    0, which may have the store, once the others have heard of it."""
    ended = {other: status for other, (_, status) in every.items() if status}
    if not ended:
        return number
    heard = f"{prefix_of(number)}/heard"
    store.set(f"{heard}/{rank}", "")
    end = time.monotonic() + HEARING
    while rank == 0 and time.monotonic() < end and not store.check([f"{heard}/{other}" for other in every]):
        time.sleep(PAUSE)
    first = min(ended, key=int)
    raise PeerStopped(f"process {first} could not go on; its message says why", ended[first])


def _pause(end: float, otherwise: str) -> None:
    if time.monotonic() > end:
        raise PeerStopped(f"{otherwise}; start all processes again with --resume_from auto", STATUS)
    time.sleep(PAUSE)
