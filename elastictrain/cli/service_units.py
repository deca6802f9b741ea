"""The files that make a job a systemd service, rendered for where elastictrain is installed."""

from __future__ import annotations

import stat
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from elastictrain.errors import FINAL_CODES

DEFAULT_STOP_TIMEOUT_S = 180
_TEMPLATES = "systemd"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where things are.

    Args:
        command: how elastictrain is started: one or more words, the first an absolute path.
        user: for the service manager of this user, rather than of the machine.
        config_dir: where job files are: NAME.toml is the service elastictrain@NAME. None takes the usual place.
        stop_timeout_s: how long a job may take to stop, before what is left of it is killed.
        run_arguments: appended to `elastictrain run`.
    """

    command: tuple[str, ...]
    user: bool = False
    config_dir: str | None = None
    stop_timeout_s: int = DEFAULT_STOP_TIMEOUT_S
    run_arguments: str = "--service --output json"

    @property
    def jobs_in(self) -> str:
        """`config_dir`, or the usual place, as systemd writes it."""
        return self.config_dir or ("%E/elastictrain" if self.user else "/etc/elastictrain")

    @property
    def exec_settle(self) -> str:
        """What runs when a job's service has ended."""
        return f"{self._command_line} service settle --state-dir %S/elastictrain/%i"

    @property
    def _command_line(self) -> str:
        return " ".join(_quoted(word) for word in self.command)

    @property
    def exec_start(self) -> str:
        """The command line of a job's service."""
        arguments = f"{self.jobs_in}/%i.toml --state-dir %S/elastictrain/%i {self.run_arguments}"
        return f"{self._command_line} run {arguments}".rstrip()

    def files(self) -> dict[Path, str]:
        """Content by path, below the root of the file system, or below the user's configuration folder."""
        values = {
            "exec_start": self.exec_start,
            "exec_settle": self.exec_settle,
            "config_dir": self.jobs_in,
            "stop_timeout_s": str(self.stop_timeout_s),
            "user_section": "" if self.user else _template("system_section"),
            "final_codes": " ".join(str(code) for code in sorted(FINAL_CODES)),
            "final_words": ", ".join(f"{words} ({code})" for code, words in sorted(FINAL_CODES.items())),
            "wanted_by": "default.target" if self.user else "multi-user.target",
        }
        units = {name: _render(_template(name), values) for name in ("elastictrain@.service", "elastictrain.target")}
        if self.user:
            return {Path("systemd/user") / name: text for name, text in units.items()}
        return {
            **{Path("etc/systemd/system") / name: text for name, text in units.items()},
            Path("etc/sysusers.d/elastictrain.conf"): _render(_template("elastictrain.sysusers.conf"), values),
            Path("etc/tmpfiles.d/elastictrain.conf"): _render(_template("elastictrain.tmpfiles.conf"), values),
        }


def this_installation() -> tuple[str, ...]:
    """How the elastictrain that runs now is started."""
    script = Path(sys.executable).with_name("elastictrain")
    return (str(script),) if script.exists() else (sys.executable, "-m", "elastictrain.cli.main")


def hidden_part(words: tuple[str, ...]) -> Path | None:
    """The first part of the way to a command, or to the Python that runs it, that other users may not enter; None if
    there is none."""
    for path in (Path(words[0]), Path(words[0]).resolve(), Path(sys.executable).resolve()):
        for part in (*reversed(path.parents), path):
            if part.exists() and not part.stat().st_mode & stat.S_IXOTH:
                return part
    return None


def _template(name: str) -> str:
    return (resources.files("elastictrain") / "cli" / "templates" / _TEMPLATES / name).read_text()


def _render(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _quoted(word: str) -> str:
    """As systemd.service(5) wants it; a percent sign would be a specifier, a dollar a variable."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not any(c.isspace() or c in "\"'\\;" for c in word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def write_reference(folder: Path) -> None:
    """The files as a package for /usr would have them: what the folder systemd/ of the repository shows."""
    for path, text in Installation(("/usr/bin/elastictrain",)).files().items():
        name = f"elastictrain.{path.parent.name.removesuffix('.d')}.conf" if path.suffix == ".conf" else path.name
        (folder / name).write_text(text)


if __name__ == "__main__":
    write_reference(Path(sys.argv[1]))
