"""The demo: one question about one picture, over HTTP, with a streamed answer."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson

from hydrainfer.core import InvalidRequest


def ask(url: str, model: str, image: Path, question: str, max_tokens: int) -> Iterator[str]:
    """The pieces of the answer, as they arrive. `url`: without `/v1`. Raises `InvalidRequest` if the picture cannot be
    read or the server answers with an error, `httpx.HTTPError` if the server cannot be reached."""
    try:
        picture = base64.b64encode(image.read_bytes()).decode()
    except OSError as e:
        raise InvalidRequest(f"cannot read {image}: {e.strerror}", param="image") from None
    kind = mimetypes.guess_type(image.name)[0] or "image/jpeg"
    content = [
        {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{picture}"}},
        {"type": "text", "text": question},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        if answer.is_error:
            raise InvalidRequest(f"the server refuses: {_message(answer.read())}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = orjson.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise InvalidRequest(f"the server says: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's format, or the beginning of any other body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
