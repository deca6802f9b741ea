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
ALLOWABLE = ("seed", "dataset_length", "shuffle", "fingerprint", "model", "optimizer", HYPERPARAMETERS)
