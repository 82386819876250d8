"""A conversation in a terminal, or about what is piped in."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console

from hydrainfer.chatting.conversation import Conversation
from hydrainfer.config import cache_folder
from hydrainfer.core import InvalidRequest

_HELP = """/image PATH or URL   show a picture or a video with the next question (several: one after the other)
/system TEXT         what the model is told first
/clear               forget the conversation
/save FILE           write the conversation as the body of a request
/help                this
/exit                or Ctrl-D
Ctrl-C ends an answer. Alt-Enter begins a new line."""


class Terminal:
    """A chat in a terminal. Questions are remembered for the arrow keys, also of earlier chats."""

    def __init__(self, conversation: Conversation, console: Console, session: PromptSession[str] | None = None) -> None:
        self._conversation, self._console = conversation, console
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/image": self._show,
            "/video": self._show,
            "/system": self._tell,
            "/clear": lambda _: self._clear(),
            "/save": self._save,
            "/help": lambda _: self._say(_HELP),
        }
        words = WordCompleter([*self._commands, "/exit"], sentence=True)
        self._session = session or PromptSession(history=_history(), completer=words, complete_while_typing=False)
        self._session.key_bindings = KeyBindings()
        self._session.key_bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    def run(self) -> None:
        """Read questions and commands until the end."""
        self._say(
            f"{self._conversation.server.model} at {self._conversation.server.url}; /help says what else there is"
        )
        while True:
            n = len(self._conversation.shown)
            try:
                typed = self._session.prompt(HTML(f"<b>{f'[{n} shown] ' if n else ''}&gt; </b>")).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            word, _, rest = typed.partition(" ")
            if word in ("/exit", "/quit", "/bye"):
                return
            try:
                if word in self._commands:
                    self._commands[word](rest.strip())
                elif word.startswith("/") and Path(word).suffix == "":
                    self._say(f"there is no {word}; /help says what there is")
                elif typed:
                    self.ask(typed)
            except InvalidRequest as e:
                self._console.print(e.message, style="red", markup=False, highlight=False, soft_wrap=True)

    def ask(self, question: str) -> None:
        """Print the answer as it arrives; Ctrl-C ends it. Raises `InvalidRequest`."""
        thinking = False
        with closing(self._conversation.ask(question)) as pieces:  # type: ignore[type-var]
            try:
                for piece in pieces:
                    if thinking and not piece.thought:
                        self._console.print("\n")
                    thinking = piece.thought
                    style = "dim" if piece.thought else None
                    self._console.print(piece.text, end="", style=style, markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                self._console.print(" …", end="", style="dim")
        self._console.print()

    def _show(self, words: str) -> None:
        try:
            sources = shlex.split(words)
        except ValueError:  # one quotation mark, as in a name
            sources = [words]
        if not sources:
            raise InvalidRequest("name a picture or a video by its path or URL: /image cat.jpg")
        for source in sources:
            self._conversation.show(source)
        self._say(f"{len(self._conversation.shown)} will be shown with the next question")

    def _tell(self, text: str) -> None:
        self._conversation.system = text
        self._say("it will be told first" if text else "it will be told nothing first")

    def _clear(self) -> None:
        self._conversation.clear()
        self._say("forgotten")

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidRequest("name a file: /save chat.json")
        self._conversation.save(Path(path))
        self._say(f"written to {path}")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def ask_piped(conversation: Conversation, console: Console, question: str) -> None:
    """Answer what was piped in, on stdout. Raises `InvalidRequest`."""
    if not question.strip():
        raise InvalidRequest(
            "nothing was piped in; type a question, or pipe one: echo 'What is this?' | hydrainfer chat"
        )
    for piece in conversation.ask(question.strip()):
        if not piece.thought:
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()


def is_piped() -> bool:
    return not sys.stdin.isatty()


def _history() -> History:
    """The questions of earlier chats, in the cache folder; of this one alone if that cannot be written."""
    try:
        path = cache_folder() / "chat_history"
        path.touch(mode=0o600)
        return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()
