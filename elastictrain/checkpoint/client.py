"""An fsspec client as a store needs it: one that says what it knows, and whose connection comes back.

What fsspec promises of all its clients is little. `exists` of the base class, which those of sftp, ftp, smb and webhdfs
inherit, takes every error for "no"; a client that holds one connection is of no use any more once that has broken; and
where there are folders, nobody makes them. Here absence is what a FileNotFoundError says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec

# The shipped fake of a store that fails; see elastictrain/testing.
fsspec.register_implementation("faulty", "elastictrain.testing.faulty_fs.FaultyFileSystem", clobber=True)

_MISTAKES = (ImportError, TypeError, ValueError)
"""Errors of a client that is made which say that it was asked for wrongly, rather than that a server is not there."""


class Client:
    """A file system of fsspec, and a folder in it.

    Args:
        url: where, with its protocol.
        storage_options: passed to fsspec.

    Raises:
        ImportError: a package is missing.
        Exception: the client refuses the options, in words of its own. (A server that is not there is no reason: it
            is asked for at the first use.)
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url, self._options = url, storage_options
        self._fs: Any = None
        self._root = ""
        kind = fsspec.get_filesystem_class(url.partition("://")[0].partition("::")[0])
        # The clients of object stores, which are all asynchronous, have a connection for each request and no folders;
        # whatever makes a bucket on the way to a file would hide that its name is wrong.
        self._is_object_store = bool(kind.async_impl)
        try:
            self._connect()
        except Exception as error:
            if self._is_object_store or isinstance(error, _MISTAKES):
                raise

    @property
    def fs(self) -> Any:
        """The file system; connects where it is not. Raises errors of its own."""
        if self._fs is None:
            self._connect()
        return self._fs

    @property
    def root(self) -> str:
        """The folder, as the file system names it."""
        if self._fs is None:
            self._connect()
        return self._root

    def let_go(self) -> None:
        """After an error: a broken connection is not asked again, the next use makes a new one."""
        if not self._is_object_store:
            self._fs = None

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder. Raises where that cannot be known."""
        try:
            self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, path: str) -> None:
        """Makes a folder and those above it, where there are folders."""
        if self._is_object_store or self.exists(path):
            return
        try:
            self.fs.makedirs(path, exist_ok=True)
        except Exception:  # each client has its own errors
            if not self.exists(path):  # else another made it meanwhile
                raise

    def remove(self, path: str) -> None:
        """Removes a file; none is fine."""
        try:
            self.fs.rm_file(path)
        except Exception:  # not every client says of a file that it is missing by FileNotFoundError
            if self.exists(path):
                raise

    def remove_folder(self, path: str) -> None:
        """Removes a folder if it is empty, where there are folders; none is fine."""
        if self._is_object_store:
            return
        try:
            self.fs.rmdir(path)
        except Exception:  # each client has its own errors
            self.fs.invalidate_cache()
            if self.exists(path) and not self.fs.ls(path, detail=False):
                raise

    def _connect(self) -> None:
        """Makes the client, which keeps no listings: others write to the same store."""
        if self._is_object_store:
            fs, root = fsspec.core.url_to_fs(self._url, **{"use_listings_cache": False, **self._options})
        else:
            # Some hand whatever they do not know to what they connect with, which refuses it.
            fs, root = fsspec.core.url_to_fs(self._url, **{**self._options, "skip_instance_cache": True})
            if isinstance(getattr(fs, "dircache", None), fsspec.spec.DirCache):
                fs.dircache.use_listings_cache = False
        self._fs, self._root = fs, root.rstrip("/")
