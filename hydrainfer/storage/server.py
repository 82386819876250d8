"""The source's side of all transports over sockets. It serves peers that know the cluster's secret."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from hydrainfer.core import SeldomLog
from hydrainfer.storage.packets import Attach, Granted, Join, Read, Refused
from hydrainfer.storage.staging import outgoing
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import TIMEOUT_S, TransportError, compute_alone, find
from hydrainfer.storage.two_sided import Backend, serve_group
from hydrainfer.storage.wire import HANDSHAKE_S, PeerSocket, admit, new_socket

_log = logging.getLogger(__name__)
_STRANGERS = 32  # the most connections in their handshake; one more ends the oldest


class BlockServer:
    """The block server of an instance. One thread accepts, and one per connection serves. `address` is HOST:PORT with a
    free port. Connections without the secret are cut off, delay nobody and do not fill the log. A read that names an
    offer is served while that offer is open."""

    def __init__(
        self,
        owner: str,
        stores: Mapping[str, BlockStore],
        secret: bytes,
        host: str = "127.0.0.1",
        backends: Mapping[str, Backend] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._owner, self._stores, self._secret = owner, stores, secret
        self._backends, self._timeout_s = backends or {}, timeout_s
        self._not_accepted, self._refused = SeldomLog(_log), SeldomLog(_log, logging.INFO)
        self._lock = threading.Lock()
        self._threads: dict[PeerSocket, threading.Thread] = {}
        self._strangers: list[PeerSocket] = []
        self._offers: set[str] = set()
        self._reading: defaultdict[str, set[PeerSocket]] = defaultdict(set)  # by offer
        self._closed = False
        self._listener = new_socket(host)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(128)
        except BaseException:
            self._listener.close()
            raise
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name=f"hydrainfer-blocks-{owner}", daemon=True)
        self._accepting.start()

    def open_offer(self, name: str) -> None:
        with self._lock:
            self._offers.add(name)

    def end_offer(self, name: str) -> bool:
        """Refuse further reads of an offer, and cut those that are running. Returns whether none is left."""
        with self._lock:
            self._offers.discard(name)
            reading = list(self._reading.get(name, ()))
        for connection in reading:
            connection.abort()
        return not reading

    @contextmanager
    def _reads(self, connection: PeerSocket, offer: str) -> Iterator[None]:
        """Surrounds the reading of an offer's blocks. Raises `TransportError` if the offer is over."""
        with self._lock:
            if offer and offer not in self._offers:
                raise TransportError("the offer of these blocks is over")
            self._reading[offer].add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._reading[offer].discard(connection)
                if not self._reading[offer]:
                    del self._reading[offer]

    def close(self) -> None:
        """Cut all connections and end all threads. Safe to repeat."""
        with self._lock:
            self._closed = True
            serving = dict(self._threads)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError:
            return  # closed already
        self._accepting.join()
        self._listener.close()
        for connection, thread in serving.items():
            connection.abort()
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if self._closed:
                    return
                self._not_accepted("cannot accept a peer: %s", e)  # perhaps out of descriptors, which may pass
                time.sleep(0.1)
                continue
            try:
                self._welcome(PeerSocket(sock))
            except (OSError, RuntimeError) as e:  # the peer has left, or no thread can be started
                self._not_accepted("cannot serve a peer: %s", e)
                sock.close()

    def _welcome(self, connection: PeerSocket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="hydrainfer-blocks", daemon=True)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._threads = {c: t for c, t in self._threads.items() if t.is_alive()}
            thread.start()
            self._threads[connection] = thread  # until it ends: a thread that outlives the interpreter may crash it
            self._strangers.append(connection)
            if len(self._strangers) > _STRANGERS:
                self._strangers.pop(0).abort()

    def _serve(self, connection: PeerSocket) -> None:
        compute_alone()
        known = False
        try:
            with torch.inference_mode():
                self._meet(connection)
                known = True
                self._answer(connection)
        except (OSError, TransportError) as e:
            tell = _log.info if known else self._refused
            tell("a connection to the blocks of %s ended: %s", self._owner, e)
        except Exception:
            _log.exception("serving blocks of %s failed", self._owner)
        finally:
            with self._lock:
                if connection in self._strangers:
                    self._strangers.remove(connection)
            connection.close()

    def _meet(self, connection: PeerSocket) -> None:
        connection.limit(HANDSHAKE_S)
        admit(connection, self._secret)
        hello = connection.receive()
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)
        if not isinstance(hello, Attach) or hello.owner != self._owner:
            connection.send(Refused(f"this is {self._owner}"))
            raise TransportError(f"a peer came for {hello}")

    def _answer(self, connection: PeerSocket) -> None:
        while True:
            connection.limit(None)
            request = connection.receive()
            connection.limit(self._timeout_s, each=True)
            with ExitStack() as reading:
                try:
                    match request:
                        case Read(spec, block_bytes, pieces, offer):
                            store = find(self._stores, spec, block_bytes, pieces)
                            reading.enter_context(self._reads(connection, offer))
                        case Join(backend) if backend in self._backends:
                            reads = partial(self._reads, connection)
                            serve_group(connection, self._backends[backend], self._stores, self._timeout_s, reads)
                            return
                        case _:
                            raise TransportError(f"not served here: {type(request).__name__}")
                except TransportError as e:
                    connection.send(Refused(str(e)))
                    raise
                connection.send(Granted())
                for views in outgoing(store, pieces):
                    connection.drain(views)
