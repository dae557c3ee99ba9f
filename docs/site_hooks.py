"""Hooks of MkDocs, which add pages and files to the site, and adapt links, Markdown and language.

On GitHub, a page is read in the repository, and its links lead to files of the repository:

    docs/models.md           ../models/text/llama.py      ../README.md
    models.md of the site    repository/models/text/…     tour.md

The site therefore has a copy of every file that a page links to, and pages made from README.md and
from the notebook. MkDocs then checks these links like all others.

A link that shows the name of a page, such as [config.md](config.md), shows its title on the site.

GitHub and Python-Markdown also differ in three rules, so that the text of a page is adapted:

    <!-- a comment -->    must be followed by a blank line
    - item                the item's other paragraphs are indented by 4 columns, not by 2 or 3
    - next item           follows a blank line if the item before has several paragraphs
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tests need no MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: File of the repository -> page of the site.
PAGES = {
    "README.md": "tour.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/examples/quickstart.ipynb": "examples/quickstart.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_INDENT = 4  # columns, of the paragraphs of a list's item
_LINK = re.compile(r"(?<=\]\()([^()\s#:]+)(?=[#)])")


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Name the anchors of headings as GitHub does, which keeps letters such as μ."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that are not in docs/, and a copy of every file that a page links to."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = markdown_of(text) if source.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=content))
    for file in [*files.documentation_pages()]:
        for _, path in links(file.content_string, file.src_uri):
            uri = site_uri(path)
            if files.get_file_from_path(uri) is None and (ROOT / path).is_file():
                files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Return the text of a page as Python-Markdown reads it, with links to the site's files."""
    folder = posixpath.dirname(page.file.src_uri)
    for link, path in {*links(markdown, page.file.src_uri)}:
        target = files.get_file_from_path(site_uri(path))
        if target is not None and target.is_documentation_page():
            title = title_of(target.content_string)
            names = f"{re.escape(link)}|{re.escape(posixpath.basename(link))}"
            shown = rf"\[(?:{names})\](?=\({re.escape(link)}[#)])"
            markdown = re.sub(shown, f"[{title}]", markdown)
        if (ROOT / path).is_file():
            relative = posixpath.relpath(site_uri(path), folder or ".")
            markdown = re.sub(rf"(?<=\]\(){re.escape(link)}(?=[#)])", relative, markdown)
    return adapted(markdown)


def on_page_context(
    context: dict[str, Any], page: "Page", config: "MkDocsConfig", nav: "Navigation"
) -> dict[str, Any]:
    """Choose the language of the theme's own words, such as those of the search."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith("zh/") else "en"
    return context


def adapted(markdown: str) -> str:
    """Return Markdown of GitHub in the form that Python-Markdown reads in the same way."""
    lines = []
    content = 0  # column at which the text of the current list item starts
    is_long = False  # whether this item has several paragraphs
    is_code = False
    for line in markdown.splitlines():
        is_continued = content > 0 and (not line or line.startswith(" " * content))
        if is_continued:
            is_long |= not line
        else:
            item = None if is_code else re.match(r"(?:[-*]|\d+\.) +", line)
            if item is not None and is_long:
                lines.append("")
            is_long = False
            content = 0 if item is None else item.end()
            is_code ^= line.startswith("```")
            if not is_code:
                line = re.sub(r"^<!--.*-->$", "", line)
        if is_continued and line:
            line = " " * (_INDENT - content) + line
        lines.append(line)
    return "\n".join(lines) + "\n"


def title_of(markdown: str) -> str:
    """Return the first heading of a page, as plain text."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown.partition("\n")[0].removeprefix("# "))


def links(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield every relative link of a page, without its anchor, and the path that it leads to.

    Args:
        page: page of the site, relative to its root.

    Yields:
        (link as written, path relative to the root of the repository).
    """
    folder = posixpath.dirname(_SOURCES.get(page, f"docs/{page}"))
    for link in _LINK.findall(markdown):
        yield link, posixpath.normpath(posixpath.join(folder, link))


def site_uri(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def markdown_of(notebook: str) -> str:
    """Return a notebook as Markdown: its texts, its code, and the output of the code."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        outputs = cell.get("outputs", ())
        if printed := "".join("".join(each.get("text", "")) for each in outputs):
            parts.append(f"```\n{printed.rstrip()}\n```")
        for picture in (each["data"]["image/png"] for each in outputs if "data" in each):
            data = "".join(picture).replace("\n", "")
            parts.append(f"![Output of the code above](data:image/png;base64,{data})")
    return "\n\n".join(parts) + "\n"
