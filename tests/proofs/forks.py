"""Many starts of a program without the seconds of its imports: each is a fork of a process that has only imported.

That is as good as a new process where only files go from one start to the next. `Server` is the caller's side; this file
run as a script is that process. Linux.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The command line: where it stands, and where it stood in earlier trees.
CLIS = ("workbench.commands.main", "trainer.cli.main", "trainer.cli")
# What a run imports where it needs it.
LIBRARIES = (
    "accelerate", "bitsandbytes", "optimum.quanto", "peft.tuners.lora.bnb",
    "diffusers.pipelines.flux.pipeline_flux", "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "transformers.models.clip.modeling_clip", "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.modeling_t5", "transformers.models.t5.tokenization_t5",
    "PIL.JpegImagePlugin", "PIL.PngImagePlugin",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """One start: `call` ("module:function") with `arguments`, in a process group of its own, in `folder`.

    What it says is appended to `folder`/log. Its exit status is what the function returns or exits with. argv: the command
    line that it sees.
    """

    call: str
    folder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    argv: Sequence[str] = ()


class Server:
    """Starts processes; a context manager.

    code: the tree whose modules are imported. environment: beside the present one. fresh: a new interpreter for each start.
    """

    def __init__(
        self, code: Path, imports: Sequence[str], environment: Mapping[str, str] = {}, *, fresh: bool = False
    ) -> None:
        self.code, self.imports, self.fresh = code, [*LIBRARIES, *imports], fresh
        self.environment = os.environ | {"PYTHONPATH": str(code)} | environment

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *(["--fresh"] if self.fresh else self.imports)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.code, env=self.environment,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout
        return self

    def __exit__(self, *error: object) -> None:
        self.orders.close()
        self.process.wait()
        self.answers.close()

    def _ask(self, order: Any) -> Any:
        print(json.dumps(order), file=self.orders, flush=True)
        answer = self.answers.readline()
        if not answer:
            raise RuntimeError("the process that starts others has ended; its error is above")
        return json.loads(answer)

    def start(self, order: Order) -> int:
        """Its process id."""
        return self._ask(asdict(order))

    def status(self, pid: int) -> int | None:
        """The exit status, negative for a signal; None as long as it lives. Once it has been told, it is forgotten."""
        return self._ask(pid)

    def wait(self, pid: int) -> int:
        while (status := self.status(pid)) is None:
            time.sleep(0.02)
        return status


# --------------------------------------------------------------------------------------------- the process that forks


def serve(imports: Sequence[str], *, fresh: bool) -> None:
    """Start a process for every line that orders one, tell what became of it for every line that is its number."""
    living: set[int] = set()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born deaf to it
    if not fresh:
        cli = importlib.import_module(next(name for name in CLIS if Path(*name.split(".")).with_suffix(".py").is_file()))
        assert Path(str(cli.__file__)).is_relative_to(Path.cwd()), f"{cli.__file__} is of another tree"
        cli.quiet_libraries()
        for module in imports:
            importlib.import_module(module)
        gc.freeze()
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if isinstance(order, int):
                pid, status = os.waitpid(order, os.WNOHANG)
                living.discard(pid)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = _spawn(line) if fresh else _fork(Order(**order))
                living.add(answer)
            print(json.dumps(answer), flush=True)
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)


def _spawn(description: str) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, __file__, "--once", description], os.environ)


def _fork(order: Order) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = carry_out(order)
        # The interpreter waits for them, too.
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def carry_out(order: Order) -> int:
    os.setsid()  # its workers are found by the group
    os.chdir(order.folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.argv = list(order.argv)
    module, _, name = order.call.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(**order.arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        sys.exit(carry_out(Order(**json.loads(sys.argv[2]))))
    serve(sys.argv[1:], fresh=sys.argv[1] == "--fresh")
    os._exit(0)  # libraries complain at an orderly exit
