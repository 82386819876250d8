"""Parsing of the prompts of `LLM.generate` (texts, token ids and vLLM's dicts) into a checked and typed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.messages.chat import ChatMessage, ImagePart, local_image, local_video
from hydrainfer.processor.messages.video_part import VideoPart

_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")
_FORMS = "a text, a list of token ids, or a dict with prompt or prompt_token_ids (and multi_modal_data)"


class PythonPrompt(msgspec.Struct, frozen=True):
    """A parsed prompt. `prompt`: the text or the token ids, with the model's placeholders for pictures and videos.
    `message`: these pictures and videos, None if there are none. `options`: the prompt's `mm_processor_kwargs`."""

    prompt: str | tuple[int, ...]
    message: ChatMessage | None = None
    options: Mapping[str, Any] | None = None


def parse_prompts(prompts: object) -> list[PythonPrompt]:
    """Parse one prompt or several; a list of token ids is one prompt. Raises `InvalidRequest` naming the field."""
    if isinstance(prompts, str | Mapping):
        return [_parse(prompts, "prompts")]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be {_FORMS}, or a list of such, not {_named(prompts)}", param="prompts")
    several = list(prompts)
    if several and all(is_id(i) for i in several):
        return [PythonPrompt(tuple(several))]
    return [_parse(prompt, f"prompts.{i}") for i, prompt in enumerate(several)]


def _parse(prompt: object, where: str) -> PythonPrompt:
    if isinstance(prompt, str):
        return PythonPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt, where)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return PythonPrompt(_ids(prompt, where))
    raise InvalidRequest(f"{where} must be {_FORMS}, not {_named(prompt)}", param=where)


def _parse_dict(given: Mapping[Any, Any], where: str) -> PythonPrompt:
    found = {key: value for key, value in given.items() if value is not None}
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        raise InvalidRequest(
            f"{where}: {unknown[0]!r} is not supported; a prompt's keys are {', '.join(_KEYS)}", param=where
        )
    data, options = found.get("multi_modal_data", {}), found.get("mm_processor_kwargs")
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{where}.multi_modal_data must be a dict, not {_named(data)}", param=where)
    parts = _media(data, f"{where}.multi_modal_data")
    message = ChatMessage("user", tuple(parts)) if parts or options else None
    if "prompt_token_ids" in found:  # as in vLLM, a text beside the ids is only for information
        return PythonPrompt(_ids(found["prompt_token_ids"], f"{where}.prompt_token_ids"), message, options)
    if not isinstance(found.get("prompt"), str):
        raise InvalidRequest(f"{where} needs prompt, a text, or prompt_token_ids", param=f"{where}.prompt")
    return PythonPrompt(found["prompt"], message, options)


def _ids(given: object, where: str) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not all(is_id(i) for i in given):
        raise InvalidRequest(f"{where} must be a list of token ids", param=where)
    return tuple(given)


def _media(data: Mapping[Any, Any], where: str) -> list[ImagePart | VideoPart]:
    """The pictures, then the videos of `multi_modal_data`. None and an empty list mean that there are none."""
    unknown = [key for key in data if key not in ("image", "video")]
    if unknown:
        raise InvalidRequest(f"{where}: {unknown[0]!r} is not supported; give image or video", param=where)
    images = [ImagePart(local_image(one, where), f"{where}.image") for one in _listed(data.get("image"))]
    return [*images, *_videos(data.get("video"), where)]


def _videos(given: Any, where: str) -> list[VideoPart]:
    """The videos. A list of pictures is one video, and so is vLLM's pair of frames and metadata."""
    parts = []
    for one in [given] if _are_frames(given) or _is_pair(given) else _listed(given):
        frames, metadata = one if _is_pair(one) else (one, {})
        if _are_frames(frames):
            frames = _stacked(frames, f"{where}.video")
        fps = _fps(frames, metadata)
        parts.append(local_video({"video": frames} | ({} if fps is None else {"fps": fps}), where))
    return parts


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _fps(frames: object, metadata: Mapping[Any, Any]) -> object:
    """The frame rate of the given frames. `fps` of the metadata is the file's rate, but the frames may be a sample of
    the file."""
    duration_s = metadata.get("duration")
    if isinstance(frames, np.ndarray) and isinstance(duration_s, int | float) and duration_s > 0:
        return len(frames) / duration_s
    return metadata.get("fps")


def _is_pair(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Mapping)


def _are_frames(given: object) -> bool:
    return (
        isinstance(given, list)
        and given != []
        and all(isinstance(one, Image.Image) or (isinstance(one, np.ndarray) and one.ndim == 3) for one in given)
    )


def _stacked(frames: Sequence[Any], where: str) -> np.ndarray:
    arrays = [np.asarray(f.convert("RGB") if isinstance(f, Image.Image) else f) for f in frames]
    if len({a.shape for a in arrays}) != 1:
        raise InvalidRequest(f"{where}: frames of one video must have one size", param=where)
    return np.stack(arrays)


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(value: object) -> str:
    return type(value).__name__
