"""Workers prepare as a thread would; whatever a picture does to one of them, the others and the server go on."""

import contextlib
import errno
import io
import multiprocessing
import os
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.core import DeadlineExceeded, InternalError, MediaError, Overloaded, RequestTooLarge, Unavailable
from hydrainfer.processor import ImagePart, MediaLimits, MediaWorkers
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.workers import channel
from hydrainfer.processor.workers import pool as room
from hydrainfer.processor.workers.channel import timeval
from hydrainfer.processor.workers.pool import _Worker
from hydrainfer.processor.workers.prepare import Seal, prepare_image
from tests.cluster.processes import alive
from tests.processor.workers import jobs
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
DATA = Path(skimage.__file__).parent / "data"
LIMITS = MediaLimits(max_pixels=4_000_000)
ADAPTER = ClipImages(ClipSettings.read({"size": {"shortest_edge": 56}, "crop_size": 56}).by("pillow"), 16)
ARGS = (ADAPTER, LIMITS, Seal(b"w", "float32"))


def part(data=b"data"):
    return ImagePart(data, "messages.0")


def photo(name="rocket.jpg"):
    return part((DATA / name).read_bytes())


@pytest.fixture
def pool():
    """Make a pool; closed, and checked for leaks, afterwards."""
    made, n_files = [], len(os.listdir("/proc/self/fd"))

    def make(n=1, limits=LIMITS, **options):
        made.append(MediaWorkers(n, limits, **options))
        return made[-1]

    yield make
    for workers in made:
        pids = workers.pids
        workers.close()
        workers.close()
        assert alive(pids) == [] and workers.pids == [] and workers.n_jobs == 0
    assert len(os.listdir("/proc/self/fd")) == n_files
    assert not [t for t in threading.enumerate() if t.name.startswith("hydra-media")]


def works(workers):
    (made,) = workers.submit(prepare_image, photo(), *ARGS).result()
    return np.array_equal(made.pixels, prepare_image(photo(), *ARGS)[0].pixels)


def test_results_are_those_of_a_thread_in_order_whatever_the_adapter_makes(pool):
    workers = pool(2)
    assert workers.pids == [], "nothing starts before it is needed"
    names = ["rocket.jpg", "astronaut.png", "no_time_for_that_tiny.gif", "camera.png", "text.png"] * 2
    futures = [workers.submit(prepare_image, photo(name), *ARGS) for name in names]
    for name, future in zip(names, futures, strict=True):
        (ours,), (theirs,) = future.result(), prepare_image(photo(name), *ARGS)
        assert (ours.item, ours.key) == (theirs.item, theirs.key) and np.array_equal(ours.pixels, theirs.pixels)
    for made in workers.submit(jobs.big, part(), 6_000_000).result():
        assert made.item == jobs.ITEM and made.item.n_inner == 4 and made.pixels.shape == (2, 3_000_000)
        assert (made.pixels.ravel()[:300] == np.arange(300, dtype=np.uint8)).all()
    assert len(workers.pids) == 2


def test_files_in_the_present_folder_are_not_imported(pool, tmp_path, monkeypatch):
    """Whoever may write there must not have his code run."""
    (tmp_path / "ctypes.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert works(pool())


def test_a_worker_is_small_and_knows_no_torch(pool):
    workers = pool()
    assert works(workers)
    (pid,) = workers.pids
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps and "_imaging" in maps
    rss = int(next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in x).split()[1]) * 1024
    assert rss < 100e6, rss


def test_errors_keep_their_words_and_bugs_tell_nothing(pool, caplog):
    workers = pool()
    with pytest.raises(MediaError, match="not like this") as e:
        workers.submit(jobs.refuses, part()).result()
    assert (e.value.param, e.value.code) == ("messages.0", "taste")
    with pytest.raises(MediaError, match="not a picture"):
        workers.submit(prepare_image, part(b"hello"), *ARGS).result()
    with pytest.raises(MediaError, match="damaged or cut off"):
        workers.submit(prepare_image, part(photo().source[:9000]), *ARGS).result()
    with pytest.raises(RequestTooLarge):
        workers.submit(prepare_image, part(bytes(33 << 20)), *ARGS).result()
    (pid,) = workers.pids
    with pytest.raises(InternalError) as e:
        workers.submit(jobs.breaks, part(b"secret")).result()
    assert "secret" not in e.value.message
    assert works(workers) and workers.pids != [pid], "who knows what a bug leaves"


def test_what_libraries_say_is_not_for_the_console_and_what_bugs_do_is(pool, capfd):
    workers = pool()
    for data in (b"one", b"two"):
        assert workers.submit(jobs.talks, part(data)).result()
    with pytest.raises(InternalError):
        workers.submit(jobs.breaks, part()).result()
    out, err = capfd.readouterr()
    assert out == "" and "said" not in err
    assert "a media worker failed" in err and "ZeroDivisionError" in err


def test_a_stuck_worker_is_replaced_and_the_others_go_on(pool, tmp_path):
    workers, trace = pool(2, job_limit_s=3.0), tmp_path / "stuck"
    assert works(workers) and works(workers)
    caught = workers.submit(jobs.stuck, part(), str(trace))
    n_served = 0
    while not caught.done():
        assert works(workers)
        n_served += 1
    assert n_served
    with pytest.raises(DeadlineExceeded, match=r"more than 3 s") as e:
        caught.result()
    assert e.value.code == "media_timeout"
    pid = int(trace.read_text())
    assert alive([pid]) == [] and pid not in workers.pids and works(workers)


def test_a_worker_that_stops_answering_fails_its_job_and_is_replaced(pool, monkeypatch):
    workers = pool()
    assert works(workers)
    monkeypatch.setattr(workers, "_job_limit_s", 0.5)
    os.kill(workers.pids[0], signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        workers.submit(jobs.echo, part(bytes(5_000_000))).result()
    monkeypatch.undo()
    assert works(workers)


def test_a_picture_that_kills_its_worker_is_tried_twice_and_refused(pool, tmp_path):
    workers = pool()
    with pytest.raises(MediaError, match="died of it, twice") as e:
        workers.submit(jobs.dies, part(), str(tmp_path / "deaths")).result()
    assert e.value.status == 422 and (tmp_path / "deaths").read_bytes() == b"xx"
    (made,) = workers.submit(jobs.dies_once, part(), str(tmp_path / "once")).result()
    assert made.pixels.tobytes() == b"data" and (tmp_path / "once").read_bytes() == b"x"
    os.kill(workers.pids[0], signal.SIGKILL)  # between two jobs
    assert works(workers)


@pytest.mark.parametrize("moment", ["greet", "do", "_answer", "_receive"])
def test_a_worker_that_dies_at_any_moment_costs_nobody_an_answer(pool, monkeypatch, moment):
    """Killed from outside: while it starts, between two jobs, at work, and while it hands over what it has made."""
    workers, deaths, most = pool(), [], 4 if moment == "greet" else 1
    method = getattr(_Worker, moment)

    def killed(self, *args):
        if len(deaths) < most:
            deaths.append(self.process.pid)
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if moment == "greet":  # it may have been quick enough to say hello
                with contextlib.suppress(EOFError):
                    method(self, *args)
        return method(self, *args)

    monkeypatch.setattr(_Worker, moment, killed)
    (made,) = workers.submit(jobs.echo, part(b"mine" * 1_000_000)).result()  # more than the socket holds
    assert made.pixels.tobytes() == b"mine" * 1_000_000
    assert len(deaths) == most and works(workers)


@pytest.mark.parametrize("call", [0, 4, 7])
def test_a_broken_connection_to_a_worker_costs_nobody_an_answer(pool, monkeypatch, call):
    """And what was left unread of an answer is never taken for that of another picture."""
    workers, waits = pool(), []
    assert works(workers)

    def wrong_once(seconds):
        waits.append(seconds)
        return struct.pack("ll", 1, 1_000_000) if len(waits) == call + 1 else timeval(seconds)

    monkeypatch.setattr(channel, "timeval", wrong_once)  # the kernel refuses it
    for data in (b"one", b"two", b"three"):
        (made,) = workers.submit(jobs.echo, part(data)).result()
        assert made.pixels.tobytes() == data
    assert len(waits) > 8


def test_an_answer_that_makes_no_sense_is_asked_for_again(pool, monkeypatch):
    workers, answers = pool(), []

    def garbled_once(data):
        answers.append(data)
        return decode_answer(b"\xc1" if len(answers) == 1 else data)

    decode_answer = room._decode_answer
    monkeypatch.setattr(room, "_decode_answer", garbled_once)
    assert works(workers) and len(answers) > 2


def test_no_descriptor_left_is_waited_for(pool, monkeypatch):
    workers, tries = pool(), []

    def refused_once(*args):
        tries.append(args)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return socketpair(*args)

    socketpair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", refused_once)
    assert works(workers) and len(tries) == 2


def test_a_bomb_is_bounded_and_kills_nobody_else(pool):
    workers = pool()
    assert works(workers)
    (pid,) = workers.pids
    with pytest.raises(MediaError, match="more memory than this server allows"):
        workers.submit(jobs.eats_memory, part(), workers.memory_bytes).result()
    assert workers.submit(jobs.eats_memory, part(), 100 << 20).result() and workers.pids == [pid]
    grey = Image.new("L", (2000, 2000))
    out = io.BytesIO()
    grey.save(out, "PNG")
    bomb = part(out.getvalue())
    assert workers.submit(prepare_image, bomb, *ARGS).result()
    with pytest.raises(MediaError, match="more than 1000 pixels"):
        workers.submit(prepare_image, bomb, ADAPTER, MediaLimits(max_pixels=1000), ARGS[2]).result()


def test_a_limit_of_the_users_own_holds_and_pictures_are_served(pool, monkeypatch, tmp_path):
    """`ulimit -v` below what a worker would take."""
    limit_kib = 1 << 20
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v {limit_kib}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    workers = pool()
    workers.memory_bytes = 4 << 30
    assert works(workers)
    (pid,) = workers.pids
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (limit_kib << 10, limit_kib << 10)
    with pytest.raises(MediaError, match="more memory than this server allows"):
        workers.submit(jobs.eats_memory, part(), 1 << 30).result()
    assert works(workers) and workers.pids == [pid]


def test_the_memory_allowed_is_enough_for_the_largest_picture_of_any_kind(pool):
    limits = MediaLimits(max_pixels=2_000_000)
    workers = pool(limits=limits)
    workers.memory_bytes -= 480 << 20  # all but what is for libraries: pixels must fit into what is for pixels
    shade = np.arange(2_000_000, dtype=np.uint32).astype(np.uint16).reshape(1000, 2000)
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGBA", "LA", "CMYK", "P", "I;16"):
        image = Image.fromarray(shade) if mode == "I;16" else Image.fromarray(shade.astype(np.uint8)).convert(mode)
        out = io.BytesIO()
        options = {} if mode == "CMYK" else {"compress_level": 1}
        image.save(out, "JPEG" if mode == "CMYK" else "PNG", exif=exif, **options)
        assert workers.submit(prepare_image, part(out.getvalue()), ADAPTER, limits, ARGS[2]).result(), mode


def test_pixels_in_flight_are_bounded_over_all_workers(pool, tmp_path):
    workers = pool(2)
    big = Image.new("RGB", (2000, 1500))
    out = io.BytesIO()
    big.save(out, "PNG")
    assert works(workers)
    held = workers._room.holding(3_000_000)
    with held:
        waiting = [workers.submit(prepare_image, part(out.getvalue()), *ARGS)]
        while not workers._room._queue:  # its thread is there first
            time.sleep(0.01)
        small = workers.submit(prepare_image, photo("no_time_for_that_tiny.gif"), *ARGS)
        time.sleep(0.3)
        assert not waiting[0].done() and not small.done(), "first come, first served"
    assert waiting[0].result() and small.result()
    limit = Image.new("RGB", (LIMITS.max_pixels // 1000, 1000))
    limit.save(out := io.BytesIO(), "PNG")
    assert workers.submit(prepare_image, part(out.getvalue()), *ARGS).result(), "all is free again"


def test_a_full_queue_refuses_and_what_is_cancelled_is_never_begun(pool, tmp_path):
    workers, trace, over = pool(max_jobs=4), tmp_path / "begun", tmp_path / "over"
    assert works(workers)
    first = workers.submit(jobs.nap, part(b"first"), str(over), str(trace))
    wait_until(trace.exists)
    later = [workers.submit(jobs.nap, part(b"later"), None, str(trace)) for _ in range(3)]
    with pytest.raises(Overloaded, match="prepares 4 pictures") as e:
        workers.submit(jobs.echo, part())
    assert e.value.retry_after_s
    assert all(future.cancel() for future in later) and not first.cancel()
    over.touch()
    assert workers.submit(jobs.nap, part(b"last"), None, str(trace)).result()
    assert trace.read_text().split() == ["first", "last"]


def test_a_worker_that_was_started_early_serves_the_first_picture(pool, monkeypatch):
    workers = pool(2)
    workers.warm()
    wait_until(lambda: workers.pids and workers._threads._idle_semaphore._value)
    pids = workers.pids
    assert works(workers) and workers.pids == pids
    with monkeypatch.context() as m:
        m.setattr(sys, "executable", "/bin/false")
        other = pool()
        other.warm()
        with pytest.raises(InternalError, match="cannot be prepared"):
            other.submit(jobs.echo, part()).result()
    assert works(other), "what failed to start early is started when it is needed"
    busy = pool()
    busy.warm()
    busy.close()
    busy.warm()


def test_closing_while_busy(pool):
    workers = pool(2, job_limit_s=100.0)
    futures = [workers.submit(jobs.stuck, part()) for _ in range(6)]
    wait_until(lambda: len(workers.pids) == 2 and sum(f.running() for f in futures) == 2)
    pids, begun_s = workers.pids, time.monotonic()
    workers.close()
    assert time.monotonic() - begun_s < PATIENCE_S and alive(pids) == []
    for future in futures:
        with pytest.raises((Unavailable, CancelledError)):
            future.result()
    with pytest.raises(Unavailable):
        workers.submit(jobs.echo, part())


def test_workers_that_cannot_start_are_a_500_and_killed_ones_a_503_and_the_next_may(pool, monkeypatch):
    workers, greet = pool(), _Worker.greet
    with monkeypatch.context() as m:
        m.setattr(sys, "executable", "/bin/false")
        with pytest.raises(InternalError, match="cannot be prepared"):
            workers.submit(jobs.echo, part()).result()
    with monkeypatch.context() as m:
        m.setattr(_Worker, "greet", lambda self: os.kill(self.process.pid, signal.SIGKILL) or greet(self))
        m.setattr(room, "_START_S", 0.5)
        with pytest.raises(Unavailable, match="being killed"):
            workers.submit(jobs.echo, part()).result()
    assert works(workers)


def hold_workers(pipe):
    workers = MediaWorkers(2, LIMITS)
    futures = [workers.submit(jobs.stuck, part()) for _ in range(4)]
    while len(workers.pids) < 2 or sum(f.running() for f in futures) < 2:
        time.sleep(0.01)
    idle = MediaWorkers(1, LIMITS)
    idle.submit(jobs.echo, part()).result()
    pipe.send(workers.pids + idle.pids)
    time.sleep(300)


def test_a_killed_server_leaves_nothing():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=hold_workers, args=(theirs,))
    server.start()
    pids = ours.recv()
    assert len(alive(pids)) == 3
    os.kill(server.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    server.join()
    wait_until(lambda: not alive(pids))
    print(f"gone {time.monotonic() - killed_s:.2f} s after the server")


def test_no_worker_loads_ffmpeg_before_it_has_a_video():
    """It takes 15 MB in each worker and in the server."""
    code = "import sys, hydrainfer.serving, hydrainfer.processor.workers.worker; print('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
