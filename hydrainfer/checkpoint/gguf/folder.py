"""A checkpoint directory made of a GGUF file: small JSON files, and a link to the file itself for the weights.

The directory is made once, in the user's cache folder, under the file's name and a key of the files that it was made
from and of the code that made it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint.files import require
from hydrainfer.checkpoint.gguf.config import llava_json, text_json
from hydrainfer.checkpoint.gguf.file import GgufFile, read_gguf
from hydrainfer.checkpoint.gguf.tokenizer import tokenizer_json
from hydrainfer.config import cache_folder

WEIGHT_FILE, VISION_FILE = "model.gguf", "mmproj.gguf"
_VICUNA = (  # LLaVA-1.5's template, for files made before GGUF stored templates
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def unpack(path: Path, vision: Path | None = None) -> Path:
    """The checkpoint directory of a GGUF file. `vision`: the file of its vision tower and projector (mmproj). Raises
    `CheckpointError`, one line, if either file is damaged or not supported."""
    path, vision = path.resolve(), vision.resolve() if vision is not None else None
    for file in (path, *([vision] if vision else [])):
        require(file.is_file(), file, "no such file")
    folder = cache_folder() / "gguf" / _key(path, vision) / path.stem
    if not folder.is_dir():
        files = _files(read_gguf(path), read_gguf(vision) if vision else None)
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
        for name, text in files.items():
            (made / name).write_text(text, "utf-8")
        (made / WEIGHT_FILE).symlink_to(path)
        if vision is not None:
            (made / VISION_FILE).symlink_to(vision)
        try:
            made.replace(folder)
        except OSError:  # another process was first
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _key(path: Path, vision: Path | None) -> str:
    known = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):  # what is read otherwise than before is read anew
        known.update(source.read_bytes())
    for file in (path, *([vision] if vision else [])):
        stat = file.stat()
        known.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return known.hexdigest()


def _files(file: GgufFile, vision: GgufFile | None) -> dict[str, str]:
    if file.architecture == "clip":
        require(False, file.path, "holds vision weights only; give the language model, and this one as --mmproj")
    text = text_json(file)
    words = tokenizer_json(file, pictures=vision is not None)
    text["eos_token_id"] = list(words.eos_ids)
    contents: dict[str, Any] = {"tokenizer.json": words.tokenizer, "tokenizer_config.json": words.config}
    template = file.fields.get("tokenizer.chat_template")
    if vision is None:
        contents["config.json"] = text
    else:
        assert words.image_token is not None
        contents["config.json"], contents["preprocessor_config.json"] = llava_json(text, vision, words.image_token)
        template = template or _VICUNA
    contents["generation_config.json"] = {"eos_token_id": list(words.eos_ids)}
    written = {name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()}
    return written | ({"chat_template.jinja": template} if isinstance(template, str) and template else {})
