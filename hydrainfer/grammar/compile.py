"""Grammars compiled by llguidance, after a trial elsewhere if they come from a client, and kept within a budget."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.core import Grammar, InvalidRequest, shutting_down
from hydrainfer.grammar import library
from hydrainfer.grammar.bounds import KEPT, KEPT_BYTES, NICENESS, TrialBounds
from hydrainfer.grammar.trials import Trials

logger = logging.getLogger(__name__)


class CompiledGrammar(NamedTuple):
    """`matcher`: the `LLMatcher` at its start, which is shared, so copy it before use. `n_bytes`: the memory that it
    takes, roughly. `took_s`: the time to compile it."""

    matcher: Any
    n_bytes: int
    took_s: float = 0.0


@dataclass(slots=True)
class _Trial:
    """A trial under way, and the number of requests that wait for it."""

    task: asyncio.Task[str]
    n_waiting: int = 0


class Grammars:
    """The compiler and cache of grammars for one tokenizer. Thread-safe, except that one event loop calls `check`. The
    library releases the GIL to compile."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], trials: Trials) -> None:
        """`tokenizer`: an `llguidance.LLTokenizer`. `eos_ids` end an answer."""
        self.n_vocab: int = tokenizer.vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._trials = trials
        self._running: dict[Grammar, _Trial] = {}
        self._lock = threading.Lock()
        self._kept: dict[Grammar, Future[CompiledGrammar | str]] = {}  # or an error message; the last used last
        self._worker = ThreadPoolExecutor(1, "hydra-grammar", initializer=_stand_back)

    async def check(self, grammar: Grammar) -> None:
        """Compile a client's grammar within bounds: first in a process of its own, then here. When everybody who waits
        for it has been cancelled, the trial ends. Raises `InvalidRequest` if the grammar cannot be compiled, or what
        `Trials.run` raises."""
        if not self._has(grammar) and (error := await self._tried(grammar)):
            future, mine = self._entry(grammar)
            if mine:
                future.set_result(error)
        found = await asyncio.shield(asyncio.wrap_future(self.expect(grammar)))
        if isinstance(found, str):
            raise _invalid(found)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar. It is compiled by the calling thread if it is not kept: then it must have passed
        `check`, here or in the server. Raises `InvalidRequest` if it cannot be compiled."""
        future, mine = self._entry(grammar)
        if mine:
            self._compile(grammar, future)
        found = future.result()
        if isinstance(found, str):
            raise _invalid(found)
        return found

    def expect(self, grammar: Grammar) -> Future[CompiledGrammar | str]:
        """Begin to compile a grammar, which has passed `check`, in the background. Returns at once."""
        future, mine = self._entry(grammar)
        if mine:
            try:
                self._worker.submit(self._compile, grammar, future)
            except RuntimeError:  # closed
                self._compile(grammar, future)
        return future

    def ready(self, grammar: Grammar) -> bool:
        """Whether a grammar, which has passed `check`, is compiled. If not, this begins in the background."""
        return self.expect(grammar).done()

    def forget(self, grammar: Grammar, full: CompiledGrammar) -> None:
        """Have a grammar compiled anew when it is next asked for. `full`: the one whose tables, which all copies share,
        have reached their limits."""
        with self._lock:
            future = self._kept.get(grammar)
            if future is not None and future.done() and future.exception() is None and future.result() is full:
                del self._kept[grammar]

    def warm(self) -> None:
        """Start the process for trials in the background."""
        self._trials.warm()

    def close(self) -> None:
        """End trials and what waits to be compiled. Safe to repeat."""
        self._trials.close()
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            unfinished = [future for future in self._kept.values() if not future.done()]
        for future in unfinished:
            with suppress(InvalidStateError):  # it was being compiled
                future.set_exception(shutting_down())

    async def _tried(self, grammar: Grammar) -> str:
        """The error message of a trial, which all who wait for the same grammar share."""
        trial = self._running.get(grammar)
        if trial is None:
            trial = self._running[grammar] = _Trial(asyncio.ensure_future(self._trials.run(grammar)))
        trial.n_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.n_waiting -= 1
            if not trial.n_waiting:
                trial.task.cancel()
                del self._running[grammar]

    def _has(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._kept

    def _entry(self, grammar: Grammar) -> tuple[Future[CompiledGrammar | str], bool]:
        """The future of a grammar, and whether the caller must set its result."""
        with self._lock:
            found = self._kept.pop(grammar, None)
            future = self._kept[grammar] = found or Future()
            self._make_room()
            return future, found is None

    def _make_room(self) -> None:
        """Forget what was used longest ago, but not the last one. The caller holds the lock."""
        n_bytes = sum(map(_bytes_of, self._kept.values()))
        for grammar, future in list(self._kept.items())[:-1]:
            if len(self._kept) <= KEPT and n_bytes <= KEPT_BYTES:
                return
            if future.done():
                n_bytes -= _bytes_of(future)
                del self._kept[grammar]

    def _compile(self, grammar: Grammar, future: Future[CompiledGrammar | str]) -> None:
        before, began_s = _used_bytes(), time.monotonic()
        try:
            matcher = library.compiled(self._tokenizer, grammar)
            n_bytes = min(max(_used_bytes() - before, 0), TrialBounds().n_bytes)
            found: CompiledGrammar | str = CompiledGrammar(matcher, n_bytes, time.monotonic() - began_s)
        except ValueError as e:
            found = str(e)
        except BaseException as e:
            with self._lock:
                self._kept.pop(grammar, None)
            with suppress(InvalidStateError):
                future.set_exception(e)
            raise
        with suppress(InvalidStateError):  # closed meanwhile
            future.set_result(found)
        with self._lock:
            self._make_room()


def load_grammars(
    path: Path, n_vocab: int, eos_ids: Sequence[int], bounds: TrialBounds | None = None
) -> Grammars | None:
    """The `Grammars` of a checkpoint, from its tokenizer.json; takes as long as `library.load_tokenizer`. `n_vocab`:
    columns of the logits. `bounds`: those of a client's grammar. Returns None, and logs why, if that fails: then no
    request may have a grammar."""
    try:
        tokenizer = library.load_tokenizer(path, n_vocab, eos_ids)
        return Grammars(tokenizer, eos_ids, Trials(path, n_vocab, eos_ids, bounds))
    except Exception as e:
        logger.warning("structured output is not available: %s", str(e)[:300])
        return None


def _stand_back() -> None:
    """Let the calling thread, which compiles, compute only when those that serve leave it time."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _bytes_of(future: Future[CompiledGrammar | str]) -> int:
    if not future.done() or future.exception() is not None:
        return 0
    found = future.result()
    return len(found) if isinstance(found, str) else found.n_bytes


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        ("_before", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),  # hblkhd: blocks that have a mapping of their own
        ("_between", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t),  # uordblks: all others
        ("_after", ctypes.c_size_t * 2),
    )


def _heap() -> Any:
    """glibc's `mallinfo2`, or None: another C library."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Heap
    return function


_mallinfo2 = _heap()


def _used_bytes() -> int:
    """The memory in use now. Its growth while a grammar is compiled is what the grammar takes. A process's resident
    memory would not do: it does not grow where memory that was freed before is used again."""
    if _mallinfo2 is None:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    heap = _mallinfo2()
    return int(heap.used + heap.mapped)


def _invalid(error: str) -> InvalidRequest:
    return InvalidRequest(error, code="invalid_grammar")
