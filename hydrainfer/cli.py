"""The `hydrainfer` command. The flags of a verb are made from the fields of a struct."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

_INTERRUPTED = 130  # exit status

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperCommand, TyperGroup

    from hydrainfer import benching, builtin, profiling, storing
    from hydrainfer.config import Loaded, ServeConfig, in_words, load, of_vllm, read_layout, stores_of
    from hydrainfer.core import ConfigError, HydraError
    from hydrainfer.flags import with_flags
    from hydrainfer.machine import let_threads_spin, limit_compiled_products
    from hydrainfer.version import __version__
except KeyboardInterrupt:  # these imports take most of a second
    sys.stderr.write("interrupted\n")
    sys.exit(_INTERRUPTED)

_M_ARENA_MAX = -8  # of mallopt(3)


class _Verbs(TyperGroup):
    """A command group that prints one line if Ctrl-C ends a verb that does not handle it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=_Verbs,
    help="Serve vision-language models behind an OpenAI-style API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of options.", rich_help_panel="Options")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hydrainfer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve vision-language models behind an OpenAI-style API."""


class _Serve(TyperCommand):
    """`serve`, which takes the options of `vllm serve`, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, ctx.obj = of_vllm(args)
        return super().parse_args(ctx, rest)


@app.command(cls=_Serve)
@with_flags(ServeConfig, "model", as_text=True)
def serve(ctx: typer.Context, config_file: _ConfigFile = None, **flags: str | None) -> None:
    """Start an OpenAI-style server for one model. Options of `vllm serve` are taken, too (docs/vllm.md)."""
    given = {name: value for name, value in flags.items() if value is not None}
    if twice := given.keys() & ctx.obj.keys():
        raise ConfigError(f"{', '.join(twice)} is given twice, as a word and as an option; give it once")
    environ = dict(os.environ)
    if "VLLM_API_KEY" in environ:  # whoever moves from vLLM expects a server with a key
        environ.setdefault("HYDRAINFER_API_KEY", environ["VLLM_API_KEY"])
    loaded, console = load(given | ctx.obj, config_file, environ), Console()
    _begin(loaded, console)
    from hydrainfer.profiling.auto import settle
    from hydrainfer.serving import serve_forever

    serve_forever(settle(loaded, console), console)


def _begin(loaded: Loaded, console: Console) -> None:
    """Check the model, the layout and the stores, and say that a server starts. Called before the modules that take
    seconds to import. Raises `ConfigError` or `CheckpointError`."""
    from hydrainfer.checkpoint import model_folder, name_of
    from hydrainfer.families import architecture_of
    from hydrainfer.stores import check_stores

    config = loaded.config

    def say(line: str) -> None:
        with suppress(OSError):  # a full disk is no reason not to serve
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    for note in loaded.notes:
        say(f"note: {note}")
    specs = () if config.layout == "auto" else read_layout(config.layout)
    check_stores(config, specs)
    folder = model_folder(config)
    architecture_of(folder)
    message = f"starting {name_of(folder)}, layout {config.layout}" + (f": {in_words(specs)}" if specs else "")
    say(message)


@app.command()
def demo(
    model: Annotated[str, typer.Argument(help="As `serve` takes it.")] = builtin.NAME,
    image: Annotated[
        Path, typer.Option(help="The picture to ask about.", exists=True, dir_okay=False, readable=True)
    ] = builtin.PICTURE,
    question: Annotated[str, typer.Option(help="What to ask.")] = "What is in this picture?",
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.", min=1)] = 48,
    verbose: Annotated[bool, typer.Option(help="Also print the options that the server runs with.")] = False,
) -> None:
    """Start a server, ask it about a picture and print the streamed answer."""
    loaded, console = load({"port": 0, "model": model}), Console(highlight=False)
    _begin(loaded, console)
    from hydrainfer.chatting import Server, ask_about
    from hydrainfer.serving import serve_in_background

    with serve_in_background(loaded, console if verbose else Console(quiet=True)) as (url, instance):
        console.print(f"\n[bold]{image}[/bold]  {question}\n")
        start_s, first_s = time.perf_counter(), 0.0
        for piece in ask_about(Server(url, instance.name), str(image), question, max_tokens):
            first_s = first_s or time.perf_counter() - start_s
            console.print(piece, end="", markup=False, soft_wrap=True)
        total_s = time.perf_counter() - start_s
        console.print(f"\n\n[dim]first words after {first_s:.2f} s, done after {total_s:.2f} s[/dim]")


@app.command()
def chat(
    target: Annotated[
        str,
        typer.Argument(metavar="URL|MODEL", help="A server to talk to, or a model as `serve` takes it."),
    ] = builtin.NAME,
    model: Annotated[str | None, typer.Option(help="One of the server's models; default: the first.")] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="A picture or video to show first, by path or URL; may be repeated.")
    ] = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Length of each answer; default: the server's.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest answer; default: the model's.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["HYDRAINFER_API_KEY", "OPENAI_API_KEY"], help="The server's key.")
    ] = None,
) -> None:
    """Talk to a server, or to a model that is started for this, in the terminal. Piped text is one question."""
    from hydrainfer.chatting import Conversation, Server, find_server
    from hydrainfer.chatting.terminal import Terminal, ask_piped, is_piped

    console, piped = Console(), is_piped()

    def talk(server: Server) -> None:
        conversation = Conversation(server, system, max_tokens=max_tokens, temperature=temperature)
        for source in image or ():
            conversation.show(source)
        if piped:
            ask_piped(conversation, console, sys.stdin.read())
        else:
            Terminal(conversation, console).run()

    if target.startswith(("http://", "https://")):
        talk(find_server(target, model, api_key))
        return
    loaded = load({"port": 0, "model": target, "access_log": False, "log_level": "warning"})
    _begin(loaded, Console(stderr=True) if piped else console)
    from hydrainfer.serving import serve_in_background

    with serve_in_background(loaded, Console(quiet=True)) as (url, instance):
        talk(Server(url, instance.name))


app.add_typer(benching.app, name="bench")
app.command()(benching.trace)
app.command(cls=profiling.ProfileCommand)(profiling.profile)
app.command()(storing.store)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="Only say whether this model is served: as --model of `serve`. Nothing large is fetched."),
    ] = None,
    config_file: _ConfigFile = None,
    port: Annotated[int, typer.Option(help="The port that a server would listen on.", min=0, max=65535)] = 8000,
    store: Annotated[
        str | None, typer.Option(help="As --store of `serve`: look at it, too. Default: that of --config, if any.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Also start servers, one of them with Ray.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finding.")] = False,
) -> None:
    """Say what this machine has, what is chosen of it, and whether a server works here. With MODEL: whether that model
    is served."""
    from hydrainfer.doctor import CheckResult, examine, examine_model, report

    config = load({"store": store} if store is not None else {}, config_file, os.environ).config
    stores = stores_of(config, () if config.layout == "auto" else read_layout(config.layout))
    console = Console(highlight=False)
    marks = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}

    def say(finding: CheckResult) -> None:
        if as_json:
            typer.echo(json.dumps(finding._asdict()))
        else:
            console.print(f"{marks[finding.state]} [bold]{finding.name}[/bold]: {escape(finding.says)}", soft_wrap=True)

    if model is not None:
        raise typer.Exit(0 if report(examine_model(model), say) else 1)
    status = console.status("looking at this machine")

    def begins(what: str) -> None:
        status.update(what)
        if not as_json and not console.is_terminal:
            console.print(f"...  {what}", soft_wrap=True)

    with nullcontext() if as_json else status:
        works = report(examine(port, serve, stores, begins), say)
    if not as_json:
        console.print(
            "\nready: [bold]hydrainfer serve[/bold]" if works else "\nwhat is marked bad keeps it from serving"
        )
    raise typer.Exit(0 if works else 1)


@app.command("build-kernels")
def build_kernels(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="As --model of `serve`.")],
    arch: Annotated[
        str | None, typer.Option(help="The GPU's compute capability, as 9.0. Default: that of the GPUs here.")
    ] = None,
) -> None:
    """Compile what these models use on a GPU, also where there is none, so that a server starts at once."""
    from hydrainfer.assemble.prebuilt import prebuild

    for line in prebuild(models, arch):
        typer.echo(line)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _share_arenas() -> None:
    """Under `ulimit -v`, let all threads allocate from two arenas. Otherwise glibc reserves 64 MiB of address space for
    each thread, which is most of what such a limit leaves beside torch."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if limited and mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


def _terminated(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)  # an exception, so that the verb removes its processes and folders


def main() -> None:
    """Run the command. Errors that a user can cause end in one line and exit status 2."""
    let_threads_spin()
    limit_compiled_products()
    signal.signal(signal.SIGTERM, _terminated)
    _share_arenas()
    try:
        sys.exit(app(prog_name="hydrainfer", standalone_mode=False))
    except HydraError as e:
        _say_error(e.message)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_INTERRUPTED)
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        sys.exit(_wrong_words(e))


def _wrong_words(e: Any) -> int:
    """Print what is wrong with a command line, and return the exit status. `e`: an exception of click or typer."""
    path = e.ctx.command_path if getattr(e, "ctx", None) is not None else "hydrainfer"
    if type(e).__name__ == "NoArgsIsHelpError":
        e.show()
    else:
        flag = getattr(e, "option_name", None)
        message = (_other_name(flag, e.ctx) if flag else "") or e.format_message().rstrip(".")
        _say_error(f"{message}{' See' if message.endswith('?') else '; see'} {path} --help")
    return e.exit_code


def _other_name(flag: str, ctx: Any) -> str:
    """What an unknown option is now called, or which of vLLM's it resembles; empty if neither is known."""
    from hydrainfer.config import RENAMED, nearest_of_vllm

    key = flag.removeprefix("--").replace("-", "_")
    if key in RENAMED:
        return f"{flag} is now called --{RENAMED[key].replace('_', '-')}"
    if ctx is None or not isinstance(ctx.command, _Serve):
        return ""
    near = nearest_of_vllm(key, [param.name for param in ctx.command.params])
    return f"No such option: {flag}; did you mean --{near.replace('_', '-')}, as vLLM has it?" if near else ""


def _say_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)
