"""The systemd units: as the repository shows them, as systemd reads them, and as they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastictrain import errors
from elastictrain.cli.service_commands import app
from elastictrain.cli.service_units import Installation, hidden_part, write_reference
from elastictrain.config.schema import CheckpointConfig
from elastictrain.core.events import Kind
from elastictrain.core.policy import RankEnd, classify
from elastictrain.core.status import EXIT_CODES
from elastictrain.supervisor.schema import render

ROOT = Path(__file__).resolve().parents[2]
SERVICE = Path("etc/systemd/system/elastictrain@.service")


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def test_the_repository_shows_what_is_installed(tmp_path: Path) -> None:
    """After a change of the templates: python -m elastictrain.cli.service_units systemd"""
    write_reference(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in (ROOT / "systemd").iterdir())
    for path in tmp_path.iterdir():
        assert (ROOT / "systemd" / path.name).read_text() == path.read_text(), path.name


def test_the_schema_in_docs_is_that_of_the_model() -> None:
    """After a change: python -m elastictrain.supervisor.schema > docs/status.schema.json"""
    assert (ROOT / "docs" / "status.schema.json").read_text() == render()


def test_the_documentation_names_every_kind_state_and_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for kind in Kind:
        assert f"| `{kind}` |" in text, kind
    for state, code in EXIT_CODES.items():
        assert re.search(rf"\| `{state}` .*\| {code} \|", text), state


def test_a_service_does_not_start_again_what_must_be_mended_first() -> None:
    """The unit, the supervisor's own policy and the three pages that list codes are of one mind."""
    found = settings(Installation(("/usr/bin/elastictrain",)).files()[SERVICE])
    prevented = {int(code) for code in found["RestartPreventExitStatus"][0].split()}
    assert prevented == set(errors.FINAL_CODES)
    for error in errors.BY_NAME.values():
        cause = classify([RankEnd(0, error.exit_code, error.__name__, "it failed")])
        assert cause.can_retry is (error.exit_code not in prevented), error
    hopeless = (errors.UsageError, errors.ConfigError, errors.TaskError, errors.MissingInputError, errors.HaltError)
    assert {error.exit_code for error in hopeless} <= prevented
    for error in (errors.WorkerFailedError, errors.BusyError, errors.StorageError):
        assert error.exit_code not in prevented, error


def test_the_pages_list_the_same_codes() -> None:
    final = sorted(errors.FINAL_CODES)
    supervision = (ROOT / "docs" / "supervision.md").read_text()
    table = re.findall(r"^\| ([0-9, ]+) \| (.+) \|$", supervision.partition("## Exit codes")[2], re.MULTILINE)
    by_words = {words: [int(code) for code in codes.split(",")] for codes, words in table}
    mistakes = by_words.pop("a mistake: see the message")
    assert sorted([*mistakes, *by_words.pop("halted")]) == final
    assert not {code for codes in by_words.values() for code in codes} & set(final)
    operations = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    assert f"codes that a restart cannot mend: {', '.join(map(str, final))}. " in operations
    readme = (ROOT / "README.md").read_text().partition("## Exit codes")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}
    assert set(final) | {error.exit_code for error in errors.BY_NAME.values()} - {1} == listed - {0}


def test_there_is_time_for_the_last_snapshot() -> None:
    found = settings(Installation(("/usr/bin/elastictrain",)).files()[SERVICE])
    default_s = CheckpointConfig().preempt_deadline_s
    assert int(found["TimeoutStopSec"][0]) >= default_s + 30


@pytest.mark.parametrize("user", [False, True])
def test_systemd_finds_nothing_wrong(tmp_path: Path, user: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    command = ("/bin/true",)  # it must be executable
    for path, text in Installation(command, user=user).files().items():
        (tmp_path / path.name).write_text(text)
    for name in ("elastictrain@.service", "elastictrain.target"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *(["--user"] if user else []), str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        said = [line for line in (done.stdout + done.stderr).splitlines() if "elastictrain" in line]
        assert not said


def test_install_and_uninstall_below_a_root(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(app, ["install", "--root", str(tmp_path), "--bin", "/opt/et/bin/elastictrain", "--stop-timeout", "900"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / SERVICE).read_text()
    found = settings(text)
    assert found["ExecStart"] == [
        "/opt/et/bin/elastictrain run /etc/elastictrain/%i.toml --state-dir %S/elastictrain/%i --service --output json"
    ]
    assert found["ExecStopPost"] == ["/opt/et/bin/elastictrain service settle --state-dir %S/elastictrain/%i"]
    assert found["TimeoutStopSec"] == ["900"]
    assert "@" not in re.sub(r"elastictrain@|%", "", text), "a placeholder is left"
    assert (tmp_path / "etc/sysusers.d/elastictrain.conf").exists()
    assert "systemctl enable --now elastictrain@NAME" in done.output
    assert run(app, ["uninstall", "--root", str(tmp_path)]).exit_code == 0
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_service_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")  # no service manager to tell
    done = CliRunner().invoke(app, ["install", "--user", "--bin", "/opt/et"])
    assert done.exit_code == 0, done.output
    found = settings((tmp_path / "systemd/user/elastictrain@.service").read_text())
    assert "User" not in found
    assert "CapabilityBoundingSet" not in found, "a user's manager cannot"
    assert found["ExecStart"][0].startswith("/opt/et run %E/elastictrain/%i.toml ")
    shown = CliRunner().invoke(app, ["show", "--user", "--bin", "/opt/et"])
    assert str(tmp_path / "systemd/user/elastictrain@.service") in shown.output


def test_a_place_that_the_services_may_not_enter_is_named() -> None:
    # Not in pytest's own folder, which is closed itself.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        command = place / "elastictrain"
        command.touch(mode=0o755)
        assert hidden_part((str(command),)) == place
        place.chmod(0o755)
        assert hidden_part((str(command),)) in (None, *Path(sys.executable).resolve().parents)


def test_odd_places_are_quoted() -> None:
    installation = Installation(("/opt/my et/100%/bin/python", "-m", "elastictrain.cli.main"))
    assert installation.exec_start.startswith('"/opt/my et/100%%/bin/python" -m elastictrain.cli.main run ')


def test_relative_places_are_refused() -> None:
    for option in ("--bin", "--config-dir"):
        done = CliRunner().invoke(app, ["show", option, "here/et"])
        assert isinstance(done.exception, errors.UsageError)


def test_the_default_command_is_the_one_that_runs() -> None:
    done = CliRunner().invoke(app, ["show"])
    assert f"ExecStart={sys.executable}" in done.output or "bin/elastictrain run" in done.output
