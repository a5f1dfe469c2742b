"""A local web server for the pages of runs and their comparison. It reads files and writes none."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from socketserver import TCPServer
from typing import IO
from urllib.parse import quote, unquote, urlsplit

from trainer.base.console import printable, write
from trainer.base.errors import UserError
from trainer.base.files import open_regular
from trainer.base.run_layout import Layout
from workbench.compare.page import RunFiles, compare, read_run
from workbench.pages.history import History
from workbench.pages.rendering import policy
from workbench.pages.thumbnails import Thumbnails

LOOPBACK = "127.0.0.1"
# Allowed Host headers. A foreign page whose domain is rebound to this address (DNS rebinding) has another one.
NAMES = {LOOPBACK, "localhost"}
# Content types of the files that are served from a run's folder, by suffix.
KINDS = {".html": "text/html; charset=utf-8", ".png": "image/png", ".safetensors": "application/octet-stream"}
KINDS |= dict.fromkeys((".jsonl", ".toml", ".md"), "text/plain; charset=utf-8")
# Timeouts: to send a request as a whole, and to accept each piece of an answer.
REQUEST_SECONDS, ANSWER_SECONDS = 10.0, 30.0
# A run's folder may come from anybody. Its files are shown without an origin, so that they can read no other page of this
# server; only the report's own script runs there. An adapter file is a download.
SANDBOX = "; sandbox allow-scripts allow-downloads"


class Runs:
    """The runs in some folders, or one folder below them. Content that was read is cached, and only extended."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{printable(folder)} is no folder; give a run's output_dir, or a folder of such folders")
        self.folders = [folder.resolve() for folder in folders]
        self._readers: dict[Path, tuple[History, Thumbnails]] = {}
        self._runs: dict[Path, RunFiles] = {}
        self._key: object = None
        self._page = b""
        self._lock = threading.Lock()

    def layouts(self) -> dict[str, Layout]:
        """The runs in or below the folders, each once, by a unique name: the folder's, or that of a link to it."""
        roots: dict[Path, str] = {}
        for folder in self.folders:
            candidates = [folder] if _is_run(folder) else [child for child in sorted(folder.iterdir()) if child.is_dir()]
            for root in filter(_is_run, candidates):
                roots.setdefault(root.resolve(), root.name)
        named: dict[str, Layout] = {}
        for root, name in roots.items():
            names = (name, *(f"{name}-{again}" for again in range(2, len(roots) + 1)))
            named[next(name for name in names if name not in named)] = Layout(root)
        return named

    def page(self) -> bytes:
        """The page of all runs; cached until a run has changed, or is silent for too long."""
        with self._lock:
            timestamp, (runs, unread) = time.time(), self.runs()
            key = runs, unread, [run.state(timestamp) for run in runs]
            if key != self._key:
                self._key, self._page = key, compare(runs, unread, timestamp).encode(errors="replace")
            return self._page

    def runs(self) -> tuple[list[RunFiles], dict[str, str]]:
        """(the runs, the reasons of those that could not be read, by name)."""
        runs, unread = [], {}
        for name, layout in self.layouts().items():
            root = layout.root
            try:
                run = read_run(name, layout, *self._readers.setdefault(root, (History(layout.metrics), Thumbnails())))
            except OSError as error:
                unread[name] = f"{error.strerror}: {error.filename}"
                continue
            if self._runs.get(root) != run:  # an unchanged one keeps its cached properties
                self._runs[root] = run
            runs.append(self._runs[root])
        return runs, unread


def _host(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def _is_run(folder: Path) -> bool:
    layout = Layout(folder)
    return layout.config.exists() or layout.metrics.exists()


class Until(io.RawIOBase):
    """A reader of a socket with one deadline, `seconds` from now, for all reads. Raises TimeoutError after that."""

    def __init__(self, line: socket.socket, seconds: float) -> None:
        self._line, self._end = line, time.monotonic() + seconds

    def readable(self) -> bool:
        """True, as Python's io requires."""
        return True

    def readinto(self, buffer) -> int:
        """Read available bytes into `buffer`; returns their number. Raises TimeoutError after the deadline."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._line.settimeout(remaining)
        return self._line.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD: / is the comparison, or the page of a single run; /NAME/... a file of the run NAME."""

    runs: Runs
    rfile: io.BufferedIOBase = io.BytesIO()  # until `setup`

    def setup(self) -> None:
        """Limit the time to read a request to REQUEST_SECONDS."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(Until(self.connection, REQUEST_SECONDS))

    def parse_request(self) -> bool:
        """Whether a request was read; the timeout is ANSWER_SECONDS from here on."""
        parsed = super().parse_request()
        self.connection.settimeout(ANSWER_SECONDS)
        return parsed

    def do_GET(self) -> None:
        """Answer with a page, or with a file of a run."""
        if _host(self.headers.get("Host", "")) not in NAMES:
            return self._text(HTTPStatus.FORBIDDEN, f"This server answers to http://{LOOPBACK} and http://localhost alone.")
        named = self.runs.layouts()
        name, _, rest = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if not name:
            if len(named) == 1:
                return self._to_report(*next(iter(named.items())))
            return self._send(self.runs.page())
        if name not in named or "\0" in rest:
            return self._text(HTTPStatus.NOT_FOUND, "There is no such run.")
        if not rest:
            return self._to_report(name, named[name])
        self._file(named[name], PurePosixPath(rest))

    do_HEAD = do_GET

    def _file(self, layout: Layout, name: PurePosixPath) -> None:
        path = Path(os.path.realpath(layout.root / name))  # Path.resolve raises for a link that leads to itself
        if not path.is_relative_to(layout.root) or path.suffix not in KINDS or any(p.startswith(".") for p in name.parts):
            return self._text(HTTPStatus.NOT_FOUND, "There is no such file.")
        try:
            file = open_regular(path)
        except OSError:  # no file, no regular file, or an impossible name
            message = "The report is not written yet." if path == layout.report else "There is no such file."
            return self._text(HTTPStatus.NOT_FOUND, message)
        with file:
            self._answer(HTTPStatus.OK, KINDS[path.suffix], file, os.fstat(file.fileno()).st_size, SANDBOX)

    def _send(self, page: bytes, status: HTTPStatus = HTTPStatus.OK, kind: str = KINDS[".html"]) -> None:
        self._answer(status, kind, io.BytesIO(page), len(page))

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(f"{text}\n".encode(), status, KINDS[".md"])

    def _to_report(self, name: str, layout: Layout) -> None:
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", f"/{quote(name)}/{layout.report.name}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, status: HTTPStatus, kind: str, body: IO[bytes], length: int, sandbox: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'{sandbox}")
        self.end_headers()
        if self.command != "HEAD":  # in pieces: the timeout holds for each, and a slow line may take long for all
            shutil.copyfileobj(body, self.wfile)

    def log_message(self, format: str, *arguments: object) -> None:
        """No message: each page asks again every few seconds."""


class Server(ThreadingHTTPServer):
    """The server of all runs' pages, on this machine alone."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's name, which takes seconds without a name server."""
        TCPServer.server_bind(self)

    def __init__(self, runs: Runs, port: int) -> None:
        try:
            super().__init__((LOOPBACK, port), type("Handler", (Handler,), {"runs": runs}))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UserError(f"--port {port} cannot be used ({error.strerror}); give another one, or 0 for any") from None
        except OverflowError:
            raise UserError(f"--port {port} is no port; give one from 0 (any) to 65535") from None

    @property
    def address(self) -> str:
        """The address to open."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that disconnects during an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(folders: Sequence[Path], port: int) -> None:
    """Serve the runs below the folders until Ctrl-C. Raises UserError if one is no folder, or the port is not free."""
    runs = Runs(folders)
    with Server(runs, port) as server:
        names = ", ".join(map(printable, runs.layouts())) or "none yet"
        write(f"{server.address}  (runs: {names}; Ctrl-C ends)")
        server.serve_forever()
