"""kohya's folders: `10_sks dog` holds photos of "sks dog", with 10 repeats."""

import os
import re

# Four digits are probably a year, and a leading zero a running number.
NAME = re.compile(r"([1-9][0-9]{0,2})_\s*(\S.*?)\s*(\.tar)?")  # an archive is a folder, too

LARGE = re.compile(r"(?<![^/])(?!(19|20)\d\d_)[1-9]\d{3,}_\s*[^\s/]")  # more digits, and no year


def folder_of(root: str, folder: str) -> tuple[str, int, str] | None:
    """(name, repeats, words) of the innermost kohya folder around the files of `folder`, a folder within `root`."""
    around = [os.path.basename(os.path.abspath(root)), *folder.split("/")[:-1]]
    for name in reversed(around):
        match = NAME.fullmatch(name)
        if match:
            return name, int(match[1]), match[2]
    return None
