"""Worker processes that live as long as one piece of work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker


@contextmanager
def processes(n: int, preload: Sequence[str] = ()) -> Iterator[ProcessPoolExecutor]:
    """A pool of `n` worker processes. They ignore Ctrl-C and SIGTERM, which may go to the whole process group. If an
    exception ends the context, they are killed at once. They end with this process, however it ends. `preload`: modules
    to import once for all of them."""
    context, others = multiprocessing.get_context("forkserver"), multiprocessing.active_children()
    context.set_forkserver_preload(list(preload))
    _start_forkserver()
    with ProcessPoolExecutor(n, context, _follow_parent) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - set(others):
                process.kill()
            raise


def _start_forkserver() -> None:
    """Start the fork server with SIGINT and SIGTERM blocked from its first instruction. Otherwise Ctrl-C would make it
    print a traceback while it imports modules, and SIGTERM would end it and break the pool."""
    resource_tracker.ensure_running()  # started before, because it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow_parent() -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
