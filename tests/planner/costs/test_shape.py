"""Models as numbers: counted by hand, against the models themselves, and against what the paper shows of an H800."""

from dataclasses import replace

import msgspec
import pytest

from hydrainfer.builtin import MODEL
from hydrainfer.cache import EmbedSpec
from hydrainfer.config import ServeConfig
from hydrainfer.core import CheckpointError, ConfigError, Role
from hydrainfer.families import read_config
from hydrainfer.planner.costs.hardware import read_hardware
from hydrainfer.planner.costs.shape import TAKE_TURNS, blocks_of, cost_of, together
from hydrainfer.planner.inputs import prompts_of, shape_of

pytestmark = pytest.mark.cpu
ROLES = ("E", "P", "D", "EP", "ED", "PD", "EPD")
H800 = read_hardware("h800")


@pytest.fixture(scope="module")
def llava():
    return shape_of("llava-1.5-7b")


@pytest.fixture(scope="module")
def cost(llava):
    return cost_of(llava, H800)


def test_llava_by_hand(llava):
    language = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32064 * 4096
    vision = 3 * 14**2 * 1024 + 23 * 12 * 1024**2 + 1024 * 4096 + 4096**2
    assert llava.weight_bytes(Role.parse("P")) == 2 * language
    assert llava.weight_bytes(Role.parse("E")) == 2 * vision
    assert llava.weight_bytes(Role.parse("ED")) == 2 * (language + vision)
    assert llava.kv_token_bytes == 2 * 32 * 4096 * 2 and llava.embed_width == 4096


def test_qwen_by_hand():
    shape = shape_of("qwen2-vl-7b")
    assert shape.kv_token_bytes == 2 * 28 * 4 * 128 * 2
    assert shape.step_weights == pytest.approx(7.07e9, rel=0.01)  # 7.6 G with the token table
    assert shape.vision.weights == pytest.approx(675e6, rel=0.01)
    assert shape.dtype == "bfloat16" and shape.vision.window_rows == 0


SIZES = ((448, 448), (1024, 768), (640, 480), (1920, 1080), (300, 2000))
PUBLISHED = {
    "glm-4.6v-flash": (10_292_777_472, 40_960, [256, 999, 391, 2691, 781]),
    "internvl3.5-8b": (8.5e9, 147_456, [256, 3328, 3328, 2304, 2048]),
    "llava-onevision-7b": (8.03e9, 57_344, [3699, 4725, 2929, 7269, 4941]),
    "ministral-3-8b": (8_918_026_240, 139_264, [256, 1036, 414, 1705, 495]),
    "mistral-small-3.2": (24_011_361_280, 163_840, [256, 1036, 414, 1705, 495]),
    "smolvlm2-2.2b": (2_246_784_880, 196_608, [1377, 1053, 1053, 1053, 405]),
}
ROWS = {  # of a picture of 1024 x 768, and how many of them see each other
    "gemma-4-26b-a4b": (57 * 42, 57 * 42),
    "gemma-4-31b": (57 * 42, 57 * 42),
    "gemma-4-e2b": (57 * 42, 57 * 42),
    "glm-4.6v-flash": (74 * 54, 74 * 54),
    "internvl3.5-8b": (13 * 1025, 1025),
    "llava-onevision-7b": (7 * 729, 729),
    "ministral-3-8b": (74 * 56, 74 * 56),
    "mistral-small-3.2": (74 * 56, 74 * 56),
    "smolvlm2-2.2b": (13 * 729, 729),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_that_see_have_their_published_size(name):
    """Parameters, bytes of the KV cache per token, and tokens of pictures."""
    parameters, token_bytes, tokens = PUBLISHED[name]
    shape, prompts = shape_of(name), prompts_of(name)
    assert shape.step_weights + shape.head_weights + shape.vision.weights == pytest.approx(parameters, rel=0.005)
    assert shape.kv_token_bytes == token_bytes
    assert [prompts.picture(*size) for size in SIZES] == tokens


@pytest.mark.parametrize("name", ROWS)
def test_encode_computes_all_rows_of_a_picture(name):
    """Two FLOPs for each row, or token, and each weight that it is multiplied with; four for each pair of rows that see
    each other and each of their numbers in each layer."""
    n_rows, n_seen = ROWS[name]
    shape, n_tokens = shape_of(name), prompts_of(name).picture(1024, 768)
    cost, v = cost_of(shape, H800), shape.vision
    flops = (cost.encode_s([n_tokens]) - cost.encode_base_s) * H800.vision_flops_per_s
    products = 2 * (v.row_weights * n_rows + v.token_weights * n_tokens)
    assert flops == pytest.approx(products + 4 * v.layers * v.hidden * n_rows * n_seen)


@pytest.mark.parametrize(
    ("name", "text", "whole", "token_bytes", "window_bytes"),
    [
        ("gemma-4-e2b", None, 4_797_113_600, 3 * 2 * 512, 12 * 2 * 256 * 512),
        ("gemma-4-26b-a4b", 25.2e9, 25_805_933_872, 5 * 2 * 2 * 512, 25 * 2 * 8 * 256 * 1024),
        ("gemma-4-31b", 30.7e9, 31_273_086_512, 10 * 2 * 4 * 512, 50 * 2 * 16 * 256 * 1024),
    ],
)
def test_gemma_4_by_hand(name, text, whole, token_bytes, window_bytes):
    """`text`: the published number of the language model's parameters; `whole`: what transformers counts without the
    audio tower. E2B is published as 2.3 billion and 5.1 with its tables and the audio tower."""
    shape, prompts = shape_of(name), prompts_of(name)
    language = shape.step_weights + shape.table_weights
    assert text is None or language == pytest.approx(text, rel=0.005)
    assert language + shape.vision.weights + shape.vision.table_weights == pytest.approx(whole, rel=1e-4)
    assert shape.kv_token_bytes == 2 * token_bytes and shape.window_bytes == 2 * window_bytes
    assert [prompts.picture(*size) for size in SIZES] == [256, 266, 266, 264, 258]
    assert prompts.whole == shape.sees_whole == (name != "gemma-4-e2b") and shape.vision.picture_tokens == 1120
    assert [spec.name for spec in blocks_of(shape, H800, Role.parse("EPD"))][:2] == ["embed", "kv"]


@pytest.mark.parametrize("name", ["ministral-3-8b", "mistral-small-3.2"])
def test_prompts_have_a_text_after_each_row_of_a_picture(name):
    """A picture of 1024 x 768 has 28 rows of 37 tokens. The text after the last row is one of those around it."""
    prompts = prompts_of(name)
    assert [prompts.inner(*size) for size in SIZES] == [15, 27, 17, 30, 54]
    assert prompts.text("", 1) - prompts.text("", 0) == 1


def test_layers_that_read_another_one_s_keys_do_nothing_in_a_prompt():
    shape = shape_of("gemma-4-e2b")
    cost, without = cost_of(shape, H800), cost_of(msgspec.structs.replace(shape, reads=()), H800)
    assert shape.n_own == 15 and cost.prefill_token_s < 15 / 35 * without.prefill_token_s
    assert cost.context_s == 7 / 3 * shape.kv_token_bytes / H800.traffic_bytes_per_s, "all full layers read keys"


@pytest.mark.parametrize(("n_tokens", "fewer"), [(8192, 3.9), (32768, 5.7), (131072, 6.5)])
def test_a_request_of_gemma_takes_fewer_bytes_than_if_all_layers_kept_all(n_tokens, fewer):
    shape = shape_of("gemma-3-4b")
    assert shape.seen.count(0) == 5 and shape.seen.count(1024) == 29 and shape.vision.picture_tokens == 256
    full, window = blocks_of(shape, H800, Role.parse("D"))
    assert shape.kv_token_bytes == 5 * 2 * 4 * 256 * 2
    ours = sum(spec.block_bytes * spec.held_by(n_tokens) for spec in (full, window))
    assert 34 / 5 * full.block_bytes * full.held_by(n_tokens) / ours == pytest.approx(fewer, abs=0.05)


@pytest.mark.parametrize(
    ("name", "n_tokens", "fewer"),
    [
        *(("mimo-v2-flash", n, fewer) for n, fewer in ((8192, 8.3), (32768, 9.3), (131072, 9.6))),
        *(("gpt-oss-20b", n, fewer) for n, fewer in ((8192, 1.96), (32768, 1.99), (131072, 2.0))),
    ],
)
def test_a_request_of_a_mixture_takes_fewer_bytes_than_if_all_layers_kept_all(name, n_tokens, fewer):
    shape = shape_of(name)
    big = msgspec.structs.replace(H800, memory_bytes=2**40)
    specs = full, window = tuple(blocks_of(shape, big, Role.parse("D")))
    assert window.window == {"mimo-v2-flash": 129, "gpt-oss-20b": 128}[name]
    all_full = (full.block_bytes + window.block_bytes) * full.held_by(n_tokens)
    assert all_full / sum(s.block_bytes * s.held_by(n_tokens) for s in specs) == pytest.approx(fewer, abs=0.1)


def test_mixtures_by_hand():
    """MiMo-V2-Flash has 309 billion weights, of which a token uses 15; GPT-OSS 20.9 and 3.6, with the token table."""
    mimo, oss = shape_of("mimo-v2-flash"), shape_of("gpt-oss-20b")
    assert mimo.seen.count(0) == 9 and mimo.seen.count(129) == 39
    assert mimo.kv_token_bytes == 9 * 4 * (192 + 128) * 2
    assert mimo.window_bytes == 39 * 8 * (192 + 128) * 129 * 2
    assert mimo.step_weights + mimo.head_weights == pytest.approx(309e9, rel=0.01)
    assert sum(mimo.layer_weights(i, used=True) for i in range(48)) == pytest.approx(15e9, rel=0.1)
    assert oss.step_weights + oss.head_weights == pytest.approx(20.9e9, rel=0.01)
    used = sum(oss.layer_weights(i, used=True) for i in range(24)) + oss.head_weights
    assert used == pytest.approx(3.6e9, rel=0.15)


def test_a_batch_reads_the_experts_that_it_chooses():
    """One token an eighth of them, many nearly all; and what is read never counts twice."""
    shape = shape_of("gpt-oss-20b")
    cost = cost_of(shape, H800)
    assert cost.expert_share == 4 / 32
    assert cost.experts_read_s(1) == pytest.approx(cost.experts_s / 8)
    assert cost.experts_read_s(8) == pytest.approx(cost.experts_s * (1 - (7 / 8) ** 8))
    assert cost.experts_read_s(512) == pytest.approx(cost.experts_s)
    bytes_per_s = H800.traffic_bytes_per_s
    assert (cost.weights_s + cost.experts_s) * bytes_per_s == pytest.approx(2 * shape.step_weights)
    one, eight = (cost.language_s(0, 0, n, n) - cost.step_base_s for n in (1, 8))
    assert 2 < eight / one < 6, "no dense model takes longer for eight than for one"


@pytest.mark.parametrize(
    ("name", "n_tokens", "fewer"),
    [("qwen3.5-9b", 8192, 2.9), ("qwen3.5-9b", 32768, 3.65), ("qwen3.5-9b", 131072, 3.9)],
)
def test_a_request_with_states_takes_so_many_times_fewer_bytes(name, n_tokens, fewer):
    """The bytes are compared with those of layers that keep every token: a state takes as much at any length."""
    shape = shape_of(name)
    sizes = blocks_of(shape, H800, Role.parse("D"))
    held = sum(spec.block_bytes * spec.held_by(n_tokens) for spec in sizes)
    attending = msgspec.structs.replace(shape, recurrence=None)
    assert attending.kv_token_bytes * n_tokens / held == pytest.approx(fewer, rel=0.01)
    (state,) = (spec for spec in sizes if not spec.paged)
    assert state.block_bytes == shape.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


@pytest.mark.parametrize(("n_tokens", "fewer"), [(8192, 3.87), (32768, 3.97), (131072, 3.99)])
def test_a_request_of_lfm3_takes_a_fourth_of_the_bytes(n_tokens, fewer):
    """All kinds of caches in one model; compared with 24 layers that keep every token."""
    shape = shape_of("lfm3-vl-2b")
    sizes = blocks_of(shape, H800, Role.parse("D"))
    assert [spec.name for spec in sizes] == ["kv", "kv.256", "state"]
    held = sum(spec.block_bytes * spec.held_by(n_tokens) for spec in sizes)
    assert 24 * 2 * 4 * 128 * 2 * n_tokens / held == pytest.approx(fewer, rel=0.01)
    assert shape.state_bytes == 13 * 6 * 2048 * 2
    assert shape.step_weights == pytest.approx(1.7e9, rel=0.02)


def test_states_are_read_and_written_by_every_decode():
    shape = shape_of("qwen3.5-9b")
    assert shape.kv_token_bytes == 8 * 2 * 4 * 256 * 2 and shape.vision.picture_tokens == 16384
    assert shape.step_weights + shape.head_weights + shape.vision.weights == pytest.approx(9.4e9, rel=0.02)
    cost = cost_of(shape, H800)
    assert cost.sequence_s == pytest.approx(2 * shape.state_bytes / H800.traffic_bytes_per_s)
    assert cost.context_s == pytest.approx(shape.kv_token_bytes / H800.traffic_bytes_per_s)
    sparse = shape_of("qwen3-next-80b-a3b")
    assert sparse.step_weights + sparse.head_weights == pytest.approx(80e9, rel=0.02)
    assert sum(sparse.layer_weights(i, used=True) for i in range(48)) == pytest.approx(3e9, rel=0.2)


def test_windows_bound_what_a_long_context_costs():
    shape = shape_of("gemma-3-4b")
    without = msgspec.structs.replace(shape, windows=())
    cost, all_full = (cost_of(s, H800) for s in (shape, without))
    assert cost.context_s == pytest.approx(all_full.context_s * 5 / 34)
    near, far = (c.language_s(0, 0, 8, 8 * 1024) for c in (cost, all_full))
    assert near == pytest.approx(far, rel=0.01), "a context of one window is read whole"
    assert cost.language_s(0, 0, 8, 8 * 65536) < 0.3 * all_full.language_s(0, 0, 8, 8 * 65536)
    blocks = blocks_of(shape, H800, Role.parse("EPD"))
    assert [spec.name for spec in blocks] == ["embed", "kv", "kv.1024"] and min(blocks.values()) > 64


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("role", ROLES)
def test_bytes_are_those_that_the_engine_loads(role, quantization):
    import torch

    from hydrainfer.models import Model
    from hydrainfer.ops import select_ops

    config = read_config(MODEL)
    ops = select_ops("cpu", torch.float32, config.text.head_dim, use_native=False)
    ops = replace(ops, int8=quantization == "int8")
    loaded = Model(config, Role.parse(role), ops, torch.float32, torch.device("cpu"))
    shape = shape_of(str(MODEL), "float32", quantization)
    assert shape.weight_bytes(Role.parse(role)) == pytest.approx(loaded.weight_bytes, rel=0.02)  # norms, biases, scales


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_bytes_of_the_qwens(family, tmp_path):
    import torch

    from hydrainfer.models import Model
    from hydrainfer.ops import select_ops
    from tests.checkpoints_qwen import make_qwen

    path = make_qwen(family, tmp_path / family)
    config = read_config(path)
    ops = select_ops("cpu", torch.float32, config.text.head_dim, use_native=False)
    shape = shape_of(str(path), dtype="float32")
    for role in map(Role.parse, ("E", "P")):
        loaded = Model(config, role, ops, torch.float32, torch.device("cpu"))
        assert shape.weight_bytes(role) == pytest.approx(loaded.weight_bytes, rel=0.06), (
            role
        )  # norms, biases, positions
    assert shape.deepstack == (2 if family == "qwen3_vl" else 0)
    assert (shape.vision.window_rows > 0) == (family == "qwen2_5_vl")
    assert prompts_of(str(path)).picture(640, 480) > 0


@pytest.mark.parametrize("role", ROLES)
def test_caches_are_those_that_the_engine_makes(role):
    import torch

    from hydrainfer.assemble.sizes import cache_sizes

    made, _ = cache_sizes(
        ServeConfig(model=str(MODEL)), read_config(MODEL), Role.parse(role), "float32", torch.device("cpu"), 512, 1.0
    )
    planned = blocks_of(shape_of(str(MODEL), dtype="float32"), read_hardware("this-cpu"), Role.parse(role))
    assert list(made) == list(planned)
    embeds = [(s, n) for s, n in made.items() if isinstance(s, EmbedSpec)]
    assert embeds == [(s, n) for s, n in planned.items() if isinstance(s, EmbedSpec)]


def test_the_kv_cache_gets_what_is_left(llava):
    role = Role.parse("EPD")
    blocks = blocks_of(llava, H800, role)
    taken = sum(spec.block_bytes * n for spec, n in blocks.items()) + llava.weight_bytes(role) + H800.workspace_bytes
    block = next(spec for spec in blocks if spec.name == "kv").block_bytes
    assert 0 <= H800.memory_bytes * H800.memory_share - taken < block


def test_a_model_that_does_not_fit_is_refused_with_the_missing_bytes(llava):
    small = msgspec.structs.replace(H800, memory_bytes=16 * 2**30)
    with pytest.raises(ConfigError, match=r"llava-1.5-7b as PD does not fit h800: 12.6 GiB .* want 0\.\d GiB more"):
        blocks_of(llava, small, Role.parse("PD"))
    assert blocks_of(llava, small, Role.parse("E"))


class TestFigure6:
    """LLaVA-1.5-7B on one H800 (paper, section 3.2): encode saturates at about 6 pictures, prefill at one request of
    1024 tokens, decode with 1024 tokens of context at about 512."""

    def test_encode(self, cost):
        limit = 1 / (576 * cost.encode_token_s)
        share = {n: n / cost.encode_s([576] * n) / limit for n in (1, 2, 4, 6, 8)}
        assert share[1] < 0.65 and share[4] < 0.9 and 0.88 < share[6] < 0.92 and share[8] - share[6] < 0.04
        assert 1e-3 < cost.encode_s([576]) < 4e-3

    def test_prefill(self, cost):
        def rate(n):
            return n / cost.language_s(1024 * n, 1024 * 1024 * n, 0, 0)

        assert rate(1) > 0.94 * rate(16)
        assert 0.02 < 1 / rate(1) < 0.04

    def test_decode(self, cost):
        def rate(n):
            return n / cost.language_s(0, 0, n, 1025 * n)

        limit = 1 / (1025 * cost.context_s)
        assert rate(64) > 15 * rate(1)
        assert rate(256) < 0.91 * limit and 0.93 < rate(512) / limit < 0.96
        assert 0.005 < 1 / rate(1) < 0.01 and 0.015 < 64 / rate(64) < 0.03


def test_a_grid_of_rooflines(llava, cost):
    """Prefill is bound by arithmetic, decode by traffic, whatever the device."""
    for name in ("h800", "h200", "a100", "l40s", "h20"):
        c = cost_of(llava, read_hardware(name))
        assert c.prefill_token_s * 1024 > c.weights_s
        assert c.decode_token_s * 32 + c.decode_context_s * 32 * 1024 < c.weights_s + c.context_s * 32 * 1024
    assert cost_of(llava, read_hardware("h200")).weights_s < cost.weights_s


def test_side_by_side(llava, cost):
    speed = together(llava, H800, cost)
    assert 1.2 < speed < 1.4
    assert 1 + 1 / cost.overlap_slowdown == pytest.approx(speed)
    assert cost.prefill_overlap_slowdown == TAKE_TURNS
    cores = cost_of(llava, read_hardware("this-cpu"))
    assert cores.overlap_slowdown == TAKE_TURNS


def test_pictures_become_as_many_tokens_as_the_models_say():
    """LLaVA-NeXT's examples: 672 x 672 in 2 x 2 tiles without padding, 1008 x 336 in 3 x 1; Qwen2-VL: 28 pixels."""
    next_, qwen = prompts_of("llava-next-7b").picture, prompts_of("qwen2-vl-7b").picture
    assert prompts_of("llava-1.5-7b").picture(1024, 300) == 576
    assert next_(672, 672) == 576 + 48 * 49 and next_(1008, 336) == 576 + 24 * 73
    assert next_(640, 480) == 576 + 36 * 49 and next_(480, 640) == 576 + 48 * 37
    assert qwen(280, 560) == 10 * 20 and qwen(10_000, 10_000) <= 16384 and qwen(20, 20) == 4


NEEDLE = "one of gemma-3-4b, gemma-4-26b-a4b, gemma-4-31b, gemma-4-e2b, glm-4.6v-flash, gpt-oss-20b, internvl3.5-8b"


@pytest.mark.parametrize(("name", "needle"), [("nothing", NEEDLE)])
def test_an_unknown_model_lists_the_known(name, needle):
    with pytest.raises(ConfigError, match=needle):
        shape_of(name)


def test_a_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vipllava", "text_config": {}, "vision_config": {"a": 1}}')
    with pytest.raises(CheckpointError, match=r"model_type 'vipllava' is not supported; nearest: "):
        shape_of(str(tmp_path))


def test_traffic_that_does_not_hide_adds_to_the_arithmetic():
    h800 = read_hardware("h800")
    shape = shape_of("llava-1.5-7b")
    hidden, added = (cost_of(shape, msgspec.structs.replace(h800, hides_traffic=x)) for x in (True, False))
    prefill, decodes = (512, 512 * 512, 0, 0), (0, 0, 32, 32 * 1024)
    both = tuple(a + b for a, b in zip(prefill, decodes))
    assert hidden.language_s(*both) < hidden.language_s(*prefill) + hidden.language_s(*decodes) - hidden.step_base_s
    assert added.language_s(*both) == pytest.approx(
        added.language_s(*prefill) + added.language_s(*decodes) - added.language_s(0, 0, 0, 0)
    )
    assert added.language_s(*decodes) > hidden.language_s(*decodes)


def test_smaller_weights_take_less_memory_and_less_time_to_read():
    """Only those of the decoder's layers; arithmetic is the same."""
    plain = shape_of("llava-1.5-7b")
    small = {w: msgspec.structs.replace(plain, weights=w) for w in ("fp8", "int8", "int4")}
    layers, head = plain.step_weights - plain.head_weights, plain.head_weights
    assert small["int8"].step_bytes == small["fp8"].step_bytes == layers + 2 * head
    assert 0.5 < (small["int4"].step_bytes - 2 * head) / layers < 0.55
    for shape in small.values():
        for role in map(Role.parse, ("E", "EPD")):
            assert (shape.weight_bytes(role) < plain.weight_bytes(role)) == (str(role) == "EPD")
        kv = [next(n for spec, n in blocks_of(s, H800, Role.parse("D")).items()) for s in (shape, plain)]
        assert kv[0] > kv[1]
        assert cost_of(shape, H800).prefill_token_s == cost_of(plain, H800).prefill_token_s
        assert cost_of(shape, H800).weights_s < 0.55 * cost_of(plain, H800).weights_s


def test_a_model_of_72_billion_fits_two_devices():
    shape = shape_of("qwen2.5-vl-72b")
    assert shape.step_weights + shape.head_weights + shape.vision.weights == pytest.approx(73.4e9, rel=0.02)
    with pytest.raises(ConfigError, match=r"does not fit h800: .*--tensor-parallel 2 holds it"):
        blocks_of(shape, H800, Role.parse("EPD"))
    small, role = msgspec.structs.replace(shape, weights="int8"), Role.parse("EPD")
    sizes = [blocks_of(s, H800.joined(2), role) for s in (shape, small)]
    blocks = [next(n for spec, n in of.items() if spec.takes_the_rest) for of in sizes]
    assert 0 < 10 * blocks[0] < blocks[1], "two hold it, and hardly anything else; in 8 bits there is room"


def test_a_group_is_faster_but_not_as_often_as_it_has_devices():
    shape = shape_of("qwen2.5-vl-72b")
    one, two, four = (cost_of(shape, H800.joined(n)) for n in (1, 2, 4))
    prompt = [c.language_s(2048, 2048**2, 0, 0) for c in (one, two, four)]
    token = [c.language_s(0, 0, 16, 16 * 1024) for c in (one, two, four)]
    for alone, pair, quad in (prompt, token):
        assert alone / 2 < pair < alone / 1.5 and alone / 4 < quad < pair / 1.4
    assert two.step_base_s - one.step_base_s == pytest.approx(2 * 80 * H800.sum_s)
    seven = shape_of("qwen2.5-vl-7b")
    with pytest.raises(ConfigError, match=r"28 heads, 4 of them .* over 8 devices; --tensor-parallel has to divide 4$"):
        cost_of(seven, H800.joined(8))
    for gib, hint in ((7, "; --tensor-parallel 4 holds it"), (5, "")):  # 5 GiB would want 8 devices
        with pytest.raises(ConfigError, match=rf"% of {gib:.1f} GiB{hint}$"):
            blocks_of(seven, msgspec.structs.replace(H800, memory_bytes=gib * 2**30), Role.parse("EPD"))
