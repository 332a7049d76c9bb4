"""Every guarantee of docs/guarantees.md names a test that is there."""

import ast
import re

import pytest

from repro import paths

PAGE = (paths.ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"<!-- (tests/\S+) -->", PAGE)))
TESTED = ("Exact", "You must say something", "Refused", "Warned of")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_it_is_there(name):
    file, *parts = name.split("::")
    statements = ast.parse((paths.ROOT / file).read_text(encoding="utf-8")).body
    for part in parts:
        defined = (ast.ClassDef, ast.FunctionDef)
        (node,) = (n for n in statements if isinstance(n, defined) and n.name == part)
        statements = node.body


def test_what_is_exact_or_refused_has_one():
    groups = re.findall(r"^\*\*([^*:]+)\*\*\n\n((?:- .*\n)+)", PAGE, re.MULTILINE)
    lines = [line for kind, text in groups if kind in TESTED for line in text.splitlines()]
    assert len(lines) > 100
    assert {kind for kind, _ in groups} > set(TESTED)
    assert not [line for line in lines if not re.search(r" <!-- tests/\S+ -->$", line)]
