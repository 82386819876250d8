"""Frames of videos are those of a plain decode of everything, whoever decodes them; bad files are said to be bad."""

import importlib.util
import struct

import numpy as np
import pytest
from PIL import Image

from hydrainfer.core import DeadlineExceeded, MediaError, RequestTooLarge
from hydrainfer.processor.video.file import VideoLimits
from hydrainfer.processor.video.frames import open_video
from hydrainfer.processor.video.source import FrameSize, VideoFacts
from tests.processor.video.videos import all_frames, make_sound, make_video, turned, with_duration

pytestmark = pytest.mark.cpu
BACKENDS = ["pyav", *(["decord"] if importlib.util.find_spec("decord") else [])]
VARIABLE = [0, 1, 2, 5, 6, 20, 21, 22, 23, 40, 41, 43, 47, 50, 51, 80, 81, 82, 83, 84]

VIDEOS = {
    "h264": {},
    "key frames far apart": {"options": {"g": "250", "bf": "3"}},
    "only key frames": {"options": {"g": "1"}},
    "odd key frames": {"options": {"g": "5", "bf": "0", "sc_threshold": "0"}},
    "open groups": {"options": {"g": "9", "bf": "3", "x264-params": "open-gop=1:b-pyramid=normal"}, "n": 60},
    "fragmented": {"movflags": "frag_keyframe+empty_moov"},
    "matroska": {"kind": "matroska"},
    "avi": {"kind": "avi"},
    "old avi": {"codec": "mpeg4", "kind": "avi", "options": {}},
    "mpeg4": {"codec": "mpeg4", "options": {"bf": "2", "g": "11"}},
    "h265": {"codec": "libx265", "options": {"x265-params": "log-level=none:keyint=9:open-gop=1"}},
    "vp8": {"codec": "libvpx", "kind": "webm", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "20"}},
    "vp9": {"codec": "libvpx-vp9", "kind": "webm", "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "20"}},
    "av1": {"codec": "libsvtav1", "options": {"g": "12", "svtav1-params": "lp=1"}},
    "variable rate": {"n": len(VARIABLE), "pts": VARIABLE},
    "variable rate, matroska": {"n": len(VARIABLE), "pts": VARIABLE, "kind": "matroska"},
    "begins late": {"pts": range(50, 90)},
    "with sound": {"sound": True},
    "one frame": {"n": 1},
    "odd size": {"size": (70, 50)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_those_of_a_serial_decode(name, backend):
    data = make_video(**VIDEOS[name])
    everything = all_frames(data)
    video = open_video(data, backend=backend)
    n = video.facts.n_frames
    assert n == len(everything) == VIDEOS[name].get("n", 40)
    assert np.array_equal(video.read(range(n)), everything)
    for indices in ([n - 1], [0, n // 2], np.linspace(0, n - 1, 7).astype(int), [n // 3, 0, n // 3, n - 1]):
        for n_decoders in (1, 2, 3):
            frames = video.read([int(i) for i in indices], n_decoders=n_decoders)
            assert frames.dtype == np.uint8 and np.array_equal(frames, everything[list(indices)])


def half(frame):
    return np.asarray(Image.fromarray(frame).resize((32, 48), Image.Resampling.BICUBIC))


HALF = FrameSize(32, 48, half)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["plain", "turned", "counted"])
def test_frames_are_resized_as_they_are_decoded(how, backend):
    data = make_video(kind="avi" if how == "counted" else "mp4")
    data = turned(data, 90) if how == "turned" else data
    whole = open_video(data, backend=backend)
    everything = whole.read(range(40))
    limits = VideoLimits(max_total_pixels=40 * 32 * 48)  # a quarter of what whole frames have
    with pytest.raises(MediaError, match="pixels together"):
        open_video(data, limits, backend=backend).read(range(40))
    for n_decoders in (1, 3):
        found = open_video(data, limits, backend=backend).read(range(40), HALF, n_decoders=n_decoders)
        assert np.array_equal(found, [half(frame) for frame in everything])
        assert np.array_equal(whole.read([7, 3, 7], HALF, n_decoders=n_decoders), found[[7, 3, 7]])
    with pytest.raises(MediaError, match="62976 pixels together"):
        open_video(data, limits).read([*range(40), 0], HALF)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_rotation_is_applied(degrees, backend):
    plain = make_video(n=12)
    data = turned(plain, degrees)
    expected = np.rot90(all_frames(plain), -degrees // 90, (1, 2))
    facts = open_video(data).facts
    assert (facts.height, facts.width) == expected.shape[1:3]
    for n_decoders in (1, 2):
        assert np.array_equal(open_video(data, backend=backend).read(range(12), n_decoders=n_decoders), expected)


def test_facts():
    assert open_video(make_video()).facts == VideoFacts(40, 10.0, 96, 64, 4.0)
    assert open_video(make_video(rate=25, kind="matroska")).facts == pytest.approx(
        VideoFacts(40, 25.0, 96, 64, 1.6), rel=0.01
    )
    facts = open_video(make_video(n=len(VARIABLE), pts=VARIABLE)).facts
    assert facts.n_frames == 20 and facts.duration_s == pytest.approx(8.5, abs=0.2)
    assert facts.fps == pytest.approx(20 / facts.duration_s)


def test_nothing_asked_nothing_decoded():
    assert open_video(make_video(n=3)).read([]).shape == (0, 64, 96, 3)
    with pytest.raises(AssertionError):
        open_video(make_video(n=3)).read([3])


NO_VIDEO = {
    "empty": (b"", "is empty"),
    "text": (b"hello, this is no video at all", "not a video file"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a video file"),
    "playlist": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video file"),
    "concat": (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video file"),
    "mpeg-ts": (b"\x47" + bytes(187) + b"\x47" + bytes(187), "not a video file"),
    "only a signature": (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "decoded|no video|no frames"),
    "ebml and nothing": (b"\x1a\x45\xdf\xa3" + bytes(50), "decoded|no video"),
    "riff and nothing": (b"RIFF\x04\0\0\0AVI ", "decoded|no video|cut off"),
}


@pytest.mark.parametrize("name", NO_VIDEO)
def test_bytes_that_are_no_video_are_refused(name):
    data, says = NO_VIDEO[name]
    with pytest.raises(MediaError, match=says) as e:
        open_video(data, param="p")
    assert e.value.param == "p" and "passwd" not in e.value.message


def test_sound_without_pictures_and_a_track_without_frames():
    with pytest.raises(MediaError, match="no video track"):
        open_video(make_sound())
    data = make_video(n=1)
    at = data.index(b"stsz")
    empty = data[: at + 12] + struct.pack(">I", 0) + data[at + 16 :]
    with pytest.raises(MediaError, match=r"no frames|decoded"):
        open_video(empty)


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
@pytest.mark.parametrize("faststart", [False, True])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.95])
def test_a_truncated_file_is_refused(kind, faststart, part):
    options = {"g": "7"}
    data = _faststart(make_video(kind="mp4")) if faststart and kind == "mp4" else make_video(kind=kind, options=options)
    assert open_video(data).facts.n_frames == 40
    with pytest.raises(MediaError, match=r"cut off|not a video|is empty|no frames"):
        open_video(data[: int(len(data) * part)])


def _faststart(data):
    """The index before the frames, as for the web."""
    at = data.index(b"mdat") - 4
    (size,) = struct.unpack_from(">I", data, at)
    mdat, moov, head = data[at : at + size], bytearray(data[at + size :]), data[:at]
    position = moov.index(b"stco") + 8
    (n,) = struct.unpack_from(">I", moov, position)
    for i in range(n):
        (offset,) = struct.unpack_from(">I", moov, position + 4 + 4 * i)
        struct.pack_into(">I", moov, position + 4 + 4 * i, offset + len(moov))
    return head + bytes(moov) + mdat


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_random_damage_never_raises_anything_else(kind):  # of PyAV: decord would end this process
    rng, whole = np.random.default_rng(0), make_video(kind=kind, n=20)
    limits = VideoLimits(decode_s=5.0)
    n_refused = 0
    for _ in range(40):
        data = bytearray(whole)
        for at in rng.integers(12, len(data), 12):
            data[at] = rng.integers(256)
        try:
            video = open_video(bytes(data), limits)
            frames = video.read([0, video.facts.n_frames - 1], n_decoders=2)
            assert frames.shape == (2, video.facts.height, video.facts.width, 3)
        except (MediaError, DeadlineExceeded) as e:
            n_refused += 1
            assert e.__suppress_context__ or not e.__context__
            assert not any(word in e.message for word in ("Errno", "avcodec", "Invalid data", "0x"))
    assert n_refused


def test_long_videos_are_refused_by_their_header_and_by_their_packets():
    hours = make_video(n=11, pts=[i * 36_000 for i in range(11)], kind="matroska")  # an hour between two frames
    with pytest.raises(MediaError, match="longer than the limit of 3600 s"):
        open_video(hours)
    with pytest.raises(MediaError, match="longer than the limit of 3600 s"):
        open_video(with_duration(hours, 5000.0))
    assert open_video(hours, VideoLimits(max_duration_s=1e6)).facts.duration_s == pytest.approx(36_000, rel=0.01)
    with pytest.raises(MediaError, match="longer than the limit"):
        open_video(with_duration(make_video(kind="matroska"), 36_000_000.0))


def test_limits_are_enforced():
    data = make_video()
    with pytest.raises(RequestTooLarge, match="limit of 100"):
        open_video(data, VideoLimits(max_bytes=100))
    with pytest.raises(MediaError, match="96 x 64"):
        open_video(data, VideoLimits(max_frame_pixels=6143))
    with pytest.raises(MediaError, match=r"5 frames.*at most 4"):
        open_video(data, VideoLimits(max_frames=4)).read(range(5))
    with pytest.raises(MediaError, match="30720 pixels together"):
        open_video(data, VideoLimits(max_total_pixels=30_000)).read(range(5))
    with pytest.raises(MediaError, match="30720 pixels together"):
        open_video(data, VideoLimits(max_total_pixels=30_000)).read([1] * 5)


@pytest.mark.parametrize("kind", ["mp4", "avi"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_ends_by_the_time_limit(backend, kind):
    video = open_video(make_video(kind=kind), backend=backend)
    video._limits = VideoLimits(decode_s=0.0)
    with pytest.raises(DeadlineExceeded, match="longer than 0 s") as e:
        video.read(range(40), n_decoders=2)
    assert e.value.code == "media_timeout"


def test_other_codecs_are_refused():
    with pytest.raises(MediaError, match="codec is not supported"):
        open_video(make_video(codec="mpeg2video", kind="matroska", options={}, rate=25))


def test_a_frame_larger_than_the_header_says_is_not_decoded():
    """The sizes in the container are made small; the stream's own are not."""
    data = bytearray(make_video(size=(640, 480), n=3, kind="matroska"))
    at = data.index(b"\xb0\x82\x02\x80")  # PixelWidth
    data[at : at + 4] = b"\xb0\x82\x00\x10"
    with pytest.raises(MediaError):
        open_video(bytes(data), VideoLimits(max_frame_pixels=100_000))
