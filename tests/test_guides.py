"""The guides show files that the test suite runs, every file, link, and command of a page exists, and examples run.

docs/deviations.md and docs/equations.md match the code.
"""

import doctest
import importlib
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pages
import pytest

import tvr_lightning.methods
from tvr_lightning.cli.commands import COMMANDS, CommandParser
from tvr_lightning.reproduce.published import published_rows

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- file: (?P<path>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)
NAMED = re.compile(r"`((?:tvr_lightning|recipes|tests|docs|benchmarks)/[\w./-]+\.(?:py|yaml|md|safetensors))`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SHOWN = {
    "adding-a-method.md": {
        "dual_softmax_loss.py", "dual_softmax_loss.yaml", "query_scoring.py", "query_scoring.yaml",
        "test_query_scoring.py", "centering.py", "scaled_outputs.py", "scaled_outputs.yaml",
    },
    "adding-a-dataset.md": {"csv_dataset.py", "csv_dataset.yaml", "test_csv_dataset.py", "folder.yaml"},
    "adding-an-encoder.md": {"color_grid_encoder.py", "color_grid_encoder.yaml", "test_color_grid_encoder.py"},
}  # fmt: skip
RUN_OPTIONS = {
    "--config", "--ckpt_path", "--estimate", "--override", "--help", "--help_all", "--seed_everything",
}  # fmt: skip
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "mechanisms.json").read_text(encoding="utf-8"))
PAPERS = [path.parent for path in sorted(pages.METHODS.glob("*/model.py"))]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
        *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
    )
}  # fmt: skip


@pytest.mark.parametrize("guide", SHOWN)
def test_a_guide_shows_the_current_files(guide):
    shown = {match["path"]: match["text"] for match in BLOCK.finditer(PAGES[f"docs/{guide}"])}
    assert {Path(path).name for path in shown} == SHOWN[guide]
    for path, block in shown.items():
        assert block == (ROOT / path).read_text(encoding="utf-8"), f"docs/{guide} shows another {path}"


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them, and its explicit ones."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    slugs = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_links_of_a_page_exist(page):
    path, text = ROOT / page, PAGES[page]
    links = [((path.parent / target) if target else path, anchor) for target, anchor in LINK.findall(text)]
    assert [name for name in NAMED.findall(text) if not (ROOT / name).exists()] == []
    assert [str(target) for target, _ in links if not target.exists()] == []
    anchored = [(target, anchor) for target, anchor in links if anchor and target.suffix == ".md"]
    assert [f"{target.name}#{anchor}" for target, anchor in anchored if anchor not in anchors_of(target)] == []


def commands_of(page):
    """The `tvr` commands in the fenced blocks of a page, as lists of words."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("tvr ")]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_and_their_options_exist(page):
    commands = {tuple(command.name.split()): command for command in COMMANDS}
    for words in commands_of(page):
        command = commands.get(tuple(words[:2])) or commands.get(tuple(words[:1]))
        assert command is not None, f"tvr {' '.join(words)}"
        known = {*RUN_OPTIONS, *CommandParser(command).known, *(f"--{section}" for section in command.sections)}
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [name for name in options if name not in known and "." not in name] == [], f"tvr {' '.join(words)}"


def test_the_make_targets_of_pages_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page, text in PAGES.items():
        named = re.findall(r"^(?:`)?make ((?:[a-z][a-z0-9-]*\b ?)+)|`make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
        words = {word for pair in named for text in pair for word in text.split()}
        assert {word for word in words if word not in targets} <= {"sure"}, page


def test_the_site_lists_every_page_once():
    # MkDocs itself checks links and anchors (`make docs`); its own YAML tags are not read here.
    pages = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    expected = {page.name for page in (ROOT / "docs").glob("*.md")} | {"index.md", "changelog.md", "contributing.md"}
    assert sorted(pages) == sorted(expected)


def test_the_names_of_the_api_page_exist():
    pattern = r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?"
    for name, members in re.findall(pattern, PAGES["docs/api.md"], re.MULTILINE):
        found = pkgutil.resolve_name(name)
        assert [member for member in members.split(", ") if member and not hasattr(found, member)] == [], name


@pytest.mark.parametrize("name", ["pairwise", "training.losses", "metrics", "evaluation.normalization"])
def test_the_examples_in_docstrings_run(name):
    module = importlib.import_module(f"tvr_lightning.{name}")
    examples = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert examples.attempted
    assert not examples.failed, "see the output"


def test_the_code_of_the_readme_fits_on_the_site():
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGES["README.md"], re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []


def test_the_values_of_a_paragraph_of_the_readme_are_on_the_linked_pages():
    paragraphs = re.split(r"\n\n|\n(?=- )", PAGES["README.md"])
    measured = [each for each in paragraphs if "](benchmarks/results" in each]
    assert len(measured) >= 3
    number = re.compile(r"\d+(?:\.\d+)?")
    for paragraph in measured:
        evidence = "".join((ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"\]\(([^)#]+)", paragraph))
        known = {*number.findall(evidence), "4", "16", "32", "95"}  # CLIP4Clip, float16, float32, the intervals
        words = re.sub(r"\]\([^)]*\)", "", paragraph)
        assert [value for value in number.findall(words) if value not in known] == [], paragraph


def test_the_published_results_of_the_status_page_are_those_of_the_papers():
    row = r"^\| (GARE|TC-MGC|NCL|DPDV|GAID)\b.*?\| ([\d.]+) \| ([\d.]+) \|$"
    shown = re.findall(row, PAGES["docs/status.md"], re.MULTILINE)
    assert len(shown) == 5
    printed = {(row.paper, row.direction, row.printed("R@1")) for row in published_rows() if row.dataset == "MSR-VTT"}
    for paper, text_to_video, video_to_text in shown:
        assert {(paper, "t2v", float(text_to_video)), (paper, "v2t", float(video_to_text))} <= printed


def test_the_committed_pages_match_the_code():
    for name, text in (("deviations", pages.deviations_page(MEASURED)), ("equations", pages.equations_page())):
        assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == text, "run python docs/pages.py"
    assert set(pages.method_files()) == {*tvr_lightning.methods.__all__, "TempMe"}


@pytest.mark.parametrize(
    ("docstring", "message"),
    [
        ("\n\nDeviations:\n- ties: paper silent; released counts.\n", "deviation 'ties"),
        ("\n\nDeviations:\n- ties here expected.\n", "deviation 'ties"),
        ("\n\nDeviations:\n- ties: here one; paper two.\n", "deviation 'ties"),
        ("\n", "no line 'Deviations:'"),
    ],
)
def test_a_malformed_list_of_deviations_is_refused(docstring, message):
    with pytest.raises(ValueError, match=message):
        pages.deviations(f"A method.{docstring}")


@pytest.mark.parametrize("name", ["dual_softmax_loss", "query_scoring"])
def test_the_examples_of_the_guide_list_their_deviations(name):
    assert pages.deviations(pages.docstring(ROOT / "tests" / "examples" / f"{name}.py"))


def test_a_measured_effect_is_shown_with_its_deviation():
    effect = {"method": "GAID", "topic": "gate", "setting": "a setting", "name": "the released gate", "mean": -2.0,
              "half_width": 1.5, "seeds": 5}  # fmt: skip
    page = pages.deviations_page({"leaks": [], "deviations": [effect]})
    (row,) = [line for line in page.splitlines() if line.startswith("| gate |")]
    assert row.endswith("| the released gate: -2.0 [-3.5, -0.5], a setting, 5 seeds |")
    with pytest.raises(ValueError, match="lists no deviation 'color'"):
        pages.deviations_page({"leaks": [], "deviations": [effect | {"topic": "color"}]})


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_link_points_to_a_line_that_names_its_equation(paper):
    found = list(pages.equations(paper))
    assert found
    for _, link in found:
        file, line = link.partition("(../")[2].rstrip(")").split("#L")
        assert "Eq" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1], link
