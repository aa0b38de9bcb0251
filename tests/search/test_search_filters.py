"""Filters choose in SQL what reading every row in Python would choose, for any names, lengths and captions."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvr_lightning.search import Filter
from tvr_lightning.search.catalog import Catalog, Entry, SpanEntry
from tvr_lightning.search.files import VideoFile

# Letters whose cases differ in length or outside of ASCII, digits, marks that are words and marks that are none.
LETTERS = st.sampled_from(
    "aAbBkKsSi_-. \n\0'\"%*\\\u212a\u017f\u00df\u1e9e\u0130\u0131\u00e9\u0301\u03c2\u03a3\u4e2d\u0661"
)
TEXTS = st.text(LETTERS, max_size=8)
SECONDS = st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1.0, 2.5]))
BOUNDS = st.one_of(st.none(), SECONDS, st.integers(0, 3), st.just(10**30), st.just(float("nan")))
ASKED = st.one_of(st.none(), TEXTS, st.text(max_size=4))


def words(text):
    return set(re.findall(r"\w+", text.casefold()))


def halved(file, seconds):
    """A video of two stretches."""
    middle = seconds / 2
    return Entry(file, seconds, [SpanEntry(0.0, middle, torch.zeros(2)), SpanEntry(middle, seconds, torch.ones(2))])


def admits(only, row, captions):
    """What a filter means, said of one video."""
    return (
        (only.shortest is None or row.duration >= only.shortest)
        and (only.longest is None or row.duration <= only.longest)
        and (not only.path or only.path.casefold() in str(row.path).casefold())
        and (not only.caption or words(only.caption) <= words("\n".join(captions)))
    )


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(
        st.tuples(TEXTS.map(lambda text: text.replace("\0", "")), SECONDS, st.lists(TEXTS, max_size=3)), max_size=6
    ),
    shortest=BOUNDS,
    longest=BOUNDS,
    path=ASKED,
    caption=ASKED,
)
def test_sql_chooses_what_python_would(catalog, made, shortest, longest, path, caption):
    catalog.remove(catalog.known())
    files = [VideoFile(Path(f"/videos/{place}{name}"), 1, 1) for place, (name, _, _) in enumerate(made)]
    catalog.write([halved(file, seconds) for file, (_, seconds, _) in zip(files, made, strict=True)])
    said = {file.id: captions for file, (_, _, captions) in zip(files, made, strict=True)}
    catalog.set_captions(said)
    for only in (
        Filter(shortest, longest, path, caption),
        Filter(shortest, longest),
        Filter(path=path),
        Filter(caption=caption),
    ):
        admitted = [row.id for row in catalog.videos() if admits(only, row, said[row.id])]
        expected = {span.key for video in admitted for span in catalog.spans(video)}
        found = catalog.admitted(only)
        assert len(found) == len(set(found))
        assert set(found) == expected


@pytest.fixture
def catalog(tmp_path):
    made = Catalog(tmp_path, create=True)
    yield made
    made.close()


def test_more_keys_than_one_query_has_parameters(catalog):
    files = [VideoFile(Path(f"/videos/{number}"), 1, 1) for number in range(3000)]
    vectors = torch.arange(3000.0)[:, None].expand(-1, 2)
    catalog.write(
        [Entry(file, 1.0, [SpanEntry(0.0, 1.0, vector)]) for file, vector in zip(files, vectors, strict=True)]
    )
    wanted = [file.span_key(0) for file in files]
    found = catalog.by_key([*wanted, 12345])
    assert {key: row.video.path for key, row in found.items()} == {file.span_key(0): file.path for file in files}
    keys, vectors = catalog.vectors(wanted)
    assert keys == sorted(wanted)
    assert [files[int(v)].span_key(0) for v in vectors[:, 0]] == keys
    assert catalog.by_key([]) == {}
    assert catalog.vectors([])[0] == []


def test_the_stretches_of_a_video_are_told_apart_and_forgotten_with_it(catalog):
    files = [VideoFile(Path(f"/videos/{number}"), 1, 1) for number in range(2)]
    catalog.write([halved(file, 4.0) for file in files])
    rows = catalog.spans(files[0].id)
    assert [(row.start, row.end, row.video.id) for row in rows] == [(0.0, 2.0, files[0].id), (2.0, 4.0, files[0].id)]
    assert len(catalog.keys()) == 4
    assert catalog.read() == {file.key for file in files}
    catalog.remove([files[0].id])
    assert catalog.by_key([row.key for row in rows]) == {}
    assert len(catalog.vectors()[0]) == 2
