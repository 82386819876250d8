"""A checkpoint directory is read as transformers reads it, whatever files it has: random variations of each family's
files either give transformers' prompt ids, pixels and greedy ids, or are refused in one line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from hydrainfer.processor.pictures.media import MediaLimits, from_image
from tests.checkpoints import make_llava
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import compare_greedy
from tests.equivalence.reference import generate, photo
from tests.pillow import configured, described

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(7200)]
N_NEW = 6
JSON = dict[str, Any]
PICTURE = photo("coffee.png").convert("RGB").resize((150, 110))


class Kind(NamedTuple):
    """A family, as transformers loads it. `processor` None: a tokenizer. `pixels`: the class that makes its pixels."""

    make: Callable[[Path], Path]
    model: Any = transformers.AutoModelForImageTextToText
    pixels: Any = None
    fields: tuple[str, ...] = ()


CLIP_FIELDS = ("mean", "scale", "filter", "resize", "crop", "extra")
KINDS = {
    "llava": Kind(partial(make_llava, image_size=56), pixels=transformers.CLIPImageProcessorPil, fields=CLIP_FIELDS),
    "llava next": Kind(
        make_llava_next, pixels=transformers.LlavaNextImageProcessorPil, fields=("mean", "scale", "filter", "extra")
    ),
    "gemma3": Kind(
        make_gemma, pixels=transformers.Gemma3ImageProcessorPil, fields=("mean", "scale", "filter", "square", "extra")
    ),
    "qwen2-vl": Kind(
        partial(make_qwen, "qwen2_vl"),
        pixels=transformers.Qwen2VLImageProcessorPil,
        fields=("mean", "scale", "filter", "bounds", "extra"),
    ),
    "qwen3-vl": Kind(
        partial(make_qwen, "qwen3_vl"),
        pixels=transformers.Qwen2VLImageProcessorPil,
        fields=("mean", "scale", "filter", "bounds", "extra"),
    ),
    "llama": Kind(partial(make_text, kind="llama"), model=transformers.AutoModelForCausalLM),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = KINDS[name].make(tmp_path_factory.mktemp("original"))
        return made[name]

    return get


class Variation:
    """A copy of a checkpoint directory whose files are changed at random, in ways that published ones differ."""

    def __init__(self, original: Path, path: Path, kind: Kind, rng: random.Random) -> None:
        self.path, self.kind, self.rng = path, kind, rng
        self.words: list[str] = []
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        if kind.pixels is not None:
            self._vary_preprocessing()
        self._vary_templates()
        self._vary_config()
        self._vary_weights()

    def _read(self, name: str) -> JSON:
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else {}

    def _write(self, name: str, content: JSON) -> None:
        (self.path / name).write_text(json.dumps(content))

    def _note(self, *words: object) -> None:
        self.words.append(" ".join(map(str, words)))

    def _maybe(self, share: float) -> bool:
        return self.rng.random() < share

    def _vary_preprocessing(self) -> None:
        """The settings in one place, in two that conflict, or in none."""
        base = self._read("preprocessor_config.json")
        wrapper = {k: v for k, v in self._read("processor_config.json").items() if k != "image_processor"}
        places = ("file", "section", "both", "null section", "neither")
        (place,) = self.rng.choices(places, (4, 4, 6, 3, 1))
        self._note("preprocessing:", place)
        section = self._settings(base) if place in ("section", "both") else None
        file = self._settings(base) if place in ("file", "both", "null section") else None
        if section is not None or place == "null section":
            wrapper["image_processor"] = section
        if "bounds" in self.kind.fields:  # videos are normalised as pictures are, or the directory is refused
            (self.path / "video_preprocessor_config.json").unlink(missing_ok=True)
            if section is not None:
                wrapper["video_processor"] = section
        (self.path / "preprocessor_config.json").unlink()
        (self.path / "processor_config.json").unlink(missing_ok=True)
        if wrapper or self._maybe(0.3):
            self._write("processor_config.json", wrapper)
        if file is not None:
            self._write("preprocessor_config.json", file)

    def _settings(self, base: JSON) -> JSON:
        rng, given = self.rng, dict(base)
        drawn = rng.sample(self.kind.fields, rng.randint(0, min(3, len(self.kind.fields))))
        if "mean" in drawn:
            given["image_mean"] = rng.choice([[0.5] * 3, [0.1, 0.2, 0.3], [0.2] * 3, None])
            given["image_std"] = rng.choice([[0.5] * 3, [0.3, 0.2, 0.25]])
            given["do_normalize"] = rng.choice([True, True, False, None])
        if "scale" in drawn:
            given["rescale_factor"] = rng.choice([1 / 255, 1 / 127.5, 0.01, 0.005, None])
            given["do_rescale"] = rng.choice([True, True, False, None])
        if "filter" in drawn:
            given["resample"] = rng.choice([0, 1, 2, 2, 3, 3, None])
        if "resize" in drawn:
            size = rng.choice([56, {"shortest_edge": 56}, {"shortest_edge": 70}, {"height": 56, "width": 56}, None])
            given["size"] = size
            given["do_resize"] = rng.choice([True, True, True, True, False, None])
        if "crop" in drawn:
            given["crop_size"] = rng.choice([56, {"height": 56, "width": 56}, None])
            given["do_center_crop"] = rng.choice([True, True, False, None])
        if "square" in drawn:
            side = given["size"]["height"]
            given["size"] = rng.choice([side, side, {"height": side, "width": side}, None])
        if "bounds" in drawn:
            for name in ("size", "min_pixels", "max_pixels"):
                given.pop(name, None)
            bounds = {"shortest_edge": rng.choice([3136, 9000]), "longest_edge": rng.choice([20_000, 31_360])}
            if rng.random() < 0.6:
                given["size"] = bounds
            if rng.random() < 0.6 or "size" not in given:
                given["min_pixels"], given["max_pixels"] = rng.choice([3136, 6000, None]), rng.choice([25_000, None])
        if "extra" in drawn:
            given |= {"do_pad": None, "pad_size": None, "input_data_format": None, "data_format": "channels_first"}
        for name in list(given):
            if name in ("do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample") and rng.random() < 0.1:
                del given[name]
        self._note({k: v for k, v in given.items() if base.get(k, ...) != v}, "without", sorted(base.keys() - given))
        return given

    def _vary_templates(self) -> None:
        """One template, or several that conflict."""
        source = next(
            (f.read_text() for f in [self.path / "chat_template.jinja"] if f.exists()),
            self._read("chat_template.json").get("chat_template")
            or self._read("tokenizer_config.json").get("chat_template"),
        )
        for name in ("chat_template.jinja", "chat_template.json"):
            (self.path / name).unlink(missing_ok=True)
        config = self._read("tokenizer_config.json")
        config.pop("chat_template", None)
        self._write("tokenizer_config.json", config)
        seeing = self.kind.pixels is not None
        places = ["chat_template.jinja", "chat_template.json", "processor_config.json"] if seeing else []
        places = places or ["chat_template.jinja", "tokenizer_config.json"]
        chosen = self.rng.sample(places, self.rng.randint(1, len(places)))
        self._note("templates:", chosen)
        for i, where in enumerate(chosen):
            written = f"{{{{ 'place {i}: ' }}}}{source}"
            if where.endswith("jinja"):
                (self.path / where).write_text(written)
            else:
                named = [{"name": "default", "template": written}] if where.startswith("tok") else written
                self._write(where, self._read(where) | {"chat_template": self.rng.choice([written, named])})

    def _vary_config(self) -> None:
        config, text = self._read("config.json"), None
        if self._maybe(0.3):
            config["architectures"] = self.rng.choice([None, []])
            if self._maybe(0.5):
                del config["architectures"]
            self._note("no architectures")
        if self._maybe(0.3):
            spelled = self.rng.choice(("dtype", "torch_dtype"))
            kept = config.pop("dtype", None) or config.pop("torch_dtype", None)
            config[spelled] = kept
            self._note(spelled, kept)
        text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        if self._maybe(0.3):
            for name in ("rope_scaling", "sliding_window", "head_dim"):
                if text.get(name, ...) is ... and name != "head_dim":
                    text[name] = None
            self._note("nulls in the text's configuration")
        rope = text.get("rope_parameters")
        if isinstance(rope, dict) and set(rope) <= {"rope_type", "rope_theta"} and self._maybe(0.5):
            text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
            self._note("rope_theta outside")
        if "image_token_id" in config and self.kind.pixels is transformers.CLIPImageProcessorPil and self._maybe(0.5):
            config["image_token_index"] = config.pop("image_token_id")
            self._note("image_token_index")
        if self._maybe(0.2):
            config["use_cache"], config["transformers_version"] = None, "4.30.0"
        self._write("config.json", config)
        if self._maybe(0.3):
            (self.path / "generation_config.json").unlink(missing_ok=True)
            self._note("no generation_config.json")

    def _vary_weights(self) -> None:
        if self._maybe(0.3):
            stale = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
            self._write("model.safetensors.index.json", stale)
            self._note("an outdated index")


class Transformers:
    """A directory as transformers reads it. Raises whatever transformers raises."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.kind = kind
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        template = self.tokenizer.chat_template
        if kind.pixels is not None:
            fields, _ = transformers.ProcessorMixin.get_processor_dict(path)
            template = fields.get("chat_template") or template
            self.pictures = kind.pixels.from_pretrained(path)
            self.made = self.pictures(PICTURE, return_tensors="pt")
        self.template = template["default"] if isinstance(template, dict) else template
        self.model = kind.model.from_pretrained(path, dtype=torch.float32).eval()

    def prompt(self, messages: list[JSON]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, add_generation_prompt=True, tokenize=False
        )

    @torch.inference_mode()
    def greedy(self, ids: list[int], spans: list[tuple[int, int]]) -> tuple[list[int], list[float]]:
        """The answer to these prompt ids, and the gaps. `spans`: first token and number of tokens of each picture."""
        inputs: dict[str, torch.Tensor] = {"input_ids": torch.tensor([ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if spans:
            kinds = torch.zeros_like(inputs["input_ids"])
            for start, n in spans:
                kinds[0, start : start + n] = inputs["input_ids"][0, start : start + n] == ids[start + n // 2]
            wanted = ("pixel_values", "image_grid_thw", "image_sizes")
            inputs |= {name: self.made[name] for name in wanted if name in self.made}
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = kinds.int()
            elif self.kind.pixels is transformers.Gemma3ImageProcessorPil:
                inputs["token_type_ids"] = kinds
        if hasattr(self.model, "model") and hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        _, answer, gaps = generate(self.model, inputs, N_NEW)
        return answer, gaps


def check_pixels(path: Path, reference: Transformers) -> None:
    """The pixels after rescaling and normalising are those of transformers."""
    adapter = described(path).images.adapter
    vision = configured(path).vision
    settings = vision.tower.pixels if hasattr(vision, "tower") else vision.pixels
    picture = from_image(PICTURE, MediaLimits())
    made = (adapter.pixels(picture) * np.float64(settings.scale) - settings.mean) / (settings.std or 1)
    wanted = reference.made["pixel_values"].double().numpy()
    if "image_grid_thw" in reference.made:
        assert adapter.fit(*picture.size).grid == tuple(reference.made["image_grid_thw"][0].tolist()) or (
            np.prod(adapter.fit(*picture.size).grid) * 4 == np.prod(reference.made["image_grid_thw"][0].tolist())
        )
        rows = made[0].transpose(2, 0, 1)  # every value occurs twice in a patch, once per frame
        assert np.allclose(np.sort(rows.ravel().repeat(2)), np.sort(wanted.ravel()), atol=2e-3)
        return
    made = np.moveaxis(made, -1, -3).reshape(wanted.shape)
    assert np.allclose(made, wanted, atol=2e-3)


def compare(path: Path, kind: Kind) -> str:
    """ "equal", "refused" by us, or "invalid" for transformers."""
    try:
        reference = Transformers(path, kind)
    except Exception as e:
        return f"invalid: {type(e).__name__}"
    text = {"type": "text", "text": "What is it?"}
    seeing = kind.pixels is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
    content: Any = [{"type": "image", "image": PICTURE}, text] if seeing else text["text"]
    options = {"threads": 1, "native_kernels": False, "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"image_backend": "pillow"}
    try:
        with LLM(path, **options) as llm:
            out = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)[0]
    except CheckpointError as e:
        assert "\n" not in e.message
        return f"refused: {e.message.replace(str(path), '')[:80]}"
    shown = [{"type": "image"}, text] if seeing else text["text"]
    prompt = reference.prompt([{"role": "user", "content": shown}])
    ids = list(out.prompt_token_ids)
    config = read_config(path)
    spans = []
    if seeing:
        check_pixels(path, reference)
        token = config.media_tokens[0]
        n = ids.count(token)
        spans = [(ids.index(token), len(ids) - ids[::-1].index(token) - ids.index(token))]
        placeholder = reference.tokenizer.convert_ids_to_tokens(token)
        if kind.pixels is transformers.Gemma3ImageProcessorPil:
            boi, eoi = (reference.tokenizer.convert_ids_to_tokens(i) for i in config.around)
            prompt = prompt.replace(boi, f"\n\n{boi}{placeholder * n}{eoi}\n\n")
        else:
            prompt = prompt.replace(placeholder, placeholder * n)
    bos = {"add_special_tokens": seeing}
    assert ids == reference.tokenizer(prompt, **bos)["input_ids"], "prompt ids"
    answer, gaps = reference.greedy(ids, spans)
    compare_greedy(list(out.outputs[0].token_ids), answer, gaps)
    return "equal"


@pytest.mark.parametrize("n", [3, pytest.param(300, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", KINDS)
def test_a_directory_is_read_as_transformers_reads_it_or_refused(originals, tmp_path, name, n):
    kind, outcomes = KINDS[name], []
    for seed in range(n):
        varied = Variation(originals(name), tmp_path / "varied", kind, random.Random(f"{name} {seed}"))
        try:
            outcomes.append(compare(varied.path, kind))
        except Exception as e:
            pytest.fail(f"{name} {seed}: {type(e).__name__}: {str(e)[:400]}; {varied.words}")
    print(name, {o: outcomes.count(o) for o in set(outcomes)})
    assert sum(o == "equal" for o in outcomes) >= n / 3
    assert sum(o.startswith("refused") for o in outcomes) <= max(1, n / 4)
