"""A node that takes no part when the others do the job's last step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastictrain.core.lifecycle import State
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.supervisor import Supervisor
from elastictrain.supervisor.team import Alone, Assignment, Orders
from tests.process.test_lost_agent import CONFIG
from tests.process.test_supervisor import Kept


class WithoutThisOne(Alone):
    """Other nodes, which never take this one in.

    Args:
        end: what they say once this one is ready: "complete" or "stop".
    """

    is_alone = False
    waits_for = "takes no part"

    def __init__(self, end: str) -> None:
        self._end = end
        self.orders: Orders | None = None
        self.draining: asyncio.Task[None] | None = None

    async def open(self, orders: Orders) -> None:
        self.orders = orders

    def give(self) -> None:
        assert self.orders is not None
        if self._end == "complete":
            self.orders.complete_with_all()
        else:
            self.orders.stop_with_all("enough")

    async def assemble(self) -> Assignment:
        self.give()
        await asyncio.Event().wait()
        raise AssertionError


class DrainedFirst(WithoutThisOne):
    async def assemble(self) -> Assignment:
        assert isinstance(self.orders, Supervisor)
        self.draining = asyncio.create_task(self._drain(self.orders))
        await asyncio.Event().wait()
        raise AssertionError

    async def _drain(self, supervisor: Supervisor) -> None:
        await supervisor.drain()
        assert supervisor.state is State.DRAINED
        self.give()


def no_part(_assignment: Assignment) -> Incarnation:
    raise AssertionError("it takes no part")


@pytest.mark.parametrize("kind", [WithoutThisOne, DrainedFirst])
@pytest.mark.parametrize(
    ("end", "state", "event"), [("complete", State.COMPLETED, "completed"), ("stop", State.STOPPED, "stopped")]
)
def test_how_a_node_ends_with_all(
    tmp_path: Path, kind: type[WithoutThisOne], end: str, state: State, event: str
) -> None:
    kept = Kept()
    supervisor = Supervisor(CONFIG, no_part, state_dir=tmp_path, team=kind(end), sink=kept)
    ending = asyncio.run(supervisor.run())
    assert (ending.state, ending.error) == (state, None)
    assert kept.kinds()[-1] == event
