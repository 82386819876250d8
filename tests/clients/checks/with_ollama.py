"""The ollama package: chats with pictures, streams, typed answers, generate, the list of models."""

import ollama
from common import ANSWER, CALLS, PICTURE, QUESTION, SEES, Seen, run

HOW = {"temperature": 0, "num_predict": 40}
MESSAGES = [{"role": "user", "content": QUESTION, "images": [PICTURE.partition(",")[2]]}]
sees, calls = ollama.Client(SEES.removesuffix("/v1")), ollama.Client(CALLS.removesuffix("/v1"))


def models():
    assert [one.model for one in sees.list().models] == ["shapes"]


def pictures():
    answer = sees.chat("shapes", MESSAGES, options=HOW)
    assert answer.message.content == ANSWER and answer.eval_count > 5


def streaming():
    assert "".join(part.message.content for part in sees.chat("shapes", MESSAGES, stream=True, options=HOW)) == ANSWER


def generate():
    answer = sees.generate("shapes", QUESTION, images=[PICTURE.partition(",")[2]], options=HOW)
    assert answer.response == ANSWER


def typed_answers():
    ask = [{"role": "user", "content": "Look."}]
    answer = calls.chat("tools", ask, format=Seen.model_json_schema(), options={"temperature": 0, "num_predict": 100})
    assert Seen.model_validate_json(answer.message.content)


if __name__ == "__main__":
    run(models, pictures, streaming, generate, typed_answers)
