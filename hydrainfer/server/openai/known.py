"""The request fields of OpenAI's chats and completions, with those of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from hydrainfer.server.http import EMPTY, KnownFields, Refusal, loose, names, refusals
from hydrainfer.server.openai.fields import ChatFields, CompletionFields
from hydrainfer.server.openai.structured import FORMS, HARMLESS

_OPENAI_HARMLESS = names(  # billing, storage, scheduling hints, other names for what is on already
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "request_id rid cache_prompt guided_decoding_backend spaces_between_special_tokens data_parallel_rank "
    "routed_dp_rank id_slot timings_per_token return_progress mirostat_tau mirostat_eta stream_interval "
    "session_id disagg_prefill_dp_rank ngram_corpus_id return_token_offsets return_mm_kwargs"
)
OPENAI_REFUSED = {
    "tools": Refusal("tools are for /v1/chat/completions"),
    **refusals("functions", "send tools"),
    **refusals("function_call", "send tool_choice"),
    "audio": Refusal("audio output is not supported by this server"),
    "prediction": Refusal("prediction is for /v1/chat/completions"),
    "web_search_options": Refusal("web search is not supported by this server", ()),  # an empty object searches, too
    **refusals("moderation"),
    **refusals("verbosity", "say in the prompt how long an answer should be", ("medium",)),
    "chat_template": Refusal("a request may not set a chat template; it is chosen when the server starts"),
    "chat_template_kwargs": Refusal("chat_template_kwargs is for chats: a text completion has no template"),
    "documents": Refusal("documents are not supported by this server; put them into a message"),
    "mm_processor_kwargs": Refusal(
        "mm_processor_kwargs is for /v1/chat/completions: a text completion has no pictures"
    ),
    **refusals("media_io_kwargs", "send mm_processor_kwargs, whose num_frames and fps choose the frames of a video"),
    **refusals("continue_final_message"),
    "echo": Refusal("echo is for /v1/completions; ask a chat for prompt_logprobs"),
    **refusals("add_special_tokens", "the chat template writes them"),
    **refusals("suffix", "leave it out"),
    **refusals("prompt_embeds input_ids", "send prompt"),
    "use_beam_search": Refusal("beam search is not supported by this server"),
    **refusals("truncate_prompt_tokens truncation_side", "shorten the prompt"),
    **refusals("allowed_token_ids", "use logit_bias"),
    **refusals(
        "logits_processors custom_logit_processor custom_params vllm_xargs repetition_detection samplers watermarking"
    ),
    **refusals("structural_tag", "send response_format or tools"),
    **refusals("regex", "send guided_regex"),
    **refusals("ebnf", "send guided_grammar, in Lark or GBNF"),
    **refusals("grammar", "send guided_grammar"),
    **refusals("json_schema", "send response_format or guided_json", ()),
    **refusals("stop_regex", "send stop"),
    **refusals("no_stop_trim", "send include_stop_str_in_output"),
    **refusals("n_predict max_new_tokens", "send max_tokens", (*EMPTY, -1)),
    **refusals("min_new_tokens", "send min_tokens"),
    "guided_whitespace_pattern": Refusal("guided_whitespace_pattern is not supported: JSON is written on one line"),
    **refusals("return_tokens_as_token_ids", "send return_token_ids"),
    **refusals("logprob_token_ids n_probs post_sampling_probs", "send logprobs and top_logprobs"),
    **refusals(
        "return_hidden_states return_routed_experts return_meta_info return_cached_tokens_details return_prompt_text"
    ),
    **refusals("routed_experts_prompt_start routed_experts_start_len task images_config"),
    **refusals("return_prompt_token_ids", "send return_token_ids"),
    **refusals("thinking_token_budget thinking_budget_tokens"),
    **refusals("thinking reasoning", "send reasoning_effort, or chat_template_kwargs"),
    **refusals("enable_thinking", "send it in chat_template_kwargs", ()),
    **refusals("separate_reasoning stream_reasoning", "include_reasoning leaves the reasoning out", (True,)),
    **refusals("reasoning_format", "start the server with --reasoning-parser", ("auto", "deepseek")),
    **refusals("repeat_penalty", "send repetition_penalty", (*EMPTY, 1)),
    **refusals("repeat_last_n", "repetition_penalty counts the whole text", (-1, 64)),
    **refusals("typical_p typ_p", "send top_p", (*EMPTY, 1)),
    **refusals("tfs_z", "send top_p", (*EMPTY, 1)),
    **refusals("top_n_sigma", "send min_p", (*EMPTY, -1)),
    **refusals("mirostat dry_multiplier xtc_probability dynatemp_range min_keep n_keep n_indent t_max_predict_ms"),
    **refusals("lora_path lora"),
    **refusals("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room session_params"),
    **refusals("extra_key", "send cache_salt"),
    **refusals(
        "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch use_audio_in_video"
    ),
}


_PARTS = loose(
    "type text image_url video_url refusal",
    "image image_pil video fps input_audio file audio_url uuid cache_control min_pixels max_pixels detail",
    image_url=loose("url", "detail format min_pixels max_pixels"),
    video_url=loose("url", "detail format fps"),
)
_FUNCTION = loose("name description parameters", "strict")
_NESTED = {
    "tools": loose("type function", "custom", function=_FUNCTION),
    "tool_choice": loose("type function", "allowed_tools custom mode tools", function=loose("name")),
    "response_format": loose("type json_schema schema", json_schema=loose("name schema", "strict description")),
    "structured_outputs": KnownFields(
        frozenset(FORMS),
        {
            **refusals("structural_tag", "send response_format or tools"),
            **refusals("whitespace_pattern", "JSON is written on one line"),
        },
        frozenset(HARMLESS) | names("_backend _backend_was_auto"),
    ),
    "stream_options": loose("include_usage continuous_usage_stats", "include_obfuscation"),
    "messages": loose(
        "role content name tool_calls tool_call_id reasoning_content reasoning refusal",
        "audio function_call annotations reasoning_details thinking tool_name id type parsed prefix cache_control",
        content=_PARTS,
        tool_calls=loose("id type function", "index custom", function=loose("name arguments", "parsed_arguments")),
    ),
}


def _fields(honoured: frozenset[str]) -> KnownFields:
    refused = {name: refusal for name, refusal in OPENAI_REFUSED.items() if name not in honoured}
    nested = {name: fields for name, fields in _NESTED.items() if name in honoured}
    return KnownFields(honoured, refused, _OPENAI_HARMLESS, nested)


CHAT = _fields(ChatFields.honoured())
TEXT = _fields(CompletionFields.honoured())
