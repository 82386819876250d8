"""Lists of possible answers: any number of texts, of any characters."""

import json

import llguidance
import numpy as np
import pytest

from hydrainfer.core import Grammar
from hydrainfer.grammar import Follower, choice_rules
from hydrainfer.grammar.bounds import LIBRARY_LIMITS
from tests.grammar.conftest import EOS
from tests.grammar.test_follow import walk

pytestmark = pytest.mark.cpu
WORDS = llguidance.LLTokenizer("byte")
MANY = [f"word{i}" for i in range(1500)]
HOSTILE = [
    *('"', "\\", '\\"', '"i', "'", "\n", "\\n", "\r\n", "\t", "\0", "\x7f", "/", "//", r"\/", "#", "//x"),
    *(".*", "[a-c]", "(b|c)", "a|b", "^x$", "x{2}", "~y", "&z", "%json {}", "%ignore", "start:", '" | "'),
    *("é", "e\u0301", "\u2028", "😀", "<x>", "<|end|>", " ", " a", "a", "ab", "abc", "abcd e", "ä", "\U0010ffff"),
]


def texts(rules):
    """All texts of a finite grammar, found byte by byte."""
    limits = llguidance.LLParserLimits(**LIBRARY_LIMITS)
    source = llguidance.LLMatcher.grammar_from_lark("\n".join(rules))
    found, ahead = set(), [(b"", llguidance.LLMatcher(WORDS, source, limits=limits, log_level=0))]
    while ahead:
        text, matcher = ahead.pop()
        if matcher.is_accepting():
            found.add(text.decode())
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.get_error()
        for byte in np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256]).tolist():
            further = matcher.deep_copy()
            assert further.try_consume_tokens([byte])
            ahead.append((text + bytes([byte]), further))
    return found


@pytest.mark.parametrize("choices", [["red", "green"], HOSTILE, MANY, ["", "a", "ab"], [""], ["b", "b"]])
def test_the_texts_are_exactly_the_choices(choices):
    assert texts(choice_rules("start", json.dumps(choices))) == set(choices)
    inside = ['start: "<" form ">"', *choice_rules("form", json.dumps(choices))]
    assert texts(inside) == {f"<{choice}>" for choice in choices}


@pytest.mark.parametrize("choices", [MANY, [f"{i}" for i in range(8000)], HOSTILE])
def test_an_answer_of_tokens_is_one_of_the_choices(grammars, tokenizer, choices):
    grammar = Grammar("choice", json.dumps(choices, separators=(",", ":")))
    answers = [walk(Follower(grammars), grammar, seed) for seed in range(20)]
    assert all(answer[-1] == EOS for answer in answers)
    said = {tokenizer.decode(answer[:-1], skip_special_tokens=False) for answer in answers}
    assert said <= set(choices) and len(said) > 5
