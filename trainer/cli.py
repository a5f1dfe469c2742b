"""The command line: arguments in, exit status out.

0 done; 2 user error; 4 non-finite values; 5 out of memory; 6 storage; 143 / 130 after SIGTERM / SIGINT.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys

from trainer import signals
from trainer.errors import DataError, Interrupted, NonFiniteError, OutOfMemory, UserError

STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}


OUT_OF_MEMORY = (
    "out of memory: start a new run (another run.output_dir) with a lower data.batch_size or data.resolution, "
    "or with memory.gradient_checkpointing = true"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train.py", description="Fine-tune a LoRA or DoRA adapter for SDXL or Flux.", allow_abbrev=False
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="a TOML file, or the bare name of one in configs/"
    )
    parser.add_argument(
        "--resume_from", metavar="auto|latest|DIR", help="go on from a checkpoint; auto starts fresh where none exists"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a config key with a TOML value (a bare word is a string)",
    )  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="print what the run would do, and train nothing")
    chosen = parser.parse_args(arguments)
    signals.hold_save()
    quiet_libraries()
    # Importing the libraries makes millions of objects and no garbage; collecting meanwhile takes a sixth of the time to
    # the first step. run.train turns it on again.
    gc.disable()
    try:
        from trainer import config
        from trainer.run import plan, train

        loaded = config.load(chosen.config, [item for group in chosen.overrides for item in group])
        resume_from = chosen.resume_from and config.expand_home(chosen.resume_from, "--resume_from")
        if chosen.plan:
            plan(loaded)
        else:
            train(loaded, resume_from=resume_from)
    except UserError as error:
        return _fail(2, str(error))
    except NonFiniteError as error:
        return _fail(4, str(error))
    except OutOfMemory as error:
        return _fail(5, str(error))
    except DataError as error:
        return _fail(6, str(error))
    except Interrupted as error:
        return _fail(128 + error.signum, str(error))
    except KeyboardInterrupt:
        return _fail(130, "stopped at once")
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        return _fail(2, f"{error.filename}: {error.strerror}; give a path that this user may write to")
    except MemoryError:
        return _fail(5, OUT_OF_MEMORY)
    except OSError as error:
        if error.errno in STORAGE_ERRORS:
            return _fail(6, f"storage: {error}; free space or mend the disk, then start again with --resume_from auto")
        raise
    except RuntimeError as error:
        from trainer.memory import is_out_of_memory

        if str(error).startswith("DataLoader worker"):  # told by a signal, in the middle of whatever was done
            return _fail(6, f"{error}\nstart again with --resume_from auto; a lower data.num_workers needs less memory")
        if not is_out_of_memory(error):
            raise
        return _fail(5, f"{error}\n{OUT_OF_MEMORY}")
    finally:
        gc.enable()
    return 0


def _fail(status: int, message: str) -> int:
    lines = message.splitlines() or [""]
    print("\n".join([f"error: {lines[0]}", *(f"       {line}" for line in lines[1:])]), file=sys.stderr, flush=True)
    return status


def quiet_libraries() -> None:
    """Libraries' notices about what they could also do are not the user's business; errors still show."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
