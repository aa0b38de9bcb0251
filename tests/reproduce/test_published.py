"""The published numbers: complete, typed, and printed as the papers have them."""

import csv
import io
import json

import pytest

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.published import PublishedRow, published_rows, select_published


def only(rows: list[PublishedRow]) -> PublishedRow:
    (row,) = rows
    return row


def test_all_five_papers_are_there_and_every_line_is_named_once_per_direction():
    rows = published_rows()
    assert {row.paper for row in rows} == {"GARE", "TC-MGC", "NCL", "DPDV", "GAID", "zero-shot"}
    assert len({(row.entry, row.direction) for row in rows}) == len(rows)
    assert len([row for row in rows if row.paper != "zero-shot"]) == 768


def test_zero_shot_figures_name_their_source():
    rows = select_published("zero-shot")
    assert all(row.note and ("arXiv" in row.note or "github.com" in row.note) for row in rows)
    core = {row.direction: row.printed("R@1") for row in rows if (row.method, row.dataset) == ("PE-Core-B", "MSR-VTT")}
    assert core == {"t2v": 47.6, "v2t": 47.3}


def test_figures_are_those_of_the_print():
    row = only(select_published("gare", "1", "MSR-VTT", "GARE (Ours)", "t2v"))
    assert [row.printed("R@1"), row.printed("R@5"), row.printed("R@10"), row.printed("MnR")] == [49.1, 74.7, 83.6, 12.0]
    assert row.backbone == "ViT-B/32"


def test_what_is_not_printed_stays_missing():
    row = only(select_published("gare", "1", method="GARE (Ours)", direction="t2v"))
    assert row.printed("RSum") is None
    assert row.printed("SumR") is None
    assert only(select_published("ncl", "1", method="NCL", direction="t2v")).printed("R@10") is None


def test_recalls_and_ranks_are_possible():
    for row in published_rows():
        recalls = [row.printed(name) for name in ("R@1", "R@5", "R@10", "R@50") if row.printed(name) is not None]
        assert recalls == sorted(recalls), row
        assert all(0 <= value <= 100 for value in recalls), row
        assert all(row.printed(name) is None or row.printed(name) >= 1 for name in ("MdR", "MnR")), row


def test_a_sum_that_does_not_fit_its_recalls_is_named():
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
def test_unknown_values_list_the_known_ones(query, said):
    with pytest.raises(UserError, match=said):
        select_published(**query)


def test_a_part_of_a_method_s_name_is_enough_in_any_case():
    found = {row.method for row in select_published(method="gare")}
    assert "GARE (Ours)" in found
    assert all("gare" in name.lower() for name in found)


def test_the_verb_prints_rows_notes_and_other_formats(capsys, monkeypatch):
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


@pytest.mark.parametrize("words", ["Luo et al., Neurocomputing 22", "CVPR 21", "r=0.3: linear-softmax, SDR"])
def test_citations_are_words(words):
    assert any(row.variant == words for row in published_rows())
