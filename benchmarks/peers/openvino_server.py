"""An OpenAI-shaped chat server over OpenVINO GenAI's ContinuousBatchingPipeline: greedy, streamed, with pictures.

OpenVINO's own model server is in no Python registry. One thread owns the pipeline: it adds new requests, which runs the
vision tower there, steps, and hands tokens to the HTTP loop. LLaVA-1.5's prompt only. Prefix caching is off.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from aiohttp import web
from PIL import Image

Put = Callable[[tuple[str, Any]], object]
PICTURE_TOKENS = 575  # beside the placeholder itself


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="of arithmetic and KV cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gb", type=int, default=1)
    parser.add_argument("--max-batched", type=int, default=2048)
    return parser.parse_args()


def pipeline(args: argparse.Namespace) -> genai.ContinuousBatchingPipeline:
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = args.cache_gb, 16
    scheduling.max_num_batched_tokens, scheduling.dynamic_split_fuse = args.max_batched, True
    scheduling.enable_prefix_caching = False
    common = {"INFERENCE_PRECISION_HINT": args.precision, "INFERENCE_NUM_THREADS": args.threads}
    language = {**common, "KV_CACHE_PRECISION": args.precision}
    return genai.ContinuousBatchingPipeline(args.model, scheduling, "CPU", language, {}, common)


class Worker(threading.Thread):
    """Owns the pipeline. `ask` may be called from any thread; `put` is called from this one."""

    def __init__(self, pipe: genai.ContinuousBatchingPipeline) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._inbox: queue.Queue[tuple[list[openvino.Tensor], str, genai.GenerationConfig, Put]] = queue.Queue()

    def ask(self, pictures: list[openvino.Tensor], prompt: str, config: genai.GenerationConfig, put: Put) -> None:
        self._inbox.put((pictures, prompt, config, put))

    def run(self) -> None:
        live: dict[int, tuple[genai.GenerationHandle, Put]] = {}
        n = 0
        while True:
            while not live or not self._inbox.empty():
                pictures, prompt, config, put = self._inbox.get()
                given = (n, prompt, pictures, config) if pictures else (n, prompt, config)
                try:
                    live[n] = (self._pipe.add_request(*given), put)
                    n += 1
                except Exception as e:  # of C++: anything
                    put(("error", str(e)))
            self._pipe.step()
            for key, (handle, put) in list(live.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        put(("ids", list(output.generated_ids)))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    put(("end", None))
                    del live[key]
            time.sleep(0)


def prompt_of(messages: list[dict[str, Any]]) -> tuple[str, list[openvino.Tensor]]:
    """LLaVA-1.5's prompt, and its pictures as `(1, height, width, 3)` tensors."""
    prompt, pictures = "", []
    for message in messages:
        content, text = message["content"], ""
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "image_url":
                picture = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",", 1)[1])))
                pictures.append(openvino.Tensor(np.asarray(picture.convert("RGB"))[None].copy()))
                text += "<image>"  # the pipeline adds the line break
            else:
                text += part["text"]
        prompt += f"{message['role'].upper()}: {text} "
    return prompt + "ASSISTANT:", pictures


def config_of(body: dict[str, Any]) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = body.get("max_tokens") or 32, False, False
    config.ignore_eos = bool(body.get("ignore_eos"))
    if not config.ignore_eos:
        config.eos_token_id = 2
    return config


def application(worker: Worker, tokenizer: genai.Tokenizer) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body, loop = await request.json(), asyncio.get_running_loop()
        events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        prompt, pictures = prompt_of(body["messages"])
        worker.ask(pictures, prompt, config_of(body), lambda e: loop.call_soon_threadsafe(events.put_nowait, e))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        n = 0
        while (event := await events.get())[0] == "ids":
            n += len(event[1])
            await send({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": event[1]}]})
        if event[0] == "error":
            await send({"error": {"message": event[1]}})
        whole = prompt.replace("<image>", "<image>\n")
        ids = np.asarray(tokenizer.encode(whole, add_special_tokens=False).input_ids.data).ravel()
        n_prompt = len(ids) + PICTURE_TOKENS * len(pictures)
        await send({"choices": [], "usage": {"prompt_tokens": n_prompt, "completion_tokens": n}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": genai.__version__})

    app = web.Application(client_max_size=1 << 28)
    get = [("/health", health), ("/v1/models", models), ("/version", version)]
    app.add_routes([web.post("/v1/chat/completions", chat), *(web.get(path, answer) for path, answer in get)])
    return app


def main() -> None:
    args = arguments()
    pipe = pipeline(args)
    worker = Worker(pipe)
    worker.start()
    web.run_app(application(worker, pipe.get_tokenizer()), host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
