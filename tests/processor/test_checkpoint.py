"""A checkpoint's description, or one line that says what is wrong with it."""

import json
import shutil

import pytest

from hydrainfer.core import CheckpointError
from hydrainfer.processor import load_description, parse_messages

pytestmark = pytest.mark.cpu

STRINGS_ONLY = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m['role'] + '] ' + m['content'] + '\n' }}{% endfor %}"
)


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy without weights, to damage."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def edit(path, **fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def test_what_is_read(model, checkpoint):
    assert model.path == checkpoint and model.n_context == 512 and model.eos_ids == (2,)
    assert model.images.placeholder == "<image>" and model.images.adapter.fit(9, 9).n_tokens == 16
    assert model.template.takes_parts and model.vocabulary.n_tokens == 2048
    assert load_description(checkpoint, max_context=100).n_context == 100


def test_generation_defaults_and_several_ends(broken):
    edit(broken / "generation_config.json", eos_token_id=[2, 5], temperature=0.6, top_k=20)
    model = load_description(broken)
    assert model.eos_ids == (2, 5) and model.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_templates_that_take_strings_only(broken):
    (broken / "chat_template.jinja").write_text(STRINGS_ONLY)
    model = load_description(broken)
    assert not model.template.takes_parts
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    content.append({"type": "text", "text": "b"})
    rendered = model.template.render(parse_messages([{"role": "user", "content": content}]))
    assert rendered == "<s>[user] <image>\na\nb\n"
    from hydrainfer.core import InvalidRequest

    with pytest.raises(InvalidRequest, match="roles must alternate"):
        model.template.render(parse_messages([{"role": "user", "content": "a"}] * 2))


def test_templates_cannot_leave_the_sandbox(broken):
    (broken / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}")
    with pytest.raises(CheckpointError, match="chat template"):
        load_description(broken)


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_each_place_of_a_template(broken, where):
    for name in ("chat_template.jinja", "chat_template.json"):
        (broken / name).unlink(missing_ok=True)
    source = "{% for m in messages %}HERE{{ m['content'][0]['text'] }}{% endfor %}"
    if where.endswith("jinja"):
        (broken / where).write_text(source)
    else:
        path = broken / where
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"chat_template": source}))
    messages = parse_messages([{"role": "user", "content": "x"}])
    assert load_description(broken).template.render(messages) == "HEREx"


def test_no_template_is_no_error_at_load(broken):
    for name in ("chat_template.jinja", "chat_template.json"):
        (broken / name).unlink(missing_ok=True)
    assert load_description(broken).template is None


def test_preprocessing_may_be_in_processor_config(broken):
    old = broken / "preprocessor_config.json"
    (broken / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(old.read_text())}))
    old.unlink()
    assert load_description(broken).images.adapter.fit(1, 1).n_tokens == 16


DAMAGE = {
    "no directory": (lambda d: shutil.rmtree(d), "no such checkpoint"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
    "broken config": (lambda d: (d / "config.json").write_text('{"model_type":'), "damaged"),
    "list config": (lambda d: (d / "config.json").write_text("[]"), "damaged"),
    "unknown model": (lambda d: edit(d / "config.json", model_type="blip-9"), "'blip-9' is not supported.*llava"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer"),
    "no image token": (
        lambda d: edit(d / "config.json", image_token_index=2047, image_token_id=...),
        "image token id 2047",
    ),
    "broken preprocessor": (lambda d: (d / "preprocessor_config.json").write_text("?"), "damaged"),
    "other size": (lambda d: edit(d / "preprocessor_config.json", crop_size=28), "takes"),
    "broken template": (lambda d: (d / "chat_template.jinja").write_text("{% if %}"), "chat template"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_said_in_one_line(broken, name):
    damage, says = DAMAGE[name]
    damage(broken)
    with pytest.raises(CheckpointError, match=says) as e:
        load_description(broken)
    assert "\n" not in e.value.message


def test_a_context_longer_than_the_model(checkpoint):
    with pytest.raises(CheckpointError, match="9999"):
        load_description(checkpoint, max_context=9999)
