"""Writes a captured state into the memory tier: finds a slot, has the state copied into it, and completes it.

There are two ways. `begin` and what it returns are for a snapshot beside the training, which must know when the state
may change again. `write` is for a state with no training beside it. What is volatile is copied before either goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.format import Layout, layout
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.memory_tier import LOCK_POLL_S, Declined, MemoryTier
from elastictrain.checkpoint.slot_writer import SlotWriter
from elastictrain.errors import ElasticTrainError, MemoryTierError
from elastictrain.logs import Logger
from elastictrain.training.device_copy import DeviceCopy
from elastictrain.training.host_copy import HostCopy
from elastictrain.training.slot_views import SlotViews
from elastictrain.training.stability import Stability
from elastictrain.training.state import Captured
from elastictrain.training.tensor_forms import Form


@dataclass(frozen=True, slots=True)
class Origin:
    """Where snapshots come from.

    Args:
        job: name of the job.
        run_id: lineage of the run, eight hex digits.
        versions: of elastictrain, torch, python.
    """

    job: str
    run_id: str
    versions: dict[str, str]


class StateMovedError(Exception):
    """A forward pass changed what was being copied beside it: the copy may hold some of the next step."""


class Filling:
    """A snapshot on its way into its slot. It ends with `commit`, or with the first thing that fails: the slot is free
    again then, for others too.

    Args:
        captured: the state.
        slot: where it goes.
        copy: of the one into the other, begun.
        stability: of what is copied beside the training.
        unstable: what has been found to move; added to.
        origin: what the manifest says.
    """

    def __init__(
        self,
        captured: Captured,
        slot: SlotWriter,
        copy: HostCopy | DeviceCopy,
        stability: Stability,
        unstable: set[tuple[str, str]],
        origin: Origin,
    ) -> None:
        self._captured = captured
        self._slot = slot
        self._copy = copy
        self._stability = stability
        self._unstable = unstable
        self._origin = origin
        self.global_step = captured.counters.global_step

    def before_change(self) -> None:
        """The state may change once this has returned (on CUDA: by what is queued after that). Never raises."""
        self._copy.before_change()

    def complete(self) -> None:
        """Returns once the state is copied.

        Raises:
            StateMovedError: see there; from now on it is copied before the training goes on.
            Exception: whatever torch raises.
        """
        with self._or_abort():
            self._copy.complete()
            if changed := self._stability.changed():
                self._unstable.update(changed)
                names = ", ".join(name for _, name in changed[:3])
                raise StateMovedError(f"a forward pass changed what was being copied: {names}")

    def commit(self) -> MemorySnapshot:
        """Hashes, and publishes: from its return on the snapshot exists. After `complete`."""
        with self._or_abort():
            return self._slot.commit(
                job=self._origin.job,
                run_id=self._origin.run_id,
                global_step=self.global_step,
                versions=self._origin.versions,
                trainer=self._captured.trainer,
            )

    @contextlib.contextmanager
    def _or_abort(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._slot.abort()
            raise


class SnapshotWriter:
    """Writes one snapshot at a time.

    Args:
        tiers: where it goes; the next one where the one before fails, which is not tried again then.
        origin: what every manifest says.
        stream: of copies from a CUDA device beside the training; None copies on the host, and from a device at once.
        log: for events.
    """

    def __init__(
        self, tiers: Sequence[MemoryTier], origin: Origin, *, stream: torch.cuda.Stream | None, log: Logger
    ) -> None:
        self._tiers = list(tiers)
        self._origin = origin
        self._stream = stream
        self._log = log
        self._forms: dict[str, dict[str, Form]] | None = None
        self._layouts: dict[str, Layout] = {}
        self._views = SlotViews(page_locked=stream is not None)
        self._unstable: set[tuple[str, str]] = set()

    def lay_out(self, captured: Captured) -> None:
        """To be called with a state before it is written. Raises StateValueError: it holds what no snapshot can."""
        forms = captured.forms()  # made in a fraction of the time that specs take: training waits
        if forms != self._forms:
            self._layouts = {name: layout(tensors, None) for name, tensors in captured.specs().items()}
            self._forms = forms
            self._views.forget()

    def make_room(self, captured: Captured, go_on: Callable[[int], bool]) -> None:
        """Has what a snapshot needs of memory allocated before there is one. In any thread, after `lay_out`; nothing
        else may be asked of this writer, nor of its tiers, meanwhile. What does not work here is left to `begin`.

        Args:
            captured: a state of the same form.
            go_on: see `MemoryTier.make_room`.
        """
        with contextlib.suppress(OSError, ElasticTrainError):
            for files in self._tiers[0].make_room(self._layouts, go_on):
                # Page-locking is for the thread that computes: from another, it would disturb the capture of a graph.
                if self._stream is None:
                    for file, tensors in captured.files.items():
                        self._views.of(files, file, tensors)

    def reserve(self) -> SlotWriter | Declined | None:
        """Takes a slot for a state like the last one, before there is any: gathering one costs more than asking.

        Returns:
            a slot, for `begin`, or to be aborted; `Declined` where none is free at present; None as long as it is not
            known what a state needs.

        Raises:
            OSError, ElasticTrainError: no tier takes it.
        """
        return self._begin_slot() if self._forms is not None else None

    def begin(self, captured: Captured, reserved: SlotWriter | None = None) -> Filling | Declined:
        """Begins a snapshot: what a forward pass may change is copied, or will be before the next one.

        Args:
            captured: the state, laid out.
            reserved: a slot for it; given up where the state has another form by now.

        Returns:
            what is left to do; `Declined` where no slot is free at present.

        Raises:
            OSError, ElasticTrainError: no tier takes it.
        """
        slot: SlotWriter | Declined
        if reserved is not None and reserved.layouts == self._layouts:
            slot = reserved
        else:
            if reserved is not None:
                reserved.abort()
            slot = self._begin_slot()
        if isinstance(slot, Declined):
            return slot
        try:
            return self._begin_copy(captured, slot)
        except BaseException:
            slot.abort()  # or it would stay locked, to the persister as well
            raise

    def write(self, captured: Captured, *, deadline_s: float) -> MemorySnapshot:
        """Writes all of a state that stands still.

        Args:
            captured: the state.
            deadline_s: until when to wait for a slot, of `time.monotonic`; then the next tier has its turn.

        Raises:
            Exception: no tier takes it.
        """
        self.lay_out(captured)
        while True:
            try:
                filling = self.begin(captured)
                while isinstance(filling, Declined) and time.monotonic() < deadline_s:
                    time.sleep(LOCK_POLL_S)
                    filling = self.begin(captured)
                if isinstance(filling, Declined):
                    raise MemoryTierError(filling.reason)
                filling.complete()
                return filling.commit()
            except (OSError, ElasticTrainError) as error:
                self._give_up_tier(error)

    def discard(self, snapshot: MemorySnapshot) -> None:
        """Its slot may be used again."""
        for tier in self._tiers:
            if tier.root == snapshot.path.parent:
                tier.discard(snapshot)

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._views.forget()

    # ---- how

    def _begin_slot(self) -> SlotWriter | Declined:
        while True:
            try:
                return self._tiers[0].begin(self._layouts)
            except (OSError, ElasticTrainError) as error:
                self._give_up_tier(error)

    def _give_up_tier(self, error: OSError | ElasticTrainError) -> None:
        """Goes over to the next tier; raises the error where there is none."""
        if len(self._tiers) == 1:
            raise error
        self._log.warning("memory_tier_given_up", error=str(error), instead=str(self._tiers[1].root))
        del self._tiers[0]
        self._views.forget()

    def _begin_copy(self, captured: Captured, slot: SlotWriter) -> Filling:
        now: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        watched: dict[tuple[str, str], Tensor] = {}
        for file, tensors in captured.files.items():
            volatile = captured.volatile.get(file, ())
            targets = self._views.of(slot, file, tensors)
            for name, source in tensors.items():
                at_once = self._stream is None and source.device.type != "cpu"
                if at_once or name in volatile or (file, name) in self._unstable:
                    now.append((targets[name], source))
                else:
                    later.append((targets[name], source))
                    watched[file, name] = source
        stability = Stability(watched)
        copy: HostCopy | DeviceCopy
        if self._stream is not None:
            copy = DeviceCopy(now, later, stability, self._stream)
        else:
            copy = HostCopy(now, later, stability)
        return Filling(captured, slot, copy, stability, self._unstable, self._origin)
