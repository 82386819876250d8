"""`file:` URLs: regular files under directories that the operator has named. Symbolic links are resolved before the
check."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hydrainfer.core import InvalidRequest, MediaError, RequestTooLarge

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def locate_file(url: str, roots: Sequence[Path], param: str) -> Path:
    """The path that a `file:` URL names, with symbolic links resolved. Raises `InvalidRequest` if it is not under one
    of `roots`, whether or not the file exists."""
    if not roots:
        raise InvalidRequest(
            "file: URLs are not read by this server; send the file itself as a data: URL",
            param=param,
            code="forbidden_url",
        )
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise ValueError
        real = Path(os.path.realpath(path))
    except (ValueError, OSError):
        raise InvalidRequest(
            "a file: URL must look like file:///directory/name", param=param, code="invalid_url"
        ) from None
    if not _is_under(real, roots):
        raise _outside(param)
    return real


def read_file(
    path: Path, roots: Sequence[Path], max_bytes: int, noun: str, param: str, take: Callable[[int], None]
) -> bytes:
    """The bytes of a file found by `locate_file`. Its path is checked again once it is open. `take(n_bytes)` is called
    before the file is read. Raises `InvalidRequest`, `MediaError`, `RequestTooLarge` or what `take` raises."""
    try:
        with open(os.open(path, _OPEN), "rb") as file:
            if not _is_under(_path_of(file.fileno(), path), roots):
                raise _outside(param)
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise MediaError(f"the {noun}'s file: URL names no regular file", param=param)
            if found.st_size > max_bytes:
                raise RequestTooLarge(f"the {noun} is larger than the limit of {max_bytes} bytes", param=param)
            take(found.st_size)
            return file.read(found.st_size)
    except OSError:
        raise MediaError(
            f"the {noun}'s file cannot be read: it does not exist or is not allowed", param=param
        ) from None


def _path_of(fd: int, path: Path) -> Path:
    """The real path of an open file. It may differ from `path`, since a directory may have been replaced by a link."""
    link = f"/proc/self/fd/{fd}"
    return Path(os.readlink(link)) if os.path.lexists(link) else path


def _is_under(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(os.path.realpath(root)) for root in roots)


def _outside(param: str) -> InvalidRequest:
    return InvalidRequest(
        "the file: URL is not under a directory that this server may read", param=param, code="forbidden_url"
    )
