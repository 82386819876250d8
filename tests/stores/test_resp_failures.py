"""A store in a server that is away, hangs, refuses, or sends nonsense: one line that says why, without the password."""

import logging
import socket
from contextlib import suppress

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.stores import StoreError, StoreFull
from hydrainfer.stores.address import PASSWORD, USERNAME
from hydrainfer.stores.resp import RespStore
from hydrainfer.stores.resp_values import VALUE_BYTES, block_key, pack, value_keys
from tests.stores.resp_server import ROOT, answering, at, block_of, fails, free_port, got, name_of, put

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

BIG = 2 * VALUE_BYTES + 1000
ONE, TWO = name_of(1), name_of(2)
KEY = block_key(ROOT, ONE)
SECRET = "s3cret-Pa55word"


def test_a_server_that_is_away_is_no_error_before_the_first_call():
    port = free_port()
    assert fails(at(port)) == f"redis://127.0.0.1:{port} cannot be reached: Connection refused"


def test_a_host_without_an_address():
    assert "name right" in fails(RespStore("redis://nowhere.invalid", ROOT, {}))


def test_a_server_that_hangs_costs_one_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = at(listener.getsockname()[1], timeout_ms=150)
        with pytest.raises(StoreError, match="did not answer within 150 ms"):
            store.has([ONE])
        listener.settimeout(0)
        listener.accept()
        with pytest.raises(BlockingIOError):  # each try would connect
            listener.accept()


NONSENSE = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": bytes(100),
    "numbers": b":7\r\n",
    "a list of lists": b"*1\r\n" * 2000 + b":1\r\n",
    "a size that is none": b"$-7x\r\n",
    "an unknown error": b"-WHATEVER you say\r\n",
    "half an error": b"-MOVED\r\n",
    "the end": None,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_an_error_or_a_miss(kind):
    with answering(lambda command: NONSENSE[kind]) as port:
        store = at(port, timeout_ms=300)  # zeros have no end; any error will do
        for call in (lambda: store.has([ONE]), lambda: got(store, [ONE]), lambda: store.touch([ONE])):
            try:
                assert call() == [False]
            except StoreError as e:
                assert "\n" not in str(e)
        with pytest.raises(StoreError):
            put(store, [ONE])
        with suppress(StoreError):
            store.contents()


def test_an_answer_to_another_question_is_not_taken_for_a_block():
    value = bytes(pack(block_key(ROOT, TWO), block_of(2, 1000))[0])
    with answering(lambda command: b"$%d\r\n%s\r\n" % (len(value), value)) as port:
        store = at(port)
        assert got(store, [ONE]) == [False]
        assert store.counts == {"corrupt": 1}


REFUSALS = {
    "OOM command not allowed when used memory > 'maxmemory'.": "maxmemory",
    "READONLY You can't write against a read only replica.": "replica",
    "MISCONF Redis is configured to save RDB snapshots": "disk",
    "NOREPLICAS Not enough good replicas to write.": "replicas",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_server_that_takes_no_writes_is_full_and_can_be_read(text):
    seen = []

    def reply(command):
        seen.append(command)
        if command[0] == b"SET" and (len([c for c in seen if c[0] == b"SET"]) > 2):
            return f"-{text}\r\n".encode()
        return {b"SET": b"+OK\r\n", b"UNLINK": b":0\r\n"}.get(command[0], b"$-1\r\n")

    with answering(reply) as port:
        store = at(port)
        with pytest.raises(StoreFull, match=REFUSALS[text]):
            put(store, [ONE, TWO, name_of(3)])
        keys = [block_key(ROOT, name) for name in (TWO, name_of(3))]
        assert [c[1].decode() for c in seen if c[0] == b"UNLINK"] == keys  # no block without those before it
        assert store.has([ONE]) == got(store, [ONE]) == [False]


ERRORS = {
    "NOAUTH Authentication required.": PASSWORD,
    "LOADING Redis is loading the dataset in memory": "loading",
    "NOPERM this user has no permissions to run the 'get' command": "allow",
    "MOVED 3999 127.0.0.1:6381": "Cluster",
    "ERR unknown command": "error",
    "MASTERDOWN Link with MASTER is down": "replica",
}


@pytest.mark.parametrize("text", ERRORS)
def test_a_server_that_refuses_everything_is_an_error(text):
    with answering(lambda command: f"-{text}\r\n".encode()) as port:
        assert ERRORS[text] in fails(at(port))


def test_a_block_is_found_only_when_all_of_it_is_there():
    written = []

    def reply(command):
        if command[0] == b"SET" and not command[1].endswith(b":about"):
            written.append(command[1].decode())
        return b"+OK\r\n" if command[0] == b"SET" else b"$-1\r\n"

    with answering(reply) as port:
        put(at(port, timeout_ms=5000), [ONE, TWO], BIG)
    parents, children = value_keys(KEY, 3), value_keys(block_key(ROOT, TWO), 3)
    assert written == [*reversed(parents), *reversed(children)]


def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    n_replies = 0

    def reply(command):
        nonlocal n_replies
        n_replies += 1
        return b"$-1\r\n"

    with answering(reply) as port:
        store = at(port)
        assert store.has([ONE]) == [False]
        for connection in store._client._redis.connection_pool._available_connections:
            connection._sock.shutdown(socket.SHUT_RD)
        assert store.has([ONE]) == [False]
        assert n_replies == 2


# ---- passwords


def everything_of(error):
    """The messages of an error and all that it came from."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), repr(error.args)]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


ECHOES = {
    "as it came": lambda command: b"*%d\r\n$%d\r\n" % (len(command), len(command[0])) + b"\r\n".join(command) + b"\r\n",
    "as nonsense": lambda command: b"\r\n".join(command) + b"\r\n",
    "as an error": lambda command: b"-ERR unknown command " + b" ".join(command) + b"\r\n",
    "as the word of an error": lambda command: b"-" + command[-1] + b" is wrong\r\n",
    "as a refusal": lambda command: b"-WRONGPASS " + command[-1] + b"\r\n",
    "as a text": lambda command: b"+" + command[-1] + b"\r\n",
}


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("user", ["", "someone"])
def test_nothing_ever_shows_the_password(echo, user, caplog):
    caplog.set_level(logging.DEBUG)
    with answering(ECHOES[echo]) as port:
        store = at(port, {PASSWORD: SECRET, USERNAME: user})
        with pytest.raises(StoreError) as raised:
            store.has([ONE])
        assert SECRET not in everything_of(raised.value)
        client = store._client._redis
        shown = [store, store.place, store._client, client, client.connection_pool, vars(store), vars(store._client)]
        assert SECRET not in repr(shown)
    assert SECRET not in caplog.text


def test_the_password_of_the_environment_is_sent():
    seen = []

    def reply(command):
        seen.append(command)
        return b"+OK\r\n" if command[0] == b"AUTH" else b"$-1\r\n"

    with answering(reply) as port:
        assert at(port, {PASSWORD: SECRET}).has([ONE]) == [False]
        assert at(port, {PASSWORD: SECRET, USERNAME: "me"}).has([ONE]) == [False]
    words = [command[1:] for command in seen if command[0] == b"AUTH"]
    assert words == [[SECRET.encode()], [b"me", SECRET.encode()]]


def test_a_password_in_the_address_is_refused():
    with pytest.raises(ConfigError, match=PASSWORD) as raised:
        RespStore(f"redis://me:{SECRET}@host", ROOT, {})
    assert SECRET not in everything_of(raised.value)
