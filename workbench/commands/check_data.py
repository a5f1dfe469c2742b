"""The data report of a config, without training: `scripts/data.py report`, and a part of `train.py --new`."""

from pathlib import Path

from trainer.base.console import write
from trainer.base.errors import UserError, number_in
from trainer.base.files import make_folder
from trainer.base.progress import Phases
from trainer.config import Config, with_values
from trainer.data.memo import Memo
from trainer.data.scan import refuse_damaged
from trainer.engine.components import without_modules
from trainer.engine.encoding import report_captions
from trainer.plan.data_sources import read_sources
from trainer.plan.requirements import family_options
from trainer.plan.run_plan import plan_data
from trainer.run.session import Session
from workbench.commands.ports import PORTS
from workbench.pages import data_report
from workbench.pages.rendering import write_page
from workbench.sources import LAYOUTS
from workbench.summary.data import data_lines


def data_page(config: Config, out: Path | None = None) -> Path:
    """The path of the data report."""
    return (out or Path(config.run.output_dir)) / "data_report.html"


def report_data(config: Config, out: Path | None = None, *, strict: bool = True) -> int:
    """Print the report, and write data_report.html to `out`, else to run.output_dir; returns how many captions strict mode
    would refuse. strict: print each of these, too. Reads photos and tokenizers, no weights. If files are damaged, the page
    names them and covers the other photos; then the UserError of a run is raised."""
    # Captions that strict mode refuses are counted here, not raised.
    config = with_values(config, {"data.strict_captions": False})
    session = Session.open(config, only="measure", ports=PORTS)
    config, source = session.config, session.source
    source.check_tokenizers()
    phases = Phases(show=True)
    scanned = read_sources(config, phases, Memo(layouts=LAYOUTS))
    if not scanned.photos:
        refuse_damaged(scanned)
    processes = number_in("WORLD_SIZE", 1, least=1)
    try:
        data, length = plan_data(config, source.family, processes=processes, phases=phases, scanned=scanned)
    except UserError:
        refuse_damaged(scanned)
        raise
    report = report_captions(data, source.family, without_modules(source, family_options(config, source.family)))
    lines = data_lines(config, data, length, reported=True)
    write(data_report.text(data, lines, report, strict=strict))
    page = data_page(config, out)
    make_folder(page.parent, "--out" if out else "run.output_dir")
    write_page(page, data_report.html(name=config.run.name, data=data_report.sections(data, lines, report, phases)))
    write(f"data report: {page}", whole=True)
    refuse_damaged(scanned)
    return len(data_report.strict_problems(data, report))
