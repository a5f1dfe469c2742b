"""The kinds of files in a source, by name. This is the only table of image formats; `images` checks the bytes."""

# The decoder's format, by suffix.
IMAGES = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".jpe": "JPEG", ".jfif": "JPEG",
    ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP", ".dib": "BMP", ".gif": "GIF", ".tif": "TIFF", ".tiff": "TIFF",
    ".avif": "AVIF", ".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF", ".jxl": "JXL",
}  # fmt: skip

# Images that are not read; they have to be converted.
UNREAD_IMAGES = frozenset({
    ".psd", ".psb", ".xcf", ".kra", ".svg", ".eps", ".ai", ".ico", ".tga", ".exr", ".hdr", ".jp2", ".j2k", ".jxr", ".ppm",
    ".pgm", ".pnm", ".pcx", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw",
})  # fmt: skip

VIDEOS = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".wmv", ".mpg", ".mpeg"})

# If an image has several, the first is used.
JSON = ".json"
CAPTIONS = (".txt", ".caption", JSON)
MASK_ENDINGS = (".mask.png", "-masklabel.png")
# Endings of masks where an image has the rest of the name, and they have no caption of their own.
PROBABLE_MASK_ENDINGS = tuple(
    word + suffix
    for word in (".mask", "-masklabel", "_masklabel", "-mask", "_mask")
    for suffix in IMAGES
    if word + suffix not in MASK_ENDINGS
)

# Metadata files. In a folder they are named `metadata`.
TABLES = (".jsonl", ".csv", ".parquet")
