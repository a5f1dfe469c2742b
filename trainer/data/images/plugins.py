"""Decoders that this project does not install, since their licences demand more than its own. Uses them if installed."""

import importlib.util
from dataclasses import dataclass

from trainer.data.images import jxl

# The brands that pillow-heif opens; those of AVIF (avif, avis) are Pillow's own.
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")


@dataclass(frozen=True)
class Plugin:
    """A package for a format that Pillow alone does not decode. kind: the usual name of the format. package: for pip.
    module: for import."""

    kind: str
    package: str
    module: str
    licence: str

    @property
    def lacks(self) -> str:
        """Why its images are not read, with the remedy; "" if it is installed."""
        if importlib.util.find_spec(self.module) is not None:
            return ""
        return f"{self.kind} needs {self.package}: pip install {self.package} ({self.licence}), or convert it to PNG or JPEG"


PLUGINS = {
    "HEIF": Plugin("HEIC", "pillow-heif", "pillow_heif", "its wheels hold x265, GPL-2.0"),
    "JXL": Plugin("JPEG XL", "pillow-jxl-plugin", "pillow_jxl", "GPL-3.0-or-later"),
}


def lacking() -> dict[str, str]:
    """`Plugin.lacks` of each format (kinds.IMAGES) whose plug-in is not installed."""
    return {format: plugin.lacks for format, plugin in PLUGINS.items() if plugin.lacks}


def format_of(data: bytes) -> str | None:
    """The format whose plug-in an image needs, by its first bytes; None if it needs none."""
    if jxl.is_jxl(data):
        return "JXL"
    return "HEIF" if data[4:8] == b"ftyp" and data[8:12] in HEIF_BRANDS else None


def load(format: str) -> str:
    """Register the plug-in with Pillow; returns `Plugin.lacks`. One thread a photo: several photos are decoded at once."""
    lacks = PLUGINS[format].lacks
    if lacks:
        return lacks
    if format == "JXL":
        from pillow_jxl import JpegXLImagePlugin  # registers itself

        JpegXLImagePlugin.DECODE_THREADS = 1
    else:
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return ""
