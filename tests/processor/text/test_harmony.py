"""gpt-oss's channels are told apart wherever the text is cut, and grammars hold its answers to one of them."""

import json

import jsonschema
import pytest

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.grammar import Follower, load_grammars
from hydrainfer.processor import FORMATS, calls_grammar, parse_tools
from hydrainfer.processor.text import harmony_grammar
from hydrainfer.processor.text.harmony import HarmonyStream
from hydrainfer.processor.text.reasoning import REASONING, Thinking
from hydrainfer.processor.text.tool_format import format_of
from hydrainfer.processor.text.vocabulary import read_vocabulary
from tests.checkpoints import make_tokenizer
from tests.grammar.conftest import EOS, N_VOCAB
from tests.grammar.test_follow import walk
from tests.processor.text.test_tool_calls import POINT, joined, order, tool
from tests.server.tool_templates import HARMONY, HARMONY_MARKS

pytestmark = pytest.mark.cpu
THOUGHT = "<|channel|>analysis<|message|>Hm <|.\nSo.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
AGAIN = "<|start|>assistant"
CASES = [
    (FINAL + "Four. ", "", "Four. ", []),
    (THOUGHT + FINAL + "Four.<|return|>", "Hm <|.\nSo.", "Four.", []),
    (THOUGHT + CALL.format("f", '{"x": "<|"}'), "Hm <|.\nSo.", "", [("f", '{"x": "<|"}')]),
    (THOUGHT + CALL.format("f", '{"x": 1}').removesuffix("<|call|>"), "Hm <|.\nSo.", "", [("f", '{"x": 1}')]),
    (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", "", [("f", '{"x": 1}')]),
    (THOUGHT + " to=functions.g<|channel|>commentary json<|message|>", "Hm <|.\nSo.", "", [("g", "{}")]),
    (CALL.format("f", "{}") + AGAIN + CALL.format("g", "[]"), "", "", [("f", "{}"), ("g", "[]")]),
    ("<|channel|>commentary<|message|>I look.<|end|>" + AGAIN + CALL.format("f", "{}"), "", "I look.", [("f", "{}")]),
    ("<|channel|>commentary<|message|>One.<|end|>" + AGAIN + FINAL + "Two.", "", "One.\nTwo.", []),
    (CALL.format("f", "{}") + AGAIN + THOUGHT + FINAL + "4", "Hm <|.\nSo.", "4", [("f", "{}")]),
    (THOUGHT + THOUGHT + FINAL + "4", "Hm <|.\nSo.\nHm <|.\nSo.", "4", []),
    (THOUGHT + FINAL + CALL.format("f", "{}"), "Hm <|.\nSo.", "", [("f", "{}")]),
    (CALL.format("other", "{}"), "", CALL.format("other", "{}"), []),
    (CALL.format("other", "{}") + AGAIN + FINAL + "4", "", CALL.format("other", "{}") + "\n4", []),
    ("<|channel|>analysis<|message|>cut off <|en", "cut off <|en", "", []),
    ("<|channel|>anal", "", "", []),
    (" Four <|channel|>final<|message|>4", "", " Four \n4", []),
    ("<|chan", "", "<|chan", []),
    ("t", "", "t", []),
    ("", "", "", []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_wherever_it_is_cut(text, reasoning, content, calls):
    cuts = [[text], list(text), [*text, ""], *([text[:i], text[i:]] for i in range(1, len(text)))]
    orders = set()
    for pieces in filter(None, cuts):
        stream = HarmonyStream(["f", "g", "content"])
        said = [d for i, p in enumerate(pieces) for d in stream.push(p, last=i == len(pieces) - 1)]
        orders.add(order(said))
        assert ("".join(s.reasoning for s in said), *joined(said)) == (reasoning, content, calls), pieces
        assert stream.n_calls == len(calls)
    assert len(orders) <= 1, orders


def test_harmony_reasoning_is_streamed_while_it_is_written():
    stream = HarmonyStream(["content"])
    text = (
        THOUGHT + "<|channel|>commentary<|message|>I look.<|end|>" + AGAIN + CALL.format("content", '{"x": "one two"}')
    )
    said = [d for c in text for d in stream.push(c)]
    assert sum(bool(s.reasoning) for s in said) > 6 and sum(bool(s.content) for s in said) > 5
    assert sum(len(s.calls) for s in said) > 10


def test_a_head_that_does_not_end_is_text():
    stream = HarmonyStream()
    text = "<|start|>" + "so " * 1000
    said = [d for i in range(0, len(text), 50) for d in stream.push(text[i : i + 50])]
    assert "".join(s.content for s in said) == text and len(said) > 20


def test_one_call_only():
    stream = HarmonyStream(["f", "g"], parallel=False)
    text = CALL.format("f", "{}") + AGAIN + CALL.format("g", "{}")
    assert joined(stream.push(text, last=True)) == ("", [("f", "{}")]) and stream.n_calls == 2


def test_harmony_is_recognised_by_its_template():
    assert format_of(HARMONY).name == "harmony"
    thinking = Thinking.after("…<|end|><|start|>assistant", REASONING["harmony"])
    assert thinking is not None and not thinking.begun
    assert Thinking.after("…<|start|>assistant" + FINAL, REASONING["harmony"]) is None


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens(list(HARMONY_MARKS))
    path = tmp_path_factory.mktemp("harmony")
    tokenizer.save(str(path / "tokenizer.json"))
    grammars = load_grammars(path, N_VOCAB, (EOS,))
    yield tokenizer, grammars
    grammars.close()


@pytest.mark.parametrize(
    ("text", "behind"),
    [(THOUGHT + FINAL + "four words are said", FINAL), (THOUGHT + CALL.format("f", "{}"), "<|channel|>comm")],
)
def test_reasoning_is_counted(words, text, behind):
    tokenizer, _ = words
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    n = Thinking(REASONING["harmony"], False).n_tokens(ids, read_vocabulary(tokenizer, N_VOCAB))
    reasoning = text[: text.index(behind)]
    assert n == len(tokenizer.encode(reasoning, add_special_tokens=False).ids) < len(ids)


def answers(words, grammar, names=(), n=25):
    """What walks along a grammar to its end say: (reasoning, content, calls)."""
    tokenizer, grammars = words
    for seed in range(n):
        ids = walk(Follower(grammars), grammar, seed, n_most=400)
        if ids[-1] == EOS:
            text = tokenizer.decode(ids[:-1], skip_special_tokens=False)
            said = HarmonyStream(names).push(text, last=True)
            yield "".join(s.reasoning for s in said), *joined(said)


FORMS = [
    (Grammar("json", json.dumps(POINT)), lambda text: jsonschema.validate(json.loads(text), POINT)),
    (Grammar("regex", "(a/b|[0-9]{2}\\n)"), lambda text: text == "a/b" or int(text)),
    (Grammar("choice", '["yes", "no \\"x\\""]'), lambda text: ["yes", 'no "x"'].index(text)),
    (Grammar("lark", 'start: "x" n "}"\nn: /[0-9]+/'), lambda text: int(text[1:-1])),
]


@pytest.mark.parametrize(("form", "check"), FORMS, ids=[form.kind for form, _ in FORMS])
def test_a_form_holds_the_final_message(words, form, check):
    found = list(answers(words, harmony_grammar(form)))
    assert len(found) > 3
    for _, content, calls in found:
        assert not calls
        check(content)


def test_required_calls_and_calls_beside_a_form(words):
    tools = parse_tools([tool("f", POINT), tool("g")], "required")
    found = [calls for _, content, calls in answers(words, calls_grammar(tools, FORMATS["harmony"]), ["f", "g"])]
    assert found and all(len(calls) == 1 for calls in found) and {calls[0][0] for calls in found} == {"f", "g"}
    for ((name, arguments),) in found:
        jsonschema.validate(json.loads(arguments), tools.schemas[name])
    either = calls_grammar(parse_tools([tool("g")]), FORMATS["harmony"], Grammar("choice", '["yes"]'))
    assert {(content, *calls) for _, content, calls in answers(words, either, ["g"])} == {("yes",), ("", ("g", "{}"))}


def test_gbnf_is_refused_and_required_calls_beside_a_form():
    with pytest.raises(InvalidRequest, match="Lark"):
        harmony_grammar(Grammar("lark", 'root ::= "x"'))
    with pytest.raises(InvalidRequest, match="no other form"):
        calls_grammar(parse_tools([tool("g")], "required"), FORMATS["harmony"], Grammar("json", "{}"))
