"""Calls are found in every format, wherever the text is cut."""

import json

import jsonschema
import pytest

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.grammar import Follower
from hydrainfer.processor import FORMATS, Tools, calls_grammar, parse_tools
from hydrainfer.processor.text.tool_blocks import call_stream
from hydrainfer.processor.text.tool_format import HARMONY, format_of
from tests.grammar.conftest import EOS, grammars, make_grammars, tokenizer  # noqa: F401
from tests.grammar.test_follow import walk

pytestmark = pytest.mark.cpu
A, B = ("f", '{"x": "a}\\"{"}'), ("g", '{"y": [1, {"z": null}]}')
H = [f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in (A, B)]
L = [f'{{"name": "{n}", "parameters": {a}}}' for n, a in (A, B)]
M = [f'{{"name": "{n}", "arguments": {a}}}' for n, a in (A, B)]
XML = "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
GEMMA = "<start_function_call>call:{}<end_function_call>"
OTHER = '{"name": "other", "arguments": {}}'

TEXTS = [
    ("hermes", H[0], "", [A]),
    ("hermes", f"Let me look. \n\n{H[0]}\n{H[1]}", "Let me look.", [A, B]),
    ("hermes", f"{H[0]}\nThat is all.", "\nThat is all.", [A]),
    ("hermes", f"One. {H[0]} Two. {H[1]} Three. ", "One. Two. Three.", [A, B]),
    ("hermes", "No call <tool at all.  \n", "No call <tool at all.  \n", []),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    (
        "hermes",
        '<tool_call>\n{"name": "other", "arguments": {}}',
        '<tool_call>\n{"name": "other", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>\n{"name": "f", oh', '<tool_call>\n{"name": "f", oh', []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": "cut', "", [("f", '{"x": "cut')]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3_json", L[0], "", [A]),
    ("llama3_json", f"\n {L[0]}; {L[1]}", "", [A, B]),
    ("llama3_json", f"<|python_tag|>{L[0]}", "", [A]),
    ("llama3_json", f'{{"type": "function", {L[0][1:]}', "", [A]),
    ("llama3_json", '{"answer": 4} ', '{"answer": 4} ', []),
    ("llama3_json", f"It is {L[0]}", f"It is {L[0]}", []),
    ("mistral", f"[TOOL_CALLS] [{M[0]}, {M[1]}]", "", [A, B]),
    ("mistral", f"[TOOL_CALLS][{M[0]}]", "", [A]),
    ("mistral", "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
    (
        "mistral_args",
        '[TOOL_CALLS]f[ARGS]{"x": "a}[ARGS]"}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"x": "a}[ARGS]"}'), ("g", "{}")],
    ),
    ("mistral_args", 'So: [TOOL_CALLS]f[ARGS]{"x": 1} done', "So: done", [("f", '{"x": 1}')]),
    ("mistral_args", "[TOOL_CALLS]f[ARGS]{x}", "[TOOL_CALLS]f[ARGS]{x}", []),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"x": "cut', '[TOOL_CALLS]f[ARGS]{"x": "cut', []),
    ("qwen3_coder", XML.format(name="f", key="x", value="a\nb </x>"), "", [("f", '{"x": "a\\nb </x>"}')]),
    ("qwen3_coder", "Hm.\n" + XML.format(name="g", key="y", value="[1, true]"), "Hm.", [("g", '{"y": [1, true]}')]),
    ("qwen3_coder", XML.format(name="f", key="s", value="12"), "", [("f", '{"s": "12"}')]),
    ("qwen3_coder", XML.format(name="o", key="s", value="1"), XML.format(name="o", key="s", value="1"), []),
    ("qwen3_coder", "<tool_call>f</tool_call>", "<tool_call>f</tool_call>", []),
    ("qwen3_coder", XML.format(name="f", key="x", value="NaN"), "", [("f", '{"x": "NaN"}')]),
    (
        "functiongemma",
        GEMMA.format("f{x:<escape>a: {b}<escape>,y:{z:[1,null]}}"),
        "",
        [("f", '{"x": "a: {b}", "y": {"z": [1, null]}}')],
    ),
    ("functiongemma", GEMMA.format("f{}") + " so", " so", [("f", "{}")]),
    ("functiongemma", GEMMA.format("f{x:y}"), GEMMA.format("f{x:y}"), []),
    (
        "pythonic",
        "[f(x='a]', y=-1), g(y=[1, None, true, {'z': 2.5}])]",
        "",
        [("f", '{"x": "a]", "y": -1}'), ("g", '{"y": [1, null, true, {"z": 2.5}]}')],
    ),
    ("pythonic", "Look:\n```tool_code\nf(x=1)\n```", "Look:", [("f", '{"x": 1}')]),
    ("pythonic", "[1, 2] are two", "[1, 2] are two", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(x=open('y'))] [", "[f(x=open('y'))] [", []),
    ("pythonic", "[f(x=1e999)]", "[f(x=1e999)]", []),
]
SCHEMAS = {"f": {"properties": {"s": {"type": "string"}}}, "g": {}}


def order(said):
    """What comes one after the other: thoughts, texts, calls."""
    kinds = []
    for piece in said:
        kinds += ["thought"] * bool(piece.reasoning) + ["text"] * bool(piece.content)
        kinds += [call.name for call in piece.calls if call.name]
    return tuple(k for k, before in zip(kinds, [None, *kinds]) if k != before or k not in ("thought", "text"))


def joined(deltas):
    """(content, [(name, arguments)])"""
    content, calls = "", []
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            if call.index == len(calls):
                assert call.id and call.name
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.name is None
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls


@pytest.mark.parametrize(("how", "text", "content", "calls"), TEXTS, ids=[f"{t[0]}-{t[1][:40]}" for t in TEXTS])
def test_wherever_it_is_cut(how, text, content, calls):
    cuts, orders = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))], set()
    for pieces in cuts:
        stream = call_stream(FORMATS[how], SCHEMAS)
        said = [d for i, p in enumerate(pieces) for d in stream.push(p, last=i == len(pieces) - 1)]
        assert joined(said) == (content, calls), pieces
        assert stream.n_calls == len(calls)
        orders.add(order(said))
    assert len(orders) == 1, orders


CUT = [  # answers that reached their length, and the text and calls that are left
    ("hermes", "<tool_call", "", []),
    ("hermes", "Let me see. <tool_call>", "Let me see.", []),
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "argu', "Let me see.", []),
    ("hermes", f"{H[0]}\n<tool_call", "", [A]),
    ("hermes", f'{H[0]}\n<tool_call>\n{{"na', "", [A]),
    ("hermes", f"{H[0]}\n</tool", "\n</tool", [A]),
    ("hermes", f"{H[0][:-4]}", "", [A]),
    ("hermes", "2 <", "2 <", []),
    ("hermes", '{"name": "f", "argu', '{"name": "f", "argu', []),
    ("llama3_json", '{"name": "f", "par', "", []),
    ("llama3_json", '{"answer": [4, 5', '{"answer": [4, 5', []),
    ("llama3_json", f'{L[0]}; {{"name": "g', "", [A]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "argum', "", []),
    ("mistral", "[1, 2] and [TOOL", "[1, 2] and", []),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"x": "cut', "", []),
    ("qwen3_coder", "So: <tool_call>\n<function=f>\n<parameter=x>\n1", "So:", []),
    ("functiongemma", "<start_function_call>call:f{x:1", "", []),
    ("pythonic", '[f(x="a", y', "", []),
    ("pythonic", "[1, 2, 3", "[1, 2, 3", []),
]


@pytest.mark.parametrize(("how", "text", "content", "calls"), CUT, ids=[f"{t[0]}-{t[1][:40]}" for t in CUT])
def test_marks_of_a_call_that_was_cut_off_are_no_text(how, text, content, calls):
    for pieces in ([text], list(text)):
        stream = call_stream(FORMATS[how], SCHEMAS)
        said = [
            d for i, p in enumerate(pieces) for d in stream.push(p, last=i == len(pieces) - 1, cut=i == len(pieces) - 1)
        ]
        assert joined(said) == (content, calls), pieces


@pytest.mark.parametrize("how", [how for how in FORMATS if how != HARMONY])
def test_required_calls_leave_no_text_wherever_they_are_cut(how):
    form = FORMATS[how]
    text = f'{form.trigger}{{"name": "f", "arguments": {{"x": "a"}}}}'
    for i in range(len(text)):
        stream = call_stream(form, SCHEMAS, forced=True, required=True)
        content, _ = joined([*stream.push(text[:i]), *stream.push("", last=True, cut=True)])
        assert not content


def test_arguments_come_while_they_are_written():
    stream = call_stream(FORMATS["hermes"], SCHEMAS)
    said = [d.calls for c in H[0] for d in stream.push(c)]
    assert sum(map(len, said)) > 10, "one piece per piece of text"


def test_one_call_only():
    stream = call_stream(FORMATS["hermes"], SCHEMAS, parallel=False)
    assert joined(stream.push("\n".join(H), last=True)) == ("", [A])


def test_ids_are_what_templates_take():
    stream = call_stream(FORMATS["mistral"], SCHEMAS)
    ids = [c.id for d in stream.push(f"[TOOL_CALLS] [{M[0]}, {M[1]}]", last=True) for c in d.calls if c.id]
    assert len(set(ids)) == 2 and all(len(i) == 9 and i.isalnum() for i in ids)


POINT = {
    "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/P"}, "s": {"type": "string", "maxLength": 3}},
    "required": ["p"],
    "additionalProperties": False,
}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


@pytest.mark.parametrize("how", [how for how in FORMATS if how != HARMONY])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_calls(grammars, tokenizer, how, parallel):  # noqa: F811
    tools = parse_tools([tool("f", POINT), tool("g")], "required", parallel)
    grammar, n_calls = calls_grammar(tools, FORMATS[how]), set()
    for seed in range(12):
        ids = walk(Follower(grammars), grammar, seed, n_most=600)
        if ids[-1] != EOS:
            continue
        stream = call_stream(FORMATS[how], tools.schemas, forced=True, parallel=parallel)
        content, calls = joined(stream.push(tokenizer.decode(ids[:-1]), last=True))
        assert not content and calls
        n_calls.add(len(calls))
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools.schemas[name])
    assert n_calls and (parallel or n_calls == {1})


def test_calls_or_an_answer_of_some_form(grammars, tokenizer):  # noqa: F811
    tools, hermes = parse_tools([tool("g")]), FORMATS["hermes"]
    grammar, found = calls_grammar(tools, hermes, Grammar("json", '{"const": {"a": 1}}')), set()
    for seed in range(30):
        ids = walk(Follower(grammars), grammar, seed, n_most=200)
        stream = call_stream(hermes, tools.schemas, forced=True)
        content, calls = joined(stream.push(tokenizer.decode(ids[:-1]), last=True))
        assert (content == '{"a": 1}' and not calls) or (not content and set(calls) == {("g", "{}")})
        found.add(bool(calls))
    assert found == {True, False}


@pytest.mark.parametrize(("how", "choice"), [("hermes", "required"), ("llama3_json", None), ("mistral", None)])
def test_forms_that_cannot_be_told_apart(how, choice):
    with pytest.raises(InvalidRequest, match="no other form"):
        calls_grammar(parse_tools([tool("g")], choice), FORMATS[how], Grammar("json", "{}"))


def test_formats_are_read_off_templates():
    assert format_of("{% for t in tools %}<tool_call>{% endfor %}").name == "hermes"
    assert format_of('[AVAILABLE_TOOLS] {{ "[TOOL_CALLS]" }}').name == "mistral"
    assert format_of('Respond with {"name": function name, "parameters": dictionary}').name == "llama3_json"
    assert format_of("<tool_call><function=x>").name == "qwen3_coder" and format_of("{{ messages }}") is None
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]").name == "mistral_args"
    assert format_of("<start_function_call>call:").name == "functiongemma"
    assert format_of("[func_name1(params_name1=params_value1)]").name == "pythonic"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("x", None, "tools"),
        ([{"type": "web_search"}], None, "tools.0.type"),
        ([{"type": "function"}], None, "tools.0.function.name"),
        ([tool("a b")], None, "tools.0.function.name"),
        ([tool("a", [1])], None, "tools.0.function.parameters"),
        ([tool("a")] * 129, None, "tools"),
        ([tool("a")], "always", "tool_choice"),
        ([tool("a")], {"type": "function", "function": {"name": "b"}}, "tool_choice"),
        ([tool("a")], {"type": "allowed_tools"}, "tool_choice.type"),
        (None, "required", "tool_choice"),
    ],
)
def test_wrong_tools(tools, choice, param):
    with pytest.raises(InvalidRequest) as e:
        parse_tools(tools, choice)
    assert e.value.param == param


def test_choices():
    both = [tool("a"), tool("b")]
    assert parse_tools(None) is None and parse_tools([], "auto") is None and parse_tools(both, "none") is None
    auto = parse_tools(both, "auto", None)
    assert isinstance(auto, Tools) and (auto.required, auto.parallel, list(auto.schemas)) == (False, True, ["a", "b"])
    named = parse_tools(both, {"type": "function", "function": {"name": "b"}})
    assert (named.required, named.parallel, list(named.schemas), len(named.given)) == (True, False, ["b"], 2)
