"""The first requests to a server: its model names, which optional fields it accepts, and what runs there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec
import orjson

from hydrainfer.core import ConfigError
from hydrainfer.workload.client.client import ChatClient, Endpoint
from hydrainfer.workload.client.failures import Failure, FailureKind, RequestFailed
from hydrainfer.workload.sources import BodyOptions, ChatRequest

OPTIONAL = ("timings", "return_token_ids", "ignore_eos", "include_usage")
"""The options of a body that some servers refuse, the least needed first."""
_SENT_AS = {"include_usage": "stream_options"}  # options whose field has another name


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server runs and accepts. `version`: what `/version` says. `prefix_cache`: the server's own setting, "not
    said" if it does not tell. `instances`: roles of a HydraInfer deployment. `timings`: whether the server says where
    the time went. `refused`: those of `OPTIONAL` that it does not accept, which are left out; without `ignore_eos`,
    answers may end early."""

    url: str
    model: str
    version: str = ""
    prefix_cache: str = "not said"
    instances: tuple[str, ...] = ()
    timings: bool = False
    refused: tuple[str, ...] = ()


async def probe(
    target: Endpoint, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[Endpoint, BodyOptions, ServerFacts]:
    """The target with its model's name filled in, the body options that the server accepts, and its facts. Sends one
    request of two tokens, and more if fields are refused. Raises `ConfigError` that says what is wrong with the server
    or the address."""
    async with ChatClient(target, clock) as client:
        try:
            models = await client.models()
        except RequestFailed as e:
            raise _explained(target, e.failure) from None
        if target.model and target.model not in models:
            raise ConfigError(f"{target.base_url} has no model {target.model!r}; it has {', '.join(models)}")
        if not models:
            raise ConfigError(f"{target.base_url} serves no model")
        target = msgspec.structs.replace(target, model=target.model or models[0])
        options, refused, timings = await _accepted(client, target)
        facts = ServerFacts(
            url=target.base_url,
            model=target.model,
            version=_version(await client.page("/version")),
            prefix_cache=_prefix_cache(await client.page("/metrics"), await client.page("/get_server_info")),
            instances=_roles(await client.page("/v1/instances")),
            timings=timings,
            refused=refused,
        )
    return target, options, facts


async def _accepted(client: ChatClient, target: Endpoint) -> tuple[BodyOptions, tuple[str, ...], bool]:
    refused: tuple[str, ...] = ()
    while True:
        options = BodyOptions(timings=True)
        options = msgspec.structs.replace(options, **dict.fromkeys(refused, False))
        body = options.body(ChatRequest(text="Say hello.", max_tokens=2), target.model)
        record = await client.chat(body, index=0, n_asked=2, scheduled_s=0.0)
        if record.failure is None:
            if not record.chunk_s:
                raise ConfigError(
                    f"{target.base_url} answered without a single token; is {target.model!r} a chat model?"
                )
            told = bool(record.timings)
            return msgspec.structs.replace(options, timings=told), refused, told
        if record.failure.status not in (400, 422) or len(refused) == len(OPTIONAL):
            raise _explained(target, record.failure)
        # most servers name the refused field; otherwise leave out one more
        message = record.failure.message
        named = next((f for f in OPTIONAL if f not in refused and _SENT_AS.get(f, f) in message), None)
        refused += (named or next(f for f in OPTIONAL if f not in refused),)


def _explained(target: Endpoint, failure: Failure) -> ConfigError:
    url = target.base_url
    message = failure.message
    if failure.kind is FailureKind.CONNECTION:
        return ConfigError(f"no server at {url}: {message}; is it running, and is that its address?")
    if failure.status in (401, 403):
        return ConfigError(f"{url} wants a key ({message}); give --api-key")
    if failure.kind is FailureKind.TIMEOUT:
        return ConfigError(f"{url} takes connections but does not answer: {message}")
    return ConfigError(f"{url} does not answer as an OpenAI-style chat server: {message}")


def _version(page: str) -> str:
    try:
        return str(orjson.loads(page)["version"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _roles(page: str) -> tuple[str, ...]:
    try:
        return tuple(str(one["role"]) for one in orjson.loads(page)["data"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ()


def _prefix_cache(metrics: str, server_info: str) -> str:
    """Whether the server has a prefix cache, as it says. vLLM and HydraInfer say so in a metric's labels, SGLang on a
    page of its own."""
    caching = re.search(r'enable_prefix_caching="(\w+)"', metrics)
    if caching:
        return "on" if caching[1].lower() == "true" else "off"
    sglang = re.search(r'"disable_radix_cache":\s*(true|false)', server_info)
    if sglang:
        return "off" if sglang[1] == "true" else "on"
    return "not said"
