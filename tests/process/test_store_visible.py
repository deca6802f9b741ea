"""A store that fails while a job trains: its events and its status say so, and stop saying so once it works."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from elastictrain.core.status import Status
from elastictrain.protocol import JOURNAL_FILE
from elastictrain.supervisor.journal_reader import JournalReader
from elastictrain.supervisor.record import read_status
from tests.process.fake import request, socket_of
from tests.process.faulty import GLOBAL_BATCH
from tests.process.helpers import run_cli, start_cli, wait_until, write_job


def failing_for_s(state: Path) -> float:
    _, _, body = request(socket_of(state), "GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    return float(families["elastictrain_store_error_seconds"].samples[0].value)


def point_at(link: Path, target: str) -> None:
    """At once: the persister is at work, and must not find nothing, which it would mend."""
    made = link.with_name("next")
    made.symlink_to(target)
    made.replace(link)


def test_a_store_that_fails_shows_in_status_events_and_metrics(tmp_path: Path) -> None:
    state, store = tmp_path / "state", tmp_path / "disk" / "store"
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").write_text("no folder")
    point_at(tmp_path / "disk", "whole")
    path = write_job(
        tmp_path,
        "tests.process.faulty:Task",
        params={"pause_s": 0.02, "marks": str(tmp_path)},
        train={"max_steps": 1_000_000, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 4},
        data={"shuffle": False},
        checkpoint={"url": str(store), "every_steps": 5},
    )

    def status() -> Status:
        return read_status(state, "job", daemon_running=True)

    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: status().snapshots.durable)
        assert failing_for_s(state) == 0
        assert status().snapshots.store_error is None
        point_at(tmp_path / "disk", "broken")
        wait_until(lambda: status().snapshots.store_error)
        wait_until(lambda: failing_for_s(state) > 0)
        shown = run_cli("status", "--state-dir", state)
        assert "fails for" in shown.stdout
        assert str(store) in shown.stdout
        document = json.loads(run_cli("status", "--state-dir", state, "--json").stdout)
        assert str(store) in document["snapshots"]["store_error"]["error"]
        failed_at = document["snapshots"]["durable"]["step"]
        point_at(tmp_path / "disk", "whole")
        wait_until(lambda: status().snapshots.store_error is None)
        assert status().snapshots.durable.step > failed_at
        wait_until(lambda: failing_for_s(state) == 0)
        assert "fails for" not in run_cli("status", "--state-dir", state).stdout
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    events = JournalReader(state / JOURNAL_FILE).read(kinds=["persister_retrying"])
    assert events
    assert str(store) in events[0].fields["error"]
    assert events[0].fields["tries"] == 1


def test_credentials_of_a_store_are_in_nothing_that_a_job_says_or_shows(tmp_path: Path) -> None:
    """Whether they are in its options or in its URL, and though its client says them in an error."""
    state = tmp_path / "state"
    url, option = "hunter2-of-url", "hunter2-of-options"
    path = write_job(
        tmp_path,
        "tests.process.faulty:Task",
        params={"marks": str(tmp_path)},
        train={"max_steps": 3, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 4},
        checkpoint={
            "url": f"faulty://me:{url}@host/store",
            "storage_options": {"secret": option, "faults": {"write:1": "fail", "put:1": "fail"}},
        },
    )
    ran = run_cli("run", path, "--state-dir", state, "--output", "json")
    assert ran.code == 0, ran.stdout
    assert len(ran.events_named("persister_retrying")) == 2
    said = [ran]
    for command in (
        ["status", "--state-dir", state],
        ["status", "--state-dir", state, "--json"],
        ["events", "--state-dir", state],
        ["events", "--state-dir", state, "--json"],
        ["checkpoints", "list", "--state-dir", state],
        ["checkpoints", "show", "--state-dir", state],
        ["config", "show", path],
    ):
        said.append(run_cli(*command))
        assert said[-1].code in (0, 5, 66), (
            command,
            said[-1],
        )  # completed; to another process this store is an empty one
    assert "faulty://***@host/store" in said[-1].stdout
    with_secret = {
        file.name
        for file in tmp_path.rglob("*")
        if file.is_file() and any(secret.encode() in file.read_bytes() for secret in (url, option))
    }
    assert with_secret == {"job.toml", "spec.json"}
    for finished in said:
        assert url not in finished.stdout + finished.stderr
        assert option not in finished.stdout + finished.stderr
