"""A checkpoint's description, or one line that says what is wrong with it."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlavaProcessor

from hydrainfer.core import CheckpointError
from hydrainfer.processor import FORMATS, load_description, parse_messages, parse_tools
from hydrainfer.processor.text.checkpoint import CACHED_WORDS
from tests.checkpoints_text import make_text
from tests.damage import damages

pytestmark = pytest.mark.cpu

STRINGS_ONLY = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m['role'] + '] ' + m['content'] + '\n' }}{% endfor %}"
)

PLACES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "processor_config.json")
TOOL_USE = (  # fails where tools are None, as Hermes's does
    "<tool_call>{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %}{% endfor %}"
)


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy without weights, to damage."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns("*.safetensors", "processor_config.json", "chat_template.json")
    shutil.copytree(checkpoint, copy, ignore=left_out)  # the two come before the files that are damaged
    return copy


def edit(path, **fields):
    content = (json.loads(path.read_text()) if path.exists() else {}) | fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def test_the_files_of_a_checkpoint_describe_context_pictures_and_vocabulary(model, checkpoint):
    assert model.path == checkpoint and model.n_context == 512 and model.eos_ids == (2,)
    assert model.images.placeholder == "<image>" and model.images.adapter.fit(9, 9).n_tokens == 16
    assert model.template.takes_parts and model.vocabulary.n_tokens == 2048
    assert load_description(checkpoint, max_context=100).n_context == 100


def test_generation_defaults_and_several_ends(broken):
    edit(broken / "generation_config.json", do_sample=True, eos_token_id=[2, 5], temperature=0.6, top_k=20)
    model = load_description(broken)
    assert model.eos_ids == (2, 5) and model.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_ends_that_only_config_json_names(broken):
    """Gemma 3 names its ends outside of `text_config`."""
    text = json.loads((broken / "config.json").read_text())["text_config"]
    edit(broken / "config.json", eos_token_id=[5, 6], text_config=text | {"eos_token_id": 7})
    assert load_description(broken).eos_ids == (2,)
    for said in ({"eos_token_id": None}, {"eos_token_id": ...}):
        edit(broken / "generation_config.json", **said)
        assert load_description(broken).eos_ids == (5, 6, 2)
    edit(broken / "config.json", eos_token_id=None)
    assert load_description(broken).eos_ids == (7, 2)


def test_mistral_files_beside_the_tokenizer_are_not_read(tmp_path, monkeypatch):
    """If mistral-common is installed, transformers would prefer tekken.json, from which it makes a tokenizer that we
    cannot use."""
    from transformers.integrations.mistral import tokenizer
    from transformers.models.auto import tokenization_auto

    path = make_text(tmp_path, "mistral")
    (path / "tekken.json").write_text("{}")
    monkeypatch.setattr(tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    assert load_description(path).eos_ids == (2,)


@pytest.mark.parametrize("published", [True, False], ids=["tekken.json", "no tekken.json"])
def test_the_regex_of_mistrals_tokenizers_is_corrected(tmp_path, published):
    """The tokenizer.json of Mistral-Small-24B-Instruct-2501 and others cuts text as Llama 3's does, not as
    tekken.json."""
    path = make_text(tmp_path, "mistral")
    edit(path / "config.json", transformers_version="4.48.0")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(100_000)), "oW", "12"]
    merges = [("o", "W"), ("1", "2")]
    wrong = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    llama_3 = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+"), "isolated")
    wrong.pre_tokenizer = pre_tokenizers.Sequence([llama_3, pre_tokenizers.ByteLevel(False, use_regex=False)])
    wrong.decoder = decoders.ByteLevel()
    wrong.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    if published:
        (path / "tekken.json").write_text("{}")
    tokens = load_description(path).tokenizer.encode("loWs12", add_special_tokens=False).tokens
    assert tokens == (["l", "o", "W", "s", "1", "2"] if published else ["l", "oW", "s", "12"])


@pytest.mark.parametrize(
    ("said", "defaults"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": ..., "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": None}, {}),
        ({"do_sample": ...}, {}),
    ],
)
def test_a_checkpoint_that_does_not_sample_is_greedy_by_default(broken, said, defaults):
    edit(broken / "generation_config.json", **said)
    assert load_description(broken).sampling_defaults == defaults


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


@pytest.mark.parametrize("takes_pictures", [True, False], ids=["pictures", "text"])
def test_the_place_of_a_template_is_the_one_that_transformers_takes(broken, tmp_path, takes_pictures):
    """Each place but the last is overruled by the next, for a processor; a tokenizer reads only the first two."""
    path = broken if takes_pictures else make_text(tmp_path / "text", "llama")
    for name in ("chat_template.jinja", "chat_template.json"):
        (path / name).unlink(missing_ok=True)
    messages = [{"role": "user", "content": "x"}]
    for where in PLACES[1:] if takes_pictures else PLACES:
        source = "{% for m in messages %}" + where + "{{ m['content'] }}{% endfor %}"
        if where.endswith("jinja"):
            (path / where).write_text(source)
        else:
            edit(path / where, chat_template=source)
        reference = (LlavaProcessor if takes_pictures else AutoTokenizer).from_pretrained(path)
        wanted = reference.apply_chat_template(messages, tokenize=False)
        assert load_description(path).template.render(parse_messages(messages)) == wanted
        assert wanted.startswith(where) or (not takes_pictures and wanted.startswith("chat_template.jinja"))


def in_config(path, templates):
    edit(path / "tokenizer_config.json", chat_template=[{"name": n, "template": t} for n, t in templates.items()])


def in_files(path, templates):
    (path / "chat_template.jinja").write_text(templates["default"])
    additional(path).write_text(templates["tool_use"])


def in_json(path, templates):
    (path / "chat_template.json").write_text(json.dumps({"chat_template": templates}))


@pytest.mark.parametrize("write", [in_config, in_files, in_json])
def test_a_template_of_its_own_for_tools(broken, write):
    """As Hermes has it. transformers takes it where there are tools; here, also where there are calls."""
    for name in ("chat_template.jinja", "chat_template.json"):
        (broken / name).unlink(missing_ok=True)
    write(broken, {"default": "PLAIN" + STRINGS_ONLY, "tool_use": TOOL_USE})
    template = load_description(broken).template
    assert template.takes_tools and template.tools is FORMATS["hermes"]
    user, tools = {"role": "user", "content": "x"}, [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "y"}
    assert template.render(parse_messages([user])) == "PLAIN<s>[user] x\n"
    with_tools = template.render(parse_messages([user]), parse_tools(tools))
    assert with_tools == "<tool_call>f;[user]x"
    reference = AutoTokenizer.from_pretrained(broken)
    if write is not in_json:  # which tokenizers of transformers do not read
        assert with_tools == reference.apply_chat_template([user], tools=tools, tokenize=False)
    assert template.render(parse_messages([user, call, result])) == "<tool_call>[user]x[assistant]f()[tool]y"
    other = load_description(broken, chat_template=STRINGS_ONLY).template
    assert not other.takes_tools and other.render(parse_messages([user])) == "<s>[user] x\n"


def test_no_template_is_no_error_at_load(broken):
    for name in ("chat_template.jinja", "chat_template.json"):
        (broken / name).unlink(missing_ok=True)
    assert load_description(broken).template is None


def test_preprocessing_in_processor_config_comes_first(broken):
    old = broken / "preprocessor_config.json"
    (broken / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(old.read_text())}))
    both = load_description(broken).images.adapter.settings
    edit(old, image_mean=[0.5] * 3, crop_size=28)
    assert load_description(broken).images.adapter.settings == both
    old.unlink()
    assert load_description(broken).images.adapter.settings == both


def vision_of(path):
    return json.loads((path / "config.json").read_text())["vision_config"]


def additional(path):
    (path / "additional_chat_templates").mkdir()
    return path / "additional_chat_templates" / "tool_use.jinja"


DAMAGE = {
    "no directory": (lambda d: shutil.rmtree(d), "no such directory; pass"),
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
    "an older kind of processor": (
        lambda d: edit(d / "preprocessor_config.json", image_processor_type=5, do_pad=True, crop_size=28),
        "takes",
    ),
    "unknown resampling": (
        lambda d: edit(d / "preprocessor_config.json", resample=9),
        r"preprocessor_config\.json: resample is 9",
    ),
    "no deviation": (
        lambda d: edit(d / "preprocessor_config.json", image_std=[0, 1, 1]),
        r"preprocessor_config\.json: image_std is \[0, 1, 1\]",
    ),
    "no patches": (
        lambda d: edit(d / "config.json", vision_config={**vision_of(d), "patch_size": 57}),
        r"config\.json: vision_config\.patch_size is 57, more than image_size, 56",
    ),
    "an end that is no token": (
        lambda d: edit(d / "generation_config.json", eos_token_id="</s>"),
        r"generation_config\.json: eos_token_id is",
    ),
    "a default that nobody may ask for": (
        lambda d: edit(d / "generation_config.json", temperature=-1),
        r"generation_config\.json: temperature must be between 0 and 2, not -1",
    ),
    "a template for tools in another encoding": (
        lambda d: additional(d).write_bytes(b"\xff"),
        "additional_chat_templates/tool_use.jinja",
    ),
    "a broken template for tools": (
        lambda d: additional(d).write_text("a\n{% if %}"),
        r"the chat template of \S+ \(tool_use\), line 2: Expected an expression",
    ),
    "a template in another encoding": (
        lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja",
    ),
    "other size": (lambda d: edit(d / "preprocessor_config.json", crop_size=28), "takes"),
    "broken template": (
        lambda d: (d / "chat_template.jinja").write_text("a\n{% if %}"),
        r"the chat template of \S+, line 2: Expected an expression",
    ),
    "a template whose loop does not end": (
        lambda d: (d / "chat_template.jinja").write_text("{% for m in messages %}\n"),
        "line 1: Unexpected end of template",
    ),
    "a template that refuses every message": (
        lambda d: (d / "chat_template.jinja").write_text("a\n{{ raise_exception('not me') }}"),
        "renders neither text nor parts of a user message; line 2: not me",
    ),
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


def test_a_context_that_yarn_extends(broken):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    text = json.loads((broken / "config.json").read_text())["text_config"]
    edit(broken / "config.json", text_config=text | {"rope_parameters": None, "rope_scaling": scaling})
    assert load_description(broken).n_context == load_description(broken, max_context=2048).n_context == 2048
    with pytest.raises(CheckpointError, match="2049 was asked for, but the model has 2048 positions"):
        load_description(broken, max_context=2049)


def test_a_tokenizer_keeps_few_of_the_texts_it_has_seen(model):
    """In each thread; the library's default keeps ten thousand, 8 KB each if nothing merges."""
    draw = random.Random(1)
    texts = ["".join(draw.choices("!#$%&*+=?@^~", k=250)) for _ in range(4000)]

    def growth() -> int:
        model.tokenizer.encode(texts[0])
        before = resident_bytes()
        for text in texts:
            model.tokenizer.encode(text)
        return resident_bytes() - before

    with ThreadPoolExecutor(1) as fresh_thread:
        assert fresh_thread.submit(growth).result() < 2 * CACHED_WORDS * 8500


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "generation_config.json"])
def test_damage_of_any_field_is_said_in_one_line_or_does_not_matter(broken, file, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(broken)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    if file == "generation_config.json":
        edit(broken / file, temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    for words, content in damages(json.loads((broken / file).read_text()), 40):
        (broken / file).write_text(json.dumps(content))
        try:
            load_description(broken)
        except CheckpointError as e:
            assert "\n" not in e.message, words
        except Exception as e:
            pytest.fail(f"{words}: {type(e).__name__}: {e}")
