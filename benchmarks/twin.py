"""A simulated twin of a server: its instances from the server's options, its requests from what a client sent."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from hydrainfer.assemble.instances import own_options
from hydrainfer.assemble.media import media_limits
from hydrainfer.assemble.sizes import budgets_of, cache_sizes, dtype_of, overlap_of, torch_device
from hydrainfer.cache import CacheSpec
from hydrainfer.config import ServeConfig, read_layout
from hydrainfer.core import CostModel, Request, Role, SamplingParams, Stage
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs, fingerprint
from hydrainfer.planner.nouns import Link
from hydrainfer.planner.search import mean_interval_s
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator
from hydrainfer.processor import PixelStore, Processor, RequestTerms, load_description, parse_messages
from hydrainfer.scheduler import Policy
from hydrainfer.workload.client import RequestRecord
from hydrainfer.workload.sources import BodyOptions, ChatRequest

_PIXELS = 1 << 30


class Sent(NamedTuple):
    """A load that a client has sent. `label`: of the load; `begin_s`: by the client's clock."""

    label: str
    begin_s: float
    chats: Sequence[ChatRequest]
    records: Sequence[RequestRecord]


class Times(msgspec.Struct, frozen=True):
    """Seconds of one request."""

    ttft_s: float
    tpot_s: float | None


class Beside(msgspec.Struct, frozen=True):
    """What a server takes beside batches, measured with one request at a time: `turn_s` for every batch (to notice its
    end, to pack and launch the next one), `front_s` for a request until its first token is read (HTTP, the picture,
    messages to and from the client): all that was seen, of which each request is given one, drawn with a seed."""

    turn_s: float = 0.0
    front_s: tuple[float, ...] = (0.0,)


class Twin:
    """`options`: of `hydrainfer serve`, cache sizes among them."""

    def __init__(self, options: dict[str, Any], cost: CostModel, link: Link) -> None:
        self._config = config = ServeConfig(**options)
        self._cost, self._link = cost, link
        path = Path(config.model).expanduser()
        self._model, device = read_config(path), torch_device(config)
        self._dtype = dtype_of(config, device, self._model.dtype)
        self._pixels, self._device = PixelStore(_PIXELS, 0), device
        self._made: dict[str, list[Request]] = {}
        self._processor = Processor(
            load_description(path),
            self._pixels,
            weights=fingerprint(path),
            dtype=self._dtype,
            limits=media_limits(config),
        )

    @property
    def kv_spec(self) -> CacheSpec:
        specs = cache_specs(self._model, Role.parse("PD"), self._dtype, self._config.block_tokens)
        return next(s for s in specs if Stage.DECODE in s.stages)

    def served(self, loads: Iterable[Sent], beside: Beside) -> dict[str, list[Times]]:
        """The simulated times of these loads, sent to one server one after the other; by label, in their order."""
        requests = {load.label: self._made.get(load.label) or self._requests(load) for load in loads}
        self._made.update(requests)
        simulator = Simulator(self._instances(beside.turn_s), self._link, balancing=self._config.balancing)
        simulator.run([r for some in requests.values() for r in some])
        front = random.Random(0)
        return {
            label: [_times(simulator.served[r.id], front.choice(beside.front_s)) for r in some]
            for label, some in requests.items()
        }

    def beside(self, idle: Sent) -> Beside:
        """From requests that were sent one at a time: what batches do not explain."""
        seen = [times_of(r) for r in idle.records]
        turns_s = _gaps([t.tpot_s for t in seen], [t.tpot_s for t in self.served([idle], Beside())[idle.label]])
        turn_s = max(0.0, statistics.median(turns_s))
        with_turns = self.served([idle], Beside(turn_s))[idle.label]
        return Beside(turn_s, tuple(_gaps([t.ttft_s for t in seen], [t.ttft_s for t in with_turns])))

    def _requests(self, load: Sent) -> list[Request]:
        """As the server's own processor makes them. They arrive when they were sent: what passes before an instance
        hears of them is part of `Beside.front_s`."""
        found: list[Request] = []
        for chat, record in zip(load.chats, load.records, strict=True):
            messages = parse_messages(orjson.loads(BodyOptions().body(chat, ""))["messages"])
            sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=chat.max_tokens)
            timing = RequestTerms(load.begin_s + record.sent_s)
            prepared = self._processor.chat(f"{load.label}/{record.index}", messages, sampling, timing)
            for ref in prepared.pixels:
                self._pixels.release(ref)
            found += prepared.requests
        return found

    def _instances(self, turn_s: float) -> list[InstanceModel]:
        config, cost = self._config, self._cost
        overlap = overlap_of(config, self._device)
        budgets = budgets_of(config, overlap)
        policy = Policy(
            order=config.order,
            encode_gate=config.encode_gate,
            encode_wait_s=config.encode_wait_s,
            headroom_tokens=config.headroom_tokens,
        )
        n_context = self._processor.model.n_context
        return [
            InstanceModel(
                name=spec.name,
                role=spec.role,
                cost=msgspec.structs.replace(
                    cost, step_base_s=cost.step_base_s + turn_s, encode_base_s=cost.encode_base_s + turn_s
                ),
                **cache_sizes(
                    own_options(config, spec), self._model, spec.role, self._dtype, self._device, n_context, 1.0
                )._asdict(),
                budgets=budgets,
                policy=policy,
                overlap=overlap,
            )
            for spec in read_layout(config.layout)
        ]


def times_of(record: RequestRecord) -> Times:
    """The times as the client saw them."""
    assert record.ttft_s is not None, f"request {record.index} has no first token: {record.failure}"
    return Times(record.ttft_s, record.tpot_s)


def _times(served: ServedRequest, front_s: float) -> Times:
    return Times(served.token_s[0] - served.arrival_s + front_s, mean_interval_s(served))


def _gaps(seen: Sequence[float | None], explained: Sequence[float | None]) -> list[float]:
    """The seconds that are not explained, request by request."""
    return [a - b for a, b in zip(seen, explained, strict=True) if a is not None and b is not None]
