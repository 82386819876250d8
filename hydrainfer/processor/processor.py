"""The preparation of chats and texts as requests for an engine. Synchronous and thread-safe, meant for a pool of
threads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hydrainfer.core import (
    Grammar,
    InvalidRequest,
    MediaSpan,
    Reasoning,
    Request,
    SamplingParams,
    Share,
    chain_of,
    chain_root,
)
from hydrainfer.core.request import ANYBODY, MAX_CHOICES
from hydrainfer.grammar import Grammars
from hydrainfer.processor.messages import ChatMessage, ImagePart, TextPart, Tools, VideoPart, VideoReading, is_id
from hydrainfer.processor.pictures import MediaLimits, PixelStore
from hydrainfer.processor.text import (
    HARMONY,
    ModelDescription,
    Thinking,
    check_ids,
    check_known,
    check_length,
    check_text,
    encode,
    encode_rendered,
    expand,
    harmony_grammar,
    in_order,
    predicted,
    resolve_max_tokens,
    spellings,
)
from hydrainfer.processor.workers import Adapters, JobTicket, MediaWorkers, Preprocessor, Seal


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The arrival and deadline of a request, in seconds of the engine's clock, its priority and its tenant. `salt`: KV
    and embeddings are shared only among requests with the same salt."""

    arrival_s: float | None = None
    deadline_s: float = float("inf")
    priority: int = 0
    share: Share = ANYBODY
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat. `tools`: functions shown to the model. `variables`: values of the template's own variables
    (`chat_template_kwargs`). `media`: how pictures and videos are prepared (`mm_processor_kwargs`)."""

    tools: Tools | None = None
    variables: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None


_TERMS, _OPTIONS = RequestTerms(), ChatOptions()


@dataclass(frozen=True, slots=True)
class Prepared:
    """One API request ready to run: `requests[p * n + c]` is choice c of prompt p. It holds one share of every picture
    in `pixels`; its owner must release each share exactly once. `continues`: the answer is a continuation of the
    prompt's text. `thinking`: how an answer may reason first, None if it does not."""

    id: str
    requests: tuple[Request, ...]
    pixels: tuple[str, ...] = ()
    continues: bool = False
    thinking: Thinking | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.requests[0].sampling

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(r.prompt_ids for r in self.requests[:: self.sampling.n])

    @property
    def n_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Processor:
    """The preparation of chats and texts as requests. It owns only its media workers and its grammar compiler; the
    model's description, the limits and the picture store are references.

    `weights`: the model's fingerprint; `dtype`: that of embeddings and KV. Both are part of the keys of both.
    `block_tokens`: tokens per key of a prompt's chain, by which KV is shared; 0 means that no KV is shared.
    """

    def __init__(
        self,
        model: ModelDescription,
        pixels: PixelStore,
        *,
        weights: bytes,
        dtype: str,
        limits: MediaLimits | None = None,
        videos: VideoReading | None = None,
        workers: MediaWorkers | None = None,
        grammars: Grammars | None = None,
        block_tokens: int = 16,
    ) -> None:
        """`workers` decode pictures and videos until `close`; without them the calling thread does. `grammars`:
        compiles the grammars of requests until `close`; without it no request may have one."""
        self.grammars = grammars
        self.model = model
        self.pixels = pixels
        self.limits = limits or MediaLimits()
        self._block_tokens, self._keyed_by = block_tokens, (weights, dtype.encode())
        self.media = Preprocessor(pixels, self.limits, videos or VideoReading(), Seal(weights, dtype), workers)

    def chat(
        self,
        id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        terms: RequestTerms = _TERMS,
        options: ChatOptions = _OPTIONS,
        ticket: JobTicket | None = None,
        prompt: str | Sequence[int] | None = None,
    ) -> Prepared:
        """Prepare a chat. `ticket`: lets another thread cancel the preparation. `prompt`: replaces the text that the
        template would make of the messages; it has a placeholder for each of their pictures and videos. Raises
        `InvalidRequest` or what `Preprocessor.prepare` raises; after an error no picture is held."""
        parts = [part for m in messages for part in m.media]
        thinking: Thinking | None = None
        param: Literal["messages", "prompt"] = "messages" if prompt is None else "prompt"
        if prompt is None:
            text, adapters = self._read_chat(messages, options)
            ids = encode_rendered(text, self.model)
            thinking = self._thinking(text)
            sampling = self._beside(thinking, sampling, options.tools)
        else:
            self.check_pictures(messages)
            ids, adapters = self._read_prompt(prompt), self._adapters(options.media)
            parts = in_order(ids, parts, adapters.token_id, self.model)
        self.check_grammar(sampling.grammar)
        held = self.media.prepare(parts, adapters, ticket, terms.salt)
        found = [h._replace(key=_salted(h.key, terms.salt)) for of_part in held for h in of_part]
        refs = tuple(h.ref for h in found)
        try:
            items = [[h.item for h in of_part] for of_part in held]
            expanded = expand(ids, items, self.model, [adapters.token_id(part) for part in parts])
            media = tuple(
                MediaSpan(start, item.n_tokens, key, ref, item.grid, item.times, item.joined, item.whole, gaps)
                for start, gaps, (item, key, ref) in zip(expanded.starts, expanded.gaps, found, strict=True)
            )
            return self._finish(id, [expanded.ids], sampling, terms, param, media, refs, thinking)
        except BaseException:
            for ref in refs:
                self.pixels.release(ref)
            raise

    def complete(
        self,
        id: str,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling: SamplingParams,
        terms: RequestTerms = _TERMS,
        *,
        add_special: bool | None = None,
    ) -> Prepared:
        """Prepare a completion of a text, several texts, the token ids of one text, or those of several. Raises
        `InvalidRequest`."""
        self.check_grammar(sampling.grammar)
        token_lists: list[tuple[int, ...]] = []
        texts = _split(prompt)
        _check_choices(len(texts), sampling.n)  # before any work is done for the prompts
        for one in texts:
            if isinstance(one, str):
                token_lists.append(tuple(self.encode(one, add_special=add_special)))
            else:
                check_ids(one, self.model)
                token_lists.append(tuple(one))
        return self._finish(id, token_lists, sampling, terms, "prompt")

    def encode(self, text: str, *, add_special: bool | None = None) -> list[int]:
        """The token ids of a client's text. Raises `InvalidRequest` if it is too long or holds an image placeholder."""
        check_length(text, self.model, "prompt")
        check_text(text, self.model, "prompt")
        return encode(text, self.model, add_special=add_special)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions = _OPTIONS,
        ticket: JobTicket | None = None,
        salt: str = "",
    ) -> list[int]:
        """The prompt's token ids that `chat` would give these messages. No pictures are held afterwards. `ticket`,
        `salt` and errors are as in `chat`."""
        text, adapters = self._read_chat(messages, options)
        ids = encode_rendered(text, self.model)
        parts = [part for m in messages for part in m.media]
        items = self.media.items(parts, adapters, ticket, salt)
        return list(expand(ids, items, self.model, [adapters.token_id(part) for part in parts]).ids)

    def check_pictures(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether the messages have pictures or videos. Called before any is fetched. Raises `InvalidRequest` if there
        are too many, or if the model takes none."""
        n_media, n_images = sum(len(m.media) for m in messages), sum(len(m.images) for m in messages)
        n_videos, images = n_media - n_images, self.model.images
        if n_media and images is None:
            raise InvalidRequest("this model takes text only", param="messages")
        if n_videos and images is not None and images.video is None:
            raise InvalidRequest("this model takes no videos; send pictures (image_url)", param="messages")
        if n_videos > self.limits.max_videos:
            raise InvalidRequest(
                f"the request holds {n_videos} videos; at most {self.limits.max_videos} are allowed", param="messages"
            )
        if n_images > self.limits.max_images:
            raise InvalidRequest(
                f"the request holds {n_images} pictures; at most {self.limits.max_images} are allowed", param="messages"
            )
        return n_media > 0

    def decode(self, ids: object) -> str:
        """The text of these token ids, special tokens included. Raises `InvalidRequest` if `ids` is not a list of valid
        ids or is longer than the model's context."""
        n, most = self.model.vocabulary.n_tokens, self.model.n_context
        if not isinstance(ids, list) or len(ids) > most:
            raise InvalidRequest(f"tokens must be a list of at most {most} ids", param="tokens")
        if any(type(i) is not int or not 0 <= i < n for i in ids):
            raise InvalidRequest(f"tokens must be ids from 0 to {n - 1}", param="tokens")
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)

    def close(self) -> None:
        """End the media workers and the grammar compiler. Safe to repeat."""
        self.media.close()
        if self.grammars is not None:
            self.grammars.close()

    def grammars_of(self, sampling: SamplingParams, tools: Tools | None = None) -> tuple[Grammar, ...]:
        """The grammars that an answer may have to follow; which of them, the rendered prompt says. They have to pass
        `Grammars.check` before the request is prepared."""
        grammar, template = sampling.grammar, self.model.template
        if grammar is None or self.grammars is None:
            return ()
        reasoning = template.reasoning if template is not None else None
        if tools is None and reasoning is not None and reasoning.name == HARMONY:
            with suppress(InvalidRequest):  # in a form that cannot be wrapped; refused when it is prepared
                return harmony_grammar(grammar), grammar
        return (grammar,)

    def check_grammar(self, grammar: Grammar | None) -> None:
        """Compile the grammar, if there is one. Raises `InvalidRequest` if that cannot be done."""
        if grammar is None:
            return
        if self.grammars is None:
            raise InvalidRequest("this server has no structured output; its log says why", param="response_format")
        self.grammars.compiled(grammar)

    def _adapters(self, options: Mapping[str, Any] | None) -> Adapters:
        """The model's adapters with these options. Raises `InvalidRequest`."""
        images, options = self.model.images, options or {}
        if not isinstance(options, Mapping):
            raise InvalidRequest("mm_processor_kwargs must be names and values", param="mm_processor_kwargs")
        if images is None:
            if options:
                raise InvalidRequest("mm_processor_kwargs: this model takes text only", param="mm_processor_kwargs")
            return Adapters(None, None, {})
        ids: dict[type, int] = {ImagePart: images.token_id}
        if images.video is not None:
            ids[VideoPart] = images.video.token_id
        video = images.video.adapter.configured(options) if images.video else None
        return Adapters(images.adapter.configured(options), video, ids)

    def _read_chat(self, messages: Sequence[ChatMessage], options: ChatOptions) -> tuple[str, Adapters]:
        """The text of a chat, with one placeholder per picture or video, and the adapters that prepare these. No
        picture is decoded."""
        model, tools, variables = self.model, options.tools, options.variables
        if model.template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        self.check_pictures(messages)
        adapters = self._adapters(options.media)
        parts = [(i, part) for i, m in enumerate(messages) for part in m.parts]
        check_length("".join(p.text for _, p in parts if isinstance(p, TextPart)), model, "messages")
        for i, part in parts:
            if isinstance(part, TextPart):
                check_text(part.text, model, f"messages.{i}.content")
        for m in messages:
            names = (m.name, m.call_id, *(call.id for call in m.calls))
            for written in (m.reasoning, *names, *(_as_json(call.arguments, "messages") for call in m.calls)):
                if written is not None:
                    check_text(written, model, "messages")
        if tools is not None:
            check_text(_as_json(tools.given, "tools"), model, "tools")
        if variables:
            check_text(_as_json(variables, "chat_template_kwargs"), model, "chat_template_kwargs")
        text = model.template.render(messages, tools, variables)
        check_length(text, model, "messages")
        return text, adapters

    def _thinking(self, prompt: str) -> Thinking | None:
        """The way the answer to this prompt may reason; None if it does not."""
        template = self.model.template
        return Thinking.after(prompt, template.reasoning) if template is not None and template.reasoning else None

    def _beside(self, thinking: Thinking | None, sampling: SamplingParams, tools: Tools | None) -> SamplingParams:
        """The sampling parameters of an answer that may reason first. The marks around the reasoning are kept in the
        text, and a grammar applies only to what follows. Raises `InvalidRequest` if the tokens do not show where the
        reasoning ends."""
        if thinking is None:
            return sampling
        if thinking.how.name == HARMONY:  # its grammars cover the whole answer; those of calls do so already
            grammar = sampling.grammar and (harmony_grammar(sampling.grammar) if tools is None else sampling.grammar)
            return msgspec.structs.replace(sampling, skip_special_tokens=False, grammar=grammar)
        ids = [self.model.tokenizer.token_to_id(mark) for mark in (thinking.how.opening, thinking.how.closing)]
        if not self.model.vocabulary.special_ids.isdisjoint(ids):
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        if sampling.grammar is None or (None in ids and not thinking.begun):
            return sampling  # a grammar that applies from the start leaves no room to reason
        if None in ids:
            raise InvalidRequest(
                "this model reasons before it answers, and its tokenizer has no token that ends that; an answer has a "
                "form where chat_template_kwargs turn the reasoning off",
                param="response_format",
            )
        return msgspec.structs.replace(sampling, reasoning=Reasoning(ids[0], ids[1], thinking.begun))

    def _read_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, with its placeholders. Raises `InvalidRequest`."""
        if isinstance(prompt, str):
            check_length(prompt, self.model, "prompt")
            return encode(prompt, self.model)
        check_ids(prompt, self.model, with_media=True)
        return list(prompt)

    def _finish(
        self,
        id: str,
        token_lists: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        terms: RequestTerms,
        param: Literal["messages", "prompt"],
        media: tuple[MediaSpan, ...] = (),
        pixels: tuple[str, ...] = (),
        thinking: Thinking | None = None,
    ) -> Prepared:
        """The requests for these prompts. `param`: the field that the prompts come from, for error messages."""
        sampling = sampling.carried
        n_vocabulary, biased = self.model.vocabulary.n_tokens, [token for token, _ in sampling.logit_bias]
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biased)):
            if any(not 0 <= i < n_vocabulary for i in ids):
                raise InvalidRequest(f"{name} takes token ids from 0 to {n_vocabulary - 1}", param=name)
        for token_ids in token_lists:
            check_known(token_ids, self.model, param)
        predicted_ids = predicted(sampling.prediction, self.model)
        if sampling.prediction:
            sampling = msgspec.structs.replace(sampling, prediction="")
        if sampling.bad_words or sampling.bad_ids:
            bad_ids = spellings(sampling.bad_words, self.model)
            sampling = msgspec.structs.replace(sampling, bad_words=(), bad_ids=bad_ids)
        seeds = [secrets.randbits(63) if sampling.seed is None else sampling.seed for _ in token_lists]
        shares = self._block_tokens > 0 and sampling.prompt_logprobs is None  # cached KV has no log-probabilities
        chains = [self._chain(token_ids, media, terms.salt) if shares else b"" for token_ids in token_lists]
        requests = [
            Request(
                id=f"{id}-{p * sampling.n + choice}",
                prompt_ids=token_ids,
                sampling=sampling,
                max_tokens=resolve_max_tokens(len(token_ids), sampling.max_tokens, self.model, param),
                seed=seeds[p],
                choice=choice,
                media=media,
                eos_ids=self.model.eos_ids,
                arrival_s=terms.arrival_s,
                deadline_s=terms.deadline_s,
                keys=chains[p],
                priority=terms.priority,
                share=terms.share,
                predicted_ids=predicted_ids,
            )
            for p, token_ids in enumerate(token_lists)
            for choice in range(sampling.n)
        ]
        return Prepared(id, tuple(requests), pixels, param == "prompt", thinking)

    def _chain(self, ids: tuple[int, ...], media: tuple[MediaSpan, ...], salt: str) -> bytes:
        """The keys under which a prompt's KV can be found again."""
        root = chain_root(*self._keyed_by, salt.encode("utf-8", "surrogatepass"))
        return chain_of(root, ids, self._block_tokens, media)


def _as_json(value: object, param: str) -> str:
    """`value` as JSON, in which every character is itself. Raises `InvalidRequest` if it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{param}: a value is nested too deeply", param=param) from None


def _salted(key: bytes, salt: str) -> bytes:
    """The key of an embedding that is shared only among requests with the same salt."""
    return chain_root(key, salt.encode("utf-8", "surrogatepass")) if salt else key


def _check_choices(n_prompts: int, n: int) -> None:
    if n_prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must not exceed {MAX_CHOICES}", param="n")


def _split(prompt: object) -> list[str] | list[list[int]]:
    """The prompts of a completion, one entry each. Raises `InvalidRequest`."""
    if isinstance(prompt, str):
        return [prompt]
    items: list[Any] = list(prompt) if isinstance(prompt, Sequence) else []
    if items and all(isinstance(i, str) for i in items):
        return items
    if items and all(is_id(i) for i in items):
        return [items]
    if items and all(isinstance(i, Sequence) and i and all(is_id(t) for t in i) for i in items):
        return items
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        param="prompt",
    )
