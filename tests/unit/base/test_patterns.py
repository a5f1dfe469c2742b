"""What is said of a pattern that matches no layer."""

from __future__ import annotations

import pytest

from trainer.base.patterns import advice

NAMES = [
    f"down_blocks.{i}.attentions.0.transformer_blocks.0.{layer}"
    for i in range(2)
    for layer in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.2")
] + ["time_embedding.linear_1"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*to_qq*", "did you mean '*to_q*' (2 layers)?"),
        ("*.atn1.to_v", "did you mean '*.attn1.to_v' (2 layers)?"),
        ("to_k", "did you mean '*to_k' (2 layers)?"),
        ("attn1", "did you mean '*.attn1.*' (8 layers)?"),
        ("tn1.to_", "did you mean '*tn1.to_*' (8 layers)?"),
        ("time_embedding_linear_1", "near misses: time_embedding.linear_1"),
        ("*qkv*", f"layers have names like {', '.join(NAMES[:3])}"),
    ],
)
def test_advice_names_what_matches_or_what_there_is(pattern: str, expected: str) -> None:
    assert advice(pattern, NAMES) == expected


def test_advice_is_never_the_pattern_itself() -> None:
    for pattern in ("*to_qq*", "*", "**", "[", "*?", "to_qq", "*.to_qq.*", "*qkv*"):
        assert repr(pattern) not in advice(pattern, NAMES if pattern.strip("*") else [])
