"""`hydrainfer chat`: turns, pictures, commands, piped questions, and errors that end nothing but their turn."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from hydrainfer.builtin import PICTURE
from hydrainfer.chatting import Conversation, Server, ask_about, find_server, media_part
from hydrainfer.chatting.terminal import Terminal, ask_piped
from hydrainfer.cli import main
from hydrainfer.config import load
from hydrainfer.core import ConfigError, InvalidRequest
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
ERROR = b'{"error": {"message": "no instance"}}'
STREAM = b'data: {"choices": [{"delta": {"content": "A "}}]}\n\ndata: ' + ERROR + b"\n\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = make_llava(tmp_path_factory.mktemp("llava"))
    options = {"threads": 1, "dtype": "float32", "native_kernels": False, "log_level": "warning", "access_log": False}
    with serve_in_background(load({"model": str(path), "port": 0, **options}), Console(quiet=True)) as (url, _):
        yield url


@pytest.fixture
def conversation(served):
    return Conversation(find_server(f"{served}/v1/"), max_tokens=4, temperature=0)


@pytest.mark.parametrize(("status", "body"), [(200, STREAM), (503, ERROR)], ids=["stream", "status"])
def test_an_error_is_told_in_the_servers_words(monkeypatch, status, body):
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body)))
    monkeypatch.setattr(httpx, "stream", client.stream)
    pieces = ask_about(Server("http://x", "m"), str(PICTURE), "What is this?", 8)
    assert status != 200 or next(pieces) == "A "
    with pytest.raises(InvalidRequest, match="no instance"):
        next(pieces)


NULL = b'data: {"choices":[{"delta":null}]}\n\ndata: {"usage":{}}\n\n'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'data:{"choices":[{"delta":{"content":"A "}}]}\n\ndata: [DONE]\n\n', None),
        (NULL + b'data: {"choices":[{"delta":{"content":"A "}}]}\n\n', None),
        (b"data: {broken\n\n", "no chunk of an answer: {broken"),
        (b'data: {"error": "a text"}\n\n', "the server says: a text"),
        (b"data: [1]\n\n", "no chunk of an answer"),
    ],
)
def test_other_servers_are_read_or_refused(monkeypatch, body, says):
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body)))
    monkeypatch.setattr(httpx, "stream", client.stream)
    pieces = ask_about(Server("http://x", "m"), str(PICTURE), "What is this?", 8)
    if says is None:
        assert list(pieces) == ["A "]
        return
    with pytest.raises(InvalidRequest) as e:
        list(pieces)
    assert says in e.value.message


@pytest.mark.parametrize("key", ["a b", "sch\u00fcssel", "a\nb"])
def test_a_key_that_no_header_may_have_is_not_shown(served, key):
    with pytest.raises(ConfigError, match="api_key has characters") as e:
        find_server(served, api_key=key)
    assert key not in e.value.message
    assert find_server(served, api_key="key\n").model


def test_turns_pictures_and_what_is_saved(conversation, tmp_path):
    first = "".join(piece.text for piece in conversation.ask("Hello"))
    conversation.show(str(PICTURE))
    conversation.show(f"file://{PICTURE}")
    second = "".join(piece.text for piece in conversation.ask("What are these?"))
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"] * 2
    assert [conversation.turns[i]["content"] for i in (1, 3)] == [first, second]
    kinds = [part["type"] for part in conversation.turns[2]["content"]]
    assert kinds == ["image_url", "image_url", "text"] and not conversation.shown
    conversation.save(tmp_path / "chat.json")
    body = json.loads((tmp_path / "chat.json").read_text())
    assert body["messages"] == conversation.messages and body["max_tokens"] == 4
    said = httpx.post(f"{conversation.server.url}/v1/chat/completions", json=body, timeout=60)
    assert said.status_code == 200
    conversation.clear()
    assert conversation.messages == []


def test_a_turn_that_fails_or_is_left_changes_nothing_or_keeps_what_came(conversation):
    conversation.shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(InvalidRequest, match="refuses"):
        list(conversation.ask("What is this?"))
    assert not conversation.turns and len(conversation.shown) == 1
    conversation.clear()
    pieces = conversation.ask("Hello")
    first = next(pieces)
    pieces.close()
    assert conversation.turns[1] == {"role": "assistant", "content": first.text}


def test_what_is_shown(tmp_path):
    (tmp_path / "a film.mp4").write_bytes(b"x")
    assert media_part("https://example.org/cat.jpg")["image_url"]["url"] == "https://example.org/cat.jpg"
    assert media_part(str(tmp_path / "a film.mp4"))["video_url"]["url"].startswith("data:video/mp4;base64,")
    with pytest.raises(InvalidRequest, match=r"cannot read .*none\.png: No such file"):
        media_part(str(tmp_path / "none.png"))


def test_a_server_that_is_not_there_or_not_one(served):
    assert find_server(served).model == find_server(served, find_server(served).model).model
    for url, model, says in (
        ("http://127.0.0.1:9", None, "nothing answers at http://127.0.0.1:9"),
        ("http://[", None, "nothing answers"),
        (f"{served}/nowhere", None, "answers with 404"),
        (served, "another", r"serves llava\d+, not another"),
    ):
        with pytest.raises(ConfigError, match=says.replace("[", r"\[")):
            find_server(url, model)


def typed(conversation, lines):
    """What a terminal shows when these lines are typed."""
    console = Console(file=io.StringIO(), width=200)
    with create_pipe_input() as keys:
        keys.send_text("".join(f"{line}\r" for line in lines) + "\x04")
        Terminal(conversation, console, PromptSession(input=keys, output=DummyOutput())).run()
    return console.file.getvalue()


def test_a_chat_in_a_terminal(conversation, tmp_path):
    shown = typed(
        conversation,
        [
            "Hello",
            f"/image '{PICTURE}'",
            "What is this?",
            "/image",
            "/image nowhere.png",
            "/nonsense",
            "/image [/x].jpg",
            "/image it's.jpg",
            "/image ~nosuchuser/x.jpg",
            "/save ~nosuchuser/x",
            "/help",
            f"/save {tmp_path / 'chat.json'}",
            "/save",
            "/system Be brief.",
            "",
        ],
    )
    for words in (
        "at http://127.0.0.1",
        conversation.turns[1]["content"],
        "1 will be shown with the next question",
        conversation.turns[3]["content"],
        "/image cat.jpg",
        "cannot read nowhere.png: No such file or directory",
        "there is no /nonsense",
        "cannot read [/x].jpg",
        "cannot read it's.jpg",
        "cannot read ~nosuchuser/x.jpg",
        "cannot write ~nosuchuser/x",
        "Ctrl-C ends an answer",
        "written to",
        "name a file",
        "it will be told first",
    ):
        assert words in shown, words
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 4
    typed(conversation, ["two\x1b\rlines"])
    assert conversation.turns[-2]["content"] == "two\nlines"
    assert "forgotten" in typed(conversation, ["/clear", "/exit", "never asked"]) and not conversation.turns


def test_ctrl_c_ends_an_answer_and_not_the_chat(conversation, monkeypatch):
    ask = Conversation.ask

    def interrupted(self, question):
        pieces = ask(self, question)
        yield next(pieces)
        pieces.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "ask", interrupted)
    shown = typed(conversation, ["Hello", "/help"])
    assert " …" in shown and "/clear" in shown and len(conversation.turns) == 2


def test_piped_questions(served, conversation, monkeypatch, capsys):
    with pytest.raises(InvalidRequest, match="nothing was piped in"):
        ask_piped(conversation, Console(quiet=True), " \n")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is\nthis?\n"))
    words = ["hydrainfer", "chat", served, "--image", str(PICTURE), "--max-tokens", "4", "--temperature", "0"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as e:
        main()
    conversation.show(str(PICTURE))
    wanted = "".join(piece.text for piece in conversation.ask("What is\nthis?"))
    assert not e.value.code and capsys.readouterr().out == f"{wanted}\n"
