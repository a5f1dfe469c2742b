"""A stand-in for S3 on the loopback: moto's server in a process of its own, and a proxy that does what networks do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlparse

from tests.hub import served

BUCKET = "bucket"
KEY, SECRET = "AKIAMOTOSTESTKEY", "sesame/open+the/door/of/this/one"
SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
# What becomes of a request: it is answered 503 or 403, late or never, its connection is cut in the middle of what goes up or
# comes down.
Fault = str


@dataclass
class ObjectStore:
    """The proxy. port: moto's. fault: what becomes of a request, by its method and the object's name below the bucket; "" for
    nothing. A key other than KEY is refused.

    asked: (method, name) of all. heads: the headers of all.
    """

    port: int
    url: str = ""
    fault: Callable[[str, str], Fault] = lambda method, name: ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def use(self, monkeypatch, *, key: str = KEY, secret: str = SECRET) -> None:
        """For this process, and those that it starts."""
        for name, value in self.environment(key=key, secret=secret).items():
            monkeypatch.setenv(name, value)

    def environment(self, *, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def client(self) -> Any:
        """One that asks behind the proxy."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{self.port}", aws_access_key_id="a", aws_secret_access_key="b",
            region_name="us-east-1",
        )  # fmt: skip

    def objects(self, below: str = "") -> dict[str, bytes]:
        """What is in the bucket, asked behind the proxy."""
        client = self.client()
        names = [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=below).get("Contents", ())]
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def put(self, name: str, data: bytes) -> None:
        """Change what is there, behind the proxy."""
        self.client().put_object(Bucket=BUCKET, Key=name, Body=data)

    def pass_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """moto's answer: status, headers, body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


@contextmanager
def serve() -> Iterator[ObjectStore]:
    """With an empty bucket."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.strip().isdigit())
        store = ObjectStore(int(ready))
        assert store.pass_on("PUT", f"/{BUCKET}", {}, b"")[0] == 200
        with served(_Proxy, store) as store.url:
            yield store
    finally:
        process.kill()
        process.communicate()


class _Proxy(BaseHTTPRequestHandler):
    hub: ObjectStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # the other side went away
            super().handle()

    def do_any(self) -> None:
        store, method = self.hub, self.command
        name = unquote(urlparse(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        store.asked.append((method, name))
        store.heads.append(str(self.headers))
        fault = store.fault(method, name)
        if fault == "cut up":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            return self.hang_up()
        body = self.body()
        if fault == "503":
            return self.answer(503, [], _error("SlowDown", "Please reduce your request rate."))
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            return self.answer(403, [], _error("InvalidAccessKeyId", "The key that you gave is not in our records."))
        if fault == "403":
            return self.answer(403, [], _error("AccessDenied", "Access Denied"))
        if fault == "silent":
            self.rfile.read(1)  # until the other side goes away
            return self.hang_up()
        if fault == "slow":
            time.sleep(0.3)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
        status, given, data = store.pass_on(method, self.path, headers | {"Content-Length": str(len(body))}, body)
        if fault == "cut down":
            self.answer(status, given, data, only=len(data) // 2)
            return self.hang_up()
        return self.answer(status, given, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        size = int(self.headers.get("Content-Length", 0))
        if len(body := self.rfile.read(size)) < size:
            raise ConnectionError("the other side went away")  # a store takes a whole request or none
        return body

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, only: int | None = None) -> None:
        self.send_response_only(status)
        length = {key.lower(): value for key, value in headers}.get("content-length", str(len(data)))
        for key, value in headers:
            if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(key, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:only])
            self.wfile.flush()

    def hang_up(self) -> None:
        self.close_connection = True


def _error(code: str, message: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


class Trouble:
    """A network with moods: of the requests that touch objects every third meets with a fault, each kind in turn."""

    def __init__(self, *kinds: Fault) -> None:
        self.kinds, self.count, self.met = kinds, 0, list[tuple[Fault, str, str]]()
        self._lock = threading.Lock()

    def __call__(self, method: str, name: str) -> Fault:
        with self._lock:
            self.count += 1
            if self.count % 3 or not name:
                return ""
            kind = self.kinds[len(self.met) % len(self.kinds)]
            self.met.append((kind, method, name))
            return kind
