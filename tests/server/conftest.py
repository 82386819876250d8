"""A real uvicorn server on a free loopback port, before a scripted engine."""

import base64
import io
import socket
import threading
import time
from functools import partial

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image

from hydrainfer.grammar import load_grammars
from hydrainfer.metrics import PrometheusRecorder
from hydrainfer.processor import Fetcher, FetchLimits, MediaLimits, PixelStore, Processor, load_description
from hydrainfer.server import Connection, Intake, OverloadControl, ServerSettings, Sessions, create_app
from hydrainfer.server.protocols import PROTOCOLS
from tests.checkpoints import make_llava
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return load_description(make_llava(tmp_path_factory.mktemp("llava"), image_size=56, context=512))


class ServerUnderTest:
    """`say`: what the engine answers, as text; `fail`: the error it answers with instead (see `FakeEngine`)."""

    def __init__(
        self,
        model,
        *,
        step_s=0.0,
        max_requests=64,
        pixel_bytes=1 << 20,
        timeout_s=60.0,
        fetch=None,
        workers=None,
        tenants=None,
        keep_alive_s=5,
        protocols=PROTOCOLS,
        **settings,
    ):
        self.model = model
        self.say = "Hello from the engine, 你好 😀."
        self.fail = None
        self.pixels = PixelStore(pixel_bytes)
        limits = MediaLimits(max_images=3)
        grammars = load_grammars(model.path, model.vocabulary.n_tokens, model.eos_ids)
        processor = Processor(
            model, self.pixels, weights=b"w", dtype="float32", limits=limits, workers=workers, grammars=grammars
        )
        self.sessions = Sessions(
            model.vocabulary, self.pixels, time.monotonic, OverloadControl(time.monotonic, max_requests=max_requests)
        )
        self.recorder = PrometheusRecorder("tiny", lambda: self.engine.instances())
        self.engine = FakeEngine(
            self.sessions.sink,
            lambda request: [*model.tokenizer.encode(self.say).ids, 2],
            step_s=step_s,
            fail=lambda request: self.fail,
            pixels=self.pixels.get,
            record=self.recorder.record,
        )
        self.sessions.attach(self.engine, self.recorder.timings, self.recorder.stopped, self.recorder.doing)
        self.fetcher = Fetcher(fetch or FetchLimits(), resolve=resolve)
        self.intake = Intake(processor, self.sessions, fetcher=self.fetcher, n_threads=2, timeout_s=timeout_s)
        app = create_app(
            ServerSettings(**{"model_names": ("tiny", "alias"), "version": "9", "max_body_bytes": 1 << 22, **settings}),
            self.intake,
            metrics=lambda: b"fake_metric 1\n",
            ended_after=self.recorder.ended_after,
            tenants=tenants,
            protocols=protocols,
        )
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = partial(Connection, app.state.door)
        config = uvicorn.Config(
            app,
            http=http,
            log_level="error",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=keep_alive_s,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers={"Content-Type": "application/json"})

    def post(self, path="/v1/chat/completions", **body):
        return self.http.post(path, json=body)

    def chat(self, content="hi", **fields):
        return self.post(**{"model": "tiny", "messages": [{"role": "user", "content": content}], **fields})

    def prompt(self):
        """The text of the latest prompt that has reached the engine, its special tokens included."""
        ids = list(self.engine.submitted[-1].prompt_ids)
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)

    def openai(self):
        """A client of the `openai` package, which tells of a failure at once."""
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def check_idle(self):
        """Nothing of any request is left, neither here nor in the engine."""
        wait_until(lambda: self.fetcher.held_bytes == 0)
        wait_until(lambda: self.sessions.n_live == 0 and self.engine.n_live == 0 and len(self.pixels) == 0)
        self.sessions.check(idle=True)
        self.pixels.check(idle=True)

    def close(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self.engine.close()
        self.sessions.settle_all()
        self.intake.close()
        self.sessions.check(idle=True)
        self.pixels.check(idle=True)


async def resolve(host, port):
    """`NAME.test` is this machine; nobody else has an address."""
    if host.endswith(".test"):
        return ["127.0.0.1"]
    if host == "inside.example":
        return ["10.0.0.1"]
    raise OSError


@pytest.fixture(scope="module")
def shared(model):
    server = ServerUnderTest(model)
    yield server
    server.close()


@pytest.fixture
def server(shared):
    shared.say, shared.fail = "Hello from the engine, 你好 😀.", None
    shared.engine.submitted.clear()
    yield shared
    shared.check_idle()
    assert shared.http.get("/health").status_code == 200


@pytest.fixture
def start(model):
    """Make a server of one's own; closed, and checked for leaks, afterwards."""
    made = []

    def make(**options):
        made.append(ServerUnderTest(options.pop("model", model), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def early_headers(monkeypatch):
    """The headers of a stream are sent before its first output: whoever holds the engine does not wait for them."""
    monkeypatch.setattr("hydrainfer.server.openai.answers.FIRST_OUTPUT_S", 0.1)


def picture(seed=0, size=(40, 30), kind="PNG", mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels.astype(np.uint16)[..., 0] * 257) if mode == "I;16" else Image.fromarray(pixels)
    out = io.BytesIO()
    image.convert(mode).save(out, kind)
    return out.getvalue()


def data_url(data, kind="png"):
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def image_part(data=None):
    return {"type": "image_url", "image_url": {"url": data_url(picture() if data is None else data)}}
