"""The modelled time of a batch is the sum the docstring says; files are read or refused in one line."""

from itertools import islice
from pathlib import Path

import msgspec
import pytest

from hydrainfer.config import ServeConfig, cost_model_of, read_cost_model
from hydrainfer.core import (
    ConfigError,
    CostModel,
    DeviceTime,
    EncodeWork,
    Lane,
    LiveSequence,
    SlicedTime,
    Stage,
    StepBatch,
    TokenWork,
)
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit
COST = CostModel(
    encode_base_s=1.0,
    encode_image_s=0.1,
    encode_token_s=0.01,
    step_base_s=2.0,
    prefill_token_s=0.1,
    prefill_attention_s=0.01,
    decode_token_s=0.5,
    decode_context_s=0.001,
)
FILES = sorted((Path(__file__).parents[2] / "configs" / "costs").glob("*.yaml"))


def sequence(stage=Stage.PREFILL, **kw):
    seq = LiveSequence(make_request("r", **kw), (0.0, 0), 0.0)
    seq.cursor = seq.plan.index(stage)
    return seq


def test_pictures_and_their_tokens():
    seq = sequence(Stage.ENCODE, pictures=[1, 2, 3], picture_tokens=6)
    work = [EncodeWork(seq, 0), EncodeWork(seq, 2)]
    assert COST.step_s(StepBatch(1, Lane.VISION, work, 2)) == pytest.approx(1.0 + 2 * 0.1 + 12 * 0.01)


def test_chunks_and_decodes():
    decoding, prefilling = sequence(Stage.DECODE), sequence()
    work = [TokenWork(decoding, 9, 1, True), TokenWork(prefilling, 0, 5, False), TokenWork(prefilling, 5, 3, True)]
    want = 2.0 + (0.5 + 10 * 0.001) + 8 * 0.1 + (5 * 5 + 3 * 8) * 0.01
    assert COST.step_s(StepBatch(1, Lane.LANGUAGE, work, 9, n_decodes=1)) == pytest.approx(want)


def test_a_chunk_of_one_token_is_no_decode():
    work = [TokenWork(sequence(), 4, 1, True)]
    assert COST.step_s(StepBatch(1, Lane.LANGUAGE, work, 1)) == pytest.approx(2.0 + 0.1 + 5 * 0.01)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_steps_of_decodes_one_after_the_other_take_what_each_takes(n):
    memory = {"weights_s": 2.1, "context_s": 0.003, "sequence_s": 0.01, "experts_s": 1.7, "expert_share": 0.06}
    for cost in (COST, msgspec.structs.replace(COST, **memory)):
        steps = list(islice(cost.decodes_s(n, 900), 40))
        assert steps == [cost.language_s(0, 0, n, 900 + n * (i + 1)) for i in range(40)], "to the last bit"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_files_we_ship_can_be_read(path):
    assert read_cost_model(path).step_base_s > 0


def test_there_are_such_files():
    assert "fast" in [p.stem for p in FILES]


GOOD = "encode_image_s: 1\nstep_base_s: 1\nprefill_token_s: 1\ndecode_token_s: 1e-3\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "prefil_attention_s: 1", "unknown key 'prefil_attention_s'; did you mean prefill_attention_s"),
        (GOOD + "colour: 1", "unknown key 'colour'; known keys are encode_base_s, "),
        (GOOD + "encode_base_s: -1", "encode_base_s must be a finite number of at least 0, got -1"),
        (GOOD + "encode_base_s: .inf", "encode_base_s must be a finite number"),
        (GOOD + "encode_base_s: nan", "encode_base_s must be a finite number"),
        (GOOD + "encode_base_s: yes", "encode_base_s must be a finite number"),
        (GOOD + "encode_base_s: [1]", "encode_base_s must be a finite number"),
        (GOOD + "overlap_slowdown: 0.5", "overlap_slowdown must be a finite number of at least 1"),
        ("step_base_s: 1\ndecode_token_s: 1", "encode_image_s and prefill_token_s missing"),
        ("", "encode_image_s and step_base_s and"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "cost.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as e:
        read_cost_model(path)
    assert str(path) in e.value.message and "\n" not in e.value.message


def test_json_will_do(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"encode_image_s": 1, "step_base_s": 2, "prefill_token_s": 0.5, "decode_token_s": 1e-3}')
    assert read_cost_model(path).decode_token_s == 1e-3


def test_emulation_and_cost_model_need_each_other(tmp_path):
    path = tmp_path / "cost.yaml"
    path.write_text(GOOD)
    assert cost_model_of(ServeConfig(model="m")) is None
    assert cost_model_of(ServeConfig(model="m", device="emulated", cost_model=str(path))).step_base_s == 1.0
    with pytest.raises(ConfigError, match="needs --cost-model FILE"):
        cost_model_of(ServeConfig(model="m", device="emulated"))
    with pytest.raises(ConfigError, match=r"for --device emulated, or to plan with .*; the device is cpu"):
        cost_model_of(ServeConfig(model="m", device="cpu", cost_model=str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        cost_model_of(ServeConfig(model="m", device="emulated", cost_model=str(tmp_path / "none.yaml")))


def test_lanes_slow_each_other_more_where_one_prefills():
    """A vision batch of 0.2 s; beside it a decode of 2 s at half speed, or a prefill that waits for its end."""
    cost = CostModel(
        encode_image_s=0.2, step_base_s=0.0, prefill_token_s=0.5, decode_token_s=2.0, overlap_slowdown=2.0,
        prefill_overlap_slowdown=1e9,
    )  # fmt: skip
    picture = StepBatch(1, Lane.VISION, [EncodeWork(sequence(Stage.ENCODE, pictures=[1], picture_tokens=6), 0)], 1)
    decode = StepBatch(2, Lane.LANGUAGE, [TokenWork(sequence(Stage.DECODE), 9, 1, True)], 1, n_decodes=1)
    prefill = StepBatch(2, Lane.LANGUAGE, [TokenWork(sequence(), 0, 4, True)], 4)
    for language, alone_s, wait_s in ((decode, 2.0, 0.1), (prefill, 2.0, 0.2)):
        device = DeviceTime(cost)
        assert device.occupy(picture, 0.0).end_s == pytest.approx(0.2)
        assert device.occupy(language, 0.0).end_s == pytest.approx(alone_s + wait_s)
        late = 0.5  # the vision lane is free, the language lane still runs
        assert device.occupy(picture, late).end_s == pytest.approx(
            late + 0.4 if language is decode else alone_s + wait_s + 0.2
        )
        assert device.occupy(language, 10.0).end_s == pytest.approx(10.0 + alone_s)


def test_without_a_second_slowdown_there_is_one():
    cost = CostModel(encode_image_s=1.0, step_base_s=0.0, prefill_token_s=1.0, decode_token_s=1.0, overlap_slowdown=2.0)
    device = DeviceTime(cost)
    device.occupy(StepBatch(1, Lane.LANGUAGE, [TokenWork(sequence(), 0, 4, True)], 4), 0.0)
    picture = StepBatch(1, Lane.VISION, [EncodeWork(sequence(Stage.ENCODE, pictures=[1], picture_tokens=6), 0)], 1)
    assert device.occupy(picture, 0.0).end_s == pytest.approx(2.0)


def test_sliced_pictures_wait_for_tokens_and_put_them_off_for_a_while():
    cost = CostModel(encode_image_s=1.0, step_base_s=0.2, prefill_token_s=0.0, decode_token_s=0.0)
    picture = StepBatch(1, Lane.VISION, [EncodeWork(sequence(Stage.ENCODE, pictures=[1], picture_tokens=6), 0)], 1)

    def decode(after_s):
        work = [TokenWork(sequence(Stage.DECODE), 9, 1, True)]
        return StepBatch(2, Lane.LANGUAGE, work, 1, n_decodes=1, after_s=after_s)

    device = SlicedTime(cost)
    assert device.occupy(decode(0.0), 0.0).end_s == pytest.approx(0.2)
    encode = device.occupy(picture, 0.1)
    assert (encode.end_s, encode.own_s) == (pytest.approx(1.2), 1.0)  # not before the token is done
    for now, after_s, end_s, encoded_s in (
        (0.3, 0.3, 0.7, 1.4),  # the picture goes on until 0.5
        (0.7, 0.0, 0.9, 1.6),  # at once
        (1.4, 0.3, 1.6, 1.8),  # it has gone on since 0.9
        (1.6, 0.3, 2.0, 1.8),  # it is done first
    ):
        assert device.occupy(decode(after_s), now).end_s == pytest.approx(end_s)
        assert encode.end_s == pytest.approx(encoded_s)
