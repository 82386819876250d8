"""Every documented request field of the protocols is honoured, refused by name, or harmless; others are refused, or
logged once."""

import logging
import random
from typing import Any, get_args

import anthropic.types as anthropic_types
import ollama
import openai.types.chat as openai_chat
import openai.types.responses as openai_responses
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessages
from anthropic.types.message_create_params import MessageCreateParamsBase as Messages
from ollama import Options
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
from openai.types.completion_create_params import CompletionCreateParamsBase as Text
from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

from hydrainfer.core import InvalidRequest
from hydrainfer.server.http.known import FieldCheck, KnownFields
from hydrainfer.server.http.protocol import Protocols
from hydrainfer.server.openai.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from hydrainfer.server.protocols import PROTOCOLS
from tests.server.test_ollama import lines

pytestmark = pytest.mark.cpu
ENDPOINTS = Protocols(PROTOCOLS).known

VLLM = """
frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p
user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids ignore_eos min_tokens
include_stop_str_in_output skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval response_format
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag
logits_processors media_io_kwargs mm_processor_kwargs chat_template_kwargs documents chat_template
"""
VLLM_CHAT = """
messages model top_logprobs max_completion_tokens tools tool_choice reasoning_effort thinking_token_budget
include_reasoning parallel_tool_calls add_generation_prompt continue_final_message return_prompt_text return_mm_kwargs
"""
VLLM_TEXT = "prompt suffix best_of prompt_embeds"
SGLANG = """
regex ebnf stop_regex no_stop_trim lora_path session_params separate_reasoning stream_reasoning max_dynamic_patch
min_dynamic_patch use_audio_in_video images_config custom_logit_processor custom_params input_ids rid extra_key
ngram_corpus_id bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_prompt_token_ids return_meta_info task continue_final_message json_schema min_new_tokens max_new_tokens
"""
LLAMA_CPP = """
repeat_penalty repeat_last_n typical_p mirostat mirostat_tau mirostat_eta dry_multiplier xtc_probability
dynatemp_range top_n_sigma n_probs min_keep n_keep n_indent t_max_predict_ms id_slot cache_prompt samplers grammar
json_schema return_progress timings_per_token post_sampling_probs lora reasoning_format n_predict
"""
TOKENIZE = """
model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template
chat_template_kwargs mm_processor_kwargs media_io_kwargs tools
"""
FOREIGN = f"{VLLM} {SGLANG} {LLAMA_CPP}".split()
DOCUMENTED = {
    "/v1/chat/completions": [*Chat.__annotations__, *FOREIGN, *VLLM_CHAT.split(), "stream"],
    "/v1/completions": [*Text.__annotations__, *FOREIGN, *VLLM_TEXT.split(), "stream"],
    "/v1/responses": [*Responses.__annotations__, "stream"],
    "/v1/messages": [
        *Messages.__annotations__,
        *BetaMessages.__annotations__,
        "stream",
        "temperature",
        "top_p",
        "top_k",
    ],
    "/api/chat": [*ollama._types.ChatRequest.model_fields, "truncate", "shift"],
    "/api/generate": [*ollama._types.GenerateRequest.model_fields, "truncate", "shift"],
    "/tokenize": TOKENIZE.split(),
    "/detokenize": ["model", "tokens"],
}


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_documented_field_is_in_the_table(path):
    assert ENDPOINTS[path].unknown(dict.fromkeys(DOCUMENTED[path])) == []


def test_every_option_of_ollama_is_in_the_table():
    assert ENDPOINTS["/api/chat"].nested["options"].unknown(dict.fromkeys([*Options.model_fields, "min_p"])) == []


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_field_is_in_one_class_only(path):
    known = ENDPOINTS[path]
    assert not known.honoured & known.harmless and not (known.honoured | known.harmless) & known.refused.keys()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", ChatFields),
        ("/v1/completions", CompletionFields),
        ("/tokenize", TokenizeFields),
        ("/detokenize", DetokenizeFields),
    ],
)
def test_fields_that_the_table_calls_honoured_are_read(path, kind):
    assert ENDPOINTS[path].honoured == set(kind.model_fields)


LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_refused_fields_are_named_and_their_neutral_values_change_nothing(server, path):
    for name, refusal in ENDPOINTS[path].refused.items():
        response = server.post(path, **LEAST[path], **{name: "something"})
        assert response.status_code == 400 and name.split("_")[0] in response.text, name
        for value in (None, *refusal.neutral):
            assert server.post(path, **LEAST[path], **{name: value}).status_code == 200, (name, value)
    for name in ENDPOINTS[path].harmless:
        assert server.post(path, **LEAST[path], **{name: "x"}).status_code == 200, name


def test_options_of_ollama_that_would_change_the_answer_are_refused(server):
    for name, value in {"mirostat": 2, "typical_p": 0.5, "tfs_z": 0.5, "repeat_last_n": 8}.items():
        response = server.post("/api/chat", **LEAST["/api/chat"], options={name: value})
        assert response.status_code == 400 and name in response.text
    for name, value in {"mirostat": 0, "typical_p": 1.0, "repeat_last_n": 64, "num_ctx": 8192, "num_gpu": 1}.items():
        assert server.post("/api/chat", **LEAST["/api/chat"], options={name: value}).status_code == 200


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path.startswith("/v1/")])
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(path):
    """200 names in all, each with one letter left out, doubled, turned with its neighbour, or another."""
    rng, check = random.Random(path), FieldCheck(ENDPOINTS)
    known = ENDPOINTS[path]
    taken = {*known.honoured, *known.refused, *known.harmless}
    meant = sorted(name for name in known.honoured if len(name) > 3)
    right, n = 0, 0
    while n < 50:
        name = rng.choice(meant)
        i, letter = rng.randrange(1, len(name) - 1), rng.choice("abcdefghijklmnopqrstuvwxyz")
        turned = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
        wrong = rng.choice([name[:i] + name[i + 1 :], name[:i] + name[i:], turned, name[:i] + letter + name[i + 1 :]])
        if wrong in taken:
            continue
        n += 1
        with pytest.raises(InvalidRequest) as e:
            check.check(path, {wrong: 1})
        assert e.value.param == wrong and repr(wrong) in e.value.message
        right += e.value.message.endswith(f"did you mean {name}?")
    assert right >= 48, f"{right} of {n}"


SCHEMA = {"type": "object"}
ASKED = {"role": "user", "content": "hi"}
MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/responses", {"input": "hi", "text": {"fromat": {}}}, "text.fromat", "text.format"),
    ("/v1/responses", {"input": "hi", "text": {"format": {"shema": {}}}}, "text.format.shema", "text.format.schema"),
    ("/v1/responses", {"tools": [{}, {"paramaters": {}}]}, "tools.1.paramaters", "tools.1.parameters"),
    ("/v1/responses", {"input": [{"cotnent": "hi"}]}, "input.0.cotnent", "input.0.content"),
    ("/v1/messages", {"output_config": {"fromat": {}}}, "output_config.fromat", "output_config.format"),
    ("/v1/messages", {"thinking": {"tpye": "enabled"}}, "thinking.tpye", "thinking.type"),
    ("/v1/messages", {"tools": [{"input_schma": {}}]}, "tools.0.input_schma", "tools.0.input_schema"),
    (
        "/v1/chat/completions",
        {"tools": [{"function": {"paramaters": {}}}]},
        "tools.0.function.paramaters",
        "tools.0.function.parameters",
    ),
    (
        "/v1/chat/completions",
        {"stream_options": {"include_usgae": True}},
        "stream_options.include_usgae",
        "stream_options.include_usage",
    ),
    (
        "/v1/chat/completions",
        {"messages": [ASKED, {"role": "assistant", "cotnent": "x"}, ASKED]},
        "messages.1.cotnent",
        "messages.1.content",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_ulr": "x"}]}]},
        "messages.0.content.0.image_ulr",
        "messages.0.content.0.image_url",
    ),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schmea": SCHEMA}}},
        "response_format.json_schema.schmea",
        "response_format.json_schema.schema",
    ),
    ("/v1/completions", {"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "structured_outputs.json"),
]


@pytest.mark.parametrize(("path", "body", "wrong", "meant"), MISSPELT, ids=[case[2] for case in MISSPELT])
def test_a_misspelt_field_inside_another_is_refused(server, path, body, wrong, meant):
    """It would give an answer without the form, tools or texts that were asked for."""
    answer = server.post(path, **LEAST[path] | body)
    assert answer.status_code == 400 and f"unknown field {wrong!r}; did you mean {meant}?" in answer.text
    FieldCheck(ENDPOINTS, refuses=False).check(path, LEAST[path] | body)


def test_fields_inside_others_that_nobody_here_knows_are_let_pass(server):
    messages = [
        {**ASKED, "cache_control": {"type": "ephemeral"}, "zzz": 1},
        {"role": "assistant", "content": "x", "reasoning_details": [], "contents": "beside the right one"},
        ASKED,
    ]
    answer = server.post("/v1/chat/completions", messages=messages, response_format={"type": "text", "zzz": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "place", "kinds"),
    [
        ("/v1/chat/completions", ("messages",), openai_chat.ChatCompletionMessageParam),
        ("/v1/chat/completions", ("messages", "content"), openai_chat.ChatCompletionContentPartParam),
        ("/v1/chat/completions", ("tools",), openai_chat.ChatCompletionToolUnionParam),
        ("/v1/responses", ("input",), openai_responses.ResponseInputItemParam),
        ("/v1/responses", ("tools",), openai_responses.ToolParam),
        ("/v1/responses", ("text", "format"), openai_responses.ResponseFormatTextConfigParam),
        ("/v1/messages", ("messages", "content"), anthropic_types.ContentBlockParam),
        ("/v1/messages", ("tools",), anthropic_types.ToolUnionParam),
    ],
)
def test_no_documented_field_inside_another_counts_as_misspelt(path, place, kinds):
    known = ENDPOINTS[path]
    for name in place:
        known = known.nested[name]
    for kind in get_args(kinds):
        assert known.unknown(dict.fromkeys(getattr(kind, "__annotations__", ()))) == [], kind


def test_looking_into_a_large_body_is_bounded():
    wrong = {"messages": [{"role": "user", **{f"conte{i}": 1 for i in range(200)}} for _ in range(20_000)]}
    compared, nearest = [], KnownFields.nearest
    with pytest.MonkeyPatch.context() as m:
        m.setattr(KnownFields, "nearest", lambda *args: compared.append(args) or nearest(*args))
        with pytest.raises(InvalidRequest):
            FieldCheck(ENDPOINTS).check("/v1/chat/completions", wrong)
        for one in wrong["messages"]:
            one["content"] = "x"
        FieldCheck(ENDPOINTS).check("/v1/chat/completions", wrong)
    assert len(compared) < 10_000


def test_a_schema_beside_another_type_is_refused(server):
    for kind in ("json_object", "text"):
        form = {"type": kind, "json_schema": {"name": "x", "schema": SCHEMA}}
        answer = server.post("/v1/chat/completions", messages=[ASKED], response_format=form)
        assert answer.status_code == 400 and "json_schema is for the type json_schema" in answer.text


def test_a_name_that_is_like_none_is_refused_without_a_guess(server):
    for path in ("/v1/chat/completions", "/v1/messages"):
        response = server.post(path, **LEAST[path], zzz=5)
        assert response.status_code == 400
        assert "unknown field 'zzz'; remove it, or start the server with --unknown-fields ignore" in response.text


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_unknown_field_that_is_let_pass_is_logged_once(start, path, caplog):
    server = start(refuses_unknown=False)
    name = f"field_of_{path.replace('/', '_')}\n"
    with caplog.at_level(logging.WARNING, "hydrainfer.server.known"):
        for _ in range(3):
            assert server.post(path, **LEAST[path], **{name: 5}).status_code == 200
    (line,) = caplog.messages
    assert path in line and name.strip() in line and "\n" not in line


def test_names_of_unknown_fields_take_little_memory_and_few_lines(caplog):
    check = FieldCheck(ENDPOINTS, refuses=False)
    with caplog.at_level(logging.WARNING, "hydrainfer.server.known"):
        for i in range(1000):
            check.check("/v1/completions", {f"{i} {'x' * 5000}": 1, "prompt": "x"})
    assert len(caplog.messages) == len(check._noted) <= 256 and max(map(len, caplog.messages)) < 200
    assert sum(len(name) for _, name in check._noted) < 1 << 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "raw"])
def test_ollamas_log_probabilities(server, path, stream):
    raw = {"raw": True} if path == "raw" else {}
    path = "/api/generate" if path == "raw" else path
    body = {**LEAST[path], **raw, "stream": stream}
    plain = server.post(path, **body)
    response = server.post(path, **body, logprobs=True, top_logprobs=2)
    said = lines(response) if stream else [response.json()]
    tokens = [entry for line in said for entry in line.get("logprobs", [])]
    assert len(tokens) == said[-1]["eval_count"] and "logprobs" not in plain.text
    assert all(len(t["top_logprobs"]) == 2 and t["logprob"] <= 0 and isinstance(t["token"], str) for t in tokens)


@pytest.mark.parametrize("served", ["llava:latest", "llava", "llava:7b"])
def test_a_listed_name_is_found_with_and_without_its_tag(start, served):
    server = start(model_names=(served,))
    (listed,) = server.http.get("/api/tags").json()["models"]
    bare = served.removesuffix(":latest")
    for name in {listed["name"], f"{listed['name']}:latest", bare}:
        for path in ("/api/chat", "/api/generate"):
            assert server.post(path, **LEAST[path], model=name).status_code == 200, name
        assert server.post("/api/show", model=name).status_code == 200
    assert server.post("/api/chat", **LEAST["/api/chat"], model="mistral:latest").status_code == 404


def test_least_top_p_is_the_likeliest_token(server):
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert server.post(path, **LEAST[path], top_p=0).status_code == 200
        assert 0 < server.engine.submitted[-1].sampling.top_p < 1e-6
    assert server.post("/api/chat", **LEAST["/api/chat"], options={"top_p": 0}).status_code == 200
