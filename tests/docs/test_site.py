"""The site of the documentation: its navigation, its first sentences, and its generated pages."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import taibai
from docs import command_reference, draw_idea, site_hooks
from sharding.logical import to_spec
from sharding.rules import DEFAULT_RULES
from tests.runs import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def navigated(entry: Any) -> Iterator[str]:
    """Yield the pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(below)


def test_navigation_has_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    assert sorted(navigated(config["nav"])) == sorted([*pages, *site_hooks.PAGES.values()])


def test_warnings_are_errors():
    """With --quiet, MkDocs does not count the warnings that --strict refuses."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict\n" in makefile
    validation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["validation"]
    assert {*validation["nav"].values(), *validation["links"].values()} == {"warn"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_first_sentence_says_what_the_reader_can_do(page):
    title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    sentence = re.split(r"[.:](?:\s|$)|。", first)[0]
    assert re.search(r"\byou\b|你", sentence, re.IGNORECASE), sentence


def test_links_to_the_repository_lead_to_copies_of_its_files():
    text = "[a](../models/text/llama.py) [b](data.md#images) [c](https://x.org) [d](../README.md)"
    assert [*site_hooks.links(text, "models.md")] == [
        ("../models/text/llama.py", "models/text/llama.py"),
        ("data.md", "docs/data.md"),
        ("../README.md", "README.md"),
    ]
    assert site_hooks.site_uri("models/text/llama.py") == "repository/models/text/llama.py"
    assert site_hooks.site_uri("docs/data.md") == "data.md"
    assert site_hooks.site_uri("README.md") == "tour.md"
    assert [*site_hooks.links("[a](docs/data.md)", "tour.md")] == [("docs/data.md",) * 2]


def test_title_of_a_page_is_plain_text():
    assert site_hooks.title_of("# Use data: [images](#images)\n\nText") == "Use data: images"


def test_adapted_indents_paragraphs_of_list_items_and_ends_comments():
    source = (
        "<!-- table -->\n| a |\n\n- one\n\n  ```\n  code\n  ```\n10. ten\n    more\n\n"
        "```\n<!-- code -->\n- no item\n  as it is\n```\n"
    )
    expected = (
        "\n| a |\n\n- one\n\n    ```\n    code\n    ```\n\n10. ten\n    more\n\n"
        "```\n<!-- code -->\n- no item\n  as it is\n```\n"
    )
    assert site_hooks.adapted(source) == expected


def test_words_of_the_theme_are_chinese_on_chinese_pages():
    config: Any = SimpleNamespace(theme={"language": "en"})
    nav: Any = None
    for uri, language in (("zh/index.md", "zh"), ("index.md", "en"), ("zh/meshes.md", "zh")):
        page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        context = site_hooks.on_page_context({}, page, config, nav)
        assert context == {} and config.theme["language"] == language


def test_notebook_becomes_text_code_and_outputs():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "display_data", "data": {"image/png": "QUJD\n"}},
            ],
        },
    ]
    assert site_hooks.markdown_of(json.dumps({"cells": cells})) == (
        "# Title\ntext\n\n```python\nprint(1)\n```\n\n```\n1\n```\n\n"
        "![Output of the code above](data:image/png;base64,QUJD)\n"
    )


def test_stored_notebook_is_small_and_has_outputs_of_every_cell():
    file = ROOT / "docs" / "examples" / "quickstart.ipynb"
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells), "run `python -m docs.run_quickstart`"
    assert file.stat().st_size < 100_000


@pytest.mark.thorough
def test_page_on_commands_is_current():
    message = "run `python -m docs.command_reference`"
    assert command_reference.PAGE.read_text(encoding="utf-8") == command_reference.page(), message


def test_page_on_commands_has_every_command():
    page = command_reference.PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^## taibai (.*)$", page, re.MULTILINE)
    conversions = [f"convert {name}" for name in taibai.CONVERSIONS]
    assert sorted(headings) == sorted([*(taibai.COMMANDS.keys() - {"convert"}), *conversions])
    assert "|  |\n" not in page  # every argument has a meaning


def test_parser_of_a_command_has_its_arguments():
    parser = command_reference.parser_of("checkpoint", "checkpoint")
    assert parser.prog == "taibai checkpoint"
    names = [name for name, _ in command_reference._subparsers(parser)]
    assert names == ["ls", "verify", "show"]


def test_picture_of_the_idea_is_current():
    message = "run `python -m docs.draw_idea`"
    assert draw_idea.PICTURE.read_text(encoding="utf-8") == draw_idea.draw(), message


def test_picture_of_the_idea_shows_the_shapes_that_the_rules_give():
    spec = to_spec(tuple(draw_idea.KERNEL), DEFAULT_RULES)
    assert spec[0] == "pipeline" and spec[2] == "model"
    assert draw_idea.shard_shape() == [2, 128, 256]
