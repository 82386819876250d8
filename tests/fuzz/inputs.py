"""Bodies, heads, pictures and frames with something wrong with them. All from a `random.Random`."""

from __future__ import annotations

import base64
import io
import json
import random
import string
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from hydrainfer.cluster.messages import Beat, Cancel, Close, Hello, Members, Orders, Peer, Report, Submit, encode
from hydrainfer.core import LifecycleEvent, Load, Output, Request, SamplingParams
from hydrainfer.core.events import EventKind
from hydrainfer.server.http.protocol import Protocols
from hydrainfer.server.openai.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from hydrainfer.server.protocols import PROTOCOLS

HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 3}},
    "/api/show": {"model": "tiny"},
}
_OTHERS = """
input system instructions text reasoning thinking output_config options format images raw metadata type role url schema
stop_sequences max_output_tokens tool_choice content image_url tool_calls tool_call_id function name arguments source
data media_type
"""
_SAID = """
text image_url video_url user assistant system tool function auto required none json_schema json_object input_text
input_image tool_use tool_result <image> data:image/png;base64, data:;base64,AAAA tiny {} [[ file:///etc/passwd
"""
_PATHS = "/v1/models /health /ready /metrics /version /v1/instances /v1/overview /docs / /nope"
_FIELDS = {
    name for kind in (ChatFields, CompletionFields, TokenizeFields, DetokenizeFields) for name in kind.model_fields
}
NAMES = sorted(
    _FIELDS | {name for known in Protocols(PROTOCOLS).known.values() for name in known.refused} | set(_OTHERS.split())
)
WORDS = (*_SAID.split(), "http://127.0.0.1:1/x.png", "\x00", "\ud800", "😀", "a" * 300, "")
PATHS = tuple(_PATHS.split())
HEADERS = (
    *("Transfer-Encoding: chunked", "Expect: 100-continue", "Authorization: Bearer x", "X-Request-Id: \x01"),
    *("X-Priority: x", "X-Deadline-S: -1", "Upgrade: websocket", "Connection: Upgrade", "Content-Encoding: gzip"),
    *(f"X: {'y' * 70000}", "Content-Length: 5", ": x", "A", "\u00e9: x", "Accept: " + "*/*," * 50, "Cookie: a=b"),
)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Something that JSON can say."""
    kind = rng.randrange(11 if depth else 8)
    if kind < 2:
        return rng.choice(WORDS)
    if kind == 2:
        return rng.choice([0, 1, -1, 2, 7, 20, 21, 128, 129, 2**31, 2**63, -(2**63), 2**70, 10**30])
    if kind == 3:
        return rng.choice([0.0, 0.5, 1.0, 1.5, -2.0, 1e-9, 1e308, 16.0])
    if kind == 4:
        return rng.choice([None, True, False])
    if kind == 5:
        return "".join(rng.choices(string.printable, k=rng.randrange(12)))
    if kind == 6:
        return [rng.randrange(-2, 3000) for _ in range(rng.randrange(6))]
    if kind == 7:
        return [dict(HI[0])]
    if kind == 8:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    names = (rng.choice(NAMES if rng.random() < 0.8 else WORDS) for _ in range(rng.randrange(4)))
    return {name: value(rng, depth - 1) for name in names}


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that was good before something was done to it."""
    path = rng.choice(list(GOOD))
    made = json.loads(json.dumps(GOOD[path]))
    for _ in range(rng.randrange(1, 4)):
        _disturb(rng, made)
    if rng.random() < 0.2:
        made["stream"] = True
    if rng.random() < 0.15:
        url = "data:image/png;base64," + base64.b64encode(picture(rng)).decode()
        parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        made["messages"] = [{"role": "user", "content": parts}]
    data = json.dumps(made).encode("utf-8", "surrogatepass")
    return path, mutated(rng, data) if rng.random() < 0.2 else data


def _disturb(rng: random.Random, at: Any) -> None:
    """Change one thing somewhere in it."""
    while True:
        if isinstance(at, dict):
            inner = [v for v in at.values() if isinstance(v, dict | list) and v]
            if inner and rng.random() < 0.5:
                at = rng.choice(inner)
                continue
            if at and rng.random() < 0.1:
                del at[rng.choice(list(at))]
            else:
                at[rng.choice(NAMES)] = value(rng)
        elif isinstance(at, list):
            if at and isinstance(at[0], dict) and rng.random() < 0.8:
                at = rng.choice([x for x in at if isinstance(x, dict)])
                continue
            at.insert(rng.randrange(len(at) + 1), value(rng))
        return


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, doubled, put in, or all after some place lost."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(made) + 1)
        n = rng.choice([1, 1, 2, 4, 16, 64])
        what = rng.randrange(6)
        if what < 2 and at < len(made):
            made[at] = rng.randrange(256)
        elif what == 2:
            del made[at : at + n]
        elif what == 3:
            made[at:at] = made[at : at + n]
        elif what == 4:
            made[at:at] = rng.choice([b"\x00", b"\xff", b"\x7f\xff\xff\xff", rng.randbytes(n)])
        else:
            made[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x80\x00\x00\x00"])
    return bytes(made[: rng.randrange(len(made) + 1)] if rng.random() < 0.2 else made)


def head(rng: random.Random) -> bytes:
    """What stands at the beginning of a connection that is hardly HTTP."""
    path = rng.choice([*GOOD, *PATHS, "*", "", "/" + "a" * 5000, "//x", "/v1/models/%ff%00", "/v1/overview?after=x"])
    method = rng.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "CONNECT", "get", "P OST", ""])
    data = json.dumps(GOOD["/v1/chat/completions"]).encode()
    length = rng.choice([len(data), len(data), 0, len(data) - 1, -1, 10**12, "x", "1e3"])
    names = ["Host: localhost", f"Content-Length: {length}", "Content-Type: application/json", "Connection: close"]
    names += rng.sample(HEADERS, rng.randrange(3))
    version = rng.choice(["1.1", "1.1", "1.0", "2.0", "9"])
    whole = f"{method} {path} HTTP/{version}\r\n" + "\r\n".join(names) + "\r\n\r\n"
    made = whole.encode() + data
    return mutated(rng, made) if rng.random() < 0.5 else made


@cache
def pictures() -> tuple[bytes, ...]:
    """Small pictures of every format and some modes."""
    rng, made = np.random.default_rng(0), []
    for kind, mode in (
        *(("PNG", m) for m in ("RGB", "RGBA", "L", "P", "1", "LA")),
        *(("JPEG", m) for m in ("RGB", "L", "CMYK")),
        *(("WEBP", m) for m in ("RGB", "RGBA")),
        *(("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"), ("PPM", "RGB")),
    ):
        image = Image.fromarray(rng.integers(0, 256, (24, 31, 3), dtype=np.uint8))
        out = io.BytesIO()
        exif = image.getexif()
        exif[274] = len(made) % 8 + 1
        image.convert(mode).save(out, kind, **({"exif": exif} if kind in ("JPEG", "WEBP", "PNG") else {}))
        made.append(out.getvalue())
    return tuple(made)


def picture(rng: random.Random) -> bytes:
    """The bytes of a picture with something wrong, most often early: in what decoders believe."""
    data = rng.choice(pictures())
    if rng.random() < 0.1:
        return data + rng.choice(pictures())[rng.randrange(40) :]
    if rng.random() < 0.5:
        n = rng.randrange(8, 120)
        return mutated(rng, data[:n]) + data[n:]
    return mutated(rng, data)


@cache
def _frames() -> tuple[bytes, ...]:
    request = Request(id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=4, seed=1, keys=b"k" * 16)
    peer = Peer("P0", "P", 1, "ipc:///tmp/x")
    outputs = (Output("r", (5,), finish_reason="stop", stop_token=2),)
    events = (LifecycleEvent("r", EventKind.QUEUED, 1.0, "prefill"),)
    orders = (Members((peer,)), Submit(request, (1, 2)), Cancel(("r",)), Beat({"P0": Load(1)}), Close())
    told = (Hello(peer, "host", 7, {"kv": 1.5}), Report("P0", 1, 2.0, outputs, events), Orders(1, 2.0, orders, n=3))
    return tuple(encode(message) for message in told)


def frame(rng: random.Random) -> bytes:
    """A message of the cluster, or what has become of it."""
    data = rng.choice(_frames())
    return rng.randbytes(rng.randrange(64)) if rng.random() < 0.1 else mutated(rng, data)
