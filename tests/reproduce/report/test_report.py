"""The pages of the report: their values, links, and images, and errors for bad folders."""

import csv
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from run_cards import RECIPES, keys_of, make_answers, make_card, plan_of

from tvr_lightning.cli.tables import report as run_report
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.profile.costs import Costs, ProfileCard, read_profiles
from tvr_lightning.reproduce.published import PRINTED, printed_figure, published_rows
from tvr_lightning.reproduce.report import sources
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.site import views_of
from tvr_lightning.reproduce.report.sources import measure, read_runs
from tvr_lightning.reproduce.runs.card import write_record
from tvr_lightning.reproduce.runs.runner import run_plan

pytestmark = pytest.mark.usefixtures("few_resamples")


class Page(HTMLParser):
    """Tags with their attributes, and the texts of table cells by row."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.rows, self.cell = [], [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data


def write_cards(folder, qualities, **setting):
    plan = plan_of("gare-1", folder, seeds=(0, 1), **setting)
    for name, quality in qualities.items():
        for place, key in enumerate(keys_of(plan, f"gare-1/{name}")):
            make_card(plan.runs[key], folder / "cards", quality + place)
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Report of three rows of a table with two seeds, a failed run, a run of questions, and a profile; read-only."""
    folder = tmp_path_factory.mktemp("report")
    plan = write_cards(folder, {"clip4clip": 1.0, "baseline": 1.5, "gare": 3.0}, fixture_videos=20)
    key = keys_of(plan, "gare-1/x-pool")[0]
    make_card(plan.runs[key], folder / "cards", 1.0, status="failed", results=None, error="out of <memory>")
    answers = plan_of("dpdv-s4", folder, fixture_videos=20)
    make_answers(next(iter(answers.runs.values())), folder / "cards", 19)
    stages = ("encode_text", "encode_video", "text_layers", "video_layers", "score", "training_step")
    costs = Costs(92_620_000, 1, 10.0, 2.0, 1.0, 3.0, 700.0, 900.0, dict.fromkeys(stages, 16_000_000_000))
    profile = ProfileCard("gare", "GARE", "ClipEncoder", {}, 16, 1000, 3, "32-true", costs, {"device": "cpu"})
    write_record(profile, folder / "profiles" / "gare.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "RESAMPLES", 100)
        run_report(folder, RECIPES, tables_only=True)
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return folder / "report"


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_all_linked_pages_and_images_exist(report):
    pages = sorted(report.rglob("*.html"))
    assert len(pages) == 1 + 2 + 8 + 1  # overview, tables, runs, costs
    linked = {report / "index.html"}
    for path in pages:
        for tag, attrs in Page(path).tags:
            assert tag != "img" or attrs["alt"]
            target = attrs.get("href") or attrs.get("src")
            if target and not target.startswith("#"):
                assert not re.match(r"[a-z]+:|/", target), (path, target)
                assert (path.parent / target).is_file(), (path, target)
                linked.add((path.parent / target).resolve())
    assert set(pages) <= linked


def test_the_leaderboard_shows_the_values_of_the_cards_in_descending_order(folder, report):
    values = {}
    for run in read_runs(folder):
        if run.finished and not run.card.accuracy():
            values.setdefault(run.claims[0], []).append(run.card.metrics("text_to_video")["R@1"])
    means = sorted((sum(own) / len(own) for own in values.values()), reverse=True)
    rows = [row for row in Page(report / "index.html").rows if len(row) > 5 and "±" in row[1]]
    assert [row[1].split()[0] for row in rows] == [f"{mean:.1f}" for mean in means]
    assert rows[0][0] == "GARE"
    text = (report / "index.html").read_text()
    assert text.count("synthetic") == 1  # once at the top
    assert "49.1" not in text, "published results are not shown next to synthetic ones"


@pytest.mark.parametrize("synthetic", [True, False])
def test_every_decimal_number_in_a_table_is_measured_or_published(synthetic, folder, tmp_path):
    if not synthetic:  # differences from published values are shown
        folder = tmp_path
        write_cards(folder, {"baseline": 1.5, "gare": 3.0})
        run_report(folder, RECIPES, tables_only=True)
    runs = read_runs(folder)
    allowed = {str(run.card.seconds) for run in runs} | {str(run.card.peak_memory_mib) for run in runs}
    published = [row.printed(metric) for row in published_rows() for metric in PRINTED]
    allowed |= {printed_figure(value) for value in published if value is not None}
    differences = set()
    for claim in {claim for run in runs for claim in run.claims}:
        own = [run for run in runs if claim in run.claims and run.finished]
        answers = own and own[0].card.accuracy() is not None
        for direction in ("text_to_video",) if answers else ("text_to_video", "video_to_text"):
            for metric in ("accuracy",) if answers else PRINTED:
                found = measure(own, direction, metric)
                if found is None:
                    continue
                ends = (found.interval.low, found.interval.high) if found.interval else ()
                allowed |= {f"{value:.1f}" for value in (found.mean, found.deviation, *ends) if value is not None}
                differences |= {
                    f"{value - printed:+.1f}" for value in (found.mean, *ends) for printed in set(published) - {None}
                }
    seen = set()
    for path in [folder / "report" / "index.html", *(folder / "report" / "tables").glob("*.html")]:
        for row in Page(path).rows:
            for text in row:
                seen |= set(re.findall(r"(?<![\w/.])[-+]?\d[\d,]*\.\d+", text))
    signed = {number for number in seen if number[0] in "+-"}
    assert len(seen) > 30
    assert bool(signed) != synthetic
    assert seen - signed <= allowed
    assert signed <= differences


def test_pages_show_statistics_notes_commands_and_recipes(folder, report):
    text = (report / "tables" / "gare-1.html").read_text()
    view = views_of(read_runs(folder), RECIPES)[1]
    assert view.statistics
    for sentence in view.statistics:
        assert sentence in text
    assert "out of &lt;memory&gt;" in text
    assert "<memory>" not in text
    assert [row[0] for row in Page(report / "tables" / "gare-1.html").rows].count("gare-1/gare") == 2
    run = next(run for run in read_runs(folder) if run.card.name == "gare-1/gare")
    text = (report / "runs" / f"{run.key}.html").read_text()
    assert "tvr reproduce gare-1 --only gare --seeds 0 --fixture" in text
    assert "seed_everything" in text
    assert "<script>" not in text
    assert "47.5" in {text.split(" ")[0] for row in Page(report / "tables" / "dpdv-s4.html").rows for text in row}
    rows = list(csv.DictReader((report / "report.csv").read_text(encoding="utf-8").splitlines()))
    measured = {row["run"] for row in rows if row["measured"] and row["metric"] == "R@1"}
    assert measured == {"clip4clip", "baseline", "gare"}
    assert len({row["title"] for row in rows}) == 2
    assert "## GARE, Table 1" in (report / "report.md").read_text(encoding="utf-8")
    assert r"\toprule" in (report / "report.tex").read_text(encoding="utf-8")


def test_profiles_are_compared_with_the_published_costs(report, copied):
    rows = Page(report / "costs.html").rows
    assert any("Total 11,905.05" in row[2] and row[3] == "92.62" for row in rows if len(row) > 3)
    # 3 stages of 16 G for 16 items each and the scores of 16 x 16 pairs
    assert any(row[5:7] == ["4.06", "16.00"] for row in rows if len(row) > 6)
    shutil.rmtree(copied / "report")
    (copied / "profiles" / "gare.json").unlink()
    run_report(copied, RECIPES, tables_only=True)
    assert "costs.html" not in (copied / "report" / "index.html").read_text()


def test_a_run_that_several_tables_share_is_in_all_of_them(tmp_path):
    plan = plan_of("gaid-1", tmp_path, ["x-pool"], fixture_videos=20)
    (run,) = plan.runs.values()
    make_card(replace(run, claims=["gaid-1/x-pool"]), tmp_path / "cards", 1.0)
    later = plan_of("gaid-1", tmp_path, ["x-pool", "x-pool-b16"], fixture_videos=20)
    run_plan(later, tmp_path, lambda line: None)
    (run,) = read_runs(tmp_path)
    assert run.claims == ["gaid-1/x-pool", "gaid-1/x-pool-b16"]
    (view,) = views_of([run], RECIPES)
    assert set(view.results.dropna(subset=["measured"])["backbone"]) == {"ViT-B/32", "ViT-B/16"}


def test_bad_folders_and_files_are_named(copied, tmp_path_factory, capsys):
    run_report(copied, RECIPES)
    assert "No figures of dpdv-s4/dpdv-vqa: figures need weights" in capsys.readouterr().out
    run = next(run for run in read_runs(copied) if run.finished)
    assert "No figures: figures need weights" in (copied / "report" / "runs" / f"{run.key}.html").read_text(
        encoding="utf-8"
    )
    (copied / "figures").mkdir(exist_ok=True)
    (copied / "figures" / f"{run.key}.npz").write_bytes(b"PK half a file")
    with pytest.raises(UserError, match="damaged"):
        figures_of(run, copied / "figures")
    (copied / "profiles" / "gare.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match="schema 99"):
        read_profiles(copied / "profiles")
    with pytest.raises(UserError, match=r"no run cards and no results.json"):
        read_runs(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match=r"tables that are missing in .*: gare-1"):
        views_of([run for run in read_runs(copied) if "gare" in run.claims[0]], copied)
    card = next((copied / "cards").glob("*.json"))
    another = card.with_name("another.json")
    another.write_text(json.dumps(json.loads(card.read_text()) | {"key": "another"}))
    shutil.copy(card.with_suffix(".parquet"), another.with_suffix(".parquet"))
    with pytest.raises(UserError, match="are both cards of the run"):
        read_runs(copied)
