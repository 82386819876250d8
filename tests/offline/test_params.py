"""Sampling parameters as vLLM's users write them: forms of answers, bad words, and what is not to be had."""

from __future__ import annotations

import json

import msgspec
import pytest

import hydrainfer
from hydrainfer import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams, core
from hydrainfer.offline.params import plain
from tests.checkpoints import make_llava
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
CHAT = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"))
    with LLM(path, threads=1, dtype="float32", native_kernels=False, log_level="warning") as llm:
        yield llm


class Answer:
    """As a Pydantic model shows itself."""

    @staticmethod
    def model_json_schema():
        return SCHEMA


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"json": SCHEMA}, ("json", SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, ("json", SCHEMA)),
        ({"json": Answer}, ("json", SCHEMA)),
        ({"json_object": True}, ("json", {"type": "object"})),
        ({"choice": ("yes", "no")}, ("choice", ["yes", "no"])),
        ({"regex": "[0-9]{3}"}, ("regex", "[0-9]{3}")),
        ({"grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_forms_become_grammars(form, wanted):
    for given in (form, StructuredOutputsParams(**form)):
        for name in ("structured_outputs", "guided_decoding"):
            grammar = plain(SamplingParams(**{name: given}, max_tokens=5)).grammar
            text = json.loads(grammar.text) if grammar.kind in ("json", "choice") else grammar.text
            assert (grammar.kind, text) == wanted


def test_the_rest_is_what_requests_carry():
    given = SamplingParams(max_tokens=5, temperature=0.5, seed=3, stop="x", bad_words=["a", "b"], detokenize=False)
    carried = plain(given)
    assert type(carried) is core.SamplingParams
    assert carried == core.SamplingParams(max_tokens=5, temperature=0.5, seed=3, stop=("x",), bad_words=("a", "b"))
    assert plain(carried) is carried
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(carried), type=core.SamplingParams) == carried


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"logits_processors": [len]}, "logits_processors is not to be had here: no code of a caller"),
        ({"allowed_token_ids": [1]}, "use logit_bias"),
        ({"use_beam_search": True}, "beam search is not supported"),
        ({"best_of": 3}, "use n"),
        ({"truncate_prompt_tokens": 1}, "shorten the prompt"),
        ({"thinking_token_budget": 0}, "not supported"),
        ({"allowed_token_ids": []}, "use logit_bias"),
        ({"structured_outputs": {"choice": "Positive"}}, "must be a list of texts"),
        ({"structured_outputs": {}}, "structured_outputs has no form; send one of json, regex"),
        ({"structured_outputs": {"choice": 3}}, "must be a list of texts"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "is not supported"),
        ({"spaces_between_special_tokens": False}, "leave it out"),
        ({"output_kind": "delta"}, "must be a RequestOutputKind"),
        ({"detokenize": "no"}, "detokenize must be True or False"),
        ({"bad_words": [""]}, "bad_words must not hold an empty word"),
        ({"bad_words": [5]}, "bad_words must hold strings"),
        ({"structured_outputs": "json"}, "must be a StructuredOutputsParams or a dict"),
        ({"structured_outputs": {"json": SCHEMA}, "guided_decoding": {"regex": "a"}}, "one form"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "one form"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"choice": []}}, "must be a list of texts"),
    ],
)
def test_what_is_not_to_be_had_is_refused_in_one_line(given, says):
    with pytest.raises(InvalidRequest) as e:
        plain(SamplingParams(**given))
    assert says in e.value.message and "\n" not in e.value.message


def test_harmless_ones_are_taken():
    unset = {"detokenize": None, "skip_special_tokens": None, "logits_processors": [], "extra_args": {}}
    given = SamplingParams(best_of=1, use_beam_search=False, length_penalty=1.0, **unset)
    assert plain(given) == core.SamplingParams()
    assert repr(given).startswith("SamplingParams(") and "detokenize" not in repr(SamplingParams())


def test_answers_follow_their_forms_and_hold_no_bad_words(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    form = msgspec.structs.replace(greedy, structured_outputs={"json": SCHEMA})
    (plainly,) = llm.chat(CHAT, greedy, use_tqdm=False)
    (formed,) = llm.chat(CHAT, form, use_tqdm=False)
    assert json.loads(formed.outputs[0].text)["a"] in (1, 22)
    ids = plainly.outputs[0].token_ids
    tokenizer = llm.get_tokenizer()
    for n in (1, 3):  # the answer's first token, and the third when the two before it have come
        words = [tokenizer.decode(ids[:n])]
        (without,) = llm.chat(CHAT, msgspec.structs.replace(greedy, bad_words=words), use_tqdm=False)
        found = without.outputs[0].token_ids
        assert found[: n - 1] == ids[: n - 1] or n == 1
        spelled = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (words[0], f" {words[0]}")]
        for bad in spelled:
            assert all(found[i : i + len(bad)] != bad for i in range(len(found)))


def test_the_wrong_one_of_a_batch_is_named(llm):
    for prompts, place in ((["a", "x " * 9000], "prompts.1: "), ([{"prompt": "x " * 9000}, "a"], "prompts.0: ")):
        with pytest.raises(InvalidRequest, match=f"^{place}This model's maximum context length"):
            llm.generate(prompts, use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^chats.1: messages\.0\.role must be"):
        llm.chat([CHAT, [{"role": "usr", "content": "hi"}]], use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^messages\.0\.role must be"):
        llm.chat([{"role": "usr", "content": "hi"}], use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"as the prompt$"):
        llm.generate(prompt_token_ids=[[1, 2, 3]])


def test_the_prefix_cache_can_be_reset(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    for reset, reused in ((False, True), (True, False)):
        llm.chat(CHAT, greedy, use_tqdm=False)
        assert not reset or llm.reset_prefix_cache() is True
        (again,) = llm.chat(CHAT, greedy, use_tqdm=False)
        assert bool(again.num_cached_tokens) is reused


def test_text_log_probabilities_and_cached_tokens(llm):
    (first,) = llm.chat(CHAT, SamplingParams(max_tokens=4, logprobs=0, temperature=0.0), use_tqdm=False)
    (again,) = llm.chat(CHAT, SamplingParams(max_tokens=4, detokenize=False, temperature=0.0), use_tqdm=False)
    assert again.outputs[0].text == "" and again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens >= first.num_cached_tokens and again.finished
    assert first.outputs[0].cumulative_logprob == sum(one.logprob for one in first.outputs[0].logprobs) < 0
    assert again.outputs[0].cumulative_logprob is None
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(first.prompt_token_ids) and parts(llm).caches.check(idle=True) is None


def test_token_ids_of_bad_words_are_the_processors_alone(llm):
    (out,) = llm.chat(CHAT, SamplingParams(max_tokens=2, bad_ids=((-1,), 5)), use_tqdm=False)
    assert len(out.outputs[0].token_ids) <= 2
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be a dict"):
        llm.chat(CHAT, chat_template_kwargs=5)
    (out,) = llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False, mm_processor_kwargs=None, priority=0)
    assert out.finished


def test_methods_of_vllm_that_are_not_here_say_so(llm):
    for name in ("encode", "beam_search", "sleep", "collective_rpc"):
        with pytest.raises(AttributeError, match="is vLLM's and not to be had here"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="has no attribute 'chatt'"):
        llm.chatt  # noqa: B018


def test_the_package_shows_what_it_has():
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "HydraError"} <= set(dir(hydrainfer))
    assert all(getattr(hydrainfer, name) is not None for name in dir(hydrainfer))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        hydrainfer.LMM  # noqa: B018
