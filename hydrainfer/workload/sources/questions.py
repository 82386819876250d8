"""Readers of the published files of the paper's five datasets: pairs of a question and a picture.

Only questions and picture names are read; answers are not needed to measure a server. datasets/README.md says which
files are meant, where to get them, and their licences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hydrainfer.workload.sources.files import entries_of, field, read_bytes, read_json, read_json_lines, wrong


class Question(NamedTuple):
    """A question about a picture. `picture`: a file."""

    text: str
    picture: Path


def textcaps(path: Path, pictures: Path) -> Iterator[Question]:
    """`TextCaps_0.1_val.json`: `data[].image_id`, for the file `IMAGE_ID.jpg`. The five captions of a picture give one
    request, without a question of its own."""
    seen = set()
    for i, entry in enumerate(entries_of(path, read_json(path), "data")):
        name = field(path, f"data[{i}]", entry, "image_id", str)
        if name not in seen:
            seen.add(name)
            yield Question("", pictures / f"{name}.jpg")


def textvqa(path: Path, pictures: Path) -> Iterator[Question]:
    """`TextVQA_0.5.1_val.json`: `data[].question` and `data[].image_id`, for the file `IMAGE_ID.jpg`."""
    for i, entry in enumerate(entries_of(path, read_json(path), "data")):
        where = f"data[{i}]"
        name = field(path, where, entry, "image_id", str)
        yield Question(field(path, where, entry, "question", str), pictures / f"{name}.jpg")


def vizwiz(path: Path, pictures: Path) -> Iterator[Question]:
    """`val.json`: a list of `image` (a file name) and `question`."""
    for i, entry in enumerate(entries_of(path, read_json(path))):
        where = f"[{i}]"
        name = field(path, where, entry, "image", str)
        yield Question(field(path, where, entry, "question", str), pictures / name)


def pope(path: Path, pictures: Path) -> Iterator[Question]:
    """`coco_pope_random.json` and similar files: despite the name, one JSON object per line, with `image` (a file of
    COCO val2014) and `text`."""
    for where, entry in read_json_lines(path):
        name = field(path, where, entry, "image", str)
        yield Question(field(path, where, entry, "text", str), pictures / name)


def mme(path: Path, pictures: Path) -> Iterator[Question]:  # noqa: ARG001
    """The unpacked `MME_Benchmark_release_version`: one folder per task, with pictures. For each picture there is a
    text file of the same name with a question, a tab and an answer per line. Text files and pictures lie side by side,
    or under `questions_answers_YN/` and `images/`. `pictures` is not used."""
    if not path.is_dir():
        raise wrong(path, "MME is a folder of task folders")
    found = False
    for questions in sorted(path.glob("*/*.txt")) + sorted(path.glob("*/questions_answers_YN/*.txt")):
        folder = questions.parent
        folder = folder.parent / "images" if folder.name == "questions_answers_YN" else folder
        picture = next((p for s in (".jpg", ".png", ".jpeg") if (p := folder / (questions.stem + s)).exists()), None)
        if picture is None:
            raise wrong(questions, f"no picture {questions.stem}.jpg or .png in {folder}")
        for number, line in enumerate(read_bytes(questions).decode("utf-8", "replace").splitlines(), 1):
            text, tab, _ = line.partition("\t")
            if line.strip() and not tab:
                raise wrong(questions, f"line {number} has no tab between question and answer")
            if text.strip():
                found = True
                yield Question(text.strip(), picture)
    if not found:
        raise wrong(path, "no TASK/*.txt and no TASK/questions_answers_YN/*.txt in it")


READERS: dict[str, Callable[[Path, Path], Iterator[Question]]] = {
    "textcaps": textcaps,
    "pope": pope,
    "mme": mme,
    "vizwiz": vizwiz,
    "textvqa": textvqa,
}
