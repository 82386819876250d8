"""Reasoning is told from the answer, wherever the text is cut."""

import pytest

from hydrainfer.processor.text.reasoning import REASONING, ReasoningStream, Thinking

pytestmark = pytest.mark.unit
THINK = REASONING["think"]

CASES = [
    (False, "<think>\nHm.\nSo.\n</think>\n\nFour. ", "Hm.\nSo.", "Four. "),
    (True, "\nHm </thin.\n</think>\n\nFour.", "Hm </thin.", "Four."),
    (True, "<think>Hm.</think>Four.", "Hm.", "Four."),
    (False, " Four <think>no</think>", "", " Four <think>no</think>"),
    (False, "<thin", "", "<thin"),
    (False, "", "", ""),
    (False, "<think>Hm. </th", "Hm. </th", ""),
    (True, "Hm.\n", "Hm.", ""),
    (False, "<think></think>\n", "", ""),
    (False, "<think>\n\n</think>\n\nFour.\n\n", "", "Four.\n\n"),
    (True, "a</think>b</think>c", "a", "b</think>c"),
    (False, "<think>\n<think>a</think>b", "<think>a", "b"),
    (True, "<think><think>a</think>b", "<think>a", "b"),
]


@pytest.mark.parametrize(("begun", "text", "reasoning", "content"), CASES)
def test_wherever_it_is_cut(begun, text, reasoning, content):
    cuts = [[text], list(text), [*text, ""], *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in filter(None, cuts):
        stream = ReasoningStream(Thinking(THINK, begun))
        said = [stream.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        assert ("".join(s.reasoning for s in said), "".join(s.content for s in said)) == (reasoning, content), pieces


def test_reasoning_is_streamed_while_it_is_written():
    stream = ReasoningStream(Thinking(THINK, True))
    said = [stream.push(c).reasoning for c in "one two three four"]
    assert sum(map(bool, said)) > 10


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("user: <think>\nassistant:", False),
    ],
)
def test_the_prompt_says_whether_it_has_begun(prompt, begun):
    thinking = Thinking.after(prompt, THINK)
    assert (thinking and thinking.begun) == begun
