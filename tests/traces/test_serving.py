"""The server answers this machine alone, nothing outside its folder, and says what the report says."""

import html
import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.traces.unpacked import taken_apart

from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.errors import RunError, ServeError
from foretrace.traces.info import RunInfo
from foretrace.traces.pack import Pack
from foretrace.traces.report.document import document
from foretrace.traces.report.findings import findings_entry
from foretrace.traces.run import Run
from foretrace.traces.serving import runs as serving_runs
from foretrace.traces.serving.runs import Runs
from foretrace.traces.serving.server import LOOPBACK, MOST_CONNECTIONS, Answer, Gone, Query, Server, page
from foretrace.traces.store import write_run
from foretrace.traces.timeline import timeline

EVIL = '"><img src=x onerror=alert(1)>'


class Client:
    """Asks a server as a program would, with any header."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        given = {"Host": f"127.0.0.1:{self.server.server_port}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def document(self, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        status, body = self.get(path)
        assert status == 200
        length = int.from_bytes(body[:4], "little")
        found = json.loads(body[4 : 4 + length])
        return found, taken_apart(found.get("columns", ()), body[4 + length :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pipeline_run: Run, many_ranks_run: Run) -> Path:
    root = tmp_path_factory.mktemp("served") / "root"
    shutil.copytree(pipeline_run.path, root / "a" / "pipeline")
    shutil.copytree(many_ranks_run.path, root / "many")
    shutil.copytree(pipeline_run.path, root.parent / "secret")
    (root / "link").symlink_to(root.parent / "secret")
    one = timeline({"rank": [0], "category": ["compute"], "kind": ["forward"], "stream": ["compute"],
                    "name": ["x"], "start_ns": [0], "duration_ns": [10], "step": [0]})  # fmt: skip
    write_run(root / "evil", RunInfo(origin="recorded", world_size=1, name=EVIL, model={"name": EVIL}), one)
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with Server(Runs(folder).routes()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield Client(server)
        server.shutdown()
        thread.join()


def test_the_server_listens_on_the_loopback_alone(client: Client) -> None:
    assert client.server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": ""}, 421),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_only_our_own_pages_may_ask(client: Client, headers: dict[str, str], status: int) -> None:
    assert client.get("/", **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(client: Client, method: str) -> None:
    assert client.get("/", method)[0] == 501


@pytest.mark.parametrize(
    "name", ["../secret", "a/../../secret", "/etc", "link", "a", "", "a/pipeline/../../../secret", "%00"]
)
def test_nothing_outside_the_folder_is_read(client: Client, name: str) -> None:
    status, body = client.get(f"/run?run={name}")
    assert (status, b"no run" in body) == (404, True)
    found, _ = client.document(f"/document?run={name}")
    assert found["error"].startswith("no run")


def test_the_list_has_every_run_with_its_headline(client: Client, folder: Path) -> None:
    status, body = client.get("/")
    text = body.decode()
    assert status == 200
    for name in ("a/pipeline", "many", "evil"):
        assert f">{name}</a>" in text
    assert "secret" not in text
    assert "<img" not in text
    assert "cannot be read" in text
    assert str(folder) in text
    assert " · 1f1b</td>" in text


def test_a_recording_that_goes_on_is_listed_by_what_its_ranks_say(tmp_path: Path, pipeline_run: Run) -> None:
    going = Path(shutil.copytree(pipeline_run.path, tmp_path / "going"))
    (going / "ranks").mkdir(exist_ok=True)
    about = (going / "run.json").read_text()
    for rank in pipeline_run.stored_ranks:
        (going / "ranks" / f"rank-{rank:05d}.json").write_text(about)
    listed = Runs(tmp_path).listing()
    (going / "run.json").unlink()
    text = Runs(tmp_path).listing()
    assert "cannot be read" not in text
    assert " · 1f1b</td>" in text
    assert text.count("<td>") == listed.count("<td>")


def test_a_served_document_is_that_of_the_report(client: Client, pipeline_run: Run) -> None:
    served, columns = client.document("/document?run=a/pipeline")
    pack = Pack()
    written = document(pipeline_run, None, pack)
    same = {key for key in written if key not in {"made", "basis", "title"}}
    for key in same:
        assert served[key] == json.loads(json.dumps(written[key])), key
    assert sum(len(column) for column in columns.values()) == sum(column[3] for column in pack.columns)


def test_two_runs_are_compared(client: Client) -> None:
    served, _ = client.document("/document?run=a/pipeline&other=a/pipeline")
    assert [run["key"] for run in served["runs"]] == ["a", "b"]


def test_a_long_run_comes_in_parts_that_hold_what_is_asked_for(
    client: Client, many_ranks_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_runs, "WHOLE_SPANS", 10)
    monkeypatch.setattr(serving_runs, "WINDOW_CELLS", 700)
    expected = {row.rank: row.window_ns for row in breakdown(many_ranks_run)}
    first, _ = client.document("/document?run=many&pick=1&step=0")
    assert first["windowed"]
    assert first["overview"] is None
    wanted = {many_ranks_run.source(rank) for rank in first["picks"][1]}
    (shown,) = first["runs"]
    rows = [row["rank"] for row in shown["rows"]]
    assert wanted & set(rows)
    numbers = dict(zip(rows, shown["steps"][0]["rows"], strict=True))
    assert {rank: numbers[rank]["window_ns"] for rank in rows} == {rank: expected[rank] for rank in rows}
    whole, columns = client.document("/overview?run=many&step=0")
    assert len(columns["a.overview"]) == whole["overview"]["n_patterns"] * whole["overview"]["bins"]
    assert len(whole["overview"]["order"]) == many_ranks_run.info.world_size
    lost, _ = client.document("/findings?run=many")
    assert lost["findings"] == findings_entry(many_ranks_run)


@pytest.mark.parametrize("query", ["pick=99&step=0", "pick=0&step=77", "pick=x&step=0", "pick=-1&step=0"])
def test_a_part_that_is_not_there_is_one_line(
    client: Client, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_runs, "WHOLE_SPANS", 10)
    found, _ = client.document(f"/document?run=many&{query}")
    assert "\n" not in found["error"]
    assert found["error"]


def test_a_run_that_changes_is_read_anew(tmp_path: Path, pipeline_run: Run, fsdp_run: Run) -> None:
    shutil.copytree(pipeline_run.path, tmp_path / "r")
    runs = Runs(tmp_path)
    before = runs.run("r")
    assert runs.run("r") is before
    shutil.rmtree(tmp_path / "r")
    shutil.copytree(fsdp_run.path, tmp_path / "r", copy_function=shutil.copy)
    assert runs.run("r").info.world_size == fsdp_run.info.world_size


def test_a_long_answer_keeps_nobody_waiting_for_another(folder: Path) -> None:
    runs = Runs(folder)
    begun, go_on = threading.Event(), threading.Event()
    n_built = []

    def slow(run: Run, other: Run | None, query: Mapping[str, str]) -> Answer:
        n_built.append(run.path)
        begun.set()
        assert go_on.wait(20)
        return Answer(b"slow")

    answers: list[bytes] = []
    asks = [
        threading.Thread(
            target=lambda: answers.append(runs._kept("overview", Query({"run": "many"}), slow).body)
        )
        for _ in range(2)
    ]
    for one in asks:
        one.start()
    assert begun.wait(20)
    assert runs.routes()["/document"](Query({"run": "many"})).body[4:].startswith(b"{")
    assert answers == []
    go_on.set()
    for one in asks:
        one.join()
    assert answers == [b"slow", b"slow"]
    assert len(n_built) == 1


def test_a_folder_and_a_port_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a folder"):
        Runs(tmp_path / "none")
    with Server({"/": lambda _: page("")}) as server, pytest.raises(ServeError, match="--port 0"):
        Server({}, server.server_port)


@pytest.mark.parametrize(
    "name",
    [
        "a \"b\" 'c'",
        "<script>alert(1)<",
        "zürich-模型-🚀",
        "x" * 200,
        "line\nbreak",
        "a&b#c?d%20e+f",
        "--json",
    ],
)
def test_a_folder_of_any_name_is_listed_as_text_and_opens(
    tmp_path: Path, pipeline_run: Run, name: str
) -> None:
    shutil.copytree(pipeline_run.path, tmp_path / name)
    with Server(Runs(tmp_path).routes()) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = Client(server)
        listed = client.get("/")[1].decode()
        assert name.partition("\n")[0] in html.unescape(listed)
        assert "<script>alert" not in listed
        (link,) = re.findall(r'href="(/run\?[^"]*)"', listed)
        status, report = client.get(html.unescape(link))
        assert status == 200
        assert b"<script>alert" not in report
        server.shutdown()


def test_two_hundred_at_once_are_answered_while_others_say_nothing(tmp_path: Path) -> None:
    n_threads = threading.active_count()
    with Server(Runs(tmp_path).routes()) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        at = (LOOPBACK, server.server_port)
        silent = [socket.create_connection(at) for _ in range(MOST_CONNECTIONS + 50)]
        for one in silent:
            one.sendall(b"GET / HTTP/1.1\r\nHo")
        with ThreadPoolExecutor(200) as asking:
            found = list(asking.map(lambda _: Client(server).get("/")[0], range(200)))
        assert found == [200] * 200
        assert threading.active_count() <= n_threads + 1 + MOST_CONNECTIONS
        server.shutdown()
    for one in silent:
        one.close()


def test_who_says_nothing_for_long_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.traces.serving.server.MOST_SILENT_S", 0.2)
    with Server(Runs(tmp_path).routes()) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with socket.create_connection((LOOPBACK, server.server_port)) as slow:
            slow.settimeout(20)
            slow.sendall(b"GET / HTTP/1.1\r\nHo")
            assert slow.recv(1) == b""
        server.shutdown()


def test_nothing_is_worked_out_for_who_has_gone() -> None:
    busy = threading.Lock()
    ours, theirs = socket.socketpair()
    query = Query({}, ours)
    with query.holding(busy):
        query.check()
    theirs.close()
    with busy, pytest.raises(Gone), query.holding(busy):
        pass
    with pytest.raises(Gone), query.holding(busy):
        pass
    assert not busy.locked()
    ours.close()


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("is_there", [True, False])
def test_work_goes_on_for_who_only_says_no_more_and_ends_for_who_has_gone(
    protocol: str, *, is_there: bool
) -> None:
    """Both look alike until something is sent: the answer of the first is whole all the same."""
    asked, said = threading.Event(), threading.Event()
    ended: list[str] = []

    def long(query: Query) -> Answer:
        asked.set()
        assert said.wait(20)
        try:
            for _ in range(20 if is_there else 1000):
                query.check()
                time.sleep(0.02)
        except Gone:
            ended.append("gone")
            raise
        ended.append("answered")
        return page("x" * 3_000_000)

    with Server({"/": long}) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with socket.create_connection((LOOPBACK, server.server_port)) as client:
            client.settimeout(20)
            client.sendall(f"GET / {protocol}\r\nHost: {LOOPBACK}:{server.server_port}\r\n\r\n".encode())
            assert asked.wait(20)
            if is_there:
                client.shutdown(socket.SHUT_WR)
                said.set()
                answer = http.client.HTTPResponse(client)
                answer.begin()
                assert (answer.status, answer.read()) == (200, b"x" * 3_000_000)
        said.set()
        until = time.monotonic() + 20
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
        server.shutdown()
    assert ended == ["answered" if is_there else "gone"]


def test_a_run_whose_files_lie_elsewhere_is_refused(tmp_path: Path, pipeline_run: Run) -> None:
    served = tmp_path / "served"
    shutil.copytree(pipeline_run.path, served / "own")
    shutil.move(served / "own" / "spans", tmp_path / "elsewhere")
    (served / "own" / "spans").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="spans leads out of the folder"):
        Runs(served).run("own")
    assert "leads out of the folder" in Runs(served).listing()
    shutil.move(tmp_path / "elsewhere", served / ".inside")
    (served / "own" / "spans").unlink()
    (served / "own" / "spans").symlink_to(served / ".inside")
    assert Runs(served).run("own").stored_ranks == pipeline_run.stored_ranks
