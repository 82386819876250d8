"""The HTTP server of a model: in the foreground for `hydrainfer serve`, in a thread for demos and tests."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from hydrainfer.config import Loaded, ServeConfig, config_rows, config_table
from hydrainfer.core import ConfigError, HydraError, InternalError, SeldomLog, log_event
from hydrainfer.ending import Signals
from hydrainfer.machine import n_cores, n_open_files, raise_open_files
from hydrainfer.metrics import VLLM_PREFIX
from hydrainfer.server import (
    Connection,
    ServerSettings,
    StatsLine,
    Tenants,
    create_app,
    read_origins,
    written_logs,
)
from hydrainfer.tls import tls_arguments
from hydrainfer.version import __version__

if TYPE_CHECKING:
    from hydrainfer.assemble import ServerParts

_LAST_WORDS_S = 1
"""The time to send errors to requests that did not finish; then tasks that are left are cancelled, which answers them
with the same error."""
_FLUSH_S = 4
"""The time for clients to read what was sent; then connections are cut."""
_LOOK_S = 0.05
_SWITCH_S = 0.0005
"""The switch interval: how long a computing thread may hold the GIL while one that answers waits. A tenth of Python's
default."""
_ALL_TICKS, _ALL_AT_LAST_TICKS = 600, 6000
"""Ticks of 0.1 s after which all garbage is collected: if no request is live, and in any case."""
_TIMES_APART = 300.0
"""The pause after a collection of younger garbage, in multiples of the time that the collection took."""
_BACKLOG = 2048
_FEWEST_CONNECTIONS = 16
_INTERRUPTED = 130  # exit status
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The addresses that stand for all interfaces, and the one under which this machine reaches itself."""
_log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """A uvicorn server that drains before it stops, and also stops once the engine is lost. Its owner handles signals,
    calls `handle_exit`, and closes the instance afterwards. `on_ready` is called when the server listens."""

    def __init__(self, config: uvicorn.Config, instance: ServerParts, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._sessions, self._lost = instance.sessions, instance.engine.lost
        self._drain_s = instance.config.drain_s
        waiting = instance.sessions.overload.waiting
        self._stats = StatsLine(instance.engine.instances, instance.recorder, waiting, instance.config.stats_s)
        self._on_ready = on_ready
        self.on_hang_up: Callable[[], None] = lambda: None
        self._hurried = self._hung_up = self._rolls = False
        self._restart_all = instance.engine.restart_all
        self._few_warnings = _FewWarnings()
        self._n_ticks, self._collect_from_s = 0, 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").addFilter(self._few_warnings)
        await super().startup(sockets)
        gc.disable()  # from here on `_collect` does it
        if not self.should_exit:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._lost() is not None:
            self.should_exit = True
        if self._hung_up:
            self._hung_up = False
            self.on_hang_up()
        self._stats.tick()
        self._collect()
        if self._rolls:
            self._rolls = False
            if self._restart_all():
                log_event(_log, "restarting", "restarting the instances, one at a time")
            else:
                log_event(_log, "not_restarting", "no instance can be started again here", logging.WARNING)
        return await super().on_tick(counter)

    def _collect(self) -> None:
        """Collect garbage, in about 0.3 % of the time at most. With many live requests, a collection takes 0.1 s or
        more, in which no request is answered, and finds nothing, since requests leave no cycles. Python's own collector
        is triggered by the number of new objects, so it would scan these requests again and again."""
        self._n_ticks += 1
        begin_s, idle = time.monotonic(), not self._sessions.n_live
        if self._n_ticks >= (_ALL_TICKS if idle else _ALL_AT_LAST_TICKS):
            self._n_ticks = 0
            gc.collect()
        elif begin_s >= self._collect_from_s:
            gc.collect(1)
            end_s = time.monotonic()
            self._collect_from_s = end_s + _TIMES_APART * (end_s - begin_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain while still listening, so that new requests get an error; then run uvicorn's shutdown, in which every
        request still gets an answer."""
        end_s = time.monotonic() + self._drain_s
        await self._drain(end_s)
        ending = asyncio.ensure_future(self._end(end_s))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            logging.getLogger("uvicorn.error").removeFilter(self._few_warnings)
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out if `force_exit` is set
        gc.enable()

    async def _drain(self, end_s: float) -> None:
        """Refuse new requests and wait for the live ones, until `end_s` or a second Ctrl-C."""
        self._sessions.drain()
        overload = self._sessions.overload
        n = overload.n_requests
        if not n:
            return
        message = f"shutting down: new requests get 503, {n} may finish within {self._drain_s:g} s (Ctrl-C ends them)"
        log_event(_log, "draining", message, n_live=n)
        while overload.n_requests and not self._hurried and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        if self._lost() is not None:
            return  # they have ended with an error, which is in the log
        left = overload.n_requests
        message = f"{n - left} of {n} requests have finished" + (f"; {left} are ended with 503" if left else "")
        log_event(_log, "drained", message, n_finished=n - left, n_ended=left)

    async def _end(self, end_s: float) -> None:
        """End every request at `end_s`, or at a second Ctrl-C."""
        while not self._hurried and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        self._sessions.close()
        await asyncio.sleep(_LAST_WORDS_S)
        for task in self.server_state.tasks:
            task.cancel()
        await asyncio.sleep(_FLUSH_S)
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note a signal. The signal handler calls this, so it only sets flags."""
        if sig == signal.SIGHUP:
            self._hung_up = True
            return
        if sig == signal.SIGUSR1:
            self._rolls = True
            return
        if self.should_exit and sig == signal.SIGINT:
            self._hurried = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_forever(loaded: Loaded, console: Console) -> None:
    """Serve until SIGINT or SIGTERM. Raises `ConfigError` or `CheckpointError` during the start, `InternalError` if the
    engine is lost for good."""
    raise_open_files()  # before processes are started, which inherit it
    logs = written_logs(loaded.config.log_level, loaded.config.log_format, access=loaded.config.access_log)
    tenants, locked = _tenants(loaded.config), bool(loaded.config.api_key or loaded.config.tenants)
    signals = Signals(loaded.config.drain_s, loaded.config.tenants is not None)
    as_json = loaded.config.log_format == "json"
    with logs, _last_words(as_json), signals:
        listener = _bind(loaded.config.host, loaded.config.port)
        exposed = not locked and not loaded.config.ssl_ca_certs and listener.getsockname()[0] in _EVERYWHERE
        with closing(listener), closing(_load(loaded, console)) as instance:
            _settle(loaded, console, instance)
            chats = instance.intake.processor.model.template is not None
            server = _server(
                instance,
                tenants,
                lambda: _greet(console, _url(listener, loaded.config), instance.name, locked, exposed, chats, as_json),
            )
            server.on_hang_up = lambda: threading.Thread(target=_reload, args=(tenants,), daemon=True).start()
            signals.hand_to(server)
            server.run(sockets=[_listening(listener)])
            why = instance.engine.lost()
        if why is not None:
            raise InternalError(f"the server has ended: {why}")


@contextmanager
def _last_words(as_json: bool) -> Iterator[None]:
    """Within the block, what ends the server is logged if the log is JSON, and only an exit status is raised. Otherwise
    the command prints it."""
    if not as_json:
        yield
        return
    try:
        yield
    except HydraError as e:
        log_event(_log, "failed", e.message, logging.CRITICAL)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        log_event(_log, "interrupted", "interrupted while it started")
        raise SystemExit(_INTERRUPTED) from None
    except Exception:
        _log.critical("the server has ended by an error", exc_info=True, extra={"event": "failed"})
        raise SystemExit(1) from None


@contextmanager
def serve_in_background(loaded: Loaded, console: Console) -> Iterator[tuple[str, ServerParts]]:
    """A context that runs the server in a thread. Yields its URL and its parts, and stops everything on exit."""
    raise_open_files()
    tenants, listener = _tenants(loaded.config), _bind(loaded.config.host, loaded.config.port)
    with _thawed(), closing(listener), closing(_load(loaded, console)) as instance:
        _settle(loaded, console, instance)
        server = _server(instance, tenants)
        sockets = [_listening(listener)]
        thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, name="http", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise InternalError("the HTTP server did not start")
                time.sleep(0.005)
            yield _url(listener, loaded.config), instance
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _thawed() -> Iterator[None]:
    """After the block, garbage that `_settle` froze is collected as any other: this process goes on."""
    try:
        yield
    finally:
        gc.unfreeze()


def _load(loaded: Loaded, console: Console) -> ServerParts:
    read_origins(loaded.config.allowed_origins)  # check options before the model is loaded
    tls_arguments(loaded.config)
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("load", total=None)
        from hydrainfer.assemble import start_instance  # imports torch, which takes seconds

        return start_instance(loaded.config, lambda done, total: progress.update(task, completed=done, total=total))


def _settle(loaded: Loaded, console: Console, instance: ServerParts) -> None:
    instance.warm()
    gc.collect()
    gc.freeze()  # loaded objects live until the end: keep them out of every later collection
    sys.setswitchinterval(_SWITCH_S)
    as_json = loaded.config.log_format == "json"
    if as_json:
        rows = config_rows(loaded, instance.facts)
        log_event(_log, "options", "the options of this server", options={name: value for name, value, _ in rows})
    else:
        _say(console, config_table(loaded, instance.facts))
    if (loaded.config.threads or 0) > n_cores():
        message = (
            f"--threads {loaded.config.threads}: more than the {n_cores()} cores here, so threads wait for each other"
        )
        _warn(console, message, as_json)


class _FewWarnings(logging.Filter):
    """A log filter that limits a logger's warnings, since each connection that does not speak HTTP causes one."""

    def __init__(self) -> None:
        super().__init__()
        self._write = SeldomLog(_log)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            self._write("%s", record.getMessage())
        return record.levelno > logging.WARNING


def _tenants(config: ServeConfig) -> Tenants:
    keys = (config.api_key,) if config.api_key else ()
    return Tenants(keys, Path(config.tenants).expanduser() if config.tenants else None)


def _reload(tenants: Tenants) -> None:
    """Read the tenants' file again. It runs on a thread of its own, since the file may be where reading hangs."""
    try:
        read = tenants.reload()
    except ConfigError as e:
        log_event(_log, "tenants_unchanged", f"tenants as before: {e.message}", logging.ERROR)
        return
    message = f"tenants: read again, {read.n_keys} key{'s' * (read.n_keys != 1)}"
    if read.gone:
        message += f"; no longer there: {', '.join(read.gone)}"
    log_event(_log, "tenants_read", message, n_keys=read.n_keys, gone=read.gone)


def _max_connections() -> int:
    """The number of connections for which there are descriptors. A quarter of all is kept for workers, instances,
    downloads, files, and connections that are accepted before others are closed."""
    n_files = raise_open_files()
    return max(n_files - n_files // 4 - n_open_files(), _FEWEST_CONNECTIONS)


def _server(instance: ServerParts, tenants: Tenants, on_ready: Callable[[], None] = lambda: None) -> _HttpServer:
    config = instance.config
    settings = ServerSettings(
        model_names=instance.names,
        version=__version__,
        max_body_bytes=int(config.max_body_mib * 2**20),
        stall_s=config.stall_s,
        allowed_origins=read_origins(config.allowed_origins),
        root_path=config.root_path,
        host=config.host,
        max_connections=_max_connections(),
        refuses_unknown=config.unknown_fields == "refuse",
        status_classes=config.metrics_prefix == VLLM_PREFIX,
        proxies=tuple((config.proxy_headers or "").replace(",", " ").split()),
    )
    recorder = instance.recorder
    app = create_app(
        settings, instance.intake, metrics=recorder.page, ended_after=recorder.ended_after, tenants=tenants
    )
    connection: Any = partial(Connection, app.state.door)
    http = uvicorn.Config(
        app,
        http=connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=min(_BACKLOG, raise_open_files() // 8),  # that many may be accepted before any is closed
        ws="none",
        proxy_headers=False,  # `create_app` believes those of `settings.proxies`
        **tls_arguments(config),
    )
    return _HttpServer(http, instance, on_ready)


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Made before the model loads, so that a port in use is found at once. It does not
    listen yet, so that clients are refused instead of waiting for the model. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise _cannot_listen(host, port, e) from None
    return listener


def _listening(listener: socket.socket) -> socket.socket:
    """The same socket, which listens now. Raises `ConfigError` if another process has begun to listen on the port since
    `_bind`, which uvloop would pass over."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()
    except OSError as e:
        raise _cannot_listen(host, port, e) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    option = "host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "port"
    message = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --{option}"
    return ConfigError(message, param=option)


def _url(listener: socket.socket, config: ServeConfig) -> str:
    host, port = listener.getsockname()[:2]
    host = _EVERYWHERE.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _say(console: Console, message: RenderableType, highlight: bool = False, **style: Any) -> None:
    """Print what a running server says. It runs on if nobody can read that: the disk may be full, or the reader of a
    pipe gone, for which rich raises `SystemExit`."""
    with suppress(OSError, SystemExit):
        console.print(message, highlight=highlight, **style)


def _warn(console: Console, message: str, as_json: bool) -> None:
    if as_json:
        _log.warning("%s", message)
    else:
        _say(console, message, style="yellow")


def _greet(
    console: Console, url: str, model: str, locked: bool, exposed: bool, chats: bool, as_json: bool = False
) -> None:
    """Say where the server listens, and print an example request. `locked`: the server needs a key. `exposed`: it
    listens on all interfaces, and whoever reaches it may use it. `chats`: the model has a chat template. `as_json`: log
    it, without the example."""
    if as_json:
        log_event(_log, "ready", f"ready {url}/v1", url=url, model=model)
    else:
        _say(console, f"\n[bold green]ready[/bold green] {url}/v1   (Ctrl-C stops)\n", highlight=True)
    if exposed:
        message = "it listens on all interfaces and needs no key: set one with --api-key, or choose another --host"
        _warn(console, message, as_json)
    if not chats:
        message = "this checkpoint has no chat template, so chats get 400: give one with --chat-template FILE"
        _warn(console, message, as_json)
    if as_json:
        return
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Hello"}
    path = "chat/completions" if chats else "completions"
    body = {"model": model, **asked, "max_tokens": 32}
    key = "-H 'Authorization: Bearer KEY' " if locked else ""
    asks = f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'\n"
    _say(console, asks, soft_wrap=True, markup=False)
