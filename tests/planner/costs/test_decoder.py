"""Bytes and FLOPs of decoders on paper: counted by hand, and against `ModelShape` where that knows the model."""

import msgspec
import pytest

from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from hydrainfer.planner.costs.attention import Compressed, Convolution, Grouped, Latent, Linear, n_pairs
from hydrainfer.planner.costs.decoder import DecoderShape, Layers, decoder_of
from hydrainfer.planner.costs.hardware import read_hardware
from hydrainfer.planner.costs.shape import cost_of
from hydrainfer.planner.inputs import shape_of

pytestmark = pytest.mark.cpu
N = 32_768
BF16 = 2
SERVED = (
    *("llava-1.5-7b", "llama-3.1-8b", "gemma-3-4b", "lfm3-vl-2b", "glm-4.6v-flash"),
    *("gpt-oss-20b", "mimo-v2-flash", "qwen3-next-80b-a3b", "qwen3.5-9b"),
)
LATENT = Latent(heads=64, rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536)
KDA = Linear(key_heads=32, heads=32, key_dim=128, value_dim=128, decay="channel", conv_width=4, rank=128)
LIGHTNING = Linear(key_heads=64, heads=64, key_dim=128, value_dim=128, decay="fixed")
CSA = Compressed(
    heads=4, dim=64, q_rank=32, o_groups=2, o_rank=16, window=128, every=4, chosen=512, index_heads=2, index_dim=16
)


def one_layer(attention, **more):
    return DecoderShape(
        name="one", hidden=64, vocab=100, layers=(Layers(count=1, attention=attention, width=128, **more),)
    )


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_a_prompt_are_those_of_the_caches(name, dtype):
    shape = shape_of(name, dtype)
    assert decoder_of(shape).cache_bytes(N) == shape.kv_token_bytes * N + shape.window_bytes + shape.state_bytes


@pytest.mark.parametrize("name", SERVED)
def test_weights_are_those_of_the_served_shape(name):
    shape = shape_of(name)
    decoder = decoder_of(shape)
    tables = 0 if shape.tied else shape.head_weights
    assert decoder.weights == shape.step_weights + tables
    assert decoder.used_weights == sum(shape.layer_weights(i, used=True) for i in range(shape.layers))


@pytest.mark.parametrize("name", SERVED)
def test_flops_are_those_of_the_roofline_but_for_what_it_rounds(name):
    """The cost model computes only keys and values in the last layer, and takes a window as full from the first
    token."""
    shape, device = shape_of(name), read_hardware("h200")
    decoder, cost = decoder_of(shape), cost_of(shape, device)
    last = decoder.layers[-1].attention
    alone = msgspec.structs.replace(decoder, layers=decoder.layers[-1:])
    skipped = 2 * N * (alone.used_weights - shape.key_weights(shape.layers - 1))
    if isinstance(last, Grouped):
        skipped += last.flops(N, 0)
    pair = 2 * shape.heads * (shape.head_dim + (shape.value_dim or shape.head_dim))
    rounded = sum(pair * window**2 / 2 for i, window in enumerate(shape.seen[:-1]) if shape.attends(i))
    roofline = (cost.prefill_token_s * N + cost.prefill_attention_s * N**2) * device.language_flops_per_s
    assert decoder.flops(N) - skipped + rounded == pytest.approx(roofline, rel=1e-9)


@pytest.mark.parametrize("n_tokens", [1, 1024, N])
def test_weights_that_a_batch_reads_are_those_of_the_roofline(n_tokens):
    shape, device = shape_of("mimo-v2-flash"), read_hardware("h200")
    cost = cost_of(shape, device)
    read_s = cost.weights_s - shape.head_bytes / device.traffic_bytes_per_s + cost.experts_read_s(n_tokens)
    assert decoder_of(shape).read_bytes(n_tokens) / device.traffic_bytes_per_s == pytest.approx(read_s)


def test_a_group_s_prefill_is_that_of_the_roofline():
    shape, group = shape_of("llama-3.1-8b"), read_hardware("h200").joined(8)
    ours, cost = decoder_of(shape).prefill_s(group, N), cost_of(shape, group)
    assert ours == pytest.approx(cost.language_s(N, N * N, 0, 0), rel=0.04)  # the last layer of 32


def test_a_latent_keeps_the_latent_and_one_key_for_all_heads():
    assert LATENT.cache_bytes(1000, BF16) == (512 + 64) * 1000 * 2
    queries = 7168 * 1536 + 1536 * 64 * (128 + 64)
    keys = 7168 * (512 + 64) + 512 * 64 * (128 + 128)
    assert LATENT.weights(7168) == queries + keys + 64 * 128 * 7168
    without = msgspec.structs.replace(LATENT, q_rank=0)
    assert without.weights(7168) == 7168 * 64 * (128 + 64) + keys + 64 * 128 * 7168


def test_a_latent_expands_its_prefix_for_each_chunk():
    pair = 2 * 64 * (128 + 64 + 128)
    assert LATENT.flops(100, 0) == pair * 100 * 100 / 2
    assert LATENT.flops(100, 1000) == pair * (100 * 1000 + 100 * 100 / 2) + 2 * 1000 * 512 * 64 * (128 + 128)


def test_a_sparse_latent_attends_to_what_its_index_chooses():
    sparse = msgspec.structs.replace(LATENT, chosen=2048, index_heads=32, index_dim=128)
    assert sparse.cache_bytes(1000, BF16) == (512 + 64 + 128) * 1000 * 2
    index = 2 * 32 * 128 * (100 * 10_000 + 100 * 100 / 2)
    assert sparse.flops(100, 10_000) == 2 * 64 * (2 * 512 + 64) * 100 * 2048 + index


def test_linear_attention_keeps_one_state_however_long_the_prompt():
    assert KDA.cache_bytes(1, BF16) == KDA.cache_bytes(N, BF16) == 32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2
    assert LIGHTNING.cache_bytes(N, BF16) == 64 * 128 * 128 * 4
    assert KDA.flops(100, N) == KDA.flops(100, 0) == 8 * 32 * 128 * 128 * 100
    assert LIGHTNING.weights(8192) == 5 * 8192**2
    proj = 32 * 128
    assert KDA.weights(2304) == 4 * 2304 * proj + 2304 * 32 + 2 * 128 * (2304 + proj)


def test_compressed_entries_are_one_for_every_few_tokens_beside_a_window():
    assert CSA.cache_bytes(4000, BF16) == (128 * 64 + 1000 * (64 + 16)) * 2
    assert CSA.flops(4, 100_000) == 4 * 4 * 64 * 4 * (128 + 512) + 2 * 2 * 16 * (4 * 100_000 + 8) / 4
    window = msgspec.structs.replace(CSA, every=0, chosen=0, index_heads=0, index_dim=0)
    assert window.cache_bytes(4000, BF16) == 128 * 64 * 2


@pytest.mark.parametrize(
    ("tokens", "prefix", "limit", "pairs"),
    [(10, 0, 0, 50), (10, 90, 0, 950), (10, 90, 5, 50), (10, 0, 4, 8 + 24), (10, 2, 4, 6 + 32), (10, 0, 20, 50)],
)
def test_pairs(tokens, prefix, limit, pairs):
    assert n_pairs(tokens, prefix, limit) == pairs


@pytest.mark.parametrize("attention", [LATENT, KDA, CSA, Grouped(heads=8, kv_heads=2, key_dim=16, value_dim=16)])
def test_chunks_take_no_less_than_the_whole_prompt(attention):
    """A latent's prefix is expanded again."""
    whole = attention.flops(1000, 0)
    chunks = attention.flops(600, 0) + attention.flops(400, 600)
    expanded = 2 * 600 * 512 * 64 * 256 if attention is LATENT else 0
    assert chunks == pytest.approx(whole + expanded)


def test_experts_are_read_once_some_token_chooses_them():
    one = one_layer(Convolution(channels=64, width=3), experts=8, chosen=2, expert_width=32)
    expert = 3 * 64 * 32
    common = 4 * 64 * 64 + 8 * 64 + 3 * 64 * 128
    assert one.read_bytes(1) == (common + 2 * expert) * BF16
    assert one.read_bytes(1000) == pytest.approx((common + 8 * expert) * BF16)
    assert one.used_weights == common + 2 * expert and one.weights == common + 8 * expert + 2 * 100 * 64


@pytest.mark.parametrize(
    "architecture", ["DeepseekV3ForCausalLM", "KimiLinearForCausalLM", "BailingMoeV2_5ForCausalLM"]
)
def test_a_checkpoint_with_such_attention_is_still_refused_in_one_line(architecture, tmp_path):
    (tmp_path / "config.json").write_text(msgspec.json.encode({"architectures": [architecture]}).decode())
    with pytest.raises(CheckpointError, match=architecture) as refused:
        read_config(tmp_path)
    assert "\n" not in str(refused.value)
