"""The persister as the training process sees it: hand over a snapshot, ask what is durable, wait where it must be.

The process is started at the first snapshot, in a session of its own, and started again if it dies or gives up on a
stalled store; the newest snapshot is then handed over again. Where the store lives in this process's own memory
(`memory://`), the work is done by a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastictrain import cgroups
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.persist_loop import PersisterSettings, PersistLoop, Report, Request
from elastictrain.protocol import ENV_RUN_DIR

FIRST_RESTART_PAUSE_S = 0.2
LONGEST_RESTART_PAUSE_S = 30.0
LAUNCH_TIMEOUT_S = 10.0
"""How long the first hand-over waits for the process to begin, which takes milliseconds."""

# A process that is forked (a loader of the training data) while another thread starts the persister inherits the pipe
# on whose end of file that thread waits, and keeps it open for as long as it lives: Popen would never return. So
# nobody forks while a persister is being started.
_starting = threading.Lock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


@dataclass(frozen=True, slots=True)
class PersisterStatus:
    """Where durability stands.

    Args:
        durable_step: global step of the newest snapshot that is durable; None before the first.
        durable_at_s: when it became so, of `time.monotonic`.
        last_seconds: how long that took.
        pending_step: the newest snapshot that was handed over and is not durable yet.
        last_error: what went wrong last, until something is durable again; without secrets.
        num_restarts: how often the process had to be started again.
    """

    durable_step: int | None = None
    durable_at_s: float | None = None
    last_seconds: float | None = None
    pending_step: int | None = None
    last_error: str | None = None
    num_restarts: int = 0


def _ignore(_report: Report) -> None: ...


class Persister:
    """Makes snapshots durable beside the training.

    Args:
        settings: what the process is told.
        on_report: called for each report, on a thread of the persister; must not block for long.
        in_process: use a thread instead of a process; default: where the store is this process's own memory.
    """

    def __init__(
        self,
        settings: PersisterSettings,
        on_report: Callable[[Report], None] = _ignore,
        *,
        in_process: bool | None = None,
    ) -> None:
        # What vanishes with this process is nothing that a later start could rely on.
        self._settings = replace(settings, state_dir="") if is_own_memory(settings) else settings
        self._on_report = on_report
        self._in_process = is_own_memory(settings) if in_process is None else in_process
        self._changed = threading.Condition()
        self._status = PersisterStatus()
        self._pending: Request | None = None
        self._failed_step: int | None = None
        """The last snapshot of this step will never be durable."""
        self._is_broken = False
        """The thread that keeps a process running, or is in place of one, has died: nothing more will be durable."""
        self._closing = False
        self._process: subprocess.Popen[str] | None = None
        self._loop: PersistLoop | None = None
        self._thread: threading.Thread | None = None
        self._launched = threading.Event()

    @property
    def status(self) -> PersisterStatus:
        with self._changed:
            return self._status

    @property
    def pid(self) -> int | None:
        """The process, where there is one."""
        with self._changed:
            return self._process.pid if self._process is not None else None

    def begin(self) -> None:
        """Starts now, to say in the store that this worker group has begun; otherwise it is the first snapshot that
        starts it. Returns at once."""
        with self._changed:
            if self._thread is None:
                self._launch()
        if not self._in_process:
            self._launched.wait(LAUNCH_TIMEOUT_S)

    def _launch(self) -> None:
        if self._in_process:
            self._loop = PersistLoop(self._settings, self._receive)
        thread = threading.Thread(target=self._run, name="persister", daemon=True)
        thread.start()
        self._thread = thread

    def submit(self, snapshot: MemorySnapshot) -> None:
        """Hands over a snapshot; returns at once. One that was waiting is superseded. One of a step that has failed
        takes the place of that: what is known of the one before says nothing of it."""
        request = Request(str(snapshot.path), snapshot.name)
        with self._changed:
            if self._closing:
                raise RuntimeError("the persister is closed")
            if self._is_broken:
                self._failed_step = snapshot.global_step
                return
            if self._failed_step == snapshot.global_step:
                self._failed_step = None
            self._pending = request
            self._status = replace(self._status, pending_step=snapshot.global_step)
            if self._thread is None:
                self._launch()
            elif self._process is not None:
                self._send({"persist": asdict(request)})
        if self._loop is not None:
            self._loop.submit(request)
        elif not self._in_process:
            # Until the child has begun its program, a fork elsewhere in this process (a loader process) would inherit
            # the pipe by which subprocess learns of that, and it would never learn it.
            self._launched.wait(LAUNCH_TIMEOUT_S)

    def wait(self, global_step: int, timeout_s: float) -> bool:
        """Waits until a snapshot of this step, or a later one, is durable.

        Returns:
            whether it is; False at once if it never will be, because its bytes in the memory tier are gone or damaged.
        """

        def is_decided() -> bool:
            durable = self._status.durable_step
            return (durable is not None and durable >= global_step) or self._failed_step == global_step

        with self._changed:
            self._changed.wait_for(is_decided, timeout_s)
            durable = self._status.durable_step
            return durable is not None and durable >= global_step

    def has_failed(self, global_step: int) -> bool:
        """Whether this snapshot will never be durable: its bytes in the memory tier are gone or damaged."""
        with self._changed:
            return self._failed_step == global_step

    def close(self, *, finish: bool, timeout_s: float | None = None) -> None:
        """Ends the persister.

        Args:
            finish: let it do what it was asked; else it is killed.
            timeout_s: how long to wait for that; default: its `grace_s`. A process that is still busy then is left to
                itself, and ends within its grace.
        """
        with self._changed:
            self._closing = True
            process, thread = self._process, self._thread
            if process is not None:
                if not finish:
                    process.kill()
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.close()
            self._changed.notify_all()
        if self._loop is not None:
            if finish:
                self._loop.finish()
            else:
                self._loop.abandon()
        if thread is not None:
            thread.join(self._settings.grace_s if timeout_s is None else timeout_s)

    def _run(self) -> None:
        """The thread. Nobody waits for what it can do no more, whatever it dies of."""
        try:
            if self._loop is not None:
                self._loop.run()
            else:
                self._run_process()
        except BaseException as error:
            with self._changed:
                self._is_broken = True
                name = self._pending.name if self._pending is not None else ""
            self._receive(Report("failed", name, {"error": f"the persister ended: {type(error).__name__}"}))
            raise
        finally:
            self._launched.set()

    def _run_process(self) -> None:
        """Keeps a process running, until closed."""
        pause_s = FIRST_RESTART_PAUSE_S
        num_refused = 0
        while True:
            try:
                process = self._start()
            except OSError as error:  # no process, no descriptor, no memory to be had: for now
                num_refused += 1
                self._launched.set()
                self._receive(self._refused(error, num_refused, pause_s))
            else:
                num_refused = 0
                self._launched.set()
                began_s = time.monotonic()
                code = self._attend(process)
                with self._changed:
                    if self._closing:
                        return
                    self._status = replace(self._status, num_restarts=self._status.num_restarts + 1)
                if time.monotonic() - began_s > LONGEST_RESTART_PAUSE_S:
                    pause_s = FIRST_RESTART_PAUSE_S
                self._receive(Report("restarting", fields={"exit_code": code, "pause_s": pause_s}))
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause_s):
                    return
            pause_s = min(2 * pause_s, LONGEST_RESTART_PAUSE_S)

    def _refused(self, error: OSError, tries: int, pause_s: float) -> Report:
        """Says that no process could be started."""
        with self._changed:
            name = self._pending.name if self._pending is not None else ""
        text = f"the persister cannot be started: {error.strerror or error}"
        return Report("retrying", name, {"error": text, "tries": tries, "pause_s": pause_s})

    def _attend(self, process: subprocess.Popen[str]) -> int:
        """Hears what a process reports until it has ended. Returns its exit code."""
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):
                self._receive(Report(**json.loads(line)))
        code = process.wait()
        process.stdout.close()
        with self._changed:
            self._process = None
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        return code

    def _start(self) -> subprocess.Popen[str]:
        with _starting:
            process = subprocess.Popen(
                [sys.executable, "-m", "elastictrain.checkpoint.persister"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                bufsize=1,
                start_new_session=True,
            )
        if run_dir := os.environ.get(ENV_RUN_DIR):
            # At once: a rank that fails may leave it something to do before it has begun.
            cgroups.take_out(Path(run_dir), process.pid)
        with self._changed:
            self._process = process
            self._send({"configure": asdict(self._settings)})
            if self._pending is not None:
                self._send({"persist": asdict(self._pending)})
            if self._closing:
                assert process.stdin is not None
                process.stdin.close()
        return process

    def _send(self, message: Mapping[str, Any]) -> None:
        """A process that is gone does not mind: the next one is told again."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self, report: Report) -> None:
        with self._changed:
            step = report.global_step
            match report.kind:
                case "persisted" if step is not None:
                    durable = self._status.durable_step
                    self._status = replace(
                        self._status,
                        durable_step=step if durable is None else max(step, durable),
                        durable_at_s=time.monotonic(),
                        last_seconds=report.fields["seconds"],
                        last_error=None,
                    )
                    self._settle(report.name)
                case "failed" | "fenced":
                    self._failed_step = step
                    self._status = replace(self._status, last_error=report.fields["error"])
                    self._settle(report.name)
                case "retrying" | "tidying_failed":
                    self._status = replace(self._status, last_error=report.fields["error"])
                case "stalled":
                    text = f"the store moved nothing for {report.fields['seconds']} s"
                    self._status = replace(self._status, last_error=text)
                case "waiting_for_other":
                    text = "the persister of an earlier worker group is at work still"
                    self._status = replace(self._status, last_error=self._status.last_error or text)
                case "restarting":
                    text = f"the persister ended with exit code {report.fields['exit_code']}"
                    self._status = replace(self._status, last_error=self._status.last_error or text)
            self._changed.notify_all()
        self._on_report(report)

    def _settle(self, name: str) -> None:
        if self._pending is not None and self._pending.name == name:
            self._pending = None
            self._status = replace(self._status, pending_step=None)


def is_own_memory(settings: PersisterSettings) -> bool:
    """Whether the store would vanish with the process that writes it."""
    protocol = settings.url.partition("://")[0]
    return protocol == "memory" or (
        protocol == "faulty" and settings.storage_options.get("target", "memory") == "memory"
    )
