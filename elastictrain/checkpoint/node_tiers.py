"""Where a node has snapshots that are not durable yet: in the memory tier, or in the folder that stands in for it.

`checkpoint.memory_tier` and `memory_path` say where new ones go. What an earlier start left in memory counts whatever
they say: it may be the newest there is, and nobody else would ever give its memory back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastictrain.checkpoint.memory_note import MemoryNote
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.config.schema import CheckpointConfig
from elastictrain.errors import ElasticTrainError

CLEAN_TIMEOUT_S = 5.0
"""How long to wait for whoever still reads the memory tier."""
_HINT = "All in it is durable: once nobody reads it, remove the folder, or start the job again."


@dataclass(frozen=True, slots=True)
class NodeTiers:
    """A job's tiers on this node.

    Args:
        held: which may hold snapshots: looked into at a start, given back at the end.
        written: where new ones go; the next one where the one before has no room.
    """

    held: tuple[MemoryTier, ...]
    written: tuple[MemoryTier, ...]

    @classmethod
    def of_job(cls, config: CheckpointConfig, *, job: str, state_dir: Path) -> NodeTiers:
        """The tiers of a job, by its name and state directory; `config` says whether the memory tier is written to.

        Raises:
            StateDirError: what is noted of earlier starts cannot be read.
        """
        staging = MemoryTier.staging(state_dir)
        budget_mb = config.memory_budget_mb
        memory = MemoryTier.for_job(
            Path(config.memory_path),
            job=job,
            state_dir=state_dir,
            budget_bytes=budget_mb << 20 if budget_mb is not None else None,
        )
        earlier = [
            MemoryTier.for_job(path, job=job, state_dir=state_dir)
            for path in MemoryNote(state_dir).paths()
            if path != Path(config.memory_path)
        ]
        return cls((memory, staging, *earlier), (memory, staging) if config.memory_tier else (staging,))

    def readable(self, on_passed_over: Callable[[str, str], None]) -> NodeTiers:
        """Without a memory tier that is not written to and cannot even be looked into: a path that is unfit, or
        somebody else's, must not keep such a job from its start.

        Args:
            on_passed_over: called with (where, reason) for what is left out.
        """
        held = tuple(tier for tier in self.held if tier in self.written or is_readable(tier, on_passed_over))
        return NodeTiers(held, self.written)

    def give_back(self, tell: Callable[..., object]) -> None:
        """Removes all that they hold, once it is durable. What does not work is nothing that a job should fail for.

        Args:
            tell: called with the name of an event and its fields for each tier that stays, such as a logger's
                `warning`.
        """
        for tier in self.held:
            try:
                is_gone = tier.clean(timeout_s=CLEAN_TIMEOUT_S)
            except (OSError, ElasticTrainError) as error:
                tell("memory_not_given_back", where=str(tier.root), error=str(error))
                continue
            if not is_gone:
                reason = f"another process still reads a snapshot there, after {CLEAN_TIMEOUT_S:g} s"
                tell("memory_not_given_back", where=str(tier.root), error=reason, hint=_HINT)


def is_readable(tier: MemoryTier, on_passed_over: Callable[[str, str], None]) -> bool:
    """Whether a tier can be looked into; else `on_passed_over` is told (where, reason)."""
    try:
        tier.incomplete()  # reads all that a start will
    except (OSError, ElasticTrainError) as error:
        on_passed_over(str(tier.root), error.what if isinstance(error, ElasticTrainError) else str(error))
        return False
    return True
