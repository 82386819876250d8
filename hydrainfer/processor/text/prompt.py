"""The token ids of a prompt, checked. Each picture's placeholder is repeated once per row of its embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.pictures import MediaItem
from hydrainfer.processor.text.checkpoint import ModelDescription

_USUAL = 8  # characters per token that no ordinary text exceeds
_SLICE = 1 << 18  # characters that are tokenised at once, to count their tokens; they take up to 100 MB
T = TypeVar("T")


class Expanded(NamedTuple):
    """A prompt with its placeholders repeated. `starts[i]`: the position of the first placeholder of item i, counted
    over all pictures and videos. `gaps[i]`: the tokens between its placeholders, as in `core.MediaSpan`."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    gaps: tuple[tuple[tuple[int, int], ...], ...] = ()


def check_length(text: str, model: ModelDescription, param: str) -> None:
    """Refuse a text that is too long for the context before the whole text is tokenised: a text that would be too long
    if all its tokens were as long as the vocabulary's longest, and one with more than `_USUAL` characters per token of
    the context whose slices have too many tokens. Raises `InvalidRequest`."""
    limit = model.n_context * model.vocabulary.n_longest
    if len(text) > limit:
        fits = f", which hold at most {limit} characters; the text has {len(text)}"
    elif len(text) > _USUAL * model.n_context and _overflows(text, model):
        fits = "; the text has more"
    else:
        return
    raise InvalidRequest(
        f"This model's maximum context length is {model.n_context} tokens{fits}. Please shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def _overflows(text: str, model: ModelDescription) -> bool:
    """Whether the text certainly has more tokens than the context. A token that is cut between two slices becomes at
    most as many tokens as it has bytes; so many are left out of the count of each slice."""
    n_cut, n_tokens = 4 * model.vocabulary.n_longest, 0
    for at in range(0, len(text), _SLICE):
        n_tokens += max(0, len(encode(text[at : at + _SLICE], model, add_special=False)) - n_cut)
        if n_tokens > model.n_context:
            return True
    return False


def check_text(text: str, model: ModelDescription, param: str) -> None:
    """Refuse a user's text that has the model's placeholders or other special texts of media. Raises
    `InvalidRequest`."""
    for special in model.images.reserved if model.images is not None else ():
        if special in text:
            raise _placeholder_in_text(special, param)


def encode(text: str, model: ModelDescription, *, add_special: bool | None = None) -> list[int]:
    """The token ids of a text, in which the template's marks of media are replaced by the framed placeholders.
    `add_special=None`: add the tokenizer's special tokens unless the text begins with BOS already. A lone surrogate,
    which JSON within a text may escape, becomes a question mark."""
    for mark, framed in (model.images.frames if model.images is not None else {}).items():
        text = text.replace(mark, framed)
    if add_special is None:
        add_special = not (model.bos and text.startswith(model.bos))
    text = text.encode("utf-8", "replace").decode()
    return model.tokenizer.encode(text, add_special_tokens=add_special).ids


def encode_rendered(text: str, model: ModelDescription) -> list[int]:
    """The token ids of a chat that the template has rendered. As in transformers, the template alone writes special
    tokens if the model takes text only; if it takes pictures, the tokenizer's are added unless the text begins with
    BOS."""
    return encode(text, model, add_special=False if model.images is None else None)


def expand(
    ids: Sequence[int], media: Sequence[Sequence[MediaItem]], model: ModelDescription, placeholders: Sequence[int]
) -> Expanded:
    """Repeat each placeholder for the items of its picture or video, with the texts around and between them.
    `placeholders[i]` is the id that stands for `media[i]`. Raises `InvalidRequest` unless the placeholders in `ids` are
    these, in this order."""
    if model.images is None:
        return Expanded(tuple(ids), ())
    known, video = model.images.placeholders, model.images.video
    rows = {video.token_id: video.row_id} if video else {}
    found = [i for i in ids if i in known]
    if len(found) > len(media):
        raise _placeholder_in_text(model.images.placeholder, "messages")
    if len(found) < len(media):
        raise InvalidRequest(
            f"the model's chat template shows {len(found)} of the {len(media)} pictures and videos; put them into user "
            "messages",
            param="messages",
        )
    if list(placeholders) != found:
        raise InvalidRequest(
            "the model's chat template changes the order of pictures and videos; send one kind only", param="messages"
        )
    out: list[int] = []
    starts: list[int] = []
    gaps: list[tuple[tuple[int, int], ...]] = []
    waiting = iter(media)
    for i in ids:
        if i not in known:
            out.append(i)
            continue
        for item in next(waiting):
            out += encode(item.before, model, add_special=False) if item.before else ()
            starts.append(len(out))
            gaps.append(_write(out, rows.get(i, i), item, model))
            out += encode(item.after, model, add_special=False) if item.after else ()
    return Expanded(tuple(out), tuple(starts), tuple(gaps))


def _write(out: list[int], placeholder: int, item: MediaItem, model: ModelDescription) -> tuple[tuple[int, int], ...]:
    """Append an item's placeholders and the texts between them to `out`. Returns the item's gaps."""
    row = n_others = 0
    gaps: list[tuple[int, int]] = []
    texts = [(one.after, encode(one.text, model, add_special=False)) for one in item.inner]
    for after, ids in sorted((after, ids) for places, ids in texts for after in places):
        assert row < after < item.n_tokens, f"a text after {after} of {item.n_tokens} placeholders, {row} before it"
        out += [placeholder] * (after - row)
        out += ids
        row, n_others = after, n_others + len(ids)
        gaps.append((row, n_others))
    out += [placeholder] * (item.n_tokens - row)
    return tuple(gaps)


def in_order(ids: Sequence[int], parts: Sequence[T], token_id: Callable[[T], int], model: ModelDescription) -> list[T]:
    """The pictures and videos in the order of the prompt's placeholders: each placeholder takes the next part of its
    kind. `token_id` gives the placeholder of a part. Raises `InvalidRequest` unless there is one placeholder per
    part."""
    known = model.images.placeholders if model.images is not None else {}
    waiting = {i: [part for part in parts if token_id(part) == i] for i in known}
    found = [i for i in ids if i in known]
    for i, of_kind in waiting.items():
        if found.count(i) != len(of_kind):
            raise InvalidRequest(
                f"the prompt holds {known[i]} {found.count(i)} times for {len(of_kind)} pictures "
                "or videos; write it once for each, where it belongs",
                param="prompt",
            )
    return [waiting[i].pop(0) for i in found]


def check_ids(ids: Sequence[int], model: ModelDescription, *, with_media: bool = False) -> None:
    """Check the token ids that a client sent. `with_media`: placeholders are allowed. Raises `InvalidRequest`."""
    n = model.vocabulary.n_tokens
    known = model.images.placeholders if model.images is not None else {}
    bad = next((i for i in ids if not 0 <= i < n and not (with_media and i in known)), None)
    if bad is not None:
        raise InvalidRequest(f"prompt holds token id {bad}, but the vocabulary has ids 0 to {n - 1}", param="prompt")
    media = set() if with_media else set(known) & set(ids)
    if media:
        raise InvalidRequest(
            f"prompt holds the image token id {min(media)}; send pictures through /v1/chat/completions", param="prompt"
        )


def check_known(ids: Sequence[int], model: ModelDescription, param: str) -> None:
    """Refuse ids that the tokenizer gives to texts but the model has no embedding for. Some published tokenizers have
    such tokens. Raises `InvalidRequest`."""
    n = model.vocabulary.n_tokens
    if max(ids, default=0) < n:
        return
    media = model.images.placeholders if model.images is not None else ()
    bad = next((i for i in ids if i >= n and i not in media), None)
    if bad is not None:
        token = model.tokenizer.id_to_token(bad)
        raise InvalidRequest(
            f"{param} holds {token!r}, which the tokenizer knows and the model lacks; leave it out", param=param
        )


def resolve_max_tokens(n_prompt: int, asked: int | None, model: ModelDescription, param: str) -> int:
    """The number of tokens that may be generated. Raises `InvalidRequest`, whose message has the numbers, as in
    OpenAI's API."""
    limit = model.n_context
    if n_prompt == 0:
        raise InvalidRequest(f"{param} is empty: there is nothing to continue", param=param)
    if n_prompt + (asked or 1) > limit:
        rest = f", {asked} in the completion" if asked else " and 1 for the answer"
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{n_prompt + (asked or 1)} tokens ({n_prompt} in the {param}{rest}). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
            code="context_length_exceeded",
        )
    return asked if asked is not None else limit - n_prompt


def predicted(text: str, model: ModelDescription) -> tuple[int, ...]:
    """The token ids of a predicted answer. Raises `InvalidRequest` if no answer is so long."""
    if not text:
        return ()
    check_length(text, model, "prediction")
    check_text(text, model, "prediction")
    ids = tuple(encode(text, model, add_special=False))
    check_known(ids, model, "prediction")
    if len(ids) > model.n_context:
        raise InvalidRequest(
            f"This model's maximum context length is {model.n_context} tokens; the prediction has {len(ids)}. Please "
            "shorten it.",
            param="prediction",
            code="context_length_exceeded",
        )
    return ids


def spellings(words: Sequence[str], model: ModelDescription) -> tuple[tuple[int, ...], ...]:
    """The token ids of each of these words, at the beginning of a text and behind a space. Raises `InvalidRequest`."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        check_length(word, model, "bad_words")
        check_text(word, model, "bad_words")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(encode(text, model, add_special=False))
            check_known(ids, model, "bad_words")
            found[ids] = None
    return tuple(found)


def _placeholder_in_text(placeholder: str, param: str) -> InvalidRequest:
    hint = "through /v1/chat/completions" if param == "prompt" else "as image_url"
    return InvalidRequest(
        f"the text holds {placeholder}, which stands for a picture in this model's prompts; "
        f"remove it, and send pictures {hint}",
        param=param,
        code="placeholder_in_text",
    )
