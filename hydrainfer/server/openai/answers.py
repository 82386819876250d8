"""Chat and text completions: from validated fields to a whole answer or a stream of events."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from hydrainfer.core import InvalidRequest, ModelNotFound
from hydrainfer.processor import ChatMessage, ChatOptions, parse_messages, parse_tools
from hydrainfer.server.door import Standing
from hydrainfer.server.http import unless_disconnected
from hydrainfer.server.live import EventStream, Intake, TokenStream
from hydrainfer.server.openai.fields import ChatFields, CommonFields, CompletionFields
from hydrainfer.server.openai.replies import ChatReply, CompletionReply, Reply
from hydrainfer.server.openai.tool_reply import ToolReply, sampling_for, tool_format

MakeReply = Callable[..., Reply]


class Shape(NamedTuple):
    """The formats of a protocol: the prefix of ids, and the reply classes for requests without and with tools.
    `with_tools` also gets the arguments `tools` and `how`."""

    prefix: str
    plain: MakeReply
    with_tools: MakeReply


CHAT = Shape("chatcmpl", ChatReply, ToolReply)
TEXT = Shape("cmpl", CompletionReply, CompletionReply)
FIRST_OUTPUT_S = 5.0
"""The headers of a stream wait this long for the first output, so that an early failure has its status code. Then they
are sent, so that a client in a long queue sees that its request is accepted."""
SETTLED_S = 1.0
"""An answer with `timings` waits this long for the engine to end a request that a stop string has stopped."""
_LOOK_S = 0.1
"""How often a stream with `progress` looks at what its request does."""


class Answers:
    """The answers to completion requests. Stateless. `names`: the names that clients may use for the model; the first
    is used if a request names none."""

    def __init__(self, intake: Intake, names: tuple[str, ...], wall_clock: Callable[[], float] = time.time) -> None:
        self.intake = intake
        self.names = names
        self.wall_clock = wall_clock
        self._random = random.Random()  # good enough for ids; `os.urandom` would release the GIL

    def check_model(self, name: str | None) -> str:
        """The model name for the answer: `name`, or the first one if it is None. Raises `ModelNotFound`."""
        if name is not None and name not in self.names:
            raise ModelNotFound(
                f"The model {name[:100]!r} does not exist; this server has {', '.join(self.names)}", param="model"
            )
        return name if name is not None else self.names[0]

    def check_reasons(self, param: str) -> None:
        """Raises `InvalidRequest` if this model has no reasoning that is separated from its answers."""
        template = self.intake.processor.model.template
        if template is None or template.reasoning is None:
            message = f"this model does not reason; leave out {param}"
            raise InvalidRequest(message, param=param, code="unsupported_parameter")

    async def chat(self, request: Request, fields: ChatFields, shape: Shape = CHAT) -> Response:
        """The answer to a chat, of whatever protocol; `shape` has the format of the answer."""
        name = self.check_model(fields.model)
        fields.check_supported()
        if fields.reasoning_effort not in (None, "none"):
            self.check_reasons("reasoning_effort")
        sampling = fields.sampling(self.intake.processor.model.sampling_defaults)
        messages = parse_messages(fields.messages)
        tools = parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        kind = shape.plain
        if tools is not None:
            how = tool_format(self.intake.processor.model)
            sampling = sampling_for(sampling, tools, how)
            kind = partial(shape.with_tools, tools=tools, how=how)
        standing = Standing.of(request.scope)
        work = self.intake.chat(
            messages,
            sampling,
            id=self._name(shape.prefix),
            options=ChatOptions(tools, fields.template_variables, fields.mm_processor_kwargs),
            place=standing.place,
            urgency=standing.urgency(fields.priority, fields.deadline_s),
            salt=standing.salt(fields.cache_salt),
        )
        return await self._answer(request, fields, name, kind, work)

    async def complete(self, request: Request, fields: CompletionFields, shape: Shape = TEXT) -> Response:
        name = self.check_model(fields.model)
        fields.check_supported()
        sampling = fields.sampling(self.intake.processor.model.sampling_defaults)
        standing = Standing.of(request.scope)
        work = self.intake.complete(
            fields.prompt,
            sampling,
            id=self._name(shape.prefix),
            add_special=fields.add_special_tokens,
            place=standing.place,
            urgency=standing.urgency(fields.priority, fields.deadline_s),
            salt=standing.salt(fields.cache_salt),
        )
        return await self._answer(request, fields, name, shape.plain, work)

    async def encode_chat(
        self, request: Request, messages: Sequence[ChatMessage], options: ChatOptions, salt: str | None = None
    ) -> list[int]:
        """The prompt ids of a chat. `salt`: the request's own. Raises as `Intake.encode_chat`, and
        `ClientDisconnect`."""
        work = self.intake.encode_chat(messages, options, Standing.of(request.scope).salt(salt))
        return await unless_disconnected(work, request.receive, lambda _: None)

    def _name(self, kind: str) -> str:
        return f"{kind}-{self._random.getrandbits(128):032x}"

    async def _answer(
        self, request: Request, fields: CommonFields, name: str, kind: MakeReply, start: Awaitable[TokenStream]
    ) -> Response:
        created = int(self.wall_clock())

        def reply_to(stream: TokenStream) -> Reply:
            return kind(stream, fields, name, created, self.intake.processor.model.vocabulary)

        start = _traced(start, request.headers.get("traceparent", ""))
        if fields.stream:
            begun = start if fields.progress else _begun(start)
            stream = await unless_disconnected(begun, request.receive, TokenStream.close)
            headers = {"X-Request-Id": stream.prepared.id}
            reply = reply_to(stream)
            return EventStream(_events(stream, reply), stream.close, headers, reply.media_type, reply.error)
        whole = _whole(start, reply_to)
        id, body = await unless_disconnected(whole, request.receive, lambda _: None)
        return Response(body, headers={"X-Request-Id": id}, media_type="application/json")


async def _traced(start: Awaitable[TokenStream], parent: str) -> TokenStream:
    stream = await start
    stream.trace_parent = parent
    return stream


async def _begun(start: Awaitable[TokenStream]) -> TokenStream:
    stream = await start
    try:
        await stream.ready(FIRST_OUTPUT_S)
    except BaseException:
        stream.close()
        raise
    return stream


async def _whole(start: Awaitable[TokenStream], reply_to: Callable[[TokenStream], Reply]) -> tuple[str, bytes]:
    stream = await start
    done = await stream.result()
    reply = reply_to(stream)
    if reply.timings:
        await stream.settled(SETTLED_S)
    return stream.prepared.id, reply.body(done, stream.timelines)


async def _events(stream: TokenStream, reply: Reply) -> AsyncGenerator[bytes, None]:
    opening = reply.opening()
    if opening:
        yield opening
    if reply.progress:
        async for interval in stream.intervals(_LOOK_S):
            yield reply.doing(interval)
    async for deltas in stream:
        body = reply.events(deltas, stream.n_tokens)
        if body:
            yield body
    if reply.timings and reply.include_usage:
        await stream.settled(SETTLED_S)
    yield reply.closing(stream.n_tokens, stream.timelines)
