"""Which photos' loss is measured, and what is known of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from trainer.engine.held_out_loss import _fields
from trainer.plan.fixed_draws import copies


def test_each_held_out_photo_has_its_own_mean_in_all_its_sizes_and_none_where_it_is_not_finite() -> None:
    """Photo a has two sizes, so two places; what is trained has none."""
    owners = [(kind, photo) for kind, photo in (("held_out", "a"), ("held_out", "b"), ("held_out", "a"), ("trained", "c"))
              for _ in range(4)]  # fmt: skip
    errors = [1.0, 2.0, 3.0, 4.0, *[6.0] * 4, 5.0, 6.0, 7.0, 8.0, *[9.0] * 4]
    found = _fields(owners, errors)
    assert found["held_out_by_photo"] == {"a": 4.5, "b": 6.0} and found["held_out_loss"] == 5.0
    assert _fields(owners, [math.nan, *errors[1:]])["held_out_by_photo"] == {"a": None, "b": 6.0}
    assert "held_out_by_photo" not in _fields(owners[12:], errors[12:])


def test_copies_are_held_out_photos_with_a_twin_that_is_trained_on() -> None:
    def example(name: str) -> SimpleNamespace:
        return SimpleNamespace(photo=SimpleNamespace(sample=name))

    a, b, c, d, e = map(example, "abcde")
    alike = ((a.photo, b.photo), (c.photo, d.photo, e.photo))
    plan: Any = SimpleNamespace(held_out=(b, c, d), measured={"held_out": (b, c)}, alike=alike)
    assert copies(plan) == 2  # b has a, c has e; d is held out and not measured
    plan = SimpleNamespace(held_out=(c, d, e), measured={"held_out": (c, d, e)}, alike=alike)
    assert copies(plan) == 0  # twins among themselves
