"""Keeps the credentials of a store out of everything that is written or shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

_SECRET_KEY = re.compile(
    r"key|secret|token|passw|pwd|credential|sas|connection_string|signature|auth|private|cookie|header|user", re.I
)
_HARMLESS_KEY = re.compile(r"anon|keep|key_prefix|cache|default_acl", re.I)
# A secret may hold what should have been percent-encoded: "@" and "/". So with a colon before the first slash, all goes
# up to the last "@", but for the "@STEP" of `--from URL@STEP`; else up to the last one before the first slash. The last
# case is "key:sec/ret@42". A host with a port, and an "@" in its path, is hidden along: better that than half a secret.
_USERINFO = re.compile(
    r"(?<=://)(?:"
    r"[^/:\s]*:\S*(?=@(?!\d+(?![\w./-])))"
    r"|[^/\s]+(?=@)"
    r"|[^/:\s]*:\S+(?=@)"
    r")"
)
_QUERY = re.compile(r"(?<=[?&])([^=&\s]+)=([^&\s]+)")


def redact_url(text: str) -> str:
    """A text without the user information (`s3://key:secret@host`) and query values of the URLs in it."""
    return _QUERY.sub(rf"\1={HIDDEN}", _USERINFO.sub(HIDDEN, text))


def redact_options(options: Any, *, secret: bool = False) -> Any:
    """Storage options as they may be shown: values under names that smell of secrets are hidden, at any depth."""
    if isinstance(options, Mapping):
        return {key: redact_options(value, secret=secret or _is_secret(str(key))) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [redact_options(value, secret=secret) for value in options]
    if options is None or isinstance(options, bool):
        return options
    if secret:
        return HIDDEN
    return redact_url(options) if isinstance(options, str) else options


class Redactor:
    """Hides the secrets of one store in any text, such as the message of an error from its client.

    Args:
        url: the store's URL.
        options: its storage options.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        found = {*_secrets_of(options, secret=False)}
        for match in _USERINFO.finditer(url):
            user, _, password = match[0].partition(":")
            # Clients say them as they are, decoded, or cut where they take the host or the path to begin.
            found.update(form(part) for part in (user, password) for form in (str, unquote))
            found.update(re.split("[:/@?#]", password))
        found.update(form(match[2]) for match in _QUERY.finditer(url) for form in (str, unquote))
        # Longest first: one may contain another. Very short ones would blot out ordinary words.
        self._secrets = sorted((secret for secret in found if len(secret) >= 3), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return redact_url(text)


def _is_secret(key: str) -> bool:
    return _SECRET_KEY.search(key) is not None and _HARMLESS_KEY.search(key) is None


def _secrets_of(options: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _secrets_of(value, secret=secret or _is_secret(str(key)))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _secrets_of(value, secret=secret)
    elif isinstance(options, str) and secret:
        yield options
