"""How adapter files write the names of layers: data that belong to the model families, and that the readers of files use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.base.types import Link


@dataclass(frozen=True)
class KeyStyle:
    """How one kind of adapter file writes the name of a component's layer: `prefix`, then the name.

    convention: whose files have it, as people call it. original: names of the original layout, where several layers may be
    one module; else the library's. flat: with underscores for dots. links: modules of the original layout -> those that the
    style has, where they are others.
    """

    convention: str
    component: str
    prefix: str
    original: bool = False
    flat: bool = False
    links: Callable[[Sequence[Link]], Iterator[Link]] | None = None

    def key(self, name: str) -> str:
        """The stem of a layer's keys in a file of this style. name: the layer's, dotted, without its component."""
        return self.prefix + (name.replace(".", "_") if self.flat else name)


def separate(links: Sequence[Link]) -> Iterator[Link]:
    """The layers of modules that hold several, numbered behind the module's name: `img_attn.qkv.0`."""
    for link in links:
        if len(link.parts) > 1:
            yield from (Link(f"{link.original}.{index}", (part,)) for index, part in enumerate(link.parts))
