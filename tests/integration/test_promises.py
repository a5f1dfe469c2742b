"""What documents and file headers promise of other programs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import trainer
from tests.harness import ROOT, command_line
from trainer.adapters import export
from trainer.adapters.portable import Factors, Portable, recipe


def test_no_document_gives_a_dora_file_to_sd_scripts() -> None:
    """It has no DoRA code. Every line that names it says which kind of file it means, or is about what it leaves out of a
    LoRA."""
    lines = [
        (path.name, line)
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        if path.name not in ("other_trainers.md", "import.md")  # its keys and its configs
        for line in path.read_text(encoding="utf-8").splitlines()
        if "sd-scripts" in line
    ]
    assert len(lines) >= 3
    of_a_lora = r"a LoRA also (in )?sd-scripts|of a LoRA, and no DoRA|sd-scripts leaves out|for_sd_scripts|sd-scripts' own"
    of_a_lora += r"|DoRA does not work in A1111, InvokeAI and sd-scripts|sd-scripts ignores it"
    of_a_lora += r"|sd-scripts \| LoRA \||sd-scripts \| yes \| no"
    for name, line in lines:
        assert re.search(rf"{of_a_lora}|not for sd-scripts|sd-scripts\*\* has no DoRA", line), (name, line)


@pytest.mark.parametrize(("dora", "module"), [(False, "networks.lora"), (True, "lycoris.kohya")])
def test_a_dora_files_header_does_not_name_sd_scripts_own_module(dora: bool, module: str) -> None:
    a, b, m = (recipe(torch.ones(shape)) for shape in ((4, 3), (5, 4), (5,)))
    adapter = Portable({"unet.a": Factors(a, b, 4.0, magnitude=m if dora else None)})
    about = export.About(
        name="bear", started="2025-01-01T00:00:00+00:00", step=1, epoch=1, learning_rate=1e-4, train_images=5,
        resolution="64x64", trigger_phrase="", seed=0, entries={}, dora_base="16 bit",
    )  # fmt: skip
    header = export.metadata(adapter, about, convention="magnitude")
    assert header["ss_network_module"] == module
    assert ("dora_wd" in header["ss_network_args"]) == dora


def test_every_file_that_a_document_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").glob("*.md")]
    folders = "trainer|scripts|benchmarks|proofs|pocket|tests|docs|docker|configs|examples"
    named = rf"(?:`|`?(?:python|bash) )((?:{folders})/[\w./-]+\.\w+)"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(named, text):
            assert "DATE" in name or (ROOT / name).exists(), f"{page.name} names {name}"
        for link in re.findall(r"\]\(([^)#:]+)\)|\b(?:src|srcset|href)=\"([^\"#:]+)\"", text):
            link = "".join(link)
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    """A bar in a cell is written `\\|`; else what is behind it is not shown."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").glob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for table in re.findall(r"^\|.*\n\|[-| :]+\n(?:\|.*\n?)*", text, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", row)): row for row in table.splitlines()}
            assert len(counts) == 1, f"{page.name}: {counts}"


def test_the_citation_and_the_badges_say_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["authors"] and cited["message"]
    assert (cited["version"], cited["license"]) == (trainer.__version__, project["license"])
    assert cited["title"].removeprefix("A reference") == project["description"].removeprefix("A reference fine-tuning")
    says = {
        "licence": project["license"],
        "python": f"{project['requires-python'].removeprefix('>=')} or newer",
        "version": trainer.__version__,
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, value in says.items():
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"<title>{name}: {value}</title>" in drawn and f">{value}</text>" in drawn
        assert f"![{name}: {value}](docs/pictures/{name}.svg)" in readme


@pytest.mark.proof
def test_the_share_that_sd_scripts_drops_is_what_the_commands_of_the_page_print(tmp_path: Path) -> None:
    """To a percent: the course of a training has the roundings of its CPU."""
    text = (ROOT / "docs" / "adapter_files.md").read_text(encoding="utf-8")
    counted = {}
    for line in re.findall(r"^    python train\.py (--config pocket_.*)", text.replace("\\\n", " "), re.MULTILINE):
        out = tmp_path / line.split("=")[-1].strip()
        said = command_line(*line.split(), f"run.output_dir={out}", timeout=600)
        assert said.returncode == 0, said.stderr
        counted[line.split()[1]] = int(re.search(r"(\d+)%\s+of\s+the\s+norm\s+of\s+the\s+update", said.stdout)[1])
    told = re.search(r"(\d+) % of the norm of its update .*\spocket SDXL, and (\d+) % with the pocket Flux", text, re.DOTALL)
    for config, share in zip(("pocket_sdxl.toml", "pocket_flux.toml"), told.groups(), strict=True):
        assert abs(counted[config] - int(share)) <= 1, counted
    # The changes of this version quote the same.
    assert f"drops of a LoRA ({told[1]} % and {told[2]} % with the pocket models)" in (ROOT / "CHANGELOG.md").read_text()


def test_what_the_readme_says_of_a_card_is_what_was_measured() -> None:
    """Beside its table, whose figures are compared by tests/unit/test_figures.py."""
    measured = json.loads((ROOT / "docs" / "benchmarks" / "GPU-2026-11-26.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    large, small = (
        next(
            cell["sides"]
            for cell in measured["steps"]["cells"].values()
            if (cell["cell"]["family"], cell["cell"]["pixels"], cell["cell"]["about"]) == ("Flux", pixels, "graphs and PEFT")
        )
        for pixels in (1024, 512)
    )
    whole, of_half = (sides["DoRA bf16, graphs"]["ms"] / sides["LoRA bf16, graphs"]["ms"] for sides in (large, small))
    eager, replayed = (100 * small[f"DoRA bf16, {way}"]["host_share"] for way in ("eager", "graphs"))
    for said in (
        f"## Measured on an {measured['device'].removeprefix('NVIDIA ')}",
        f"torch {'.'.join(measured['versions']['torch'].split('.')[:2])}, at commit {measured['commit'][:7]}.",
        f"a step of Flux takes {whole:.2f} times a LoRA's at 1024 px and {of_half:.2f} times at 512 px",
        f"had nothing to do in {eager:.0f} % of an eager step, in {replayed:.0f} % of one by CUDA graphs",
    ):
        assert said in readme, said
