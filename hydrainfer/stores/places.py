"""The places of a store, as the option `store` names them: `dir:/path?gib=50,redis://host:6379`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from hydrainfer.config import InstanceSpec, ServeConfig, stores_of
from hydrainfer.core import ConfigError
from hydrainfer.stores.address import (
    FolderAddress,
    ServerAddress,
    folder_address,
    refuse_password,
    server_address,
)
from hydrainfer.stores.port import Root, SharedStore, StoreError


class Place(NamedTuple):
    """A place. `text`: as it was written, without blanks around it; it holds no password. `name`: the same for all ways
    to write this place, without its options; instances that write it so agree on which blocks lie in it."""

    text: str
    address: FolderAddress | ServerAddress

    @property
    def name(self) -> str:
        return self.address.name


_SCHEMES: Mapping[str, Callable[[str], FolderAddress | ServerAddress]] = {
    "dir": folder_address,
    "redis": server_address,
    "rediss": server_address,
}


def parse_places(text: str) -> list[Place]:
    """The places of a text, which are separated by commas. Nothing is opened. Raises `ConfigError` with one line that
    says what to do, and that never repeats what may be a password."""
    texts = [one.strip() for one in text.split(",")]
    if any("@" in one and _scheme(one) != "dir" for one in texts):  # also where a comma has cut a password in two
        refuse_password()
    places = [_parse(one) for one in texts]
    names = [place.name for place in places]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice; leave one out", param="store")
    return places


def check_stores(config: ServeConfig, specs: Sequence[InstanceSpec]) -> None:
    """Check the stores of these instances before anything is loaded. Folders are made and written to where the
    instances run on this machine. That is not repeated when an instance starts: once blocks were stored, a folder that
    takes no more is still read. Raises `ConfigError`."""
    for text in stores_of(config, specs):
        places = parse_places(text)
        if any(isinstance(place.address, ServerAddress) for place in places):
            check_redis()
        for place in places if config.ray_address is None else ():
            check_folder(place)


def check_folder(place: Place) -> None:
    """Check that a place which is a folder can be written to. One that is absent is made. Raises `ConfigError`."""
    if not isinstance(place.address, FolderAddress):
        return
    from hydrainfer.stores.files import check_writable

    try:
        check_writable(place.address.path)
    except StoreError as e:
        raise ConfigError(str(e), param="store") from e


def open_places(places: Sequence[Place], root: Root, environ: Mapping[str, str] = os.environ) -> SharedStore:
    """One store of these places. A server need not be there yet. Raises `ConfigError` if a folder cannot be used."""
    stores: list[SharedStore] = []
    try:
        for place in places:
            stores.append(_open(place, root, environ))  # noqa: PERF401 - those that are open must be known if one fails
    except BaseException:
        for store in stores:
            store.close()
        raise
    if len(stores) == 1:
        return stores[0]
    from hydrainfer.stores.several import SeveralStores

    return SeveralStores(stores)


def make_folders(places: Sequence[Place]) -> None:
    """Make the folders of these places, before anything that takes long. Nothing is written to them. Raises
    `ConfigError` if one cannot be used."""
    from hydrainfer.stores.folder import Folder

    for place in places:
        if not isinstance(place.address, FolderAddress):
            continue
        folder = Folder(place.address.path)
        try:
            with folder.errors():
                folder.make()
        except StoreError as e:
            raise ConfigError(str(e), param="store") from e


def check_redis() -> None:
    """Check that the package for servers is there. Raises `ConfigError`."""
    if find_spec("redis") is None:
        raise ConfigError("a store in a server needs the redis package: pip install 'hydrainfer[redis]'", param="store")


def _scheme(text: str) -> str:
    return text.partition(":")[0].lower() if ":" in text else ""


def _parse(text: str) -> Place:
    parse = _SCHEMES.get(_scheme(text))
    if parse is None:
        raise ConfigError(
            "a place of the store begins with dir:, redis:// or rediss://, such as dir:/path?gib=50; commas separate "
            "places",
            param="store",
        )
    return Place(text, parse(text))


def _open(place: Place, root: Root, environ: Mapping[str, str]) -> SharedStore:
    if isinstance(place.address, ServerAddress):
        check_redis()
        from hydrainfer.stores.resp import RespStore

        return RespStore(place.text, root, environ)
    from hydrainfer.stores.files import FileStore

    try:
        return FileStore(place.address.path, root, place.address.limit_bytes)
    except StoreError as e:
        raise ConfigError(str(e), param="store") from e
