"""The description of a checkpoint: all that the processor needs of it, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint import ModelConfig, find_json, preprocessing
from hydrainfer.core import CheckpointError, InvalidRequest, SamplingParams
from hydrainfer.families import ParsedConfig, family_of, parse_config
from hydrainfer.processor.pictures import ImageAdapter, VideoAdapter, image_adapter, video_adapter
from hydrainfer.processor.text.template import ChatTemplate
from hydrainfer.processor.text.tool_format import FORMATS
from hydrainfer.processor.text.vocabulary import Vocabulary, read_vocabulary

CACHED_WORDS = 500
"""The number of words whose token ids a tokenizer caches, for each thread that calls it: the first words it meets,
except those of 256 bytes or more. A word takes up to 8.5 KB, so the cache takes at most 4.3 MB per thread; the
library's default of 10,000 words takes 85 MB."""
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class VideoInput:
    """The placeholder and adapter of videos, with fields as in `ImageInput`. `row_id`: the id that stands for one
    embedding, where that is the one of pictures. `framed`: what the placeholder becomes in the prompt, if it is no
    token; the template then shows a video as a text."""

    adapter: VideoAdapter
    placeholder: str
    token_id: int
    row_id: int
    framed: str = ""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The placeholder and adapter of pictures. `placeholder` is the text and `token_id` the id that stands for one
    embedding. `around`: further special texts of media. `mark`: what the chat template writes for a picture; `framed`:
    what this becomes in the prompt, if it differs. `video`: None if the model takes no videos."""

    adapter: ImageAdapter
    placeholder: str
    token_id: int
    around: tuple[str, ...] = ()
    video: VideoInput | None = None
    mark: str = ""
    framed: str = ""

    @property
    def reserved(self) -> tuple[str, ...]:
        """The special texts that may not occur in a user's text."""
        return (self.placeholder, *self.around, *((self.video.placeholder,) if self.video else ()))

    @property
    def placeholders(self) -> Mapping[int, str]:
        """The placeholders of pictures and videos by their ids."""
        videos = {self.video.token_id: self.video.placeholder} if self.video else {}
        return {self.token_id: self.placeholder} | videos

    @property
    def frames(self) -> Mapping[str, str]:
        """What the template writes for media, and what this becomes in the prompt."""
        videos = {self.video.placeholder: self.video.framed} if self.video and self.video.framed else {}
        return ({self.mark: self.framed} if self.mark else {}) | videos


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts about a checkpoint that the processor needs. `tokenizer` is a `tokenizers.Tokenizer`; `images` is None
    for text-only models; `n_context` counts prompt and answer; `sampling_defaults` are the fields of `SamplingParams`
    that generation_config.json sets."""

    path: Path
    tokenizer: Any
    vocabulary: Vocabulary
    template: ChatTemplate | None
    images: ImageInput | None
    bos: str | None
    eos_ids: tuple[int, ...]
    n_context: int
    sampling_defaults: Mapping[str, float]


def load_description(
    path: Path,
    *,
    max_context: int | None = None,
    chat_template: str | None = None,
    template_name: str | None = None,
    tool_calls: str = "auto",
    reasoning: str = "auto",
    parsed: ParsedConfig | None = None,
) -> ModelDescription:
    """The description of a checkpoint directory. `max_context` lowers the context length; `chat_template` replaces the
    checkpoint's, and `template_name` is its name in messages; `tool_calls`: the format of tool calls (a name of
    `FORMATS`), or "auto" to derive it from the template; `reasoning`: likewise for the reasoning (a name of
    `REASONING`, or "none"); `parsed`: the configuration, if it has been read already.

    Raises `CheckpointError`, one line that says what is missing or unsupported.
    """
    path = Path(path)
    config, hf = parsed or parse_config(path)
    generation = find_json(path / "generation_config.json") or {}
    written = _written_templates(path)
    tokenizer = _load_tokenizer(path, hf)
    backend = tokenizer.backend_tokenizer
    try:
        vocabulary = read_vocabulary(backend, config.text.vocab)
    except ValueError as e:
        raise CheckpointError(f"{path / 'tokenizer.json'}: cannot stream text of this tokenizer ({e})") from None
    images = _image_input(path, config, tokenizer)
    name = template_name if template_name and chat_template is not None else f"the chat template of {path}"
    places = [written, _named(tokenizer.chat_template, path / "tokenizer_config.json")]
    places = [_named(chat_template, name), *(places if images else reversed(places))]  # a text model has no processor
    templates = next((named for named in places if "default" in named), {})
    limit = config.text.context
    if max_context and max_context > limit:
        raise CheckpointError(f"a context length of {max_context} was asked for, but the model has {limit} positions")
    return ModelDescription(
        path=path,
        tokenizer=backend,
        vocabulary=vocabulary,
        template=_template(tokenizer, templates, images, tool_calls, reasoning, name),
        images=images,
        bos=tokenizer.bos_token,
        eos_ids=_eos_ids(generation, hf, tokenizer),
        n_context=max_context or limit,
        sampling_defaults=_sampling_defaults(generation, path),
    )


def _template(
    tokenizer: Any,
    sources: Mapping[str, str],
    images: ImageInput | None,
    tool_calls: str,
    reasoning: str,
    name: str,
) -> ChatTemplate | None:
    if not sources.get("default"):
        return None
    picture = (images.mark or images.placeholder) if images else None
    videos = images.video if images else None
    video, written = (videos.placeholder, bool(videos.framed)) if videos else (None, False)
    how, for_tools = FORMATS.get(tool_calls), sources.get("tool_use")
    return ChatTemplate(tokenizer, sources["default"], picture, video, how, reasoning, name, for_tools, written)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint directory, one of `transformers`. Raises `CheckpointError`."""
    return _load_tokenizer(path, parse_config(path).hf)


def _load_tokenizer(path: Path, hf: Any) -> Any:
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path / 'tokenizer.json'} is missing; only fast tokenizers are supported")
    options = {"config": hf, "local_files_only": True, "trust_remote_code": False, "use_fast": True}
    options["mistral_format"] = False  # else, where mistral-common is installed, tekken.json has precedence
    if (path / "tekken.json").is_file():
        options["fix_mistral_regex"] = True  # Mistral's tokenizer.json may cut text otherwise than its tekken.json
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        _bound_cache(tokenizer.backend_tokenizer)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic of the Rust library is not an Exception
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {_one_line(e)}") from None


def _bound_cache(tokenizer: Any) -> None:
    """Limit a tokenizer's cache, if it has one, to `CACHED_WORDS`. Clearing the cache from time to time would not help:
    `_clear_cache` frees no memory."""
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(CACHED_WORDS)


def _image_input(path: Path, config: ModelConfig, tokenizer: Any) -> ImageInput | None:
    adapter = image_adapter(config)
    if adapter is None:
        return None
    if preprocessing(path) is None:
        raise CheckpointError(f"{path / 'preprocessor_config.json'} is missing")
    texts = [_special(path, tokenizer, token, noun) for token, noun in zip(config.media_tokens, ("image", "video"))]
    around = tuple(
        _special(path, tokenizer, token, f"{kind} {end}")
        for token, (kind, end) in zip(config.around, product(("vision", "video"), ("start", "end")))
    )
    marks = tuple(_known(path, tokenizer.backend_tokenizer, mark) for mark in config.vision.marks)
    videos = video_adapter(config, around)
    family, clip, video = family_of(config), family_of(config).video_mark, None
    row_id = config.media_tokens[0 if family.framed_videos else -1]
    if videos is not None and clip is not None:
        token_id = tokenizer.backend_tokenizer.token_to_id(_known(path, tokenizer.backend_tokenizer, clip.token))
        video = VideoInput(videos, clip.text, token_id, row_id, f"{clip.before}{clip.token}{clip.after}")
    elif videos is not None:
        video = VideoInput(videos, texts[1], config.media_tokens[1], row_id)
    parts = {"start": around[0] if around else "", "picture": texts[0], "end": around[-1] if around else ""}
    mark = family.mark.format(**parts) if family.frame else ""
    framed = family.frame.format(**parts)
    return ImageInput(adapter, texts[0], config.media_tokens[0], (*around, *marks), video, mark, framed)


def _special(path: Path, tokenizer: Any, token_id: Any, noun: str) -> str:
    """The text of a special token. Raises `CheckpointError`."""
    text = tokenizer.convert_ids_to_tokens(token_id) if token_id is not None else None
    if text is None or tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids != [token_id]:
        raise CheckpointError(f"{path}: the {noun} token id {token_id} of config.json is no token of the tokenizer")
    return text


def _known(path: Path, tokenizer: Any, mark: str) -> str:
    """A mark of pictures, which is one token. Raises `CheckpointError`."""
    if tokenizer.encode(mark, add_special_tokens=False).ids != [tokenizer.token_to_id(mark)]:
        raise CheckpointError(f"{path / 'tokenizer.json'} has no token {mark}, which this model's pictures need")
    return mark


def _written_templates(path: Path) -> Mapping[str, str]:
    """The templates by name, from the first place that has any, in the order of transformers' processors:
    `chat_template` of processor_config.json, chat_template.json, then chat_template.jinja as `default` and the files of
    additional_chat_templates by their names. Raises `CheckpointError`."""
    for name in ("processor_config.json", "chat_template.json"):
        template = (find_json(path / name) or {}).get("chat_template")
        if template is not None:
            return _named(template, path / name)
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    return {name: _text(file) for name, file in files.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {_one_line(e)}") from None


def _named(template: Any, source: str | Path) -> Mapping[str, str]:
    """Templates by name, as transformers has them. One template without a name is called `default`; a list has objects
    with `name` and `template`. `source`: where they stand, for the message. Raises `CheckpointError`."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list) and all(isinstance(t, dict) for t in template):
        template = {t.get("name"): t.get("template") for t in template}
    if isinstance(template, dict) and all(isinstance(v, str) for pair in template.items() for v in pair):
        return template
    raise CheckpointError(f"{source}: chat_template must be a text, or texts by name")


def _eos_ids(generation: Mapping[str, Any], hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: those of generation_config.json, else of config.json, else of its `text_config`, and
    the tokenizer's."""
    text = getattr(hf, "text_config", hf)
    stated = (generation.get("eos_token_id"), getattr(hf, "eos_token_id", None), text.eos_token_id)
    ids: list[int] = []
    for value in (next((v for v in stated if v is not None), None), tokenizer.eos_token_id):
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The checkpoint's own sampling parameters. As in transformers, do_sample false means greedy sampling, whatever the
    temperature is."""
    found = {k: generation[k] for k in _SAMPLING_DEFAULTS if generation.get(k) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequest as e:
        raise CheckpointError(f"{path / 'generation_config.json'}: {e.message}") from None
    return found | ({"temperature": 0.0} if generation.get("do_sample") is False else {})


def _one_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return (lines[0] if lines else type(e).__name__)[:200]
