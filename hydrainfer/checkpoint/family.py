"""The description of a model family: what its config.json says, how its tensors are named, and what prepares its
pictures. The families themselves are in `hydrainfer.families`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.checkpoint.decoder import Decoder
from hydrainfer.checkpoint.files import Rule
from hydrainfer.checkpoint.model import Sight, VisionConfig

Renames = tuple[tuple[str, str], ...]
"""Regular expressions and what replaces their first match."""


class Names(NamedTuple):
    """The names of a checkpoint's tensors. `rooms`: of these, the first that matches the beginning of a name replaces
    it with the beginning of ours: `text.`, `vision.`, `projector.`, `mtp.` or `lm_head.`. Then all renames of that room
    follow, in their order. Names that are unknown stay."""

    rooms: Renames
    text: Renames = ()
    vision: Renames = ()
    projector: Renames = ()
    mtp: Renames = ()

    def canonical(self, name: str) -> str:
        """Our name of a tensor, e.g. `model.layers.0.mlp.up_proj.weight` → `text.layers.0.mlp.up_proj.weight`."""
        for pattern, ours in self.rooms:
            renamed, n = re.subn(f"^{pattern}", ours, name, count=1)
            if n:
                name = renamed
                break
        for pattern, ours in self._of(name.partition(".")[0]):
            name = re.sub(pattern, ours, name, count=1)
        return name

    def _of(self, room: str) -> Renames:
        parts = {"text": self.text, "vision": self.vision, "projector": self.projector, "mtp": self.mtp}
        return parts.get(room, ())


TEXT = Names(rooms=((r"model\.(?=embed_tokens|layers\.|norm\.|per_layer_)", "text."),))
"""The names of checkpoints that hold a decoder alone."""


class VideoMark(NamedTuple):
    """The marks of videos for which config.json names no token. `token`: the special token that stands for a video
    among the prompt's ids, and for nothing else before media are filled in. `text`: what stands for it in a rendered
    chat; if that is no token, the template is given it as a text. `before`, `after`: texts around each video that are
    tokenised with those beside them."""

    text: str
    token: str
    before: str = ""
    after: str = ""


class Family(NamedTuple):
    """One supported architecture. `tower`, `pictures` and `videos` are "module:name" and imported when they are needed:
    the `models.VisionTower`, which is built from (`ModelConfig`, ops, dtype, device) and has the class method
    `pass_size`, and the functions that make the processor's adapters from a `ModelConfig`.

    `decoder`: the family's decoder; None if config.json names another family's. `vision(hf, path)` checks and describes
    the vision tower; None for text-only models. `around`: the fields of config.json that name the tokens around each
    picture and, if these are others, around each video. `frame`: the text that `mark`, which is all that the chat
    template writes for a picture, becomes in a prompt; "" if the template writes the whole text itself.
    `framed_videos`: a video's frames are pictures in the prompt, with the placeholders of pictures. `video_mark`: None
    if config.json names a token for videos. `blanked`: the fields of config.json that name tokens of
    `ModelConfig.blanked`. `sees_whole(hf)`: see `ModelConfig`; None if nowhere. `dtype`: the default
    if config.json names none; `overflows`: float16 does not hold the numbers of published models. `variants`: other
    families of this architecture, by the `model_type` of their vision tower. `fields`: what values fields of
    config.json may have, besides those that `files.read_json` checks for all families. `n_template` and `n_around` are
    for the planner, which has no tokenizer: the number of tokens of the chat template, including its default system
    text, and of those around each picture.
    """

    model_type: str
    names: Names
    decoder: Decoder | None = None
    tower: str = ""
    vision: Callable[[Any, Path], VisionConfig] | None = None
    pictures: str = ""
    videos: str = ""
    around: tuple[str, ...] = ()
    frame: str = ""
    mark: str = "{start}"
    framed_videos: bool = False
    video_mark: VideoMark | None = None
    blanked: tuple[str, ...] = ()
    sees_whole: Callable[[Any], Sight] | None = None
    variants: Mapping[str, Family] = {}
    dtype: str = "float16"
    fields: Mapping[str, Rule] = {}
    overflows: bool = False
    n_template: int = 12
    n_around: int = 0


class Served(NamedTuple):
    """A row of the tables in the documentation: what people know these architectures as, and what is in them.
    `placeholders`: how many a picture has; "" if the models take text only. `media`: what they take besides text."""

    architectures: tuple[str, ...]
    models: str
    language: str
    vision: str = ""
    placeholders: str = ""
    media: str = ""


def text_only(decoder: Decoder, *, names: Names = TEXT, dtype: str = "float16") -> Family:
    """The family of checkpoints that hold this decoder alone."""
    return Family(decoder.model_type, names, decoder, dtype=dtype)
