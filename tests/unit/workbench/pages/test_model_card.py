"""The model card names no base that it does not know, and replaces nothing that a person wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.pages import model_card
from workbench.pages.model_card import base_model, code, is_own

HUB = SimpleNamespace(hub_id="a/model")


@pytest.mark.parametrize(
    ("repository", "overrides", "given", "base"),
    [
        (HUB, {}, None, "a/model"), (None, {}, None, None), (HUB, {"vae": "other"}, None, None),
        (None, {}, "b/base", "b/base"), (HUB, {"vae": "other"}, "b/base", "b/base"),
    ],
)  # fmt: skip
def test_a_base_is_named_only_where_it_is_known(repository: Any, overrides: Any, given: Any, base: Any) -> None:
    """A folder has no name that anybody could load, and a repository whose VAE was replaced is not what was trained on."""
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(export=SimpleNamespace(base_model=given)),
        model=SimpleNamespace(source=SimpleNamespace(repository=repository, overrides=overrides)),
    )
    assert base_model(plan) == base


def test_a_card_that_somebody_changed_is_not_the_run_s(tmp_path: Path) -> None:
    card, said = tmp_path / "README.md", "# bear\n\nA LoRA.\n"
    whole = f"{said}{model_card._seal(said)}"
    card.write_text(whole)
    assert is_own(card)
    for changed in (whole.replace("A LoRA", "My LoRA"), whole + "more\n", "before\n" + whole, said, "", whole[:-9]):
        card.write_text(changed)
        assert not is_own(card), changed
    card.write_bytes(b"\xff" + whole.encode())
    assert not is_own(card)


@pytest.mark.parametrize(
    ("value", "written"), [("sks", "`sks`"), ("a\nb", "`a b`"), ("a `b`", "`` a `b` ``"), ("``", "``` `` ```")]
)
def test_a_prompt_stays_code_whatever_is_in_it(value: str, written: str) -> None:
    assert code(value) == written
