"""The report: every number on the page is a card's, the page needs nothing else, and bad folders are named."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from browser import open_browser
from run_cards import make_answers, make_card

from tvr_lightning.reproduce.profile.card import ProfileCard, read_profiles, write_profile
from tvr_lightning.reproduce.profile.costs import Costs
from tvr_lightning.reproduce.published import printed_figure, published_rows
from tvr_lightning.reproduce.report.cells import field_of, in_words
from tvr_lightning.reproduce.report.figures.curves import draw_curves
from tvr_lightning.reproduce.report.figures.drawing import Chart, new_figure, styled, to_chart
from tvr_lightning.reproduce.report.figures.kinds import FiguresError, draw, figures_of
from tvr_lightning.reproduce.report.folder import read_folder, views_of
from tvr_lightning.reproduce.report.page import RunSection, page
from tvr_lightning.reproduce.report.report_verb import run_report
from tvr_lightning.reproduce.report.uncertainty import measure
from tvr_lightning.reproduce.runs.card import CardError
from tvr_lightning.reproduce.runs.commands import command_of
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.runs.runner import Folders, run_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[3] / "recipes"
SOURCES = ("data-card", "data-published", "data-figures", "data-profile")
EMPTY = {"meta", "img", "br", "input"}


class Texts(HTMLParser):
    """Every text of a page with the attributes of the elements around it, innermost first."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if data.strip():
            self.found.append((data.strip(), list(reversed(self.open))))


@pytest.fixture
def folder(tmp_path):
    """Cards of three lines of a table with two seeds, one run that failed, and a profile."""
    plan = make_plan([load_table("gare-1", RECIPES)], Setting(RECIPES, tmp_path, fixture_videos=20, seeds=(0, 1)))
    for name, quality in (("clip4clip", 1.0), ("baseline", 1.5), ("gare", 3.0)):
        for place, key in enumerate(plan.chosen[f"gare-1/{name}"]):
            make_card(plan.runs[key], tmp_path / "cards", quality + place)
    key = plan.chosen["gare-1/x-pool"][0]
    make_card(plan.runs[key], tmp_path / "cards", 1.0, status="failed", results=None, error="out of <memory>")
    write_profile(profile("GARE"), tmp_path / "profiles")
    return tmp_path


def profile(method):
    stages = dict.fromkeys(
        ("encode_text", "encode_video", "text_layers", "video_layers", "score", "training_step"), 16_000_000_000
    )
    costs = Costs(92_620_000, 1, {"encoder": 1}, stages, 10.0, 2.0, 1.0, 3.0, 5.0, 700.0, 900.0)
    return ProfileCard(
        method.lower(), method, "ClipEncoder", {}, 16, 1000, 12, 32, 224, 3, "32-true", costs, {"device": "cpu"}
    )


def written(folder):
    assert run_report(folder, RECIPES, tables_only=True) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def comparable(tmp_path):
    """Cards of runs on real data: recalls with differences, sums of both directions, and accuracies."""
    names = {"gare-1": ("clip4clip", "gare"), "tc-mgc-1a": ("tc-mgc",), "gaid-9": ("gaid",), "ncl-1": ("ncl",)}
    plan = make_plan([load_table(name, RECIPES) for name in names], Setting(RECIPES, tmp_path, seeds=(0, 1)))
    for table, runs in names.items():
        for run in runs:
            for place, key in enumerate(plan.chosen.get(f"{table}/{run}", [])):
                if not (tmp_path / "cards" / f"{key}.json").is_file():
                    make_card(plan.runs[key], tmp_path / "cards", 2.0 + place)
    answers = make_plan([load_table("dpdv-s4", RECIPES)], Setting(RECIPES, tmp_path, seeds=(0, 1)))
    for place, run in enumerate(answers.runs.values()):
        make_answers(run, tmp_path / "cards", 19 + place)
    return tmp_path


def drawn_figures(card):
    """Every chart that draws from a few numbers alone, and the arrays."""
    arrays = {
        "similarity.edges": np.linspace(0, 1, 11), "similarity.positive": np.full(10, 0.1),
        "similarity.negative": np.full(10, 0.1), "similarity.positive_mean": np.array(0.6234),
        "similarity.negative_mean": np.array(0.1987), "similarity.overlap": np.array(12.34),
        "curves.train/loss.steps": np.arange(5), "curves.train/loss.values": np.linspace(3.7, 0.9, 5),
        "curves.loss_first": np.array(3.7), "curves.loss_last": np.array(0.9),
        "sheet.captions": np.array(["a red ball"]), "sheet.names": np.array([["own", "other"]]),
        "sheet.score": np.array([[0.25, 0.75]]), "sheet.correct": np.array([[True, False]]),
        "sheet.rank": np.array([3.5]), "sheet.strips": np.zeros((1, 2, 2, 8, 8, 3), np.uint8),
        "sheet.post_processing": np.array(""), "gate.missing": np.array("no sound"),
    }  # fmt: skip
    return [*draw_curves(arrays, card.key, kept=True), *draw(arrays, card.key)], arrays


@pytest.mark.parametrize("name", ["folder", "comparable"])
def test_every_number_of_the_page_is_found_in_a_source(name, request):
    folder = request.getfixturevalue(name)
    cards = read_folder(folder)
    views = views_of(cards, folder, RECIPES)
    parts, arrays = [], {}
    for card in cards.values():
        charts, arrays[card.key] = drawn_figures(card)
        parts.append(RunSection(card, charts, arrays[card.key]))
    profiles = read_profiles(folder / "profiles")
    checked = check_numbers(page(views, parts, profiles=profiles), cards, folder, arrays, views, profiles)
    assert checked["data-card"] > 50
    assert checked["data-published"] > 20
    assert checked["data-figures"] > 7 * len(cards)
    assert checked["words"] > 10
    if name == "folder":
        assert checked["data-profile"] > 5
    else:
        assert checked["minus published"] >= 6
        assert checked["results.sum_of_recalls"] > 0
        assert checked["results.evaluation.accuracy"] > 0


def test_a_number_without_a_source_is_noticed(comparable):
    cards = read_folder(comparable)
    views = views_of(cards, comparable, RECIPES)
    card = next(iter(cards.values()))
    charts, arrays = drawn_figures(card)
    good = page(views, [RunSection(card, charts, arrays)])
    check_numbers(good, cards, comparable, {card.key: arrays}, views, [])
    wrong = {
        "<footer>": "<footer>42.0 ",  # a number by itself
        ">3.7</span>": ">3.6</span>",  # another one than in the file of figures
        'aria-label="Two histograms': 'aria-label="17 histograms',
        "The run&#39;s scores are not": "The run&#39;s 5 scores are not",
    }
    for found, put in wrong.items():
        assert found in good
        with pytest.raises(AssertionError):
            check_numbers(good.replace(found, put), cards, comparable, {card.key: arrays}, views, [])
    difference = re.search(r'minus published" data-published="[^"]*">([^<]*)<', good)
    spoilt = good[: difference.start(1)] + "+99.9" + good[difference.end(1) :]
    with pytest.raises(AssertionError):
        check_numbers(spoilt, cards, comparable, {card.key: arrays}, views, [])


# Words that hold a digit and say nothing measured: what the page, the papers and the machine call things.
ALLOWED = re.compile(
    r"^[123]\. |R@\d+|\bTables? [\w.]+|\bFigures? [\w.]+|\bFigs?\. \w+(?:(?:, (?:and )?| and )\d+\b)*(?: \(a\))?"
    r"|\bEqs?\. \d+(?: to \d+)?|\b95 %|\brank 1\b|\bVideo ?\d|\bt2v|\bv2t|\bseed \d+\b|\bCLIP4Clip\b"
    r"|\bViT-B/\d+|\b(?:TC-MGC|GARE|NCL|DPDV|GAID) \w+"
)


def check_numbers(text, cards, folder, arrays, views, profiles):
    """Assert that every text and every label with a digit has a source; return how many of each kind there were."""
    profiles = {found.name: found for found in profiles}
    rows = {row.place: row for row in published_rows()}
    said = {sentence for view in views for sentence in (view.title, *view.statistics, *view.notes)}
    named = {words for card in cards.values() for words in (card.name, *card.run["claims"], card.error or "")}
    named |= {view.name for view in views} | {
        Path(path).name for card in cards.values() for path in card.run["configs"]
    }
    for row in published_rows():
        named |= {row.full_method, row.method, row.dataset, row.backbone, row.direction}
    fields = ("results.sum_of_recalls", "results.evaluation.accuracy")
    checked = dict.fromkeys((*SOURCES, "minus published", "words", *fields), 0)
    page_texts = Texts(text)
    labels = [attrs[name] for _, attrs in page_texts.tags for name in ("aria-label", "alt", "title") if attrs.get(name)]
    texts = [(label, []) for label in labels] + page_texts.found
    unsourced = []
    for words, around in texts:
        within = {tag for tag, _ in around}
        if not re.search(r"\d", words) or within & {"style", "script", "svg"}:  # ticks and legends are of the drawing
            continue
        sources = next((attrs for _, attrs in around if any(name in attrs for name in SOURCES)), None)
        if sources is None or sources.get("data-of") == "ranks":
            if re.search(r"\d", without_known(words, said | named)):
                unsourced.append(words)
            checked["words"] += 1
            continue
        if "data-figures" in sources:
            _figured(words, arrays[sources["data-figures"]], sources["data-field"])
            checked["data-figures"] += 1
            continue
        if "data-profile" in sources:
            expected = _profiled(profiles[sources["data-profile"]], sources)
        elif "data-card" in sources:
            expected = _carded([cards[key] for key in sources["data-card"].split()], sources, folder)
        elif "data-field" in sources:
            expected = printed_figure(rows[sources["data-published"]].printed(sources["data-field"]))
        else:
            printed_words(words, rows[sources["data-published"]])
            expected = words
        assert words == expected, sources
        checked[next(name for name in SOURCES if name in sources)] += 1
        checked["minus published"] += "minus published" in sources.get("data-of", "")
        for field in fields:
            checked[field] += sources.get("data-field") == field
    assert not unsourced, "these bear no source"
    return checked


def without_known(words, known):
    """What is left of words once those that a table, a card or the print bears, and what is allowed, are gone."""
    for sentence in sorted((one for one in known if one and one in words), key=len, reverse=True):
        words = words.replace(sentence, "")
    return ALLOWED.sub("", words)


def printed_words(words, row):
    """Assert that every number of a line on efficiency is one that the row of the print holds."""
    own = json.dumps([row.extra, row.speed_ms, row.variant, row.paper, row.table])
    numbers = set(re.findall(r"\d+(?:\.\d+)?", own)) | {f"{float(n):g}" for n in re.findall(r"\d+(?:\.\d+)?", own)}
    for number in re.findall(r"\d+(?:\.\d+)?", words):
        assert number in numbers, (words, own)


def _figured(words, arrays, field):
    value = arrays[field.partition("[")[0]]
    for place in re.findall(r"\[(\d+)\]", field):
        value = value[int(place)]
    # As many digits as are shown must be those of the file.
    digits = len(words.partition(".")[2]) if "e" not in words else 0
    assert words in {f"{float(value):.3g}", f"{float(value):g}", f"{float(value):.{digits}f}"}, field


def _carded(cards, sources, folder):
    values = [field_of(card, sources["data-field"]) for card in cards]
    made, published = sources.get("data-of"), 0.0
    if made == "command":
        return command_of(cards[0])
    if made == "YAML":
        return yaml.safe_dump(values[0], sort_keys=False, allow_unicode=True).strip()
    if made == "date":
        return in_words(values[0])
    if made is None:
        return f"{values[0]:.1f}" if sources["data-field"] == "seconds" and "class" not in sources else str(values[0])
    if made.endswith("minus published"):
        made, published = made.partition(" ")[0], float(sources["data-published"])
        assert any(row.recall_1 == published for row in published_rows())
    sign = "+" if published else ""
    if made == "mean":
        return f"{sum(values) / len(values) - published:{sign}.1f}"
    _, direction, metric = sources["data-field"].split(".") if sources["data-field"].count(".") == 2 else (
        "results", "text_to_video", {"results.sum_of_recalls": "SumR"}.get(sources["data-field"], "accuracy")
    )  # fmt: skip
    found = measure(cards, folder / "cards", direction, metric)
    value = found.deviation if made == "deviation" else getattr(found.interval, made)
    return f"{value - published:{sign}.1f}"


def _profiled(card, sources):
    value = card
    for name in sources["data-field"].split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    made = sources.get("data-of")
    if made == "inference per pair, G":
        items = sum(flops for stage, flops in value.items() if stage not in ("training_step", "score"))
        value = (items / card.batch + value["score"] / card.batch**2) / 1e9  # score: all pairs of the batch
    elif made in ("G", "M"):
        value = value / (1e9 if made == "G" else 1e6)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def test_statistics_and_notes_are_those_of_the_tables(folder):
    shown = [text for text, _ in Texts(written(folder)).found]
    (view,) = views_of(read_folder(folder), folder, RECIPES)
    assert view.statistics
    for sentence in view.statistics:
        assert sentence in shown
    assert any("out of <memory>" in text for text in shown)


def test_efficiency_columns_set_profiles_beside_the_print(folder):
    text = written(folder)
    lines = [line for line in Texts(text).found if "Total 11,905.05" in line[0]]
    assert lines
    assert 'data-profile="gare"' in text
    (folder / "profiles" / "gare.json").unlink()
    assert "Cost of the methods" not in written(folder)


def test_all_four_formats_hold_every_table(folder):
    written(folder)
    rows = list(csv.DictReader((folder / "report.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["run"] for row in rows if row["measured"]} == {"clip4clip", "baseline", "gare"}
    assert "## GARE, Table 1" in (folder / "report.md").read_text(encoding="utf-8")
    assert r"\toprule" in (folder / "report.tex").read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(folder):
    for tag, attrs in Texts(written(folder)).tags:
        assert tag not in ("link", "iframe")
        assert tag != "script" or "src" not in attrs
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)


def test_a_run_made_for_one_table_stands_for_its_lines_in_a_later_one_too(tmp_path):
    plan = make_plan([load_table("gaid-1", RECIPES)], Setting(RECIPES, tmp_path, fixture_videos=20), ["x-pool"])
    (run,) = plan.runs.values()
    make_card(replace(run, claims=["gaid-1/x-pool"]), tmp_path / "cards", 1.0)
    later = make_plan([load_table("gaid-1", RECIPES)], plan.setting, ["x-pool", "x-pool-b16"])
    run_plan(later, Folders(tmp_path), lambda line: None)
    (card,) = read_folder(tmp_path).values()
    assert card.run["claims"] == ["gaid-1/x-pool", "gaid-1/x-pool-b16"]
    (view,) = views_of(read_folder(tmp_path), tmp_path, RECIPES)
    assert {line.published.backbone for line in view.lines if line.cards} == {"ViT-B/32", "ViT-B/16"}


def test_bad_folders_are_named(folder, tmp_path_factory):
    with pytest.raises(CardError, match="no run cards"):
        read_folder(tmp_path_factory.mktemp("empty"))
    with pytest.raises(CardError, match="no card belongs to a row"):
        views_of({}, folder, RECIPES)
    path = next(path for path in (folder / "cards").glob("*.json"))
    raw = json.loads(path.read_text())
    raw["key"] = "another"
    (folder / "cards" / "another.json").write_text(json.dumps(raw))
    (folder / "cards" / "another.parquet").write_bytes(path.with_suffix(".parquet").read_bytes())
    with pytest.raises(CardError, match="are both cards of the run"):
        read_folder(folder)
    (folder / "cards" / "another.json").write_text("{")
    with pytest.raises(CardError, match="is incomplete"):
        read_folder(folder)


def test_a_half_written_profile_is_named(folder):
    path = folder / "profiles" / "gare.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CardError, match="is incomplete"):
        read_profiles(folder / "profiles")
    path.write_text('{"schema": 99}')
    with pytest.raises(CardError, match="schema 99"):
        read_profiles(folder / "profiles")


def test_a_run_whose_weights_are_gone_is_shown_without_figures(folder, capsys):
    assert run_report(folder, RECIPES) == 0
    assert "are missing" in capsys.readouterr().out
    assert "No figures: the weights" in (folder / "report.html").read_text(encoding="utf-8")


def test_damaged_figures_are_named(folder):
    card = next(card for card in read_folder(folder).values() if card.status == "finished")
    place = folder / "figures" / f"{card.key}.npz"
    place.parent.mkdir()
    place.write_bytes(b"PK half a file")
    with pytest.raises(FiguresError, match="damaged"):
        figures_of(card, place.parent)


@styled
def drawn(name):
    figures, (axis,) = new_figure(1)
    axis.plot([0, 1], [1, 2], label="line")
    axis.legend()
    axis.twinx().set_ylabel("other")
    return to_chart(figures, name, 'From "one" to two')


def test_two_drawings_share_a_page_without_sharing_ids():
    first, second = drawn("a").svg, drawn("b").svg
    ids = [set(re.findall(r'\bid="([^"]*)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for name in re.findall(r"url\(#([^)]*)\)", first):
        assert name in ids[0]
    assert 'aria-label="From &#34;one&#34; to two"' in page([], [], [drawn("a")])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_a_phone_in_the_dark_reads_the_page_offline(browser, folder):
    cards = read_folder(folder)
    parts = [RunSection(card, [drawn(card.key), Chart("Wide", "words", html="<p>x</p>")]) for card in cards.values()]
    path = folder / "report.html"
    path.write_text(page(views_of(cards, folder, RECIPES), parts), encoding="utf-8")
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    browser.get(path.as_uri())
    assert browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true); return 1") == 1
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in ground[4:-1].split(",")) < 64
    words = "return [...document.querySelectorAll('.chart svg text')].map(t => getComputedStyle(t).fill)"
    for colour in browser.execute_script(words):
        assert min(int(part) for part in colour[4:-1].split(",")) > 128
    unnamed = "return [...document.querySelectorAll('img, svg[role=img]')].filter(e => !e.alt && !e.ariaLabel).length"
    assert browser.execute_script(unnamed) == 0
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("own", ["gare.yaml", "short.yaml"])
def test_runs_under_an_overlay_are_not_compared_whatever_it_is_called(tmp_path, own):
    overlay = tmp_path / own
    overlay.write_text("trainer: {max_epochs: 1}\n")
    plan = make_plan([load_table("gare-1", RECIPES)], Setting(RECIPES, tmp_path, overlay=overlay))
    (key,) = plan.chosen["gare-1/gare"]
    make_card(plan.runs[key], tmp_path / "cards", 1.0)
    (view,) = views_of(read_folder(tmp_path), tmp_path, RECIPES)
    assert not view.comparable
    assert str(overlay) in view.title


def test_runs_without_an_overlay_are_compared(tmp_path):
    plan = make_plan([load_table("gare-1", RECIPES)], Setting(RECIPES, tmp_path))
    (key,) = plan.chosen["gare-1/gare"]
    make_card(plan.runs[key], tmp_path / "cards", 1.0)
    (view,) = views_of(read_folder(tmp_path), tmp_path, RECIPES)
    assert view.comparable
