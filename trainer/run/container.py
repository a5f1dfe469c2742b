"""Whether what a run writes outlives the container that it runs in."""

import os
import re
from pathlib import Path

IN_IMAGE = "TRAINER_IMAGE"  # set by docker/Dockerfile
MOUNTS = Path("/proc/self/mountinfo")
# The folder that is mounted where nobody chose one: of Docker and containerd for a VOLUME without a -v; Kubernetes' emptyDir.
UNNAMED = re.compile(r"/[0-9a-f]{64}(/_data)?$|/kubernetes\.io~empty-dir/")


def doubts(output: Path, name: str) -> list[str]:
    """A sentence where `output`, which the config calls `name`, may go with a container of this project's image; else
    none."""
    if IN_IMAGE not in os.environ:
        return []
    source, point, kind = _mount(output.resolve())
    if point == "/" or kind == "tmpfs":
        doubt = "is in the container and goes with it"
    elif UNNAMED.search(source):
        doubt = "is on a volume without a name, which goes with the container under docker run --rm or in Kubernetes"
    else:
        return []
    return [f'{name} {doubt}: mount a folder, as with docker run -v "$PWD/outputs:/outputs"']


def _mount(path: Path) -> tuple[str, str, str]:
    """(the folder that is mounted, where, the kind of its file system) of the innermost mount that `path` is on."""
    found = ("/", "/", "")
    for line in MOUNTS.read_text(encoding="utf-8").splitlines():
        fields, _, system = line.partition(" - ")
        source, point = (re.sub(r"\\([0-7]{3})", lambda c: chr(int(c[1], 8)), part) for part in fields.split()[3:5])
        # A later line covers an earlier one at the same place.
        if path.is_relative_to(point) and len(point) >= len(found[1]):
            found = (source, point, system.split()[0])
    return found
