"""Parallel or not, remembered or not: the same pictures come out, in order, and a failure holds nothing."""

import io
import struct
import threading
import time
import warnings
import zlib
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.core import MediaError, Overloaded
from hydrainfer.processor import ImagePart, JobTicket, MediaLimits, MediaWorkers, PixelStore, VideoReading
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.media import decode_image
from hydrainfer.processor.workers import preprocess as room
from hydrainfer.processor.workers.prepare import Seal
from hydrainfer.processor.workers.preprocess import Adapters, Preprocessor
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
LIMITS = MediaLimits()
ADAPTER = ClipImages(ClipSettings.read({"size": {"shortest_edge": 56}, "crop_size": 56}), 16)
OTHER = ClipImages(ClipSettings.read({"size": {"shortest_edge": 28}, "crop_size": 28}), 4)
PICTURE_BYTES = 56 * 56 * 3


def picture(seed, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def parts(*sources):
    return [ImagePart(s, f"messages.{i}") for i, s in enumerate(sources)]


@pytest.fixture(scope="module")
def workers():
    workers = MediaWorkers(2, LIMITS)
    yield workers
    workers.close()


@pytest.fixture
def store():
    store = PixelStore(1 << 20, keep_bytes=4 * PICTURE_BYTES)
    yield store
    store.check(idle=True)


@pytest.fixture
def count(monkeypatch):
    """Pictures decoded here."""
    calls, prepare = [], room.prepare_image
    monkeypatch.setattr(room, "prepare_image", lambda *args: calls.append(args[0].source) or prepare(*args))
    return calls


class Pictures(Preprocessor):
    """A preprocessor of pictures alone, by one adapter."""

    def prepare(self, parts, adapter, ticket=None, salt=""):
        return super().prepare(parts, Adapters(adapter, None, {}), ticket, salt)


def made_by(store, workers=None, seal="float32"):
    return Pictures(store, LIMITS, VideoReading(), Seal(b"w", seal), workers)


def talked_about():
    """Pictures that Pillow warns of, each by another of its modules, which it would decode."""
    picture, exif, out = Image.new("RGB", (80, 60)), Image.Exif(), io.BytesIO()
    exif[0x010E] = "x" * 50
    Image.new("1", (9500, 9500)).save(out, "PNG")
    yield "PIL.Image", out.getvalue()
    out = io.BytesIO()
    picture.save(out, "JPEG", exif=exif.tobytes()[:-30])
    yield "PIL.TiffImagePlugin", out.getvalue()
    out = io.BytesIO()
    picture.save(out, "PNG")
    frames = struct.pack(">I4sII", 8, b"acTL", 0, 0)  # an animation of no frames, before the pixels
    png = out.getvalue()
    at = png.index(b"IDAT") - 4
    yield "PIL.PngImagePlugin", png[:at] + frames + struct.pack(">I", zlib.crc32(frames[4:])) + png[at:]


@pytest.mark.parametrize(("module", "data"), talked_about(), ids=lambda v: v if isinstance(v, str) else "")
def test_pillows_warnings_reach_no_console(store, module, data):
    limits = MediaLimits(max_pixels=100_000_000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        decode_image(data, limits)
        assert {Path(w.filename).stem for w in said} == {module.removeprefix("PIL.")}, "Pillow has nothing to say"
        said.clear()
        preprocessor = Pictures(store, limits, VideoReading(), Seal(b"w", "float32"), None)
        release(store, preprocessor.prepare(parts(data), ADAPTER))
        with Image.open(io.BytesIO(data)) as opened:
            release(store, preprocessor.prepare(parts(opened), ADAPTER))
    assert not said


def release(store, found):
    for held in found:
        for h in held:
            store.release(h.ref)


def test_parallel_equals_serial(store, workers, tmp_path):
    (tmp_path / "p.png").write_bytes(picture(90))
    opened = Image.open(io.BytesIO(picture(91)))
    sources = [picture(i) for i in range(12)] + [tmp_path / "p.png", opened, picture(3)]
    serial, parallel = (made_by(store, w).prepare(parts(*sources), ADAPTER) for w in (None, workers))
    assert serial == parallel and len({h.key for (h,) in serial}) == 14
    release(store, serial + parallel)


def test_the_same_bytes_are_decoded_once(store, count):
    media = made_by(store)
    first = media.prepare(parts(picture(1), picture(2)), ADAPTER)
    assert media.prepare(parts(picture(2), picture(1), picture(2)), ADAPTER) == [*first[::-1], first[1]]
    assert count == [picture(1), picture(2)]
    release(store, first)
    release(store, [*first[::-1], first[1]])
    store.check(idle=True)
    again = media.prepare(parts(picture(1)), ADAPTER)
    assert again == first[:1] and len(count) == 2, "kept after the last release"
    release(store, again)
    assert media.items(parts(picture(1)), ADAPTER) == [[ADAPTER.fit(30, 40)]] and len(count) == 2


def test_other_settings_are_another_picture(store, count):
    media = made_by(store)
    found = [media.prepare(parts(picture(1)), a) for a in (ADAPTER, OTHER, ADAPTER)]
    assert len(count) == 2 and found[0] == found[2] != found[1]
    found.append(made_by(store, seal="bfloat16").prepare(parts(picture(1)), ADAPTER))
    assert len(count) == 3 and found[3][0][0].key != found[0][0][0].key
    for one in found:
        release(store, one)


def test_media_prepared_with_another_salt_are_prepared_again(store, count):
    media = made_by(store)
    for salt in ("", "a", "b", "a", ""):
        release(store, media.prepare(parts(picture(1)), ADAPTER, salt=salt))
    assert len(count) == 3


def test_pictures_that_have_left_the_store_are_decoded_again(count):
    store = PixelStore(4 * PICTURE_BYTES, keep_bytes=2 * PICTURE_BYTES)
    media = made_by(store)
    for i in (0, 1, 2):
        release(store, media.prepare(parts(picture(i)), ADAPTER))
    assert store.n_kept_bytes == 2 * PICTURE_BYTES and store.n_bytes == 0
    release(store, media.prepare(parts(picture(1)), ADAPTER))  # the oldest is 2 now
    held = media.prepare(parts(*(picture(i) for i in (3, 4, 5))), ADAPTER)
    assert store.n_kept_bytes == PICTURE_BYTES, "what is needed comes first"
    assert len(count) == 6
    both = media.prepare(parts(picture(1)), ADAPTER)
    assert len(count) == 6 and store.n_kept_bytes == 0
    with pytest.raises(Overloaded):
        media.prepare(parts(picture(1), picture(2)), ADAPTER)
    store.check()
    release(store, held + both)
    store.check(idle=True)


def test_memory_of_what_was_seen_is_bounded(store, monkeypatch, count):
    monkeypatch.setattr(room, "_MAX_REMEMBERED", 2)
    media = made_by(store)
    for i in (1, 2, 1, 3, 1, 2):
        release(store, media.prepare(parts(picture(i)), ADAPTER))
    assert count == [picture(i) for i in (1, 2, 3, 2)]


@pytest.mark.parametrize("bad", range(5))
def test_one_bad_picture_holds_nothing(store, workers, bad):
    sources = [picture(i) for i in range(5)]
    sources[bad] = sources[bad][:60]
    for by in (None, workers):
        with pytest.raises(MediaError, match="damaged") as e:
            made_by(store, by).prepare(parts(*sources), ADAPTER)
        assert e.value.param == f"messages.{bad}"
        store.check(idle=True)


class Scripted:
    """Workers whose results come when the test says so."""

    n = 2

    def __init__(self):
        self.futures = []

    def submit(self, *_):
        self.futures.append(Future())
        return self.futures[-1]


def test_a_cancelled_request_leaves_the_queue_and_holds_nothing(store):
    scripted, ticket, ended = Scripted(), JobTicket(), []
    media = made_by(store, scripted)
    one = room.prepare_image(parts(picture(0))[0], ADAPTER, LIMITS, Seal(b"w", "float32"))

    def prepare():
        try:
            media.prepare(parts(*(picture(i) for i in range(9))), ADAPTER, ticket)
        except CancelledError:
            ended.append(True)

    thread = threading.Thread(target=prepare)
    thread.start()
    while len(scripted.futures) < 4:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(scripted.futures) == 4, "not more ahead than twice the workers"
    scripted.futures[0].set_result(one)
    while len(scripted.futures) < 5:
        time.sleep(0.005)
    scripted.futures[1].set_running_or_notify_cancel()  # this one cannot be stopped
    ticket.cancel()
    assert [f.cancelled() for f in scripted.futures] == [False, False, True, True, True]
    scripted.futures[1].set_result(one)
    thread.join(PATIENCE_S)
    assert ended and len(scripted.futures) == 5
    late = JobTicket()
    late.cancel()
    with pytest.raises(CancelledError):
        media.prepare(parts(picture(1)), ADAPTER, late)
    assert len(scripted.futures) == 5
