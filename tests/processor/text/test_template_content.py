"""What a client sends reaches the chat template as in transformers: strings as strings, parts as parts, names, and
messages without text."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from hydrainfer.core import InvalidRequest
from hydrainfer.processor import load_description, parse_messages
from tests.families.chats import IN_ORDER

pytestmark = pytest.mark.cpu

TRIMMED = (  # as Llama 3.2 Vision's: a system message is a text, other messages may have parts
    "{% for m in messages %}{% if m.role == 'system' %}[S]{{ m.content | trim }}[/S]{% elif m.content is string %}"
    "[{{ m.role }}]{{ m.content }}{% else %}[{{ m.role }}]{% for c in m.content %}{% if c.type == 'image' %}<image>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"
)
NAMED = (
    "{% for m in messages %}{{ m.role }}{% if m.name is defined %} ({{ m.name }}){% endif %}: {{ m.content }}\n"
    "{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}"
)
SYSTEM, HI = {"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}


def parts(role, *texts):
    return {"role": role, "content": [{"type": "text", "text": t} for t in texts]}


@pytest.fixture(scope="module")
def template_of(checkpoint, tmp_path_factory):
    """`template_of(source)` → the template, and transformers' rendering of messages by it."""
    path = tmp_path_factory.mktemp("templates") / "copy"
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(path)

    def get(source):
        def reference(messages):
            return tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=True
            )

        return load_description(path, chat_template=source).template, reference

    return get


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (TRIMMED, [SYSTEM, HI]),
        (TRIMMED, [SYSTEM, parts("user", "a", "b"), {"role": "assistant", "content": " c"}, HI]),
        (IN_ORDER, [parts("user", "a", "b"), parts("assistant", "c"), parts("user", "d")]),
        (NAMED, [SYSTEM | {"name": "root"}, HI | {"name": "bob"}, {"role": "assistant", "name": "eve", "content": ""}]),
        (NAMED, [SYSTEM, HI]),
        (STRICT, [SYSTEM, HI, {"role": "assistant", "content": "x"}, HI]),
    ],
)
def test_a_template_gets_what_the_client_sent(template_of, source, messages):
    template, reference = template_of(source)
    assert template.render(parse_messages(messages)) == reference(messages)


@pytest.mark.parametrize(
    ("source", "messages", "instead"),
    [
        (TRIMMED, [parts("system", "Be", "brief."), HI], [{"role": "system", "content": "Be\nbrief."}, HI]),
        (NAMED, [parts("user", "a", "b")], [{"role": "user", "content": "a\nb"}]),
        (IN_ORDER, [HI], [parts("user", "Hi")]),
    ],
    ids=["a system's parts", "parts", "a string"],
)
def test_a_form_that_the_template_does_not_render_becomes_the_other(template_of, source, messages, instead):
    template, reference = template_of(source)
    rendered = template.render(parse_messages(messages))
    assert rendered == reference(instead) and "'type'" not in rendered


@pytest.mark.parametrize("source", [TRIMMED, NAMED, IN_ORDER])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": "Yes.", "refusal": None, "annotations": []}, "Yes."),
    ],
    ids=json.dumps,
)
def test_an_assistants_message_without_text_is_an_empty_one(template_of, source, said, text):
    template, _ = template_of(source)
    chats = [[HI, {"role": "assistant", **answer}, HI] for answer in (said, {"content": text})]
    one, other = (template.render(parse_messages(chat)) for chat in chats)
    assert one == other


@pytest.mark.parametrize(
    ("messages", "instead"),
    [
        ([SYSTEM, {"role": "developer", "content": "b"}, HI], [SYSTEM | {"content": "Be brief. \n\nb"}, HI]),
        ([HI, SYSTEM, HI], [SYSTEM, HI, HI]),
        ([SYSTEM, HI, parts("developer", "b"), HI], [SYSTEM | {"content": "Be brief. \n\nb"}, HI, HI]),
    ],
    ids=["two", "a later one", "a first and a later one"],
)
def test_system_messages_become_one_where_the_template_takes_only_one(template_of, messages, instead):
    template, reference = template_of(STRICT)
    assert template.render(parse_messages(messages)) == reference(instead)
    other, reference = template_of(NAMED)
    as_sent = [m | {"role": m["role"].replace("developer", "system")} for m in messages]
    if all(isinstance(m["content"], str) for m in messages):
        assert other.render(parse_messages(messages)) == reference(as_sent), "which it is not where two are taken"


def test_a_template_that_refuses_for_another_reason_says_its_own(template_of):
    template, _ = template_of(STRICT.replace("m.role == 'system' and not loop.first", "m.role == 'assistant'"))
    with pytest.raises(InvalidRequest, match="System message must be at the beginning"):
        template.render(parse_messages([SYSTEM, SYSTEM, HI, {"role": "assistant", "content": "x"}]))


@pytest.mark.parametrize("field", ["name", "refusal"])
def test_a_field_of_another_type_is_refused(field):
    with pytest.raises(InvalidRequest, match=f"messages.0.{field} must be a string"):
        parse_messages([{"role": "assistant", "content": None, field: 5}])
