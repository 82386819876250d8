"""The sampling parameters of Python callers: those of a request, and what vLLM has beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict

import msgspec

from hydrainfer import core
from hydrainfer.core import InvalidRequest

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1.0, 1),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logits_processors": ([], ()),
    "extra_args": ({},),
}
"""Values, beside None, of parameters in `_REFUSED` that mean nothing."""
_REFUSED = {
    "allowed_token_ids": "use logit_bias, or structured_outputs",
    "logits_processors": "no code of a caller runs in the engine; use logit_bias, bad_words or structured_outputs",
    "truncate_prompt_tokens": "shorten the prompt",
    "extra_args": "there are no arguments of plug-ins",
    "thinking_token_budget": "it is not supported",
    "repetition_detection": "it is not supported; use repetition_penalty",
    "logprob_token_ids": "logprobs has the likeliest tokens",
    "prompt_logprob_token_ids": "prompt_logprobs has the likeliest tokens",
    "best_of": "use n",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "early_stopping": "beam search is not supported",
}


class TextPrompt(TypedDict, total=False):
    """A prompt of `generate`: a text, with the model's placeholder for each picture and video."""

    prompt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """A prompt of `generate`: token ids."""

    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class RequestOutputKind(Enum):
    """What each output of a stream holds: all so far, what is new, or, once, all."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The form of an answer: one of a JSON schema (a dict, its text, or a Pydantic model), a regular expression, a list
    of the possible answers, a grammar (Lark or GBNF), or any JSON object."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class SamplingParams(core.SamplingParams, frozen=True, kw_only=True, repr_omit_defaults=True):
    """`core.SamplingParams` with what vLLM has beside it: how tokens are sampled and an answer ends, with vLLM's names
    and defaults. Raises `InvalidRequest` naming the field.

    `structured_outputs`: the form of the answer, a `StructuredOutputsParams` or a dict of its fields;
    `guided_decoding`: its older name. `detokenize=False`: no text is made. `output_kind`: for streams. Parameters of
    vLLM that are not to be had here are refused with what comes nearest.
    """

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    spaces_between_special_tokens: bool = True
    allowed_token_ids: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.detokenize is None:
            msgspec.structs.force_setattr(self, "detokenize", True)
        if not isinstance(self.detokenize, bool):
            raise InvalidRequest(f"detokenize must be True or False, not {self.detokenize!r}", param="detokenize")
        for name, instead in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in _HARMLESS.get(name, ()):
                raise InvalidRequest(f"{name} is not to be had here: {instead}", param=name)
        if not self.spaces_between_special_tokens:
            raise InvalidRequest(
                "spaces_between_special_tokens=False is not to be had here: leave it out",
                param="spaces_between_special_tokens",
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest("output_kind must be a RequestOutputKind", param="output_kind")


def plain(params: core.SamplingParams) -> core.SamplingParams:
    """The parameters as requests carry them. Raises `InvalidRequest`."""
    if not isinstance(params, SamplingParams):
        return params
    from hydrainfer.server import grammar_of

    forms = [form for form in (params.structured_outputs, params.guided_decoding) if form is not None]
    if len(forms) + (params.grammar is not None) > 1:
        raise InvalidRequest("an answer has one form; give structured_outputs alone", param="structured_outputs")
    carried = params.carried
    if forms:
        carried = msgspec.structs.replace(carried, grammar=grammar_of(None, _as_dict(forms[0]), {}))
    return carried


def _as_dict(form: Any) -> dict[str, Any]:
    """The fields of a form as JSON would hold them. Raises `InvalidRequest`."""
    if isinstance(form, StructuredOutputsParams):
        form = msgspec.structs.asdict(form)
    if not isinstance(form, Mapping):
        raise InvalidRequest(
            "structured_outputs must be a StructuredOutputsParams or a dict, such as {'json': schema}",
            param="structured_outputs",
        )
    fields = dict(form)
    if hasattr(fields.get("json"), "model_json_schema"):  # a Pydantic model
        fields["json"] = fields["json"].model_json_schema()
    if isinstance(fields.get("choice"), tuple):
        fields["choice"] = list(fields["choice"])
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if fields.get(name):
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param=f"structured_outputs.{name}")
    return fields
