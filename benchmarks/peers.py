"""Makes an environment for each peer that the benchmarks compare with: `make bench-peers`.

A peer has an environment of its own, so that its requirements never meet ours, and the same torch as ours, so that a
difference is the loop's. Running it again checks what is there and installs only what is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

PEERS: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "nvrx": ("nvidia-resiliency-ext",),
    "dlrover": ("dlrover[torch]",),
}
"""Packages by environment. `lightning` holds Fabric and Trainer, `nvrx` ft_launcher, `dlrover` dlrover-run."""


class PeerError(Exception):
    """A peer's environment cannot be made."""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, whether it is there or not."""
    return ROOT / f".venv-peer-{peer}" / "bin" / "python"


def pinned(package: str) -> str:
    """The version that constraints.txt gives a package, such as `2.13.0`.

    Raises:
        PeerError: constraints.txt does not name it.
    """
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name.strip().lower() == package:
            return version.split(";")[0].strip()
    raise PeerError(f"{CONSTRAINTS.name} does not pin {package}: it must, so that all contenders run the same one")


def installed(python: Path, packages: tuple[str, ...]) -> dict[str, str | None]:
    """Versions in an environment, without a local suffix such as `+cpu`; None for what is missing."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({p: found.get(p) for p in sys.argv[1:]}))"
    )
    answer = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True)
    versions: dict[str, str | None] = json.loads(answer.stdout)
    return {name: version.split("+")[0] if version else None for name, version in versions.items()}


def make_environment(peer: str) -> str:
    """Makes or completes one environment.

    Returns:
        what is in it, for people.

    Raises:
        PeerError: a step failed; the message says which.
    """
    python = python_of(peer)
    wanted = {"torch": pinned("torch"), "numpy": pinned("numpy")}
    names = (*wanted, *(package.partition("[")[0] for package in PEERS[peer]))
    if not python.exists():
        _run("making the environment", [sys.executable, "-m", "venv", "--clear", str(python.parent.parent)])
    present = installed(python, names)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = [f"{name}=={version}" for name, version in wanted.items()]
    if any(present[name] != version for name, version in wanted.items()):
        # Torch first and alone: the peer's own requirement would take the newest.
        _run(f"installing {' '.join(pins)}", [*pip, *pins])
    if None in present.values():
        _run(f"installing {' '.join(PEERS[peer])}", [*pip, *pins, *PEERS[peer]])
    present = installed(python, names)
    for name, version in wanted.items():
        if present[name] != version:
            raise PeerError(f"{python.parent.parent.name} holds {name} {present[name]}, not {version}: delete it")
    return ", ".join(f"{name} {version}" for name, version in present.items())


def _run(what: str, command: list[str]) -> None:
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise PeerError(f"{what} failed: {error}") from error
    if result.returncode:
        last = "\n".join((result.stderr or result.stdout).strip().splitlines()[-15:])
        raise PeerError(f"{what} failed with exit code {result.returncode}:\n{last}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"which: {', '.join(PEERS)}; default: all")
    chosen = parser.parse_args().peers or list(PEERS)
    if unknown := [peer for peer in chosen if peer not in PEERS]:
        parser.error(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    failed = False
    for peer in chosen:
        print(f"{python_of(peer).parent.parent.name}: ", end="", flush=True)
        try:
            print(make_environment(peer))
        except (PeerError, subprocess.CalledProcessError) as error:
            failed = True
            print(f"FAILED\n{error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
