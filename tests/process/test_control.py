"""The control interface over real sockets: what it answers, whom it lets in, and what it survives."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastictrain.errors import BusyError, ConfigError, UnsafePathError
from elastictrain.supervisor import address
from elastictrain.supervisor.notify import READY, Notifier, status
from elastictrain.supervisor.schema import status_schema
from tests.process.fake import fake_supervisor, request, socket_of, status_of
from tests.process.helpers import ROOT, wait_until


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """State directory of a job that trains."""
    with fake_supervisor(tmp_path / "job", "--max-steps", "100000", "--step-s", "0.01"):
        yield tmp_path / "job"


def post(state_dir: Path, target: str, body: Any = None) -> tuple[int, Any]:
    code, _, text = request(socket_of(state_dir), "POST", target, body)
    return code, json.loads(text)


# ---- what it answers


def test_status_fits_its_schema(state: Path) -> None:
    found = status_of(state)
    jsonschema.Draft202012Validator(status_schema()).validate(found)
    assert (found["job"], found["state"], found["daemon_running"]) == ("job", "training", True)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["daemon"]["socket"] == str(state / "control.sock")


def test_index_names_what_there_is(state: Path) -> None:
    code, _, body = request(socket_of(state), "GET", "/")
    assert code == 200
    assert "/status" in json.loads(body)["get"]


def test_metrics_are_what_prometheus_reads(state: Path) -> None:
    wait_until(lambda: status_of(state)["snapshots"]["durable"])
    code, headers, body = request(socket_of(state), "GET", "/metrics")
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families["elastictrain_global_step"].samples[0].value > 0
    states = {s.labels["state"]: s.value for s in families["elastictrain_state"].samples}
    assert states["training"] == 1
    assert sum(states.values()) == 1
    assert {s.labels["rank"] for s in families["elastictrain_rank_step"].samples} == {"0", "1"}
    assert {s.labels["tier"] for s in families["elastictrain_snapshot_age_seconds"].samples} == {"memory", "durable"}
    assert [s.value for s in families["elastictrain_store_error_seconds"].samples] == [0]


def test_logs_and_incidents(state: Path) -> None:
    path = socket_of(state)
    assert json.loads(request(path, "GET", "/incidents")[2]) == []
    assert request(path, "GET", "/incidents/1")[0] == 404
    folder = state / "incidents" / "0002"
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text('{"incident": 2, "why": "it stands still in data"}')
    (folder / "stacks-1.txt").write_text("Thread 1\n")
    assert [found["why"] for found in json.loads(request(path, "GET", "/incidents")[2])] == ["it stands still in data"]
    assert json.loads(request(path, "GET", "/incidents/2")[2])["files"] == {"stacks-1.txt": "Thread 1\n"}
    for number in (9, 10):
        run = state / "runs" / f"{number:04d}"
        run.mkdir(parents=True)
        (run / "rank-0.log").write_text(f"of {number}\n")
        (run / "rank-1.log").write_text("one\ntwo\nthree\n")
    assert json.loads(request(path, "GET", "/logs?lines=2")[2]) == {
        "incarnation": 10,
        "ranks": {"0": ["of 10"], "1": ["two", "three"]},
    }
    assert list(json.loads(request(path, "GET", "/logs?rank=1")[2])["ranks"]) == ["1"]
    assert [request(path, "GET", f"/logs?{query}")[0] for query in ("rank=7", "rank=x", "lines=0")] == [404, 400, 400]
    assert [request(path, "GET", f"/incidents/{name}")[0] for name in ("x", "..", "99")] == [404, 404, 404]


def test_events_since_by_kind_and_as_a_stream(state: Path) -> None:
    path = socket_of(state)
    wait_until(lambda: status_of(state)["global_step"] > 20)
    events = json.loads(request(path, "GET", "/events")[2])
    assert [event["event"] for event in events[:3]] == ["supervisor_started", "incarnation_started", "ranks_training"]
    later = json.loads(request(path, "GET", f"/events?since={events[2]['id']}")[2])
    assert later[0]["id"] > events[2]["id"]
    progress = json.loads(request(path, "GET", "/events?kind=progress&limit=2")[2])
    assert [event["event"] for event in progress] == ["progress", "progress"]
    with contextlib.closing(address.connect(path, 20)) as client:
        client.sendall(b"GET /events?follow=1&kind=progress,snapshot_taken HTTP/1.1\r\nHost: x\r\n\r\n")
        seen: list[Any] = []
        with client.makefile("rb") as stream:
            for line in stream:
                if line.startswith(b"{"):
                    seen.append(json.loads(line))
                if len(seen) >= 20:
                    break
    assert {event["event"] for event in seen} == {"progress", "snapshot_taken"}
    ids = [event["id"] for event in seen]
    assert ids == sorted(set(ids)), "none twice, in order"


def test_a_stream_ends_with_the_supervisor(tmp_path: Path) -> None:
    with fake_supervisor(tmp_path / "job", "--step-s", "0.01") as process:
        with contextlib.closing(address.connect(socket_of(tmp_path / "job"), 20)) as client:
            client.sendall(b"GET /events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(100)
            process.send_signal(signal.SIGTERM)
            data = b""
            while chunk := client.recv(65536):
                data += chunk
        assert b'"stopped"' in data
        assert process.wait(20) == 0


# ---- what it is told


def test_commands_do_what_they_say(state: Path) -> None:
    code, answer = post(state, "/checkpoint", {"timeout_s": 20})
    assert (code, answer["done"]) == (200, "checkpoint")
    assert status_of(state)["snapshots"]["durable"]["step"] >= answer["global_step"]
    assert post(state, "/restart", {"reason": "because"})[0] == 200
    found = status_of(state)
    assert (found["incarnation"], found["restarts"][-1]["cause"]) == (2, "restart: because")
    assert post(state, "/drain")[0] == 200
    assert status_of(state)["state"] == "drained"
    code, answer = post(state, "/drain")
    assert (code, answer["error"]["kind"]) == (409, "IllegalTransitionError")
    assert post(state, "/resume")[0] == 200
    assert status_of(state)["state"] == "training"
    assert post(state, "/stop?reason=enough")[0] == 200
    wait_until(lambda: not (state / "control.sock").exists() and not (state / "control.json").exists())


def test_a_checkpoint_that_takes_too_long(state: Path) -> None:
    code, answer = post(state, "/checkpoint", {"timeout_s": 0.001})
    assert code == 504
    assert "within 0.001 s" in answer["error"]["what"]
    assert status_of(state)["state"] == "training"


def test_a_client_that_goes_away_does_not_undo_its_command(state: Path) -> None:
    with contextlib.closing(address.connect(socket_of(state), 5)) as client:
        client.sendall(b"POST /drain HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    wait_until(lambda: status_of(state)["state"] == "drained")


@pytest.mark.parametrize(
    ("method", "target", "body", "code", "words"),
    [
        ("GET", "/nothing", None, 404, "nothing at /nothing"),
        ("POST", "/status", None, 405, "takes GET, not POST"),
        ("GET", "/stop", None, 405, "takes POST, not GET"),
        ("DELETE", "/stop", None, 405, "not DELETE"),
        ("GET", "/events?since=-1", None, 400, "since must be a whole number"),
        ("GET", "/events?since=" + "9" * 100, None, 400, "since must be a whole number"),
        ("GET", "/events?since=٣", None, 400, "since must be a whole number"),
        ("GET", "/events?limit=x", None, 400, "limit must be"),
        ("POST", "/stop", [1], 400, "must be a JSON object"),
        ("POST", "/stop", {"reason": 1}, 400, "reason must be a text"),
        ("POST", "/stop", {"raeson": "x"}, 400, "unknown key raeson"),
        ("POST", "/drain", {"reason": "x"}, 400, "unknown key reason"),
        ("POST", "/checkpoint", {"timeout_s": "soon"}, 400, "timeout_s must be a number"),
        ("POST", "/checkpoint", {"timeout_s": -1}, 400, "between 0 and 86400"),
        ("POST", "/checkpoint?timeout_s=nan", None, 400, "between 0 and 86400"),
        ("POST", "/stop", {"reason": "x" * 100_000}, 413, "Too Large"),
    ],
)
def test_mistakes_are_explained(shared_state: Path, method: str, target: str, body: Any, code: int, words: str) -> None:
    got, _, text = request(socket_of(shared_state), method, quote(target, safe="/?=&"), body)
    assert got == code, text
    assert words in json.loads(text)["error"]["what"], text
    assert status_of(shared_state)["state"] == "training"


@pytest.fixture(scope="module")
def shared_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As `state`; for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("shared") / "job"
    with fake_supervisor(folder, "--max-steps", "1000000", "--step-s", "0.02"):
        yield folder


# ---- what it survives


def test_raw_bytes_never_hurt(shared_state: Path) -> None:
    """Random bytes, torn and twisted requests, connections that end anywhere: it goes on answering."""
    path = socket_of(shared_state)
    pid = status_of(shared_state)["daemon"]["pid"]
    dice = random.Random(4)
    good = [
        b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b'POST /checkpoint HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n{"timeout_s": 0.1}',
        b"POST /resume HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]
    bad = [
        b"",
        b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /stop HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /stop HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /stop HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /stop HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /stop HTTP/1.1\r\nContent-Type: text/plain; charset=nonsense\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /stop HTTP/1.1\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd",
        b"POST /stop HTTP/1.1\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60_000,
        b"GET /events?since=%00%ff&kind=%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[::1/status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\nExpect: 100-continue\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ]
    # Twisted requests could by chance be a well-formed `stop` or `drain`: these stay among the hand-made ones.
    for attempt in range(400):
        if attempt < len(bad):
            data = bad[attempt]
        else:
            data = bytearray(dice.choice(good))
            for _ in range(dice.randrange(1, 8)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            data = bytes(data[: dice.randrange(len(data) + 1)])
        with contextlib.closing(address.connect(path, 5)) as client, contextlib.suppress(OSError):
            client.sendall(data)
            if attempt < len(bad) or dice.random() < 0.3:
                client.settimeout(0.05)
                client.recv(65536)
    found = status_of(shared_state)
    assert (found["state"], found["daemon"]["pid"]) == ("training", pid)
    steps = found["global_step"]
    wait_until(lambda: status_of(shared_state)["global_step"] > steps)


def test_many_silent_clients_hold_nothing_up(shared_state: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(contextlib.closing(address.connect(socket_of(shared_state), 5)))
            client.sendall(b"GET /events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")  # and never reads
        assert status_of(shared_state)["state"] == "training"


# ---- the socket


def test_only_owner_and_group_may_connect(tmp_path: Path) -> None:
    group = next(g for g in grp.getgrall() if g.gr_gid != os.getgid())
    args = ["--group", group.gr_name] if os.getuid() == 0 else []
    with fake_supervisor(tmp_path / "job", *args):
        found = socket_of(tmp_path / "job").stat()
        assert stat.S_IMODE(found.st_mode) == 0o660
        if args:
            assert found.st_gid == group.gr_gid


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no group no-such-group"):
        address.listen(tmp_path, "job", group="no-such-group", environment={})
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_dead_supervisor_is_replaced(tmp_path: Path) -> None:
    with fake_supervisor(tmp_path / "job", "--max-steps", "100000") as process:
        wait_until(lambda: status_of(tmp_path / "job")["global_step"] > 3)
        process.kill()
        process.wait()
    assert (tmp_path / "job" / "control.sock").exists()
    with fake_supervisor(tmp_path / "job", "--max-steps", "100000") as process:
        found = wait_until(lambda: _status_by(tmp_path / "job", process.pid))
        assert found["restarts"][0]["cause"].startswith("the supervisor ended without a word")


def _status_by(state_dir: Path, pid: int) -> dict[str, Any] | None:
    try:
        found = status_of(state_dir)
    except OSError:
        return None
    return found if found["daemon"]["pid"] == pid else None


def test_a_living_supervisor_is_not_pushed_aside(state: Path) -> None:
    pid = status_of(state)["daemon"]["pid"]
    second = subprocess.run(
        [sys.executable, "-m", "elastictrain.testing.fake_supervisor", str(state)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == BusyError.exit_code
    assert f"process {pid} answers" in second.stderr
    assert status_of(state)["daemon"]["pid"] == pid


def test_a_stopped_supervisor_is_not_pushed_aside(tmp_path: Path) -> None:
    with fake_supervisor(tmp_path / "job") as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(BusyError):
            address.listen(tmp_path / "job", "job", group=None, environment={})


def test_a_long_path(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120) / "job"
    with fake_supervisor(deep):
        assert status_of(deep)["state"] in ("starting", "training")
        assert socket_of(deep) == deep / "control.sock"
    with fake_supervisor(deep):
        assert status_of(deep)["state"] in ("starting", "recovering", "training")


def test_the_runtime_directory_comes_first(tmp_path: Path) -> None:
    runtime = tmp_path / "run" / "job"
    runtime.mkdir(parents=True)
    with fake_supervisor(tmp_path / "state" / "job", environment={"RUNTIME_DIRECTORY": str(runtime)}):
        assert socket_of(tmp_path / "state" / "job") == runtime / "control.sock"
        assert status_of(tmp_path / "state" / "job")["job"] == "job"


def test_a_state_directory_that_takes_no_sockets(tmp_path: Path) -> None:
    folders = address.choose_folders(tmp_path / "job", "job", {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert folders == [tmp_path / "job", folders[1]]
    listening, path = address.listen(
        tmp_path / "no" / "job", "job", group=None, environment={"XDG_RUNTIME_DIR": str(tmp_path)}
    )
    with contextlib.closing(listening):
        assert path.parent.parent == tmp_path / f"elastictrain-{os.getuid()}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with contextlib.closing(address.connect(path, 1)):
            pass


def test_a_private_folder_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"elastictrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        address.listen(tmp_path / "no" / "job", "job", group=None, environment={"XDG_RUNTIME_DIR": str(tmp_path)})


# ---- metrics over TCP


def test_metrics_on_loopback_and_nothing_else(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with fake_supervisor(tmp_path / "job", "--metrics-port", str(port)):
        wait_until(lambda: _answers_on(port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"elastictrain_global_step" in answer.read()
        for method, target in (("GET", "/status"), ("POST", "/stop"), ("GET", "/events")):
            wanted = urllib.request.Request(f"http://127.0.0.1:{port}{target}", method=method)
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(wanted, timeout=10)


def _answers_on(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# ---- systemd's ear


def test_notify_speaks_to_whoever_asked(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        ear.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"})
        assert notifier.send(READY, status("step 1\nof 2"))
        assert ear.recv(4096) == b"READY=1\nSTATUS=step 1 of 2"
        assert notifier.watchdog_s == 1.5
    assert not notifier.send(READY), "nobody listens any more"
    assert not Notifier({}).send(READY)
    assert Notifier({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({"WATCHDOG_USEC": "nonsense"}).watchdog_s is None


def test_notify_reaches_an_abstract_socket() -> None:
    name = f"elastictrain-test-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("\0" + name)
        ear.settimeout(5)
        assert Notifier({"NOTIFY_SOCKET": "@" + name}).send(READY)
        assert ear.recv(4096) == b"READY=1"
