"""A supervisor without a job: it goes through the motions of one, for tests of everything around it.

    python -m elastictrain.testing.fake_supervisor STATE_DIR [--job NAME] [--max-steps N] [--step-s S] …

Its steps are ticks of a clock and its snapshot is one number in a file. Events, control interface, journal and the
exact step after a restart are those of a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from time import monotonic

from elastictrain import __version__
from elastictrain.core.events import Kind
from elastictrain.core.lifecycle import State
from elastictrain.core.status import RankView, SupervisorView
from elastictrain.errors import BusyError, ElasticTrainError, IllegalTransitionError, StorageError
from elastictrain.protocol import write_atomically
from elastictrain.supervisor.control import Control, ControlSettings
from elastictrain.supervisor.record import Record

SNAPSHOT_FILE = "fake-snapshot"


class FakeSupervisor:
    """Obeys commands, and counts.

    Args:
        record: where its events go.
        max_steps: when it is complete.
        step_s: how long a step takes.
        world_size: how many ranks it says it has.
    """

    def __init__(
        self,
        record: Record,
        *,
        max_steps: int = 1000,
        step_s: float = 0.01,
        world_size: int = 2,
    ) -> None:
        self.record = record
        self.max_steps = max_steps
        self.step_s = step_s
        self.world_size = world_size
        self.state = State.STARTING
        self.reason = "starting"
        self.step = self._restore()
        self.incarnation = record.history.incarnation or 0
        self._phase_began_s = monotonic()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    # ---- what others see

    def view(self) -> SupervisorView:
        now_s = monotonic()
        ranks = tuple(
            RankView(
                rank=rank,
                pid=os.getpid(),
                host=os.uname().nodename,
                phase="forward",
                phase_s=now_s - self._phase_began_s,
                step=self.step,
                heartbeat_age_s=0.01,
                cpu_percent=97.5,
                memory_bytes=512 * 2**20,
                device="cpu",
            )
            for rank in range(self.world_size if self.state is State.TRAINING else 0)
        )
        return SupervisorView(
            state=self.state,
            reason=self.reason,
            global_step=self.step,
            max_steps=self.max_steps,
            incarnation=self.incarnation,
            world_size=self.world_size,
            ranks=ranks,
        )

    async def stop(self, reason: str) -> None:
        self._enter(State.STOPPING, reason)
        await self._ended.wait()

    async def checkpoint(self, timeout_s: float) -> int:
        if self.state is not State.TRAINING:
            raise BusyError(f"no snapshot can be taken: the job is {self.state}")
        try:
            await asyncio.wait_for(asyncio.sleep(0.05), timeout_s)
        except TimeoutError as error:
            raise StorageError(f"no snapshot was durable within {timeout_s:g} s") from error
        self._snapshot()
        return self.step

    async def drain(self) -> None:
        if self.state is not State.TRAINING:
            raise IllegalTransitionError(f"the job is {self.state}: there is nothing to drain")
        self._snapshot()
        self._end_incarnation("drained")
        self._enter(State.DRAINED, "on request")
        self.record.append(Kind.DRAINED, {})

    async def resume(self) -> None:
        if self.state is not State.DRAINED:
            raise IllegalTransitionError(f"the job is {self.state}: there is nothing to resume")
        self._start_incarnation()

    async def restart(self, reason: str) -> None:
        if self.state is not State.TRAINING:
            raise IllegalTransitionError(f"there is no worker group to restart: the job is {self.state}")
        self._end_incarnation(f"restart: {reason}")
        self.record.append(Kind.RESTART_PLANNED, {"delay_s": 0.0, "reason": reason})
        self._start_incarnation()

    # ---- what it does

    async def run(self) -> int:
        """Until complete or stopped. Returns the exit code."""
        self.record.append(Kind.SUPERVISOR_STARTED, {"pid": os.getpid(), "version": __version__})
        self._start_incarnation()
        try:
            while self.state not in (State.STOPPING, State.COMPLETED):
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self.step_s)
                if self.state is State.TRAINING:
                    self._one_step()
            if self.state is State.STOPPING:
                self._snapshot()
                self._end_incarnation("stopped")
                self.record.append(Kind.STOPPED, {"reason": self.reason})
                self._enter(State.STOPPED, self.reason)
            return 0
        finally:
            self._ended.set()

    def _one_step(self) -> None:
        self.step += 1
        self._phase_began_s = monotonic()
        self._save()
        if self.step % 5 == 0 or self.step >= self.max_steps:
            self.record.append(
                Kind.PROGRESS,
                {
                    "step": self.step,
                    "max_steps": self.max_steps,
                    "loss": 1 / (1 + self.step),
                    "steps_per_s": 1 / self.step_s,
                    "samples_per_s": 8 / self.step_s,
                    "tokens_per_s": None,
                    "incarnation": self.incarnation,
                },
            )
        if self.step % 10 == 0:
            self._snapshot()
        if self.step >= self.max_steps:
            self._end_incarnation("complete")
            self.record.append(Kind.COMPLETED, {})
            self._enter(State.COMPLETED, "all steps are done")

    def _enter(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._wake.set()

    def _start_incarnation(self) -> None:
        self.incarnation += 1
        fields = {"incarnation": self.incarnation, "world_size": self.world_size, "agent_pid": os.getpid()}
        self.record.append(Kind.INCARNATION_STARTED, fields)
        self.record.append(Kind.RANKS_TRAINING, {"incarnation": self.incarnation, "global_step": self.step})
        self._enter(State.TRAINING, f"training since step {self.step}")

    def _end_incarnation(self, cause: str) -> None:
        self.record.append(
            Kind.INCARNATION_ENDED, {"incarnation": self.incarnation, "cause": cause, "global_step": self.step}
        )

    def _snapshot(self) -> None:
        self.record.append(Kind.SNAPSHOT_TAKEN, {"at_step": self.step})
        self.record.append(Kind.SNAPSHOT_DURABLE, {"at_step": self.step})

    def _save(self) -> None:
        with contextlib.suppress(OSError):
            write_atomically(self.record.state_dir / SNAPSHOT_FILE, f"{self.step}\n".encode())

    def _restore(self) -> int:
        try:
            return int((self.record.state_dir / SNAPSHOT_FILE).read_text())
        except (OSError, ValueError):
            return 0


async def serve(arguments: argparse.Namespace) -> int:
    """Runs one, with its control interface, until it ends or is told to."""
    state_dir: Path = arguments.state_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    record = Record(state_dir.absolute(), arguments.job or state_dir.name)
    supervisor = FakeSupervisor(
        record,
        max_steps=arguments.max_steps,
        step_s=arguments.step_s,
    )
    control = Control(
        supervisor, supervisor.view, record, ControlSettings(arguments.group, metrics_port=arguments.metrics_port)
    )
    try:
        await control.open()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, supervisor._enter, State.STOPPING, f"on {signum.name}")
        return await supervisor.run()
    finally:
        await control.close()
        record.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--job", default="")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--group")
    parser.add_argument("--metrics-port", type=int)
    try:
        return asyncio.run(serve(parser.parse_args()))
    except ElasticTrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
