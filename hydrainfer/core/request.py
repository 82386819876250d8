"""A validated and tokenised request: immutable, torch-free, and sent between instances."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from hydrainfer.core.errors import InvalidRequest
from hydrainfer.core.stage import Stage

_LEAST_TOP_P = 1e-9
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 256
MAX_PRIORITY = 2
MAX_TOKEN_IDS = 1024  # of stop_token_ids and logit_bias, which are all examined for every token
MAX_GRAMMAR_CHARS = 1 << 16
MAX_COUNT = (1 << 63) - 1  # of top_k and min_tokens: larger numbers fit no message and no tensor

PixelSource = Callable[[str], Any]
"""Resolves `MediaSpan.pixels` to the picture's uint8 array, as its model adapter shaped it. Raises `KeyError`."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that a whole answer must have. By `kind`, `text` is a JSON schema, a regular expression, a grammar (Lark
    or GBNF), or a JSON list of the possible answers. Raises `InvalidRequest` if it is too long. Other errors are found
    when it is compiled."""

    kind: Literal["json", "regex", "lark", "choice"]
    text: str

    def __post_init__(self) -> None:
        n = len(self.text)
        _check(n <= MAX_GRAMMAR_CHARS, "grammar", f"takes at most {MAX_GRAMMAR_CHARS} characters", n)


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens around the reasoning before an answer. If the prompt has `begun` a reasoning, or the answer begins
    with token `opens`, the grammar applies only after token `closes`."""

    opens: int
    closes: int
    begun: bool = False


_NUMBER = (int, float)
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("n", "min_tokens", "top_k"), ((int,), "a whole number")),
    **dict.fromkeys(
        ("max_tokens", "seed", "logprobs", "prompt_logprobs"), ((int, type(None)), "a whole number or None")
    ),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (_NUMBER, "a number")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), (_NUMBER, "a number")),
}
"""The types of the numbers among the fields of `SamplingParams`, and their names in messages."""
_FLAGS = {"include_stop_str_in_output": False, "ignore_eos": False, "skip_special_tokens": True, "drafts": True}
"""The flags among them, and what None means."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way tokens are sampled and a choice ends. Field names and defaults are vLLM's, except for `grammar` and what
    the processor sets: the `reasoning` of a grammar, and `bad_ids`, the token ids of the `bad_words`.

    `max_tokens=None` means: up to the context length. `seed=None` is replaced by a random seed when the request is
    made, so that a recomputed request draws the same numbers. `logprobs=k` asks for the chosen token's log-probability
    and the k most likely tokens; `prompt_logprobs=k` asks for the same of the prompt's tokens, which are then all
    computed, cached or not. `drafts=False`: none of its tokens is drafted, which changes none of them. `prediction`:
    the text that the answer may turn out to be, which makes it faster where it is right. `bad_words`: an answer does
    not hold these, as they are written in the middle of a text or at its beginning; the same letters cut into other
    tokens may come. `stop` may be one string, and `logit_bias` a dict of biases by token id. The fields hold plain
    values, which every message can carry. Raises `InvalidRequest` naming the field."""

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    drafts: bool = True
    prediction: str = ""
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):  # as in OpenAI's API, one string is a list of one
                msgspec.structs.force_setattr(self, name, (getattr(self, name),))
        if isinstance(self.logit_bias, Mapping):
            msgspec.structs.force_setattr(self, "logit_bias", tuple(self.logit_bias.items()))
        self._check_kinds()
        _check(1 <= self.n <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}", self.n)
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "must not be negative", self.min_tokens)
        for name in ("min_tokens", "top_k"):
            _check(getattr(self, name) <= MAX_COUNT, name, f"must not exceed {MAX_COUNT}", getattr(self, name))
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must not exceed max_tokens ({self.max_tokens})",
            self.min_tokens,
        )
        _check(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2", self.temperature)
        _check(0.0 <= self.top_p <= 1.0, "top_p", "must be between 0 and 1", self.top_p)
        if not self.top_p:  # OpenAI's least value, which leaves the likeliest token
            msgspec.structs.force_setattr(self, "top_p", _LEAST_TOP_P)
        _check(self.top_k >= -1, "top_k", "must be -1 or 0 (off) or at least 1", self.top_k)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1", self.min_p)
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be in [-2, 2]", self.presence_penalty)
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be in [-2, 2]", self.frequency_penalty)
        _check(
            0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "must be in (0, 10]", self.repetition_penalty
        )
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            _check(k is None or 0 <= k <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}", k)
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits", self.seed)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _check(all(self.stop), "stop", "must not hold an empty string", list(self.stop))
        n = len(self.bad_words)
        _check(n <= MAX_BAD_WORDS, "bad_words", f"takes at most {MAX_BAD_WORDS} words", n)
        _check(all(map(str.strip, self.bad_words)), "bad_words", "must not hold an empty word", list(self.bad_words))
        for name in ("stop_token_ids", "logit_bias"):
            n = len(getattr(self, name))
            _check(n <= MAX_TOKEN_IDS, name, f"takes at most {MAX_TOKEN_IDS} entries", n)
        for token, bias in self.logit_bias:
            _check(-100.0 <= bias <= 100.0, "logit_bias", "values must be in [-100, 100]", bias)
            _check(token >= 0, "logit_bias", "keys must be token ids", token)

    def _check_kinds(self) -> None:
        """Make tuples of other sequences and plain values of others, and check the types. Raises `InvalidRequest`."""
        for name, (kinds, said) in _KINDS.items():
            value = getattr(self, name)
            _check(isinstance(value, kinds), name, f"must be {said}", repr(value))
            msgspec.structs.force_setattr(self, name, _plain(value))
        for name, default in _FLAGS.items():
            value = getattr(self, name)
            if value is None:
                value = default
            _check(value in (False, True), name, "must be True or False", repr(value))
            msgspec.structs.force_setattr(self, name, bool(value))
        for name in ("stop", "stop_token_ids", "logit_bias", "bad_words"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                _check(value is None or isinstance(value, Sequence), name, "must be a list", repr(value))
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        _check(isinstance(self.prediction, str), "prediction", "must be a text", repr(self.prediction))
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _check(isinstance(text, str), name, "must hold strings", repr(text))
                _check(not _SURROGATE.search(text), name, "must not hold half a surrogate pair", repr(text))
        for token in self.stop_token_ids:
            _check(isinstance(token, int), "stop_token_ids", "must hold token ids", repr(token))
        for pair in self.logit_bias:
            ok = isinstance(pair, Sequence) and len(pair) == 2
            ok = ok and isinstance(pair[0], int) and isinstance(pair[1], _NUMBER)
            _check(ok, "logit_bias", "must map token ids to numbers", repr(pair))
        biases = tuple((_plain(token), _plain(bias)) for token, bias in self.logit_bias)
        msgspec.structs.force_setattr(self, "logit_bias", biases)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(map(_plain, self.stop_token_ids)))

    @property
    def carried(self) -> SamplingParams:
        """The parameters as requests carry them: of a class with more fields, these alone."""
        if type(self) is SamplingParams:
            return self
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.__struct_fields__})

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


def _plain(value: Any) -> Any:
    """The same number as an int or a float; True, or numpy's kind of float, is none of these. None stays None."""
    if value is None or type(value) in _NUMBER:
        return value
    return float(value) if isinstance(value, float) else int(value)


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} {rule}, not {value}", param=param)


class MediaSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One picture, or the frames of a video that are encoded together.

    `start`: its first placeholder in the prompt. `n_tokens`: the number of its placeholders, which is that of the rows
    of its embedding. `key`: the content key of its embedding. `pixels`: a reference to its array, which travels outside
    the message. `grid`: what the vision tower needs besides the pixels: for models with multimodal rotary positions
    (frames, rows, columns) of its tokens; for LLaVA-NeXT (rows of tiles, rows of patches, columns of patches), both
    without padding, and for frames of LLaVA-OneVision's videos (0, 0, newlines behind it). `times`: the positions of
    its frames in time, () for 0, 1, ...; `joined`: it continues the span before it, so that its positions count from
    the same origin. `whole`: its tokens see each other in both directions, so that one chunk must have all of them.
    `gaps`: the other tokens between its placeholders, () for none, as pairs (row, n): before the placeholder of this
    row, the span has `n` other tokens in all. A span begins and ends with a placeholder, so 0 < row < `n_tokens`, and
    both numbers ascend.

        start=5, n_tokens=5, gaps=((2, 1), (4, 3)), end=13     position  5  6  7  8  9 10 11 12
                                                                    row  0  1  -  2  3  -  -  4
    """

    start: int
    n_tokens: int
    key: bytes
    pixels: str
    grid: tuple[int, int, int] | None = None
    times: tuple[int, ...] = ()
    joined: bool = False
    whole: bool = False
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        if self.gaps:
            return self.start + self.n_tokens + self.gaps[-1][1]
        return self.start + self.n_tokens

    def rows_before(self, position: int) -> int:
        """The number of its placeholders before this position in the prompt."""
        n_before = max(0, position - self.start)
        if self.gaps:
            passed = bisect_right(self.gaps, n_before, key=sum)  # a gap ends at offset row + n
            if passed < len(self.gaps):
                n_most = self.gaps[passed][0]
            else:
                n_most = self.n_tokens
            n_others = self.gaps[passed - 1][1] if passed else 0
            return min(n_before - n_others, n_most)
        return min(n_before, self.n_tokens)


class Share(NamedTuple):
    """The tenant of a request, and its weight relative to others. "" stands for all requests without a tenant."""

    tenant: str = ""
    weight: float = 1.0


ANYBODY = Share()


_PLANS = {
    (pictured, decodes): (*(Stage.ENCODE,) * pictured, Stage.PREFILL, *(Stage.DECODE,) * decodes)
    for pictured in (False, True)
    for decodes in (False, True)
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one API request, ready to run on any instance.

    `max_tokens` is resolved (never None). `eos_ids` end the choice; with `sampling.ignore_eos` only if a
    grammar allows nothing else. Times are in seconds of the engine's clock. `arrival_s`: None means the time at which
    it reaches the engine. `deadline_s` travels with the request to every instance. `priority`: by how many levels it
    goes before others (or, if negative, after them), within the scheduler's bounds. `share`: its tenant, among which
    the scheduler divides an instance. `keys`: the chain of its prompt's keys (`core.chain`), by which KV is shared;
    empty if it shares none. `predicted_ids`: the tokens of `sampling.prediction`, whose text does not travel.
    `prefill_cluster`: the cluster whose instances are to prefill it, if one of them lives; "" if any may.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    choice: int = 0
    media: tuple[MediaSpan, ...] = ()
    eos_ids: tuple[int, ...] = ()
    arrival_s: float | None = None
    deadline_s: float = float("inf")
    priority: int = 0
    share: Share = ANYBODY
    keys: bytes = b""
    predicted_ids: tuple[int, ...] = ()
    prefill_cluster: str = ""

    @property
    def n_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that may end the choice."""
        if self.sampling.ignore_eos and self.sampling.grammar is None:
            return self.sampling.stop_token_ids
        return self.sampling.stop_token_ids + self.eos_ids

    def ends_to_avoid(self, n_produced: int) -> tuple[int, ...]:
        """Those of `ends` that may not follow `n_produced` tokens. Only a grammar that allows nothing else brings one,
        and then one of `eos_ids` ends the choice, because the grammar is finished."""
        if n_produced < self.sampling.min_tokens:
            return self.ends
        if self.sampling.ignore_eos and self.sampling.grammar is not None:
            return tuple(token for token in self.eos_ids if token not in self.sampling.stop_token_ids)
        return ()

    def plan(self) -> tuple[Stage, ...]:
        """The stages that this request visits, in order. Decode is one repeated step."""
        return _PLANS[bool(self.media), self.max_tokens > 1]
