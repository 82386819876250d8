"""A protocol that the package does not have: it is one declaration, and everything else reads it."""

import orjson
import pytest
from fastapi import APIRouter, Request

from hydrainfer.server import Tenants
from hydrainfer.server.http import Body, Described, KnownFields, Protocol, field, json_response, refusals
from hydrainfer.server.openai import ChatFields, parse
from hydrainfer.server.protocols import PROTOCOLS

pytestmark = pytest.mark.cpu
PATH, LENGTH = "/parrot/say", "/parrot/length"
KEY = {"Authorization": "Bearer k"}


class ParrotFields(Described):
    say: str = field("What is said.", "hi", required=True)


def routes(answers, bodies):
    router = APIRouter()

    @router.post(PATH, summary="Parrot's: say something")
    async def say(request: Request):
        body = await bodies.read(request)
        messages = [{"role": "user", "content": body["say"]}]
        return await answers.chat(request, parse(ChatFields, {"messages": messages}))

    @router.post(LENGTH)
    async def length(request: Request):
        return json_response({"length": len((await bodies.read(request))["say"])})

    return router


PARROT = Protocol(
    routes,
    paths=(PATH,),
    brief=(LENGTH,),
    bodies={
        PATH: Body(ParrotFields, {"say": "hi"}, KnownFields(ParrotFields.honoured(), refusals("sing"), frozenset()))
    },
    prefix="/parrot",
    error=lambda error: orjson.dumps({"squawk": error.message}),
    media_type="text/parrot",
)


@pytest.fixture
def parrot(start):
    return start(protocols=(*PROTOCOLS, PARROT), tenants=Tenants(["k"]), max_requests=1)


def test_a_new_protocol_answers_and_the_others_stay(parrot):
    answer = parrot.http.post(PATH, json={"say": "hi"}, headers=KEY).json()
    assert answer["choices"][0]["message"]["content"] == parrot.say
    assert parrot.http.post(LENGTH, json={"say": "hi"}, headers=KEY).json() == {"length": 2}
    assert parrot.http.get("/api/version", headers=KEY).status_code == 200


def test_the_errors_of_a_new_protocol_have_its_format_wherever_they_arise(parrot):
    refused = parrot.http.post(PATH, json={"say": "hi", "sing": 1}, headers=KEY)
    assert (refused.status_code, refused.json()) == (400, {"squawk": "sing is not supported by this server"})
    unknown = parrot.http.get("/parrot/nest", headers=KEY)
    assert unknown.status_code == 404 and list(unknown.json()) == ["squawk"]
    for path in (PATH, LENGTH):  # refused by the connection, and by the gate
        stranger = parrot.http.post(path, json={"say": "hi"})
        assert stranger.status_code == 401 and list(stranger.json()) == ["squawk"]
    assert list(parrot.http.post("/v1/chat/completions", json={}).json()) == ["error"]


def test_the_door_counts_the_requests_of_a_new_protocol(parrot):
    place = parrot.sessions.overload.take()
    full = parrot.http.post(PATH, json={"say": "hi"}, headers=KEY)
    assert full.status_code == 429 and list(full.json()) == ["squawk"]
    place.leave()
    assert parrot.http.post(PATH, json={"say": "hi"}, headers=KEY).status_code == 200


def test_a_new_protocol_is_described(parrot):
    description = parrot.http.get("/openapi.json").json()
    operation = description["paths"][PATH]["post"]
    assert operation["summary"] == "Parrot's: say something"
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/parrot"}
    assert description["components"]["schemas"]["ParrotFields"]["required"] == ["say"]
