"""The SQL filter for folders selects the same videos as comparing paths in Python, for any names."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.files import VideoFile, relative
from tvr_lightning.search.segments import SegmentClips

# Letters whose cases differ, digits, and characters with a meaning in SQL or in paths.
NAMES = st.text(st.sampled_from("aAbB_-. %*\\'\"\u00e9\u0301\u4e2d"), min_size=1, max_size=3).filter(
    lambda name: name not in (".", "..")
)
FOLDERS = st.lists(NAMES, max_size=3).map("/".join)


def add(catalog, file, *vectors):
    """Add a video with a one-second segment for each vector, inside a change."""
    for place, vector in enumerate(vectors):
        catalog.add_span(file, place, SegmentClips(float(place), place + 1.0, {}, {}, (0, 0)), vector, {})
    catalog.add_video(file, float(len(vectors)), (0, 0))


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(FOLDERS, max_size=6), folder=FOLDERS)
def test_sql_chooses_what_python_would(catalog, made, folder):
    catalog.remove(catalog.states())
    roots = [Path("/videos"), Path("/more")]
    catalog.set_fact("roots", list(map(str, roots)))
    files = [VideoFile(roots[place % 2] / name / f"{place}.mp4", 1, 1) for place, name in enumerate(made)]
    with catalog.change():
        for file in files:
            add(catalog, file, torch.zeros(2), torch.ones(2))
    for wanted in {folder, *made}:
        chosen = [file for file in files if any(root / wanted in file.path.parents for root in roots)]
        expected = {span.key for file in chosen for span in catalog.spans(file.id)}
        found = catalog.in_folder(wanted)
        assert len(found) == len(set(found))
        assert set(found) == expected
        assert catalog.listed(wanted, 100, 0)[1] == len(chosen)


@pytest.fixture
def catalog(tmp_path):
    made = Catalog(tmp_path, create=True)
    yield made
    made.close()


def test_a_file_that_was_indexed_by_itself_is_in_the_folder_that_the_page_lists(catalog):
    catalog.set_fact("roots", ["/videos/single.mp4", "/more"])
    with catalog.change():
        for path in ("/videos/single.mp4", "/more/trips/other.mp4"):
            add(catalog, VideoFile(Path(path), 1, 1), torch.zeros(2))
    listed, count = catalog.listed(relative(Path("/videos/single.mp4"), catalog.roots).rpartition("/")[0] or ".", 10, 0)
    assert count == 2, "the folder of both roots"
    assert {row.path.name for row in listed} == {"single.mp4", "other.mp4"}
    assert [row.path.name for row in catalog.listed("trips", 10, 0)[0]] == ["other.mp4"]


def test_segments_are_found_by_more_keys_than_one_query_has_parameters_and_removed_with_their_video(catalog):
    files = [VideoFile(Path(f"/videos/{number}"), 1, 1) for number in range(3000)]
    with catalog.change():
        for number, file in enumerate(files[1:], 1):
            add(catalog, file, torch.full((2,), float(number)))
        add(catalog, files[0], torch.zeros(2), torch.ones(2))
    wanted = [file.span_key(0) for file in files]
    found = catalog.by_key([*wanted, 12345])
    assert {key: row.video.path for key, row in found.items()} == {file.span_key(0): file.path for file in files}
    keys, vectors = catalog.vectors(wanted)
    assert keys == sorted(wanted)
    assert [files[int(v)].span_key(0) for v in vectors[:, 0]] == keys
    assert catalog.by_key([]) == {}
    assert catalog.vectors([])[0] == []
    rows = catalog.spans(files[0].id)
    assert [(row.start, row.end, row.video.id) for row in rows] == [(0.0, 1.0, files[0].id), (1.0, 2.0, files[0].id)]
    assert catalog.states()[files[0].id] == (files[0].key, files[0].path, True)
    assert len(catalog.keys()) == 3001
    catalog.remove([files[0].id])
    assert catalog.by_key([row.key for row in rows]) == {}
    assert len(catalog.vectors()[0]) == 2999
