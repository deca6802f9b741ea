"""A TCP server and client that run on nodes: `python talk.py serve PORT`, `python talk.py ask ADDRESS PORT`.

The server answers each line with the same line. The client asks for a number after another and prints each that comes
back, as long as the connection holds; then the name of the error.
"""

import itertools
import socket
import sys
import threading
import time


def answer(connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            lines.write(line)
            lines.flush()


def serve(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)) as listener:
        print("listening", flush=True)
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def ask(address: str, port: int) -> None:
    try:
        with socket.create_connection((address, port)) as connection, connection.makefile("rw") as lines:
            for number in itertools.count():
                lines.write(f"{number}\n")
                lines.flush()
                if not (line := lines.readline()):
                    raise EOFError
                print(line, end="", flush=True)
                time.sleep(0.01)
    except (OSError, EOFError) as error:
        print(type(error).__name__, flush=True)


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    ask(sys.argv[2], int(sys.argv[3]))
