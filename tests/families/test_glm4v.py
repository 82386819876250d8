"""What GLM's families have that others lack: see `tests.families.glm4v`."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import CheckpointError, InvalidRequest, Role
from hydrainfer.families import read_config
from hydrainfer.models import load_model
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.models.vit import bicubic
from hydrainfer.processor import PixelStore, Processor, load_description, parse_messages
from tests.checkpoints import rename_tensors
from tests.equivalence.criterion import LOGIT_TOLERANCE, Tally
from tests.families.chats import PICTURES, text, user, video
from tests.families.glm4v import SPECIAL, VIDEOS, Reference, make_glm
from tests.families.test_logits import forced
from tests.parts import parts
from tests.pillow import described
from tests.runtime.harness import Rig

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
KINDS = ("glm4v", "glm4v_moe", "glm_ocr")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = {"threads": 1, "native_kernels": False, "image_backend": "pillow"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {kind: make_glm(kind, tmp_path_factory.mktemp(kind), 6 + i) for i, kind in enumerate(KINDS)}


def prepared(path, messages):
    """A request, and its pictures and frames as the tower takes them."""
    store = PixelStore(1 << 28)
    processor = Processor(described(path), store, weights=b"", dtype="float32")
    (request,) = processor.chat("r", parse_messages(messages, local=True), GREEDY).requests
    return request, [PatchedPicture(store.get(m.pixels), m.grid) for m in request.media]


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_pictures_and_frames_are_those_of_transformers(kind, paths):
    """The reference computes in float64."""
    ours, theirs = load_model(paths[kind], Role.parse("E")), Reference(paths[kind])
    theirs.model.double()
    for chat in ("several sizes", "wide", "tall", "video"):
        messages = (PICTURES | VIDEOS)[chat]
        inputs, (_, pictures) = theirs.inputs(messages), prepared(paths[kind], messages)
        with torch.inference_mode():
            if chat == "video":
                made = theirs.model.get_video_features(inputs["pixel_values_videos"].double(), inputs["video_grid_thw"])
            else:
                made = theirs.model.get_image_features(inputs["pixel_values"].double(), inputs["image_grid_thw"])
            difference = torch.cat(ours.encode(pictures)) - torch.cat(list(made.pooler_output))
        print(f"{kind}, {chat}: {float(difference.abs().max()):.1e}")
        assert float(difference.abs().max()) < 1e-5, chat


@pytest.mark.parametrize("n_chunk", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_in_small_chunks_that_reuse_what_was_computed(kind, n_chunk, paths):
    again = [{"role": "assistant", "content": [text("It moves.")]}, user(text("Then?"), video(40, 3, 60, 90, 1.0))]
    reference, tally = Reference(paths[kind]), Tally()
    with LLM(paths[kind], token_budget=n_chunk, block_tokens=4, **OPTIONS) as llm:
        for chat in (PICTURES["turns"], [*VIDEOS["video"], *again])[: 1 + (n_chunk > 1)]:
            for n in (1, 3):
                prompt_ids, ids, gaps = reference.greedy(chat[:n], GREEDY.max_tokens)
                (out,) = llm.chat(chat[:n], GREEDY, use_tqdm=False)
                assert list(out.prompt_token_ids) == prompt_ids
                tally.add(f"{kind}/{n}", list(out.outputs[0].token_ids), ids, gaps)
        assert parts(llm).engine.stats().tokens_found > 40, "of the first turns"
    tally.check()


@pytest.mark.parametrize("kind", KINDS)
def test_two_instances_of_each_role(kind, paths):
    reference, chats, tally = Reference(paths[kind]), [PICTURES["several sizes"], VIDEOS["videos"]], Tally()
    with LLM(paths[kind], layout="2E1P2D", launcher="inproc", token_budget=32, **OPTIONS) as llm:
        for chat, out in zip(chats, llm.chat(chats, GREEDY, use_tqdm=False)):
            _, ids, gaps = reference.greedy(chat, GREEDY.max_tokens)
            tally.add(kind, list(out.outputs[0].token_ids), ids, gaps)
    tally.check()


def test_a_prompt_may_have_pictures_and_videos(paths):
    """transformers takes one kind only: it counts the placeholders of both. Its parts take both."""
    messages = [user(*VIDEOS["videos"][0]["content"], *PICTURES["several sizes"][0]["content"])]
    reference, store, rig = Reference(paths["glm4v"]), PixelStore(1 << 28), Rig(paths["glm4v"])
    inputs, model = reference.inputs(messages), reference.model
    ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
    grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw")}
    with torch.inference_mode():
        x = model.get_input_embeddings()(ids)
        pictures = model.get_image_features(inputs["pixel_values"], grids["image_grid_thw"]).pooler_output
        frames = model.get_video_features(inputs["pixel_values_videos"], grids["video_grid_thw"]).pooler_output
        x[kinds == 1], x[kinds == 2] = torch.cat(list(pictures)), torch.cat(list(frames))
        positions, _ = model.model.get_rope_index(ids, kinds, **grids)
        want = model(inputs_embeds=x, position_ids=positions).logits[0]
    processor = Processor(described(paths["glm4v"]), store, weights=b"", dtype="float32")
    (request,) = processor.chat("r", parse_messages(messages, local=True), GREEDY).requests
    assert list(request.prompt_ids) == ids[0].tolist()
    difference = float((forced(rig, request, store) - want).abs().max())
    rig.close()
    assert difference < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("newer", "taken", "seconds"),
    [
        (False, range(0, 12, 2), ["0", "1", "2"]),  # 2 frames per second
        (True, range(12), [f"{i / 2:.1f} seconds" for i in range(6)]),  # 6, so all of them
    ],
)
def test_one_sampler_decides_the_prompt_and_the_pixels(newer, taken, seconds, tmp_path):
    """The file has 12 frames in 3 s, and each is as bright as its number says."""
    path, store = make_glm("glm4v", tmp_path, newer=newer), PixelStore(1 << 28)
    processor = Processor(described(path), store, weights=b"", dtype="float32")
    message = parse_messages([user({"type": "video", "video": movie(12, 4)})], local=True)
    (request,) = processor.chat("r", message, GREEDY).requests
    shown = processor.model.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
    frames = [f"<|begin_of_image|>{'<|image|>' * m.n_tokens}<|end_of_image|>" for m in request.media]
    written = "".join(map("".join, zip(frames, seconds, strict=True)))
    assert f"<|begin_of_video|>{written}<|end_of_video|>" in shown
    found = np.concatenate([store.get(m.pixels) for m in request.media]).mean((1, 2, 3)) / 20
    assert found.round().astype(int).tolist() == list(taken)


def movie(n: int, fps: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for i in range(n):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((64, 96, 3), 20 * i, np.uint8), "rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def test_positions_are_read_in_float32():
    layout = SimpleNamespace(places=torch.tensor([[0.0, 0.0], [3.0, 5.0]]), sizes=torch.tensor([[4.0, 6.0]] * 2))
    table = torch.randn((36, 8), generator=torch.Generator().manual_seed(1)).bfloat16()
    found = bicubic(table, 6, layout)
    assert found.dtype == torch.float32 and torch.equal(found, bicubic(table.float(), 6, layout))


def test_layers_behind_the_last_are_left_alone(tmp_path):
    """Published files have a layer for multi-token prediction there."""
    path = make_glm("glm4v_moe", tmp_path, 3)

    def with_one_more(tensors):
        more = {
            name.replace(".layers.2.", ".layers.3."): t.clone() for name, t in tensors.items() if ".layers.2." in name
        }
        return tensors | more | {"model.language_model.layers.3.eh_proj.weight": torch.zeros(64, 128)}

    rename_tensors(path, lambda name: name, with_one_more)
    assert len(load_model(path, Role.parse("EPD")).language.layers) == 3


@pytest.mark.parametrize("special", SPECIAL[6:])
def test_marks_in_a_users_words_are_refused(special, paths):
    processor = Processor(load_description(paths["glm_ocr"]), PixelStore(1 << 20), weights=b"", dtype="float32")
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        processor.chat("r", parse_messages([user(text(f"see {special} here"))]), GREEDY)


def test_the_processors_class_decides_how_frames_are_chosen(tmp_path):
    path = make_glm("glm46v", tmp_path)
    assert read_config(path).vision.videos.sampler == "glm4v", "as the files say"
    (path / "video_preprocessor_config.json").unlink()
    given = json.loads((path / "preprocessor_config.json").read_text())
    assert read_config(path).vision.videos.sampler == "glm4v", "as the pictures' file says"
    for name in ("preprocessor_config.json", "processor_config.json"):  # of transformers 4 and 5
        content = {n: v for n, v in given.items() if n != "processor_class"}
        wrapped = {"image_processor": content, "video_processor": content}
        (path / name).write_text(json.dumps(content if name.startswith("pre") else wrapped))
        config = read_config(path).vision
        assert config.videos.sampler == "glm46v", "that of the model's type"
        assert config.pixels.bounds.most == given["size"]["longest_edge"]
        (path / name).unlink()


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("vision_config", "spatial_merge_size", 3, "patch, merge and temporal patch sizes"),
        ("vision_config", "spatial_merge_size", [2], "vision_config.spatial_merge_size is"),
        ("vision_config", "patch_size", 0, "vision_config.patch_size is 0"),
        ("vision_config", "image_size", {}, "vision_config.image_size is"),
        ("vision_config", "image_size", 112, r"has shape \[36, 32\], config.json wants \[64, 32\]"),
        ("vision_config", "out_hidden_size", 32, "makes 32 columns, the text has 64"),
        ("vision_config", "hidden_act", "gelu", "'gelu' is not supported; supported: silu"),
        ("vision_config", "in_channels", 1, "in_channels 1 is not supported"),
        ("vision_config", "num_heads", 3, "3 vision heads over 32 columns"),
        ("text_config", "model_type", "glm4v_text", "text model 'glm4v_text' is not supported"),
        ("text_config", "first_k_dense_replace", -1, "first_k_dense_replace is -1"),
        ("text_config", "n_shared_experts", 1, "shared_expert"),
        ("text_config", "n_group", 3, "8 experts in 3 groups"),
        ("", "video_start_token_id", "x", "video_start_token_id is"),
        ("", "video_end_token_id", 9999, "the video end token id 9999"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(section, field, value, says, tmp_path):
    path = make_glm("glm4v_moe", tmp_path)
    content = json.loads((path / "config.json").read_text())
    (content[section] if section else content)[field] = value
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says) as e:
        load_description(path)
        load_model(path, Role.parse("EPD"))
    assert "\n" not in e.value.message
