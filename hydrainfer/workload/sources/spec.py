"""A workload, as a file of configs/workloads describes it, and its requests."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.workload.sources.chat import ChatRequest
from hydrainfer.workload.sources.conversations import CONVERSATIONS, TOKENS_PER_WORD
from hydrainfer.workload.sources.dialogues import Dialogues
from hydrainfer.workload.sources.pictures import FilePicture
from hydrainfer.workload.sources.questions import READERS, Question
from hydrainfer.workload.sources.recorded import read_recording, replayed
from hydrainfer.workload.sources.spread import Spread
from hydrainfer.workload.sources.synthetic import Passage, SizeWeight, Texts, chats_of_arrivals, synthetic_chats
from hydrainfer.workload.sources.traces import TRACES, read_arrivals

SOURCES = ("synthetic", *READERS, *CONVERSATIONS, *TRACES, "recording")
DEFAULT = "default"


class TooFewRequests(ConfigError):
    """The data of a workload have `n_there` requests, fewer than are needed."""

    def __init__(self, message: str, n_there: int) -> None:
        super().__init__(message, param="requests")
        self.n_there = n_there


_MAX_TOKENS = 512


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload. `dataset`: its name in SLO presets. `reader`: how the file at `path` is read (one of `SOURCES`).
    Without a `path`, requests are drawn from `questions` (templates), `words` and `picture_sizes`. `prompt_tokens`:
    lengths of drawn texts in tokens, in place of questions and words. `output_tokens`: lengths of answers, by model.
    `distinct`: no picture is used twice. `dialogues`: the conversations that drawn requests belong to; by default each
    request stands alone. `notes`: what was assumed, and why."""

    dataset: str
    reader: str = "synthetic"
    path: str | None = None
    pictures: str | None = None
    instruction: str = ""
    questions: tuple[str, ...] = ("Tell me about {words}.",)
    words: str | float = 3
    prompt_tokens: str | float | None = None
    n_pictures: int = 1
    picture_sizes: tuple[SizeWeight, ...] = ((640, 480, 1.0),)
    max_side_px: int | None = None
    output_tokens: dict[str, str | float] = msgspec.field(default_factory=lambda: {DEFAULT: 32})
    max_tokens: int = _MAX_TOKENS
    distinct: bool = True
    dialogues: Dialogues = Dialogues()
    notes: str = ""

    def __post_init__(self) -> None:
        if self.reader not in SOURCES:
            raise ConfigError(f"{self.dataset}: no reader {self.reader!r}; there are {', '.join(SOURCES)}")
        if DEFAULT not in self.output_tokens or self.max_tokens < 1 or self.n_pictures < 0:
            raise ConfigError(
                f"{self.dataset}: needs max_tokens >= 1, n_pictures >= 0 and output_tokens with a default, such as "
                "{default: 600}"
            )
        if self.reader == "synthetic" and self.max_tokens != _MAX_TOKENS:
            raise ConfigError(
                f"{self.dataset}: max_tokens limits recorded answers, drawn ones have output_tokens: {{default: "
                f"{self.max_tokens}}}"
            )
        if not self.questions or not self.picture_sizes or any(min(size) <= 0 for size in self.picture_sizes):
            raise ConfigError(f"{self.dataset}: needs questions, and picture sizes of width, height and weight")
        d = self.dialogues
        prompts = self.words if self.prompt_tokens is None else self.prompt_tokens
        for spread in (prompts, d.turns, d.apart_s, d.system_words, *self.output_tokens.values()):
            Spread.parse(spread)
        if min(d.apart, d.systems, d.picture_pool) < 0:
            raise ConfigError(f"{self.dataset}: apart, systems and picture_pool are numbers of 0 or more")

    @property
    def source(self) -> str:
        """Where the requests come from; one of `SOURCES`."""
        return self.reader if self.path is not None else "synthetic"

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose answer lengths the workload states."""
        return tuple(n for n in self.output_tokens if n != DEFAULT)

    def named_like(self, like: str) -> list[str]:
        """Those of `models` with which the name of the model `like` begins."""
        return [name for name in self.models if like.lower().startswith(name.lower())]

    def chats(self, n: int, seed: int, like: str | None = None) -> list[ChatRequest]:
        """`n` requests. The same seed gives the same requests; different seeds share no picture, as far as the data
        allow. `like`: the model whose answer lengths are used; the default lengths for a model unknown to the workload.
        Raises `ConfigError` if files are missing or of another format, `TooFewRequests` if there are fewer than `n`
        requests."""
        rng = random.Random(seed)
        if self.source == "synthetic":
            chats = synthetic_chats(
                n,
                seed=seed,
                texts=self._texts(rng, seed),
                sizes=self.picture_sizes,
                n_pictures=self.n_pictures,
                max_side_px=self.max_side_px,
                output_tokens=self.lengths(like),
                rng=rng,
                pool=self.dialogues.picture_pool,
            )
            if self.dialogues == Dialogues():
                return chats
            return list(self.dialogues.weave(chats, rng))
        if self.source == "recording":
            return _first(replayed(read_recording(Path(self.path or "").expanduser()).chats, seed), n, self)
        texts_ = self._read(rng, like)
        if self.source in TRACES:
            return _first(texts_, n, self)
        return _first(rng.sample(texts_, len(texts_)), n, self)

    @property
    def text_tokens(self) -> Spread | None:
        """The distribution of the prompts' lengths, if all that is drawn of them is a text of so many tokens."""
        alone = self.n_pictures == 0 and not self.instruction and self.dialogues == Dialogues()
        if self.source != "synthetic" or self.prompt_tokens is None or not alone:
            return None
        return Spread.parse(self.prompt_tokens)

    def _texts(self, rng: random.Random, seed: int) -> Texts:
        if self.prompt_tokens is None:
            return Texts(self.questions, Spread.parse(self.words), self.instruction, rng)
        n_words = Spread.parse(self.prompt_tokens).scaled(1.0 / TOKENS_PER_WORD)
        return Texts(("{words}",), n_words, self.instruction, rng, Passage(seed))

    def lengths(self, like: str | None) -> Spread:
        """The answer lengths of a model: those of the longest name in `output_tokens` with which the model's name
        begins."""
        return Spread.parse(self.output_tokens[max(self.named_like(like or ""), key=len, default=DEFAULT)])

    def _read(self, rng: random.Random, like: str | None) -> list[ChatRequest]:
        path = Path(self.path or "").expanduser()
        if self.source in TRACES:
            return chats_of_arrivals(read_arrivals(path, self.source), rng, self.max_tokens)
        if self.source in CONVERSATIONS:
            return list(CONVERSATIONS[self.source](path, self.max_tokens))
        pictures = Path(self.pictures).expanduser() if self.pictures else path if path.is_dir() else path.parent
        questions = list(READERS[self.source](path, pictures))
        if self.distinct:
            questions = list({q.picture: q for q in rng.sample(questions, len(questions))}.values())
        lengths = self.lengths(like)
        return [self._chat(q, max(1, round(lengths.draw(rng)))) for q in questions]

    def _chat(self, question: Question, n_tokens: int) -> ChatRequest:
        text = "\n".join(part for part in (question.text, self.instruction) if part)
        return ChatRequest(text=text, pictures=(FilePicture(str(question.picture)),), max_tokens=n_tokens)


def _first(chats: list[ChatRequest], n: int, workload: Workload) -> list[ChatRequest]:
    if len(chats) < n:
        hint = ""
        if workload.source in READERS and workload.distinct:
            hint = "; `distinct: false` allows a picture twice"
        if workload.source == "recording":
            hint = "; record more with `hydrainfer trace --requests`"
        raise TooFewRequests(f"{workload.path} has {len(chats)} requests, {n} are needed{hint}", len(chats))
    return list(islice(chats, n))


def read_workload(name: str, *, data: str | None = None, pictures: str | None = None) -> Workload:
    """The workload named by `name`: a file, a name in configs/workloads, or a recording of `hydrainfer trace` (.jsonl).
    `data`, `pictures`: a local copy of the dataset, which replaces the paths in the file. Raises `ConfigError`."""
    path = locate("workloads", name)
    if path.suffix == ".jsonl":
        recording = read_recording(path)
        return Workload(dataset=recording.dataset, reader="recording", path=str(path))
    given = {k: v for k, v in (("path", data), ("pictures", pictures)) if v is not None}
    workload = converted(read_yaml(path) | given, Workload, str(path), "workload")
    if workload.reader != "synthetic" and workload.path is None and workload.reader not in READERS:
        raise ConfigError(f"{path}: a workload of {workload.reader} needs its file: give --data", param="data")
    return workload
