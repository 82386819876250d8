"""Films are sampled, turned and cut as transformers and players show them: rates, display matrices, edit lists."""

import io
import random
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from hydrainfer.processor.video import open_video
from tests.processor.video.videos import all_frames, make_video

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(1800)]
BACKENDS = ("pyav", "decord")
RATES = (10, 12, 15, 20, 24, 25, 30, 48, 50, 60)
KINDS = {"mp4": "libx264", "mov": "libx264", "matroska": "libx264", "webm": "libvpx", "avi": "mpeg4"}
SMALL = {"g": "250", "bf": "0", "preset": "ultrafast"}


def sampled(n_frames: int, rate: float) -> int:
    """The number of frames that transformers' Qwen2-VL takes of a film, two per second."""
    n = min(max(n_frames / rate * 2.0, 4), n_frames // 2 * 2, n_frames)
    return int(n // 2 * 2)


@pytest.mark.parametrize("n_films", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_a_film_of_whole_seconds_has_the_frames_that_transformers_takes(n_films):
    rng, films = random.Random(1), [(kind, rate) for kind in KINDS for rate in RATES]
    rng.shuffle(films)
    for i in range(n_films):
        kind, rate = films[i % len(films)]
        seconds = rng.randint(2, 4 if n_films == 25 else 11)
        options = SMALL if KINDS[kind] == "libx264" else {}
        data = make_video(KINDS[kind], kind, n=rate * seconds, size=(32, 32), rate=rate, options=options)
        with av.open(io.BytesIO(data)) as container:  # as transformers' `read_video_pyav`
            reference = float(container.streams.video[0].average_rate)
        facts = open_video(data).facts
        assert (facts.n_frames, facts.fps) == (rate * seconds, reference), (kind, rate, seconds)
        assert sampled(facts.n_frames, facts.fps) == 2 * seconds, (kind, rate, seconds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [Fraction(24000, 1001), Fraction(30000, 1001)], ids=float)
def test_a_rate_that_is_no_whole_number_is_the_headers(kind, rate):
    data = make_video(KINDS[kind], kind, n=60, size=(32, 32), rate=rate, options={})
    assert open_video(data).facts.fps == pytest.approx(float(rate), rel=1e-4)


ORIENTATIONS = {  # (a, b, c, d) of the matrix, and the stored frame as it is shown
    "as stored": ((1, 0, 0, 1), lambda f: f),
    "clockwise": ((0, 1, -1, 0), lambda f: np.rot90(f, -1)),
    "half a turn": ((-1, 0, 0, -1), lambda f: np.rot90(f, 2)),
    "counter-clockwise": ((0, -1, 1, 0), lambda f: np.rot90(f, 1)),
    "left to right": ((-1, 0, 0, 1), np.fliplr),
    "top to bottom": ((1, 0, 0, -1), np.flipud),
    "transposed": ((0, 1, 1, 0), lambda f: f.transpose(1, 0, 2)),
    "transposed and turned": ((0, -1, -1, 0), lambda f: np.rot90(f, 2).transpose(1, 0, 2)),
}


def placed(data: bytes, matrix: tuple[int, ...]) -> bytes:
    """An MP4 with this display matrix."""
    a, b, c, d = matrix
    at = data.index(b"tkhd") + 44
    return data[:at] + struct.pack(">8i", *(v << 16 for v in (a, b, 0, c, d, 0, 0, 0))) + data[at + 32 :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ORIENTATIONS)
def test_each_of_the_eight_orientations_is_shown_upright(name, backend):
    matrix, upright = ORIENTATIONS[name]
    plain = make_video(n=8)
    video = open_video(placed(plain, matrix), backend=backend)
    expected = np.stack([upright(frame) for frame in all_frames(plain)])
    assert (video.facts.height, video.facts.width) == expected.shape[1:3]
    assert np.array_equal(video.read(range(8)), expected)


def trimmed(data: bytes, start_s: float) -> bytes:
    """A film as `ffmpeg -ss START -c copy` makes it: from the key frame before `start_s` on, with an edit list that
    hides what is before `start_s`."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        packets = [p for p in source.demux(stream) if p.size]
        cut = int(start_s / stream.time_base)
        first = max(i for i, p in enumerate(packets) if p.is_keyframe and p.pts <= cut)
        for packet in packets[first:]:
            packet.pts -= cut
            packet.dts -= cut
            packet.stream = copy
            target.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gop", ["250", "12"], ids=["one key frame", "several"])
@pytest.mark.parametrize("b_frames", ["0", "2"])
def test_a_trimmed_film_has_the_frames_that_players_show(gop, b_frames, backend):
    whole = make_video(n=60, rate=12, options={"g": gop, "bf": b_frames, "sc_threshold": "0"})
    for start_s in (0.0, 0.5, 1.0, 1.75, 3.3, 4.9):
        data = trimmed(whole, start_s)
        shown = all_frames(data)  # FFmpeg leaves out what the edit list hides
        video = open_video(data, backend=backend)
        n = video.facts.n_frames
        assert n == len(shown) >= 60 - round(start_s * 12) - 1, start_s
        assert np.array_equal(video.read(range(n)), shown), start_s
        assert np.array_equal(video.read([n // 2, n - 1], n_decoders=2), shown[[n // 2, n - 1]]), start_s
        assert video.facts.fps == pytest.approx(12, rel=0.05), start_s
