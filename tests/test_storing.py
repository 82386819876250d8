"""`hydrainfer store`: lists, checks and clears places, says what is wrong in one line, and starts fast."""

import json
import os
import subprocess
import sys
import time

import pytest

from hydrainfer.cli import main
from hydrainfer.stores import Root
from hydrainfer.stores.files import FileStore
from tests.stores.folders import OTHER, chain, flip, named, path_of, write
from tests.stores.resp_server import free_port

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]
LLAVA = Root(b"\x03" * 16, {"model": "llava", "dtype": "bfloat16 int8", "device": "emulated"})
SIZE = (1 << 20) - 64  # with its header, one MiB


@pytest.fixture
def run(monkeypatch, capsys):
    """`hydrainfer store` with these words: its exit status, and what it printed to both streams."""
    monkeypatch.delenv("HYDRAINFER_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hydrainfer", "store", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "blocks"
    store = FileStore(folder, LLAVA, 1 << 30)
    write(store, chain(0, 3), SIZE)
    write(store, [named(7, kind="embed")], SIZE)
    for name, age_s in zip(chain(0, 3), (7300, 100, 10), strict=True):
        at_s = time.time() - age_s
        os.utime(path_of(folder, name, LLAVA), (at_s, at_s))
    write(FileStore(folder, OTHER, 1 << 30), [named(0, kind="probe")], SIZE)
    return folder


def test_what_is_there_by_model_kind_and_age(run, folder):
    code, out, err = run(f"dir:{folder}?gib=2")
    assert (code, err) == (0, "")
    name, titles, embed, kv, total, probe = (line.split() for line in out.splitlines())
    assert name == [f"dir:{folder}"]
    assert titles == ["model", "dtype", "kind", "blocks", "size", "last", "used"]
    assert embed == ["llava", "bfloat16", "int8,", "emulated", "embed", "1", "1.0", "MiB", "0", "s", "ago"]
    assert kv[:8] == ["llava", "bfloat16", "int8,", "emulated", "kv", "3", "3.0", "MiB"]
    assert " ".join(kv[8:]) == "10 s to 2 h ago"
    assert " ".join(total) == "4 blocks, 4.0 MiB; in use in all: 5.0 MiB of 2.0 GiB"
    assert " ".join(probe) == "beside these, 1 block, 1.0 MiB that servers wrote to measure the store"


def test_several_places_and_the_variable(run, folder, tmp_path, monkeypatch):
    FileStore(tmp_path / "empty", LLAVA, 1 << 20)
    monkeypatch.setenv("HYDRAINFER_STORE", f"dir:{folder},dir:{tmp_path}/empty?gib=0.5")
    code, out, _ = run("--json")
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and [first["place"], second["place"]] == [f"dir:{folder}", f"dir:{tmp_path}/empty"]
    assert [(row["kind"], row["n_blocks"]) for row in first["rows"]] == [("probe", 1), ("embed", 1), ("kv", 3)]
    assert first["rows"][2]["about"] == LLAVA.about and 7200 < first["rows"][2]["oldest_s"] < 7400
    assert (second["rows"], second["limit_bytes"]) == ([], 1 << 29)
    code, out, _ = run()
    assert f"hydrainfer serve --store dir:{tmp_path}/empty" in out, "what to do next"


def test_check_removes_what_is_broken_and_says_so_by_its_status(run, folder):
    place = f"dir:{folder}"
    assert run(place, "--check") == (0, f"{place}: 5 blocks read, none is broken\n", "")
    flip(path_of(folder, named(1, 1), LLAVA), 500)
    assert run(place, "--check") == (1, f"{place}: 5 blocks read, 1 of them was broken and is removed\n", "")
    assert run(place, "--check", "--json") == (0, json.dumps({"place": place, "whole": 4, "broken": 0}) + "\n", "")


def test_clear_removes_everything(run, folder):
    place = f"dir:{folder}"
    assert run(place, "--clear") == (0, f"{place}: 5 blocks removed, 5.0 MiB\n", "")
    assert run(place, "--clear", "--json") == (
        0,
        json.dumps({"place": place, "removed": 0, "removed_bytes": 0}) + "\n",
        "",
    )
    assert run(place)[1].startswith(f"{place}\n0 blocks, 0 B; in use in all: ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["dir:{}/absent"], "dir:{}/absent: No such file or directory"),
        (["dir:{}"], "dir:{}: no store of blocks"),
        (["/data"], "a place of the store begins with dir:"),
        (["dir:{}?gib=x"], "dir: gib must be a positive number"),
        (["redis://u:s3cret@host"], "an address must not hold a user or a password"),
        (["redis://127.0.0.1:PORT"], "redis://127.0.0.1:PORT cannot be reached: Connection refused"),
        (["dir:{}", "--check", "--clear"], "--check and --clear exclude each other"),
        ([], "Missing argument 'PLACE'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, tmp_path, words, error):
    port = str(free_port())

    def filled(text):
        return text.replace("{}", str(tmp_path)).replace("PORT", port)

    code, out, err = run(*map(filled, words))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {filled(error)}") and err.count("\n") == 1 and "s3cret" not in err


def test_a_place_that_cannot_be_read_does_not_hide_the_others(run, folder, tmp_path):
    code, out, err = run(f"dir:{tmp_path}/absent,dir:{folder}")
    assert code == 2 and "llava" in out and err == f"error: dir:{tmp_path}/absent: No such file or directory\n"


def test_a_name_in_a_store_cannot_steer_the_terminal(run, folder):
    (folder / LLAVA.digest.hex() / "about.json").write_text(json.dumps({"model": "\x1b[31m[bold]x"}))
    code, out, _ = run(f"dir:{folder}")
    assert code == 0 and "?[31m[bold]x" in out and "\x1b" not in out


def test_it_starts_without_torch(folder):
    code = (
        "import sys; sys.argv = sys.argv[:1] + ['store', *sys.argv[1:]]\n"
        "from hydrainfer.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, f"dir:{folder}", "--check"], check=True, timeout=50)
