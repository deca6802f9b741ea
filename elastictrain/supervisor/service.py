"""The supervisor with everything around it: journal, control interface, word to systemd, for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

from elastictrain.core.lifecycle import State
from elastictrain.core.status import SupervisorView
from elastictrain.supervisor import notify
from elastictrain.supervisor.control import Control, ControlSettings
from elastictrain.supervisor.record import Record
from elastictrain.supervisor.supervisor import Ending, Supervisor

NOTIFY_INTERVAL_S = 1.0
"""How often systemd hears how it goes, where it does not want to hear more often."""


async def serve(supervisor: Supervisor, record: Record, settings: ControlSettings) -> Ending:
    """Runs a supervisor to its end.

    Args:
        supervisor: of the job; its sink is `record`.
        record: its journal.
        settings: who may reach the control interface.

    Raises:
        BusyError: another supervisor serves this job.
        ElasticTrainError: the job could not even be started.
    """

    def view() -> SupervisorView:
        return supervisor.view(monotonic())

    control = Control(supervisor, view, record, settings)
    await control.open()
    telling = asyncio.create_task(_tell_systemd(supervisor))
    try:
        return await supervisor.run()
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
        notifier = notify.Notifier()
        if supervisor.state in (State.COMPLETED, State.STOPPED):
            # One that was complete before it began has not failed to start. A message of its own: of several states in
            # one, systemd takes the last.
            notifier.send(notify.READY)
        notifier.send(notify.STOPPING, notify.status(view().reason))
        await control.close()


async def _tell_systemd(supervisor: Supervisor) -> None:
    """READY once the ranks train; then a sign of life and the same reason that `status` gives."""
    notifier = notify.Notifier()
    interval_s = min(notifier.watchdog_s or NOTIFY_INTERVAL_S, NOTIFY_INTERVAL_S)
    is_ready = False
    while True:
        now = supervisor.view(monotonic())
        lines = [notify.WATCHDOG, notify.status(now.reason)]
        if not is_ready and supervisor.has_trained:
            is_ready = True
            lines.insert(0, notify.READY)
        notifier.send(*lines)
        await asyncio.sleep(interval_s)
