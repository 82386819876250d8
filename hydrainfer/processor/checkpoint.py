"""What the server needs to know of a checkpoint besides its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrainfer.core import CheckpointError
from hydrainfer.processor.adapter import ImageAdapter, VideoAdapter
from hydrainfer.processor.anyres import llava_next_images
from hydrainfer.processor.clip import llava_images
from hydrainfer.processor.qwen import QwenImages, qwen_images
from hydrainfer.processor.qwen_video import qwen_videos
from hydrainfer.processor.template import ChatTemplate
from hydrainfer.processor.vocabulary import Vocabulary, read_vocabulary

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class VideoInput:
    """As `ImageInput`, for videos."""

    adapter: VideoAdapter
    placeholder: str
    token_id: int


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How pictures enter the prompt: `placeholder` is the text and `token_id` the id that stands for one embedding.
    `around`: further special texts of media. `video`: None for a model that takes none."""

    adapter: ImageAdapter
    placeholder: str
    token_id: int
    around: tuple[str, ...] = ()
    video: VideoInput | None = None

    @property
    def reserved(self) -> tuple[str, ...]:
        """What no user's text may hold."""
        return (self.placeholder, *self.around, *((self.video.placeholder,) if self.video else ()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (self.token_id, *((self.video.token_id,) if self.video else ()))


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A checkpoint as the processor sees it. `tokenizer` is a `tokenizers.Tokenizer`; `images` is None for text-only
    models; `n_context` counts prompt and answer; `sampling_defaults` come from generation_config.json."""

    path: Path
    tokenizer: Any
    vocabulary: Vocabulary
    template: ChatTemplate | None
    images: ImageInput | None
    bos: str | None
    eos_ids: tuple[int, ...]
    n_context: int
    sampling_defaults: Mapping[str, float]


def _adapters() -> dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageAdapter]]:
    """Model type of config.json → maker of its adapter. A new family is one line here and one module."""
    qwen = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), qwen_images)
    return {"llava": llava_images, "llava_next": llava_next_images, **qwen}


def load_description(
    path: Path, *, max_context: int | None = None, chat_template: str | None = None
) -> ModelDescription:
    """Read a checkpoint directory. `max_context` lowers the context length; `chat_template` replaces the checkpoint's.

    Raises `CheckpointError`, one line that says what is missing or unsupported.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory")
    config = _resolved_config(path)
    text = config.get("text_config") or config
    generation = _read_json(path / "generation_config.json") or {}
    tokenizer = _load_tokenizer(path)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    try:
        vocabulary = read_vocabulary(backend, text["vocab_size"])
    except ValueError as e:
        raise CheckpointError(f"{path / 'tokenizer.json'}: cannot stream text of this tokenizer ({e})") from None
    images = _image_input(path, config, tokenizer)
    source = chat_template if chat_template is not None else _find_template(path, tokenizer)
    placeholders = (
        images.placeholder if images else None,
        images.video.placeholder if images and images.video else None,
    )
    template = ChatTemplate(tokenizer, source, *placeholders) if source else None
    limit = text.get("max_position_embeddings")
    n_context = min((n for n in (limit, max_context) if n), default=0)
    if not n_context:
        raise CheckpointError(f"{path / 'config.json'}: max_position_embeddings is missing; give a context length")
    if max_context and limit and max_context > limit:
        raise CheckpointError(f"a context length of {max_context} was asked for, but the model has {limit} positions")
    return ModelDescription(
        path=path,
        tokenizer=backend,
        vocabulary=vocabulary,
        template=template,
        images=images,
        bos=tokenizer.bos_token,
        eos_ids=_eos_ids(generation, text, tokenizer),
        n_context=n_context,
        sampling_defaults={k: generation[k] for k in _SAMPLING_DEFAULTS if generation.get(k) is not None},
    )


def _resolved_config(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    raw = _read_json(path / "config.json")
    if raw is None:
        raise CheckpointError(f"{path / 'config.json'} is missing; give a Hugging Face checkpoint directory")
    kind, supported = raw.get("model_type"), ", ".join(_adapters())
    if "vision_config" in raw and kind not in _adapters():
        raise CheckpointError(f"{path}: model type {kind!r} is not supported; supported: {supported}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as e:
        raise CheckpointError(
            f"{path / 'config.json'} cannot be used: {_one_line(e)}; supported: {supported}"
        ) from None


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path / 'tokenizer.json'} is missing; only fast tokenizers are supported")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, use_fast=True)
    except Exception as e:
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {_one_line(e)}") from None


def _image_input(path: Path, config: Mapping[str, Any], tokenizer: Any) -> ImageInput | None:
    make = _adapters().get(config["model_type"])
    if make is None:
        return None
    preprocessor = _read_json(path / "preprocessor_config.json")
    if preprocessor is None:
        preprocessor = (_read_json(path / "processor_config.json") or {}).get("image_processor")
    if not isinstance(preprocessor, dict):
        raise CheckpointError(f"{path / 'preprocessor_config.json'} is missing")
    token_id: Any = config.get("image_token_id")
    if token_id is None:
        token_id = config.get("image_token_index")
    placeholder = _special(path, tokenizer, token_id, "image")
    adapter = make(config, preprocessor)
    if not isinstance(adapter, QwenImages):
        return ImageInput(adapter, placeholder, token_id)
    around = tuple(
        _special(path, tokenizer, config[f"vision_{end}_token_id"], f"vision {end}") for end in ("start", "end")
    )
    video_id = config["video_token_id"]
    videos = qwen_videos(config, _video_preprocessor(path, preprocessor), adapter.settings, *around)
    video = VideoInput(videos, _special(path, tokenizer, video_id, "video"), video_id)
    return ImageInput(adapter, placeholder, token_id, around, video)


def _special(path: Path, tokenizer: Any, token_id: Any, noun: str) -> str:
    """The text of a special token. Raises `CheckpointError`."""
    text = tokenizer.convert_ids_to_tokens(token_id) if token_id is not None else None
    if text is None or tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids != [token_id]:
        raise CheckpointError(f"{path}: the {noun} token id {token_id} of config.json is no token of the tokenizer")
    return text


def _video_preprocessor(path: Path, preprocessor: dict[str, Any]) -> dict[str, Any]:
    """Where transformers looks for it."""
    found = _read_json(path / "video_preprocessor_config.json")
    if found is None:
        found = (_read_json(path / "processor_config.json") or {}).get("video_processor")
    return preprocessor if found is None else found


def _find_template(path: Path, tokenizer: Any) -> str | None:
    """chat_template.jinja, then chat_template.json, then tokenizer_config.json (`default`, if there are several)."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text("utf-8")
    source = (_read_json(path / "chat_template.json") or {}).get("chat_template") or tokenizer.chat_template
    return source.get("default") if isinstance(source, dict) else source


def _eos_ids(generation: Mapping[str, Any], text: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (generation.get("eos_token_id", text.get("eos_token_id")), tokenizer.eos_token_id):
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold a JSON object")
    return content


def _one_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return (lines[0] if lines else type(e).__name__)[:200]
