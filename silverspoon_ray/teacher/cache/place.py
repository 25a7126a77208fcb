"""Where a cache lies: a local directory, or anything that pyarrow's file systems reach."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from silverspoon_ray.errors import CacheError

KEY = "teacher_cache"
PARTIAL = ".partial"
"""How the names of files end that are not complete yet; nobody reads them."""


class Place:
    """A directory in which files are whole or not there.

    Args:
        uri: a directory, or a URI such as ``s3://bucket/path``.

    Raises:
        CacheError: no file system for such a URI.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        try:
            if "://" in uri:
                self.filesystem, self.root = fs.FileSystem.from_uri(uri)
            else:
                self.filesystem, self.root = fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
        except (OSError, ValueError, NotImplementedError) as error:  # Arrow's own errors are among these
            raise CacheError(KEY, uri, f"a directory or a URI that pyarrow.fs knows ({_reason(error)})") from error
        self.local = isinstance(self.filesystem, fs.LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def make(self) -> None:
        """Make the directory and see that files can be written to it.

        Raises:
            CacheError: they cannot.
        """
        probe = f".probe-{uuid.uuid4().hex}{PARTIAL}"
        with self.errors("a place that can be written to"):
            self.filesystem.create_dir(self.root, recursive=True)
            with self.filesystem.open_output_stream(self.path(probe)) as stream:
                stream.write(b"?")
            self.filesystem.delete_file(self.path(probe))

    def look(self) -> None:
        """See that the directory could be made and written to, as far as that shows without writing anything.

        Raises:
            CacheError: it could not.
        """
        with self.errors("a place that can be reached"):
            found = self.filesystem.get_file_info(self.root)
            if found.type == fs.FileType.File:
                raise CacheError(KEY, self.uri, "a directory; this is a file")
        if not self.local:
            return
        nearest = Path(self.root)
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise CacheError(KEY, self.uri, f"a place that can be written to; {nearest} cannot")

    def names(self) -> list[str]:
        """Names of the files here, sorted; empty where there is no such directory."""
        with self.errors("a place that can be read"):
            infos = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.File)

    def read(self, name: str) -> bytes | None:
        """A file's content; None where it is not there."""
        with self.errors(f"a place where {name} can be read"):
            if self.filesystem.get_file_info(self.path(name)).type == fs.FileType.NotFound:
                return None
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                content: bytes = stream.read()
        return content

    def open(self, name: str) -> Any:
        """For reading anywhere in it: mapped into memory where it is local."""
        return pa.memory_map(self.path(name)) if self.local else self.filesystem.open_input_file(self.path(name))

    @contextmanager
    def writing(self, name: str, exclusive: bool = False) -> Iterator[Any]:
        """A stream to a file that gets its name when it is complete.

        Args:
            name: the file's.
            exclusive: if there is such a file by then, that one stays (of several writers the first wins; a file
                system without hard links cannot tell, and the last one wins).
        """
        partial = self.path(f".{name}.{uuid.uuid4().hex}{PARTIAL}")
        with self.errors(f"a place where {name} can be written"):
            try:
                with self.filesystem.open_output_stream(partial) as stream:
                    yield stream
                if exclusive and self._named(partial, name):
                    self.filesystem.delete_file(partial)
                else:
                    self.filesystem.move(partial, self.path(name))
            except BaseException:
                with suppress(OSError):
                    self.filesystem.delete_file(partial)
                raise

    def _named(self, partial: str, name: str) -> bool:
        """There is a file of that name now: another's, or this one under a second name."""
        if self.local:
            try:
                os.link(partial, self.path(name))
            except FileExistsError:
                return True
            except OSError:
                pass  # no hard links here
            else:
                return True
        return bool(self.filesystem.get_file_info(self.path(name)).type != fs.FileType.NotFound)

    @contextmanager
    def errors(self, expected: str) -> Iterator[None]:
        """What goes wrong with files becomes a CacheError that names this place."""
        try:
            yield
        except CacheError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise CacheError(KEY, self.uri, f"{expected} ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
