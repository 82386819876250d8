import pytest

from hydrainfer.config import Slo, is_slo_part, locate, parse_slo, read_slo
from hydrainfer.core import ConfigError

pytestmark = pytest.mark.unit


def test_parts():
    assert parse_slo(["ttft:250", "tpot:40"]) == Slo(ttft_s=0.25, tpot_s=0.04) == parse_slo(["ttft:250,tpot:40"])
    assert parse_slo(["e2el:2000 ttft:1"]) == Slo(ttft_s=0.001, e2e_s=2.0)
    assert is_slo_part("tpot:40") and not is_slo_part("http://tpot:40")
    assert parse_slo(["e2e:2000 ttft:1"]).inline == "ttft=0.001,e2e=2"
    assert str(parse_slo(["ttft:250 tpot:40"])) == "TTFT ≤ 250 ms, TPOT ≤ 40 ms for 90% of the intervals"


@pytest.mark.parametrize(
    "wrong", ["ttft", "ttft:", "ttft:x", "latency:5", "ttft:0", "tpot:-1", "ttft:nan", "ttft:inf", ""]
)
def test_wrong_parts(wrong):
    with pytest.raises(ConfigError):
        parse_slo([wrong])


@pytest.mark.parametrize(
    ("model", "dataset", "ttft_s", "tpot_s"),
    [
        ("llava-1.5-7b", "vizwiz", 8, 0.04),
        ("llava-1.5-7b", "mme", 0.25, 0.06),
        ("llava-1.5-7b", "textcaps", 0.25, 0.04),
        ("llava-next-7b", "pope", 8, 0.06),
        ("llava-next-7b", "textcaps", 8, 0.08),
        ("qwen2-vl-7b", "textvqa", 1, 0.12),
        ("qwen2-vl-7b", "pope", 1, 0.04),
    ],
)
def test_table_3(model, dataset, ttft_s, tpot_s):
    assert read_slo(locate("slo", model), dataset) == Slo(ttft_s=ttft_s, tpot_s=tpot_s)


@pytest.mark.parametrize("model", ["llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b"])
def test_presets_are_whole(model):
    for dataset in ("textcaps", "pope", "mme", "vizwiz", "textvqa"):
        read_slo(locate("slo", model), dataset)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {ttft_s: 5}", "did you mean ttft_ms"),
        ("a: {ttft_ms: soon}", "must be a number"),
        ("a: 5", "must hold limits"),
        ("b: {ttft_ms: 5}", "has SLOs for b: none for 'a'"),
    ],
)
def test_wrong_files(tmp_path, text, said):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_slo(tmp_path / "x.yaml", "a")
    with pytest.raises(ConfigError, match=r"no slo called 'gpt'.*llava-1\.5-7b"):
        locate("slo", "gpt")
