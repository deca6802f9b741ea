"""A rank on a node of its own, for facts about gloo over a real network: `python gloo_payload.py RANK STORE TIMEOUT_S`.

Reduces again and again until that fails, and says on standard output how far it is. Reads words from the file `word`
beside its output: `abort` has it abort the process group, `hang up` has it shut its connections to the peer down, each
from another thread than the one that waits.
"""

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def connections() -> list[socket.socket]:
    """Gloo's, of this process: they are IPv4 where the address is; the store's are IPv6 sockets always."""
    found = []
    for name in list(Path("/proc/self/fd").iterdir()):
        try:
            if name.readlink().name.startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(name.name)))
                if connection.family == socket.AF_INET:
                    connection.getpeername()
                    found.append(connection)
        except OSError:  # it listens, or was closed meanwhile
            continue
    return found


def listen_for_words(file: Path) -> None:
    heard = ""
    while True:
        word = file.read_text() if file.exists() else ""
        if word != heard:
            heard = word
            if word == "abort":
                group = dist.distributed_c10d._get_default_group()
                group.abort()
            elif word == "hang up":
                for connection in connections():
                    connection.shutdown(socket.SHUT_RDWR)
            print(word, flush=True)
        time.sleep(0.01)


def main() -> None:
    rank, address, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    store = dist.TCPStore(address, 29500, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    threading.Thread(target=listen_for_words, args=(Path.cwd() / "word",), daemon=True).start()
    peers = {connection.getpeername()[0] for connection in connections()}
    print(f"peers {' '.join(sorted(peers))}", flush=True)
    try:
        for _ in range(10**9):
            total = torch.full((1000,), rank + 1.0)
            dist.all_reduce(total)
            print(f"sum {total[0].item():g}", flush=True)
            time.sleep(0.01)
    except RuntimeError as error:
        print(f"failed: {error}", flush=True)
    sys.stdout.flush()
    os._exit(0)


main()
