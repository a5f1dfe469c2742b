"""Tools for a run's data.

    python scripts/data.py report --config my.toml              # what a run would train on; writes data_report.html
    python scripts/data.py cache --folder outputs/bear/cache    # size of the cache of encoded photos and captions
    python scripts/data.py cache --config my.toml --prune --limit 20GB --older_than 30d --dry_run

Exit status: 0 done; 3 if strict mode (data.strict_captions) would refuse a caption;
2 for a mistake in the arguments or the config, or for damaged files, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from trainer.base.errors import UserError  # noqa: E402
from trainer.base.files import parse_size  # noqa: E402
from workbench.commands.tools import run_tool  # noqa: E402


def report(chosen: argparse.Namespace) -> int:
    """Print what a run of this config would train on, and write data_report.html (workbench/commands/check_data.py)."""
    from trainer import config
    from workbench.commands.check_data import report_data

    return (
        3
        if report_data(config.load(chosen.config, [item for group in chosen.overrides for item in group]), chosen.out)
        else 0
    )


def cache(chosen: argparse.Namespace) -> None:
    """Print the size of a cache; with --prune delete entries, but none that is in use.

    Without --prune, and with --dry_run, nothing is written.
    """
    from trainer.base.run_layout import Layout, in_use
    from trainer.base.tensorfile import size_text
    from trainer.data.cache import pruning

    limit = given(parse_size, chosen.limit, "--limit")
    older_than = given(pruning.parse_age, chosen.older_than, "--older_than")
    if chosen.prune and limit is None and older_than is None:
        raise UserError("--prune needs --limit SIZE, --older_than AGE, or both")
    if not chosen.prune and (limit, older_than, chosen.dry_run) != (None, None, False):
        raise UserError("--limit, --older_than and --dry_run belong to --prune")
    folder = chosen.folder or folder_of(chosen.config, chosen.overrides)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, so there is no cache")
    if not is_cache(folder):
        inside = Layout(folder).cache
        hint = f"did you mean {inside}?" if is_cache(inside) else "give data.cache_dir of a run, or OUTPUT_DIR/cache"
        raise UserError(f"{folder} is not a cache: it has no entries, and no run has used it; {hint}")
    if chosen.prune and not chosen.dry_run:
        since = pruning.require_locks(pruning.Use(folder), str(folder))
    else:
        since = pruning.look(folder)
    if since is None and chosen.prune:
        raise UserError(f"{folder}: it is unknown which entries are in use: {in_use(folder)} cannot be opened")
    wanted = {"limit": limit, "older_than": older_than} if chosen.prune else {}
    done = pruning.prune(
        folder, pruning.NOBODY if since is None else since, dry_run=True if not chosen.prune else chosen.dry_run, **wanted
    )
    used = "it is unknown which of them are in use" if since is None else f"{done.in_use} in use by runs"
    print(f"{folder}: {len(done.entries)} files of entries, {size_text(pruning.size(done.entries))}; {used}")
    if not chosen.prune:
        return
    if chosen.dry_run:
        for entry in done.deleted:
            print(f"  {entry.path}  {size_text(entry.bytes)}, last used {pruning.date(entry)}")
    would = "would be deleted" if chosen.dry_run else "deleted"
    print(f"{len(done.deleted)} files {would}, {size_text(pruning.size(done.deleted))}; {size_text(done.left_bytes)} left")
    if limit is not None and done.left_bytes > limit:
        print(f"this is more than --limit {chosen.limit}: the rest is in use")


def is_cache(folder: Path) -> bool:
    from trainer.base.run_layout import in_use
    from trainer.data.cache import pruning

    return in_use(folder).exists() or next(pruning.entries(folder), None) is not None


def given(parse, text: str | None, argument: str):
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{argument} {text}: {error}") from error


def folder_of(config_file: str, overrides: list[list[str]]) -> Path:
    """The cache of the runs that this config starts."""
    from trainer import config
    from trainer.base.run_layout import Layout

    loaded = config.load(config_file, [item for group in overrides for item in group])
    return Path(loaded.data.cache_dir or Layout(Path(loaded.run.output_dir)).cache)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="what a run would train on, as text and as a page")
    command.set_defaults(run=report)
    command.add_argument("--config", required=True, metavar="FILE", help="the config of the run")
    command.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a key of the config",
    )  # fmt: skip
    command.add_argument("--out", type=Path, metavar="FOLDER", help="where data_report.html goes; default: run.output_dir")
    command = commands.add_parser("cache", help="the size of the cache; --prune makes it smaller")
    command.set_defaults(run=cache)
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path, metavar="DIR", help="data.cache_dir of a run, or OUTPUT_DIR/cache")
    where.add_argument("--config", metavar="FILE", help="the config of a run that uses it")
    command.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="table.key=VALUE",
        help="override a key of the config",
    )  # fmt: skip
    command.add_argument("--prune", action="store_true", help="delete entries, the least recently used first")
    command.add_argument("--limit", metavar="SIZE", help='the size to keep, for example "20GB"')
    command.add_argument(
        "--older_than", metavar="AGE", help='delete entries that no run used for this long: "12h", "30d", "8w"'
    )
    command.add_argument("--dry_run", action="store_true", help="only list what would be deleted")
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
