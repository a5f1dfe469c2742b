"""Modules that hold several layers in the original layout (Flux's qkv, linear1), one layer's rows after another's."""

from collections.abc import Mapping, Sequence

from trainer.base.types import Link


def fused_modules(links: Sequence[Link]) -> list[Link]:
    """The modules behind a family's links of parameters, by their weights."""
    weights = [link for link in links if link.original.endswith(".weight")]
    return [
        Link(link.original.removesuffix(".weight"), tuple(part.removesuffix(".weight") for part in link.parts), link.op)
        for link in weights
    ]


def fused_with(adapted: Mapping[str, object], fused: Mapping[str, Sequence[Link]]) -> list[str]:
    """The layers without an adapter, by full name, that one module holds together with adapted ones.

    adapted: by full name.
    """
    names = []
    for component, modules in fused.items():
        for module in modules:
            parts = [f"{component}.{part}" for part in module.parts]
            absent = [name for name in parts if name not in adapted]
            names += absent if len(absent) < len(parts) else []
    return names
