"""Finds the newest snapshot that any rank can read, and gives its state to all.

Every node's local rank zero looks into its memory tier, rank zero also into the durable tier, but there only for what
is newer. The ranks agree on the newest; its holder reads it and broadcasts tensor by tensor, straight into the tensors
of the run, so that memory use stays near one copy of the state.

A store that is down is waited for. What is known to be durable, by the note in the state directory, is never passed
over for something older because the store cannot be reached, or has lost everything: that is an error. What a
start was allowed to give up all the same stays given up for the worker groups after it.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from elastictrain.checkpoint.catalog import (
    Candidate,
    PassedOver,
    SnapshotReader,
    first_sound,
    is_out_of_reach,
    newest_first,
    open_candidate,
)
from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.format import MANIFEST_FILE, Manifest, TensorSpec
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.patience import OnWait, patiently
from elastictrain.checkpoint.store import Progress, Store, StoredSnapshot
from elastictrain.core.counters import Counters
from elastictrain.core.identity import HYPERPARAMETERS, REWIND, Difference, refusal
from elastictrain.errors import (
    BusyError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotVersionError,
    StorageError,
)
from elastictrain.training.collectives import broadcast_bytes, broadcast_tensor, gather_ints
from elastictrain.training.device import Place
from elastictrain.training.given_up import GivenUpSnapshots
from elastictrain.training.state import TrainingState
from elastictrain.training.tensor_forms import DTYPES

_NONE = -1
_GIVEN_UP = f"was given up, by --allow {REWIND}, at an earlier start; --from URL@STEP begins a run with it all the same"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where a rank looks for snapshots.

    Args:
        tiers: its node's memory tiers, on local rank zero; else none.
        store: the durable tier, on rank zero; else None.
        run_id: the run they must be of.
        step: only the snapshot of this step; None for the newest.
        scratch: folder for what must be downloaded.
        store_patience_s: how long to wait for a store that fails.
        begins_run: the run has not been here before: a manifest that does not even say of which run it is, is of
            another.
        note: says what is known to be durable, and what is given up, on local rank zero of each node; None where that
            is of no concern.
    """

    tiers: tuple[MemoryTier, ...]
    store: Store | None
    run_id: str
    scratch: Path
    store_patience_s: float
    step: int | None = None
    begins_run: bool = False
    note: DurableNote | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What was taken over.

    Args:
        counters: where the run goes on.
        run_id: of the run that wrote it.
        tier: where it was found: "memory" or "durable".
        world_size: ranks of the run that wrote it.
        in_memory: the memory tier's snapshot, on the rank that holds it.
        hyperparameters: those in which the snapshot differs from what this start was built with.
    """

    counters: Counters
    run_id: str
    tier: str
    world_size: int
    in_memory: MemorySnapshot | None
    hyperparameters: tuple[Difference, ...]


class Restorer:
    """Restores a run. All ranks make one and call it the same way.

    Args:
        place: this rank.
        allowed: names of differences that are allowed.
        on_passed_over: called with (where, reason) for each snapshot, or store, that is passed over.
        on_wait: called before each pause in which a store that fails is waited for; with no pause, before a damaged
            snapshot is fetched once more.
        on_incomplete: called with (where, reason) for what is no snapshot, and might have been a newer one than all.
        progress: called with the bytes just fetched, hashed or broadcast: what takes that long is no hang.
    """

    def __init__(
        self,
        place: Place,
        *,
        allowed: frozenset[str],
        on_passed_over: Callable[[str, str], None],
        on_wait: OnWait,
        on_incomplete: Callable[[str, str], None],
        progress: Progress,
    ) -> None:
        self._place = place
        self._allowed = allowed
        self._on_passed_over = on_passed_over
        self._on_wait = on_wait
        self._on_incomplete = on_incomplete
        self._progress = progress
        self._num_damaged = 0
        self._num_busy = 0
        self._out_of_reach: StorageError | None = None
        self._damaged_in_memory: list[MemorySnapshot] = []
        self._given_up = GivenUpSnapshots()

    def restore(self, state: TrainingState, lookup: Lookup) -> Restored | None:
        """Brings the newest readable snapshot into `state`; None if there is none at all. Collective.

        Raises:
            SnapshotError: there are snapshots, and none can be read.
            BusyError: the same, and somebody writes to one.
            SnapshotMismatchError: the newest one belongs to another run.
            SnapshotVersionError: the newest one was written by a newer program.
            StorageError: the durable tier cannot be reached, or does not give its newest, and there is nothing else, or
                only what is older, which nobody has allowed.
        """
        place = self._place
        self._given_up = GivenUpSnapshots.gather(lookup.note, lookup.run_id, place)
        reader = self._newest_in_memory(lookup)
        told = gather_ints([_step_of(reader), _noted(lookup)], place)
        newest, noted = (max(column) for column in zip(*told, strict=True))
        listed: list[Candidate] = []
        if lookup.store is not None:
            listed = self._without_given_up(self._list_durable(lookup, reached=newest, noted=noted))
            if (better := self._open([c for c in listed if c.global_step > newest], lookup)) is not None:
                if reader is not None:
                    reader.close()
                reader = better
            elif newest == _NONE and self._out_of_reach is not None:
                raise self._out_of_reach
        told = gather_ints([_step_of(reader), self._num_damaged, self._num_busy], place)
        claims = [step for step, _, _ in told]
        newest = max(claims)
        # On any node: what only another one's local rank zero has seen must not count as none.
        num_damaged, num_busy = (sum(column) for column in list(zip(*told, strict=True))[1:])
        if newest == _NONE:
            if num_busy:
                raise BusyError(
                    f"{num_busy} snapshot(s) of this run are being written by another process, and no other can be "
                    "read: the warnings above name each",
                    "Start again once that process has ended.",
                )
            if num_damaged:
                raise SnapshotError(
                    f"there are {num_damaged} snapshot(s) of this run, but none of them can be read: the warnings "
                    "above name each file",
                    "Repair one, or begin anew with --fresh.",
                )
            return None
        holder = claims.index(newest)
        self._note(lookup, listed, newest)
        try:
            return self._take_over(state, reader if place.rank == holder else None, holder, lookup.run_id)
        finally:
            if reader is not None:
                reader.close()

    def _without_given_up(self, listed: list[Candidate]) -> list[Candidate]:
        """What the durable tier has, but for what is given up. That it is there still counts: it is no empty store."""
        left = []
        for candidate in listed:
            if self._given_up.holds(candidate):
                self._num_damaged += 1
                self._on_passed_over(candidate.where, _GIVEN_UP)
            else:
                left.append(candidate)
        return left

    def _newest_in_memory(self, lookup: Lookup) -> SnapshotReader | None:
        self._pass_over_nameless(lookup)
        if not lookup.begins_run:
            for path in (path for tier in lookup.tiers for path in tier.incomplete()):
                self._on_incomplete(str(path), f"{MANIFEST_FILE}: is missing")
        candidates = [c for tier in lookup.tiers for c in newest_first(tier, None, lookup.run_id)]
        return self._open(sorted(candidates, key=lambda c: -c.global_step), lookup)

    def _list_durable(self, lookup: Lookup, *, reached: int, noted: int) -> list[Candidate]:
        """What the durable tier has; a store that is down for a moment is waited for.

        Args:
            lookup: see there.
            reached: the newest step that is in a memory tier; _NONE for none.
            noted: the newest that is known to be durable; _NONE for none.

        Raises:
            StorageError: it stayed down, or empty, and what else there is to begin with is older than it must be.
        """
        assert lookup.store is not None
        store = lookup.store
        incomplete: list[StoredSnapshot] = []
        may_go_back = reached != _NONE and (noted <= reached or REWIND in self._allowed)

        def listing() -> list[Candidate]:
            found = newest_first(None, store, lookup.run_id)
            if not found and noted > reached and not may_go_back:
                raise StorageError(
                    f"{store.where} has no snapshot of this run any more: another store, or not mounted?"
                )
            incomplete[:] = [s for s in store.incomplete() if s.run_id == lookup.run_id]
            return found

        try:
            found = patiently(listing, patience_s=lookup.store_patience_s, on_wait=self._on_wait)
        except StorageError as error:
            if may_go_back:
                self._on_passed_over(store.where, error.what)
                return []
            if noted == _NONE:
                raise
            other = f"the newest that can be read is of step {reached}" if reached != _NONE else "no other can be read"
            go_back = f"go on from step {reached} all the same with --allow {REWIND}, or " if reached != _NONE else ""
            raise StorageError(
                f"{error.what}; the snapshot of step {noted} is known to be durable there, {other}",
                f"Start again once the store is back; {go_back}begin anew with --fresh.",
            ) from error
        newest = max((c.global_step for c in found), default=_NONE)
        # These are no snapshots, and no reason not to begin; but whoever misses one should know where it is.
        for left in incomplete:
            if left.global_step > max(newest, reached):
                self._on_incomplete(f"{store.where}/{left.name}", f"{MANIFEST_FILE}: is missing")
        if newest < noted and reached < noted:
            # The store answers, and has lost this one: it is passed over as a damaged one is.
            self._on_passed_over(f"{store.where}, step {noted}", "was durable, and is not there any more")
        return found

    def _note(self, lookup: Lookup, listed: list[Candidate], newest: int) -> None:
        """What counts as durable from now on: what the store has, as far as it is sound; no more than was accepted.
        And what is given up, on every node: any may be rank zero's next. Collective."""
        given_up = self._given_up.tell(self._place)
        if lookup.note is None:
            return
        stored = max((c.global_step for c in listed if c.global_step <= newest), default=None)
        try:
            if stored is not None:
                lookup.note.learn(lookup.run_id, stored)
            if (noted := _noted(lookup)) > newest:
                lookup.note.unlearn(lookup.run_id, noted, newest)
            lookup.note.give_up(lookup.run_id, given_up)
        except OSError as error:
            self._on_passed_over(str(lookup.note.path), f"cannot be written: {error.strerror}")

    def _open(self, candidates: list[Candidate], lookup: Lookup) -> SnapshotReader | None:
        if lookup.step is not None:
            candidates = [c for c in candidates if c.global_step == lookup.step]

        def attempt(act: Callable[[], T], /) -> T:
            return patiently(act, patience_s=lookup.store_patience_s, on_wait=self._on_wait)

        def opened(candidate: Candidate) -> SnapshotReader:
            try:
                return open_candidate(candidate, lookup.scratch, self._progress, attempt)
            except SnapshotDamagedError as error:
                if candidate.store is None or not candidate.store.is_downloaded:
                    raise
                damage = error.what
            # A download that was cut short without an error looks the same as a damaged snapshot. To pass over a sound
            # one would do its steps again, and forget that it is durable. (Out of the handler: there the error's
            # traceback would hold the first download, and the disk two.)
            self._on_wait(f"{candidate.where}: {damage}", 0.0)
            return open_candidate(candidate, lookup.scratch, self._progress, attempt)

        def passed_over(candidate: Candidate, error: PassedOver) -> None:
            for downloaded in lookup.scratch.glob(f"{candidate.name}.*"):
                downloaded.unlink()  # the disk need not hold two
            self._passed_over(candidate, error)

        try:
            reader = first_sound(candidates, opened, passed_over, rewinds=REWIND in self._allowed)
        except (SnapshotVersionError, StorageError) as error:
            raise _refused(error) from error
        for tier in lookup.tiers:
            for damaged in self._damaged_in_memory:
                if damaged.path.parent == tier.root:
                    tier.discard(damaged)
        self._damaged_in_memory = []
        return reader

    def _pass_over_nameless(self, lookup: Lookup) -> None:
        """Slots whose manifest cannot be used: they are in no list of snapshots, and must not count as none."""
        for tier in lookup.tiers:
            for path, damage in tier.damaged():
                manifest = _read_manifest(path)
                run_id = _run_of(manifest)
                if run_id == lookup.run_id or (run_id is None and not lookup.begins_run):
                    self._mind_newer_format(path, manifest)
                    self._num_damaged += 1
                    self._on_passed_over(str(path), str(damage))

    def _mind_newer_format(self, slot: Path, manifest: bytes) -> None:
        """For a manifest that cannot be used; whatever else is wrong with it is no matter.

        Raises:
            SnapshotVersionError: it is that of a newer program, and not given up.
        """
        if self._given_up.holds_slot(slot, manifest):
            return
        try:
            Manifest.decode(manifest)
        except SnapshotVersionError as error:
            if REWIND not in self._allowed:
                raise _refused(SnapshotVersionError(f"{slot}/{error.what}", error.hint)) from error
            self._given_up.add_slot(slot, manifest)
        except SnapshotError:
            return

    def _passed_over(self, candidate: Candidate, error: PassedOver) -> None:
        if isinstance(error, BusyError):  # its writer's, not ours to discard
            self._num_busy += 1
        else:
            self._num_damaged += 1
            if candidate.store is not None and (isinstance(error, SnapshotVersionError) or is_out_of_reach(error)):
                self._given_up.add(candidate)
            if isinstance(error, StorageError) and is_out_of_reach(error):
                self._out_of_reach = error
            elif candidate.memory is not None:
                self._damaged_in_memory.append(candidate.memory)
        self._on_passed_over(candidate.where, error.what)

    def _take_over(self, state: TrainingState, reader: SnapshotReader | None, holder: int, run_id: str) -> Restored:
        place = self._place
        message = b""
        if reader is not None:
            layouts = {file: reader.layout(file) for file in reader.files if file.endswith(".safetensors")}
            specs = {f: {n: [s.dtype, list(s.shape)] for n, s in lay.specs.items()} for f, lay in layouts.items()}
            message = json.dumps({"trainer": reader.trainer, "specs": specs, "tier": reader.candidate.tier}).encode()
        told = json.loads(broadcast_bytes(message, holder, place))
        trainer: dict[str, Any] = told["trainer"]
        wanted = {
            file: {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in named.items()}
            for file, named in told["specs"].items()
        }
        reason = refusal(state.differences(trainer, wanted), self._allowed)
        if reason is not None:
            raise SnapshotMismatchError(
                f"the snapshot of step {trainer['counters']['global_step']} is of a run that differs from this one:\n"
                f"{reason}",
                "Restore the old value, allow the difference (--allow NAME), or begin anew with --fresh.",
            )
        targets = state.targets(trainer, wanted)
        for file, named in targets.items():
            for name, target in named.items():
                if reader is not None:
                    begin, _ = layouts[file].offsets[name]
                    _read_into(target, reader, file, begin, wanted[file][name])
                broadcast_tensor(target, holder, place)
                self._progress(wanted[file][name].size_bytes)
        changed = tuple(state.hyperparameter_differences(trainer))
        counters = state.load(trainer, targets, own_hyperparameters=HYPERPARAMETERS in self._allowed)
        in_memory = reader.candidate.memory if reader is not None else None
        return Restored(counters, run_id, told["tier"], trainer["world_size"], in_memory, changed)


def _read_manifest(slot: Path) -> bytes:
    """What there is of it."""
    try:
        return (slot / MANIFEST_FILE).read_bytes()
    except OSError:
        return b""


def _run_of(manifest: bytes) -> str | None:
    """The run that a manifest is of which cannot be used, where that can still be read."""
    match = re.search(rb'"run_id": "([0-9a-f]{8})"', manifest)
    return match[1].decode() if match is not None else None


def _refused(error: SnapshotVersionError | StorageError) -> SnapshotVersionError | StorageError:
    """With what else can be done, at a start."""
    return type(error)(
        error.what,
        f"{error.hint} To go on from an older snapshot all the same: --allow {REWIND}; to begin anew: --fresh.".strip(),
    )


def _noted(lookup: Lookup) -> int:
    step = lookup.note.read(lookup.run_id) if lookup.note is not None else None
    return _NONE if step is None else step


def _step_of(reader: SnapshotReader | None) -> int:
    return reader.manifest.global_step if reader is not None else _NONE


@torch.no_grad()
def _read_into(target: Tensor, reader: SnapshotReader, file: str, begin: int, spec: TensorSpec) -> None:
    """Reads a tensor from its file, bit for bit."""
    if spec.size_bytes == 0:
        return
    is_direct = target.device.type == "cpu" and target.is_contiguous()
    staged = target if is_direct else torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    # By address: numpy has no view of bfloat16 and the like.
    memory = (ctypes.c_ubyte * spec.size_bytes).from_address(staged.data_ptr())
    reader.read_into(file, begin, memoryview(memory).cast("B"))
    if not is_direct:
        target.copy_(staged)
