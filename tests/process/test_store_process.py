"""The store as a supervisor keeps it: replaced when it dies or hangs, gone with the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain.errors import BusyError, ConfigError, NotRunningError
from elastictrain.kv import kept
from elastictrain.kv.client import EtcdClient, EtcdError, Stored
from elastictrain.kv.settings import EtcdSettings
from elastictrain.procs import read_stat
from elastictrain.supervisor.store_process import StoreProcess
from tests.process.conftest import DeadDisk
from tests.process.helpers import DEADLINE_S, ROOT, wait_until


class Events:
    """What a store process said, and waits for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Mapping[str, Any]]] = []

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.all.append((kind, fields))

    def named(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields for name, fields in self.all if name == kind]

    async def wait(self, kind: str, count: int = 1) -> Mapping[str, Any]:
        await until(lambda: len(self.named(kind)) >= count)
        return self.named(kind)[count - 1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test, which must leave no child and no open file behind."""
    before = set(Path("/proc/self/fd").iterdir())
    children = set(psutil.Process().children())
    asyncio.run(main)
    assert set(psutil.Process().children()) <= children
    assert set(Path("/proc/self/fd").iterdir()) <= before


def client_of(port: int) -> EtcdClient:
    return EtcdClient(EtcdSettings(endpoints=(f"http://127.0.0.1:{port}",), request_timeout_s=DEADLINE_S))


def is_gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state == "Z"


def test_a_store_that_is_killed_is_replaced_at_the_same_port() -> None:
    async def main() -> None:
        events = Events()
        store = StoreProcess("127.0.0.1", 0, events)
        await store.open()
        port, pid = store.port, store.pid
        assert pid is not None
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        client = client_of(port)
        await asyncio.to_thread(client.put, "a", b"1", 0)
        os.kill(pid, signal.SIGKILL)
        assert (await events.wait("store_ended"))["exit_code"] == -signal.SIGKILL
        # Nobody is refused: who connects now is served by the one that follows.
        assert await asyncio.to_thread(client.get, "a") is None
        await events.wait("store_started", 2)
        assert store.port == port
        assert store.pid not in (pid, None)
        client.close()
        await store.close()
        assert store.pid is None
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0

    run(main())


def test_a_store_that_answers_no_more_is_replaced() -> None:
    async def main() -> None:
        events = Events()
        store = StoreProcess("127.0.0.1", 0, events, probe_s=0.2)
        await store.open()
        pid = store.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert (await events.wait("store_hung"))["pid"] == pid
        await events.wait("store_started", 2)
        client = client_of(store.port)
        await asyncio.to_thread(client.put, "a", b"1", 0)
        client.close()
        await store.close()
        assert is_gone(pid)

    run(main())


def test_a_store_that_does_not_come_up_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        events = Events()
        store = StoreProcess("127.0.0.1", 0, events)
        await store.open()
        python = sys.executable
        monkeypatch.setattr(sys, "executable", "/bin/false")
        assert store.pid is not None
        os.kill(store.pid, signal.SIGKILL)
        await events.wait("store_start_failed", 3)
        pauses_s = [fields["next_try_s"] for fields in events.named("store_start_failed")]
        assert pauses_s[:3] == sorted(set(pauses_s[:3]))
        assert "ended with 1" in events.named("store_start_failed")[0]["error"]
        monkeypatch.setattr(sys, "executable", python)
        await events.wait("store_started", 2)
        await store.close()

    run(main())


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_store_that_never_came_up_is_an_error(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(NotRunningError, match=r"the store (ended with 1|cannot be started: No such file)"):
            await StoreProcess("127.0.0.1", 0).open()

    monkeypatch.setattr(sys, "executable", program)
    run(main())


def test_it_can_be_closed_while_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for prefix in ("store_ended", "store_start_failed"):
            events = Events()
            store = StoreProcess("127.0.0.1", 0, events)
            await store.open()
            if prefix == "store_start_failed":
                monkeypatch.setattr(sys, "executable", "/bin/false")
            assert store.pid is not None
            os.kill(store.pid, signal.SIGKILL)
            await events.wait(prefix)
            await store.close()
            await store.close()

    run(main())


def test_an_address_of_another_host_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"203\.0\.113\.1: that is no address of this host"):
            await StoreProcess("203.0.113.1", 0).open()

    run(main())


def test_a_port_that_is_taken_is_waited_for_and_its_holder_named() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(BusyError, match=f"127.0.0.1:{port}: process {os.getpid()} "):
                await StoreProcess("127.0.0.1", port, port_wait_s=0.0).open()
            store = StoreProcess("127.0.0.1", port, port_wait_s=DEADLINE_S)
            opening = asyncio.create_task(store.open())
            await asyncio.sleep(0)
        await opening
        assert store.port == port
        await store.close()

    run(main())


OWNER = """
    import asyncio, sys
    from elastictrain.supervisor.store_process import StoreProcess

    async def main():
        store = StoreProcess("127.0.0.1", int(sys.argv[1]))
        await store.open()
        print(store.port, store.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


def _owner(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_store_ends_with_its_supervisor_and_the_next_one_takes_the_port() -> None:
    port, pids = 0, []
    for _ in range(3):
        with _owner(port) as owner:
            assert owner.stdout is not None
            port, pid = map(int, owner.stdout.readline().split())
            client = client_of(port)
            client.put("a", b"1", 0)  # a connection that is open when the store dies
            pids.append(pid)
            owner.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    assert len(set(pids)) == 3
    with pytest.raises(EtcdError, match="connection refused"):
        client_of(port).get("a")


def test_what_has_no_lease_outlives_the_store_and_what_has_one_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        events = Events()
        store = StoreProcess("127.0.0.1", 0, events, keep=tmp_path / "store.json")
        await store.open()
        client = client_of(store.port)

        def write() -> int:
            client.put("plan", b"\xff1", 0)
            written, stored = client.compare_and_swap("plan", b"\xff2", client.get("plan").mod_revision, 0)  # type: ignore[union-attr]
            assert written
            assert stored is not None
            client.put("gone", b"1", 0)
            client.delete("gone")
            client.put("node", b"lives", client.grant_lease(60))
            return stored.mod_revision

        revision = await asyncio.to_thread(write)
        assert store.pid is not None
        os.kill(store.pid, signal.SIGKILL)
        await events.wait("store_started", 2)

        def read() -> None:
            assert client.get("plan") == Stored(b"\xff2", revision)
            assert client.get("gone") is None
            assert client.get("node") is None
            client.put("node", b"lives", client.grant_lease(60))
            node = client.get("node")
            assert node is not None
            assert node.mod_revision > revision
            assert client.compare_and_swap("plan", b"3", revision, 0)[0], "who had read it then may change it now"

        await asyncio.to_thread(read)
        client.close()
        await store.close()
        assert not events.named("store_begins_empty")
        assert (tmp_path / "store.json").stat().st_mode & 0o777 == 0o600

    run(main())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"format": 1, "keys": {', "it is damaged"),
        (b'{"format": 1, "revision": 5, "keys": {"YQ==": {"value": "?"}}}', "it is damaged"),
        (b"[]", "it is damaged"),
        (b'{"format": 2, "revision": 5, "keys": {}}', "its format is 2, and 1 is known here"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_store_begins_empty(
    tmp_path: Path, content: bytes, why: str
) -> None:
    async def main() -> None:
        events = Events()
        path = tmp_path / "store.json"
        path.write_bytes(content)
        store = StoreProcess("127.0.0.1", 0, events, keep=path)
        await store.open()
        said = await events.wait("store_begins_empty")
        assert said["path"] == str(path)
        assert said["error"].startswith(why)
        client = client_of(store.port)
        await asyncio.to_thread(client.put, "plan", b"1", 0)
        assert kept.read(path).lasting().keys() == {b"plan"}
        client.close()
        await store.close()

    run(main())


def test_a_disk_that_cannot_be_written_costs_the_memory_of_it_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        events = Events()
        store = StoreProcess("127.0.0.1", 0, events, keep=tmp_path / "nowhere" / "store.json")
        await store.open()
        client = client_of(store.port)
        for value in (b"0", b"1"):
            await asyncio.to_thread(client.put, "plan", value, 0)
        for _ in range(20):
            assert (await asyncio.to_thread(client.get, "plan")).value == b"1"  # type: ignore[union-attr]
        assert (await events.wait("store_keep_failed"))["error"] == "No such file or directory"
        assert len(events.named("store_keep_failed")) == 1, "said once, and not by every request"
        (tmp_path / "nowhere").mkdir()
        await asyncio.to_thread(client.put, "plan", b"2", 0)
        assert kept.read(tmp_path / "nowhere" / "store.json").lasting()[b"plan"].value == b"2"
        client.close()
        await store.close()

    run(main())


def test_a_disk_that_stands_still_holds_up_who_changes_something_for_a_moment_and_nobody_else(
    mortal_disk: DeadDisk,
) -> None:
    async def main() -> None:
        events = Events()
        path = mortal_disk.path / "store.json"
        store = StoreProcess("127.0.0.1", 0, events, keep=path)
        await store.open()
        client = client_of(store.port)
        await asyncio.to_thread(client.put, "plan", b"1", 0)
        mortal_disk.die()
        await asyncio.to_thread(client.put, "plan", b"2", 0)
        assert "has not answered" in (await events.wait("store_keep_failed"))["error"]
        assert (await asyncio.to_thread(client.get, "plan")).value == b"2"  # type: ignore[union-attr]
        mortal_disk.come_back()
        await until(lambda: kept.read(path).lasting()[b"plan"].value == b"2")
        client.close()
        await store.close()

    run(main())
