"""No grammar takes more than a second to be compiled or refused, nor a step much time."""

import json
import random
import time

import pytest

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.grammar import Follower, Guided
from tests.grammar.conftest import EOS, N_VOCAB

pytestmark = pytest.mark.cpu


def nested(n):
    schema = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(n):
    properties = {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(n)}
    return {"type": "object", "properties": properties}


def doubling(n):
    two = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2 + [nested(1)]} for i in range(n)}
    return {"$defs": {**two, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def crossed(n):
    any_of = [[{"type": "object", "properties": {f"a{i}_{j}": {}}} for j in range(10)] for i in range(n)]
    return {"allOf": [{"anyOf": one} for one in any_of]}


def cube(n):
    of = {"type": "integer"}
    for _ in range(3):
        of = {"type": "array", "items": of, "minItems": n, "maxItems": n}
    return of


HOSTILE = {
    **{
        name: Grammar("json", json.dumps(schema))
        for name, schema in {
            "nested 40": nested(40),
            "wide": wide(1000),
            "doubling": doubling(60),
            "crossed 4": crossed(4),
            "crossed 8": crossed(8),
            "enum": {"enum": [f"{i:030d}" for i in range(1600)]},
            "cube": cube(1000),
            "loop": {"$ref": "#"},
            "multiple": {"type": "integer", "multipleOf": 7919, "minimum": -(10**15), "maximum": 10**18},
            "long": {"type": "string", "pattern": "^(([a-z]+)+x)+$", "minLength": 1000, "maxLength": 100_000},
        }.items()
    },
    "nested 4000": Grammar("json", '{"items":' * 4000 + "{}" + "}" * 4000),
    "repeated": Grammar("regex", "(a{1000}){1000}"),
    "repeated more": Grammar("regex", "((((a{0,100}){0,100}){0,100}){0,100}){0,100}"),
    "redos": Grammar("regex", "(a|b)*a(a|b){60}"),
    "redos again": Grammar("regex", "(.*a){30}[ab]{30}"),
    "unicode": Grammar("regex", r"(\p{L}{1,200}\w{3,300}){1,50}"),
    "and": Grammar("lark", "start: X\nX: /(.*a.{12})/ & /(.*b.{13})/ & /(.*c.{14})/ & ~/.*ddd.*/"),
    "ambiguous": Grammar("lark", 'start: a\na: a a | "x" | "x" "x" | ""'),
    "deep": Grammar("lark", "start: " + "(" * 5000 + '"x"' + ")" * 5000),
    "deep GBNF": Grammar("lark", "root ::= " + "(" * 8000),
    "many rules": Grammar("lark", "".join(f"r{i}: r{i + 1} | r{i + 2}\n" for i in range(2500))),
    "rules of GBNF": Grammar("lark", "".join(f"r{i} ::= r{i + 1}\n" for i in range(600))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_compiled_or_refused_within_a_second(make_grammars, name):
    grammars, rng = make_grammars(), random.Random(0)
    begin_s = time.thread_time()
    try:
        grammars.compiled(HOSTILE[name])
    except InvalidRequest as e:
        assert len(e.message) < 400
        return
    finally:
        assert time.thread_time() - begin_s < 1.0  # of this thread: others use the machine too
        grammars.close()
    follower, produced, worst_s = Follower(grammars), [], 0.0
    for _ in range(60):
        begin_s = time.thread_time()
        blocked, failed = follower.blocked([Guided(0, "r", HOSTILE[name], produced)], N_VOCAB)
        worst_s = max(worst_s, time.thread_time() - begin_s)
        can = [i for i in range(N_VOCAB) if not blocked[0][i]]
        if failed or can == [EOS]:
            break
        produced.append(rng.choice(can))
    assert worst_s < 0.5, "it holds up the others of its batch"
