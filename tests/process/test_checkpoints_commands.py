"""`elastictrain checkpoints`, as a user runs it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from elastictrain.checkpoint.format import TensorSpec, digest, layout, snapshot_name
from elastictrain.checkpoint.memory_note import MemoryNote
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.cli import checkpoints_commands
from elastictrain.cli.checkpoints_commands import _size
from elastictrain.cli.lineage import find_source
from elastictrain.cli.snapshot_places import Place, find_place
from elastictrain.errors import BusyError
from elastictrain.protocol import JobIdentity
from tests.process.helpers import start_cli, wait_until
from tests.process.snapshot_payload import RUN_ID, arrays, fill, layouts, store_of, trainer, write
from tests.process.test_supervisor import write_faulty


def command(*arguments: object, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elastictrain.cli.main", "checkpoints", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=60,
    )


def as_json(*arguments: object, **kwargs):
    done = command(*arguments, "--json", **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def state_dir(tmp_path):
    """A job's state directory whose memory tier is the staging folder; steps 1 to 5 are stored, 4 and 5 staged."""
    folder = tmp_path / "job"
    folder.mkdir()
    tier = MemoryTier.staging(folder)
    for step in range(1, 6):
        snapshot = write(tier, step)
        with OpenSnapshot(snapshot.path, snapshot.name) as source:
            store_of(folder).put(source)
    tier.close()
    return folder


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12_900, "12.6 KiB"),
        (400 << 20, "400.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5000 << 40, "5,000.0 TiB"),
    ],
)
def test_sizes_are_in_a_unit_that_shows_them(size_bytes, shown):
    assert _size(size_bytes) == shown


def test_the_list_shows_the_size_of_a_small_snapshot(state_dir):
    size_bytes = as_json("show", "--state-dir", state_dir)["sizes"]["total"]
    first, *_ = command("list", "--state-dir", state_dir).stdout.splitlines()
    assert f"{size_bytes / 1024:.1f} KiB" in first


def test_list_and_show(state_dir):
    rows = as_json("list", "--state-dir", state_dir)
    assert [(r["global_step"], r["tier"]) for r in rows] == [
        *((step, tier) for step in (5, 4) for tier in ("memory", "durable")),
        *((step, "durable") for step in (3, 2, 1)),
    ]
    shown = as_json("show", "--state-dir", state_dir)
    assert {k: shown[k] for k in ("global_step", "applied", "skipped", "sample_position", "epoch", "world_size")} == {
        "global_step": 5,
        "applied": 5,
        "skipped": 0,
        "sample_position": 40,
        "epoch": 0,
        "world_size": 1,
    }
    model = store_of(state_dir).path / snapshot_name(5, RUN_ID) / "model.safetensors"
    assert shown["model_digest"] == digest(model.read_bytes())
    assert shown["tier"] == "memory"
    assert shown["run_id"] == RUN_ID
    assert shown["data_order"] == trainer(5)["data_order"]
    assert shown["versions"] == {"python": "3"}
    assert shown["sizes"]["model.safetensors"] == model.stat().st_size
    assert as_json("show", "--url", state_dir / "snapshots", "--step", 2)["global_step"] == 2
    text = command("show", "--state-dir", state_dir).stdout
    assert "global step" in text
    assert shown["model_digest"] in text
    assert "step        5" in command("list", "--state-dir", state_dir).stdout


def test_a_job_by_name_and_by_file(state_dir, tmp_path):
    root = tmp_path / "work"
    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "mine").symlink_to(state_dir)
    assert as_json("show", "mine", cwd=root)["global_step"] == 5
    (root / "job.toml").write_text('name = "mine"\ntask = "a:B"\n[train]\nmax_steps = 1\nmicro_batch_size = 1\n')
    assert as_json("show", "job.toml", cwd=root)["global_step"] == 5
    missing = command("show", "other", cwd=root)
    assert missing.returncode == 66
    assert "there is no job other" in missing.stderr
    nothing = command("list", cwd=root)
    assert nothing.returncode == 64


def test_verify_names_the_file(state_dir):
    assert all(row["sound"] for row in as_json("verify", "--state-dir", state_dir))
    path = store_of(state_dir).path / snapshot_name(3, RUN_ID) / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = command("verify", "--state-dir", state_dir)
    assert done.returncode == 65
    assert f"{path}: its content changed" in done.stdout
    rows = json.loads(command("verify", "--state-dir", state_dir, "--json").stdout)
    assert [(r["global_step"], r["damages"][0]["file"]) for r in rows if not r["sound"]] == [
        (3, "optimizer.safetensors")
    ]
    assert command("verify", "--state-dir", state_dir, "--step", 2).returncode == 0
    assert command("verify", "--state-dir", state_dir, "--step", 99).returncode == 66


def test_a_newer_format_is_refused_by_name(state_dir):
    path = store_of(state_dir).path / snapshot_name(3, RUN_ID) / "manifest.json"
    fields = {**json.loads(path.read_text()), "version": 7}
    del fields["checksum"]
    fields["checksum"] = digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(fields))
    done = command("show", "--state-dir", state_dir, "--step", 3)
    assert done.returncode == 65
    assert "snapshot format version 7" in done.stderr


def test_an_older_one_is_shown_and_exported_in_place_of_the_newest_only_with_a_warning(state_dir, tmp_path):
    listed = json.loads(command("list", "--state-dir", state_dir, "--json").stdout)
    rows = [row for row in listed if row["tier"] == "durable"]
    before = rows[1]["global_step"]
    for row in listed:
        if row["global_step"] == rows[0]["global_step"]:
            (Path(row["path"]) / "manifest.json").write_text("{")
    for arguments in (["show"], ["export", tmp_path / "out"]):
        done = command(*arguments, "--state-dir", state_dir, "--json")
        assert json.loads(done.stdout)["global_step"] == before
        assert f"{rows[0]['path']} is passed over: manifest.json" in done.stderr.replace("\n", "")


def test_prune(state_dir):
    store = store_of(state_dir)
    store.pin(RUN_ID, 2, "another run")
    (store.path / snapshot_name(4, RUN_ID) / "model.safetensors").unlink()
    leftover = store.path / snapshot_name(6, RUN_ID)
    leftover.mkdir()
    plan = as_json("prune", "--state-dir", state_dir, "--keep-last", 1, "--dry-run")
    assert plan["deleted"] == [snapshot_name(step, RUN_ID) for step in (1, 3, 4)]
    assert plan["leftovers"] == [leftover.name]
    assert f"would delete {leftover.name}" in command("prune", "--state-dir", state_dir, "--dry-run").stdout
    assert len(store.snapshots()) == 5
    assert leftover.exists()
    done = as_json("prune", "--state-dir", state_dir, "--keep-last", 1)
    assert (done["deleted"], done["leftovers"]) == (plan["deleted"], plan["leftovers"])
    assert not leftover.exists()
    assert [s.global_step for s in store.snapshots()] == [5, 2]


def test_prune_deletes_nothing_newer_than_what_is_sound(state_dir):
    store = store_of(state_dir)
    for step in (4, 5):
        (store.path / snapshot_name(step, RUN_ID) / "model.safetensors").unlink()
    deleted = as_json("prune", "--state-dir", state_dir, "--keep-last", 1)["deleted"]
    assert deleted == [snapshot_name(step, RUN_ID) for step in (1, 2)]


def test_export_writes_every_name(state_dir, tmp_path):
    target = tmp_path / "out"
    assert as_json("export", "--state-dir", state_dir, target)["tensors"] == 3
    loaded = safetensors.numpy.load_file(target / "model.safetensors")
    expected = arrays(5)["model.safetensors"]
    assert loaded.keys() == {"weight", "half", "tied"}
    for name in ("weight", "tied"):
        np.testing.assert_array_equal(loaded[name], expected["weight"])
    done = command("export", "--state-dir", state_dir, target, "--ema")
    assert done.returncode == 66
    assert "no averaged weights" in done.stderr


def test_export_of_averages_and_bfloat16(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    tier = MemoryTier.staging(folder)
    spec = {"w": TensorSpec("BF16", (3,))}
    writer = tier.begin(
        {
            "model.safetensors": layout({**spec, "buffer": TensorSpec("I64", ())}),
            "optimizer.safetensors": layout({}),
            "ema.safetensors": layout(spec),
        }
    )
    for file, content in {"model.safetensors": b"aabbcc", "ema.safetensors": b"ddeeff"}.items():
        begin, end = writer.layouts[file].offsets["w"]
        writer.buffers[file][begin:end] = content
    writer.commit(job="job", run_id=RUN_ID, global_step=1, versions={}, trainer={})
    tier.close()
    for options, content in (((), b"aabbcc"), (("--ema",), b"ddeeff")):
        target = tmp_path / "x.safetensors"
        assert command("export", "--state-dir", folder, target, *options).returncode == 0
        tensors = dict(safetensors.deserialize(target.read_bytes()))
        assert tensors["w"] == {"dtype": "BF16", "shape": [3], "data": content}
        assert tensors["buffer"]["data"] == bytes(8)


def test_nothing_there_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    assert as_json("list", "--state-dir", tmp_path / "empty") == []
    done = command("show", "--state-dir", tmp_path / "empty")
    assert done.returncode == 66
    assert "there is no snapshot in" in done.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_config_show_hides_the_credentials_of_a_store(tmp_path):
    (tmp_path / "job.toml").write_text(
        'task = "a:B"\n[train]\nmax_steps = 1\nmicro_batch_size = 1\n'
        '[checkpoint]\nurl = "s3://me:hunter22@host/x"\nstorage_options = { secret = "hunter22", anon = false }\n'
    )
    for options in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-m", "elastictrain.cli.main", "config", "show", str(tmp_path), *options],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "hunter22" not in done.stdout
        assert "***" in done.stdout


def test_the_command_loads_neither_torch_nor_fsspec(state_dir):
    script = (
        "import sys; from elastictrain.cli.main import main; "
        "sys.argv = ['elastictrain', 'checkpoints', 'list', '--state-dir', sys.argv[1]]; "
        "import contextlib\nwith contextlib.suppress(SystemExit): main()\n"
        "print([m for m in ('torch', 'fsspec', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, state_dir], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("unfit", ["a file", "a link in it", "somebody else's"])
def test_an_earlier_memory_path_that_is_unfit_by_now_costs_a_warning(state_dir, tmp_path, unfit):
    """What is in the store, and in memory elsewhere, is there all the same."""
    before = tmp_path / "before"
    if unfit == "a file":
        before.touch()
    else:
        ours = before / f"elastictrain-{os.geteuid()}"
        before.mkdir()
        if unfit == "a link in it":
            ours.symlink_to(tmp_path)
        elif os.geteuid() == 0:
            ours.mkdir()
            os.chown(ours, 65534, 65534)
        else:
            before.chmod(0)
    MemoryNote(state_dir).add(before)
    JobIdentity(RUN_ID, None).write(state_dir)
    done = command("list", "--state-dir", state_dir)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7
    (said,) = done.stderr.splitlines()
    assert str(before) in said
    told: list[str] = []
    assert find_source(str(state_dir), {}, told.append).global_step == 5
    assert [str(before) in text for text in told] == [True]
    before.chmod(0o700)


# ---- while a job writes and deletes


@pytest.fixture
def tier(state_dir):
    made = MemoryTier.staging(state_dir)
    yield made
    made.close()


def candidate_of(state_dir, step: int, tier_name: str):
    place = find_place(None, state_dir, None)
    return next(c for c, _ in place.candidates() if (c.global_step, c.tier) == (step, tier_name))


def overwrite(tier: MemoryTier, state_dir) -> None:
    write(tier, 6)
    write(tier, 7)


def be_killed_while_overwriting(tier: MemoryTier, state_dir) -> None:
    for _ in range(2):  # step 4's slot, then step 5's
        tier.begin(layouts())
        tier.close()
        write(tier, 6)


def delete_the_tier(tier: MemoryTier, state_dir) -> None:
    assert tier.clean()


@pytest.mark.parametrize("meanwhile", [overwrite, be_killed_while_overwriting, delete_the_tier])
def test_what_is_overwritten_in_memory_before_it_is_read_is_gone_and_not_damaged(state_dir, tier, meanwhile):
    candidates = [candidate_of(state_dir, step, "memory") for step in (4, 5)]
    assert [candidate.verify() for candidate in candidates] == [[], []]
    meanwhile(tier, state_dir)
    assert candidates[0].verify() is None


def test_a_manifest_that_is_damaged_before_it_is_read_is_damaged(state_dir):
    candidate = candidate_of(state_dir, 5, "memory")
    (candidate.memory.path / "manifest.json").write_text("{")
    assert [damage.file for damage in candidate.verify()] == ["manifest.json"]


def test_a_slot_that_somebody_has_locked_is_asked_for_again_and_left_out_if_it_stays_locked(
    state_dir, capsys, monkeypatch
):
    candidate = candidate_of(state_dir, 4, "memory")
    with (candidate.memory.path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="is being written"):
            candidate.verify()
        waits = iter([None])

        def sleep(_seconds: float) -> None:
            if next(waits, "over") == "over":
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        assert checkpoints_commands._verify_patiently(candidate) == []
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(checkpoints_commands, "BUSY_PATIENCE_S", 0.0)
        assert checkpoints_commands._verify_patiently(candidate) is None
    assert f"{candidate.name} is left out: {candidate.memory.path} is being written" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "after the manifest", "after the first file"])
@pytest.mark.parametrize("what", ["delete", "do the step again"])
def test_a_durable_one_that_is_deleted_or_replaced_while_it_is_read_is_not_damaged(
    state_dir, tmp_path, monkeypatch, what, when
):
    candidate = candidate_of(state_dir, 3, "durable")
    store = candidate.store
    other = tmp_path / "other"
    other.mkdir()
    anew = MemoryTier.staging(other)
    writer = anew.begin(layouts())
    fill(writer, 33)  # the same step, other content
    again = writer.commit(job="job", run_id=RUN_ID, global_step=3, versions={}, trainer=trainer(3))

    def act() -> None:
        if what == "delete":
            store.delete(candidate.name)
            return
        (store.path / candidate.name).rename(tmp_path / "old")
        with OpenSnapshot(again.path, again.name) as source:
            store_of(state_dir).put(source)

    opened, original = [], store.open

    def interrupted(name: str, file: str):
        opened.append(file)
        if len(opened) == (1 if when == "after the manifest" else 2):
            act()
        return original(name, file)

    if when == "before":
        act()
    else:
        monkeypatch.setattr(store, "open", interrupted)
    assert candidate.verify() == (None if what == "delete" else [])
    anew.close()


def test_the_list_leaves_out_what_is_deleted_before_its_manifest_is_read(state_dir, monkeypatch, capsys):
    original = Place.candidates

    def then_delete(place: Place):
        found = original(place)
        place.store.delete(snapshot_name(2, RUN_ID))
        return found

    monkeypatch.setattr(Place, "candidates", then_delete)
    checkpoints_commands.list_(state_dir=state_dir, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["global_step"] for row in rows if row["tier"] == "durable"] == [5, 4, 3, 1]
    assert not any("damage" in row for row in rows)


def test_verify_looks_again_where_all_that_was_listed_is_gone(state_dir, tier, monkeypatch, capsys):
    original, lists = Place.candidates, []

    def then_overtake(place: Place):
        found = original(place)
        lists.append(found)
        if len(lists) == 1:
            for step in (6, 7, 8):
                write(tier, step)
            for step in range(1, 6):
                place.store.delete(snapshot_name(step, RUN_ID))
        return found

    monkeypatch.setattr(Place, "candidates", then_overtake)
    checkpoints_commands.verify(state_dir=state_dir, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [(row["global_step"], row["tier"], row["sound"]) for row in rows] == [
        (8, "memory", True),
        (7, "memory", True),
    ]


@pytest.mark.long
@pytest.mark.parametrize("command_name", ["verify", pytest.param("list", marks=pytest.mark.soak)])
def test_no_snapshot_of_a_running_job_is_called_damaged(tmp_path, command_name):
    """It takes one after every step, and keeps but the newest: most of what is listed is gone a moment later."""
    state = tmp_path / "state"
    path = write_faulty(tmp_path, train={"max_steps": 10**6}, checkpoint={"every_steps": 1, "keep_last": 1})
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        drain = threading.Thread(target=process.stdout.read)  # a full pipe would stop the job
        drain.start()
        wait_until(lambda: state.exists() and as_json("list", "--state-dir", state))
        seen = set()
        for _ in range(6):
            rows = as_json(command_name, "--state-dir", state)
            assert rows
            assert not [row for row in rows if "damage" in row or not row.get("sound", True)]
            seen |= {row["global_step"] for row in rows if row["tier"] == "memory"}
        assert len(seen) > 2, "the job goes on meanwhile"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        drain.join()
