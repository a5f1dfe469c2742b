"""What it costs to store a model's denoiser in fewer bits, before anything is trained.

    python scripts/audit.py MODEL --config my.toml
    python scripts/audit.py MODEL --config my.toml --formats fp8_e4m3 int8 nf4 int8:bitsandbytes --out audit

Photos, captions, resolution and held-out photos are those of the config; MODEL takes the place of its model.path. Each
format is compared with the base: the denoiser as the config stores it where that is not quantised, else in bf16. It says how
far each layer and all of them change the predictions and the held-out loss, and prints an `exclude` of the costliest layers
(docs/audit.md). FOLDER gets audit.html and audit.json.
Exit status: 0 done; 2 for a mistake in the arguments or the config, with the reason on stderr; 4 for values that are not
finite.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from trainer.base.errors import UserError  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402


def audit(chosen: argparse.Namespace) -> None:
    from trainer import config
    from trainer.base.console import write
    from trainer.base.files import check_folder, json_bytes, make_folder, write_atomic
    from trainer.base.progress import Phases
    from workbench.audit import page as audit_report
    from workbench.audit.audit import audit as audited
    from workbench.audit.audit import formats_named, plan_audit
    from workbench.pages.rendering import write_page

    if chosen.layers < 1:
        raise UserError(f"--layers {chosen.layers}: give a number of layers to exclude, at least 1")
    alone = chosen.layers if chosen.alone is None else chosen.alone
    if alone < 0:
        raise UserError(f"--alone {alone}: give a number of layers to measure one by one, 0 for none")
    check_folder(chosen.out, "--out")
    overrides = [item for group in chosen.overrides for item in group]
    if not any(item.startswith("precision.compute=") for item in overrides):
        # In 16 bits one changed weight redraws the roundings of all that follows it, and a fine format drowns in that.
        overrides.append("precision.compute=fp32")
    loaded = config.load(chosen.config, overrides)
    phases = Phases(show=True)
    plan = plan_audit(loaded, chosen.model, formats_named(chosen.formats), phases)
    found = audited(plan, chosen.out, most=chosen.layers, alone=alone, phases=phases)
    make_folder(chosen.out, "--out")
    write_atomic(chosen.out / "audit.json", [json_bytes(audit_report.numbers(found))])
    page = chosen.out / "audit.html"
    name = f"{found.denoiser} of {Path(found.model).name}"
    write_page(page, audit_report.html(found, name=name))
    write(audit_report.text(found), whole=True)
    if (peak := peak_bytes()) is not None:
        write(f"peak memory of this process: {peak / 2**30:.2f} GiB")
    write(f"audit: {page}", whole=True)


def peak_bytes() -> int | None:
    """The most that this process had resident; None where the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder, .safetensors file or hub id of the 16-bit model")
    parser.add_argument("--config", required=True, metavar="FILE", help="the config of the run")
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a key of the config",
    )  # fmt: skip
    parser.add_argument(
        "--formats", nargs="+", default=["fp8_e4m3", "int8", "nf4"], metavar="DTYPE[:BACKEND]",
        help="storage formats; default: fp8_e4m3 int8 nf4",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=10, metavar="N", help="how many to exclude; default: 10")
    parser.add_argument(
        "--alone", type=int, metavar="N", help="how many of the costliest are measured one by one; default: as --layers"
    )
    parser.add_argument("--out", type=Path, default=Path("audit"), metavar="FOLDER", help="default: audit")
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: audit(chosen))


if __name__ == "__main__":
    sys.exit(main())
