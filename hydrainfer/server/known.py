"""The request fields of OpenAI's, Anthropic's and Ollama's APIs, of vLLM, SGLang and llama.cpp, by endpoint: honoured,
refused by name because dropping them would change the answer in silence, or harmless. Any other is logged once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hydrainfer.core import InvalidRequest

_log = logging.getLogger(__name__)
_EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
_MOST_NOTED = 256  # names of unknown fields that are remembered, and so logged


class Refusal(NamedTuple):
    """A refused field. `why`: the error message. `neutral`: the values, besides null, that change nothing."""

    why: str
    neutral: tuple[Any, ...] = _EMPTY


class KnownFields(NamedTuple):
    """The fields of one endpoint. `noun`: what their names begin with in messages."""

    honoured: frozenset[str]
    refused: Mapping[str, Refusal]
    harmless: frozenset[str]
    noun: str = ""

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` naming the first refused field that `body` sets."""
        for name, refusal in self.refused.items():
            value = body.get(name)
            if value is not None and value not in refusal.neutral:
                param = f"{self.noun}{name}"
                raise InvalidRequest(refusal.why, param=param, code="unsupported_parameter")

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        known = (self.honoured, self.refused, self.harmless)
        return [f"{self.noun}{name}" for name in body if not any(name in names for names in known)]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _no(names: str, hint: str = "", neutral: tuple[Any, ...] = _EMPTY) -> dict[str, Refusal]:
    """These fields, refused. `hint`: what to do instead."""
    more = f"; {hint}" if hint else ""
    return {name: Refusal(f"{name} is not supported by this server{more}", neutral) for name in names.split()}


EXTENSIONS = (
    *("priority", "deadline_s", "timings", "cache_salt", "mm_processor_kwargs", "chat_template_kwargs"),
    *("seed", "min_p", "repetition_penalty"),
)
"""Our and vLLM's extra fields, which mean the same in every protocol."""

_SAMPLING = _names(
    "n max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p seed stop stop_token_ids "
    "include_stop_str_in_output ignore_eos presence_penalty frequency_penalty repetition_penalty logit_bias "
    "skip_special_tokens return_token_ids prompt_logprobs length_penalty best_of logprobs"
)
_COMMON = _SAMPLING | _names(
    "model stream stream_options timings cache_salt priority deadline_s modalities response_format structured_outputs "
    "guided_json guided_regex guided_choice guided_grammar"
)
_CHAT = _COMMON | _names(
    "messages tools tool_choice parallel_tool_calls mm_processor_kwargs chat_template_kwargs top_logprobs "
    "add_generation_prompt include_reasoning reasoning_effort"
)
_TEXT = _COMMON | _names("prompt echo add_special_tokens")
_OPENAI_HARMLESS = _names(  # billing, storage, scheduling hints, other names for what is on already
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "request_id rid cache_prompt guided_decoding_backend spaces_between_special_tokens data_parallel_rank "
    "routed_dp_rank id_slot timings_per_token return_progress mirostat_tau mirostat_eta stream_interval "
    "session_id disagg_prefill_dp_rank ngram_corpus_id return_token_offsets return_mm_kwargs"
)
_OPENAI_REFUSED = {
    "tools": Refusal("tools are for /v1/chat/completions"),
    **_no("functions", "send tools"),
    **_no("function_call", "send tool_choice"),
    "audio": Refusal("audio output is not supported by this server"),
    "prediction": Refusal("predicted outputs are not supported by this server"),
    "web_search_options": Refusal("web search is not supported by this server", ()),  # an empty object searches, too
    **_no("moderation"),
    **_no("verbosity", "say in the prompt how long an answer should be", ("medium",)),
    "chat_template": Refusal("a request may not set a chat template; it is chosen when the server starts"),
    "chat_template_kwargs": Refusal("chat_template_kwargs is for chats: a text completion has no template"),
    "documents": Refusal("documents are not supported by this server; put them into a message"),
    "mm_processor_kwargs": Refusal(
        "mm_processor_kwargs is for /v1/chat/completions: a text completion has no pictures"
    ),
    **_no("media_io_kwargs", "send mm_processor_kwargs, whose num_frames and fps choose the frames of a video"),
    **_no("continue_final_message"),
    "echo": Refusal("echo is for /v1/completions; ask a chat for prompt_logprobs"),
    **_no("add_special_tokens", "the chat template writes them"),
    **_no("suffix", "leave it out"),
    **_no("prompt_embeds input_ids", "send prompt"),
    "use_beam_search": Refusal("beam search is not supported by this server"),
    **_no("truncate_prompt_tokens truncation_side", "shorten the prompt"),
    **_no("bad_words allowed_token_ids", "use logit_bias"),
    **_no(
        "logits_processors custom_logit_processor custom_params vllm_xargs repetition_detection samplers watermarking"
    ),
    **_no("structural_tag", "send response_format or tools"),
    **_no("regex", "send guided_regex"),
    **_no("ebnf", "send guided_grammar, in Lark or GBNF"),
    **_no("grammar", "send guided_grammar"),
    **_no("json_schema", "send response_format or guided_json"),
    **_no("stop_regex", "send stop"),
    **_no("no_stop_trim", "send include_stop_str_in_output"),
    **_no("n_predict max_new_tokens", "send max_tokens", (*_EMPTY, -1)),
    **_no("min_new_tokens", "send min_tokens"),
    "guided_whitespace_pattern": Refusal("guided_whitespace_pattern is not supported: JSON is written on one line"),
    **_no("return_tokens_as_token_ids", "send return_token_ids"),
    **_no("logprob_token_ids n_probs post_sampling_probs", "send logprobs and top_logprobs"),
    **_no(
        "return_hidden_states return_routed_experts return_meta_info return_cached_tokens_details return_prompt_text"
    ),
    **_no("routed_experts_prompt_start routed_experts_start_len task images_config"),
    **_no("return_prompt_token_ids", "send return_token_ids"),
    **_no("thinking_token_budget thinking_budget_tokens"),
    **_no("thinking reasoning", "send reasoning_effort, or chat_template_kwargs"),
    **_no("enable_thinking", "send it in chat_template_kwargs", ()),
    **_no("separate_reasoning stream_reasoning", "include_reasoning leaves the reasoning out", (True,)),
    **_no("reasoning_format", "start the server with --reasoning-parser", ("auto", "deepseek")),
    **_no("repeat_penalty", "send repetition_penalty", (*_EMPTY, 1)),
    **_no("repeat_last_n", "repetition_penalty counts the whole text", (-1, 64)),
    **_no("typical_p typ_p", "send top_p", (*_EMPTY, 1)),
    **_no("tfs_z", "send top_p", (*_EMPTY, 1)),
    **_no("top_n_sigma", "send min_p", (*_EMPTY, -1)),
    **_no("mirostat dry_multiplier xtc_probability dynatemp_range min_keep n_keep n_indent t_max_predict_ms"),
    **_no("lora_path lora"),
    **_no("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room session_params"),
    **_no("extra_key", "send cache_salt"),
    **_no("max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch use_audio_in_video"),
}
_MESSAGES = KnownFields(
    honoured=_names(
        "model messages max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice thinking "
        "output_config output_format"
    ).union(EXTENSIONS),
    refused={
        **_no("mcp_servers", "send tools"),
        **_no("container context_management compaction fallbacks thread"),
    },
    harmless=_names(
        "metadata service_tier inference_geo cache_control speed betas user_profile_id workspace_id billing_policy "
        "fallback_credit_token diagnostics"
    ),
)
_OLLAMA_REFUSED = {**_no("template", "it is chosen when the server starts"), **_no("suffix width height steps")}
_OLLAMA_COMMON = _names("model format options stream think logprobs top_logprobs").union(EXTENSIONS)
_OLLAMA_HARMLESS = _names("keep_alive truncate shift name")


def _openai(honoured: frozenset[str]) -> KnownFields:
    refused = {name: refusal for name, refusal in _OPENAI_REFUSED.items() if name not in honoured}
    return KnownFields(honoured, refused, _OPENAI_HARMLESS)


ENDPOINTS: Mapping[str, KnownFields] = MappingProxyType(
    {
        "/v1/chat/completions": _openai(_CHAT),
        "/v1/completions": _openai(_TEXT),
        "/tokenize": KnownFields(
            _names(
                "model prompt messages tools mm_processor_kwargs chat_template_kwargs add_special_tokens "
                "return_token_strs"
            ),
            {
                **_no("add_generation_prompt", "the prompt always ends where the answer begins", (True,)),
                **_no("continue_final_message chat_template media_io_kwargs"),
            },
            _names("priority request_id"),
        ),
        "/detokenize": KnownFields(_names("model tokens"), {}, _names("request_id")),
        "/v1/responses": KnownFields(
            honoured=_names(
                "model input instructions max_output_tokens tools tool_choice parallel_tool_calls text stream "
                "temperature top_p top_k stop presence_penalty frequency_penalty reasoning include truncation"
            ).union(EXTENSIONS),
            refused={
                **_no("previous_response_id conversation", "nothing is stored; send the whole conversation as input"),
                **_no("background max_tool_calls context_management moderation access_programs image"),
                **_no("prompt", "send input"),
                **_no("top_logprobs", "use /v1/chat/completions"),
            },
            harmless=_names(
                "metadata store user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
                "service_tier stream_options client_metadata request_id"
            ),
        ),
        "/v1/messages": _MESSAGES,
        "/v1/messages/count_tokens": _MESSAGES,
        "/api/chat": KnownFields(_OLLAMA_COMMON | _names("messages tools"), _OLLAMA_REFUSED, _OLLAMA_HARMLESS),
        "/api/generate": KnownFields(
            _OLLAMA_COMMON | _names("prompt images system raw"),
            {**_OLLAMA_REFUSED, **_no("context", "send the conversation to /api/chat")},
            _OLLAMA_HARMLESS,
        ),
    }
)
OLLAMA_OPTIONS = KnownFields(
    honoured=_names(
        "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty repeat_penalty num_predict"
    ),
    refused={name: _OPENAI_REFUSED[name] for name in ("mirostat", "typical_p", "tfs_z", "repeat_last_n")},
    harmless=_names(  # of Ollama's engine: its memory, its threads, its context
        "num_ctx num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock num_thread numa f16_kv logits_all "
        "embedding_only num_keep mirostat_tau mirostat_eta penalize_newline"
    ),
    noun="options.",
)


class FieldCheck:
    """The check of a body's fields by the table of its endpoint. Each unknown field is logged once, up to
    `_MOST_NOTED` of them, since clients choose the names."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def check(self, path: str, body: object) -> None:
        """Raises `InvalidRequest` naming a refused field."""
        known = ENDPOINTS.get(path)
        if known is None or not isinstance(body, Mapping):
            return
        known.check(body)
        self._note(path, known.unknown(body))
        options = body.get("options")
        if path.startswith("/api/") and isinstance(options, Mapping):
            OLLAMA_OPTIONS.check(options)
            self._note(path, OLLAMA_OPTIONS.unknown(options))

    def _note(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            note = (path, name[:60])
            if note not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(note)
                _log.warning("%s: the unknown field %s is ignored, now and later", path, ascii(note[1]))
