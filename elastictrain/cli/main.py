"""`elastictrain`: where it begins, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys

from elastictrain.errors import ElasticTrainError, UsageError

_USAGE_CODE_OF_TYPER = 2


def main() -> None:
    """The console script: errors that we can explain are explained, without a traceback."""
    try:
        _run(sys.argv[1:])
    except ElasticTrainError as error:
        _explain(error)
        sys.exit(error.exit_code)
    except SystemExit as end:
        # What typer found wrong with the arguments it has explained itself; no command of ours ends with its 2.
        sys.exit(UsageError.exit_code if end.code == _USAGE_CODE_OF_TYPER else end.code)


def _run(arguments: list[str]) -> None:
    from elastictrain.cli.status_show import parse_plain, show_status

    # Making a command line of typer's takes longer than finding out how a job is: the usual forms of `status`, which
    # people and scripts call again and again, do without. Whatever else is asked, also wrongly, takes the long way.
    if arguments[:1] == ["status"] and (request := parse_plain(arguments[1:])) is not None:
        sys.exit(show_status(request))

    from elastictrain.cli.app import COMMANDS, build_app

    is_completing = any(name.endswith("_COMPLETE") for name in os.environ)
    asked = arguments[0] if arguments else ""
    build_app([asked] if asked in COMMANDS and not is_completing else COMMANDS)()


def _explain(error: ElasticTrainError) -> None:
    lines = error.what.splitlines() or [""]
    sys.stderr.write(f"elastictrain: error: {lines[0]}\n")
    for line in lines[1:]:
        sys.stderr.write(f"                     {line}\n")
    for line in error.hint.splitlines():
        sys.stderr.write(f"  {line}\n")


if __name__ == "__main__":
    main()
