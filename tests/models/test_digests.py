"""The fingerprint of all bytes of the weights, and the records by which a later start need not read them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.checkpoint.gguf import unpack
from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from hydrainfer.models import digests, fingerprint, whole_fingerprint
from hydrainfer.models.stored import weight_headers
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.gguf_files import write_text

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("sharded"), shards=4, published_names=False)


@pytest.fixture
def path(sharded, tmp_path):
    """A copy to change, of several files."""
    return shutil.copytree(sharded, tmp_path / "copy")


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The folder of the records. Small files are remembered too, and at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_LEAST_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    return tmp_path / "cache" / "hydrainfer" / "weights"


@pytest.fixture
def n_read(monkeypatch):
    """A function that returns how many tensors were read since it was called last."""
    read, found = digests._digest, []

    def noted(file, fd, tensor):
        found.append(tensor.name)
        return read(file, fd, tensor)

    def count():
        n = len(found)
        found.clear()
        return n

    monkeypatch.setattr(digests, "_digest", noted)
    return count


def n_tensors(path):
    return sum(map(len, weight_headers(path).values()))


def flip(path, name, at, mask=1):
    """Change one byte of a tensor."""
    ((file, offset),) = (
        (file, t.offset) for file, tensors in weight_headers(path).items() for t in tensors if t.name == name
    )
    with file.open("r+b") as f:
        f.seek(offset + at)
        byte = f.read(1)[0]
        f.seek(offset + at)
        f.write(bytes([byte ^ mask]))


def later():
    """Wait until the clock of the file system has moved on."""
    time.sleep(0.02)


# ---- what it depends on


def test_it_is_that_of_all_spellings_and_shards(published, sharded):
    assert whole_fingerprint(published) == whole_fingerprint(sharded) != fingerprint(published)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_byte_of_any_tensor_changes_it(changeable, data):
    path, before = changeable
    tensors = sorted((t for each in weight_headers(path).values() for t in each), key=lambda t: t.name)
    tensor = data.draw(st.sampled_from(tensors))
    at, mask = data.draw(st.integers(0, tensor.n_bytes - 1)), data.draw(st.integers(1, 255))
    flip(path, tensor.name, at, mask)
    changed = whole_fingerprint(path)
    flip(path, tensor.name, at, mask)
    assert changed != before == whole_fingerprint(path)


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def changeable(tmp_path_factory, request):
    """A checkpoint to change, and its fingerprint. It is too small to be remembered."""
    folder = tmp_path_factory.mktemp("changeable")
    path = make_text(folder / "checkpoint", "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        if request.param == "gguf":
            path = unpack(write_text(path, folder / "model.gguf", "Q8_0"))
        patch.setattr(digests, "_LEAST_BYTES", 1 << 40)
        yield path, whole_fingerprint(path)


def test_samples_may_be_the_same_where_it_is_not(path):
    (name,) = (t.name for each in weight_headers(path).values() for t in each if t.name.endswith("embed_tokens.weight"))
    sampled, whole = fingerprint(path), whole_fingerprint(path)
    flip(path, name, 100)
    assert fingerprint(path) == sampled and whole_fingerprint(path) != whole


def test_pieces_and_threads_make_no_difference(path, monkeypatch):
    before = whole_fingerprint(path)
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(digests, "n_cores", lambda: 1)
    assert whole_fingerprint(path) == before


# ---- what is remembered


def test_the_weights_are_read_once(path, records, n_read, caplog):
    caplog.set_level(logging.INFO)
    before = whole_fingerprint(path)
    assert n_read() == n_tensors(path)
    assert caplog.text.count("reading all") == caplog.text.count(" GB of weights in ") == 1
    caplog.clear()
    config = read_config(path)
    assert whole_fingerprint(path, config) == before
    assert n_read() == 0 and not caplog.text
    assert len(list(records.glob("*.record"))) == len(weight_headers(path)) > 2
    assert not list(records.glob("*.part"))


def test_links_to_a_file_share_its_record(path, tmp_path, records, n_read):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in path.iterdir():
        (snapshot / file.name).symlink_to(file)
    before = whole_fingerprint(path)
    assert n_read() > 0
    assert whole_fingerprint(snapshot) == before and n_read() == 0


def in_place(path, file):
    name = weight_headers(path)[file][0].name
    flip(path, name, 0)


def replaced(path, file):
    """Replace a file by another of its size and its time."""
    facts, other = file.stat(), file.with_suffix(".new")
    shutil.copy2(file, other)
    other.replace(file)
    in_place(path, file)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def dated(path, file):
    """Change a byte and put the time back."""
    facts = file.stat()
    in_place(path, file)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("change", [in_place, replaced, dated])
def test_a_file_that_has_changed_is_read_again(path, records, n_read, change):
    before = whole_fingerprint(path)
    n_read()
    file, tensors = min(weight_headers(path).items())
    later()
    change(path, file)
    after = whole_fingerprint(path)
    assert after != before and n_read() == len(tensors)
    assert whole_fingerprint(path) == after and n_read() == 0


def test_a_file_that_changes_while_it_is_read_is_not_remembered(path, records, n_read, monkeypatch):
    read = digests._digest

    def touching(file, fd, tensor):
        later()
        os.utime(file)
        return read(file, fd, tensor)

    monkeypatch.setattr(digests, "_digest", touching)
    before = whole_fingerprint(path)
    assert not list(records.glob("*.record")) and n_read() == n_tensors(path)
    monkeypatch.setattr(digests, "_digest", read)
    assert whole_fingerprint(path) == before


def test_a_file_that_has_just_changed_is_not_remembered_yet(path, records, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**12)
    whole_fingerprint(path)
    assert not list(records.glob("*.record"))


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "of other bytes": lambda data: bytes(len(data)),
    "of another digest": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "no record, but whole": lambda data: digests._sum(b"[]") + b"[]",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_made_again(path, records, n_read, damage):
    before = whole_fingerprint(path)
    for record in records.glob("*.record"):
        record.write_bytes(DAMAGE[damage](record.read_bytes()))
    n_read()
    assert whole_fingerprint(path) == before and n_read() == n_tensors(path)
    assert whole_fingerprint(path) == before and n_read() == 0


@pytest.mark.parametrize("what", ["no folder", "no room for a folder", "no room for a record"])
def test_without_a_folder_the_weights_are_read_each_time(path, records, n_read, monkeypatch, what):
    before = whole_fingerprint(path)
    assert n_read() > 0
    shutil.rmtree(records)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "no folder":
        monkeypatch.setattr(digests, "cache_folder", full)
    elif what == "no room for a folder":
        records.touch()
    else:
        monkeypatch.setattr("hydrainfer.config.folders.tempfile.mkstemp", full)
    for _ in range(2):
        assert whole_fingerprint(path) == before and n_read() == n_tensors(path)


def test_of_those_that_start_together_one_reads(path, records, n_read):
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(whole_fingerprint, [path] * 4))
    assert len(found) == 1 and n_read() == n_tensors(path)


def test_a_file_that_ends_early_is_one_line(path):
    headers = weight_headers(path)
    file, tensors = min(headers.items())
    os.truncate(file, tensors[-1].offset + 1)
    with pytest.raises(CheckpointError, match="ended early while reading weights"):
        digests.tensor_digests(headers)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        digests.tensor_digests(headers)
