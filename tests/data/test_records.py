"""Tables of annotations: every row is read, or an error names the file and the line."""

import pytest

from tvr_lightning.data.records import AnnotationError, read_table

COLUMNS = ("video_id", "sentence")


def table(tmp_path, text):
    path = tmp_path / "list.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_quoted_fields_may_contain_commas_quotes_and_line_ends(tmp_path):
    path = table(tmp_path, 'video_id,sentence\nv0,"a cat, a ""dog""\nand a bird"\nv1,a fish\n')
    assert [row["sentence"] for row in read_table(path, COLUMNS)] == ['a cat, a "dog"\nand a bird', "a fish"]


@pytest.mark.parametrize(
    ("sentences", "line"),
    [
        (["a cat", '"a dog', "a bird", "a fish"], 3),  # until the end of the file
        (["a cat", '"a dog', '"a bird"', "a fish"], 3),  # until the next quote
        (["a cat", "a dog", 'a "bird"', '"a fish'], 5),  # a quote inside a field is text
    ],
)
def test_an_unclosed_quote_is_an_error_with_file_and_line(tmp_path, sentences, line):
    rows = "".join(f"v{number},{sentence}\n" for number, sentence in enumerate(sentences))
    with pytest.raises(AnnotationError, match=rf"list\.csv: line {line}: not CSV"):
        read_table(table(tmp_path, f"video_id,sentence\n{rows}"), COLUMNS)


def test_a_column_that_occurs_twice_is_an_error(tmp_path):
    with pytest.raises(AnnotationError, match=r"list\.csv: sentence: the column occurs 2 times"):
        read_table(table(tmp_path, "video_id,sentence,sentence\nv0,a,b\n"), COLUMNS)
