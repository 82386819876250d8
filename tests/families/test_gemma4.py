"""What Gemma 4 has that other families lack: see `tests.families.gemma4`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.cache import for_stage
from hydrainfer.checkpoint import Matrix, Norm, Pool
from hydrainfer.core import CheckpointError, InvalidRequest, LiveSequence, Role, Stage, TokenWork
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs, load_model
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.models.projector import Projector, Surroundings
from hydrainfer.ops import select_ops, upload
from hydrainfer.ops.reference import gather_kv
from hydrainfer.processor import ChatOptions, PixelStore, Processor, load_description, parse_messages
from hydrainfer.runtime.packing import pack_tokens
from tests.checkpoints import rename_tensors
from tests.checkpoints_gemma4 import KINDS, make_gemma4
from tests.equivalence.criterion import Tally
from tests.equivalence.mixed import CHUNKED, ask, settled_stats
from tests.equivalence.test_layouts import check_whole
from tests.equivalence.test_prefix import converse
from tests.equivalence.test_windows import write
from tests.families.chats import PICTURES, user
from tests.families.gemma4 import CHATS, Gemma4Reference
from tests.pillow import described
from tests.runtime.harness import Rig

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = {"threads": 1, "native_kernels": False, "image_backend": "pillow"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {kind: make_gemma4(tmp_path_factory.mktemp(kind), kind, 10 + i) for i, kind in enumerate(KINDS)}


def prepared(path, messages):
    """A request, and its pictures and frames as the tower takes them."""
    store = PixelStore(1 << 28)
    processor = Processor(described(path), store, weights=b"", dtype="float32")
    (request,) = processor.chat("r", parse_messages(messages, local=True), GREEDY).requests
    return request, [PatchedPicture(store.get(m.pixels), m.grid) for m in request.media]


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_pictures_and_frames_are_those_of_transformers(kind, paths):
    """Several sizes in one pass; the reference computes in float64."""
    ours, theirs = load_model(paths[kind], Role.parse("E")), Gemma4Reference(paths[kind])
    theirs.model.double()
    for chat in ("several sizes", "wide", "tall", "tiny", "video"):
        inputs, (_, pictures) = theirs.inputs(CHATS[chat]), prepared(paths[kind], CHATS[chat])
        with torch.inference_mode():
            if chat == "video":
                frames, n_frames = inputs["pixel_values_videos"].double(), inputs["num_frames_per_video"]
                at = inputs["video_position_ids"]
                made = theirs.model.model.get_video_features(frames, at, n_frames, return_dict=True)
            else:
                made = theirs.model.get_image_features(inputs["pixel_values"].double(), inputs["image_position_ids"])
            difference = torch.cat(ours.encode(pictures)) - torch.cat(list(made.pooler_output))
        print(f"{kind}, {chat}: {float(difference.abs().max()):.1e}")
        assert float(difference.abs().max()) < 1e-5, chat


def by_rows(ops):
    """`ops` with products and attention that compute each row as if it were alone."""

    def linear(x, weight, bias=None):
        return torch.stack([ops.linear(row[None], weight, bias)[0] for row in x])

    def attention(q, fresh, cache, batch, scale, sinks, cap=0.0):
        found = torch.empty(*q.shape[:2], cache.values.shape[-1])
        owners = [i for i, n in enumerate(batch.counts) for _ in range(n)]
        for row, i in enumerate(owners):
            stop = batch.contexts[i] + row - int(batch.starts[i]) + 1
            keys, values = gather_kv(cache, batch.tables[i], stop, batch.seen_from(stop - 1))
            each = q.shape[1] // keys.shape[1]
            for h in range(q.shape[1]):
                scores = (keys[:, h // each] * q[row, h]).sum(-1) * scale
                found[row, h] = (scores.softmax(0)[:, None] * values[:, h // each]).sum(0)
        return found

    return replace(ops, linear=linear, attention=attention)


def test_layers_that_read_another_one_s_keys_run_for_the_wanted_rows_only(paths):
    """Two prompts and a decode in one batch: logits are those of a pass in which all layers run for all rows, bit by
    bit where products and attention do not depend on the number of rows."""
    rig, store = Rig(paths["e2b"]), PixelStore(1 << 28)
    language, decoder, work = rig.language, rig.model.language, []
    processor = Processor(described(paths["e2b"]), store, weights=b"", dtype="float32")
    for chat, start, count in (("text in turns", 10, 1), ("tall", 0, 60), ("turns", 20, 70)):
        (request,) = processor.chat(chat, parse_messages(CHATS[chat], local=True), GREEDY).requests
        seq = LiveSequence(request, (0.0, 0), 0.0)
        lease = rig.caches.reserve(chat, {n: s.need(request, 0, request.n_prompt) for n, s in rig.caches.specs.items()})
        seq.hold.blocks = lease.blocks
        rig.pixels.update({m.pixels: store.get(m.pixels) for m in request.media})
        assert not request.media or rig.encode([seq]).error is None
        work.append(TokenWork(seq, start, count, True))
    p = pack_tokens(work, language._tables, rig.embeds.spec, language._rotary, language._sums)
    seen, mlp, ops = [], decoder._mlp, decoder._ops

    def watched(layer, x, run):
        seen.append(len(x))
        mlp(layer, x, run)

    decoder._mlp = watched
    with torch.inference_mode():
        on = upload(language.arrays(p), language.device)
        caches = language.caches(p, on)
        last = language._last_rows(p, on, caches[rig.config.text.n_own - 1 :])
        for decoder._ops, bound in ((ops, 1e-5), (by_rows(ops), 0.0)):
            everywhere = rig.model.logits(language._whole(on, caches)[on["sample_rows"]])
            seen.clear()
            wanted = rig.model.logits(language._whole(on, caches, last))
            assert seen == [131] * 3 + [3] * 4
            assert float((everywhere - wanted).abs().max()) <= bound
    rig.close()


MOST = 240


def few(path):
    """GiB of caches that hold one request while it decodes, and one while it is prefilled."""
    specs = cache_specs(read_config(path), Role.parse("PD"), "float32", CHUNKED["block_tokens"])
    kv = [s for s in specs if s.size_option == "kv_cache_gib"]
    return sum(s.block_bytes * (s.held_by(MOST) + len(s.span(0, MOST))) for s in kv) / 2**30


@pytest.mark.parametrize("kind", ["e2b", "31b"])
def test_conversations_with_reuse_and_preemption(kind, paths):
    """Tokens are those where nothing is chunked, found again or preempted."""
    with LLM(paths[kind], launcher="inproc", prefix_cache=False, **CHUNKED | {"token_budget": 2048}) as llm:
        wanted = ask(llm), converse(llm), write(llm)
    for layout, options in (
        ("1EPD", {}),
        ("1E1P1D", {}),
        ("1EPD", {"kv_cache_gib": few(paths[kind]), "headroom_tokens": 0, "max_model_len": MOST}),
    ):
        with LLM(paths[kind], layout=layout, launcher="inproc", **CHUNKED | options) as llm:
            assert ask(llm) == wanted[0]
            assert (write(llm) == wanted[2]) if options else (converse(llm) == wanted[1])
            check_whole(llm)
            stats = settled_stats(llm)
            assert stats.n_preemptions > 0 if options else stats.tokens_found > 0


@pytest.mark.parametrize(("kind", "n_chunk"), [("e2b", 1), ("e2b", 7), ("31b", 1), ("31b", 7)])
def test_small_chunks(kind, n_chunk, paths):
    """They cut the pictures of E2B; those of 31B are computed at once."""
    reference, tally = Gemma4Reference(paths[kind]), Tally()
    with LLM(paths[kind], token_budget=n_chunk, block_tokens=4, **OPTIONS) as llm:
        for chat in (CHATS["tall"], CHATS["turns"][:1]):
            _, ids, gaps = reference.greedy(chat, GREEDY.max_tokens)
            (out,) = llm.chat(chat, GREEDY, use_tqdm=False)
            tally.add(kind, list(out.outputs[0].token_ids), ids, gaps)
    tally.check()


def test_pictures_see_each_other_in_layers_with_a_window_only(paths):
    config = read_config(paths["31b"])
    assert config.sees_whole == "windows" and not read_config(paths["e2b"]).sees_whole
    specs = cache_specs(config, Role.parse("EPD"), "float32")
    seen = {
        spec.name: config.sees_whole_in(spec.window) for spec in specs if spec is not for_stage(specs, Stage.ENCODE)
    }
    assert seen == {"kv": False, "kv.19": True}
    request, _ = prepared(paths["31b"], PICTURES["several sizes"])
    assert all(span.whole for span in request.media)
    assert specs[-1].ahead == config.vision.tokens == 1120, "a chunk holds the largest picture that may be asked for"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_numbers_are_standardised_in_float32(dtype):
    """The published bias is beyond what float16 holds near its scale: 5e4."""
    steps = (Pool(32.0, "pool"), Norm("norm", 1e-6, "plain"), Matrix("matrix", 8, bias=False))
    generator = torch.Generator().manual_seed(1)

    def make(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    def squares(x):
        return x.unflatten(0, (-1, 3, 3))

    def projector(make, dtype):
        return Projector(steps, 16, Surroundings(3, squares, make, select_ops("cpu", dtype, 16, only="reference")))

    narrow = projector(make, dtype)
    wide = projector(lambda *shape, **_: make(*shape, dtype=torch.float32), torch.float32)
    for name, slot in narrow.slots().items():
        slot.into.copy_(5e4 if name.endswith("bias") else torch.randn(slot.into.shape, generator=generator))
        wide.slots()[name].into.copy_(slot.into)
    x = (1560 + 40 * torch.randn((18, 16), generator=generator)).to(dtype)
    found, want = narrow(x), wide(x.float())
    assert found.dtype == dtype and found.isfinite().all()
    assert torch.allclose(found.float(), want, atol=0.03, rtol=0.03)


VALUES = "model.language_model.layers.3.self_attn.{}_proj.weight"


@pytest.mark.parametrize(
    ("same", "change", "says"),
    [
        (
            True,
            lambda tensors: tensors | {VALUES.format("v"): tensors[VALUES.format("k")].clone()},
            r"attention_k_eq_v is true, but the files hold .*3\.self_attn\.v_proj",
        ),
        (
            False,
            lambda tensors: {name: t for name, t in tensors.items() if name != VALUES.format("v")},
            r"1 tensors are missing, first text\.layers\.3\.self_attn\.v_proj",
        ),
    ],
)
def test_a_value_matrix_too_many_or_too_few_is_refused_in_one_line(same, change, says, tmp_path):
    path = make_gemma4(tmp_path / "changed", "31b", text={"attention_k_eq_v": same})
    rename_tensors(path, lambda name: name, change)
    with pytest.raises(CheckpointError, match=says) as e:
        load_model(path, Role.parse("EPD"))
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    ("kind", "section", "field", "value", "says"),
    [
        ("e2b", "text_config", "num_kv_shared_layers", 7, "num_kv_shared_layers 7 of 7 layers"),
        ("e2b", "text_config", "num_kv_shared_layers", 4, "no layer before them has full_attention"),
        ("e2b", "text_config", "hidden_size_per_layer_input", -1, "hidden_size_per_layer_input is -1"),
        ("e2b", "text_config", "use_bidirectional_attention", "all", "'all' is not supported"),
        ("31b", "text_config", "num_global_key_value_heads", 3, "4 heads over 3 KV heads"),
        ("26b-a4b", "text_config", "top_k_experts", 9, "top_k_experts 9 of 8 experts"),
        ("31b", "vision_config", "pooling_kernel_size", 2, "the vision tower \\(16, 2\\)"),
        ("31b", "vision_config", "patch_size", [16], "vision_config.patch_size is"),
        ("31b", "vision_config", "num_key_value_heads", 2, "4 vision heads over 2 KV heads"),
        ("31b", "vision_config", "head_dim", 12, "4 vision heads of width 12 over 64 columns"),
        ("31b", "vision_config", "position_embedding_size", 100, "less than the 3360 patches"),
        ("31b", "vision_config", "hidden_activation", "tanh", "'tanh' is not supported"),
        ("31b", "", "vision_config", None, "vision_config is missing"),
        ("31b", "", "boi_token_id", 9999, "the vision start token id 9999"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_one_line(kind, section, field, value, says, tmp_path, paths):
    path = tmp_path / "changed"
    path.mkdir()
    for file in paths[kind].iterdir():
        (path / file.name).symlink_to(file)
    content = json.loads((path / "config.json").read_text())
    (content[section] if section else content)[field] = value
    content["text_config"].pop("per_layer_config", None)  # the published files have single fields instead
    if field == "num_kv_shared_layers" and value == 4:
        content["text_config"]["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"] * 4
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says) as e:
        load_description(path)
        load_model(path, Role.parse("EPD"))
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_soft_tokens": 100}, "must be one of 70, 140, 280, 560, 1120"),
        ({"max_pixels": 9}, "'max_pixels' is not known; this model takes max_soft_tokens, num_frames, fps"),
        ({"fps": 1, "num_frames": 2}, "exclude each other"),
    ],
)
def test_wrong_options_of_a_request_name_the_right_ones(options, says, paths):
    processor = Processor(load_description(paths["e2b"]), PixelStore(1 << 20), weights=b"", dtype="float32")
    with pytest.raises(InvalidRequest, match=says):
        processor.chat("r", parse_messages(PICTURES["one"], local=True), GREEDY, options=ChatOptions(media=options))


def test_a_request_s_budget_decides_the_pictures_size(paths):
    reference, tally = Gemma4Reference(paths["31b"]), Tally()
    reference.pictures.max_soft_tokens = 140
    with LLM(paths["31b"], **OPTIONS) as llm:
        (out,) = llm.chat(PICTURES["one"], GREEDY, mm_processor_kwargs={"max_soft_tokens": 140}, use_tqdm=False)
    prompt_ids, ids, gaps = reference.greedy(PICTURES["one"], GREEDY.max_tokens)
    assert list(out.prompt_token_ids) == prompt_ids and len(ids) > 1
    tally.add("140", list(out.outputs[0].token_ids), ids, gaps)


@pytest.mark.parametrize("mark", ["<|image|>", "<|video|>", "<|image>"])
def test_marks_in_a_users_words_are_refused(mark, paths):
    processor = Processor(load_description(paths["e2b"]), PixelStore(1 << 20), weights=b"", dtype="float32")
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        processor.chat("r", parse_messages([user({"type": "text", "text": f"see {mark} here"})]), GREEDY)


def test_audio_is_refused():
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    with pytest.raises(InvalidRequest, match="audio"):
        parse_messages([user(part)])
