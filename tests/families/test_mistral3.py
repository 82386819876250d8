"""What families with Pixtral's tower have that others lack: see `tests.families.mistral3`."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import CheckpointError, InvalidRequest, Role
from hydrainfer.families import read_config
from hydrainfer.models import load_model
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.processor import MediaLimits, PixelStore, Processor, load_description, parse_messages
from hydrainfer.processor.pictures import from_image
from tests.checkpoints_mistral3 import MINISTRAL, make_mistral3
from tests.equivalence.criterion import Tally
from tests.equivalence.mixed import settled_stats
from tests.families.chats import PICTURES, text, user
from tests.families.mistral3 import LIGHTON_CHATS, Mistral3Reference
from tests.parts import parts
from tests.pillow import described

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
KINDS = {
    "mistral3": {"seed": 11, "text": MINISTRAL},
    "pixtral": {"kind": "pixtral", "seed": 12, "vision": {"patch_size": 20}},
    "lighton": {"kind": "lighton", "seed": 13, "text": {"tie_word_embeddings": False}},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = {"threads": 1, "native_kernels": False, "image_backend": "pillow", "block_tokens": 4, "launcher": "inproc"}
AGAIN = [{"role": "assistant", "content": [text("It is round.")]}, user(text("And"), *PICTURES["one"][0]["content"])]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {kind: make_mistral3(tmp_path_factory.mktemp(kind), **options) for kind, options in KINDS.items()}


def prepared(path, messages):
    """A picture as the tower takes it, for each in the messages."""
    store = PixelStore(1 << 28)
    processor = Processor(described(path), store, weights=b"", dtype="float32")
    (request,) = processor.chat("r", parse_messages(messages, local=True), GREEDY).requests
    return [PatchedPicture(store.get(m.pixels), m.grid) for m in request.media]


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_pictures_are_those_of_transformers(kind, paths):
    """Pictures of several sizes are computed in one pass, and each alone; the reference computes in float64."""
    ours, theirs = load_model(paths[kind], Role.parse("E")), Mistral3Reference(paths[kind])
    theirs.model.double()
    for chat in ("several sizes", "wide", "tall", "tiny"):
        messages = LIGHTON_CHATS[chat] if kind == "lighton" else PICTURES[chat]
        if kind == "mistral3" and chat == "tiny":
            continue  # transformers fails for a picture of one token
        inputs, pictures = theirs.inputs(messages), prepared(paths[kind], messages)
        with torch.inference_mode():
            made = theirs.model.get_image_features(inputs["pixel_values"].double(), image_sizes=inputs["image_sizes"])
            want = torch.cat(list(made.pooler_output))
            for rows in (ours.encode(pictures), [ours.encode([picture])[0] for picture in pictures]):
                difference = float((torch.cat(rows) - want).abs().max())
                print(f"{kind}, {chat}: {difference:.1e}")
                assert difference < 1e-5, chat


@pytest.mark.parametrize("n_chunk", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_in_small_chunks_that_reuse_what_was_computed(kind, n_chunk, paths):
    """Chunks of one token also end between a row of placeholders and the text after it."""
    reference, tally = Mistral3Reference(paths[kind]), Tally()
    with LLM(paths[kind], token_budget=n_chunk, **OPTIONS) as llm:
        chat = [*PICTURES["several sizes"], *AGAIN]
        for n in (1, 3):
            prompt_ids, ids, gaps = reference.greedy(chat[:n], GREEDY.max_tokens)
            (out,) = llm.chat(chat[:n], GREEDY, use_tqdm=False)
            assert list(out.prompt_token_ids) == prompt_ids
            tally.add(f"{kind}/{n}", list(out.outputs[0].token_ids), ids, gaps)
        assert parts(llm).engine.stats().tokens_found > 40, "of the first turn"
    tally.check()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {"token_budget": 7}) for layout in ("1EP1D", "1ED1P", "1E1P1D", "2E1P2D")),
        *((layout, {"token_budget": 24, "few": True}) for layout in ("1EPD", "1E1P1D")),
    ],
)
def test_conversations_in_layouts_and_with_few_blocks(layout, options, paths):
    """Side by side, so that requests are preempted where there are few blocks. What follows finds the first turn."""
    options, path = dict(options), paths["mistral3"]
    few, greedy = options.pop("few", False), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    if few:
        options |= {"kv_cache_gib": 200 * 2 * 2 * 2 * 16 * 4 / 2**30, "headroom_tokens": 0, "max_model_len": 200}
    reference, tally = Mistral3Reference(path), Tally()
    reference.model.generation_config.eos_token_id = None
    chats = [PICTURES[name] for name in ("one", "several sizes", "wide", "tall", "turns")]
    with LLM(path, layout=layout, **OPTIONS | options) as llm:
        for turn in (chats, [[*chat, *AGAIN] for chat in chats[:2]]):
            for chat, out in zip(turn, llm.chat(turn, greedy, use_tqdm=False)):
                prompt_ids, ids, gaps = reference.greedy(chat, greedy.max_tokens)
                assert list(out.prompt_token_ids) == prompt_ids
                tally.add(f"{layout}/{len(prompt_ids)}", list(out.outputs[0].token_ids), ids, gaps)
        stats = settled_stats(llm)
        assert not few or stats.n_preemptions > 0
        assert few or stats.tokens_found > 40
        for pool in parts(llm).pools().values():
            pool.check(idle=True)
    tally.check()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(kind, paths):
    """After resizing, to the last bit, of 60 sizes; before they are scaled."""
    adapter, reference, rng = described(paths[kind]).images.adapter, Mistral3Reference(paths[kind]), random.Random(5)
    reference.pictures.do_rescale = reference.pictures.do_normalize = False
    sizes = [(1, 1), (30, 140), (2000, 20), (20, 2000), (140, 140), (141, 140), (140, 141), (28, 28)]
    sizes += [(rng.randint(20, 400), rng.randint(20, 400)) for _ in range(52)]
    for i, (width, height) in enumerate(sizes):
        if kind == "lighton" and min(width, height) * 140 < 15 * max(width, height, 140):
            continue  # no token
        noise = np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)
        want = reference.prepared([Image.fromarray(noise)])["pixel_values"][0].permute(1, 2, 0).numpy()
        ours = adapter.pixels(from_image(Image.fromarray(noise), MediaLimits()))
        assert ours.shape == (1, *want.shape) and np.array_equal(ours[0], want.astype(np.uint8)), (width, height)


def test_a_processors_file_without_the_side_of_squares_changes_nothing(tmp_path):
    """Older files leave it out, and give the side of patches as an object or a number. The tower decides."""
    path = make_mistral3(tmp_path)
    usual = read_config(path)
    change(path, "processor_config.json", "spatial_merge_size", "left out")
    change(path, "preprocessor_config.json", "patch_size", 14)
    assert read_config(path) == usual
    change(path, "config.json", "spatial_merge_size", "left out")
    assert read_config(path) == usual, "the default of the class"


@pytest.mark.parametrize(
    ("kind", "file", "field", "value", "says"),
    [
        ("mistral3", "config.json", "spatial_merge_size", 0, "config.json: spatial_merge_size is 0"),
        ("mistral3", "config.json", "spatial_merge_size", [2, 2], "config.json: spatial_merge_size is"),
        ("mistral3", "config.json", "spatial_merge_size", 4, "processor_config.json: spatial_merge_size is 2"),
        (
            "mistral3",
            "config.json",
            "vision_config.patch_size",
            {"height": 14},
            "config.json: vision_config.patch_size",
        ),
        ("mistral3", "config.json", "vision_config.patch_size", 16, "processor_config.json: patch_size is 14"),
        ("mistral3", "config.json", "vision_config.image_size", 100, "longest_edge of 140 pixels, but image_size"),
        ("mistral3", "config.json", "vision_feature_layer", 4, "vision_feature_layer 4 is out of range"),
        ("mistral3", "config.json", "vision_feature_layer", [0, 1], r"vision_feature_layer \[0, 1\] must be one"),
        ("mistral3", "config.json", "projector_hidden_act", "tanh", "projector_hidden_act 'tanh'"),
        ("mistral3", "config.json", "vision_config.num_attention_heads", 5, "5 vision heads over 64 columns"),
        ("mistral3", "preprocessor_config.json", "size", {"longest_edge": 0}, "size.longest_edge is 0"),
        ("mistral3", "preprocessor_config.json", "size", {"height": 99, "width": 98}, "size is 99 x 98"),
        ("mistral3", "preprocessor_config.json", "size", {}, "size must give"),
        ("mistral3", "preprocessor_config.json", "patch_size", [14], "patch_size is"),
        ("mistral3", "preprocessor_config.json", "do_resize", False, "do_resize False is not supported"),
        ("pixtral", "config.json", "vision_feature_select_strategy", "default", "use full"),
        ("pixtral", "processor_config.json", "spatial_merge_size", 2, "spatial_merge_size is 2, that of config.json 1"),
        ("lighton", "preprocessor_config.json", "patch_size", 16, "patch_size is 16, no multiple of"),
        ("lighton", "preprocessor_config.json", "patch_size", {"height": 14, "width": 28}, "patch_size is 14 x 28"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(kind, file, field, value, says, paths, tmp_path):
    for source in paths[kind].glob("*.json"):
        (tmp_path / source.name).write_text(source.read_text())
    change(tmp_path, file, field, value)
    with pytest.raises(CheckpointError, match=says) as e:
        read_config(tmp_path)
    assert "\n" not in e.value.message


def test_a_side_of_squares_that_the_weights_do_not_have_is_refused_before_memory_is_taken(tmp_path):
    path = make_mistral3(tmp_path)
    change(path, "config.json", "spatial_merge_size", 4096)
    change(path, "processor_config.json", "spatial_merge_size", "left out")
    with pytest.raises(CheckpointError, match=r"merging_layer.weight has shape \[64, 256\], config.json wants"):
        load_model(path, Role.parse("E"))


def change(path, file, field, value):
    content = json.loads((path / file).read_text())
    *section, name = field.split(".")
    part = content[section[0]] if section else content
    part[name] = value
    if value == "left out":
        del part[name]
    (path / file).write_text(json.dumps(content))


@pytest.mark.parametrize("special", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
def test_marks_in_a_users_words_are_refused(special, paths):
    processor = Processor(load_description(paths["pixtral"]), PixelStore(1 << 20), weights=b"", dtype="float32")
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        processor.chat("r", parse_messages([user(text(f"see {special} here"))]), GREEDY)
