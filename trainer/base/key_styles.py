"""How adapter files write the names of layers: data that belong to the model families, and that the readers of files use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KeyStyle:
    """How one kind of adapter file writes the name of a component's layer: `prefix`, then the name.

    convention: whose files have it, as people call it. original: names of the original layout, where several layers may be
    one module; else the library's. flat: with underscores for dots.
    """

    convention: str
    component: str
    prefix: str
    original: bool = False
    flat: bool = False

    def key(self, name: str) -> str:
        """The stem of a layer's keys in a file of this style. name: the layer's, dotted, without its component."""
        return self.prefix + (name.replace(".", "_") if self.flat else name)
