"""The hosts that the other tests here stand on: that they are several, and that they die as hosts do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.node import Node
from elastictrain.drill.nodes.process import NodeProcess
from elastictrain.errors import UsageError
from elastictrain.procs import adopt_orphans, reap_orphans
from tests.nodes.clock import shifted_clock
from tests.nodes.possible import skip_unless_possible
from tests.process.helpers import ROOT, wait_until

TALK = Path(__file__).with_name("talk.py")
PORT = 4000  # every node has all ports to itself


class Talk:
    """A connection between two nodes on which numbers go back and forth.

    Args:
        folder: for what the two print.
        client: node that asks.
        server: node that answers.
        to: how the client calls the server; default: its address.
    """

    def __init__(self, folder: Path, client: Node, server: Node, to: str | None = None) -> None:
        heard, self.answers = folder / "server.txt", folder / "client.txt"
        self.server = self._start(server, heard, "serve", str(PORT))
        wait_until(lambda: heard.exists() and heard.read_text())
        self.client = self._start(client, self.answers, "ask", to or server.address, str(PORT))

    @staticmethod
    def _start(node: Node, output: Path, *args: str) -> NodeProcess:
        with output.open("w") as file:
            return node.popen([sys.executable, TALK, *args], stdout=file)

    @property
    def num_answers(self) -> int:
        return len(self.answers.read_text().splitlines())

    def goes_on(self) -> None:
        """Waits for ten more answers."""
        before = self.num_answers
        wait_until(lambda: self.num_answers >= before + 10)
        assert self.client.poll() is None, self.answers.read_text()[-100:]


def retransmitted(*nodes: Node) -> int:
    """Segments sent again so far: somebody speaks and is not heard."""
    return sum(node.tcp_counter("RetransSegs") for node in nodes)


def test_nodes_are_machines_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    for node in cluster:
        assert node.run(["hostname"]) == node.name
        assert node.run(["sh", "-c", "echo mine > /dev/shm/file; echo mine > /tmp/file; cat /dev/shm/file"]) == "mine"
        assert f'"hostname": "{node.name}"' in node.run(["cat", "/proc/1/cmdline"]), "it sees processes of others"
        (tmp_path / node.name).write_text("seen")
        assert node.run(["ls", tmp_path]).split() == [n.name for n in cluster][: node.index + 1]
    assert not Path("/dev/shm/file").exists()
    for node in cluster:
        assert [node.run(["getent", "ahostsv4", other.name]).split()[0] for other in cluster] == [
            other.address for other in cluster
        ]


def test_nothing_is_on_the_network_of_the_machine(tmp_path: Path) -> None:
    skip_unless_possible()

    def interfaces() -> str:
        return subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout

    before = interfaces(), Path("/proc/mounts").read_text()
    with Cluster(2, shared=[tmp_path]):
        assert (interfaces(), Path("/proc/mounts").read_text()) == before


def test_a_cut_link_is_silence_and_a_healed_one_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    client, server, _ = cluster
    talk = Talk(tmp_path, client, server, to=server.name)
    talk.goes_on()
    for end in (client, server):  # whichever side's cable it is
        end.cut()
        before = retransmitted(client, server)
        wait_until(lambda before=before: retransmitted(client, server) > before)
        assert talk.client.poll() is None
        assert "state UP" in end.run(["ip", "-oneline", "link", "show", "eth0"]), "the node sees its cable pulled"
        end.heal()
        talk.goes_on()


def test_a_partition_cuts_between_groups_only(cluster: Cluster, tmp_path: Path) -> None:
    client, server, other = cluster
    talk = Talk(tmp_path, client, server)
    talk.goes_on()
    cluster.cut_between([client], [server])
    before = retransmitted(client, server)
    wait_until(lambda: retransmitted(client, server) > before)
    assert talk.client.poll() is None
    for end in (client, server):
        (tmp_path / end.name).mkdir()
        Talk(tmp_path / end.name, end, other).goes_on()
        other.kill()
        other.boot()
    cluster.heal_between([client], [server])
    talk.goes_on()


def test_a_partition_holds_for_a_node_that_boots(cluster: Cluster) -> None:
    one, two, three = cluster
    two.kill()
    cluster.cut_between([one], [two, three])
    two.boot()
    for sender, receiver in ((one, two), (two, one), (three, one)):
        neighbours = sender.run(["ip", "neighbour", "show", receiver.address])
        assert "PERMANENT" in neighbours, neighbours
    assert not two.run(["ip", "neighbour", "show", three.address, "nud", "permanent"])


def test_a_killed_node_sends_no_farewell(cluster: Cluster, tmp_path: Path) -> None:
    client, server, _ = cluster
    talk = Talk(tmp_path, client, server)
    talk.goes_on()
    # One that nobody waits for, of a session of its own, is a process of the node all the same.
    server.run(["sh", "-c", "setsid --fork sleep 1000 > /dev/null 2>&1"])
    wait_until(lambda: {p.name() for p in server.processes()} == {Path(sys.executable).name, "sleep"})
    processes = server.processes()

    server.kill()
    assert not any(map(lives, processes))
    before = retransmitted(client)
    wait_until(lambda: retransmitted(client) > before)
    assert talk.client.poll() is None, "the client was told"
    assert client.tcp_counter("EstabResets") == 0

    server.boot()
    kept = {path.parts[2] for path in cluster.kept if path.parts[1] == "tmp"}  # where the checkout is in there
    found = server.run(["ls", "/dev/shm", "/tmp", "--ignore=*pytest*"]).split()
    assert [name for name in found if name not in kept] == ["/dev/shm:", "/tmp:"]
    # Like a machine that is back: it knows nothing of the connection, and says so when asked.
    assert talk.client.wait() == 0
    assert talk.answers.read_text().splitlines()[-1] == "ConnectionResetError"


def test_a_paused_node_stands_still_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    client, server, _ = cluster
    talk = Talk(tmp_path, client, server)
    talk.goes_on()
    client.pause()
    assert {p.status() for p in client.processes()} == {psutil.STATUS_STOPPED}
    client.resume()
    talk.goes_on()
    server.pause()
    server.kill()  # also while it stands still
    talk.client.kill()
    assert talk.client.wait() == -signal.SIGKILL


def test_signals_reach_the_program(cluster: Cluster) -> None:
    script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    process = cluster[0].popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.outside is not None and process.outside.status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait() == 7


def test_a_function_of_the_test_is_called_on_the_network_of_a_node(cluster: Cluster) -> None:
    def addresses() -> set[str]:
        return {address.address for found in psutil.net_if_addrs().values() for address in found}

    mine = addresses()
    for node in cluster:
        assert node.address in node.call(addresses)
    assert addresses() == mine


def test_a_clock_that_is_wrong_is_wrong_for_programs_and_right_for_durations(cluster: Cluster, tmp_path: Path) -> None:
    script = "import time, datetime as d; print(time.time(), d.datetime.now().timestamp(), time.monotonic())"
    for shift_s in (-3600, 3600):
        before_s, before_monotonic_s = time.time(), time.monotonic()
        process = cluster[0].popen(
            [sys.executable, "-c", script],
            env={**os.environ, **shifted_clock(tmp_path, shift_s)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        wall_s, date_s, monotonic_s = map(float, process.stdout.read().split())
        for shifted_s in (wall_s, date_s):
            # A date holds whole microseconds.
            assert before_s - 1e-5 < shifted_s - shift_s < time.time() + 1e-5
        assert before_monotonic_s <= monotonic_s <= time.monotonic()


def lives(process: psutil.Process) -> bool:
    """Whether it runs, and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("paused", [False, True])
def test_nothing_outlives_a_killed_test(tmp_path: Path, paused: bool) -> None:
    skip_unless_possible()
    # A namespace ends when all its processes were waited for. Those that lose a parent outside of it go to whoever is
    # the heir out here: this process, which does what process 1 does on a whole machine.
    adopt_orphans()
    script = f"""
import sys, time
from pathlib import Path
from tests.nodes.clock import shifted_clock
from elastictrain.drill.nodes.cluster import Cluster
with Cluster(2, shared=[Path({str(tmp_path)!r})]) as cluster:
    for node in cluster:
        node.popen(["sleep", "987651"])
        node.run(["sh", "-c", "setsid --fork sleep 987651 > /dev/null 2>&1"])
    if {paused}:
        cluster[0].pause()
    print("ready", flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        left = psutil.Process(process.pid).children(recursive=True)
        left += [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987651"]]
        assert len(left) > 10
        process.kill()

    def nothing_lives() -> bool:
        reap_orphans()
        return not any(map(lives, left))

    wait_until(nothing_lives)
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"network-{process.pid}" in str(p.info["cmdline"])]


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    skip_unless_possible()
    cluster = Cluster(1, shared=[tmp_path])
    cluster.kept.append(Path("/tmp") / "never" / str(os.getpid()))
    with pytest.raises(UsageError, match=r"(?s)node0 did not start: .*never"), cluster:
        pass
