"""The published results, and the command that shows them."""

import csv
import io
import json

import pytest

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import published_rows, select_published


def test_the_rows_of_all_five_papers_are_unique_by_direction():
    rows = published_rows()
    assert {row.paper for row in rows} == {"GARE", "TC-MGC", "NCL", "DPDV", "GAID", "zero-shot"}
    assert len({(row.entry, row.direction) for row in rows}) == len(rows)
    assert len([row for row in rows if row.paper != "zero-shot"]) == 768


def test_recalls_and_ranks_are_plausible_and_citations_readable():
    for row in published_rows():
        recalls = [row.printed(name) for name in ("R@1", "R@5", "R@10", "R@50") if row.printed(name) is not None]
        assert recalls == sorted(recalls), row
        assert all(0 <= value <= 100 for value in recalls), row
        assert all(row.printed(name) is None or row.printed(name) >= 1 for name in ("MdR", "MnR")), row
    citations = {"Luo et al., Neurocomputing 22", "CVPR 21", "r=0.3: linear-softmax, SDR"}
    assert citations <= {row.variant for row in published_rows()}
    zero_shot = select_published("zero-shot")
    assert all(row.note and ("arXiv" in row.note or "github.com" in row.note) for row in zero_shot)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            ("gare", "1", "MSR-VTT", "GARE (Ours)", "t2v"),
            {"R@1": 49.1, "R@5": 74.7, "R@10": 83.6, "MnR": 12.0, "RSum": None, "SumR": None},
        ),
        (("ncl", "1", None, "NCL", "t2v"), {"R@10": None}),
        (("zero-shot", None, "MSR-VTT", "PE-Core-B", "t2v"), {"R@1": 47.6}),
        (("zero-shot", None, "MSR-VTT", "PE-Core-B", "v2t"), {"R@1": 47.3}),
    ],
)
def test_values_equal_those_of_the_papers(query, expected):
    (row,) = select_published(*query)
    assert {metric: row.printed(metric) for metric in expected} == expected


def test_a_note_names_a_sum_that_contradicts_its_recalls():
    """By more than rounding half of the last printed digit, of every term and of the sum."""
    lines = {}
    for row in published_rows():
        lines.setdefault(row.entry, []).append(row)
    named = set()
    for row in published_rows():
        for name, value, of, count in (
            ("RSum", row.recall_sum, [row], 3),
            ("SumR", row.sum_of_recalls, lines[row.entry], 6),
        ):
            terms = [term for line in of for term in (line.recall_1, line.recall_5, line.recall_10) if term is not None]
            if value is not None and len(terms) == count and abs(sum(terms) - value) > 0.05 * (count + 1) + 1e-6:
                said = f"the paper prints {name} {value:.1f}, but its recalls add up to {sum(terms):.1f}"
                assert row.note == said
                named.add((row.paper, row.table, row.method, row.backbone))
    assert named == {("TC-MGC", "1a", "CLIP4Clip-tightTransf", "ViT-B/16")}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"paper": "resnet"}, "DPDV, GAID, GARE, NCL, TC-MGC"),
        ({"paper": "gaid", "table": "12"}, "1, 2, 3"),
        ({"paper": "ncl", "dataset": "LSMDC"}, "ActivityNet"),
    ],
)
def test_unknown_values_are_refused_and_a_part_of_a_method_name_is_enough(query, said):
    with pytest.raises(UserError, match=said):
        select_published(**query)
    found = {row.method for row in select_published(method="gare")}
    assert "GARE (Ours)" in found
    assert all("gare" in name.lower() for name in found)


def test_the_command_shows_rows_and_notes_in_all_formats(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["published", "--paper", "gare", "--table", "4"]) == 0
    said = capsys.readouterr().out
    assert "C=V_frame" in said
    assert "49.1" in said
    assert "inconsistent in the paper" in said
    assert main(["published", "--paper=gare", "--table=4", "--format=csv"]) == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 6
    assert main(["published", "--paper=gare", "--table=4", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["recall_1"] == 47.4
