"""What MkDocs needs beside the pages of this folder: see mkdocs.yml and ``make docs``.

Links on the pages lead to files of the project, as they do on a code-hosting site. Here README,
the notebooks and the other pages that lie elsewhere join the site, every source file that a page
links to becomes a page, and at the end every link of the built site is followed.
"""

import logging
import posixpath
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert as to_mathml
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "build" / "report"  # of `make docs`: python -m repro report --output ...
PAGES = {
    "README.md": "index.md",
    "data/README.md": "data.md",
    "CONTRIBUTING.md": "contributing.md",
}
SOURCES = {".py": "python", ".cpp": "cpp", ".hpp": "cpp", ".toml": "toml", ".cff": "yaml"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_MARKDOWN = re.compile(
    r'<div class="[^"]*jp-MarkdownOutput[^"]*"[^>]*>.*?(?=<div class="jp-Cell|\Z)', re.DOTALL
)
_CODE = re.compile(r"(<pre.*?</pre>|<code.*?</code>)", re.DOTALL)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
_EXPLORER = re.compile(r'<div data-explorer="(\w+)">.*?</div>', re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.build_site")  # its warnings are errors with --strict


def place_of(page: str) -> str:
    """Return where a page of the site lies in the project."""
    for outside, inside in PAGES.items():
        if page == inside:
            return outside
    return page if page.startswith("notebooks/") else f"docs/{page}"


def page_of(file: str) -> str | None:
    """Return the page of the site that shows a file of the project, or None for a folder."""
    if file in PAGES:
        return PAGES[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.startswith("notebooks/") and file.endswith(".ipynb"):
        return file
    return f"source/{file}.md" if (ROOT / file).is_file() else None


def rewritten(text: str, page: str) -> str:
    """Return a page's text with links to files of the project as links to pages of the site."""

    def replace(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        if not target or urlsplit(match[2]).scheme:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(place_of(page)), target))
        found = page_of(file)
        if found is None:
            _log.warning("%s links to %s, which is no file", place_of(page), match[2])
            return match[0]
        own = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"{match[1]}{own}{mark}{anchor}{match[3]}"

    return _LINK.sub(replace, text)


@event_priority(100)  # before notebooks are recognised
def on_files(files: Files, config) -> Files:
    """Add what lies outside of the folder docs."""
    for outside, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / outside).read_text("utf-8")))
    for notebook in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        name = f"notebooks/{notebook.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for file in sorted(REPORT.rglob("*.*")):
        name = file.relative_to(REPORT).as_posix()
        files.append(File(name, str(REPORT), config.site_dir, config.use_directory_urls))
    texts = {file.src_uri: file.content_string for file in files if file.src_uri.endswith(".md")}
    linked = {
        match[2].partition("#")[0]: None
        for page, text in texts.items()
        for match in _LINK.finditer(rewritten(text, page))
        if "source/" in match[2]
    }
    for target in linked:
        name = target[target.index("source/") :]
        if files.get_file_from_path(name) is None:
            file = name.removeprefix("source/").removesuffix(".md")
            language = SOURCES.get(Path(file).suffix, "text")
            code = (ROOT / file).read_text("utf-8")
            content = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {file}\n\n"
            content += f"````{language}\n{code}````\n"
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Let links lead within the site."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]  # it would name this page alone
    return (
        markdown
        if name.startswith(("source/", "notebooks/", "report.md"))
        else rewritten(markdown, name)
    )


def on_page_content(html: str, page, config, files: Files) -> str:
    """Let a notebook's links lead to the other notebooks' pages, and to pages of this folder."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html
    _mend_contents(html, page.toc)
    html = _EXPLORER.sub(_with_choices, html)
    html = _MARKDOWN.sub(_with_formulas, html)
    html = re.sub(r'href="(\w+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', html)
    return re.sub(r'href="\.\./(?:docs/)?(\w+)\.md(#[^"]*)?"', r'href="../\1.html\2"', html)


def _with_choices(match: re.Match[str]) -> str:
    """Return a notebook's widget as `docs/explorers.py` wrote it."""
    return (REPORT / "explorers" / f"{match[1]}.html").read_text(encoding="utf-8")


def _with_formulas(cell: re.Match[str]) -> str:
    """Return a cell of text with its formulas, but for dollars in code."""
    parts = _CODE.split(cell[0])
    return "".join(
        part if place % 2 else _MATH.sub(_as_mathml, part) for place, part in enumerate(parts)
    )


def _as_mathml(match: re.Match[str]) -> str:
    """Return a formula as browsers show it, without a script from elsewhere."""
    display = "block" if match[1] else "inline"
    return to_mathml(unescape(match[1] or match[2]), display=display)


def _mend_contents(html: str, toc) -> None:
    """Name the headings of a notebook's table of contents anew, which lacks what is code."""

    def flat(items):
        for item in items:
            yield item
            yield from flat(item.children)

    headings = re.findall(r'<h[1-6] id="([^"]*)"[^>]*>(.*?)<a class="anchor-link"', html, re.DOTALL)
    texts = {name: unescape(re.sub(r"<[^>]*>", "", text)).strip() for name, text in headings}
    missing = [name for name in texts if name not in {item.id for item in flat(toc)}]
    for item in flat(toc):
        if item.id not in texts and missing:
            item.id = missing.pop(0)
            item.title = texts[item.id]


class _Links(HTMLParser):
    """The links of a page and the names that links can lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's link and name."""
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.names.add(value)
            elif value and (key == "src" or (key == "href" and tag in ("a", "link"))):
                self.links.add(value)


def on_post_build(config) -> None:
    """Follow every link within the built site; warn of each that leads nowhere, or out of it."""
    site = Path(config.site_dir)
    pages = {}
    for file in site.rglob("*.html"):
        pages[file] = _Links()
        pages[file].feed(file.read_text("utf-8"))
    for file, found in pages.items():
        if file.name == "404.html":  # its links begin at a server's root
            continue
        for link in sorted(found.links):
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto") or (parts.scheme and "/" not in parts.path[1:]):
                continue
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            name = unquote(parts.fragment)
            if not target.exists():
                _log.warning("%s: %s leads nowhere", file.relative_to(site), link)
            elif name and target in pages and name not in pages[target].names | {"__top"}:
                _log.warning("%s: %s has no such place", file.relative_to(site), link)
