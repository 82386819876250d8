"""Downloads from URLs at checked addresses, and files under named directories. No other module gets bytes from
outside."""

from __future__ import annotations

import asyncio
import io
import ssl
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import h11
import httpcore
import msgspec

from hydrainfer.core import DeadlineExceeded, HydraError, InvalidRequest, MediaError, Overloaded, RequestTooLarge
from hydrainfer.processor.fetching.addresses import Address, Hosts, check_host, parse_url
from hydrainfer.processor.fetching.connection import (
    CheckedNetwork,
    NoPublicAddress,
    Patience,
    PieceBudget,
    Resolve,
    request,
    resolve,
)
from hydrainfer.processor.fetching.local_files import locate_file, read_file
from hydrainfer.processor.fetching.loop_thread import LoopThread
from hydrainfer.processor.fetching.slot import Slot
from hydrainfer.processor.messages import ChatMessage, ImagePart, TextPart

_REDIRECTS = (301, 302, 303, 307, 308)
_PAGES = ("text/html", "application/xhtml", "application/json", "application/xml", "text/xml")


class Wanted(NamedTuple):
    """The kind of file to fetch and its limits. `noun`: what error messages call it. `not_types`: prefixes of content
    types that are refused."""

    noun: str
    max_bytes: int
    total_s: float
    not_types: tuple[str, ...] = ()


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of all downloads. `hosts`: "public" allows public addresses only, "any" also private ones, "none" no
    http(s) at all. `domains`: the only hosts allowed, if not empty. `roots`: directories that `file:` URLs may read.
    `held_bytes`: limit on the bytes downloaded and not yet decoded. `connect_s`, `read_s`: time limits for connecting
    and for each read. A whole download is limited by `Wanted.total_s`."""

    hosts: Hosts = "public"
    domains: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    max_image_bytes: int = 32 << 20
    max_video_bytes: int = 256 << 20
    image_s: float = 5.0
    video_s: float = 30.0
    n_parallel: int = 32
    held_bytes: int = 512 << 20
    max_redirects: int = 3
    connect_s: float = 3.0
    read_s: float = 10.0

    def picture(self) -> Wanted:
        return Wanted("picture", self.max_image_bytes, self.image_s, ("video/", "audio/"))

    def video(self) -> Wanted:
        return Wanted("video", self.max_video_bytes, self.video_s, ("image/", "audio/"))


class Fetcher:
    """Downloads of URLs, several at a time, on a thread of its own: a server that answers in a million small pieces
    delays nothing but other downloads. `resolve`, `network` and `tls` are there for tests."""

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        resolve: Resolve = resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits or FetchLimits()
        self.held_bytes = 0
        self._resolve = resolve
        self._network = network or httpcore.AnyIOBackend()
        self._tls = tls
        self._slots = asyncio.Semaphore(self.limits.n_parallel)
        self._pace = PieceBudget()
        self.lock = threading.Lock()  # guards `held_bytes`
        self._thread = LoopThread("hydra-fetch", self.limits.n_parallel)

    @asynccontextmanager
    async def fetched(self, messages: Sequence[ChatMessage]) -> AsyncIterator[Sequence[ChatMessage]]:
        """The messages with the bytes of every picture and video in place of its URL, fetched in parallel; `data:` URLs
        stay. The bytes count against `held_bytes` until the end of the block. If a download fails, the others are
        cancelled, and the first error is raised, which is one of those of `get`."""
        parts = {str(part.source): part for m in messages for part in m.media if _is_elsewhere(part.source)}
        if not parts:
            yield messages
            return
        held = DownloadMemory(self)
        try:
            found = await self._thread.run(self._all(parts, held))
            yield [_with_bytes(m, found) for m in messages]
        finally:
            held.release()

    async def get(self, url: str, wanted: Wanted, param: str) -> bytes:
        """The bytes of one URL. Raises

        - `InvalidRequest` if the URL is malformed, has another scheme, or names a host or file that is not allowed;
        - `MediaError` if the server cannot be reached, redirects to a URL that is not allowed, or answers with an error
          or a web page;
        - `RequestTooLarge`; `Overloaded` if `held_bytes` is exceeded; `Unavailable` when closed;
        - `DeadlineExceeded` if the download takes longer than `wanted.total_s`, or the lookup of the name than
          `connect_s`.
        """
        held = DownloadMemory(self)
        try:
            return await self._thread.run(self._load(self.locate(url, param), wanted, param, held))
        finally:
            held.release()

    def close(self) -> None:
        """End all downloads; their callers get `Unavailable`. Safe to repeat."""
        self._thread.close()

    def locate(self, url: str, param: str) -> Address | Path:
        """The checked address or path that a URL names, without touching the network. Raises `InvalidRequest`."""
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "file":
            return locate_file(url, self.limits.roots, param)
        if scheme not in ("http", "https"):
            raise InvalidRequest(
                "only https:, http: and data: URLs are understood (a picture itself is sent as a data: URL, "
                "data:image/jpeg;base64,...)",
                param=param,
                code="unsupported_url",
            )
        address = parse_url(url, param)
        check_host(address, self.limits.hosts, self.limits.domains, param)
        return address

    # ---- on the thread

    async def _all(self, parts: Mapping[str, Any], held: DownloadMemory) -> dict[str, bytes]:
        """The bytes of each URL. All URLs are checked before the first is fetched."""
        picture, video = self.limits.picture(), self.limits.video()
        places = {url: self.locate(url, part.param) for url, part in parts.items()}
        tasks = [
            asyncio.ensure_future(
                self._load(places[url], picture if isinstance(part, ImagePart) else video, part.param, held)
            )
            for url, part in parts.items()
        ]
        try:
            return dict(zip(parts, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, place: Address | Path, wanted: Wanted, param: str, held: DownloadMemory) -> bytes:
        async with Slot(self._slots) as slot:
            try:
                async with asyncio.timeout(wanted.total_s):
                    if isinstance(place, Path):
                        args = (place, self.limits.roots, wanted.max_bytes, wanted.noun, param, held.take)
                        return await slot.wait(asyncio.to_thread(read_file, *args))
                    return await self._follow(place, wanted, param, held, slot)
            except (TimeoutError, httpcore.ReadTimeout, httpcore.WriteTimeout):
                raise DeadlineExceeded(
                    f"the {wanted.noun} could not be fetched within {wanted.total_s:g} s",
                    param=param,
                    code="media_timeout",
                ) from None
            except (httpcore.NetworkError, h11.ProtocolError, httpcore.TimeoutException, OSError) as e:
                raise MediaError(f"the {wanted.noun} cannot be fetched: {_why(e)}", param=param) from None
            except NoPublicAddress:
                why = "the URL's host has no address that this server connects to"
                raise MediaError(f"the {wanted.noun} cannot be fetched: {why}", param=param) from None

    async def _follow(self, address: Address, wanted: Wanted, param: str, held: DownloadMemory, slot: Slot) -> bytes:
        for _ in range(1 + self.limits.max_redirects):
            found = await self._ask(address, wanted, param, held, slot)
            if isinstance(found, bytes):
                return found
            address = self._redirected(address, found, wanted, param)
        raise MediaError(f"the {wanted.noun}'s URL redirects more than {self.limits.max_redirects} times", param=param)

    async def _ask(self, address: Address, wanted: Wanted, param: str, held: DownloadMemory, slot: Slot) -> bytes | str:
        """The body, or the location that the server redirects to."""
        limits = self.limits
        network = CheckedNetwork(limits.hosts, lambda *name: slot.wait(self._resolve(*name)), self._network)
        tls = self._context() if address.scheme == "https" else None
        patience = Patience(limits.connect_s, limits.read_s)
        async with request(address, network, tls, patience, self._pace) as answer:
            if answer.status in _REDIRECTS and "location" in answer.headers:
                return answer.headers["location"]
            _check_head(answer.status, answer.headers, wanted, param)
            data = io.BytesIO()  # getvalue() makes no copy; a copy would hold the GIL
            async with aclosing(answer.chunks) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if data.tell() + len(chunk) > wanted.max_bytes:
                        raise _too_large(wanted, param)
                    held.take(len(chunk))
                    data.write(chunk)
            return data.getvalue()

    def _redirected(self, address: Address, location: str, wanted: Wanted, param: str) -> Address:
        try:
            target = parse_url(urljoin(address.url, _location(location)), param)
            check_host(target, self.limits.hosts, self.limits.domains, param)
        except (InvalidRequest, ValueError):
            raise MediaError(
                f"the {wanted.noun}'s URL redirects to one that this server does not fetch", param=param
            ) from None
        if (address.scheme, target.scheme) == ("https", "http"):
            raise MediaError(f"the {wanted.noun}'s URL redirects from https to http", param=param)
        return target

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            import httpx  # slow to import; media workers import this module but never need httpx

            self._tls = httpx.create_ssl_context()
        return self._tls


class DownloadMemory:
    """The memory of one request's downloads, counted in `held_bytes` of the fetcher. Thread-safe."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._n_bytes = 0
        self._released = False

    def take(self, n_bytes: int) -> None:
        """Count `n_bytes` more. Raises `Overloaded` beyond the limit."""
        fetcher = self._fetcher
        with fetcher.lock:
            if self._released or fetcher.held_bytes + n_bytes > fetcher.limits.held_bytes:
                raise Overloaded("too much is being downloaded at once; retry later", retry_after_s=1.0)
            fetcher.held_bytes += n_bytes
            self._n_bytes += n_bytes

    def release(self) -> None:
        """Give the memory back. Afterwards `take` refuses, since a cancelled download may still be running."""
        with self._fetcher.lock:
            self._fetcher.held_bytes -= self._n_bytes
            self._n_bytes, self._released = 0, True


def _location(header: str) -> str:
    """The URL of a Location header, whose bytes were read as latin-1, as browsers understand it: in UTF-8, or in bytes
    that become escapes; so do spaces."""
    raw = header.strip(" \t").encode("latin-1")
    try:
        url = raw.decode()
    except UnicodeDecodeError:
        url = "".join(chr(byte) if byte < 128 else f"%{byte:02X}" for byte in raw)
    return url.replace(" ", "%20")


def _is_elsewhere(source: object) -> bool:
    return isinstance(source, str) and source[:5].lower() != "data:"


def _with_bytes(message: ChatMessage, found: dict[Any, bytes]) -> ChatMessage:
    parts = [
        msgspec.structs.replace(p, source=found[p.source])
        if not isinstance(p, TextPart) and _is_elsewhere(p.source)
        else p
        for p in message.parts
    ]
    return msgspec.structs.replace(message, parts=tuple(parts))


def _check_head(status: int, headers: dict[str, str], wanted: Wanted, param: str) -> None:
    if status != 200:
        raise MediaError(f"the {wanted.noun} cannot be fetched: its server answered with status {status}", param=param)
    kind = headers.get("content-type", "").strip().lower()
    if kind.startswith(_PAGES) or kind.startswith(wanted.not_types):
        shown = kind.partition(";")[0] if kind.startswith(_PAGES) else kind.partition("/")[0]
        raise MediaError(f"the URL leads to {shown}, not to a {wanted.noun}", param=param)
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise MediaError(f"the {wanted.noun}'s server sends it compressed although it was asked not to", param=param)
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > wanted.max_bytes):
        raise _too_large(wanted, param)


def _too_large(wanted: Wanted, param: str) -> HydraError:
    return RequestTooLarge(f"the {wanted.noun} is larger than the limit of {wanted.max_bytes} bytes", param=param)


def _why(e: Exception) -> str:
    if isinstance(e, h11.ProtocolError):
        return "its server's answer is cut off or not HTTP"
    if isinstance(e.__cause__, ssl.SSLError):
        return "its server has no valid certificate for this name"
    return "its server cannot be reached or breaks off"
