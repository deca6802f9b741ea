"""What makes a run the same run: the data order's identity, compared before a snapshot is taken over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that a snapshot has differently.

    Args:
        name: by which it can be allowed.
        kept: the snapshot's value.
        now: this run's value.
    """

    name: str
    kept: str
    now: str


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """What the order of the samples follows from.

    Args:
        seed: the run's seed.
        length: number of training samples.
        shuffle: permuted, or in the dataset's own order.
        fingerprint: the dataset's own word for its content; None if it has none.
    """

    seed: int
    length: int
    shuffle: bool
    fingerprint: str | None = None

    def differences(self, kept: DataIdentity) -> list[Difference]:
        """What a snapshot's identity has differently."""
        pairs: list[tuple[str, object, object]] = [
            ("seed", kept.seed, self.seed),
            ("dataset_length", kept.length, self.length),
            ("shuffle", kept.shuffle, self.shuffle),
        ]
        if kept.fingerprint is not None and self.fingerprint is not None:
            pairs.append(("fingerprint", kept.fingerprint, self.fingerprint))
        return [Difference(name, str(theirs), str(mine)) for name, theirs, mine in pairs if theirs != mine]


@dataclass(frozen=True, slots=True)
class ReductionIdentity:
    """What the last bits of a gradient follow from, beside the world size.

    Args:
        reduction: how gradients are summed: "default" or "tree".
        threads_per_rank: intra-op threads of a rank: kernels on the CPU split their sums by it.
        micro_batch_size: samples per forward pass.
    """

    reduction: str
    threads_per_rank: int
    micro_batch_size: int

    def differences(self, kept: ReductionIdentity) -> list[Difference]:
        """What a snapshot has differently that would break the promise of the tree, if either holds it."""
        if self.reduction != kept.reduction:
            return [Difference("reduction", kept.reduction, self.reduction)]
        if self.reduction == "default":
            return []
        pairs = [
            ("threads_per_rank", kept.threads_per_rank, self.threads_per_rank),
            ("micro_batch_size", kept.micro_batch_size, self.micro_batch_size),
        ]
        return [Difference(name, str(theirs), str(mine)) for name, theirs, mine in pairs if theirs != mine]


def refusal(differences: list[Difference], allowed: frozenset[str]) -> str | None:
    """Why a snapshot must not be taken over, or None."""
    refused = [d for d in differences if d.name not in allowed]
    if not refused:
        return None
    shown = refused[:5]
    lines = [f"{d.name}: the snapshot has {d.kept}, this run has {d.now}" for d in shown]
    if len(refused) > len(shown):
        lines.append(f"and {len(refused) - len(shown)} more")
    return "\n".join(lines)


HYPERPARAMETERS = "hyperparameters"
"""Not refused, since they may follow from the world size: the snapshot's hold, with a warning, unless allowed."""
REWIND = "rewind"
"""Nothing that a snapshot has differently: that the newest one is known to be durable, and is not to be had. Once."""
ALLOWABLE = (
    "seed",
    "dataset_length",
    "shuffle",
    "fingerprint",
    "model",
    "optimizer",
    "reduction",
    "threads_per_rank",
    "micro_batch_size",
    HYPERPARAMETERS,
    REWIND,
)
