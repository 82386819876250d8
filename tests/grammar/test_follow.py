"""Grammars are compiled once, and followed from the produced tokens alone."""

import json
import random

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from hydrainfer.core import Grammar, HydraError, InvalidRequest, LiveSequence, Reasoning, SamplingParams
from hydrainfer.grammar import Follower, Guided, library, load_grammars
from tests.checkpoints import make_tokenizer
from tests.grammar.conftest import EOS, N_VOCAB
from tests.grammar.schemas import random_schema
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.cpu
ABC = Grammar("regex", "(abc)+")


def allowed(follower, grammar, produced, id="r"):
    blocked, failed = follower.blocked([Guided(0, id, grammar, produced)], N_VOCAB)
    assert not failed and blocked.shape == (1, N_VOCAB)
    return set(np.flatnonzero(~blocked[0]).tolist())


def walk(follower, grammar, seed, n_most=300, id="r"):
    """The tokens of a random answer; EOS is taken as soon as it may."""
    rng, produced = random.Random(seed), []
    while len(produced) < n_most and EOS not in produced:
        can = allowed(follower, grammar, produced, id)
        produced.append(EOS if EOS in can else rng.choice(sorted(can)))
    return produced


@pytest.mark.parametrize("seed", range(60))
def test_random_answers_of_random_schemas_are_valid(grammars, tokenizer, seed):
    schema = random_schema(random.Random(seed))
    produced = walk(Follower(grammars), Grammar("json", json.dumps(schema)), seed)
    assert produced[-1] == EOS
    jsonschema.validate(json.loads(tokenizer.decode(produced[:-1])), schema)


def test_a_place_is_a_function_of_the_tokens(grammars):
    """Another follower (another instance), one that has seen more, one that has forgotten: all say the same."""
    schema = Grammar("json", json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}))
    first = Follower(grammars)
    produced = walk(first, schema, 3)
    for n in [*range(len(produced)), 2, 0, len(produced) - 1]:
        assert allowed(first, schema, produced[:n]) == allowed(Follower(grammars), schema, produced[:n])


def test_several_rows_and_the_end(grammars, tokenizer):
    ids = [tokenizer.token_to_id(c) for c in "abc"]
    rows = [Guided(2, "x", ABC, []), Guided(0, "y", ABC, ids[:1]), Guided(5, "z", Grammar("choice", '["a"]'), ids[:1])]
    blocked, failed = Follower(grammars).blocked(rows, N_VOCAB + 40)
    assert not failed and blocked.shape == (3, N_VOCAB + 40) and blocked[:, N_VOCAB:].all()
    assert not blocked[0][ids[0]] and blocked[0][ids[1]] and not blocked[1][ids[1]]
    assert np.flatnonzero(~blocked[2]).tolist() == [EOS]
    assert allowed(Follower(grammars), Grammar("choice", '["a"]'), [ids[0], EOS, EOS]) == {EOS}  # ignore_eos


def test_a_tokenizer_with_tokens_that_the_model_lacks(tmp_path):
    """In NousResearch/Llama-2-7b-chat-hf, <pad> comes after the last column of the logits."""
    longer = make_tokenizer().backend_tokenizer
    longer.add_tokens([f"<{i}>" for i in range(longer.get_vocab_size(), N_VOCAB + 1)])
    longer.save(str(tmp_path / "tokenizer.json"))
    grammars = load_grammars(tmp_path, N_VOCAB, (EOS,))
    assert grammars is not None
    assert longer.token_to_id("a") in allowed(Follower(grammars), ABC, [])
    grammars.close()


def test_places_are_forgotten_and_found_again(grammars):
    follower = Follower(grammars)
    answers = {f"r{i}": walk(follower, ABC, i, id=f"r{i}") for i in range(300)}
    assert len(follower._places) <= 256
    assert allowed(follower, ABC, answers["r0"][:-1], "r0") == allowed(Follower(grammars), ABC, answers["r0"][:-1])


def test_places_that_only_drafters_have_asked_about_are_forgotten_too(grammars):
    follower = Follower(grammars)
    for i in range(300):
        request = replace(make_request(f"r{i}", n_text=3), sampling=SamplingParams(grammar=ABC))
        follower.forced(LiveSequence(request, (0.0, 0), 0.0))
        follower.blocked([Guided(0, request.id, ABC, [])], N_VOCAB)
    assert len(follower._places) <= 256


def test_tokens_that_leave_the_grammar_fail_their_request_only(grammars, tokenizer):
    wrong = [tokenizer.token_to_id("c")]
    blocked, failed = Follower(grammars).blocked([Guided(0, "bad", ABC, wrong), Guided(1, "good", ABC, [])], N_VOCAB)
    assert set(failed) == {"bad"} and isinstance(failed["bad"].error, HydraError) and not blocked[0].any()
    assert blocked[1].any()


def drafted(answer, n, rng):
    return [token if rng.random() < 0.8 else rng.randrange(N_VOCAB) for token in answer[n : n + rng.randrange(9)]]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_have_the_masks_of_single_steps_and_leave_no_trace(grammars, seed):
    """The rows behind drafts that may come; what is forced is the only token that may come."""
    rng = random.Random(seed)
    grammar = Grammar("json", json.dumps(random_schema(rng)))
    answer, follower, single = walk(Follower(grammars), grammar, seed), Follower(grammars), Follower(grammars)
    masks = {(): allowed(single, grammar, [])}
    request = replace(make_request("r", n_text=3), sampling=SamplingParams(grammar=grammar))
    n = 0
    while n < len(answer):
        drafts = drafted(answer, n, rng)
        seq = LiveSequence(request, (0.0, 0), 0.0, tuple(answer[:n]))
        forced = list(follower.forced(seq))
        assert forced == answer[n : n + len(forced)]
        blocked, failed = follower.blocked([Guided(0, "r", grammar, answer[:n], drafts=drafts)], N_VOCAB)
        can = [set(np.flatnonzero(~row).tolist()) for row in blocked]
        n_may = next((i for i, token in enumerate(drafts) if token not in can[i]), len(drafts))
        open_ended = drafts[: drafts.index(EOS)] if EOS in drafts else drafts
        assert not failed and list(follower.allowed(seq, drafts)) == open_ended[:n_may]
        for i in range(n_may + 1):
            after = (*answer[:n], *drafts[:i])
            if after not in masks:
                masks[after] = allowed(Follower(grammars), grammar, after)
            assert can[i] == masks[after]
            assert i >= len(forced) or can[i] == {forced[i]} or list(drafts[:i]) != forced[:i]
        n += 1 + rng.randrange(3)


@pytest.mark.parametrize("begun", [False, True])
def test_a_grammar_begins_behind_the_reasoning(grammars, begun):
    """Within it everything may come but the end; without one the grammar holds from the start."""
    opens, closes, other = 300, 301, 302
    reasoning, follower = Reasoning(opens, closes, begun), Follower(grammars)

    def can(*produced):
        blocked, failed = follower.blocked([Guided(0, "r", ABC, list(produced), reasoning)], N_VOCAB)
        assert not failed
        return set(np.flatnonzero(~blocked[0]).tolist())

    at_start, thinking = allowed(Follower(grammars), ABC, []), set(range(N_VOCAB)) - {EOS}
    thought = [*([] if begun else [opens]), other, opens, other]
    assert can() == (thinking if begun else at_start | {opens})
    assert can(*thought) == thinking and can(*thought, closes) == at_start
    first = min(at_start)
    assert can(*thought, closes, first) == allowed(Follower(grammars), ABC, [first])
    drafts = [other, closes, first]
    blocked, failed = follower.blocked([Guided(0, "r", ABC, thought, reasoning, drafts)], N_VOCAB)
    rows = [set(np.flatnonzero(~row).tolist()) for row in blocked]
    assert not failed and rows == [thinking, thinking, at_start, allowed(Follower(grammars), ABC, [first])]
    assert can(*thought) == thinking and can(*thought, closes) == at_start
    if not begun:
        assert can(first) == allowed(Follower(grammars), ABC, [first])


def test_a_grammar_is_compiled_once(grammars):
    grammars.expect(ABC)
    assert grammars.compiled(ABC) is grammars.compiled(Grammar("regex", "(abc)+"))
    for i in range(100):
        grammars.compiled(Grammar("regex", f"a{i}"))
    assert len(grammars._kept) == 64


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (Grammar("lark", 'start: "yes" | "no"'), {"yes", "no"}),
        (Grammar("lark", 'root ::= "yes" | "no"\n'), {"yes", "no"}),
        (Grammar("choice", json.dumps(["é😀", 'q"uo\\te', "new\nline"])), {"é😀", 'q"uo\\te', "new\nline"}),
        (Grammar("json", '{"type": "object", "additionalProperties": false}'), {"{}"}),
        (Grammar("json", '{"const": {"a": [1, 2]}}'), {'{"a": [1, 2]}'}),
        (Grammar("json", '{"const": {"format": "path"}}'), {'{"format": "path"}'}),
        (Grammar("json", '{"enum": ["a", "b"], "type": "string", "format": "password"}'), {'"a"', '"b"'}),
    ],
)
def test_kinds(grammars, tokenizer, grammar, answer):
    said = {tokenizer.decode(walk(Follower(grammars), grammar, seed)[:-1]) for seed in range(20)}
    assert said <= answer and (said == answer or len(answer) == 3)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json", '{"type": "nothing"}'),
        Grammar("json", '{"not": {"type": "string"}}'),
        Grammar("json", '{"type": "integer", "minimum": 2, "maximum": 1}'),
        Grammar("json", "no json"),
        Grammar("json", '{"$ref": "http://example.com/x.json"}'),
        Grammar("regex", "(a"),
        Grammar("lark", "start: missing"),
        Grammar("lark", "root ::= missing"),
    ],
    ids=lambda g: g.text,
)
def test_a_grammar_that_cannot_be_compiled_is_refused_each_time(grammars, grammar):
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot be used") as e:
            grammars.compiled(grammar)
    assert e.value.code == "invalid_grammar"


def test_a_schema_inside_a_grammar_is_complained_of_without_the_grammar(grammars):
    with pytest.raises(InvalidRequest) as e:
        grammars.compiled(Grammar("lark", 'start: "<call>" args\nargs: %json {"type": "object", "not": {}}'))
    assert e.value.message == 'the grammar or schema cannot be used: Unimplemented keys: ["not"]'


def test_the_error_within_an_answer_says_nothing_of_how_the_library_is_used(grammars, tokenizer):
    wide = Grammar("lark", "start: " + " | ".join(f'"a{i}"' for i in range(1500)))
    produced = [tokenizer.token_to_id("a")]
    _, failed = Follower(grammars).blocked([Guided(0, "r", wide, produced)], N_VOCAB)
    message = failed["r"].error.message
    assert "too complex within the answer" in message and "1501 items; max is 1000" in message
    assert "<" not in message and "recursive" not in message and "\n" not in message


def test_a_grammar_is_bounded_in_size():
    with pytest.raises(InvalidRequest, match="at most 65536 characters"):
        SamplingParams(grammar=Grammar("regex", "a" * 70_000))


@pytest.mark.parametrize("n_drafts", [0, 3])
def test_requests_do_not_fill_each_others_tables(make_grammars, tokenizer, monkeypatch, n_drafts):
    """All copies of a compiled grammar share tables with limits. With these full, masks have only the end, and right
    tokens are refused, so a grammar is then compiled anew."""
    many, n_compiled, compiled = Grammar("regex", "([ab]*a[ab]{29}c){30}"), [], library.compiled
    monkeypatch.setattr(library, "compiled", lambda *of: (n_compiled.append(1), compiled(*of))[1])
    grammars, rng = make_grammars(), random.Random(0)
    follower = Follower(grammars)

    def answer():
        words = [
            "".join(rng.choices("ab", k=rng.randrange(40))) + "a" + "".join(rng.choices("ab", k=29)) + "c"
            for _ in range(9)
        ]
        return [tokenizer.token_to_id(c) for c in "".join(words)]

    answers = {f"r{i}": answer() for i in range(24)}
    for at in range(0, 300, 1 + n_drafts):
        rows = [
            Guided(i * (1 + n_drafts), id, many, ids[:at], None, ids[at : at + n_drafts])
            for i, (id, ids) in enumerate(answers.items())
        ]
        blocked, failed = follower.blocked(rows, N_VOCAB)
        assert not failed, (at, failed)
        for one, ids in zip(rows, answers.values(), strict=True):
            for n in range(1 + n_drafts):
                assert not blocked[one.row + n][ids[at + n]] and blocked[one.row + n][EOS]
    assert len(n_compiled) > 1, "the tables were never full"
    grammars.close()
