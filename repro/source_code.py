"""Which source a result depends on: found by its imports, hashed, compared with a commit's.

What a function's module imports, and what that imports, is the code that ran. Of a method's package
all files count, its C++ too; of other packages the modules that define the imported names; of
`repro.models` the architectures that the configuration names. Formatting, comments and docstrings
do not count.
"""

import ast
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from repro import paths
from repro.measure.files import regular, replacing

METHODS = ("mbs", "dualbatch", "adaptive", "outofcore", "microconv")
_MODELS = "repro/models/__init__.py"
_REPORTED = "repro/experiments/reported"


class Tree:
    """The package's files, of the working tree or of a commit.

    Args:
        commit: Read from git; None for the files as they are now.

    Raises:
        LookupError: There is no such commit.
    """

    def __init__(self, commit: str | None = None) -> None:
        self._commit = commit
        self._modules: dict[str, Module] = {}
        # By entry and the architectures that the configuration names; None for no choice.
        self._closures: dict[tuple[str, frozenset[str] | None], frozenset[str]] = {}
        self._hashes: dict[frozenset[str], str] = {}
        self._reached: dict[tuple[str, frozenset[str]], dict[str, tuple[str, str]]] = {}
        self._texts: dict[tuple[str, str], str] = {}
        if commit is None:
            root = paths.PACKAGE.parent
            files = [
                path.relative_to(root).as_posix()
                for path in paths.PACKAGE.rglob("*")
                if path.suffix in (".py", ".cpp", ".hpp", ".toml")
            ]
        else:
            listed = paths.git("ls-tree", "-r", "--name-only", commit, "repro")
            if listed is None:
                raise LookupError(f"there is no commit {commit!r}")
            files = listed.decode().splitlines()
        self.files = frozenset(files)

    def read(self, file: str) -> bytes:
        """Return a file's content, such as that of ``repro/training.py``."""
        if self._commit is None:
            return (paths.PACKAGE.parent / file).read_bytes()
        content = paths.git("show", f"{self._commit}:{file}")
        if content is None:
            raise LookupError(f"commit {self._commit} has no {file}")
        return content

    def module(self, file: str) -> "Module":
        """Return a module, which is parsed when it has to be."""
        if file not in self._modules:
            known = self._remembered.get(file)
            stands = known is not None and known["state"] == self._state(file)
            self._modules[file] = Module(lambda: self.read(file), known if stands else None)
        return self._modules[file]

    def _state(self, file: str) -> list[int]:
        status = (paths.PACKAGE.parent / file).stat()
        # Of a package that is installed anew the times of change may be those of the old one.
        return [status.st_mtime_ns, status.st_ctime_ns, status.st_size]

    @cached_property
    def _remembered(self) -> dict[str, Any]:
        """What was found in the working tree's files before, by file, with their state then."""
        if self._commit is not None:
            return {}
        try:
            digest, _, text = regular(_memory()).read_text(encoding="utf-8").partition("\n")
            if digest != hashlib.sha256(text.encode()).hexdigest():
                return {}  # a damaged or foreign file is none
            files = json.loads(text)
            return {f: facts for f, facts in files.items() if {*facts} == {*_FACTS, "state"}}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def remember(self) -> None:
        """Keep what was found in the working tree's files, so that a status need not parse them."""
        if self._commit is not None:
            return
        new = {
            file: module.facts() | {"state": self._state(file)}
            for file, module in self._modules.items()
            if module.parsed
        }
        if not new:
            return
        # Without a place to write, the next one parses again.
        text = json.dumps(self._remembered | new)
        digest = hashlib.sha256(text.encode()).hexdigest()
        with contextlib.suppress(OSError), replacing(_memory()) as temporary:
            temporary.write_text(f"{digest}\n{text}", encoding="utf-8")

    def file_of(self, name: str) -> str | None:
        """Return the file of a module by its dotted name, None for no module of this package."""
        stem = name.replace(".", "/")
        return next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in self.files), None)

    def target(self, module: str, name: str) -> tuple[str, str | None] | None:
        """Return the file that ``from module import name`` leads to, and the name in it.

        The name is None where it is a module. None for what is not of this package.
        """
        if (file := self.file_of(f"{module}.{name}")) is not None:
            return file, None
        file = self.file_of(module)
        if file is None:
            return None
        again = self.module(file).imported.get(name)
        if again is not None and name not in self.module(file).names:
            return self.target(*again) if again[1] else None
        return file, name

    def closure(self, entry: str, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the files that ``module:function`` depends on under a configuration."""
        start = self.file_of(entry.partition(":")[0])
        if start is None:
            raise LookupError(f"there is no module {entry!r}")
        wanted = self._architectures(config)
        if (entry, wanted) not in self._closures:
            self._closures[entry, wanted] = self._closure(start, wanted)
        return self._closures[entry, wanted]

    def _closure(self, start: str, wanted: frozenset[str] | None) -> frozenset[str]:
        closure: set[str] = set()
        queue = [start]
        while queue:
            file = queue.pop()
            if file in closure:
                continue
            closure.add(file)
            package = PurePosixPath(file).parts[1]
            if package in METHODS:
                folder = f"repro/{package}/"
                queue += [f for f in self.files if f.startswith(folder) and f not in closure]
            if not file.endswith(".py"):
                continue
            for module, name in self.module(file).imports:
                reached = self.target(module, name) if name else (self.file_of(module), None)
                if reached is None or reached[0] is None:
                    continue
                other = file == _MODELS and wanted is not None and reached[1] not in wanted
                if other and not PurePosixPath(reached[0]).name.startswith("_"):
                    continue  # an architecture that is not trained here
                queue.append(reached[0])
                if reached[1] == "reported":
                    paper = PurePosixPath(start).parts[2]
                    queue.append(f"{_REPORTED}/{paper}.toml")
        return frozenset(closure)

    def _architectures(self, config: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the architectures that a configuration names, None where it names none."""
        if _MODELS not in self.files:
            return None
        known = self.module(_MODELS).imported
        named = set(_texts(config))
        chosen = frozenset(named & known.keys())
        return chosen if chosen or any(t.startswith("torchvision/") for t in named) else None

    def hash_of(self, entry: str, config: Mapping[str, Any]) -> str:
        """Hash the code that ``module:function`` depends on under a configuration."""
        files = self.closure(entry, config)
        if files not in self._hashes:
            digest = hashlib.sha256()
            for file in sorted(files):
                digest.update(f"{file} {self._digest(file)}\n".encode())
            self._hashes[files] = digest.hexdigest()[:24]
            self.remember()
        return self._hashes[files]

    def _digest(self, file: str) -> str:
        if file.endswith(".py"):
            return self.module(file).digest
        return hashlib.sha256(self.read(file)).hexdigest()

    def definitions(self, entry: str, config: Mapping[str, Any]) -> frozenset[str]:
        """Return what a function uses, wherever it stands; see `reached`."""
        return frozenset(self.reached(entry, config))

    def reached(self, entry: str, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return each definition that a function uses, with the file and the name that it has.

        A definition is its canonical text with what each name in it stands for. Names are followed
        through the files of `closure`; what a file does besides defining counts as well. Equal
        definitions mean that the same code runs, though it may have moved to other files.

        Raises:
            LookupError: The entry is not defined in its module.
        """
        files = self.closure(entry, config)
        if (entry, files) not in self._reached:
            self._reached[entry, files] = self._reach(entry, files)
        return self._reached[entry, files]

    def _reach(self, entry: str, files: frozenset[str]) -> dict[str, tuple[str, str]]:
        start, _, name = entry.partition(":")
        file = self.file_of(start)
        if file is None or name not in self.module(file).names:
            raise LookupError(f"{entry} is not defined there")
        reached: dict[str, tuple[str, str]] = {}
        done: set[tuple[str, str]] = set()
        # What a paper's own files do when they are run as a program, they do for a record too.
        folder = f"{PurePosixPath(file).parent}/"
        queue = [(file, name), *((f, "") for f in files if f.startswith(folder))]
        while queue:
            symbol = queue.pop()
            if symbol in done or symbol[0] not in files or not symbol[0].endswith(".py"):
                continue
            done.add(symbol)
            text = self._text(*symbol)
            nodes = self._nodes(*symbol)
            local = {k: v for node in nodes for k, v in _imported_in(node).items()}
            used = {
                f"{name}.{attribute}": self._targets(symbol[0], local, name, attribute)
                for name, attribute in sorted({pair for node in nodes for pair in _used(node)})
            }
            bound = [f"{key} is {[self._text(*t) for t in used[key]]}" for key in used if used[key]]
            meant = hashlib.sha256("\n".join(bound).encode()).hexdigest()
            if text:
                reached.setdefault(f"{text}\n{meant}", symbol)
            queue += [(symbol[0], ""), *(target for targets in used.values() for target in targets)]
        return reached

    def _nodes(self, file: str, name: str) -> list[ast.stmt]:
        """Return what defines a name, or for no name all that a file does besides defining."""
        module = self.module(file)
        return module.definitions.get(name, []) if name else module.effects

    def _text(self, file: str, name: str) -> str:
        """Return a definition in canonical text, where a name comes from elsewhere its origin."""
        if (file, name) not in self._texts:
            parts = [canonical(node, {"repro"}) for node in self._nodes(file, name)]
            if name in self.module(file).foreign:
                parts.append(self.module(file).foreign[name])
            self._texts[file, name] = "\n".join(parts)
        return self._texts[file, name]

    def _targets(
        self, file: str, local: Mapping[str, tuple[str, str]], name: str, attribute: str
    ) -> list[tuple[str, str]]:
        """Return what a name may stand for: what is imported, here or anywhere, or defined."""
        module = self.module(file)
        targets = {
            self._follow(*imported[name], attribute)
            for imported in (local, module.imported)
            if name in imported
        }
        if name in module.names or name in module.foreign:
            targets.add((file, name))
        return sorted(target for target in targets if target is not None)

    def _follow(self, module: str, name: str, attribute: str) -> tuple[str, str] | None:
        reached = self.target(module, name) if name else None
        if reached is None:
            return None
        file, inside = reached
        if inside is not None:
            return file, inside
        # A module: what is taken from it, which it may have from elsewhere.
        dotted = PurePosixPath(file).with_suffix("").as_posix().replace("/", ".")
        again = self.target(dotted.removesuffix(".__init__"), attribute) if attribute else None
        return (again[0], again[1]) if again and again[1] else None


_FACTS = ("imports", "imported", "names", "digest")


class Module:
    """One file: what it imports and what it defines at its top level.

    Args:
        read: Returns its content.
        facts: What `facts` returned for the same content; None to parse it.
    """

    def __init__(self, read: Callable[[], bytes], facts: Mapping[str, Any] | None = None) -> None:
        self._read = read
        self._facts = facts
        self.parsed = False

    def facts(self) -> dict[str, Any]:
        """Return what is needed to find and hash the code, as JSON."""
        return {
            "imports": self.imports,
            "imported": self.imported,
            "names": sorted(self.names),
            "digest": self.digest,
        }

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        self.parsed = True
        return ast.parse(self._read())

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """Modules and names imported anywhere, in functions too, but for types alone."""
        if self._facts is not None:
            return [(module, name) for module, name in self._facts["imports"]]
        return list(_imports(self.tree))

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """What the top level imports, by the name it has here."""
        if self._facts is not None:
            return {key: (module, name) for key, (module, name) in self._facts["imported"].items()}
        return _imported_in(self.tree)

    @cached_property
    def names(self) -> frozenset[str]:
        """What the top level defines."""
        if self._facts is not None:
            return frozenset(self._facts["names"])
        return frozenset(self.definitions)

    @cached_property
    def digest(self) -> str:
        """Hash of the code."""
        if self._facts is not None:
            return str(self._facts["digest"])
        return hashlib.sha256(canonical(self.tree).encode()).hexdigest()

    @cached_property
    def foreign(self) -> dict[str, str]:
        """What the top level imports from elsewhere, by the name it has here."""
        origins = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                whence = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    origins[alias.asname or alias.name.partition(".")[0]] = f"{whence}{alias.name}"
        return {name: origin for name, origin in origins.items() if not _is_own(origin)}

    @cached_property
    def effects(self) -> list[ast.stmt]:
        """What the top level does besides defining and importing, in order."""
        return [node for node in self.tree.body if _acts(node)]

    @cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        """The top level's functions, classes and constants, by name."""
        by_name: dict[str, list[ast.stmt]] = {}
        for node in self.tree.body:
            for name in _defined(node):
                by_name.setdefault(name, []).append(node)
        return by_name


def _statements(node: ast.AST, for_types: bool = True) -> Iterator[ast.stmt]:
    """Yield all statements inside one, expressions left out: there are ten times as many."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for part in getattr(node, name, ()):
            yield part
            if for_types or not (isinstance(part, ast.If) and _is_for_types(part.test)):
                yield from _statements(part, for_types)


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return bool(name == "TYPE_CHECKING")


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in _statements(tree, for_types=False):
        if isinstance(node, ast.ImportFrom) and node.module and _is_own(node.module):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if _is_own(a.name))


def _imported_in(tree: ast.AST) -> dict[str, tuple[str, str]]:
    imported: dict[str, tuple[str, str]] = {}
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_own(node.module):
            for alias in node.names:
                imported[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_own(alias.name):
                    imported[alias.asname or alias.name] = (alias.name, "")
    return imported


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement gives to something, in its blocks too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for part in ast.walk(node) if isinstance(node, _ASSIGNMENTS) else ():
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for part in getattr(node, name, ()):
            yield from _defined(part)


_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_NO_ACTS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Pass,
)


def _acts(node: ast.stmt) -> bool:
    """Whether a statement of the top level does more than to define a name."""
    if isinstance(node, _NO_ACTS) or _is_text(node):
        return False
    if isinstance(node, ast.If) and _is_for_types(node.test):
        return False
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return not all(_is_name(target) for target in targets)
    return True


def _is_name(target: ast.expr) -> bool:
    """Whether a name is assigned to, or several at once; not an attribute or an item."""
    if isinstance(target, ast.Tuple | ast.List):
        return all(_is_name(part) for part in target.elts)
    return isinstance(target, ast.Name)


def _used(tree: ast.AST) -> set[tuple[str, str]]:
    """Return the names that code uses, each with the attribute that is taken of it."""
    used = {(node.id, "") for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add((node.value.id, node.attr))
    return used


def canonical(node: ast.AST, without: frozenset[str] | set[str] = frozenset()) -> str:
    """Return code as text that formatting, comments and docstrings do not change.

    Not `ast.dump`, whose text differs between versions of Python.

    Args:
        node: Parsed code.
        without: Packages whose imports do not count.
    """
    parts: list[str] = []
    _write(node, parts, without)
    return "".join(parts)


def _write(value: Any, parts: list[str], without: frozenset[str] | set[str]) -> None:
    kind = type(value)
    if kind is ast.Name:  # the most frequent ones first: whole packages are read for a status
        parts.append(f"(Name {value.id})")
    elif kind is ast.Constant:
        parts.append(f"(Constant {value.value!r})")
    elif kind is ast.Attribute:
        parts.append(f"(Attribute {value.attr} ")
        _write(value.value, parts, without)
        parts.append(")")
    elif kind is list:
        parts.append("[")
        for item in value:
            _write(item, parts, without)
        parts.append("]")
    elif isinstance(value, ast.AST):
        parts.append(f"({kind.__name__}")
        for name in value._fields:
            field = getattr(value, name, None)
            if field is None or field == [] or name in _NO_MEANING:
                continue
            if name == "body" and type(field) is list:
                field = [part for part in _meant(value, field) if not _imports_of(part, without)]
            parts.append(f" {name}=")
            _write(field, parts, without)
        parts.append(")")
    else:
        parts.append(repr(value))


_NO_MEANING = frozenset(("kind", "type_ignores", "ctx", "type_comment"))


def _imports_of(node: ast.stmt, packages: frozenset[str] | set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in packages
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return bool(names) and all(name.partition(".")[0] in packages for name in names)


def _is_own(module: str) -> bool:
    return module == "repro" or module.startswith("repro.")


def _meant(node: ast.AST, body: list[Any]) -> list[Any]:
    """Return the statements of a body without its docstring."""
    documented = isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    )
    return body[1:] if documented and body and _is_text(body[0]) else body


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts(item)


@cache
def present() -> Tree:
    """Return the files as they were when they were first asked for."""
    return Tree()


@cache
def at_commit(commit: str) -> Tree:
    """Return the files of a commit.

    Raises:
        LookupError: There is no such commit here.
    """
    return Tree(commit)


@cache
def _memory() -> Path:
    """Return the file that keeps facts of sources: by Python's version, this module and its folder.

    Several checkouts and installed packages share a user's cache folder.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = os.fsencode(paths.PACKAGE)
    digest = hashlib.sha256(Path(__file__).read_bytes() + package).hexdigest()[:12]
    return paths.cache_dir() / f"source-{version}-{digest}.json"
