"""The pages: every link and anchor leads somewhere, every snippet is Python, and the reference names what is public."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import anon_optim

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/**/*.md")),
]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", FENCED.sub("", page.read_text())):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_are_python(page):
    for language, code in FENCED.findall(page.read_text()):
        if language == "python":
            lines = code.split("\n")
            indent = len(lines[0]) - len(lines[0].lstrip())
            ast.parse("\n".join(line[indent:] for line in lines))


def test_the_site_has_every_page_and_every_public_name():
    class Loader(yaml.SafeLoader):
        """Of which the one function in the file is only a name."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    pages = {page for entry in site["nav"] for each in entry.values() for page in flat(each)}
    assert pages >= {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")}
    assert all((ROOT / page).exists() for page in pages - {"docs/reference.md"})

    hooks = ast.parse((ROOT / "docs" / "hooks.py").read_text())
    (public,) = (node.value for node in hooks.body if isinstance(node, ast.Assign) and node.targets[0].id == "PUBLIC")
    listed = [name for module, names in ast.literal_eval(public) for name in names.split() if module == "anon_optim"]
    assert sorted(listed) == sorted(anon_optim.__all__)


def flat(entry):
    return [entry] if isinstance(entry, str) else [page for each in entry for page in each.values()]
