"""The `hydrainfer` command. Options are the fields of `config.ServeConfig`; nothing is declared twice."""

from __future__ import annotations

import inspect
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console

from hydrainfer import benching, builtin, profiling
from hydrainfer.config import Option, load, options
from hydrainfer.core import HydraError

app = typer.Typer(
    help="Serve vision-language models behind an OpenAI-style API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of options.", rich_help_panel="Options")]


def _option_parameters() -> list[inspect.Parameter]:
    """One command-line parameter per field of `ServeConfig`; None means it was not given."""
    parameters = []
    for o in options():
        if o.name == "model":
            info: Any = typer.Argument(help=o.help, show_default=False)
        else:
            info = typer.Option(
                "--" + o.name.replace("_", "-"),
                help=o.help,
                rich_help_panel=o.group,
                show_default=_show_default(o),
                metavar=_metavar(o),
            )
        parameters.append(
            inspect.Parameter(
                o.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info]
            )
        )
    return parameters


def _metavar(option: Option) -> str:
    if get_origin(option.type) is Literal:
        return "|".join(get_args(option.type))
    return next((name.upper() for name in ("float", "int") if name in str(option.type)), "TEXT")


def _show_default(option: Option) -> str:
    if option.default is None:
        return "none" if option.name == "api_key" else "auto"
    return str(option.default)


def _with_options(command: Any) -> Any:
    """Give `command(config_file, extra…, flags)` the flags of the schema."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    names = {p.name for p in own}

    def run(**kwargs: Any) -> None:
        flags = {k: v for k, v in kwargs.items() if k not in names and v is not None}
        command(flags=flags, **{k: v for k, v in kwargs.items() if k in names})

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    signature = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    run.__signature__ = inspect.Signature([*_option_parameters(), *signature])  # type: ignore[attr-defined]
    return run


@app.command()
@_with_options
def serve(flags: dict[str, str], config_file: _ConfigFile = None) -> None:
    """Start an OpenAI-style server for one model."""
    loaded = load(flags, config_file, os.environ)
    from hydrainfer.profiling.auto import settle
    from hydrainfer.serving import serve_forever

    console = Console()
    serve_forever(settle(loaded, console), console)


@app.command()
def demo(
    model: Annotated[Path | None, typer.Argument(help="Checkpoint directory; default: the built-in one.")] = None,
    image: Annotated[Path, typer.Option(help="The picture to ask about.")] = builtin.PICTURE,
    question: Annotated[str, typer.Option(help="What to ask.")] = "What is in this picture?",
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.", min=1)] = 48,
) -> None:
    """Start a server, ask it about a picture and print the streamed answer."""
    from hydrainfer.demo import ask
    from hydrainfer.serving import serve_in_background

    console = Console(highlight=False)
    with serve_in_background(load({"port": 0} | ({"model": str(model)} if model else {})), console) as (url, instance):
        console.print(f"\n[bold]{image}[/bold]  {question}\n")
        start_s, first_s = time.perf_counter(), 0.0
        for piece in ask(url, instance.name, image, question, max_tokens):
            first_s = first_s or time.perf_counter() - start_s
            console.print(piece, end="", markup=False, soft_wrap=True)
        total_s = time.perf_counter() - start_s
        console.print(f"\n\n[dim]first words after {first_s:.2f} s, done after {total_s:.2f} s[/dim]")


app.add_typer(benching.app, name="bench")
app.command()(benching.trace)
app.command()(profiling.profile)


@app.command()
def version() -> None:
    """Print the version."""
    from hydrainfer.version import __version__

    typer.echo(__version__)


def main() -> None:
    """Run the command; what a user can cause ends in one line and exit status 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: waiting threads leave cores to others
    try:
        app()
    except HydraError as e:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {e.message}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
