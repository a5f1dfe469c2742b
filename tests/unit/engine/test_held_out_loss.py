"""Which photos' loss is measured, and what is known of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainer.plan.fixed_draws import copies


def test_copies_are_held_out_photos_with_a_twin_that_is_trained_on() -> None:
    def example(name: str) -> SimpleNamespace:
        return SimpleNamespace(photo=SimpleNamespace(sample=name))

    a, b, c, d, e = map(example, "abcde")
    alike = ((a.photo, b.photo), (c.photo, d.photo, e.photo))
    plan: Any = SimpleNamespace(held_out=(b, c, d), measured={"held_out": (b, c)}, alike=alike)
    assert copies(plan) == 2  # b has a, c has e; d is held out and not measured
    plan = SimpleNamespace(held_out=(c, d, e), measured={"held_out": (c, d, e)}, alike=alike)
    assert copies(plan) == 0  # twins among themselves
