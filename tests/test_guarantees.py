"""Every guarantee of docs/guarantees.md names a test that is there."""

import ast
import re

import pytest

from repro import paths

PAGE = (paths.ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_it_is_there(name):
    file, *parts = name.split("::")
    statements = ast.parse((paths.ROOT / file).read_text(encoding="utf-8")).body
    for part in parts:
        (node,) = (
            node
            for node in statements
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        )
        statements = node.body


def test_what_is_exact_or_refused_has_one():
    rows = re.findall(
        r"^\| (exact|you must say something|refused|warned of) \|.*\| (.*) \|$", PAGE, re.MULTILINE
    )
    assert len(rows) > 30
    assert all(test.startswith("`tests/") for _, test in rows)
