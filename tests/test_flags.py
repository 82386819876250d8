"""Flags from structs: every verb declares each of its flags once, under a heading of its `--help`."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from hydrainfer.benching.options import Compare, RunOptions, Trace
from hydrainfer.cli import app, main
from hydrainfer.config import ServeConfig, load
from hydrainfer.flags import command_of, flag, with_flags
from hydrainfer.profiling.options import Profile

pytestmark = pytest.mark.unit
VERBS = {"serve": ServeConfig, "profile": Profile, "trace": Trace, "bench run": RunOptions, "bench compare": Compare}


ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("datasets/*.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)]
WRITTEN = sorted({line for block in BLOCKS for line in re.findall(r"^hydrainfer [^…]*?$", block, re.M)})


class Cake(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, flag("", "What it is.")]
    eggs: Annotated[int, flag("Inside", "How many.", ge=1)] = 3
    tin: Annotated[Path | None, flag("Around", "Where it bakes.")] = None
    is_iced: Annotated[bool, flag("Around", "Sugar on it.", param_decls=["--iced"])] = False


class Layered(Cake, frozen=True, kw_only=True):
    layers: Annotated[int, flag("Inside", "How many.", ge=0, bare="1")] = 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["lemon"], Cake(name="lemon")),
        (["lemon", "--eggs", "4", "--tin", "a/b", "--iced"], Cake(name="lemon", eggs=4, tin=Path("a/b"), is_iced=True)),
        (["lemon", "--eggs", "0"], None),
        (["lemon", "--eggs", "many"], None),
        ([], None),
    ],
)
def test_a_struct_is_filled_from_what_was_typed(words, found):
    baked = []

    @with_flags(Cake, "name")
    def bake(**flags):
        baked.append(Cake(**flags))

    tool = typer.Typer()
    tool.command()(bake)
    status = CliRunner().invoke(tool, words).exit_code
    assert (status, baked) == ((0, [found]) if found else (2, []))


@pytest.mark.parametrize(("words", "wanted"), [([], True), (["--no-{}"], False), (["--{}"], True)])
@pytest.mark.parametrize("name", ["prefix_cache", "access_log"])
def test_an_option_of_the_server_with_a_no(name, words, wanted):
    given = {}

    @with_flags(ServeConfig, "model", as_text=True)
    def serve(**flags):
        given.update({k: v for k, v in flags.items() if v is not None})

    tool = typer.Typer()
    tool.command()(serve)
    assert CliRunner().invoke(tool, [w.format(name.replace("_", "-")) for w in words]).exit_code == 0
    assert getattr(load(given).config, name) is wanted


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_a_verb_is_a_field_under_a_heading(verb):
    command = typer.main.get_command(app)
    for word in verb.split():
        command = command.commands[word]
    flags = {p.name: p for p in command.params if p.name not in ("config_file", "help")}
    assert set(flags) == set(VERBS[verb].__struct_fields__)
    assert all(p.rich_help_panel for p in flags.values() if p.param_type_name == "option")


@pytest.mark.parametrize(
    ("words", "eggs"),
    [
        (["lemon", "--layers"], 1),
        (["--layers", "lemon"], 1),
        (["--layers", "--iced", "lemon"], 1),
        (["--layers", "4", "lemon"], 4),
        (["--layers=4", "lemon"], 4),
        (["lemon"], 0),
    ],
)
def test_a_flag_that_may_stand_without_its_number(words, eggs):
    baked = []

    @with_flags(Layered, "name")
    def bake(**flags):
        baked.append(Layered(**flags))

    tool = typer.Typer()
    tool.command(cls=command_of(Layered))(bake)
    assert CliRunner().invoke(tool, words).exit_code == 0 and baked[0].layers == eggs


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["serve", "--no-such"], "error: No such option: --no-such; see hydrainfer serve --help\n"),
        (
            ["serve", "--max-num-seq", "5"],
            "error: No such option: --max-num-seq; did you mean --max-num-seqs, as vLLM has it? "
            "See hydrainfer serve --help\n",
        ),
        (["nothing"], "error: No such command 'nothing'; see hydrainfer --help\n"),
        (["serve", "--port", "70000"], "error: port (flag): must be a whole number up to 65535, got '70000'\n"),
        (
            ["serve", "--store", "dir:/x?gib=ten"],
            "error: dir: gib must be a positive number, such as dir:/path?gib=50\n",
        ),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(words, wanted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hydrainfer", *words])
    with pytest.raises(SystemExit) as e:
        main()
    assert e.value.code == 2
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("line", WRITTEN)
def test_commands_of_the_documents_are_accepted_by_the_parser(line):
    """All but the work itself: verbs, flags and values."""
    command = typer.main.get_command(app)
    bench = command.commands["bench"]
    for verb in (*command.commands.values(), *bench.commands.values()):
        if verb is not bench:
            verb.callback = lambda **_: None
    command.commands["serve"].callback = lambda **flags: load({k: v for k, v in flags.items() if v is not None})
    command.main(shlex.split(line, comments=True)[1:], standalone_mode=False)
