"""Teacher-forced logits of every family and variant within the project's bound of transformers', in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from PIL import Image

from hydrainfer.core import Role
from hydrainfer.models import load_model
from tests.checkpoints import make_picture
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_next import SIDE, make_llava_next
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import LOGIT_TOLERANCE
from tests.models.teacher import pictures_of, teacher_forced
from tests.pillow import configured

pytestmark = pytest.mark.cpu

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
SHARE = {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.3}
GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
LAST_SUMS = {"layer_types": ["full_attention"] + ["linear_attention"] * 3, "tie_word_embeddings": True}
LAST_ATTENDS = {"layer_types": ["conv"] * 4 + ["full_attention"], "conv_bias": True, "conv_L_cache": 4}
LAST_ATTENDS |= {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False}
LAST_SEES_ALL = {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
LAST_SLIDES = {"layer_types": ["full_attention", "conv", "sliding_attention"], "num_hidden_layers": 3}
SLIDING = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
TEXT = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "mistral, wide heads": ("mistral", {"head_dim": 32}),
    "mistral, window off": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases, shards": ("qwen3", {"attention_bias": True, "shards": 3}),
    "gemma3": ("gemma3", {}),
    "gemma3, last layer full, biases": ("gemma3", {"layer_types": GEMMA_LAYERS, "attention_bias": True}),
    "gemma3, tied": ("gemma3", {"tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"sliding_window": 21}),
    "lfm2": ("lfm2", {}),
    "qwen3 next": ("qwen3_next", {}),
    "qwen3.5, last layer of states, tied": ("qwen3_5", LAST_SUMS),
    "lfm2, last layer attends, biases, tied": ("lfm2", LAST_ATTENDS),
    "lfm3": ("lfm3", {}),
    "lfm3, last layer sees all, tied": ("lfm3", LAST_SEES_ALL | {"tie_word_embeddings": True, "conv_bias": True}),
    "lfm3, last layer slides, heads without gates": ("lfm3", LAST_SLIDES | {"use_attention_gate": False}),
    "gemma3, windows over all": ("gemma3", {"sliding_window": 512, "max_position_embeddings": 512}),
    "lfm3, windows over all": ("lfm3", {"sliding_window": 5000}),
    "mimo, windows over all": ("mimo", {"sliding_window": 5000}),
    "gpt-oss, original context outside": ("gpt_oss", {"original_max_position_embeddings": 32}),
    "llama, a share of each head": ("llama", {"rope_parameters": SHARE}),
    "qwen2-moe, without biases": ("qwen2_moe", {"qkv_bias": False}),
    "qwen3, window": ("qwen3", SLIDING | {"sliding_window": 7}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, without biases": ("gpt_oss", {"attention_bias": False}),
    "mimo": ("mimo", {}),
    "mimo, one group, biases": ("mimo", {"n_group": 1, "topk_group": 1, "attention_bias": True}),
    "mimo, last layer sliding, weights as they are": ("mimo", {"norm_topk_prob": False, "attention_value_scale": None}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe, as Qwen3-Coder": ("qwen3_moe", {"shared_expert_intermediate_size": 0, "use_qk_norm": True}),
}
NEXT = {
    "mistral": {"text": "mistral"},
    "llama, present names": {"text": "llama", "published_names": False},
    "qwen2": {"text": "qwen2"},
    "several layers": {"text": "llama", "config": {"vision_feature_layer": [-3, -1]}},
    "tied": {"text": "llama", "config": {"tie_word_embeddings": True}, "text_config": {"tie_word_embeddings": True}},
}
SIZES = [(100, 60), (37, 290), (590, 41), (5, 7), (84, 84)]


def check(got: torch.Tensor, want: torch.Tensor, record) -> None:
    worst = float((got - want).abs().max())
    record("max_difference", worst)
    print(f"largest difference {worst:.1e} of logits up to {float(want.abs().max()):.1f}")
    assert worst < LOGIT_TOLERANCE


@pytest.mark.parametrize("variant", TEXT)
def test_text_only(variant, tmp_path, record_property):
    kind, options = TEXT[variant]
    path = make_text(tmp_path, kind, 3, **options)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(3, 1500, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    model = load_model(path, Role.parse("EPD"))
    assert model.vision is None
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    check(teacher_forced(model, ids), want, record_property)


def photographs() -> list[Image.Image]:
    return [Image.fromarray(make_picture(i, max(s))).crop((0, 0, *s)) for i, s in enumerate(SIZES)]


@pytest.mark.parametrize("variant", NEXT)
def test_llava_next(variant, tmp_path, record_property):
    path = make_llava_next(tmp_path, **{"seed": 4, **NEXT[variant]})
    processor = transformers.LlavaNextProcessor.from_pretrained(path, backend="pil")
    reference = transformers.LlavaNextForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    text = "ab <image> cd <image><image> e <image> fgh <image> i"
    inputs = processor(text=text, images=photographs(), return_tensors="pt")
    with torch.inference_mode():
        want = reference(**inputs).logits[0]
    model = load_model(path, Role.parse("EPD"), config=configured(path))
    got = teacher_forced(model, inputs["input_ids"][0].tolist(), pictures_of(path, photographs()))
    check(got, want, record_property)


@pytest.mark.parametrize("window", [19, 11], ids=["window", "window shorter than a picture"])
def test_gemma3(window, tmp_path, record_property):
    path = make_gemma(tmp_path, 4, text={"sliding_window": window})
    processor = transformers.Gemma3Processor.from_pretrained(path, backend="pil")
    reference = transformers.Gemma3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    mark = "<start_of_image>"
    text = f"ab {mark} cd {mark}{mark} e {mark} fgh {mark} i"
    inputs = processor(text=text, images=photographs(), return_tensors="pt")
    with torch.inference_mode():
        want = reference(**inputs).logits[0]
    ids = inputs["input_ids"][0].tolist()
    model = load_model(path, Role.parse("EPD"), config=configured(path))
    starts = [i for i, t in enumerate(ids) if t == reference.config.image_token_id != ids[i - 1]]
    spans = [(i, i + 16) for i in starts]
    check(teacher_forced(model, ids, pictures_of(path, photographs()), spans), want, record_property)
    causal = teacher_forced(model, ids, pictures_of(path, photographs()))
    assert float((causal - want).abs().max()) > 0.1, "pictures that see themselves only backwards"


def test_pictures_of_any_sizes_are_encoded_together_as_alone(tmp_path, monkeypatch):
    """Of several requests, then; and however few squares pass CLIP at once."""
    path = make_llava_next(tmp_path)
    model, pictures = load_model(path, Role.parse("E")), pictures_of(path, photographs())
    assert len({p.pixels.shape for p in pictures}) > 2 and all(p.pixels.shape[1:] == (SIDE, SIDE, 3) for p in pictures)
    alone = [model.encode([p])[0] for p in pictures]
    for at_once in (1, 2, 3, 16):
        monkeypatch.setattr(model.vision.passes, "at_once", at_once)
        together = model.encode(pictures)
        for one, other, picture in zip(alone, together, pictures):
            assert one.shape == (model.vision.rows(picture), 64)
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def test_a_tower_refuses_what_is_no_picture_of_its(tmp_path):
    path = make_llava_next(tmp_path)
    tower, (picture, *_) = load_model(path, Role.parse("E")).vision, pictures_of(path, photographs())
    rows, height, width = picture.grid
    assert tower.rows(picture) == 9 + height * (width + 1) <= tower.config.tokens
    for grid in (
        None,
        (0, height, width),
        (7, height, width),
        (rows, height + 1, width),
        (rows, 99, 99),
        (rows, -2, 0),
    ):
        assert tower.rows(picture._replace(grid=grid)) is None
    assert tower.rows(picture._replace(pixels=picture.pixels[0])) is None
    assert tower.rows(picture._replace(pixels=picture.pixels[:1])) is None
    assert tower.rows(picture._replace(pixels=picture.pixels[:, :-1])) is None
