"""An engine without a model: says what its script says, one token per request and step, on its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from hydrainfer.core import (
    ErrorInfo,
    EventKind,
    HydraError,
    InstanceInfo,
    InstanceStats,
    LifecycleEvent,
    Output,
    Request,
    TokenLogprobs,
)
from tests.waiting import PATIENCE_S

Script = Callable[[Request], list[int]]


class FakeEngine:
    """An `EngineHandle`. `script` gives a request's tokens; when they run out it goes on with `filler`. `fail` maps a
    request to an error instead: an `ErrorInfo` that it ends with, a `HydraError` that `submit` raises. `hold` freezes
    it: nothing is produced or ended while it is set. `infos`: what `instances` says instead of the truth. `record` gets
    the events of a request that prefills and decodes. `live`: requests with their tokens and how many are out; `ended`:
    outputs not yet handed out."""

    def __init__(
        self,
        sink,
        script: Script,
        *,
        step_s=0.0,
        filler=263,
        fail=None,
        pixels=None,
        tokens_per_step=1,
        record=lambda _: None,
    ):
        self._sink, self._script, self.step_s, self._filler = sink, script, step_s, filler
        self._fail = fail or (lambda request: None)
        self._pixels = pixels
        self._tokens_per_step = tokens_per_step
        self._record = record
        self.infos: list[InstanceInfo] | None = None
        self.live: dict[str, tuple[Request, list[int], int]] = {}
        self.ended: list[Output] = []
        self._lock = threading.Condition()
        self._closing = False
        self.hold = threading.Event()
        self.stalled_s = 0.0
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.n_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def forget_cached(self) -> Future:
        answer = Future()
        answer.set_result({"EPD0": {"kv": 3, "embed": 1}, "D0": {"kv": 2}})
        return answer

    def submit(self, request: Request) -> None:
        with self._lock:
            self.submitted.append(request)
            error = self._fail(request)
            if isinstance(error, HydraError):
                raise error
            if isinstance(error, ErrorInfo):
                self.ended.append(Output(request.id, finish_reason="error", error=error))
            else:
                for span in request.media:
                    if self._pixels is not None:
                        assert self._pixels(span.pixels).dtype == "uint8"
                self.live[request.id] = (request, list(self._script(request)), 0)
                self._event(request.id, EventKind.ARRIVED)
                self._event(request.id, EventKind.QUEUED, "prefill")
            self._lock.notify()

    def cancel(self, request_ids: list[str]) -> None:
        with self._lock:
            self.cancelled += request_ids
            for i in request_ids:
                if self.live.pop(i, None):
                    self._event(i, EventKind.FINISHED, detail="abort")
                    self.ended.append(Output(i, finish_reason="abort"))
            self._lock.notify()

    def stats(self) -> InstanceStats:
        n = len(self.live)
        return InstanceStats("EPD", 0, n, 0, 0, n, {}, 0, 0, 0, self.n_steps, self.stalled_s)

    def instances(self) -> list[InstanceInfo]:
        if self.infos is not None:
            return self.infos
        return [InstanceInfo("EPD0", "EPD", "alive", pid=1, stats=self.stats())]

    def _event(self, request_id: str, kind: EventKind, stage: str = "", detail: str = "") -> None:
        self._record(LifecycleEvent(request_id, kind, time.monotonic(), stage, detail))

    def close(self) -> None:
        with self._lock:
            for i in list(self.live):
                self.live.pop(i)
                self.ended.append(Output(i, finish_reason="abort"))
            self._closing = True
            self._lock.notify()
        self._thread.join(PATIENCE_S)

    @property
    def n_live(self) -> int:
        return len(self.live)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self.live or self.ended or self._closing):
                    self._lock.wait()
                outputs, self.ended = self.ended, []
                if not self.hold.is_set():
                    outputs += [self._step(i) for i in list(self.live)]
                self.n_steps += 1
                done = self._closing and not self.live
            if outputs:
                self._sink(outputs)
            if done:
                return
            time.sleep(self.step_s or 0.0002)

    def _step(self, request_id: str) -> Output:
        request, tokens, n = self.live[request_id]
        if n == 0:
            self._event(request_id, EventKind.STARTED, "prefill")
        new, finish, stop_token = [], None, None
        for _ in range(self._tokens_per_step):
            token = tokens[n] if n < len(tokens) else self._filler
            new.append(token)
            self._event(request_id, EventKind.TOKEN)
            if n == 0:
                self._event(request_id, EventKind.STARTED, "decode")
            n += 1
            sampling = request.sampling
            if token in sampling.stop_token_ids or (token in request.eos_ids and not sampling.ignore_eos):
                finish, stop_token = "stop", token
            elif n >= request.max_tokens:
                finish = "length"
            if finish:
                break
        k = request.sampling.logprobs
        logprobs = ()
        if k is not None:
            logprobs = tuple(TokenLogprobs(-0.5, 1, tuple((t + j, -0.5 - j) for j in range(k))) for t in new)
        k, prompt = request.sampling.prompt_logprobs, ()
        if k is not None and n == len(new):
            prompt = tuple(
                TokenLogprobs(-0.25, 1, tuple((t + j, -0.25 - j) for j in range(k))) for t in request.prompt_ids[1:]
            )
        if finish:
            del self.live[request_id]
            self._event(request_id, EventKind.FINISHED, detail=finish)
        else:
            self.live[request_id] = (request, tokens, n)
        return Output(request_id, tuple(new), logprobs, prompt, finish, stop_token)
