"""`file:` URLs reach what lies under the named directories, and nothing else."""

import asyncio
import os

import pytest

from hydrainfer.core import InvalidRequest, MediaError, Overloaded, RequestTooLarge
from hydrainfer.processor import Fetcher, FetchLimits, Wanted
from hydrainfer.processor.fetching.local_files import locate_file, read_file
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = pytest.mark.unit


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "sub" / "ä b.png").write_bytes(b"abc")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "root-2").mkdir()
    (tmp_path / "root-2" / "c.png").write_bytes(b"secret")
    (tmp_path / "root" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    (tmp_path / "root" / "in.png").symlink_to("sub/ä b.png")
    os.mkfifo(tmp_path / "root" / "pipe")
    return tmp_path / "root"


async def read(url, root, max_bytes=1000):
    return await Fetcher(FetchLimits(roots=(root,))).get(url, Wanted("picture", max_bytes, HELD_S), "p")


async def test_files_under_a_root_are_read(root):
    assert await read(f"file://{root}/sub/%C3%A4%20b.png", root) == b"abc"
    assert await read(f"FILE://localhost{root}/sub/../in.png", root) == b"abc"
    with pytest.raises(RequestTooLarge):
        await read(f"file://{root}/in.png", root, 2)


async def test_files_outside_are_refused_whether_they_exist_or_not(root):
    said = set()
    for name in (
        "../secret.png",
        "../nothing.png",
        "out.png",
        "out/secret.png",
        "%2e%2e/secret.png",
        "../root-2/c.png",
    ):
        with pytest.raises(InvalidRequest) as e:
            await read(f"file://{root}/{name}", root)
        said.add(e.value.message)
    assert said == {"the file: URL is not under a directory that this server may read"}
    for url in ("file:///etc/passwd", f"file://evil{root}/in.png", f"file:{root.name}/in.png", f"file://{root}/a%00b"):
        with pytest.raises(InvalidRequest):
            await read(url, root)


@pytest.mark.parametrize("name", ["nothing.png", "sub", "pipe", ""])
async def test_paths_that_are_no_files_are_refused(root, name):
    with pytest.raises((MediaError, InvalidRequest)) as e:
        await asyncio.wait_for(read(f"file://{root}/{name}", root), PATIENCE_S)
    assert str(root) not in e.value.message


async def test_a_link_put_there_between_check_and_opening_is_seen(root):
    path = locate_file(f"file://{root}/sub/%C3%A4%20b.png", (root,), "p")
    (root / "sub").rename(root / "was")
    (root.parent / "ä b.png").write_bytes(b"secret")
    (root / "sub").symlink_to(root.parent)
    with pytest.raises(InvalidRequest, match="not under"):
        read_file(path, (root,), 1000, "picture", "p", lambda _: None)


def test_memory_is_asked_for_before_a_file_is_read(root):
    path, asked = root / "large.png", []
    path.write_bytes(b"x" * 500)

    def refuse(n_bytes):
        asked.append(n_bytes)
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        read_file(path, (root,), 1000, "picture", "p", refuse)
    with pytest.raises(RequestTooLarge):
        read_file(path, (root,), 499, "picture", "p", refuse)
    assert asked == [500]
