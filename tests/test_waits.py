"""Every wait in the product has a deadline, and no error is swallowed whole."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import actors
import rayxfer

ROOTS = [Path(package.__file__ or "").parent for package in (rayxfer, actors)]
FILES = sorted(path for root in ROOTS for path in root.rglob("*.py"))

EXEMPT = "no deadline:"
"""A comment with these words, on the line or just above, says why one wait has none."""


def excused(lines: list[str], line: int) -> bool:
    return any(EXEMPT in text for text in lines[max(0, line - 3) : line])


def waits_without_deadline(tree: ast.AST) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, bare = node.func.attr, not node.args and not node.keywords
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        timed = any(keyword.arg in ("timeout", "blocking") for keyword in node.keywords)
        blocking = name in ("wait", "join", "acquire", "result", "exception") and bare
        if blocking or (owner == "ray" and name in ("get", "wait") and not timed):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_wait_has_a_deadline(path: Path) -> None:
    source = path.read_text()
    lines = source.splitlines()
    offenders = [
        f"{path.name}:{line}: {lines[line - 1].strip()}"
        for line in waits_without_deadline(ast.parse(source))
        if not excused(lines, line)
    ]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_error_is_swallowed_whole(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            kind = node.type.id if isinstance(node.type, ast.Name) else None
            silent = all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body)
            broad = node.type is None or kind in ("Exception", "BaseException")
            assert not (silent and broad), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "suppress":
            named = {arg.id for arg in node.args if isinstance(arg, ast.Name)}
            assert not named & {"Exception", "BaseException"}, f"{path.name}:{node.lineno}"


def test_the_check_sees_what_it_should() -> None:
    code = "done.wait()\nray.get(ref)\nthread.join()\nlock.acquire()\nfuture.result()\n"
    assert waits_without_deadline(ast.parse(code)) == [1, 2, 3, 4, 5]
    code = "done.wait(1)\nray.get(ref, timeout=2)\n' '.join(x)\nlock.acquire(blocking=False)\n"
    assert waits_without_deadline(ast.parse(code)) == []
