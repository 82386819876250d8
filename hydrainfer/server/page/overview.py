"""The body of `/v1/overview`, which the page reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from hydrainfer.core import Layout, Role
from hydrainfer.metrics import INTERVALS, Ended
from hydrainfer.server.live import Intake
from hydrainfer.server.page.instances import instance_card

EndedAfter = Callable[[int], Sequence[Ended]]
"""A function that returns the latest ended requests after the one with this number."""


def overview_body(
    intake: Intake, model: str, version: str, ended_after: EndedAfter, number: int, body_bytes: int
) -> bytes:
    """The body of `/v1/overview?after=number`. `body_bytes`: how large the body of a request may be."""
    overload, now = intake.sessions.overload, intake.sessions.clock()
    infos = intake.sessions.handle.instances()
    waiting = overload.waiting()
    body = {
        "object": "overview",
        "model": model,
        "version": version,
        "takes": {**_takes(intake), "body_bytes": body_bytes},
        "layout": str(Layout(tuple(Role.parse(i.role) for i in infos))) if infos else "",
        "live": overload.n_live,
        "draining": overload.closed,
        "queue_s": {kind: round(seconds, 3) for kind, seconds in waiting.queue_s.items()},
        "refused": sum(waiting.refused.values()),
        "instances": [instance_card(info) for info in infos],
        "ended": [_entry(one, now) for one in ended_after(number)],
    }
    return orjson.dumps(body)


def _takes(intake: Intake) -> dict[str, int]:
    """How many pictures and videos a request may hold, and how large their files may be."""
    images, limits, videos = intake.processor.model.images, intake.processor.limits, intake.processor.media.videos
    return {
        "pictures": 0 if images is None else limits.max_images,
        "videos": 0 if images is None or images.video is None else limits.max_videos,
        "picture_bytes": limits.max_image_bytes,
        "video_bytes": videos.limits.max_bytes,
    }


def _entry(one: Ended, now: float) -> dict[str, Any]:
    times = {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s, "e2e_s": one.e2e_s}
    return {
        "number": one.number,
        "ago_s": round(max(now - one.finished_s, 0.0), 3),
        "tokens": one.n_tokens,
        **{name: None if value is None else round(value, 6) for name, value in times.items()},
        "intervals_s": {name: round(one.intervals_s.get(name, 0.0), 6) for name in INTERVALS},
    }
