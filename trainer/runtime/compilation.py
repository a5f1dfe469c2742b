"""torch.compile over a denoiser's blocks: one program of forward, recomputation and backward for each kind and shape.

A block compiles whole or not at all. It is compiled for training alone: samples and the held-out loss run as written, so no
size or strength of theirs makes a further program.
"""

import os
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError, one_line, reason_of
from trainer.base.files import others_may_write

# Where torch keeps what it compiled: it looks there each time.
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
USERS_FOLDER = os.environ.get(FOLDER)
# Of the data's shapes each makes a program, and no others: torch's own limit would end a run of many buckets.
LIMIT = 2**16
REFUSED = "fail_on_recompile"  # as torch says that it would have to compile
# Before, a program kept what its adapted layers gave. Flux at 1024 px took 38.0 GiB of an H200, and eager 25.7.
RECOMPUTES = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def check_compiler(device: torch.device) -> None:
    """Raises UserError for a GPU without Triton, and without Python's headers or a compiler, C for a GPU, C++ for a CPU."""
    asked, remedy = f"step.compile = 'blocks' on {device.type} needs", "or set step.compile = 'none'"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(f"{asked} Triton, which is not here; install the triton package, {remedy}")
        language, variable, names = "C", "CC", [os.environ.get("CC"), "gcc", "clang"]
    else:
        from torch._inductor import config

        language, variable, names = "C++", "CXX", list(config.cpp.cxx)
    tried = [name for name in names if name]
    if not any(map(shutil.which, tried)):
        raise UserError(
            f"{asked} a {language} compiler, and there is no {' or '.join(tried)}; install one, or name another in "
            f"{variable}, {remedy}"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise UserError(f"{asked} Python's headers, and there is no Python.h in {headers}; install python3-dev, {remedy}")


class Compiler:
    """Compiles blocks, and counts the programs. folder: keeps them for the next start, unless a user names another; what
    cannot be read there, or others may write, counts as none. attention: what computes it, by name. say: prints a line.

    made: programs since `told`, those of skipped updates too, by kind of block and the shape of what it was given.
    """

    def __init__(self, folder: Path, attention: str, say: Callable[[str], None]) -> None:
        self.say, self.made = say, Counter[str]()
        self._own: tempfile.TemporaryDirectory | None = None
        folder = Path(USERS_FOLDER or folder).absolute()
        os.environ[FOLDER] = str(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if others_may_write(folder):
                self._apart("others may write there, and it is run")
        except OSError as error:
            self._apart(one_line(error))
        # A program calls the kernel of attention that was set when it was traced; torch's own key does not say which.
        torch.compiler.config.cache_key_tag = attention
        torch.compiler.reset()  # of an earlier run in this process
        dynamo, inductor = torch._dynamo.config, torch._inductor.config
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = LIMIT
        # What layers that share an input pass on to each other is made and taken within a block.
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        inductor.fallback_random = True  # the same draws as without a compiler
        # Their traces are part of a graph, and so of the key by which it is found again.
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True

    def compile(self, blocks: Mapping[str, nn.Module]) -> int:
        """Have these blocks compiled when they are first trained with. Returns how many."""
        kinds = {type(block): partial(self._program, type(block).__name__) for block in blocks.values()}
        for block in blocks.values():
            for layer in block.modules():
                if hasattr(layer, "cast_bias"):
                    layer.cast_bias()  # kept from now on: kept by samples only, it would make a further program
            block.forward = _trained_with(block.forward, kinds[type(block)])
        return len(blocks)

    def _program(self, kind: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        """As torch.compile asks of a backend."""
        given = next((t for t in inputs if isinstance(t, torch.Tensor) and t.dim() == 3), None)
        self.made[f"{kind} of {'?' if given is None else 'x'.join(map(str, given.shape))}"] += 1
        backend = torch._dynamo.lookup_backend("inductor")
        try:
            return backend(graph, inputs)
        except Exception as error:  # whatever torch makes of a damaged file
            self._apart(f"it could not be used: {reason_of(error):.120}; delete it")
            return backend(graph, inputs)

    def _apart(self, reason: str) -> None:
        """Have this start compile into a folder of its own, which goes with it."""
        text = f"compiled code in {os.environ[FOLDER]} counts as none ({reason})"
        self.say(f"warning: {text}: this start compiles it again, for itself alone")
        self._own = tempfile.TemporaryDirectory(prefix="compiled-")
        os.environ[FOLDER] = self._own.name

    def log_fields(self) -> dict[str, float]:
        """The log's entry: how many programs the step made. They are named in a line."""
        made, self.made = self.made, Counter()
        if made:
            self.say(f"compiled {', '.join(f'{count} x {kind}' if count > 1 else kind for kind, count in made.items())}")
        return {"compiled": made.total()}


@contextmanager
def programs_complete() -> Iterator[None]:
    """A block in which no program is made, as a CUDA graph is recorded in: RuntimeError where one would be."""
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        raise RuntimeError(f"a block would be compiled in it: {one_line(error)}") from error


def _trained_with(forward: Callable, backend: Callable) -> Callable:
    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return wrapped
