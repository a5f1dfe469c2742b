"""Templates: text is escaped where it comes into HTML, and a name that is not given is an error."""

import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from workbench.pages.rendering import environment

NASTY = """<b>"it's" & more</b>"""


def filled(folder: Path, file: str, text: str, **values: str) -> str:
    (folder / file).write_text(text)
    return environment(folder).get_template(file).render(values)


def test_text_is_escaped_in_html_and_stays_as_it_is_elsewhere(tmp_path: Path) -> None:
    assert filled(tmp_path, "a.html", "<i>{{ said }}</i>", said=NASTY) == (
        "<i>&lt;b&gt;&#34;it&#39;s&#34; &amp; more&lt;/b&gt;</i>"
    )
    assert filled(tmp_path, "a.md", "{{ said }}", said=NASTY) == NASTY


@pytest.mark.parametrize(
    "text", ["{{ said }}", "{{ of.said }}", "{% if said %}x{% endif %}", "{% for x in said %}{% endfor %}"]
)
def test_a_name_that_is_not_given_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UndefinedError, match="said"):
        filled(tmp_path, "a.html", text, of="")


@pytest.mark.slow
def test_nothing_but_the_making_of_a_text_imports_the_library() -> None:
    """A run's start, --help and --plan make none."""
    code = "import sys, workbench.commands.main, workbench.watch.server; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
