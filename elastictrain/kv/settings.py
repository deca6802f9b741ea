"""How to reach etcd: an endpoint and its options, of torchrun or of job.toml, checked before anything is tried."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastictrain.errors import ConfigError

DEFAULT_PORT = 2379
DEFAULT_REQUEST_TIMEOUT_S = 3.0
DEFAULT_LEASE_TTL_S = 7200
"""As in torch's own etcd backend: long after the end of a run that nobody comes back to."""

PASSWORD_VARIABLE = "ELASTICTRAIN_ETCD_PASSWORD"

_TORCHS_OWN = {
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
    "timeout",  # put there by torch's launcher, whether or not it was given
}
_OURS = {"user", "password_file", "ca_cert", "cert", "key", "request_timeout_s", "lease_ttl_s"}


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """One etcd cluster, and how we speak to it."""

    endpoints: tuple[str, ...]
    """URLs, `http://HOST:PORT` or `https://HOST:PORT`, in the order in which they are tried."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: Path | None = None
    """What signed the servers' certificates; the system's own authorities if None."""
    cert: Path | None = None
    key: Path | None = None
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    """For one request to one member."""
    call_timeout_s: float | None = None
    """For one call, over all members, and the sign-in where there is a user. No member takes more than its share of
    what is left, so one that is silent leaves time for the others. None: every member may take `request_timeout_s`, and
    a call, where the sign-in has to be repeated, three times that for each member."""
    lease_ttl_s: int = DEFAULT_LEASE_TTL_S
    """How long the keys of a run stay after the last write to them."""


@dataclass(frozen=True)
class Names:
    """What the user calls the two places where settings are given: for errors."""

    endpoint: str
    options: str


TORCHRUN = Names("--rdzv-endpoint", "--rdzv-conf")


def parse_settings(
    endpoint: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    names: Names = TORCHRUN,
) -> EtcdSettings:
    """The settings of an endpoint and its options.

    Raises:
        ConfigError: something in them cannot be meant.
    """
    _known(options, names)
    files: dict[str, Any] = {
        name: _file(name, options[name], names) for name in ("ca_cert", "cert", "key") if options.get(name)
    }
    if ("cert" in files) != ("key" in files):
        raise ConfigError(f"{names.options} gives one of `cert` and `key`", "a client's certificate needs both files")
    endpoints = tuple(_url(part.strip(), names, tls=bool(files)) for part in endpoint.split(","))
    if files and any(url.startswith("http:") for url in endpoints):
        raise ConfigError(
            f"{names.endpoint} {endpoint!r} names http://, and {names.options} gives certificates",
            "write https://, or leave the scheme out",
        )
    user = options.get("user")
    return EtcdSettings(
        endpoints=endpoints,
        user=user,
        password=_password(user, options, environment, names),
        request_timeout_s=_seconds(options, names, "request_timeout_s", DEFAULT_REQUEST_TIMEOUT_S, smallest=0.1),
        lease_ttl_s=int(_seconds(options, names, "lease_ttl_s", DEFAULT_LEASE_TTL_S, smallest=60)),
        **files,
    )


def _known(options: Mapping[str, Any], names: Names) -> None:
    if "password" in options:
        raise ConfigError(
            f"{names.options} holds `password`, where torchrun logs it and `ps` shows it",
            f"put it into a file and give `password_file=PATH`, or into the variable {PASSWORD_VARIABLE}",
        )
    unknown = sorted(set(options) - _TORCHS_OWN - _OURS)
    if unknown:
        raise ConfigError(
            f"{names.options} holds what elastictrain-etcd does not know: {', '.join(unknown)}",
            f"known are: {', '.join(sorted(_TORCHS_OWN | _OURS))}",
        )


def _url(endpoint: str, names: Names, *, tls: bool) -> str:
    default_scheme = "https" if tls else "http"
    hint = f"give {names.endpoint} HOST:PORT[,HOST:PORT...]"
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"{default_scheme}://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{names.endpoint} holds {endpoint!r}: {error}", hint) from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{names.endpoint} holds a user or a password", f"give `user` and `password_file` in {names.options}"
        )
    if parts.scheme not in {"http", "https"} or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{names.endpoint} holds {endpoint!r}, which is no HOST:PORT", hint)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if port is None else port}"


def _file(option: str, value: Any, names: Names) -> Path:
    path = Path(str(value))
    if not path.is_file():
        raise ConfigError(f"{names.options} {option}={path}: there is no such file", "give the path of a PEM file")
    return path


def _password(user: str | None, options: Mapping[str, Any], environment: Mapping[str, str], names: Names) -> str | None:
    path = options.get("password_file")
    if user is None:
        if path is not None:
            raise ConfigError(f"{names.options} gives `password_file` and no `user`", "add user=NAME")
        return None
    if path is None:
        password = environment.get(PASSWORD_VARIABLE, "")
        if not password:
            raise ConfigError(
                f"{names.options} gives user={user} and there is no password",
                f"add password_file=PATH, or set {PASSWORD_VARIABLE}",
            )
        return password
    try:
        password = Path(str(path)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(
            f"{names.options} password_file={path}: {reason}", "give a file that holds the password"
        ) from error
    if not password:
        raise ConfigError(f"{names.options} password_file={path}: the file is empty", "put the password into it")
    return password


def _seconds(options: Mapping[str, Any], names: Names, name: str, default: float, *, smallest: float) -> float:
    try:
        value = float(options.get(name, default))
    except (TypeError, ValueError):
        value = float("nan")
    if not smallest <= value < 1e8:  # also refuses NaN
        raise ConfigError(f"{names.options} {name}={options.get(name)}: not a number of seconds from {smallest:g} up")
    return value
