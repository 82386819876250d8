"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and LFM3-VL against transformers: embeddings, logits, positions; what a
checkpoint may say."""

from __future__ import annotations

import copy
import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hydrainfer.core import (
    CheckpointError,
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    TokenWork,
)
from hydrainfer.families import read_config
from hydrainfer.models import PatchedPicture, fingerprint, load_model
from hydrainfer.models import frames as towers
from hydrainfer.ops import select_ops, upload
from hydrainfer.ops.memory import rows_in_steps
from hydrainfer.processor import PixelStore, Processor, load_description, parse_messages
from hydrainfer.processor.pictures import VideoShape
from hydrainfer.runtime.packing import pack_tokens
from hydrainfer.runtime.positions import prompt_positions
from tests.checkpoints_qwen import FAMILIES, make_qwen
from tests.equivalence.criterion import LOGIT_TOLERANCE
from tests.equivalence.qwen_reference import Reference
from tests.equivalence.test_qwen import CHATS
from tests.pillow import described
from tests.runtime.harness import Rig

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

GRIDS = [(1, 2, 2), (1, 5, 3), (3, 4, 6), (1, 1, 1), (1, 9, 4), (2, 8, 8)]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    path = make_qwen(request.param, tmp_path_factory.mktemp("qwen"), 2)
    return path, Reference(path)


def pictures(config, seed=0):
    rng, side = np.random.default_rng(seed), config.patch * config.merge
    return [
        PatchedPicture(rng.integers(0, 256, (1 if t == 1 else 2 * t, h * side, w * side, 3), dtype=np.uint8), (t, h, w))
        for t, h, w in GRIDS
    ]


def features(reference, some):
    """What transformers makes of these pictures, levels side by side."""
    p = reference.pictures
    reference.target = lambda n, h, w: (h, w)
    patches = torch.cat([reference.patches(x.pixels)[0] for x in some])
    grids = torch.tensor([[t, 2 * h, 2 * w] for t, h, w in (x.grid for x in some)])
    del reference.target
    with torch.inference_mode():
        if reference.family == "lfm3_vl":
            return torch.cat(reference.model.get_image_features(patches, grids).pooler_output)
        made = reference.model.model.visual(patches, grid_thw=grids)
    assert p.merge_size == 2
    return torch.cat([made.pooler_output, *getattr(made, "deepstack_features", ())], dim=1)


def test_embeddings_of_ragged_pictures(case, monkeypatch):
    path, reference = case
    model = load_model(path, Role.parse("E"))
    some = pictures(model.config.vision)
    want = features(reference, some)
    got = model.encode(some)
    assert [len(rows) for rows in got] == [model.vision.rows(p) for p in some] == [t * h * w for t, h, w in GRIDS]
    assert want.shape[1] == model.config.embed_width
    difference = float((torch.cat(got) - want).abs().max())
    print(f"{path.name}: embeddings differ by {difference:.1e}")
    assert difference < LOGIT_TOLERANCE
    alone = torch.cat([model.encode([p])[0] for p in some])
    assert (alone - want).abs().max() < LOGIT_TOLERANCE, "each as if it were alone"
    monkeypatch.setattr(towers, "_PASS_ROWS", 70)
    assert (torch.cat(model.encode(some)) - want).abs().max() < LOGIT_TOLERANCE, "in several passes"
    monkeypatch.setattr(towers, "_CPU_PASS_BYTES", 1)
    assert [len(each) for each in model.vision._split(some)] == [1] * len(some)
    frames = some[2].pixels  # a video in pieces is the video
    pieces = model.encode([PatchedPicture(frames[:2], (1, 4, 6)), PatchedPicture(frames[2:], (2, 4, 6))])
    assert (torch.cat(pieces) - got[2]).abs().max() < LOGIT_TOLERANCE


def test_pictures_of_many_sizes_are_few_numbers_of_rows(case):
    """For each number of rows oneDNN compiles code that stays."""
    found, met = select_ops("cpu", torch.float32, 64, use_native=False), set()

    def linear(x, weight, bias=None):
        met.add(x.shape[0])
        return found.linear(x, weight, bias)

    products = SimpleNamespace(compiles=lambda *_: True, packs=lambda _: False, prepare=lambda _: None)
    model = load_model(case[0], Role.parse("E"), ops=replace(found, linear=linear, products=products))
    side = model.config.vision.patch * model.config.vision.merge
    for w in range(5, 40):
        pixels = np.zeros((1, 4 * side, w * side, 3), dtype=np.uint8)
        assert model.encode([PatchedPicture(pixels, (1, 4, w))])[0].shape[0] == 4 * w
    assert met == {rows_in_steps(rows) for rows in met}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_embeddings_in_half_precision(case, dtype):
    path, reference = case
    model = load_model(path, Role.parse("E"), dtype=dtype)
    some = pictures(model.config.vision)
    want, got = features(reference, some), torch.cat(model.encode(some)).float()
    assert float((got - want).pow(2).mean().sqrt() / want.std()) < {"bfloat16": 0.05, "float16": 0.01}[dtype]


def test_patched_pictures_of_a_wrong_shape_are_refused(case):
    model = load_model(case[0], Role.parse("E"))
    side = model.config.vision.patch * 2
    for shape, grid in [
        ((1, side, side, 3), None),
        ((1, side, side, 3), (1, 1, 2)),
        ((2, side, side, 3), (2, 1, 1)),
        ((3, side, side, 3), (1, 1, 1)),
        ((1, side, side), (1, 1, 1)),
        ((1, 0, 0, 3), (1, 0, 0)),
    ]:
        assert model.vision.rows(PatchedPicture(np.zeros(shape, np.uint8), grid)) is None, (shape, grid)


def logits(rig, request, store):
    """Of every position of the prompt, one forward."""
    n, language = request.n_prompt, rig.language
    seq = LiveSequence(request, (0.0, 0), 0.0)
    lease = rig.caches.reserve(seq.id, {name: s.need(request, 0, n) for name, s in rig.caches.specs.items()})
    seq.hold.blocks = lease.blocks
    rig.pixels.update({m.pixels: store.get(m.pixels) for m in request.media})
    if request.media:
        assert rig.encode([seq]).error is None
    work = [TokenWork(seq, 0, n, True)]
    p = pack_tokens(work, language._tables, rig.embeds.spec, language._rotary, language._sums)
    with torch.inference_mode():
        on = upload(language.arrays(p), language.device)
        x = rig.model.embed(on["ids"])
        deep = language._place_embeddings(on, x)
        hidden = rig.model.forward(x, on["positions"], language.caches(p, on), deep=deep)
        found = rig.model.logits(hidden)
    rig.caches.release(lease)
    return found


def test_teacher_forced_logits(case):
    """Against transformers in float64: its own float32 is up to 1.3e-4 from that on these checkpoints."""
    path, reference = case
    exact = copy.deepcopy(reference.model).double()
    exact.set_experts_implementation("eager")  # torch has no grouped products in float64
    rig, store, most = Rig(path), PixelStore(1 << 28), 0.0
    processor = Processor(described(path), store, weights=b"", dtype="float32")
    for name, chat in CHATS.items():
        prepared = processor.chat(name, parse_messages(chat, local=True), SamplingParams(temperature=0.0, max_tokens=1))
        inputs = reference.inputs(chat)
        assert list(prepared.prompts[0]) == inputs["input_ids"][0].tolist()
        exact.model.rope_deltas = None
        wide = {key: value.double() if key.startswith("pixel") else value for key, value in inputs.items()}
        with torch.inference_mode():
            want = exact(**wide).logits[0]
        most = max(most, float((logits(rig, prepared.requests[0], store) - want).abs().max()))
    print(f"{path.name}: logits differ by {most:.1e}")
    assert most < LOGIT_TOLERANCE
    rig.close()


def test_yarn_beside_positions_of_three_dimensions(tmp_path):
    """As Qwen's models are made to take longer prompts."""
    path = make_qwen("qwen2_vl", tmp_path, 2)
    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"] |= {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    test_teacher_forced_logits((path, Reference(path)))


def test_positions_of_random_mixtures(case):
    """As `get_rope_index`, which sees whole videos where we have several spans."""
    path, reference = case
    model, c = reference.model.model, reference.config
    if not hasattr(model, "get_rope_index"):
        pytest.skip("positions are plain")
    images = load_description(path).images
    rng = random.Random(5)
    for trial in range(40):
        ids, spans, grids, seconds = [], [], {1: [], 2: []}, []
        for _ in range(rng.randint(0, 5)):
            ids += [5] * rng.randint(1, 9)
            kind = rng.choice((1, 2))
            if kind == 1:
                items = [images.adapter.fit(rng.randint(20, 700), rng.randint(20, 700))]
                grids[1].append([1, *(2 * n for n in items[0].grid[1:])])
            else:
                n, fps = rng.randint(2, 90), rng.choice((1, 7.5, 23.976, 24, 29.97, 30, 60))
                shape = VideoShape(n, fps, rng.randint(60, 400), rng.randint(60, 400))
                indices = images.video.adapter.sample(shape, 768)
                items = images.video.adapter.items(shape, indices)
                n_pairs = sum(item.grid[0] for item in items)
                assert n_pairs == -(-len(indices) // 2)
                grids[2].append([n_pairs, *(2 * n for n in items[0].grid[1:])])
                seconds.append(2 / (len(indices) / n * fps))
            for i, item in enumerate(items):
                if item.before and i:
                    ids += [5] * 3  # its time, in words
                spans.append(MediaSpan(len(ids), item.n_tokens, b"", "", item.grid, item.times, item.joined))
                ids += [(c.image_token_id, c.video_token_id)[kind - 1]] * item.n_tokens
        ids += [5] * rng.randint(1, 5)
        request = Request(
            id=str(trial), prompt_ids=tuple(ids), sampling=SamplingParams(), max_tokens=8, seed=0, media=tuple(spans)
        )
        row = torch.tensor([ids])
        want, delta = model.get_rope_index(
            row,
            mm_token_type_ids=(row == c.image_token_id).int() + 2 * (row == c.video_token_id).int(),
            image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
            video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
            **({"second_per_grid_ts": torch.tensor(seconds)} if reference.family == "qwen2_5_vl" else {}),
        )
        got = prompt_positions(request)
        assert np.array_equal(got.table, want[:, 0].numpy())
        assert got.delta == (int(delta) if spans else 0)


def test_spellings_and_shards_are_one_model(case, tmp_path):
    path, reference = case
    other = make_qwen(reference.family, tmp_path / "other", 2, shards=3, published=False)
    assert read_config(path) == read_config(other)
    stacked = read_config(path).text.experts is not None  # in one of the two
    assert (fingerprint(path) == fingerprint(other)) is not stacked
    some = pictures(read_config(path).vision)[:2]
    one, two = (load_model(p, Role.parse("E")).encode(some) for p in (path, other))
    assert all(torch.equal(a, b) for a, b in zip(one, two))
    names = load_model(path, Role.parse("D")).slots()
    assert not any(n.startswith("vision.") for n in names) and "lm_head.weight" in names


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("", {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window false"),
        ("", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "does not sum to half"),
        ("", {"rope_scaling": {"type": "dynamic", "factor": 4.0, "mrope_section": [2, 3, 3]}}, "rope type 'dynamic'"),
        ("", {"hidden_act": "gelu"}, "supported: silu"),
        ("vision_config", {"hidden_size": 32}, "the vision tower makes 32 columns, the text has 64"),
        ("vision_config", {"hidden_act": "tanh"}, "vision hidden_act"),
        (
            "vision_config",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope type 'linear' of the vision",
        ),
        ("vision_config", {"num_heads": 3}, "3 vision heads over 32"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_unsupported_settings_of_a_qwen_checkpoint_are_refused(tmp_path_factory, tmp_path, section, changes, says):
    path = tmp_path_factory.getbasetemp() / "refused"
    if not path.exists():
        make_qwen("qwen2_vl", path)
    broken = shutil.copytree(path, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (config[section] if section else config).update(changes)
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says) as e:
        read_config(broken)
    assert "\n" not in str(e.value)


def test_the_largest_picture(tmp_path):
    path = make_qwen("qwen2_vl", tmp_path, pixels=(3136, 12_845_056))
    assert read_config(path).vision.tokens == 16_384
