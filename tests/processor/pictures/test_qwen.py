"""Pictures and videos of the Qwen families against transformers' own processing; options; what is refused."""

from __future__ import annotations

import base64
import io
import pickle

import av
import numpy as np
import pytest
from PIL import Image

from hydrainfer.checkpoint import PixelBounds, QwenSettings
from hydrainfer.core import InvalidRequest, MediaError, RequestTooLarge, SamplingParams
from hydrainfer.processor import (
    ChatOptions,
    ImagePart,
    MediaLimits,
    PixelStore,
    Processor,
    VideoLimits,
    VideoReading,
    load_description,
    parse_messages,
    parse_prompts,
)
from hydrainfer.processor.pictures.adapter import VideoShape
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.workers.prepare import Seal, prepare_image
from tests.checkpoints import make_picture
from tests.checkpoints_qwen import FAMILIES, make_qwen
from tests.equivalence.reference import PHOTOS, photo
from tests.pillow import described

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {family: make_qwen(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, paths):
    return load_description(paths[request.param])


@pytest.fixture
def store():
    return PixelStore(1 << 28)


@pytest.fixture
def processor(model, store):
    reading = VideoReading(VideoLimits(max_frames=16))
    return Processor(model, store, weights=b"w", dtype="float32", limits=MediaLimits(max_videos=2), videos=reading)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(t):
    return {"type": "text", "text": t}


def photographs():
    """Odd sizes, grey, transparent, rotated by EXIF, very wide, very tall, tiny."""
    yield from (photo(name) for name in PHOTOS)
    colour = photo("astronaut.png").convert("RGB")
    yield colour.resize((333, 217))
    yield colour.resize((1201, 7))
    yield colour.resize((5, 901))
    yield colour.resize((13, 13))
    yield colour.convert("L").resize((101, 300))
    alpha = colour.resize((120, 90)).convert("RGBA")
    alpha.putalpha(Image.fromarray(make_picture(1, 120)[:90, :, 0]))
    yield alpha


def test_pictures_are_those_of_the_pil_processor(model, paths):
    import transformers

    adapter = described(model.path).images.adapter
    theirs = transformers.Qwen2VLImageProcessorPil.from_pretrained(model.path)
    s = adapter.settings
    mean, std = np.float32(s.mean), np.float32(s.std)
    n = most = 0
    for picture in photographs():
        ours = from_image(picture, MediaLimits())
        item, pixels = adapter.fit(*ours.image.size), adapter.pixels(ours)
        want = theirs([picture], return_tensors="np")
        _, h, w = item.grid
        assert [1, 2 * h, 2 * w] == want["image_grid_thw"][0].tolist() and item.n_tokens == h * w
        assert pixels.shape == (1, h * s.factor, w * s.factor, 3) and pixels.dtype == np.uint8
        scaled = (pixels[0].astype(np.float32) * np.float32(s.scale) - mean) / std  # [height, width, rgb]
        cut = scaled.reshape(h, 2, s.patch, w, 2, s.patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = cut.reshape(4 * h * w, 3, 1, s.patch, s.patch).repeat(2, axis=2).reshape(4 * h * w, -1)
        most = max(most, float(np.abs(cut - want["pixel_values"]).max()))
        n += 1
    print(f"{n} pictures differ by at most {most:.1e} after normalisation")
    assert most < 1e-5


@pytest.mark.parametrize("factor", [28, 32])
def test_targets_are_those_of_smart_resize(factor):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(3)
    for _ in range(3000):
        least = int(rng.integers(1, 300)) * factor**2 // 4
        bounds = PixelBounds(least, least + int(rng.integers(4, 4000)) * factor**2 // 4)
        width = int(np.exp(rng.uniform(0, 9)))
        height = int(np.clip(np.exp(rng.uniform(0, 9)), -(-width // 199), width * 199))
        adapter = QwenImages(QwenSettings(patch=factor // 2, bounds=bounds))
        want = smart_resize(height, width, factor, bounds.least, bounds.most)
        assert adapter.fit(width, height).grid == (1, *(n // factor for n in want)), (width, height, bounds)
    with pytest.raises(MediaError, match="at most 200 times"):
        adapter.fit(3000, 10)


def test_frames_are_sampled_as_their_processors_do(model):
    import torch

    videos, told = model.images.video.adapter, model.images.video.adapter.settings.times == "told"
    rng = np.random.default_rng(4)
    for _ in range(2000):
        total, rate = int(rng.integers(2, 5000)), float(rng.choice([1, 10, 23.976, 24, 25, 29.97, 30, 59.94]))
        fps, most = float(rng.choice([0.5, 1, 2, 4.5])), int(rng.integers(4, 800))
        got = videos.configured({"fps": fps, "max_frames": most}).sample(VideoShape(total, rate, 90, 90), 768)
        most = min(most, 768)
        if told:
            n = min(max(int(total / rate * fps), 4), most, total)
            want = np.linspace(0, total - 1, n).round().astype(int).tolist()
        else:
            n = min(max(total / rate * fps, 4), min(most, total) // 2 * 2, total)
            want = torch.arange(0, total, total / (n // 2 * 2)).int().clamp(max=total - 1).tolist()
        assert got == want, (total, rate, fps, most)
    one = videos.sample(VideoShape(1, 30.0, 90, 90), 768)
    assert one == [0], "a single frame is doubled"
    exactly = videos.configured({"num_frames": 6}).sample(VideoShape(100, 30.0, 90, 90), 768)
    assert len(exactly) == 6


def movie(n=12, height=64, width=96, fps=4):
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(make_picture(i, width)[:height], format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def video_url(data):
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}


def test_a_video_file_becomes_spans_of_frame_pairs(processor, store, model):
    data = movie()
    prepared = processor.chat("r", parse_messages(user(video_url(data), text("What?"))), PARAMS)
    (request,) = prepared.requests
    told = model.images.video.adapter.settings.times == "told"
    pixels = [store.get(m.pixels) for m in request.media]
    assert sum(len(p) for p in pixels) == 6, "3 s at 2 frames a second"
    assert len(request.media) == (3 if told else 1)
    shown = model.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
    assert ("<|vision_start|><0.2 seconds><|vision_start|><|video_pad|>" in shown) == told
    assert shown.count("<|video_pad|>") == sum(m.n_tokens for m in request.media)
    assert processor.encode_chat(parse_messages(user(video_url(data), text("What?")))) == list(request.prompt_ids)
    if not told:
        assert request.media[0].times == (0, 1, 2) if "2_5" not in str(model.path) else (0, 2, 4)
    again = processor.chat("s", parse_messages(user(video_url(data)), local=True), PARAMS)
    assert [m.key for m in again.requests[0].media] == [m.key for m in request.media]
    for ref in (*prepared.pixels, *again.pixels):
        store.release(ref)
    store.check(idle=True)


@pytest.mark.parametrize("order", ["image video", "video image"])
def test_a_prompts_placeholders_say_the_order(processor, store, model, order):
    """As the chat that the prompt was rendered from, whatever the order in vLLM's dict."""
    of = {"image": Image.fromarray(make_picture(1, 60)), "video": movie()}
    typed = parse_messages(user(*({"type": kind, kind: of[kind]} for kind in order.split()), text("?")), local=True)
    prompt = model.template.render(typed)
    (one,) = parse_prompts({"prompt": prompt, "multi_modal_data": of})
    chat = processor.chat("r", typed, PARAMS)
    given = processor.chat("r", (one.message,), PARAMS, prompt=one.prompt)
    assert [(r.prompt_ids, r.media) for r in given.requests] == [(r.prompt_ids, r.media) for r in chat.requests]
    for ref in (*chat.pixels, *given.pixels):
        store.release(ref)
    store.check(idle=True)


def test_videos_are_bounded(processor, store, monkeypatch):
    frames = np.stack([make_picture(i, 64) for i in range(10)])
    shown = {"type": "video", "video": frames, "fps": 4}
    for parts, says in [
        ([shown] * 3, "holds 3 videos; at most 2"),
        ([shown] * 2, "10 frames, where 6 are left"),
        ([{"type": "video", "video": np.zeros((17, 32, 32, 3), np.uint8)}], "at most 16 frames"),
        ([{"type": "video", "video": np.zeros((4, 32, 32), np.uint8)}], "must be uint8"),
        ([{"type": "video", "video": frames, "fps": 0}], "fps must be a number"),
        ([{"type": "video", "video": b"nonsense"}], "not a video file"),
        ([{"type": "video", "video": movie()[:-500]}], "video"),
        ([video_url(b"")], "the video is empty"),
        ([{"type": "video", "video": 5}], "must be bytes, a path or an array"),
    ]:
        with pytest.raises((InvalidRequest, MediaError), match=says):
            processor.chat("r", parse_messages(user(*parts), local=True), PARAMS)
    store.check(idle=True)


def test_pictures_that_could_never_be_held_are_refused(model):
    store = PixelStore(100_000)
    frames = np.stack([make_picture(i, 128) for i in range(12)])
    with pytest.raises(RequestTooLarge):
        Processor(model, store, weights=b"w", dtype="float32").chat(
            "r", parse_messages(user({"type": "video", "video": frames}), local=True), PARAMS
        )
    store.check(idle=True)


def test_options_reach_pictures_and_their_keys(processor, store):
    picture = {"type": "image", "image": photo("chelsea.png")}

    def ask(**options):
        prepared = processor.chat(
            "r", parse_messages(user(picture), local=True), PARAMS, options=ChatOptions(media=options)
        )
        for ref in prepared.pixels:
            store.release(ref)
        return prepared.requests[0].media[0]

    usual, small = ask(), ask(max_pixels=9 * 32 * 32)
    assert small.n_tokens <= 12 and small.n_tokens < usual.n_tokens and small.key != usual.key
    assert ask(size={"shortest_edge": 3136, "longest_edge": 9 * 32 * 32}).n_tokens == small.n_tokens
    assert ask(fps=1.0).grid == usual.grid
    for options, says in [
        ({"max_pixel": 3}, "'max_pixel' is not known; this model takes min_pixels, max_pixels, size"),
        ({"max_pixels": "many"}, "whole number"),
        ({"max_pixels": 10}, "must be between"),
        ({"max_pixels": 10**9}, "must be between"),
        ({"min_pixels": 9000, "max_pixels": 5000}, "are more than the most"),
        ({"size": 5}, "shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 1, "longest_edge": 9000}, "max_pixels": 9000}, "exclude each other"),
        ({"fps": 0}, "over 0"),
        ({"fps": True}, "over 0"),
        ({"fps": 1, "num_frames": 4}, "exclude each other"),
    ]:
        with pytest.raises(InvalidRequest, match=says) as e:
            ask(**options)
        assert e.value.param == "mm_processor_kwargs"
        with pytest.raises(InvalidRequest, match=says):
            processor.chat("r", parse_messages(user(text("no picture"))), PARAMS, options=ChatOptions(media=options))
    store.check(idle=True)


@pytest.mark.parametrize("special", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_special_texts_in_a_users_words_are_refused(processor, model, special):
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        processor.chat("r", parse_messages(user(text(f"see {special} here"))), PARAMS)
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        processor.complete("r", f"see {special} here", PARAMS)
    for token in model.images.placeholders:
        with pytest.raises(InvalidRequest, match="image token id"):
            processor.complete("r", [1, token, 2], PARAMS)


def test_adapters_travel_between_processes(model):
    for adapter in (model.images.adapter, model.images.video.adapter):
        copy = pickle.loads(pickle.dumps(adapter.configured({"max_pixels": 30_000})))
        assert copy.parameters == adapter.configured({"max_pixels": 30_000}).parameters


def test_a_jpeg_decoded_smaller_keeps_its_grid():
    adapter, file = QwenImages(QwenSettings(bounds=PixelBounds(56 * 56, 300 * 300))), io.BytesIO()
    photo("coffee.png").convert("RGB").resize((1999, 1101)).save(file, "JPEG")
    part, seal = ImagePart(file.getvalue(), "p"), Seal(b"", "float32")
    (fast,), (exact,) = (prepare_image(part, adapter, MediaLimits(fast_jpeg=on), seal) for on in (True, False))
    assert fast.item == exact.item == adapter.fit(1999, 1101) and fast.pixels.shape == exact.pixels.shape
    assert fast.key != exact.key and 0 < np.abs(fast.pixels.astype(int) - exact.pixels).mean() < 5.0
