"""The report as a folder of pages that needs no network: an overview, and one page per table, per run, and so on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.intervals import MEANING, METRIC
from tvr_lightning.files import file_lock, write_whole
from tvr_lightning.progress import shown
from tvr_lightning.reproduce.profile.costs import ProfileCard, profile_table, read_profiles
from tvr_lightning.reproduce.published import printed_figure, published_rows
from tvr_lightning.reproduce.report.drawing import FAILURES, Arrays, Chart, not_drawn, shortened
from tvr_lightning.reproduce.report.figures.any_method import DIRECTIONS as HEADINGS
from tvr_lightning.reproduce.report.figures.figure_types import draw, figures_of
from tvr_lightning.reproduce.report.figures.gare import draw_course
from tvr_lightning.reproduce.report.figures.retrieval_examples import comparisons, failures_of_scores
from tvr_lightning.reproduce.report.sources import ReportedRun, measure
from tvr_lightning.reproduce.report.systems import view_systems
from tvr_lightning.reproduce.report.table_charts import draw_curves, draw_table
from tvr_lightning.reproduce.report.table_view import (
    DIRECTIONS,
    PAIRED,
    TableView,
    filled,
    is_synthetic,
    legend_of,
    view_table,
    warnings_of,
    write_tables,
)
from tvr_lightning.reproduce.tables import known_tables, load_table

PACKAGE = "tvr_lightning.reproduce.report"
BLOCKS = {"t2v": "Text to video", "v2t": "Video to text", "t2v+v2t": "Both directions"}
EFFICIENCY = (
    ("TC-MGC", "14"), ("TC-MGC", "1a"), ("TC-MGC", "1b"), ("TC-MGC", "2"), ("TC-MGC", "3"),
    ("GARE", "10"), ("GARE", "11"), ("GAID", "6"), ("GAID", "7"), ("DPDV", "S8"),
)  # fmt: skip
COMPARED = ["parameters, M", "FLOPs of one pair's inference, G", "ms per video", "MiB, training"]
PAGES = Environment(
    loader=PackageLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass
class Site:
    """Content of the pages in `folder`: `arrays` of the figures, or why they are missing, by the key of the run."""

    folder: Path
    views: Sequence[TableView]
    runs: Sequence[ReportedRun]
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    profiles: Sequence[ProfileCard] = ()

    def write(self) -> list[Path]:
        """Write all pages and files; return the entry page and the files of all tables. One process at a time can."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder.with_name("report.lock"), f"the report {self.folder}"):
            return self._write()

    def _write(self) -> list[Path]:
        for name in ("style.css", "page.js"):
            self._file(name, files(PACKAGE).joinpath("templates", name).read_bytes())
        for view in self.views:
            self._table(view)
        for run in self.runs:
            self._run(run)
        compared = list(comparisons(self.runs, self.arrays, self._file))
        if compared:
            self._page("queries.html", "Queries: where one run is better than another", contests=compared)
        if self.profiles:
            costs = profile_table(self.profiles)
            self._page("costs.html", "Cost of the methods", profiles=costs, lines=_efficiency(costs, self.runs))
        self._overview(bool(compared))
        return [self.folder / "index.html", *(write_tables(self.views, self.folder / "report") if self.views else [])]

    def _file(self, name: str, content: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, content)

    def _page(self, name: str, title: str, template: str = "", charts: Sequence[Chart] = (), **values: Any) -> None:
        """Write a page and the images of its charts."""
        for place, chart in enumerate(charts):
            for part, image in enumerate(chart.images):
                path = f"{name.removesuffix('.html')}-{place}-{part}{image.suffix}"
                image.name = Path(path).name
                self._file(path, image.content)
        values |= {"title": title, "root": "../" * name.count("/"), "charts": charts}
        self._file(name, PAGES.get_template(template or name).render(values).encode())

    def _overview(self, compared: bool) -> None:
        made = [found for run in self.runs if (found := run.results.get("environment"))]
        newest = pd.Timestamp(max((found["date"] for found in made), default="2000-01-01T00:00+00:00"))
        origins = {
            "Newest run": f"{newest.tz_convert('UTC'):%-d %B %Y, %H:%M} UTC",
            "Versions": "; ".join(sorted({str(found["packages"]["tvr-lightning"]) for found in made})),
            "Machines": "; ".join(sorted({found["machine"] for found in made})),
        }
        synthetic = {is_synthetic(run) for run in self.runs}
        self._page(
            "index.html", "Text-video retrieval: published and measured", origins=origins,
            boards=leaderboards([view for view in self.views if view.differences is None], self.runs),
            legend=legend_of([run for run in self.runs if "text_to_video" in run.results]),
            synthetic="Some" if len(synthetic) > 1 else "All" if True in synthetic else "",
            meaning=MEANING, views=self.views, runs=self.runs, compared=compared, profiles=self.profiles,
        )  # fmt: skip

    def _table(self, view: TableView) -> None:
        write_tables([view], self.folder / "tables" / view.name)
        try:
            charts = draw_table(view, self.arrays)
        except FAILURES as error:
            charts = [not_drawn("Comparisons", error)]
        values = {"view": view, "blocks": _blocks(view), "run_table": view.run_table(), "paired": PAIRED}
        values["differences"] = view.difference_table()
        self._page(f"tables/{view.name}.html", view.title, "table.html", charts, **values)

    def _run(self, run: ReportedRun) -> None:
        folder = f"runs/{run.key}"
        charts = [chart for chart in (draw_curves([run]), draw_course(run)) if chart]
        charts += draw(self.arrays.get(run.key, {}))
        card = asdict(run.card)
        config = (card["results"] or {}).pop("config", {})
        recipe, text = (yaml.safe_dump(value, sort_keys=False, allow_unicode=True) for value in (config, card))
        self._file(f"{folder}.yaml", recipe.encode())
        self._page(
            f"{folder}.html", f"Run {run.title}", "run.html", charts, run=run, card=text, recipe=recipe,
            missing=self.missing.get(run.key), results=_results(run), meaning=MEANING,
            tables=[view for view in self.views if any(run in own for own in view.runs.values())],
        )  # fmt: skip


def leaderboards(
    views: Sequence[TableView], runs: Sequence[ReportedRun]
) -> dict[str, tuple[pd.DataFrame, list[ReportedRun]]]:
    """Return for each dataset the measured runs as text, the highest text-to-video R@1 first, and those runs.

    Every run is shown once, next to the published R@1 if its data is real. Without tables, each run is a row, with
    columns of the options that differ between the runs.
    """
    found: dict[str, tuple[dict[str, str], dict[str, float], list[ReportedRun]]] = {}
    for view in views:
        for name, own in view.finished.items():
            rows = view.results[view.results["run"] == name]
            first = rows.iloc[0]
            method = re.sub(r" \(ours\)", "", first["name"], flags=re.IGNORECASE)  # of the paper's authors
            named = {"method": method, "data": first["dataset"], "backbone": first["backbone"]}
            words, published, _ = found.setdefault(first["cards"], (named, {}, own))
            if not published:  # of the first table that has any
                words["table"] = view.title
            printed = rows[rows["metric"] == "R@1"].set_index("direction")["published"].dropna()
            published.update({str(key): value for key, value in printed.items() if key not in published})
    for run in runs if not views else ():
        encoder = run.results["config"].get("model", {}).get("init_args", {}).get("encoder") or {}
        method = run.results["method"] if run.external else f"{run.results['method']}, {run.title}"
        words = {"method": method, "data": "", "table": ""}
        words["backbone"] = encoder.get("init_args", {}).get("architecture")
        found[run.key] = words, {}, [run]
    mixed = len({is_synthetic(run) for run in runs}) > 1
    boards: dict[str, list[tuple[float, dict[tuple[str, str], str], ReportedRun]]] = {}
    for words, published, own in found.values():
        if (best := measure(own, "text_to_video", "R@1")) is None:
            continue
        marks = [mark for mark in warnings_of(own) if mixed or mark != "synthetic"]
        row = {("method", ""): words["method"] + (f" [{', '.join(marks)}]" if marks else "")}
        for direction, heading in HEADINGS.items():
            recalls = {name: measure(own, DIRECTIONS[direction], name) for name in ("R@1", "R@5", "R@10")}
            row[heading, "R@1"] = str(recalls.pop("R@1") or "-")
            shown = direction in published and not is_synthetic(own[0])
            row[heading, "published"] = printed_figure(published[direction]) if shown else "-"
            row |= {(heading, name): f"{one.mean:.1f}" if one else "-" for name, one in recalls.items()}
        row |= {(name, ""): words[name] or "-" for name in ("backbone", "table")}
        boards.setdefault(words["data"] or own[0].dataset, []).append((best.mean, row, own[0]))
    tables = {}
    for dataset, entries in sorted(boards.items(), key=lambda board: -len(board[1])):
        entries.sort(key=lambda entry: -entry[0])
        table = pd.DataFrame({column: [row[column] for _, row, _ in entries] for column in entries[0][1]})
        if not views:
            settings = pd.DataFrame([run.settings() for *_, run in entries])
            for name in settings.columns[settings.nunique() > 1]:  # NaN, of options that a method lacks, does not count
                if not name.endswith("class_path") and not settings[name].str.startswith("[").eq(True).any():
                    short = name.rpartition(".")[2], ""
                    table[(name, "") if short in table else short] = settings[name].fillna("-")
        tables[dataset] = filled(table), [run for *_, run in entries]
    return tables


def _results(run: ReportedRun) -> pd.DataFrame:
    """Return the metrics of a run as text, one row per direction and one for SumR."""
    if (accuracy := measure([run], "text_to_video", "accuracy")) is not None:
        return pd.DataFrame({"accuracy": [str(accuracy)]})
    if "text_to_video" not in run.results:
        return pd.DataFrame()
    rows = {}
    for words, direction in zip(("text to video", "video to text"), DIRECTIONS.values(), strict=True):
        names = filter(METRIC.fullmatch, run.card.metrics(direction))
        rows[words] = {name: str(measure([run], direction, name) or "-") for name in names}
    rows["both directions"] = {"SumR": str(measure([run], "text_to_video", "SumR") or "-")}
    return pd.DataFrame.from_dict(rows, orient="index").fillna("").rename_axis("direction").reset_index()


def _blocks(view: TableView) -> Iterator[tuple[str, pd.DataFrame, list[ReportedRun | None]]]:
    """Return a table by direction, without columns that are empty or the same in every row, and the runs of rows."""
    run_of = view.results.drop_duplicates("line").set_index("line")["run"]
    for direction, block in view.wide().groupby(("direction", ""), sort=False):
        same = [name for name in ("data", "backbone") if block[name, ""].nunique() == 1]
        shared = [value for name in same if (value := block[name, ""].iloc[0]) != "-"]
        shown = block.drop(columns=[("direction", ""), *((name, "") for name in same)])
        runs = [next(iter(view.finished.get(run_of[line], [])), None) for line in block.index]
        yield ", ".join([BLOCKS.get(str(direction), "Results"), *shared]), filled(shown), runs


def _efficiency(profiles: pd.DataFrame, runs: Sequence[ReportedRun]) -> pd.DataFrame:
    """Return every published row on efficiency whose method was profiled or trained, with what was measured."""
    rows = []
    for row in published_rows():
        extra = {name.replace("_", " "): value for name, value in row.extra.items() if name != "retrained_by_authors"}
        extra |= {f"{row.speed_ms:g}": "ms"} if row.speed_ms is not None else {}
        words = ", ".join(f"{name} {value}" for name, value in extra.items())
        if row.paper == "GARE":  # the variant has the name of the metric and its values
            words = row.variant or ""
        if (row.paper, row.table) not in EFFICIENCY or not words:
            continue
        method = re.sub(r" \(.*\)|.* vs |-", "", row.method).lower()  # "TC-MGC (ours)" is the class TCMGC
        own = profiles[profiles["method"].str.lower() == method]
        start = f"{row.paper}-{row.table}/".lower()
        seconds = [
            f"{run.card.seconds:.1f}"
            for run in runs
            if run.finished and run.log and run.card.seconds and str(run.results["method"]).lower() == method
            and any(claim.startswith(start) for claim in run.claims)
        ]  # fmt: skip
        if len(own) or seconds:
            found = {"method": row.method if row.paper == "GARE" else row.full_method}
            found |= {"table": f"{row.paper} {row.table}", "published": words}
            found |= {column: " / ".join(own[column]) or "-" for column in COMPARED}
            rows.append({**found, "training, s": " / ".join(seconds) or "-"})
    return pd.DataFrame(rows)


def report_on(
    runs: Sequence[ReportedRun],
    directory: Path,
    recipes: Path,
    tables_only: bool = True,
    trust: Sequence[str] = (),
) -> Site:
    """Compare runs, measure the figures that need their weights and videos, and return their pages in a folder.

    Figures of runs that use code of other packages need the names of its modules in `trust`.
    """
    console = Console(highlight=False, soft_wrap=True)
    arrays: dict[str, Arrays] = {}
    missing: dict[str, str] = {}
    with shown("report: comparing the results", console):
        views = [*views_of(runs, recipes), *view_systems(runs, recipes)]
    with shown(lambda: f"report: {len(arrays) + len(missing)} of {len(runs)} runs done", console):
        for place, run in enumerate(runs, start=1):
            try:
                if not run.finished or run.card.features is not None:
                    raise UserError("the run only stored features" if run.finished else "the run failed")
                if run.external:
                    arrays[run.key] = failures_of_scores(run)
                elif not tables_only:
                    console.print(f"[{place}/{len(runs)}] figures of {run.card.name}", markup=False)
                    arrays[run.key] = figures_of(run, directory / "figures", trust)
            except FAILURES as error:  # the page states it; other runs keep their figures
                missing[run.key] = shortened(error)
                console.print(f"No figures of {run.card.name}: {missing[run.key]}", markup=False)
    return Site(directory / "report", views, runs, arrays, missing, read_profiles(directory / "profiles"))


def views_of(runs: Sequence[ReportedRun], recipes: Path) -> list[TableView]:
    """Return every table that the runs stand for rows of, sorted by name; raise UserError if its recipe is missing."""
    claimed = {claim.partition("/")[0] for run in runs for claim in run.claims}
    if unknown := sorted(claimed - set(known_tables(recipes))):
        raise UserError(f"The cards belong to tables that are missing in {recipes / 'tables'}: {', '.join(unknown)}")
    return [view_table(load_table(name, recipes), runs) for name in sorted(claimed)]
