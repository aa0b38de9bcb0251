"""The guides show files that the test suite runs, and every file and link that a page names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- file: (?P<path>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
NAMED = re.compile(r"`((?:tvr_lightning|recipes|tests|docs|benchmarks)/[\w./-]+\.(?:py|yaml|md|safetensors))`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
EXAMPLES = "tests/examples"
SHOWN = {
    "adding-a-method.md": {
        f"{EXAMPLES}/dual_softmax_loss.py",
        f"{EXAMPLES}/dual_softmax_loss.yaml",
        f"{EXAMPLES}/query_scoring.py",
        f"{EXAMPLES}/query_scoring.yaml",
        f"{EXAMPLES}/test_query_scoring.py",
    },
    "adding-a-dataset.md": {
        f"{EXAMPLES}/csv_dataset.py",
        f"{EXAMPLES}/csv_dataset.yaml",
        f"{EXAMPLES}/test_csv_dataset.py",
        "tvr_lightning/data/video_folder.py",
        "recipes/data/folder.yaml",
    },
    "adding-an-encoder.md": {
        f"{EXAMPLES}/colour_grid_encoder.py",
        f"{EXAMPLES}/colour_grid_encoder.yaml",
        f"{EXAMPLES}/test_colour_grid_encoder.py",
    },
}
PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("guide", SHOWN)
def test_a_guide_shows_the_current_files(guide):
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    shown = {match["path"]: match["text"] for match in BLOCK.finditer(text)}
    assert set(shown) == SHOWN[guide]
    for path, block in shown.items():
        assert block == (ROOT / path).read_text(encoding="utf-8"), f"docs/{guide} shows another {path}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them, and its explicit ones."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    slugs = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_links_of_a_page_exist(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    named = NAMED.findall(text)
    links = [((path.parent / target) if target else path, anchor) for target, anchor in LINK.findall(text)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [str(target) for target, _ in links if not target.exists()] == []
    anchored = [(target, anchor) for target, anchor in links if anchor and target.suffix == ".md"]
    assert [f"{target.name}#{anchor}" for target, anchor in anchored if anchor not in anchors_of(target)] == []


def test_most_pages_name_files():
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    assert sum(bool(NAMED.search(text) or LINK.search(text)) for text in texts) > len(PAGES) / 2
