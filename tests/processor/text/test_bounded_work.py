"""Work that grows faster than what a client or a model has written ends in time."""

import threading
import time
from contextlib import suppress

import pytest

from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.processor import load_description
from hydrainfer.processor.messages import parse_messages
from hydrainfer.processor.text import check_length, encode
from hydrainfer.processor.text.tool_blocks import _gemma, _mistral, _qwen
from hydrainfer.processor.text.watchdog import TooSlow, Watchdog
from tests.checkpoints import make_llava
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SQUARE = (
    "{% for m in messages %}{% for n in messages %}{% if n == m %}{% endif %}{% endfor %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint without a template: the tests write `chat_template.jinja`."""
    path = make_llava(tmp_path / "llava", image_size=56, context=512)
    (path / "chat_template.json").unlink()
    return path


def spent_s(call):
    begin_s = time.thread_time()
    with pytest.raises((InvalidRequest, CheckpointError)) as e:
        call()
    assert time.thread_time() - begin_s < 4.0
    return e.value.message


def test_a_template_that_loops_is_refused_at_the_start(folder):
    (folder / "chat_template.jinja").write_text(PLAIN + LOOPS)
    assert "it takes too long" in spent_s(lambda: load_description(folder))


def test_a_template_that_goes_through_all_messages_for_each_message_is_stopped(folder):
    (folder / "chat_template.jinja").write_text(SQUARE)
    template = load_description(folder).template
    assert template.render(parse_messages([{"role": "user", "content": "a"}] * 20)) == "a" * 20
    many = parse_messages([{"role": "user", "content": "a"}] * 8000)
    assert "takes more than 1 s" in spent_s(lambda: template.render(many))
    assert template.render(parse_messages([{"role": "user", "content": "a"}])) == "a", "the thread goes on"


def test_only_the_thread_that_computes_too_long_is_stopped():
    dog, ends = Watchdog(0.2), {}

    def run(name, work):
        try:
            dog.run(work)
            ends[name] = "done"
        except TooSlow:
            ends[name] = "stopped"

    def loop():
        while True:
            pass

    threads = [
        threading.Thread(target=run, args=(name, work))
        for name, work in {"waits": lambda: time.sleep(1.0), "computes": loop, "short": lambda: None}.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ends == {"waits": "done", "computes": "stopped", "short": "done"}


@pytest.mark.parametrize("read", [_qwen, _gemma, _mistral])
@pytest.mark.parametrize(
    "piece",
    [
        *" \n{},:a",
        "<parameter=a>",
        "<parameter=",
        "</parameter>",
        "</function>",
        "call:a{",
        "<escape>",
        "a:",
        "{a ",
        "[ARGS]",
    ],
)
def test_calls_are_read_in_time_however_often_a_model_repeats_itself(read, piece):
    for begin in ("", "<function=a>", "call:a{", "a[ARGS]{"):
        for end in ("", "}", "</function>", "\x00"):
            begin_s = time.thread_time()
            read(begin + piece * (60_000 // len(piece)) + end, {})
            assert time.thread_time() - begin_s < 1.0, (begin, end)


@pytest.mark.parametrize("piece", ["a", " ", "\n", "a ", "é", "😀", "'", "\u0301", "1", "<"])
def test_a_text_that_fills_the_context_is_tokenised_in_time(tmp_path, piece):
    """Also one that is a single word."""
    model = load_description(make_llava(tmp_path / "llava", image_size=56, context=32_768))
    begin_s = time.process_time()
    with suppress(InvalidRequest):
        check_length(piece * 400_000, model, "prompt")
    encode(piece * 100_000, model)
    assert time.process_time() - begin_s < 4.0
