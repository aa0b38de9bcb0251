"""The report in a browser: sorting, comparing runs by query, the keyboard, a phone, and dark mode."""

import numpy as np
import pytest

pytest.importorskip("selenium", reason="selenium drives the browser")
from browser import find, needs_axe, violations, wait
from run_cards import RECIPES, keys_of, make_card, plan_of

from tvr_lightning.evaluation.intervals import write_ranks
from tvr_lightning.ranks import Ranks
from tvr_lightning.reproduce.report.site import Site, leaderboards, views_of
from tvr_lightning.reproduce.report.sources import read_ranks, read_runs

RUNS = {"gare-1": ("clip4clip", "gare"), "tc-mgc-1a": ("tc-mgc", "tc-mgc-b16"), "gaid-1": ("gaid-didemo",)}
VIDEOS = ("video1", "video2</script>")
ARRAYS = {
    "sheet.captions": np.array(["a red ball"]), "sheet.names": np.array([["own", "other"]]),
    "sheet.score": np.array([[0.25, 0.75]]), "sheet.correct": np.array([[True, False]]),
    "sheet.rank": np.array([3.5]), "sheet.strips": np.zeros((1, 2, 2, 8, 8, 3), np.uint8),
    "sheet.post_processing": np.array(""), "similarity.edges": np.linspace(0, 1, 11),
    "similarity.positive": np.full(10, 0.1), "similarity.negative": np.full(10, 0.1),
    "similarity.positive_mean": np.array(0.6234), "similarity.negative_mean": np.array(0.1987),
    "similarity.overlap": np.array(12.34), "gate.missing": np.array("no sound"),
    "failures.query": np.arange(60), "failures.captions": np.array([f"caption <{query}>" for query in range(60)]),
    "failures.right": np.full(60, VIDEOS[0]), "failures.wrong": np.full(60, VIDEOS[1]),
    "failures.names": np.array(VIDEOS), "failures.strips": np.full((2, 2, 8, 8, 3), 200, np.uint8),
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Report of five runs of two datasets and two backbones; the second fails on other queries than the rest."""
    out = tmp_path_factory.mktemp("report")
    claims = [f"{table}/{run}" for table, runs in RUNS.items() for run in runs]
    plan = plan_of(" ".join(RUNS), out, claims)
    for place, key in enumerate(dict.fromkeys(key for claim in claims for key in keys_of(plan, claim))):
        make_card(plan.runs[key], out / "cards", 1.0 + 0.6 * place % 3)
        if place == 1:
            run, turned = next(run for run in read_runs(out) if run.key == key), {}
            for kind in ("text_to_video", "video_to_text"):
                ranks, video = read_ranks(run, kind)
                turned[kind] = Ranks(better=ranks.better.flip(0), tied=ranks.tied.flip(0), index=ranks.index), video
            write_ranks(run.ranks, turned)
    rows = [f"0,{step},{3 - step / 5}" for step in range(10)]
    (out / "metrics.csv").write_text("\n".join(["epoch,step,train/loss", *rows]))
    runs = read_runs(out)
    for run in runs:
        run.log = out / "metrics.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvr_lightning.reproduce.report.sources.RESAMPLES", 100)
        Site(out / "report", views_of(runs, RECIPES), runs, {run.key: ARRAYS for run in runs}).write()
    return out, runs


def opened(driver, folder, page="index.html", width=1400):
    phone = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    driver.get("about:blank")
    driver.get((folder / "report" / page).as_uri())
    return driver


def test_each_run_is_in_the_leaderboard_of_its_dataset_once(site):
    folder, runs = site
    boards = leaderboards(views_of(runs, RECIPES), runs)
    assert set(boards) == {"MSR-VTT", "DiDeMo"}
    keys = [run.key for _, own in boards.values() for run in own]
    assert sorted(keys) == sorted(run.key for run in runs)
    # GAID, Table 1 publishes only text to video; its run measured both directions.
    table, (run,) = boards["DiDeMo"]
    assert ("video to text", "published") not in table
    assert table["video to text", "R@1"].iloc[0].startswith(f"{run.card.metrics('video_to_text')['R@1']:.1f} [")
    charts = [path.read_text() for path in (folder / "report" / "tables").glob("tc-mgc-1a-*.svg")]
    (curves,) = [svg for svg in charts if "training loss" in svg]
    assert "tc-mgc-1a/tc-mgc-b16" in curves
    page = (folder / "report" / "tables" / "gare-1.html").read_text(encoding="utf-8")
    assert "Luo et al., Neurocomputing 22" in page
    assert "luo2022clip4clip" not in page


def test_a_heading_sorts_its_column_in_both_orders(driver, site):
    browser = opened(driver, site[0])
    script = """return [...document.querySelector('.sorted').tBodies[0].rows].map(
        line => [...line.cells].map(cell => cell.innerText.trim()))"""

    def column(number):
        return [line[number] for line in browser.execute_script(script)]

    assert "Newest run 20 November 2026, 13:42 UTC" in " ".join(find(browser, "main").text.split())
    assert "2026-11-20T" not in find(browser, "body").text
    numbers = [float(cell.split()[0]) for cell in column(1)]
    assert len(numbers) == 4
    assert numbers == sorted(numbers, reverse=True)
    headings = browser.find_elements("css selector", ".sorted th[aria-sort]")
    buttons = [heading.find_element("css selector", "button") for heading in headings]
    buttons[1].click()
    assert [float(cell.split()[0]) for cell in column(1)] == sorted(numbers)
    assert headings[1].get_attribute("aria-sort") == "ascending"
    buttons[0].click()
    assert column(0) == sorted(column(0), key=str.lower)
    assert headings[1].get_attribute("aria-sort") == "none"
    browser.execute_script("document.querySelector('.sorted').tBodies[0].rows[0].cells[2].textContent = '-'")
    for _ in range(2):
        buttons[2].click()
        assert [cell == "-" for cell in column(2)] == [False, False, False, True], "no number sorts last"


def test_queries_are_listed_if_one_of_two_runs_is_better(driver, site):
    folder, runs = site
    section = find(opened(driver, folder, "queries.html"), ".contest")
    for name, run in (("first", "gare-1/gare"), ("second", "tc-mgc-1a/tc-mgc")):
        section.find_element("xpath", f".//select[@name='{name}']/option[.='{run}']").click()
    ranks = {run.title: read_ranks(run, "text_to_video")[0].expected() for run in runs}
    names = [option.text for option in section.find_elements("css selector", "option:checked")]
    for (better, worse), heading in zip((names, names[::-1]), section.find_elements("css selector", "h3"), strict=True):
        assert heading.text == f"{better} against {worse}"
        block = heading.find_element("xpath", "..")
        higher = {int(query) for query in (ranks[better] < ranks[worse]).nonzero()}
        assert higher
        shown = [item for item in block.find_elements("css selector", "li") if item.is_displayed()]
        assert len(shown) == min(6, len(higher))
        if len(higher) > 6:
            more = block.find_element("css selector", "button")
            assert more.text == f"Show {len(higher) - 6} more"
            more.click()
            assert not more.is_displayed()
            assert driver.switch_to.active_element == block.find_elements("css selector", "li")[6]
        captions = {item.text for item in block.find_elements("css selector", "li strong")}
        assert captions == {f"“caption <{query}>”" for query in higher}
        assert f"on {len(higher)} of 60 queries:" in block.text
        first = block.find_element("css selector", "li")
        assert [figure.text for figure in first.find_elements("css selector", "figcaption")] == [
            f"right: {VIDEOS[0]}",
            f"{worse} found {VIDEOS[1]}",
        ]
        loaded = "return [...arguments[0].querySelectorAll('img')].every(i => i.complete && i.naturalWidth && i.alt)"
        assert wait(driver, lambda browser: browser.execute_script(loaded, first))  # noqa: B023  called at once
    section.find_element("css selector", "button").click()
    assert find(driver, ".contest h3").text == f"{names[1]} against {names[0]}"


@needs_axe
@pytest.mark.parametrize("width", [390, pytest.param(1400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow)])
def test_axe_finds_no_serious_violation(driver, site, scheme, width):
    colors = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", colors)
    folder, runs = site
    for page in ("index.html", "tables/gare-1.html", f"runs/{runs[0].key}.html", "queries.html"):
        browser = opened(driver, folder, page, width)
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert violations(browser) == [], page
