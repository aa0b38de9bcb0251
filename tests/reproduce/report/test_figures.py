"""Figures of the report: the values that they show, computed from the tensors of each method."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from run_cards import RECIPES
from torch.nn import functional as F

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.evaluation.normalization import QueryBankNorm
from tvr_lightning.features import PairedFeatures
from tvr_lightning.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.figures import figure_types as figures
from tvr_lightning.reproduce.report.figures.any_method import measure_balance, measure_modalities, measure_similarity
from tvr_lightning.reproduce.report.figures.encoded_split import encode_test_split
from tvr_lightning.reproduce.report.figures.gare import measure_gradients
from tvr_lightning.reproduce.report.figures.retrieval_examples import measure_failures, measure_sheet
from tvr_lightning.reproduce.report.sources import ReportedRun
from tvr_lightning.reproduce.report.table_charts import draw_table
from tvr_lightning.reproduce.report.table_view import TableView
from tvr_lightning.reproduce.runs.card import Card

TINY = """
model: {init_args: {encoder: {class_path: TinyClipEncoder,
                              init_args: {width: 64, image_size: 32, patch_size: 8, vision_layers: 1}}}}
data: {init_args: {frames: 4, num_workers: 0}}
"""


@pytest.fixture(scope="module")
def splits(root, tmp_path_factory):
    """The test split of a synthetic dataset under random weights of each paper's method."""
    overlay = tmp_path_factory.mktemp("figures") / "tiny.yaml"
    overlay.write_text(TINY)
    made = {}
    for name in ("gare", "tcmgc", "gaid", "dpdv", "ncl"):
        recipes = [RECIPES / f"{name}.yaml", RECIPES / "fixture.yaml", overlay]
        module, data = from_recipe(recipes, [f"--data.init_args.root={root}"])
        made[name] = encode_test_split(module.eval(), data)
    # NCL's queues contain the test split itself, so that normalization has its best case.
    index = torch.arange(len(made["ncl"].pairs))
    with torch.no_grad():
        made["ncl"].module.update_state(PairedFeatures(*made["ncl"].paired(), index, index))
    return made


@pytest.fixture(scope="module")
def measured(splits):
    return {name: figures.measure(encoded) for name, encoded in splits.items()}


def rows_of(encoded):
    """Rows of the videos by their IDs, and of the texts by their captions."""
    videos = {encoded.record(row).video_id: row for row in range(len(encoded.videos))}
    return videos, {encoded.caption(row): row for row in range(len(encoded.texts))}


def plain_scores(text, video):
    """Cosines (N, M) of the sentences of GARE and the videos that are pooled for them, without increments."""
    weight = torch.einsum("nd,mfd->nmf", text.sentence, video.frames).div(3).softmax(-1)
    pooled = torch.einsum("nmf,mfd->nmd", weight, video.frames).detach()
    return F.cosine_similarity(text.sentence.unsqueeze(1), pooled, dim=-1)


def svg(chart):
    return "".join(image.content.decode() for image in chart.images if image.suffix == ".svg")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gare", {"geometry", "gradients", "hard_negatives"}),
        ("tcmgc", {"contrasts", "attention", "map"}),
        ("gaid", {"gate"}),
        ("dpdv", {"merging"}),
        ("ncl", {"mass"}),
    ],
)
def test_every_method_has_the_common_figures_and_its_own(splits, measured, name, own):
    kinds = {field.partition(".")[0] for field in measured[name]}
    assert kinds == {"similarity", "balance", "modalities", "sheet", "failures"} | own
    charts = figures.draw(measured[name])
    for chart in charts:
        assert chart.title
        assert chart.images, chart.note
        assert all(image.alt for image in chart.images)
        assert "#000000" not in svg(chart)  # text and axes have the color that dark pages replace
    shown = " ".join(fact for chart in charts for fact in chart.facts)
    assert f"matching pairs: {measured[name]['similarity.positive_mean']:.3g}" in shown


def test_contrasts_attention_and_map_of_tc_mgc(splits, measured):
    found, encoded = measured["tcmgc"], splits["tcmgc"]
    assert list(found["contrasts.names"]) == ["video_sentence", "video_word", "sentence_frame", "frame_word"]
    for name in ("softmax", "lsa"):
        np.testing.assert_allclose(found[f"contrasts.{name}"].sum(0), 1, rtol=1e-5)
    # A fresh LSA is the identity, that is, the softmax.
    np.testing.assert_allclose(found["contrasts.lsa"], found["contrasts.softmax"], rtol=1e-4)
    assert float(found["contrasts.regularization"]) == encoded.module.options.decorrelation.weight
    np.testing.assert_allclose(found["attention.weights"].sum(-1), 1, rtol=1e-4)
    words = [str(word) for word in found["attention.words"][0] if word]
    assert words[0] == "sentence"
    pieces = "".join(words[2:-1])  # between SOT and EOT; long words are two pieces
    assert len(pieces) > 10
    assert str(found["attention.captions"][0]).replace(" ", "").startswith(pieces)
    text, video = encoded.paired()
    assert len(found["map.words"]) == len(found["map.words_pair"]) == int(text.word_mask.sum())
    assert len(found["map.frames"]) == len(found["map.frames_pair"]) == int(video.frame_mask.sum())
    assert np.isfinite(found["map.words"]).all()


def test_failures_show_the_right_video_and_the_best_of_the_others(splits):
    encoded = splits["gare"]
    with torch.no_grad():
        expected = encoded.module.score(encoded.texts, encoded.videos).similarity
    assert torch.allclose(encoded.similarity, expected, atol=1e-5)
    own = [encoded.split.texts[int(place)].video for place in encoded.text_index]
    assert encoded.video_index[encoded.matching].tolist() == own
    found = measure_failures(encoded)
    ranks = text_to_video_ranks(encoded.similarity, encoded.matching).expected()
    assert len(found["query"]) == int((ranks > 1).sum()) > 0
    rows, _ = rows_of(encoded)
    for query, right, wrong in zip(found["query"], found["right"], found["wrong"], strict=True):
        text = encoded.text_index.tolist().index(query)
        assert rows[right] == encoded.matching[text]
        others = [row for row in range(len(rows)) if row != rows[right]]
        assert rows[wrong] == others[int(encoded.similarity[text, others].argmax())]
    assert set(found["names"]) == {*found["right"], *found["wrong"]}
    assert len(found["strips"]) == len(found["names"])
    assert len(measure_failures(perfect(encoded))["query"]) == 0


def perfect(encoded, scale=1.0):
    """The same split, every matching pair scoring 1 and all others 0."""
    scores = torch.zeros_like(encoded.similarity)
    scores[torch.arange(len(scores)), encoded.matching] = 1.0
    return replace(encoded, similarity=scale * scores)


def test_histograms_separate_matching_pairs_from_others(splits):
    found = measure_similarity(perfect(splits["gare"]))
    assert found["positive"].sum() == pytest.approx(1)
    assert found["negative"].sum() == pytest.approx(1)
    assert (found["positive"] * found["negative"]).sum() == 0
    assert float(found["overlap"]) == 0
    assert (float(found["positive_mean"]), float(found["negative_mean"])) == (1, 0)
    same = perfect(splits["gare"], scale=0.0)
    assert float(measure_similarity(same)["overlap"]) == pytest.approx(50)


def test_a_hub_makes_the_retrieval_mass_uneven(splits, measured, monkeypatch):
    found = measure_balance(perfect(splits["gare"], scale=10.0))
    assert float(found["t2v.error"]) == pytest.approx(0, abs=1e-6)
    hub = perfect(splits["gare"])
    hub.similarity[:, 0] = 20.0
    assert float(measure_balance(hub)["t2v.error"]) > 1
    assert "balance.normalized.t2v.error" not in measured["gare"]
    found = measured["ncl"]
    assert float(found["balance.normalized.t2v.error"]) < float(found["balance.t2v.error"])
    config = replace(splits["gare"].module.evaluation_config, normalization=QueryBankNorm())
    monkeypatch.setattr(splits["gare"].module, "evaluation_config", config)
    found = measure_balance(splits["gare"])  # without a bank
    (chart,) = figures.draw({f"balance.{name}": np.asarray(value) for name, value in found.items()})
    assert "Normalized scores are not drawn: it needs a bank" in chart.note


def test_examples_of_mass_have_the_values_of_the_balance(splits, measured):
    encoded, found = splits["ncl"], measured["ncl"]
    rows, texts = rows_of(encoded)
    mass = np.stack([found[f"balance.{start}t2v.mass"] for start in ("", "normalized.")])
    places = np.array([[rows[name] for name in names] for names in found["mass.names"]])
    np.testing.assert_allclose(found["mass.mass"], mass[:, places], rtol=1e-6)
    queries = [texts[caption] for caption in found["mass.captions"]]
    assert places[:, 0].tolist() == encoded.matching[queries].tolist()
    assert places[:, 1].tolist() == encoded.similarity[queries].argmax(1).tolist()


def test_hard_negatives_are_the_best_of_the_others_without_increments(splits, measured):
    encoded, found = splits["gare"], measured["gare"]
    rows, columns = encoded.pairs.T
    scores = encoded.similarity[rows][:, columns]
    plain = plain_scores(*encoded.paired())
    hardest = (plain - 9 * torch.eye(len(plain))).argsort(dim=1, descending=True)[:, :-1]
    for name, each in (("plain", plain), ("corrected", scores)):
        gap = each.diagonal()[:, None] - each.gather(1, hardest)
        np.testing.assert_allclose(found[f"hard_negatives.{name}"], gap.numpy(), atol=1e-4)


def test_the_retrieval_sheet_shows_the_best_videos_and_the_matching_one(splits):
    found = measure_sheet(perfect(splits["gare"]))
    assert (found["rank"] == 1).all()
    ranks = torch.arange(1.0, len(splits["gare"].similarity) + 1)
    evaluated = measure_sheet(replace(perfect(splits["gare"]), ranks=ranks, post_processing="Sinkhorn"))
    assert evaluated["rank"].tolist() == [1.0, *evaluated["rank"][1:-1], float(len(ranks))]
    chart, *_ = figures.draw({f"sheet.{name}": value for name, value in evaluated.items()})
    assert "before post-processing; ranks are those after Sinkhorn" in chart.note
    assert chart.facts == ["its own video is ranked 1"]
    assert found["correct"][:, :2].all()
    assert not found["correct"][:, 2:].any()
    assert found["strips"].std() > 1  # real frames
    worst = perfect(splits["gare"], scale=-1.0)
    assert measure_sheet(worst)["rank"].max() == worst.similarity.shape[1]


def test_identical_modalities_have_distance_zero(splits):
    encoded = splits["ncl"]
    text, video = encoded.paired()
    sentence = encoded.texts.sentence.clone()
    sentence[encoded.pairs[:, 0]] = F.normalize(video.frames, dim=-1).mean(1)
    found = measure_modalities(replace(encoded, texts=replace(encoded.texts, sentence=sentence)))
    assert float(found["matching"]) == pytest.approx(1, abs=1e-5)
    assert float(found["mean_distance"]) == pytest.approx(0, abs=1e-5)
    assert found["map"].shape == (2, len(text), 2)


def test_the_geometry_equals_that_of_the_increments(splits, measured):
    encoded = splits["gare"]
    text, video = encoded.paired()
    with torch.no_grad():
        increment = encoded.module.head(text, video, True).parts["increment"].diagonal().T
    gap = video.frames.mean(1) - text.sentence
    angle = F.cosine_similarity(increment, gap).acos().mean()
    assert float(measured["gare"]["geometry.angle_to_gap.matching_mean"]) == pytest.approx(float(angle), abs=1e-4)
    length = increment.norm(dim=-1).mean()
    assert float(measured["gare"]["geometry.increment_norm.matching_mean"]) == pytest.approx(float(length), rel=1e-4)


def test_gradients_add_up_and_match_the_loss_itself(splits):
    encoded = splits["gare"]
    found = measure_gradients(encoded)
    for start in ("", "plain_"):
        total = found[f"{start}positive.mean"] + found[f"{start}negative.mean"]
        np.testing.assert_allclose(found[f"{start}anchor.mean"], total, rtol=1e-4, atol=1e-7)
    # Without increments: InfoNCE of the sentences against the videos pooled for them, in its plainest form.
    text, video = encoded.paired()
    text.sentence = text.sentence.detach().clone().requires_grad_(True)
    logits = encoded.module.temperature().detach() * plain_scores(text, video)
    (-logits.log_softmax(1).diagonal()).sum().backward()
    np.testing.assert_allclose(found["plain_anchor.mean"], text.sentence.grad.mean(0).numpy(), rtol=1e-3, atol=1e-5)


def run_of(key, name):
    config = {"seed_everything": 0, "model": {}, "data": {}, "trainer": {"max_epochs": 1}}
    run = {"claims": [], "seed": None, "fingerprints": {"data": "synthetic"}, "dataset": "MSR-VTT"}
    card = Card(key, name, "finished", run, results={"config": config, "dataset": "MSR-VTT"})
    return ReportedRun(card, Path("ranks"), None, "tvr reproduce")


def table_of(runs, title="TC-MGC, Table 7b", baseline=None):
    """A table in which every run but the baseline is compared with it."""
    names = [run.card.name.partition("/")[2] for run in runs]
    rows = [{"run": name, "baseline": None if name == baseline else baseline} for name in names]
    results = pd.DataFrame([{**row, "metric": "MnR", "direction": "t2v", "measured": 1.0} for row in rows])
    return TableView("table", title, "", results, {name: [run] for name, run in zip(names, runs, strict=True)}, [], [])


def test_methods_are_drawn_over_their_baselines(measured):
    base, method = run_of("a", "gare-1/baseline"), run_of("b", "gare-1/gare")
    arrays = {"a": measured["ncl"], "b": measured["gare"]}
    (chart,) = draw_table(table_of([base, method], "GARE, Table 1", "baseline"), arrays)
    assert "gare, matching" in svg(chart)
    assert "baseline, other" in svg(chart)
    assert not draw_table(table_of([base, method], "GARE, Table 1", "baseline"), {"a": measured["ncl"]})
    normalized = {**measured["ncl"], "balance.normalized.t2v.error": np.array(0.0)}
    ncl = run_of("b", "ncl-fig2/ncl")
    (errors,) = draw_table(table_of([base, ncl], "NCL, Figure 2", "baseline"), arrays | {"b": normalized})
    assert "with NCL" in svg(errors)
    assert "MSR-VTT" in svg(errors)


def test_a_figure_that_fails_does_not_affect_the_others(splits, tmp_path):
    def fail(*_):
        raise ZeroDivisionError("no direction of a gradient of zero")

    own = {name: figures.FIGURES[name] for name in ("sheet", "similarity", "geometry", "modalities")}
    own["geometry"] = replace(own["geometry"], measure=fail)
    own["modalities"] = replace(own["modalities"], draw=fail)
    # As with stored features: the test split is encoded, but no video can be shown.
    split = splits["gare"].split
    hidden = [replace(video, path=tmp_path / video.path.name) for video in split.videos]
    arrays = figures.measure(replace(splits["gare"], split=replace(split, videos=hidden)), own)
    charts = {chart.title: chart for chart in figures.draw(arrays, own)}
    for title, reason in (
        ("Retrieval sheet", str(tmp_path)),
        ("Geometry of the increments", "no direction of a gradient of zero"),
        ("The two modalities", "no direction of a gradient of zero"),
    ):
        assert charts[title].note.startswith(f"Not drawn: {reason}")
        assert not charts[title].images
    assert charts["Scores of matching and of other pairs"].images


def test_the_gate_uses_the_matching_caption(splits, measured):
    found, encoded = measured["gaid"], splits["gaid"]
    text, video = encoded.paired()
    captions = [encoded.caption(int(row)) for row, _ in encoded.pairs]
    place = captions.index(str(found["gate.captions"][0]))
    linear = encoded.module.head.gate.linear
    both = torch.cat([video.frames[place], video.audio[place], text.sentence[place].expand(4, -1)], dim=-1)
    expected = linear(both).sigmoid().squeeze(-1).detach().numpy()
    np.testing.assert_allclose(found["gate.weights"][0], expected, rtol=1e-4)
    assert (np.diff(found["gate.times"], axis=1) > 0).all()
    assert (found["gate.high"] - found["gate.low"]).max() > 0.01  # there is audio
    audible = (video.audio_mask & video.frame_mask)[:, None, :]
    weights = encoded.module.head.gate.of_video(video) + encoded.module.head.gate.of_text(text.sentence).unsqueeze(1)
    means = (weights.sigmoid().mean(-1)[:, None, :] * audible).sum(-1) / audible.sum(-1)
    shown = [captions.index(str(caption)) for caption in found["gate.captions"]]
    assert shown == [int(means.nan_to_num(-1).argmax()), int(means.nan_to_num(2).argmin())]


def test_merged_patches_are_never_split_again(splits, measured):
    members = measured["dpdv"]["merging.members"]
    stages = measured["dpdv"]["merging.left"].tolist()
    assert stages == splits["dpdv"].module.reduction.options.schedule(16)
    for video in members:
        for stage, left in enumerate(stages):
            for frame in range(video.shape[1]):
                assert len(np.unique(video[stage, frame])) == left
        for coarse, fine in zip(video[1:], video[:-1], strict=True):
            for frame in range(video.shape[1]):
                pairs = {(int(a), int(b)) for a, b in zip(fine[frame], coarse[frame], strict=True)}
                assert len(pairs) == len(np.unique(fine[frame]))


def test_the_spot_frames_are_the_most_similar_to_the_caption(splits, measured):
    encoded, found = splits["dpdv"], measured["dpdv"]
    videos, texts = rows_of(encoded)
    shown = (found[f"merging.{field}"] for field in ("names", "captions", "spot"))
    for name, caption, spot in zip(*shown, strict=True):
        text, video = texts[str(caption)], videos[str(name)]
        assert encoded.matching[text] == video
        cosine = F.cosine_similarity(encoded.videos.frames[video], encoded.texts.sentence[text], dim=-1)
        assert sorted(np.flatnonzero(spot)) == sorted(cosine.topk(2).indices.tolist())  # half of four frames
