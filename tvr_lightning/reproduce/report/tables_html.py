"""Tables of the page: published beside measured, with where every number is from, and what stands behind each run."""

from __future__ import annotations

from tvr_lightning.reproduce.published import PublishedRow, printed_figure
from tvr_lightning.reproduce.report.cells import DIRECTIONS, Line, TableView
from tvr_lightning.reproduce.report.figures.drawing import escape
from tvr_lightning.reproduce.runs.card import Card

NOTHING = "–"  # noqa: RUF001  a dash is what a table shows where there is nothing
_FACTS = (
    ("seed", "results.seed"),
    ("protocol", "results.protocol"),
    ("encoder frozen", "results.config.model.init_args.encoder.init_args.freeze"),
    ("encoder from run", "run.encoder_from"),
    ("read from stored features", "run.store"),
    ("weights chosen on", "results.select_on"),
    ("post-processing", "results.post_processing"),
    ("precision", "results.precision"),
    ("steps", "steps"),
    ("epochs", "epochs"),
    ("seconds", "seconds"),
    ("peak memory, MiB", "peak_memory_mib"),
    ("peak memory of the GPU, MiB", "peak_device_memory_mib"),
    ("texts", "results.texts"),
    ("videos", "results.videos"),
    ("data", "run.fingerprints.data"),
    ("weights", "run.fingerprints.weights"),
    ("code", "run.fingerprints.code"),
    ("machine", "results.environment.machine"),
    ("date", "results.environment.date"),
)


def table_section(view: TableView) -> str:
    """Return a table with its statistics and notes.

    Args:
        view: the table.
    """
    head = "".join(f'<th scope="col" class="name">{name}</th>' for name in ("method", "data", "backbone", "direction"))
    for metric in view.metrics:
        head += f'<th scope="col">{metric}<br>published</th><th scope="col">{metric}<br>measured</th>'
        if _compares(view, metric):
            head += f'<th scope="col">{metric}<br>difference</th>'
    rows = "".join(f"<tr>{_row(view, line)}</tr>" for line in view.lines)
    explained = "Measured: with its 95 % bootstrap interval over queries in brackets, and ± the deviation over seeds."
    keys = " ".join(dict.fromkeys(card.key for line in view.lines for card in line.cards))
    lists = ""
    for title, lines in (("Statistics", view.statistics), ("Notes", view.notes)):
        if lines:
            marked = f' data-card="{keys}" data-of="ranks"' if title == "Statistics" else ""
            lists += f"<h3>{title}</h3><ul{marked}>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
    title = escape(view.title)
    return (
        f'<section><h2 id="{escape(view.name)}">{title}</h2><p class="soft">{explained}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{lists}</section>"
    )


def _compares(view: TableView, metric: str) -> bool:
    return view.comparable and metric == "R@1"


def _row(view: TableView, line: Line) -> str:
    row = line.published
    method = f"{row.method}, {row.variant}" if row.variant else row.method
    name = f'<a href="#run-{line.cards[0].key}">{escape(method)}</a>' if line.cards else escape(method)
    cells = f'<th scope="row" class="name">{name}</th>'
    for value in (row.dataset, row.backbone, row.direction):
        cells += f'<td class="name">{escape(value or NOTHING)}</td>'
    for metric in view.metrics:
        published = row.printed(metric)
        cells += _published(row, metric, published) + _measured(line, metric)
        if _compares(view, metric):
            cells += _difference(line, metric, published)
    return cells


def _published(row: PublishedRow, metric: str, value: float | None) -> str:
    if value is None:
        return f"<td>{NOTHING}</td>"
    return f'<td data-published="{escape(printed_place(row))}" data-field="{metric}">{printed_figure(value)}</td>'


def printed_place(row: PublishedRow) -> str:
    """Return where a row is printed: paper, table, line of the paper's text, and direction, which share a line."""
    return " ".join(str(part) for part in (row.paper, row.table, row.source_line, row.direction))


def _measured(line: Line, metric: str) -> str:
    found = line.measured.get(metric)
    if found is None:
        return f'<td class="here">{NOTHING}</td>'
    source = _source(line, metric)
    deviation = interval = ""
    if found.deviation is not None:
        deviation = f' ± <span {source} data-of="deviation">{found.deviation:.1f}</span>'
    if found.interval is not None:
        interval = (
            f'<small>[<span {source} data-of="low">{found.interval.low:.1f}</span>, '
            f'<span {source} data-of="high">{found.interval.high:.1f}</span>]</small>'
        )
    return f'<td class="here"><span {source} data-of="mean">{found.mean:.1f}</span>{deviation}{interval}</td>'


def _difference(line: Line, metric: str, published: float | None) -> str:
    found = line.measured.get(metric)
    if found is None or found.interval is None or published is None:
        return f"<td>{NOTHING}</td>"
    source = _source(line, metric)
    parts = [(found.mean, "mean"), (found.interval.low, "low"), (found.interval.high, "high")]
    mean, low, high = (
        f'<span {source} data-of="{name} minus published" data-published="{published}">{value - published:+.1f}</span>'
        for value, name in parts
    )
    return f"<td>{mean}<small>[{low}, {high}]</small></td>"


def _source(line: Line, metric: str) -> str:
    direction = DIRECTIONS.get(line.published.direction or "", "")
    elsewhere = {"SumR": "sum_of_recalls", "accuracy": "evaluation.accuracy"}
    where = elsewhere.get(metric, f"{direction}.{metric}")
    return f'data-card="{" ".join(card.key for card in line.cards)}" data-field="results.{where}"'


def run_facts(card: Card) -> str:
    """Return what stands behind a run as a table: the fields of its card that a reader needs to judge it.

    Args:
        card: of the run, finished or failed.
    """
    rows = ""
    for words, path in _FACTS:
        value = field_of(card, path)
        if value is not None:
            rows += (
                f'<tr><th scope="row" class="name">{words}</th><td class="name" data-card="{card.key}" '
                f'data-field="{path}">{escape(value)}</td></tr>'
            )
    failed = f'<p class="warn">Failed: {escape(card.error or "")}</p>' if card.status == "failed" else ""
    return f'{failed}<div class="scroll" tabindex="0" role="region" aria-label="Card"><table>{rows}</table></div>'


def field_of(card: Card, path: str) -> object:
    """Return a field of a card by its dotted path; None where it is not there.

    Args:
        card: of a run.
        path: such as `results.text_to_video.R@1`.
    """
    value: object = card
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value
