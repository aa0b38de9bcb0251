"""The page as a reader uses it: sorted, filtered, followed, browsed by query, with the keyboard alone, on a phone."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from browser import open_browser, wait
from run_cards import make_card

from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.reproduce.report.contests import as_json, contests_of
from tvr_lightning.reproduce.report.figures.curves import draw_curves, draw_overlaid
from tvr_lightning.reproduce.report.figures.kinds import draw
from tvr_lightning.reproduce.report.folder import read_folder, views_of
from tvr_lightning.reproduce.report.leaderboard import leaderboard
from tvr_lightning.reproduce.report.page import RunSection, page
from tvr_lightning.reproduce.report.report_verb import run_report
from tvr_lightning.reproduce.runs.card import card_path, ranks_path, read_ranks, write_ranks
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[3] / "recipes"
RUNS = {"gare-1": ("clip4clip", "gare"), "tc-mgc-1a": ("tc-mgc", "tc-mgc-b16"), "gaid-1": ("gaid-didemo",)}
AXE = Path(os.environ.get("TVR_AXE", ""))
"""File axe.min.js of the npm package axe-core."""
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
VIDEOS = ("video1", "video2</script>")


def drawn_arrays(place):
    """Arrays of a few figures, the run's failures among them."""
    return {
        "curves.train/loss.steps": np.arange(5), "curves.train/loss.values": np.linspace(3 + place, 1, 5),
        "curves.loss_first": np.array(3.0 + place), "curves.loss_last": np.array(1.0),
        "sheet.captions": np.array(["a red ball"]), "sheet.names": np.array([["own", "other"]]),
        "sheet.score": np.array([[0.25, 0.75]]), "sheet.correct": np.array([[True, False]]),
        "sheet.rank": np.array([3.5]), "sheet.strips": np.zeros((1, 2, 2, 8, 8, 3), np.uint8),
        "sheet.post_processing": np.array(""),
        "failures.query": np.arange(60), "failures.captions": np.array([f"caption <{query}>" for query in range(60)]),
        "failures.right": np.full(60, VIDEOS[0]), "failures.wrong": np.full(60, VIDEOS[1]),
        "failures.names": np.array(VIDEOS), "failures.strips": np.full((2, 2, 8, 8, 3), 200, np.uint8),
    }  # fmt: skip


def sections_of(cards):
    """What the page says of each run, with figures."""
    found = []
    for place, card in enumerate(cards.values()):
        arrays = drawn_arrays(place)
        charts = draw_curves(arrays, card.key, kept=True) + draw(arrays, card.key)
        found.append(RunSection(card, charts, arrays, arrays))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cards of five runs of two datasets and two backbones."""
    out = tmp_path_factory.mktemp("report")
    plan = make_plan([load_table(name, RECIPES) for name in RUNS], Setting(RECIPES, out))
    for place, claim in enumerate(f"{table}/{run}" for table, runs in RUNS.items() for run in runs):
        (key,) = plan.chosen[claim]
        make_card(plan.runs[key], out / "cards", 1.0 + 0.6 * place)
        if place == 1:  # one that fails on other queries than the rest
            found = {kind: read_ranks(key, out / "cards", kind) for kind in ("text_to_video", "video_to_text")}
            turned = {
                kind: (Ranks(better=ranks.better.flip(0), tied=ranks.tied.flip(0), index=ranks.index), video)
                for kind, (ranks, video) in found.items()
            }
            write_ranks(ranks_path(card_path(out / "cards", key)), turned)
    cards = read_folder(out)
    sections = sections_of(cards)
    runs = [(section.card, section.arrays) for section in sections]
    made = page(views_of(cards, out, RECIPES), sections, draw_overlaid(runs), (), contests_of(runs, out / "cards"))
    (out / "report.html").write_text(made, encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def browser(driver, folder):
    """The page, freshly opened on a wide screen."""
    return opened(driver, folder, 1400)


def opened(driver, folder, width):
    phone = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    driver.get("about:blank")
    driver.get((folder / "report.html").as_uri())
    return driver


def press(browser, key):
    """Press a key where the focus is."""
    pressed = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
    text = {"Enter": "\r", " ": " "}.get(key)
    browser.execute_cdp_cmd(
        "Input.dispatchKeyEvent", {"type": "keyDown", **pressed, **({"text": text} if text else {})}
    )
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", **pressed})


def lines(browser):
    """Cells of the leaderboard's shown lines."""
    shown = "return [...document.querySelectorAll('.board tbody tr')].filter(l => l.checkVisibility())"
    return browser.execute_script(f"{shown}.map(line => [...line.cells].map(cell => cell.innerText.trim()))")


def find(browser, css):
    return browser.find_element("css selector", css)


def test_the_leaderboard_has_every_run_once_and_the_best_first(folder):
    entries = [entry for entry in leaderboard(views_of(read_folder(folder), folder, RECIPES)) if entry.cards]
    keys = [entry.cards[0].key for entry in entries]
    assert sorted(keys) == sorted(read_folder(folder))
    measured = [entry.measured("t2v") for entry in entries]
    assert measured == sorted(measured, reverse=True)
    # GAID, Table 1 prints text to video alone; its run measured both directions.
    (entry,) = [entry for entry in entries if entry.view.name == "gaid-1"]
    assert entry.published("v2t") is None
    assert entry.measured("v2t") == entry.cards[0].metrics("video_to_text")["R@1"]


def test_a_heading_sorts_by_its_column_one_way_and_the_other(browser):
    numbers = [float(line[4].split()[0]) for line in lines(browser)]
    assert len(numbers) == 5
    assert numbers == sorted(numbers, reverse=True)
    headings = browser.find_elements("css selector", ".board th[aria-sort]")
    headings[4].find_element("css selector", "button").click()
    assert [float(line[4].split()[0]) for line in lines(browser)] == sorted(numbers)
    assert headings[4].get_attribute("aria-sort") == "ascending"
    headings[0].find_element("css selector", "button").click()
    names = [line[0].lower() for line in lines(browser)]
    assert names == sorted(names)
    assert headings[4].get_attribute("aria-sort") == "none"


def test_what_has_no_number_stays_below_whichever_way_the_others_are_sorted(browser):
    find(browser, "input[name=measured]").click()
    button = browser.find_elements("css selector", ".board th[aria-sort] button")[4]
    for _ in range(2):
        button.click()
        found = [not line[4][0].isdigit() for line in lines(browser)]
        assert not any(found[:5])
        assert all(found[5:])


def test_filters_leave_what_they_name_and_say_how_much(browser):
    find(browser, "select[name=dataset] option:nth-child(2)").click()
    (chosen,) = {line[1] for line in lines(browser)}
    assert chosen == find(browser, "select[name=dataset]").get_attribute("value")
    measured = len(lines(browser))
    assert find(browser, "#filters output").text.startswith(f"{measured} of ")
    find(browser, "input[name=measured]").click()
    assert len(lines(browser)) > measured
    find(browser, "select[name=dataset] option:nth-child(1)").click()
    every = len(lines(browser))
    browser.find_element("xpath", "//select[@name='backbone']/option[.='ViT-B/16']").click()
    assert {line[2] for line in lines(browser)} == {"ViT-B/16"}
    assert len(lines(browser)) < every


@pytest.mark.parametrize("part", ["run", "recipe", "command"])
def test_links_of_a_line_open_what_they_name(browser, part):
    link = find(browser, f".block a[href^='#{part}-']")
    name = link.get_attribute("href").partition("#")[2]
    assert browser.execute_script("return document.querySelectorAll('details[open]').length") == 0
    link.click()
    seen = """const found = document.getElementById(arguments[0]), place = found.getBoundingClientRect();
        return found.checkVisibility({checkVisibilityCSS: true}) && place.height > 0 && place.top >= 0
            && place.top < innerHeight"""
    assert wait(browser, lambda driver: driver.execute_script(seen, name))
    if part == "recipe":
        assert "seed_everything" in find(browser, f"#{name}").text


def test_links_save_the_table(browser, folder):
    fetched = "return fetch(arguments[0].href).then(answer => answer.text())"
    link = find(browser, "a[download='gare-1.csv']")
    assert browser.execute_script(fetched, link).startswith("title,method,")
    assert r"\toprule" in browser.execute_script(fetched, find(browser, "a[download='gare-1.tex']"))


def test_no_column_is_cut_and_citations_are_words(browser):
    cut = "return [...document.querySelectorAll('.block, .board')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.execute_script(cut) == 0
    assert "Luo et al., Neurocomputing 22" in browser.page_source
    assert "luo2022clip4clip" not in browser.execute_script("return document.body.innerText")


def test_dates_are_for_people_and_tables_are_called_by_their_titles(browser):
    assert "Newest run\n20 November 2026, 13:42 UTC" in find(browser, "header").text
    assert "2026-11-20T" not in find(browser, "body").text
    headings = {heading.text for heading in browser.find_elements("css selector", "h2")}
    assert {link.text for link in browser.find_elements("css selector", "nav a")} == headings


def test_no_name_is_broken_on_a_phone(driver, folder):
    broken = """
        return [...document.querySelectorAll('tbody th.name')].filter(cell => cell.checkVisibility()).flatMap(cell => {
          const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
          for (let text; (text = walk.nextNode());)
            for (const word of text.data.matchAll(/\\S+/g)) {
              const range = document.createRange();
              range.setStart(text, word.index);
              range.setEnd(text, word.index + word[0].length);
              const lines = new Set([...range.getClientRects()].map(r => r.top)).size;
              if (!/[-/]/.test(word[0]) && lines > 1) found.push(word[0]);
            }
          return found;
        })"""
    assert opened(driver, folder, 390).execute_script(broken) == []


def test_a_phone_keeps_the_method_in_view_while_columns_pass(driver, folder):
    browser = opened(driver, folder, 390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    where = """const table = document.querySelector('.block'), method = table.querySelector('tbody th');
        table.scrollLeft = 300; return [table.scrollLeft, method.getBoundingClientRect().left, method.offsetWidth]"""
    passed, left, width = browser.execute_script(where)
    assert passed == 300
    assert 0 <= left < 40
    assert width < 200


def test_figures_are_in_view_and_grow_on_a_key(browser):
    hidden = "return [...document.querySelectorAll('.chart')].filter(e => !e.checkVisibility()).length"
    assert browser.execute_script(hidden) == 0
    unnamed = """return [...document.querySelectorAll('.chart, button, select, input, img, [tabindex="0"]')].filter(
        e => !(e.ariaLabel || e.alt || e.innerText || e.labels?.length)).map(e => e.outerHTML)"""
    assert browser.execute_script(unnamed) == []
    browser.execute_script("document.querySelector('.run .chart').focus()")
    press(browser, "Enter")
    title = browser.execute_script("return document.activeElement.closest('dialog').querySelector('.chart').ariaLabel")
    assert title == "Training curves"
    press(browser, "Escape")
    assert browser.execute_script("return document.querySelector('dialog').open") is False
    assert browser.execute_script("return document.activeElement.ariaLabel") == "Training curves"


def test_curves_of_runs_share_an_axis_and_a_box_hides_one(browser):
    boxes = browser.find_elements("css selector", ".overlaid input")
    shown = """return [...document.querySelectorAll('.overlaid svg [class^=curve-]')].filter(
        curve => getComputedStyle(curve).display !== 'none').length"""
    before = browser.execute_script(shown)
    assert before == len(boxes) == 5
    boxes[0].click()
    assert browser.execute_script(shown) == before - 1
    boxes[0].click()
    assert browser.execute_script(shown) == before


def test_queries_are_those_on_which_one_run_beats_the_other(browser, folder):
    section = find(browser, ".contest")
    for name, run in (("first", "gare-1/gare"), ("second", "tc-mgc-1a/tc-mgc")):
        section.find_element("xpath", f".//select[@name='{name}']/option[.='{run}']").click()
    ranks = {}
    for key, card in read_folder(folder).items():
        found, _ = read_ranks(key, folder / "cards", "text_to_video")
        ranks[card.words] = found.expected()
    names = [
        option.text
        for option in section.find_elements("css selector", "option:checked")
    ]  # fmt: skip
    for (winner, loser), heading in zip((names, names[::-1]), section.find_elements("css selector", "h4"), strict=True):
        assert heading.text == f"{winner} beats {loser}"
        block = heading.find_element("xpath", "..")
        higher = {int(query) for query in (ranks[winner] < ranks[loser]).nonzero()}
        shown = [item for item in block.find_elements("css selector", "li") if item.is_displayed()]
        assert len(shown) == min(6, len(higher))
        if len(higher) > 6:
            more = block.find_element("css selector", "button")
            assert more.text == f"Show {len(higher) - 6} more"
            more.click()
            assert not more.is_displayed()
            assert browser.switch_to.active_element == block.find_elements("css selector", "li")[6]
        captions = {item.text for item in block.find_elements("css selector", "li strong")}
        assert captions == {f"“caption <{query}>”" for query in higher}
        assert f"on {len(higher)} of 60 queries:" in block.text
        first = block.find_element("css selector", "li")
        assert [figure.text for figure in first.find_elements("css selector", "figcaption")] == [
            f"right: {VIDEOS[0]}",
            f"{loser} found {VIDEOS[1]}",
        ]
        loaded = (
            "return [...arguments[0].querySelectorAll('img')].every(i => i.complete && i.naturalWidth === 16 && i.alt)"
        )
        assert browser.execute_script(loaded, first)
    section.find_element("css selector", "button").click()
    assert find(browser, ".contest h4").text == f"{names[1]} beats {names[0]}"


def test_a_caption_cannot_end_the_element_that_it_stands_in(folder):
    cards = read_folder(folder)
    (contest, *_) = contests_of([(card, drawn_arrays(0)) for card in cards.values()], folder / "cards")
    assert "</script>" in str(contest.failures)
    assert "<" not in as_json(contest)


def test_the_keyboard_alone_sorts_filters_and_follows(browser):
    reached = []
    for _ in range(60):
        press(browser, "Tab")
        active = browser.switch_to.active_element
        reached.append(active.get_attribute("name") or active.text or active.get_attribute("aria-label"))
        if active.get_attribute("name") == "measured":
            before = len(lines(browser))
            press(browser, " ")
            assert len(lines(browser)) > before
            press(browser, " ")
            assert len(lines(browser)) == before
        if active.text.startswith("method"):
            press(browser, "Enter")
            assert active.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
        if (active.get_attribute("href") or "").partition("#")[2].startswith("run-"):
            press(browser, "Enter")
            assert browser.current_url == active.get_attribute("href")
            break
    assert {"Skip to the leaderboard", "measured", "dataset", "backbone", "Leaderboard"} <= set(reached)
    assert "#run-" in browser.current_url


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(driver, folder, width, scheme):
    if not AXE.is_file():
        pytest.skip("no axe-core: unpack `npm pack axe-core` and set TVR_AXE to its axe.min.js")
    colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
    browser = opened(driver, folder, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert len(found["passes"]) > 20
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert not [(one["id"], one["nodes"][0]["html"]) for one in serious]


def test_a_page_of_tables_alone_has_no_browser_of_queries(folder, tmp_path):
    shutil.copytree(folder / "cards", tmp_path / "cards")
    assert run_report(tmp_path, RECIPES, tables_only=True) == 0
    assert 'class="contest"' not in (tmp_path / "report.html").read_text(encoding="utf-8")
