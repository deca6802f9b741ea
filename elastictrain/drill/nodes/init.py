"""Process 1 of a node: gives it its own folders and name, then reaps orphans until its standard input is closed.

Run by path, without the packages of anyone, in new namespaces: `unshare ... python -I init.py SPECIFICATION`, where the
specification is JSON:

    hostname    the node's name
    hosts       text of its /etc/hosts
    own         folders that are empty at first, and the node's own; /run must be one of them
    kept        folders in them that stay visible all the same

It says "ready" on standard output. The other end of its standard input is held by whoever made the node: when that
process dies, of whatever, so does process 1, and with it, as the kernel has it, every process of the node, and its
namespaces. Nothing of a node is anywhere else; so nothing can be left.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

STAGE = "/mnt"


def mount(*arguments: str) -> None:
    # No record in /run/mount: /run itself is among what is mounted.
    subprocess.run(["mount", "--no-mtab", *arguments], check=True)


def make_own(folder: str, kept: list[str]) -> None:
    """An empty file system on `folder`, in which only what is kept shows through."""
    mount("-t", "tmpfs", "-o", "mode=1777", "node", STAGE)
    for path in kept:
        if Path(folder) in Path(path).parents:
            inner = Path(STAGE) / Path(path).relative_to(folder)
            inner.mkdir(parents=True, exist_ok=True)
            mount("--rbind", path, str(inner))
    mount("--move", STAGE, folder)


def main() -> None:
    specification = json.loads(sys.argv[1])
    socket.sethostname(specification["hostname"])
    mount("-t", "tmpfs", "-o", "mode=1777", "node", "/dev/shm")
    for folder in specification["own"]:
        make_own(folder, specification["kept"])
    hosts = Path("/run/hosts")
    hosts.write_text(specification["hosts"])
    mount("--bind", str(hosts), "/etc/hosts")
    # Children whose parent ignores SIGCHLD leave no zombies (wait(2)): those that lose their own parent come here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while os.read(0, 4096):
        pass


main()
