"""Runs an instance behind HTTP, in the foreground for `hydrainfer serve`, in a thread for demos and tests."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from hydrainfer.assemble import Instance, start_instance
from hydrainfer.config import Loaded, config_table
from hydrainfer.core import ConfigError, InternalError
from hydrainfer.server import ServerSettings, create_app
from hydrainfer.version import __version__

GRACEFUL_SHUTDOWN_S = 25
"""After SIGTERM, requests that are being answered get this long to finish; then they end with an error."""
_LAST_WORDS_S = 5
"""For those errors to reach the clients; then connections are cut."""


class _Server(uvicorn.Server):
    """Stops on SIGINT and SIGTERM without raising them again afterwards: the instance has to be closed first.
    `end_requests` is called on the event loop when the time to finish is over."""

    def __init__(self, config: uvicorn.Config, end_requests: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, in which nobody is cut off without a word."""
        timer = asyncio.get_running_loop().call_later(GRACEFUL_SHUTDOWN_S, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def serve_forever(loaded: Loaded, console: Console) -> None:
    """Until SIGINT or SIGTERM. Raises `ConfigError` or `CheckpointError` before it listens."""
    listener = _listen(loaded.config.host, loaded.config.port)
    instance = _start(loaded, console)
    try:
        server = _server(instance)
        _greet(console, _url(listener), instance.name)
        server.run(sockets=[listener])
    finally:
        instance.close()
        listener.close()


@contextmanager
def serve_in_background(loaded: Loaded, console: Console) -> Iterator[tuple[str, Instance]]:
    """Yields the server's URL and the instance behind it; on exit everything is stopped."""
    listener = _listen(loaded.config.host, loaded.config.port)
    instance = _start(loaded, console)
    server = _server(instance)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise InternalError("the HTTP server did not start")
            time.sleep(0.005)
        yield _url(listener), instance
    finally:
        server.should_exit = True
        thread.join()
        instance.close()
        listener.close()


def _start(loaded: Loaded, console: Console) -> Instance:
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("load", total=None)
        instance = start_instance(loaded.config, lambda done, total: progress.update(task, completed=done, total=total))
    gc.collect()
    gc.freeze()  # what was loaded lives for ever: keep it out of every later collection
    console.print(config_table(loaded, instance.facts))
    return instance


def _server(instance: Instance) -> _Server:
    config = instance.config
    settings = ServerSettings(
        model_names=(instance.name,),
        version=__version__,
        api_keys=(config.api_key,) if config.api_key else (),
        max_body_bytes=int(config.max_body_mib * 2**20),
        stall_s=config.stall_s,
    )
    app = create_app(settings, instance.intake, metrics=instance.recorder.page)
    return _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S + _LAST_WORDS_S,
            server_header=False,
        ),
        instance.sessions.close,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Bound before the model loads, so that a taken port is found at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, socket.gaierror) as e:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another with --port") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _greet(console: Console, url: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    console.print(f"\n[bold green]ready[/bold green] {url}/v1   (Ctrl-C stops)\n")
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
