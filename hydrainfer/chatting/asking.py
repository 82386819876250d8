"""Questions to a server that speaks OpenAI's chat API, with streamed answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import orjson

from hydrainfer.core import ConfigError, InvalidRequest

_CONNECT_S, _READ_S = 5.0, 600.0


class Piece(NamedTuple):
    """A part of an answer; `thought`: of the reasoning before it."""

    text: str
    thought: bool = False


class Server(NamedTuple):
    """A server and the name of its model. `url`: without `/v1`."""

    url: str
    model: str
    api_key: str | None = None

    def ask(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[Piece]:
        """The parts of the answer to these messages, as they arrive. `fields`: more of the body. Closing the iterator
        ends the request. Raises `InvalidRequest` if the server answers with an error or cannot be reached."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **fields}
        where, limits = f"{self.url}/v1/chat/completions", httpx.Timeout(_READ_S, connect=_CONNECT_S)
        try:
            with httpx.stream(
                "POST", where, content=orjson.dumps(body), headers=_headers(self.api_key), timeout=limits
            ) as answer:
                if answer.is_error:
                    raise InvalidRequest(f"the server refuses: {_message(answer.read())}")
                for line in answer.iter_lines():
                    text = line.removeprefix("data:").strip()
                    if line.startswith("data:") and text != "[DONE]":
                        yield from _pieces(text)
        except httpx.HTTPError as e:
            raise InvalidRequest(f"the server at {self.url} cannot be reached: {e or type(e).__name__}") from None


def find_server(url: str, model: str | None = None, api_key: str | None = None) -> Server:
    """The server at `url`, with or without `/v1`, and its first model, or `model`. Raises `ConfigError`."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=_CONNECT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ConfigError(f"nothing answers at {url}: {e or type(e).__name__}", param="url") from None
    if answer.is_error:
        raise ConfigError(f"{url} answers with {answer.status_code}: {_message(answer.content)}", param="url")
    try:
        names = [card["id"] for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} does not speak OpenAI's API: /v1/models lists no models", param="url") from None
    if not names:
        raise ConfigError(f"{url} lists no models", param="url")
    if model is not None and model not in names:
        raise ConfigError(f"{url} serves {', '.join(names)}, not {model}", param="model")
    return Server(url, model or names[0], api_key)


def _headers(api_key: str | None) -> dict[str, str]:
    api_key = (api_key or "").strip()
    if not all(" " < letter <= "~" for letter in api_key):
        raise ConfigError("api_key has characters that no header may have", param="api_key")
    more = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"Content-Type": "application/json", **more}


def _pieces(text: str) -> Iterator[Piece]:
    """The parts of the answer in one event. Raises `InvalidRequest` if it is an error, or cannot be read."""
    try:
        event = orjson.loads(text)
        error, deltas = event.get("error"), [choice.get("delta") or {} for choice in event.get("choices") or ()]
        parts = [(delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")) for delta in deltas]
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        raise InvalidRequest(f"the server sends what is no chunk of an answer: {text[:80]}") from None
    if error:
        message = error.get("message") if isinstance(error, Mapping) else error
        raise InvalidRequest(f"the server says: {message}")
    for thought, content in parts:
        if thought:
            yield Piece(str(thought), True)
        if content:
            yield Piece(str(content))


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's format, or the beginning of any other body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
