"""Readers against tiny files in the published formats, synthetic workloads, recordings."""

import json
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources import (
    ChatRequest,
    Recording,
    Spread,
    read_arrivals,
    read_recording,
    read_workload,
    write_recording,
)
from hydrainfer.workload.sources.synthetic import fitted

pytestmark = pytest.mark.unit

FIVE = ("textcaps", "pope", "mme", "vizwiz", "textvqa")


def textcaps(folder):
    entry = {"image_classes": ["Sign"], "image_width": 1024, "image_height": 768, "set_name": "val", "caption_id": 1}
    entries = [{**entry, "image_id": i, "image_path": f"val/{i}.jpg", "caption_str": c} for i in "ab" for c in "xyz"]
    return write(folder / "TextCaps_0.1_val.json", {"dataset_type": "val", "data": entries})


def textvqa(folder):
    entries = [
        {"question": f"what is {i}?", "image_id": i, "answers": ["x"] * 10, "question_id": n, "set_name": "val"}
        for n, i in enumerate("ab")
    ]
    return write(folder / "TextVQA_0.5.1_val.json", {"dataset_type": "val", "data": entries})


def vizwiz(folder):
    entries = [
        {"image": f"VizWiz_val_{i:08}.jpg", "question": f"What is {i}?", "answers": [{"answer": "x"}], "answerable": 1}
        for i in range(2)
    ]
    return write(folder / "val.json", entries)


def pope(folder):
    lines = [
        {"question_id": i, "image": f"COCO_val2014_{i // 3:012}.jpg", "text": f"Is there a {i}?", "label": "yes"}
        for i in range(6)
    ]
    path = folder / "coco_pope_random.json"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def mme(folder):
    root = folder / "MME_Benchmark_release_version"
    for questions, pictures in (("count", "count"), ("artwork/questions_answers_YN", "artwork/images")):
        for sub in (questions, pictures):
            (root / sub).mkdir(parents=True, exist_ok=True)
        (root / questions / "0001.txt").write_text("Is it one?\tYes\nIs it two? Please answer yes or no.\tNo\n")
        (root / pictures / "0001.jpg").write_bytes(b"jpeg")
    return root


def write(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("make", "pictures"),
    [
        (textcaps, {"a.jpg", "b.jpg"}),
        (textvqa, {"a.jpg", "b.jpg"}),
        (vizwiz, {"VizWiz_val_00000000.jpg", "VizWiz_val_00000001.jpg"}),
        (pope, {"COCO_val2014_000000000000.jpg", "COCO_val2014_000000000001.jpg"}),
        (mme, {"0001.jpg"}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_published_formats(tmp_path, make, pictures):
    workload = read_workload(make.__name__, data=str(make(tmp_path)), pictures=str(tmp_path / "pictures"))
    chats = workload.chats(2, seed=1, like="llava-1.5-7b")
    assert {Path(p.path).name for c in chats for p in c.pictures} == pictures
    assert len({p for c in chats for p in c.pictures}) == 2  # a picture once, however many questions it has
    assert all(c.text and c.max_tokens >= 1 for c in chats) and chats == workload.chats(2, 1, "llava-1.5-7b")
    assert all("\t" not in c.text for c in chats)
    if make is not mme:
        assert all(Path(p.path).parent == tmp_path / "pictures" for c in chats for p in c.pictures)
    with pytest.raises(ConfigError, match=r"has 2 requests, 3 are needed; `distinct: false`"):
        workload.chats(3, seed=1)


@pytest.mark.parametrize(
    ("dataset", "name", "content", "said"),
    [
        ("vizwiz", "val.json", "{", "not JSON"),
        ("vizwiz", "val.json", "{}", "must be a list of entries"),
        ("vizwiz", "val.json", '[{"question": "x"}]', r"\[0\]: 'image' must be str, but is not there"),
        ("textvqa", "t.json", "[]", "an object with a list 'data'"),
        ("textvqa", "t.json", '{"data": [{"image_id": 5}]}', "'image_id' must be str, but is int"),
        ("textcaps", "t.json", '{"data": [7]}', r"data\[0\]: 'image_id'"),
        ("pope", "p.json", '{"image": "a.jpg", "text": "x"}\n[1]', "line 2 is not an object"),
        ("mme", "MME.zip", "PK", "a folder of task folders"),
    ],
)
def test_wrong_formats_are_named(tmp_path, dataset, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said) as e:
        read_workload(dataset, data=str(tmp_path / name)).chats(1, seed=0)
    assert name in str(e.value) and "datasets/README.md" in str(e.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("pope", {"data": "/absent/pope.json"}, "cannot read /absent/pope.json: No such file"),
        ("nonsense", {}, "no workloads called 'nonsense'.*textcaps"),
        ("absent.yaml", {}, "cannot read absent.yaml"),
    ],
)
def test_wrong_paths_are_named(name, options, said):
    with pytest.raises(ConfigError, match=said):
        read_workload(name, **options).chats(1, seed=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dataset: x\nreeder: pope", "did you mean reader"),
        ("dataset: x\nreader: imagenet", "no reader 'imagenet'"),
        ("dataset: x\noutput_tokens: {default: 'normal:5:1'}", "unknown distribution 'normal'"),
        ("dataset: x\nn_pictures: many", "expected `int`"),
        ("dataset: x\nreader: azure", "give --data"),
    ],
)
def test_wrong_specs_are_named(tmp_path, text, said):
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_workload(str(tmp_path / "w.yaml"))


@pytest.mark.parametrize("name", [*FIVE, "text"])
def test_synthetic_workloads(name):
    workload = read_workload(name)
    chats = workload.chats(200, seed=3, like="llava-next-7b")
    assert len({c.text for c in chats}) == 200
    pictures = [p for c in chats for p in c.pictures]
    assert len(set(pictures)) == 200 * workload.n_pictures == len(pictures)
    assert chats == workload.chats(200, seed=3, like="llava-next-7b")
    others = workload.chats(200, seed=4)
    assert not set(pictures) & {p for c in others for p in c.pictures}
    spread = Spread.parse(workload.output_tokens.get("llava-next-7b", workload.output_tokens["default"]))
    mean = sum(spread.quantile((i + 0.5) / 999) for i in range(999)) / 999
    assert sum(c.max_tokens for c in chats) / 200 == pytest.approx(mean, rel=0.2)
    assert workload.notes and all("{" not in c.text for c in chats)


def test_long_prompts_have_the_lengths_of_the_paper_and_share_no_beginning():
    """Truncated, not clipped: the mean of the paper is 27K, and no length is piled up at the bounds."""
    workload = read_workload("long")
    chats = workload.chats(2000, seed=3)
    lengths = [len(c.text.split()) * 4 / 3 for c in chats]
    assert sum(lengths) / 2000 == pytest.approx(27_486, rel=0.05)
    assert sum(n < 19_400 for n in lengths) / 2000 == pytest.approx(0.504, abs=0.03)
    assert min(lengths) > 127 and max(lengths) < 131_073 and len({round(n) for n in lengths}) > 1900
    assert len({c.text[:60] for c in chats}) == 2000 and {c.max_tokens for c in chats} == {1024}
    assert chats[:50] == workload.chats(2000, seed=3)[:50] != workload.chats(2000, seed=4)[:50]
    assert not chats[0].pictures and workload.text_tokens == Spread.parse(workload.prompt_tokens)


@pytest.mark.parametrize("text", ["truncated:20:0.5[10..40]", "lognormal:20:0.5", "uniform:10:30", "exponential:20"])
def test_a_distribution_s_quantiles_are_those_of_its_shares_also_if_scaled(text):
    spread = Spread.parse(text)
    for p in (0.01, 0.3, 0.5, 0.99):
        x = spread.quantile(p)
        assert spread.below(x) == pytest.approx(p)
        assert spread.scaled(0.25).quantile(p) == pytest.approx(x / 4)
    assert Spread.parse(str(spread)) == spread


def test_a_truncated_distribution_needs_something_within_its_bounds():
    for text in ("truncated:0:1[1..2]", "truncated:20:0[1..2]", "truncated:20:0.001[1..2]"):
        with pytest.raises(ConfigError, match="within the bounds"):
            Spread.parse(text)


@pytest.mark.parametrize("changes", [{"n_pictures": 1}, {"instruction": "Be brief."}, {"prompt_tokens": None}])
def test_prompts_that_are_more_than_a_text_of_some_length_have_no_distribution(changes):
    assert msgspec.structs.replace(read_workload("long"), **changes).text_tokens is None


def test_pictures_can_be_smaller():
    assert fitted(1024, 512, 256) == (256, 128) and fitted(100, 50, 256) == (100, 50) and fitted(9, 1, 3) == (3, 1)


def test_openai_requests(tmp_path):
    bare = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 9}
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": bare["messages"]}}
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in (bare, batch)))
    (tmp_path / "w.yaml").write_text(f"dataset: mine\nreader: openai-jsonl\npath: {path}\nmax_tokens: 40")
    chats = read_workload(str(tmp_path / "w.yaml")).chats(2, seed=0)
    assert {c.max_tokens for c in chats} == {9, 40} and chats[0].messages == tuple(bare["messages"])
    path.write_text('{"messages": "hello"}')
    with pytest.raises(ConfigError, match="line 1: 'messages' must be list"):
        read_workload(str(tmp_path / "w.yaml")).chats(1, seed=0)


def test_sharegpt(tmp_path):
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because of this and that."}]
    path = write(tmp_path / "s.json", [{"id": "0", "conversations": talk}, {"id": "1", "conversations": talk[1:]}])
    (tmp_path / "w.yaml").write_text(f"dataset: sharegpt\nreader: sharegpt\npath: {path}")
    (chat,) = read_workload(str(tmp_path / "w.yaml")).chats(1, seed=0)
    assert (chat.text, chat.max_tokens) == ("Why?", 7)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.4799600,30,8"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,4808,10\n2024-05-10 00:00:00.509930+00:00,30,8"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,4808,10,490,Conversation log\n"
    "5.2,GPT-4,9,0,9,API log\n5.5,GPT-4,30,8,38,API log"
)
MOONCAKE = "\n".join(
    json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [0]})
    for t, i, o in ((27000, 4808, 10), (27500, 30, 8))
)


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", AZURE), ("b.csv", AZURE_2024), ("c.csv", BURST), ("m.jsonl", MOONCAKE)]
)
def test_traces_of_arrivals(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    first, second = read_arrivals(tmp_path / name)
    assert first == (0.0, 4808, 10) and second[1:] == (30, 8) and second.at_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2", "none of the traces known.*its columns are a, b"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2", "row 1: TIMESTAMP 'yesterday'"),
        ("Timestamp,Request tokens,Response tokens\n1,x,2", "'Request tokens' must be a number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no arrivals"),
    ],
)
def test_wrong_traces_are_named(tmp_path, content, said):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_arrivals(tmp_path / "t.csv")


def test_a_trace_gives_lengths_as_well(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    (tmp_path / "w.yaml").write_text(f"dataset: azure\nreader: azure\npath: {tmp_path / 't.csv'}")
    chats = read_workload(str(tmp_path / "w.yaml")).chats(2, seed=0)
    assert [c.max_tokens for c in chats] == [10, 8] and [c.at_s for c in chats] == pytest.approx([0.0, 0.5])
    assert len(chats[0].text.split()) == 3606


def test_every_run_of_a_recording_has_pictures_of_its_own(tmp_path):
    """Equal pictures stay equal, and all else is as recorded, from another request on."""
    chats = read_workload("chat").chats(60, seed=1)
    write_recording(tmp_path / "r.jsonl", Recording(dataset="chat", chats=tuple(chats)))
    replay = read_workload(str(tmp_path / "r.jsonl"))
    runs = [replay.chats(60, seed) for seed in range(1, 9)]
    assert runs[0] == replay.chats(60, 1) and len({run[0].text for run in runs}) > 4

    def shown(run):
        return [p for chat in run for p in chat.shown]

    for a, b in combinations([chats, *runs], 2):
        assert not set(shown(a)) & set(shown(b))
    for run in runs:
        first = next(i for i, chat in enumerate(chats) if chat.text == run[0].text)
        recorded = [*chats[first:], *chats[:first]]
        assert [(c.text, c.system, c.max_tokens) for c in run] == [(c.text, c.system, c.max_tokens) for c in recorded]
        seeds = dict(zip(shown(recorded), shown(run)))
        assert [seeds[p] for p in shown(recorded)] == shown(run) and len(set(seeds.values())) == len(seeds) > 5
        assert all((p.width, p.height) == (q.width, q.height) for p, q in seeds.items())


def test_a_recording_with_times_begins_with_its_first_request(tmp_path):
    chats = [ChatRequest(text=f"why {i}?", at_s=0.5 * i) for i in range(20)]
    write_recording(tmp_path / "r.jsonl", Recording(dataset="d", chats=tuple(chats)))
    assert read_workload(str(tmp_path / "r.jsonl")).chats(5, seed=7) == chats[:5]


def test_recordings(tmp_path):
    chats = read_workload("textcaps").chats(3, seed=1)
    path = tmp_path / "r.jsonl"
    write_recording(path, Recording(dataset="textcaps", model="m", chats=tuple(chats)))
    assert read_recording(path).chats == tuple(chats) and path.stat().st_size < 2000
    path.write_text(path.read_text() + "{}{")
    with pytest.raises(ConfigError, match="line 5 is not a request"):
        read_recording(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a recording"):
        read_workload(str(path))
