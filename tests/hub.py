"""A stand-in for the hub on the loopback: as much of its HTTP interface as huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch
from huggingface_hub import close_session

from trainer.base.tensorfile import TensorFile, write_tensors

PIECE_BYTES = 16384


@dataclass
class Hub:
    """Repositories by id, each a folder. What the hub does wrong is set by the test, also while it runs.

    gated: needs this token. drop_after: every answer with weights is cut off after so many bytes. pause: seconds after each
    piece of PIECE_BYTES of weights. flip: weights arrive with another first byte.
    more: bytes that follow each file of weights. page: what it answers in place of a listing.
    ranges: whether a file is given from its middle.
    asked: (method, path, first byte) of every request for a file.
    """

    repositories: dict[str, Path]
    gated: str | None = None
    drop_after: int | None = None
    pause: float = 0.0
    flip: bool = False
    more: int = 0
    page: bytes = b""
    ranges: bool = True
    url: str = ""
    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    earlier: dict[tuple[str, str], tuple[Path, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    @cached_property
    def listings(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {hub_id: _listing(folder) for hub_id, folder in self.repositories.items()}

    def commit(self, hub_id: str) -> str:
        return hashlib.sha1(json.dumps(self.listings[hub_id], sort_keys=True).encode()).hexdigest()

    def push(self, hub_id: str, folder: Path) -> None:
        """A new commit; the one before can still be had by its name."""
        self.earlier[hub_id, self.commit(hub_id)] = self.repositories[hub_id], self.listings[hub_id]
        self.repositories[hub_id], self.listings[hub_id] = folder, _listing(folder)

    def tag(self, hub_id: str, name: str) -> None:
        """Give the newest commit a name."""
        self.tags[hub_id, name] = self.commit(hub_id)

    def at(self, hub_id: str, revision: str | None) -> tuple[Path, dict[str, dict[str, Any]], str] | None:
        """(folder, listing, commit); None where there is no such branch, tag or commit."""
        revision = self.tags.get((hub_id, revision), revision)
        if (hub_id, revision) in self.earlier:
            return *self.earlier[hub_id, revision], revision
        commit = self.commit(hub_id)
        return (self.repositories[hub_id], self.listings[hub_id], commit) if revision in (None, "main", commit) else None

    def weights_sent(self) -> list[str]:
        """The weight files that were asked for, each once."""
        return sorted({path for method, path, _ in self.asked if method == "GET" and path.endswith(".safetensors")})

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a command line that knows only this hub."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1", **more,
        }  # fmt: skip

    def use(self, monkeypatch, home: Path) -> None:
        """For this process: huggingface_hub read its environment when it was imported."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            large = hashlib.sha256(data).hexdigest() if path.suffix in (".safetensors", ".bin") else None
            files[path.relative_to(folder).as_posix()] = {"size": len(data), "git": git, "sha256": large}
    return files


@contextmanager
def serve(repositories: Mapping[str, Path], **faults: Any) -> Iterator[Hub]:
    hub = Hub(dict(repositories), **faults)
    with served(_Handler, hub) as hub.url:
        yield hub


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], hub: object) -> Iterator[str]:
    """The URL of a server on the loopback, whose handlers have `hub`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        close_session()  # its connections would still be answered


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # the other side went away
            super().handle()

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlparse(self.path).path
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path):
            hub_id, what, revision = (part and unquote(part) for part in found.groups())
            if hub_id not in self.hub.repositories:
                return self.refuse(404, "RepoNotFound")
            if self.hub.at(hub_id, revision) is None:
                return self.refuse(404, "RevisionNotFound")
            return self.say(self.tree(hub_id, revision) if what == "tree" else self.info(hub_id, revision))
        if found := re.fullmatch(r"/([^/]+/[^/]+?)/resolve/([^/]+)/(.+)", path):
            hub_id, revision, name = map(unquote, found.groups())
            if hub_id not in self.hub.repositories:
                return self.refuse(404, "RepoNotFound")
            if self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.gated}":
                return self.refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
            if self.hub.at(hub_id, revision) is None:
                return self.refuse(404, "RevisionNotFound")
            if name not in self.hub.at(hub_id, revision)[1]:
                return self.refuse(404, "EntryNotFound")
            return self.file(hub_id, revision, name)
        return self.refuse(404, "EntryNotFound")

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def say(self, tree: Any) -> None:
        data = self.hub.page or json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def info(self, hub_id: str, revision: str | None) -> dict[str, Any]:
        siblings = []
        _, listing, commit = self.hub.at(hub_id, revision)
        for path, file in listing.items():
            lfs = {"lfs": {"sha256": file["sha256"], "size": file["size"], "pointerSize": 134}} if file["sha256"] else {}
            siblings.append({"rfilename": path, "size": file["size"], "blobId": file["git"], **lfs})
        return {
            "id": hub_id, "modelId": hub_id, "sha": commit, "private": False,
            "gated": "auto" if self.hub.gated else False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings,
        }  # fmt: skip

    def tree(self, hub_id: str, revision: str | None) -> list[dict[str, Any]]:
        entries = []
        for path, file in self.hub.at(hub_id, revision)[1].items():
            lfs = {"lfs": {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}} if file["sha256"] else {}
            entries.append({"type": "file", "path": path, "size": file["size"], "oid": file["git"], **lfs})
        return entries

    def file(self, hub_id: str, revision: str, name: str) -> None:
        hub = self.hub
        folder, listing, commit = hub.at(hub_id, revision)
        file, data = listing[name], (folder / name).read_bytes()
        start = int(found[1]) if (found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        start, asked = (start, "Range" in self.headers) if hub.ranges else (0, False)
        hub.asked.append((self.command, name, start))
        if start >= len(data) > 0:
            return self.refuse(416, "Range")
        self.send_response(206 if asked else 200)
        etag = file["sha256"] or file["git"]
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        more = hub.more if name.endswith(".safetensors") else 0
        self.send_header("Content-Length", str(len(data) + more - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        weights = name.endswith(".safetensors")
        if hub.flip and weights and start == 0:
            data = bytes([data[0] ^ 1]) + data[1:]
        data += b"x" * more
        body = data[start:]
        for place in range(0, len(body), PIECE_BYTES):
            if weights and hub.drop_after is not None and place >= hub.drop_after:
                self.close_connection = True
                return
            self.wfile.write(body[place : place + PIECE_BYTES])
            if weights and hub.pause:
                self.wfile.flush()
                time.sleep(hub.pause)


def with_variants(model: Path, target: Path, components: tuple[str, ...] = ()) -> Path:
    """A copy of a diffusers folder whose plain weights are fp32, with fp16 variants of `components` (all of them) beside.

    Not what the plain files hold: the fp16 ones are halved, so that it shows which were read.
    """
    shutil.copytree(model, target)
    for path in sorted(target.rglob("*.safetensors")):
        tensors = TensorFile(path).read_all()
        path.unlink()
        write_tensors(path, {name: tensor.float() for name, tensor in tensors.items()})
        if not components or path.parent.name in components:
            variant = path.with_name(f"{path.stem}.fp16.safetensors")
            write_tensors(variant, {name: (tensor / 2).to(torch.float16) for name, tensor in tensors.items()})
    return target


def split(file: Path) -> None:
    """A file of weights as two shards and their index, as the libraries name them."""
    tensors = TensorFile(file).read_all()
    stem, _, variant = file.stem.partition(".")
    middle = f".{variant}" if variant else ""
    names = sorted(tensors)
    parts = {1: names[::2], 2: names[1::2]}
    shards = {number: f"{stem}{middle}-{number:05}-of-00002.safetensors" for number in parts}
    for number, held in parts.items():
        write_tensors(file.with_name(shards[number]), {name: tensors[name] for name in held})
    weight_map = {name: shards[number] for number, held in parts.items() for name in held}
    index = file.with_name(f"{stem}.safetensors.index{middle}.json")
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    file.unlink()
