"""The meeting of one start's processes, in a store that outlives them.

A launcher's store still has an earlier start's keys, and the launcher's count of restarts may differ between machines, and
does not change when one joins or leaves. So this file numbers the starts.
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

STARTS = "starts"  # the key that counts them
PAUSE = 0.02  # seconds between two polls
# Seconds from the first process to the last: they import libraries, on a cold disk for minutes.
PATIENCE = 600.0
HEARING = 10.0  # seconds for the others to read that a process ends: they poll every PAUSE

# The number of processes in the variables of MPI's launchers and Slurm's `srun`.
COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def refuse_nameless(environment: Mapping[str, str]) -> None:
    """Raises UserError if a launcher started several processes without torch's variables: each would train alone."""
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
    """The prefix of a start's keys."""
    return f"start/{number}"


def meet(store: Store, *, rank: int, count: int, patience: float = PATIENCE, status: int = 0) -> int:
    """The number of this start, unique, and the same in all its processes. Waits for all of them.

    Process 0 draws the number, and publishes it with the names of the processes that joined: by its name a process knows that
    it is meant, not an earlier one of its rank. status: not 0 for a process that joins only to announce its end. Raises
    PeerStopped if a process does not join, or ends.
    """
    end = time.monotonic() + patience
    if rank == 0:
        number = store.add(STARTS, 1)
        store.set(f"{prefix_of(number - 1)}/{REPLACED}", "")
        keys = {other: f"{prefix_of(number)}/came/{other}" for other in range(1, count)}
        while keys and not store.check(list(keys.values())):
            missing = [other for other, key in keys.items() if not store.check([key])]
            _pause(end, f"of {count} processes {', '.join(map(str, missing))} did not come within {patience:g} s")
        members = {"0": ["", status]} | {str(other): json.loads(store.get(key)) for other, key in keys.items()}
        store.set(f"{prefix_of(number)}/all", json.dumps(members))
        return _unless_ended(store, number, rank, members)
    name, latest = uuid.uuid4().hex, 0
    while True:
        number = store.add(STARTS, 0)
        if number > latest:
            store.set(f"{prefix_of(number)}/came/{rank}", json.dumps([name, status]))
            latest = number
        key = f"{prefix_of(number)}/all"
        if number and store.check([key]) and (members := json.loads(store.get(key))).get(str(rank), [""])[0] == name:
            return _unless_ended(store, number, rank, members)
        _pause(end, f"process 0, which all others wait for, did not come within {patience:g} s")


def _unless_ended(store: Store, number: int, rank: int, members: Mapping[str, Sequence]) -> int:
    """The number of the start. members: (name, status) of its processes, by rank. Raises PeerStopped if one ends; in process
    0, which may have the store, once the others have read it."""
    statuses = {other: status for other, (_, status) in members.items() if status}
    if not statuses:
        return number
    prefix = f"{prefix_of(number)}/heard"
    store.set(f"{prefix}/{rank}", "")
    end = time.monotonic() + HEARING
    while rank == 0 and time.monotonic() < end and not store.check([f"{prefix}/{other}" for other in members]):
        time.sleep(PAUSE)
    first = min(statuses, key=int)
    raise PeerStopped(f"process {first} could not go on; its message says why", statuses[first])


def _pause(end: float, problem: str) -> None:
    if time.monotonic() > end:
        raise PeerStopped(f"{problem}; start all processes again with --resume_from auto", STATUS)
    time.sleep(PAUSE)
