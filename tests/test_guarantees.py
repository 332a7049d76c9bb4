"""Every guarantee of docs/guarantees.md names a test that is there."""

import ast
import re

from repro import paths

PAGE = (paths.ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"<!-- (tests/\S+) -->", PAGE)))
TESTED = ("Exact", "You must say something", "Refused", "Warned of")


def defined(file):
    """All names of tests and their classes in a file, as pytest writes them."""
    body = ast.parse((paths.ROOT / file).read_text(encoding="utf-8")).body
    functions = [(node, "") for node in body]
    functions += [(n, f"{c.name}::") for c in body if isinstance(c, ast.ClassDef) for n in c.body]
    return {prefix + getattr(node, "name", "") for node, prefix in functions}


def test_what_is_named_is_there():
    by_file = {}
    for name in NAMED:
        file, _, test = name.partition("::")
        by_file.setdefault(file, set()).add(test)
    missing = {file: tests - defined(file) - {""} for file, tests in by_file.items()}
    assert not {file: tests for file, tests in missing.items() if tests}


def test_what_is_exact_or_refused_has_one():
    groups = re.findall(r"^\*\*([^*:]+)\*\*\n\n((?:- .*\n)+)", PAGE, re.MULTILINE)
    lines = [line for kind, text in groups if kind in TESTED for line in text.splitlines()]
    assert len(lines) > 100 and {kind for kind, _ in groups} > set(TESTED)
    assert not [line for line in lines if not re.search(r" <!-- tests/\S+ -->$", line)]
