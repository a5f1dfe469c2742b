"""scripts/watch.py: pages of runs on the loopback, and a comparison; from files, of which none is written."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from scripts import watch
from trainer.artifacts.sampling import draw_samples
from trainer.base.errors import Interrupted, NonFiniteError, NotWritten, PeerStopped, UserError, cause
from trainer.base.progress import START, STOP
from trainer.base.run_layout import Layout
from trainer.models.base import SampleRequest
from workbench.compare import page as compared
from workbench.compare.page import compare
from workbench.pages.rendering import policy
from workbench.watch import server as watch_server
from workbench.watch.server import Runs, Server

REQUEST = SampleRequest(prompt="a bear", negative="", width=16, height=16, seed=3, steps=4, guidance=None)


def write_run(root: Path, *, lr: float, losses: list[float], colour: str, mark: str = "m1") -> Layout:
    layout = Layout(root)
    root.mkdir(parents=True)
    layout.config.write_text(f'[run]\nname = "{root.name}"\nmax_steps = 4\n\n[optimizer]\nlr = {lr}\n')
    rows = [
        {"step": step, "epoch": 1, "loss": loss, "lr": lr, "grad_norm": 0.1, "images": step, "seconds": 0.5,
         "time": 1e9 + step, "held_out_loss": loss / 2, "measured_photos": mark,
         "peak_bytes": int((4 - step / 4) * 2**30)}
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    layout.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (0, 4):
        draw_samples([REQUEST], sample=lambda asked: Image.new("RGB", (16, 16), colour), folder=layout.samples_of(step))
    layout.report.write_text(f"<title>{root.name}</title>")
    return layout


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "outputs" / "slow run", lr=1e-5, losses=[0.9, 0.8, 0.8, 0.7], colour="red")
    write_run(tmp_path / "outputs" / "fast", lr=1e-4, losses=[0.9, 0.6, 0.4, 0.3], colour="blue")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "outputs" / "fast" / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    return tmp_path / "outputs"


class Browser:
    def __init__(self, server: Server) -> None:
        self.port = server.server_address[1]

    def get(self, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def text(self, path: str) -> str:
        status, _, page = self.get(path)
        assert status == 200
        return page.decode()


@pytest.fixture
def browse() -> Iterator:
    servers: list[Server] = []

    def start(*folders: Path) -> Browser:
        servers.append(Server(Runs(folders), 0))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return Browser(servers[-1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_several_runs_are_compared_from_their_files(runs: Path, browse) -> None:
    before = state_of(runs)
    page = browse(runs).text("/")
    assert 'href="slow%20run/report.html"' in page and 'href="fast/report.html"' in page
    assert page.count('data-name="fast"') == page.count('data-name="slow run"') >= 3, "the same charts"
    differing = page.partition("What differs")[2]
    assert "<code>optimizer.lr</code>" in differing and "1e-05" in differing and "0.0001" in differing
    assert "run.name" not in differing and "run.max_steps" not in differing
    card = page.partition('<article class="card"')[2].partition("</article>")[0]
    assert card.count("<img ") == 2 and "fast, step 4" in card and "slow run, step 4" in card
    assert 'href="slow%20run/samples/step-00000004/00.png"' in card
    assert "the lower the better" in page
    (memory,) = (part for part in page.split("<figure") if "<b>Peak memory</b>" in part)
    assert '<span class="unit">GiB</span>' in memory and "fast from 3.75 to 3; slow run from 3.75 to 3" in memory
    assert page.count('<td class="number">3.8 GiB</td>') == 2, "the highest of all steps"
    assert state_of(runs) == before, "it writes nothing"


def test_runs_that_differ_in_their_seed_alone_are_one_group(runs: Path, browse) -> None:
    twin = write_run(runs / "zz", lr=1e-4, losses=[0.9, 0.6, 0.5, 0.4], colour="blue")
    twin.config.write_text(twin.config.read_text().replace("[run]", "[run]\nseed = 9"))
    again = write_run(runs / "zzz", lr=3e-4, losses=[0.9, 0.6], colour="blue")
    write_run(runs / "zzzz", lr=3e-4, losses=[0.9, 0.6], colour="blue")
    table = browse(runs).text("/").partition("<tbody>")[2].partition("</tbody>")[0]
    assert table.count("2 runs of one config") == 1 and again.root.name == "zzz"
    assert table.count("2 runs that differ in their seed alone, held-out loss 0.15 to 0.2") == 1
    assert re.findall(r'href="([^"]*)/report', table) == ["fast", "zz", "slow%20run", "zzz", "zzzz"]


def test_losses_of_other_photos_are_not_called_comparable(tmp_path: Path, browse) -> None:
    for name, mark in (("one", "a"), ("two", "b")):
        write_run(tmp_path / name, lr=1e-4, losses=[0.5, 0.4], colour="red", mark=mark)
    assert "compare each with itself" in browse(tmp_path).text("/")


def seeds(root: Path, *curves: list[float]) -> None:
    """Runs that differ in their seed alone. curves: the losses of each, twice those of held-out photos."""
    for seed, losses in enumerate(curves):
        layout = write_run(root / f"seed-{seed}", lr=1e-4, losses=losses, colour="red")
        text = layout.config.read_text().replace("max_steps = 4\n", f"max_steps = 4\nseed = {seed}\n")
        layout.config.write_text(text)


def test_runs_of_other_seeds_are_one_line_in_a_band_from_the_lowest_to_the_highest(tmp_path: Path) -> None:
    """The band's corners, read back from the chart, are the values; a run that is behind ends its part of it."""
    seeds(tmp_path, [0.9, 0.8, 0.7, 0.2], [0.8, 0.9, 0.4, 0.6], [0.7, 0.4])
    write_run(tmp_path / "z", lr=1e-3, losses=[0.5, 0.5], colour="red")
    page = compare(*Runs([tmp_path]).runs(), 50)
    assert page.count("3 runs that differ in their seed alone, held-out loss 0.1 to 0.3") == 1
    assert page.count('<i class="swatch line0"></i>') == 3 and page.count('<i class="swatch line1"></i>') == 1
    chart = page.partition("<b>Held-out loss</b>")[2].partition("</figure>")[0]
    first, last, low, high, log = json.loads(unescape(re.search('data-axes="(.*?)"', chart)[1]))
    assert not log

    def corners(path: str) -> list[tuple[float, float]]:
        points = re.findall(r"([\d.]+) ([\d.]+)", re.search(rf'<path class="{path}"[^>]* d="(.*?)"/>', chart)[1])
        places = [(first + float(x) / 1000 * (last - first), high - float(y) / 1000 * (high - low)) for x, y in points]
        return [(pytest.approx(step, abs=0.01), pytest.approx(value, abs=1e-3)) for step, value in places]

    assert corners("band0") == [(1, 0.35), (2, 0.2), (3, 0.2), (4, 0.1), (4, 0.3), (3, 0.35), (2, 0.45), (1, 0.45)]
    assert corners("line0") == [(1, 0.4), (2, 0.4), (3, 0.275), (4, 0.2)]
    assert 'class="band1"' not in page and 'data-name="seed-0 (3 runs)"' in chart and 'data-name="z"' in chart
    assert "are one line, their median, in a band" in page


def test_runs_that_measure_other_photos_are_no_band(tmp_path: Path) -> None:
    for name, mark in (("one", "a"), ("two", "b")):
        write_run(tmp_path / name, lr=1e-4, losses=[0.5, 0.4], colour="red", mark=mark)
    page = compare(*Runs([tmp_path]).runs(), 50)
    assert "band" not in page.partition("<body")[2] and "seed alone" not in page


def test_each_config_is_read_once_however_many_runs_there_are(tmp_path: Path) -> None:
    """To find which runs differ in their seed alone; each with each would be 144 times."""

    class Config(dict):
        def items(self):
            looks.append(self["run.name"])
            return super().items()

    looks: list[str] = []
    seeds(tmp_path, *[[0.5, 0.4]] * 12)
    seen = [replace(run, config=Config(run.config)) for run in Runs([tmp_path]).runs()[0]]
    assert "12 runs that differ in their seed alone" in compare(seen, {}, 50)
    assert sorted(looks) == sorted(run.name for run in seen)


def test_what_is_written_later_is_seen(runs: Path, browse) -> None:
    browser = browse(runs)
    assert "2 runs" in browser.text("/")
    write_run(runs / "third", lr=1e-3, losses=[0.5], colour="green")
    with (runs / "fast" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.1, "lr": 1e-4, "grad_norm": 0.1, "images": 5, "time": 1e9}) + "\n")
    page = browser.text("/")
    assert "3 runs" in page and "finished: step 5 of 4" in page


def test_one_run_is_its_own_page_and_its_files(runs: Path, browse) -> None:
    browser = browse(runs / "fast")
    status, headers, _ = browser.get("/")
    assert (status, headers["location"]) == (302, "/fast/report.html")
    assert browser.text("/fast/report.html") == "<title>fast</title>"
    picture = (runs / "fast" / "samples" / "step-00000004" / "00.png").read_bytes()
    status, headers, found = browser.get("/fast/samples/step-00000004/00.png")
    assert (status, headers["content-type"], found) == (200, "image/png", picture)
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    status, headers, found = browser.get("/fast/report.html", method="HEAD")
    assert (status, headers["content-length"], found) == (200, str(len("<title>fast</title>")), b"")
    assert browser.get("/slow%20run/report.html")[0] == 404, "it was not asked for"
    for path in ("/fast/report.html", "/fast/no.html"):  # the library hides what comes after the head
        with socket.create_connection(("127.0.0.1", browser.port), 30) as line, line.makefile("rb") as answer:
            line.sendall(f"HEAD {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert answer.read().partition(b"\r\n\r\n")[2] == b""


@pytest.mark.parametrize(
    "path",
    ["/fast/../../secret.png", "/fast/%2e%2e/%2e%2e/secret.png", "/fast/samples/link.png", "/fast/.lock", "/fast//etc/passwd",
     "/nobody/report.html", "/fast/samples", "/fast/no.png", "/../secret.png", "/fast/secret%00.png", "/fast/secret.pem",
     "/fast/.secret.toml", "/fast/.kept/secret.png", "/fast/report.html/x.png", f"/fast/{'a' * 300}.png"],
)  # fmt: skip
def test_nothing_outside_of_a_run_is_served(runs: Path, browse, path: str) -> None:
    (runs / "fast" / ".kept").mkdir()
    for name in (".lock", "secret.pem", ".secret.toml", ".kept/secret.png"):
        (runs / "fast" / name).write_bytes(b"secret")
    status, _, found = browse(runs).get(path)
    assert status == 404 and b"secret" not in found


def test_what_lies_in_a_run_s_folder_has_no_origin_and_no_script_but_the_report_s(runs: Path, browse) -> None:
    """Whoever made the folder: its pages can read no other page of the server."""
    (runs / "fast" / "report.html").write_text("<script>fetch('/slow%20run/config.toml')</script>")
    browser = browse(runs)
    own = policy()
    for path in ("/fast/report.html", "/fast/config.toml", "/fast/samples/step-00000004/00.png", "/fast/metrics.jsonl"):
        rules = browser.get(path)[1]["content-security-policy"]
        assert rules == f"{own}; frame-ancestors 'none'; sandbox allow-scripts allow-downloads", path
    rules = browser.get("/")[1]["content-security-policy"]
    assert rules == f"{own}; frame-ancestors 'none'", "the comparison is the server's own page"
    for rules in (own, unescape(browser.text("/").partition('Policy" content="')[2].partition('"')[0])):
        assert rules.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ") and "'unsafe-eval'" not in rules
        assert rules.count("script-src 'sha256-") == 1 and "connect-src" not in rules


@pytest.mark.parametrize("sent", [b"", b"GET /fast/", b"GET / HTTP/1.0\r\nHost: localhost\r\nX: "])
def test_a_client_that_never_ends_its_request_holds_nothing(runs: Path, browse, monkeypatch, sent: bytes) -> None:
    """However often it sends another byte."""
    monkeypatch.setattr(watch_server, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", browse(runs).port), 30) as line:
        line.sendall(sent)
        line.settimeout(0.02)
        while True:
            try:
                line.sendall(b"a" if sent else b"")
                if line.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_a_client_that_takes_no_answer_holds_nothing(runs: Path, browse, monkeypatch) -> None:
    monkeypatch.setattr(watch_server, "ANSWER_SECONDS", 0.2)
    ended = threading.Event()
    real = watch_server.Handler.finish
    monkeypatch.setattr(watch_server.Handler, "finish", lambda self: (real(self), ended.set()))
    with (runs / "fast" / "large.safetensors").open("wb") as file:
        file.truncate(2**28)
    with socket.create_connection(("127.0.0.1", browse(runs).port), 30) as line:
        line.sendall(b"GET /fast/large.safetensors HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert ended.wait(60), "the line is held for as long as the client likes"


def test_a_pipe_is_no_file_of_a_run(runs: Path, browse) -> None:
    """It would be waited for without end. A run is shown without it, or not at all."""
    write_run(runs / "other", lr=1e-5, losses=[0.9], colour="green")
    for name in ("x.png", "samples/step-00000004/x.png", "adapters.safetensors"):
        os.mkfifo(runs / "fast" / name)
    for name in ("config.toml", "phases.jsonl", "metrics.jsonl"):
        (runs / "other" / name).unlink(missing_ok=True)
        os.mkfifo(runs / "other" / name)
    browser = browse(runs)
    for path in ("/fast/x.png", "/fast/samples/step-00000004/x.png", "/fast/adapters.safetensors", "/other/config.toml"):
        assert browser.get(path)[0] == 404
    page = browser.text("/")
    assert "fast, step 4" in page and f"could not be read: not a regular file: {runs / 'other'}" in page


def test_only_this_machine_can_ask(runs: Path) -> None:
    with Server(Runs([runs]), 0) as server:
        assert server.server_address[0] == "127.0.0.1" and server.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError, ZeroDivisionError])
def test_a_browser_that_goes_away_is_no_error(runs: Path, capsys, error: type[Exception]) -> None:
    with Server(Runs([runs]), 0) as server:
        try:
            raise error
        except error:
            server.handle_error(None, ("127.0.0.1", 1))
    assert ("Traceback" in capsys.readouterr().err) == (error is ZeroDivisionError)


def test_a_page_from_elsewhere_whose_name_leads_here_is_refused(runs: Path, browse) -> None:
    browser = browse(runs)
    assert browser.get("/", host="evil.example")[0] == 403
    assert browser.get("/", host="127.0.0.1.evil.example:80")[0] == 403
    assert browser.get("/", host="localhost:9999")[0] == 200, "the other end of a tunnel has another port"
    assert browser.get("/", method="POST")[0] == 501


def test_no_name_server_is_asked(runs: Path, monkeypatch) -> None:
    """A machine without one would wait for it before the first page."""
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("asked for the host's name"))
    with Server(Runs([runs]), 0) as server:
        assert server.address.startswith("http://127.0.0.1:")


def test_no_name_at_all_is_refused(runs: Path, browse) -> None:
    assert browse(runs).get("/", host="[")[0] == 403


def test_a_run_that_has_told_its_end_is_not_training(tmp_path: Path, browse) -> None:
    """Its last step is new, and its length stands in epochs."""
    layout = write_run(tmp_path / "bear", lr=1e-4, losses=[0.5, 0.4, 0.3], colour="red")
    layout.config.write_text("[run]\nepochs = 2\n")
    rows = [json.loads(line) | {"time": time.time()} for line in layout.metrics.read_text().splitlines()]
    layout.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = json.dumps({"phase": START, "done": 0, "started": 1.0, "total": 40}) + "\n"
    for told, alive in ((start, True), (start + json.dumps({"phase": STOP, "done": 0}) + "\n", False)):
        layout.phases.write_text(told)
        write_run(tmp_path / f"other-{alive}", lr=1e-4, losses=[0.5], colour="red")
        page = browse(tmp_path).text("/")
        assert ("at least one of them is training" in page) == alive and "step 3 of 40" in page


def test_mistakes_are_said(tmp_path: Path, browse, capsys) -> None:
    assert watch.main([str(tmp_path / "none")]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/none is no folder; give a run's output_dir, or a folder of such folders\n"
    )
    taken = browse(tmp_path).port
    assert watch.main([str(tmp_path), "--port", str(taken)]) == 2
    assert f"error: --port {taken} cannot be used" in capsys.readouterr().err
    assert watch.main([str(tmp_path), "--port", "70000"]) == 2
    assert "is no port" in capsys.readouterr().err


def test_a_run_without_a_sound_file_is_shown_with_what_it_has(runs: Path, browse) -> None:
    (runs / "fast" / "config.toml").write_text("[run\n")
    (runs / "fast" / "report.html").unlink()
    browser = browse(runs)
    assert "2 runs" in browser.text("/")
    status, _, said = browser.get("/fast/report.html")
    assert (status, said) == (404, b"The report is not written yet.\n")


def test_a_page_stays_until_a_run_has_changed(runs: Path, browse, monkeypatch) -> None:
    """What is judged of a run, too: most of a page's time. A run that falls silent is another page."""
    made: list[str] = []

    def counted(name: str, work):
        return lambda *given, **more: (made.append(name), work(*given, **more))[1]

    monkeypatch.setattr(watch_server, "compare", counted("page", watch_server.compare))
    monkeypatch.setattr(compared, "judgement_of", counted("judged", compared.judgement_of))
    browser = browse(runs)
    first = browser.text("/")
    assert browser.text("/") == first and made == ["page", "judged", "judged"]
    layout = Layout(runs / "fast")
    row = json.loads(layout.metrics.read_text().splitlines()[-1]) | {"step": 5, "time": time.time()}
    for change in (
        lambda: layout.metrics.write_text(layout.metrics.read_text() + json.dumps(row) + "\n"),
        lambda: layout.metrics.write_text(layout.metrics.read_text() + '{"torn'),
        lambda: layout.config.write_text(layout.config.read_text().replace("max_steps = 4", "max_steps = 9")),
        lambda: layout.samples.rename(layout.root / "elsewhere"),
        lambda: layout.phases.write_text(json.dumps({"phase": STOP, "done": 5}) + "\n"),
    ):
        made.clear()
        change()
        page = browser.text("/")
        assert made == ["page", "judged"]
        assert browser.text("/") == page and made == ["page", "judged"], "it stays"
    layout.phases.unlink()
    assert "at least one of them is training" in browser.text("/")
    made.clear()
    monkeypatch.setattr(watch_server.time, "time", lambda: row["time"] + 10**6)
    assert "none of them is training now" in browser.text("/") and "page" in made


def test_a_run_is_found_behind_a_link_once(tmp_path: Path, browse) -> None:
    write_run(tmp_path / "disk" / "bear", lr=1e-4, losses=[0.5], colour="red")
    (tmp_path / "outputs").mkdir()
    for name in ("linked", "twice"):
        (tmp_path / "outputs" / name).symlink_to(tmp_path / "disk" / "bear")
    (tmp_path / "outputs" / "loop").symlink_to("loop")
    (tmp_path / "disk" / "bear" / "loop.png").symlink_to("loop.png")
    browser = browse(tmp_path / "outputs")
    assert browser.get("/")[1]["location"] == "/linked/report.html"
    assert browser.text("/linked/report.html") == "<title>bear</title>"
    assert browser.get("/linked/samples/step-00000004/00.png")[0] == 200
    assert browser.get("/linked/loop.png")[0] == 404


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "bear", lr=1e-4, losses=[0.5], colour="red")
    assert list(Runs([tmp_path / "a", tmp_path / "b" / "bear", tmp_path / "a" / "bear"]).layouts()) == ["bear", "bear-2"]
    with pytest.raises(UserError):
        Runs([tmp_path / "missing"])


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 5, "loss": 0.5}',
        '{"step": 5, "images": 5, "lr": null}',
        '{"step": 5, "images": "x", "lr": 1}',
        '{"step": true, "images": 5, "lr": 1}',
        '{"step": 5, "images": 5, "lr": 1, "loss": "x"}',
        '{"images": 5, "lr": 1}',
        '{"step": 5, "images": 5, "lr": 1, "at_start": 1}',
        '{"step": 5, "images": 5, "lr": 1, "at_start": {"held_out_loss": []}}',
        '{"step": 5, "images": 5, "lr": 1, "weight_change": "x"}',
        '{"step": 5, "images": 5, "lr": 1, "highest_lr": null}',
        '{"step": 5, "images": 5, "lr": 1, "measured_photos": []}',
        f'{{"step": 5, "images": 1{"0" * 400}, "lr": 1}}',
        "[5]",
        "5",
        "x",
        "[" * 100_000,
    ],
    ids=lambda line: line[:70],
)
def test_a_line_that_cannot_be_judged_is_left_out_and_counted(runs: Path, browse, line: str) -> None:
    with (runs / "fast" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    page = browse(runs).text("/")
    assert "fast: 1 line(s) of metrics.jsonl could not be read and are left out." in page
    assert "finished: step 4 of 4" in page and "slow run: 1" not in page


def test_a_line_with_other_fields_that_make_no_sense_is_shown_with_the_rest(runs: Path, browse) -> None:
    odd = {
        "step": 5,
        "images": 5,
        "lr": 1e-4,
        "loss": None,
        "time": "x",
        "seconds": [1, None],
        "epoch": {},
        "peak_bytes": 10**400,
    }
    with (runs / "fast" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n")
    assert "finished: step 5 of 4" in browse(runs).text("/")


@pytest.mark.parametrize(
    "line",
    [f'[1, "{START}"]', f'"{STOP}"', f'{{"phase": "{START}", "total": 9', f'{{"phase": ["{START}"], "done": 0}}',
     json.dumps({"phase": START, "done": 0, "started": 1.0, "total": "x"}), json.dumps({"phase": START, "total": 2.5}),
     json.dumps({"phase": START, "done": 0, "started": "x", "total": 0}), "[" * 100_000 + START],
    ids=lambda line: line[:70],
)  # fmt: skip
def test_an_entry_of_phases_that_is_none_takes_no_page_away(runs: Path, browse, line: str) -> None:
    (runs / "fast" / "phases.jsonl").write_text(line + "\n")
    assert "step 4 of 4" in browse(runs).text("/")


def test_a_config_that_makes_no_sense_takes_no_page_away(runs: Path, browse) -> None:
    (runs / "fast" / "config.toml").write_text('[run]\nname = ["*"]\nmax_steps = "x"\n')
    assert "2 runs" in browse(runs).text("/")


def test_a_run_whose_files_cannot_be_read_leaves_the_others_on_the_page(runs: Path, browse) -> None:
    write_run(runs / "other", lr=1e-5, losses=[0.9], colour="green").metrics.unlink()
    (runs / "other" / "metrics.jsonl").mkdir()
    page = browse(runs).get("/")[2].decode()
    assert "fast/report.html" in page and "other/report.html" not in page
    assert f"other is left out. Its files could not be read: Is a directory: {runs / 'other' / 'metrics.jsonl'}." in page


def test_images_that_cannot_be_read_are_left_out_and_counted(runs: Path, browse) -> None:
    folder = runs / "fast" / "samples" / "step-00000004"
    whole = (folder / "00.png").read_bytes()
    (folder / "00.png").write_bytes(whole[:-30])
    (folder / "01.png").write_bytes(whole[:20])
    (folder / "._00.png").write_bytes(b"\0\5\x16\7 of another system")
    page = browse(runs).text("/")
    assert "fast: 2 image(s) of samples/ could not be read and are left out." in page
    card = page.partition('<article class="card"')[2].partition("</article>")[0]
    assert card.count("<img ") == 2 and "fast, before training" in card and "slow run, step 4" in card


@pytest.mark.parametrize(
    ("ends", "told", "now", "said"),
    [
        ([10, 20, 30, 40], {}, 50, "training"),
        ([10, 20, 30, 40], {"done": 0}, 50, "finished"),
        ([10, 20, 30, 40], {}, 2000, "stopped"),
        ([10, 20, 30, 40], {"done": 0, "why": "out of memory"}, 50, "ended at step 4 of 4: out of memory"),
        ([10, 20], {"done": 0, "why": "stopped by SIGTERM"}, 50, "ended at step 2 of 4: stopped by SIGTERM"),
        ([10, 20], {"done": 0}, 50, "stopped"),
        ([10, 20], {}, 619, "training"),
        ([10, 20], {}, 621, "stopped"),
        ([10, 1010], {}, 5009, "training"),
        ([1000, 1010], {}, 5009, "training"),
        ([10, 1010], {}, 5011, "stopped"),
        ([], {}, 599, "training"),
        ([], {}, 601, "stopped"),
    ],
)
def test_a_run_is_told_to_be_alive_by_the_rule_of_its_own_page(
    tmp_path: Path, ends: list[float], told: dict, now: float, said: str
) -> None:
    """For ten minutes without a step, or four times its longest silence; finished where it has told its end, too."""
    layout = write_run(tmp_path / "bear", lr=1e-4, losses=[0.5] * len(ends), colour="red")
    rows = [json.loads(line) | {"time": end} for line, end in zip(layout.metrics.read_text().splitlines(), ends, strict=True)]
    layout.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [{"phase": START, "done": 0, "started": 0.0, "total": 4}, *([{"phase": STOP} | told] if told else [])]
    layout.phases.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (seen,), _ = Runs([tmp_path]).runs()
    assert seen.state(now).kind == said.partition(" ")[0]
    page = compare([seen], {}, now)
    assert said in ("training", "stopped") or said in page
    assert ("at least one of them is training" in page) == (said == "training")


def test_a_resumed_run_is_alive_before_its_first_step_and_its_pause_is_no_silence(tmp_path: Path) -> None:
    layout = write_run(tmp_path / "bear", lr=1e-4, losses=[0.5] * 3, colour="red")
    lines = layout.metrics.read_text().splitlines()
    rows = [json.loads(line) | {"time": end} for line, end in zip(lines, (10, 20, 5010), strict=True)]
    start = {"phase": START, "done": 0, "started": 0.0, "total": 4}
    entries = [start, {"phase": STOP, "done": 0}, start | {"done": 2, "started": 5000.0}]
    layout.phases.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for written, now, kind in ((rows[:2], 5100, "training"), (rows, 5600, "training"), (rows, 5611, "stopped")):
        layout.metrics.write_text("".join(json.dumps(row) + "\n" for row in written))
        (seen,), _ = Runs([tmp_path]).runs()
        assert seen.state(now).kind == kind


def test_a_run_that_a_value_ended_which_is_not_finite_is_said_to_have_met_one(tmp_path: Path) -> None:
    layout = write_run(tmp_path / "bear", lr=1e-4, losses=[0.5] * 3, colour="red")
    start, end = {"phase": START, "done": 0, "started": 0.0, "total": 4}, {"phase": STOP, "done": 0}
    layout.phases.write_text("".join(json.dumps(entry) + "\n" for entry in (start, end | {"why": cause(NonFiniteError())})))
    page = compare(*Runs([tmp_path]).runs(), 50)
    assert "ended at step 3 of 4: a value was not finite" in page and "It met a value that is not finite" in page


def test_what_ended_a_run_is_told_in_a_few_words() -> None:
    assert cause(Interrupted(signal.SIGINT)) == "stopped by SIGINT" and cause(KeyboardInterrupt()) == "stopped at once"
    assert cause(PeerStopped("gone", 5)) == "another process of the run has ended" and cause(KeyError("x")) == "an error"
    assert cause(NotWritten("full")) == cause(OSError()) == "a file could not be written or read"
