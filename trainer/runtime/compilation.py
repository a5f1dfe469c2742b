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

FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it at each compilation
USERS_FOLDER = os.environ.get(FOLDER)
# Programs of a block: one for each shape of the data. Torch's own limit would end a run with many buckets.
LIMIT = 2**16
REFUSED = "fail_on_recompile"  # a stance of torch, named in its message when it would have to compile
# Older programs saved the outputs of adapted layers: Flux at 1024 px took 38.0 GiB of an H200, and eager 25.7.
RECOMPUTES = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def check_compiler(device: torch.device) -> None:
    """Raises UserError for a GPU without Triton, and without Python's headers or a compiler: C for a GPU, C++ for a CPU."""
    request, remedy = f"step.compile = 'blocks' on {device.type} needs", "or set step.compile = 'none'"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(f"{request} Triton, which is not here; install the triton package, {remedy}")
        language, variable, names = "C", "CC", [os.environ.get("CC"), "gcc", "clang"]
    else:
        from torch._inductor import config

        language, variable, names = "C++", "CXX", list(config.cpp.cxx)
    compilers = [name for name in names if name]
    if not any(map(shutil.which, compilers)):
        raise UserError(
            f"{request} a {language} compiler, and there is no {' or '.join(compilers)}; install one, or name another in "
            f"{variable}, {remedy}"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise UserError(f"{request} Python's headers, and there is no Python.h in {headers}; install python3-dev, {remedy}")


class Compiler:
    """Compiles blocks, and counts the programs. folder: a cache for the next start, unless the environment names another; one
    that is unreadable, or that others may write, is not used. attention: its kernels, by name. say: prints a line.

    programs: counts since `log_fields`, with those of skipped updates, by kind of block and the shape of its input.
    """

    def __init__(self, folder: Path, attention: str, say: Callable[[str], None]) -> None:
        self.say, self.programs = say, Counter[str]()
        self._temporary: tempfile.TemporaryDirectory | None = None
        folder = Path(USERS_FOLDER or folder).absolute()
        os.environ[FOLDER] = str(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if others_may_write(folder):
                self._use_temporary("others may write there, and it is run")
        except OSError as error:
            self._use_temporary(one_line(error))
        # A program calls the attention kernel that was set when it was traced; torch's own key does not contain it.
        torch.compiler.config.cache_key_tag = attention
        torch.compiler.reset()  # of an earlier run in this process
        dynamo, inductor = torch._dynamo.config, torch._inductor.config
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = LIMIT
        # Layers that share an input pass tensors on to each other within a block only.
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        inductor.fallback_random = True  # the same draws as without a compiler
        # The traces of such functions are part of a graph, and so of its key in the cache.
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True

    def compile(self, blocks: Mapping[str, nn.Module]) -> int:
        """Have these blocks compiled at their first training forward. Returns how many."""
        kinds = {type(block): partial(self._program, type(block).__name__) for block in blocks.values()}
        for block in blocks.values():
            for layer in block.modules():
                if hasattr(layer, "cast_bias"):
                    layer.cast_bias()  # kept from now on: a bias that samples cast later would make a further program
            block.forward = _trained_with(block.forward, kinds[type(block)])
        return len(blocks)

    def _program(self, kind: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        """Compile a graph, as a backend of torch.compile."""
        tokens = next((t for t in inputs if isinstance(t, torch.Tensor) and t.dim() == 3), None)
        self.programs[f"{kind} of {'?' if tokens is None else 'x'.join(map(str, tokens.shape))}"] += 1
        backend = torch._dynamo.lookup_backend("inductor")
        try:
            return backend(graph, inputs)
        except Exception as error:  # whatever torch raises for a damaged file
            self._use_temporary(f"it could not be used: {reason_of(error):.120}; delete it")
            return backend(graph, inputs)

    def _use_temporary(self, reason: str) -> None:
        """Compile into a temporary folder, which ends with this process."""
        text = f"compiled code in {os.environ[FOLDER]} counts as none ({reason})"
        self.say(f"warning: {text}: this start compiles it again, for itself alone")
        self._temporary = tempfile.TemporaryDirectory(prefix="compiled-")
        os.environ[FOLDER] = self._temporary.name

    def log_fields(self) -> dict[str, float]:
        """The log's entry: how many programs the step compiled. A line names them."""
        programs, self.programs = self.programs, Counter()
        if programs:
            self.say(f"compiled {', '.join(f'{count} x {kind}' if count > 1 else kind for kind, count in programs.items())}")
        return {"compiled": programs.total()}


@contextmanager
def programs_complete() -> Iterator[None]:
    """A context, as for recording a CUDA graph, in which a missing program raises RuntimeError in place of being compiled."""
    try:
        with torch.compiler.set_stance(REFUSED):
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
