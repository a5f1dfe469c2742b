"""A stand-in for the hub on the loopback that takes uploads: as much of its HTTP interface as huggingface_hub asks for.

Large files go through git LFS: asked for in a batch, put, verified, and named in the commit by their SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from tests.hub import served


@dataclass
class Uploads:
    """repositories: by id, files by their paths; visibility: of each. token: that may write, under `user`.

    refused: what is wrong with the metadata of a README.md; "" where it is taken. lose: of each stored object the last byte.
    """

    token: str = "hf_write"
    user: str = "me"
    refused: str = ""
    lose: bool = False
    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)

    def use(self, monkeypatch, token: str) -> None:
        """For this process: huggingface_hub read its environment when it was imported."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def serve(**faults: Any) -> Iterator[Uploads]:
    hub = Uploads(**faults)
    with served(_Handler, hub) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Uploads
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while count := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def say(self, tree: Any, status: int = 200, code: str = "") -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self, hub_id: str) -> bool:
        """Says why not."""
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.say({"error": "Invalid credentials"}, 401)
        elif not hub_id.startswith(f"{self.hub.user}/"):
            self.say({"error": "You don't have the rights"}, 403)
        else:
            return True
        return False

    def do_GET(self) -> None:
        hub_id = unquote(urlparse(self.path).path).removeprefix("/api/models/")
        if hub_id not in self.hub.repositories:
            return self.say({"error": "Repository not found"}, 404, "RepoNotFound")
        if self.allowed(hub_id):
            self.say({"id": hub_id, "private": self.hub.visibility[hub_id] == "private", "siblings": []})
        return None

    def do_PUT(self) -> None:
        data, sha256 = self.body(), self.path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() != sha256:
            return self.say({"error": "BadDigest"}, 400)
        self.hub.stored[sha256] = data[:-1] if self.hub.lose else data
        return self.say({})

    def do_POST(self) -> None:
        hub, path, data = self.hub, unquote(urlparse(self.path).path), self.body()
        if path == "/api/validate-yaml":
            return self.say({"errors": [{"message": hub.refused}]}, 400) if hub.refused else self.say({"errors": []})
        if path == "/api/repos/create":
            asked = json.loads(data)
            hub_id = f"{asked['organization']}/{asked['name']}"
            if self.allowed(hub_id):
                known = hub_id in hub.repositories
                hub.repositories.setdefault(hub_id, {})
                hub.visibility.setdefault(
                    hub_id, asked.get("visibility") or ("private" if asked.get("private") else "public")
                )
                self.say({"url": f"{hub.url}/{hub_id}"} | ({"error": "exists"} if known else {}), 409 if known else 200)
            return None
        if path == "/verify":
            asked = json.loads(data)
            whole = len(hub.stored.get(asked["oid"], b"")) == asked["size"]
            return self.say({}) if whole else self.say({"error": "size differs"}, 400)
        found = re.fullmatch(
            r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git/info/lfs/objects/(batch)|/(preupload|commit|paths-info)/main)", path
        )
        if found is None or found[1] not in hub.repositories:
            return self.say({"error": "Repository not found"}, 404)
        if not self.allowed(found[1]):
            return None
        return getattr(self, (found[2] or found[3]).replace("-", "_"))(found[1], data)

    def paths_info(self, hub_id: str, data: bytes) -> None:
        asked, files = parse_qs(data.decode())["paths"], self.hub.repositories[hub_id]
        blobs = {path: hashlib.sha1(f"blob {len(files[path])}\0".encode() + files[path]) for path in asked if path in files}
        self.say(
            [{"type": "file", "path": path, "size": len(files[path]), "oid": b.hexdigest()} for path, b in blobs.items()]
        )

    def preupload(self, hub_id: str, data: bytes) -> None:
        """Which files are large."""
        modes = {
            path: "regular" if path.endswith(".md") else "lfs" for path in (f["path"] for f in json.loads(data)["files"])
        }
        self.say({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]})

    def batch(self, hub_id: str, data: bytes) -> None:
        objects = []
        for asked in json.loads(data)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}, "verify": {"href": f"{self.hub.url}/verify"}}
            objects.append(asked | ({} if asked["oid"] in self.hub.stored else {"actions": actions}))
        self.say({"transfer": "basic", "objects": objects})

    def commit(self, hub_id: str, data: bytes) -> None:
        lines = [json.loads(line) for line in data.splitlines()]
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"], validate=True)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    return self.say({"error": "an object is missing"}, 400)
                files[value["path"]] = self.hub.stored[value["oid"]]
        self.hub.repositories[hub_id] |= files
        self.hub.commits.append((lines[0]["value"]["summary"], sorted(files)))
        oid = hashlib.sha1(data).hexdigest()
        return self.say({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{hub_id}/commit/{oid}"})
