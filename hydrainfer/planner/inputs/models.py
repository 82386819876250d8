"""The shape of a model and its rules for counting tokens, from its configuration. Needs no weights, tokenizer or
device.

A model is a checkpoint (a directory, a GGUF file, a name on the hub) or the name of a directory in configs/models.
These hold the published config.json and preprocessor_config.json of the models that the paper measures (LLaVA-NeXT-7B
is the variant built on Vicuna).
"""

from __future__ import annotations

from collections.abc import Callable

from hydrainfer.checkpoint import Fit, ModelConfig, locate_model, name_of
from hydrainfer.config.schema import Quantization
from hydrainfer.families import family_of, parse_config, read_config
from hydrainfer.planner.costs import ModelShape
from hydrainfer.planner.inputs.workloads import PromptRules, words_to_tokens
from hydrainfer.processor import (
    ChatMessage,
    Counting,
    ImageAdapter,
    ImagePart,
    ModelDescription,
    TextPart,
    encode,
    encode_rendered,
    image_adapter,
    load_description,
)


def shape_of(name: str, dtype: str | None = None, quantization: Quantization = "none") -> ModelShape:
    """The shape of a model that runs in `dtype` (default: as saved). `quantization`: that of the server. Raises
    `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    model = read_config(path)
    text = model.text
    fit = _fit(model)
    return ModelShape(
        name=name_of(path),
        dtype=dtype or model.dtype,
        quantization=quantization,
        layers=text.layers,
        hidden=text.hidden,
        intermediate=text.intermediate,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        vocab=text.vocab,
        context=text.context,
        deepstack=model.deepstack,
        tied=text.tied,
        windows=text.windows,
        recurrence=text.recurrence,
        gate_dim=text.gate_dim,
        value_dim=text.value_dim,
        local_kv_heads=text.local_kv_heads,
        experts=text.experts,
        local_head_dim=text.local_head_dim,
        reads=text.reads,
        shared_intermediate=text.shared_intermediate,
        keys_as_values=text.keys_as_values,
        per_layer=text.per_layer,
        per_layer_vocab=text.per_layer_vocab if text.per_layer else 0,
        vision=None if fit is None else model.vision.shape(text.hidden, fit),
        sees_whole=bool(model.sees_whole),
    )


def prompts_of(name: str) -> PromptRules:
    """The model's rules for counting tokens. Pictures are counted by the model's own rules; text by its tokenizer and
    chat template or, where there is only a configuration, by words. Raises `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    parsed = parse_config(path)
    family = family_of(parsed.model)

    def roughly(words: str, n_pictures: int) -> int:
        return family.n_template + family.n_around * n_pictures + words_to_tokens(words)

    written = (path / "tokenizer.json").is_file()
    return PromptRules(
        name=name_of(path),
        picture=_fit(parsed.model),
        text=_exactly(load_description(path, parsed=parsed)) if written else roughly,
        n_context=parsed.model.text.context,
        whole=bool(parsed.model.sees_whole),
        inner=_inner(parsed.model),
        among=_among(parsed.model),
    )


def _fit(model: ModelConfig) -> Fit | None:
    adapter = image_adapter(model)
    if adapter is None:
        return None
    return _counted(adapter)


def _counted(adapter: ImageAdapter) -> Fit:
    return lambda width, height: adapter.fit(width, height).n_tokens


def _among(model: ModelConfig) -> Callable[[int], Fit] | None:
    """A function from the number of a prompt's pictures to the tokens of each; None if the number does not matter."""
    adapter = image_adapter(model)
    if isinstance(adapter, Counting):
        return lambda n_pictures: _counted(adapter.among(n_pictures))
    return None


def _inner(model: ModelConfig) -> Fit | None:
    """A function that returns the number of tokens between a picture's placeholders."""
    adapter = image_adapter(model)
    if adapter is None:
        return None
    return lambda width, height: adapter.fit(width, height).n_inner


def _exactly(model: ModelDescription) -> Callable[[str, int], int]:
    def text(words: str, n_pictures: int) -> int:
        pictures = [ImagePart("", "messages")] * n_pictures
        message = ChatMessage("user", (*pictures, TextPart(words)))
        if model.template is None:
            return len(encode(words, model))
        return len(encode_rendered(model.template.render([message]), model)) - n_pictures

    return text
