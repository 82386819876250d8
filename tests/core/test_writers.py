"""Live state has owners: who writes a field of a sequence, and of what it holds, read from the syntax tree."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import hydrainfer
from hydrainfer.core.sequence import Hold, LiveSequence

pytestmark = pytest.mark.unit
ROOT = Path(hydrainfer.__file__).parent
NOUNS = {"core/sequence.py", "core/handoff.py"}  # they make sequences, and have the methods
ROOMS = ("core", "cache", "scheduler", "engine", "cluster", "runtime", "assemble")
CHANGES = {"append", "extend", "remove", "pop", "clear", "update", "insert"}


def targets(node):
    """The expressions that a statement or call changes."""
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AugAssign() | ast.AnnAssign():
            yield node.target
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in CHANGES:
            yield value


def writers(names, owners):
    """By field, the files that write it, where what has the field is called one of `owners`."""
    found = defaultdict(set)
    for path in (p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for target in targets(node):
                while isinstance(target, ast.Subscript):
                    target = target.value  # an element of it
                if isinstance(target, ast.Attribute) and target.attr in names:
                    owner = target.value.attr if isinstance(target.value, ast.Attribute) else ast.unparse(target.value)
                    if owner in owners:
                        found[target.attr].add(str(path.relative_to(ROOT)))
    return {name: files - NOUNS for name, files in found.items()}


def test_each_field_of_a_sequence_has_one_writer():
    assert len(LiveSequence.__slots__) <= 24
    found = writers(LiveSequence.__slots__, {"seq", "s", "sequence"})
    assert found["cancelled"] == {"scheduler/scheduler.py"}, "the test sees nothing"
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_the_hold_of_a_sequence_is_written_by_the_room_alone():
    found = writers(Hold.__slots__, {"hold"})
    assert found.keys() >= {"blocks", "capacity", "due", "remapped"}
    measured = {"costing/rig.py"}  # batches without a scheduler, to measure a device
    assert all(files - measured == {"scheduler/room.py"} for files in found.values()), found


def test_no_object_of_the_scheduler_keeps_a_copy_of_the_duties():
    """`Duties` may change: outside its own file, nobody stores what it has answered."""
    for path in (ROOT / "scheduler").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                asked = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in {"runs", "accepted"}]
                assert not asked, f"{path.name} asks for stages when it is made"
