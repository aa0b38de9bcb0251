"""External scores in all supported formats, compared with the authors' code and pytrec_eval."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from metric_rows import released_row
from safetensors.torch import load_file
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, MSVD
from tvr_lightning.data.records import Split, TextRecord, VideoRecord
from tvr_lightning.evaluation.scores_file import write_trec

IDS = {"single": "--ids=single.csv", "multi": "--ids=multi.parquet"}
SINGLE = ("single.npy", IDS["single"])
QB_NORM = ("single.npy", "--normalization=QueryBankNorm")
VIDEOS = [f"v{i}" for i in range(60)]


@pytest.fixture(scope="module")
def case(parity_cases) -> dict[str, torch.Tensor]:
    """Tensors of the released metrics' case by the end of their names."""
    return {name.split("/")[-1]: tensor for name, tensor in load_file(parity_cases / "metrics.safetensors").items()}


@pytest.fixture
def folder(tmp_path, case, monkeypatch) -> Path:
    """A working folder with the case's matrices and tables of ids, one video per text and several texts per video."""
    monkeypatch.chdir(tmp_path)
    np.save("single.npy", case["single.similarity"].numpy())
    np.save("bank.npy", case["qbnorm.bank_similarity"].numpy())
    np.save("multi.npy", case["multi.similarity"].numpy())
    pd.DataFrame({"video_id": VIDEOS}).to_csv("single.csv", index=False)
    # Columns are numbered as videos first come, so that the table must name them in the matrix's order.
    order = {int(video): None for video in case["multi.caption_video"]}
    assert list(order) == sorted(order)
    pd.DataFrame({"video_id": [f"v{int(i)}" for i in case["multi.caption_video"]]}).to_parquet("multi.parquet")
    return tmp_path


def evaluated(*words: str) -> dict:
    before = set(Path().glob("runs/**/results.json"))
    assert main(["evaluate", *words]) == 0
    (written,) = set(Path().glob("runs/**/results.json")) - before
    return json.loads(written.read_text())


@pytest.mark.parametrize(
    ("words", "text_to_video", "video_to_text"),
    [
        (SINGLE, "single.t2v", "single.v2t"),
        ((*SINGLE, "--normalization=DualSoftmax"), "dsl.t2v", "dsl.v2t"),
        ((*QB_NORM, IDS["single"], "--bank_texts=bank.npy"), "qbnorm.t2v(k=1,beta=20)", None),
        (("multi.npy", IDS["multi"]), "multi.t2v", "multi.v2t_clip4clip"),
    ],
)
def test_metrics_equal_those_of_the_released_code(folder, parity_cases, words, text_to_video, video_to_text):
    found = evaluated(*words)
    for direction, row in {"text_to_video": text_to_video, "video_to_text": video_to_text}.items():
        for name, value in (released_row(parity_cases, row) if row else {}).items():
            assert found[direction][name] == pytest.approx(value, abs=1e-5)
            if name != "MdR":
                ends = found["intervals"][direction.replace("_", "-")][name]
                assert ends["low"] <= found[direction][name] <= ends["high"]
                assert ends["low"] < ends["high"] or ends["low"] == 100
    assert found["weights"]["kind"] == "outside"
    assert found["audit"] is None


def differences(name: str) -> pd.DataFrame:
    """Differences in the report, by pair of systems, direction, and metric."""
    table = pd.read_csv(f"runs/evaluated/report/tables/{name}-differences.csv")
    return table.set_index(["system", "compared with", "direction", "metric"]).sort_index()


def pairs_of(videos: list[str], texts: int) -> Split:
    """A split of videos, of which each of the first has a text."""
    records = [TextRecord(f"text {index}", index) for index in range(texts)]
    return Split("test", "pairs", [VideoRecord(video, Path()) for video in videos], records)


def read_trec(folder: Path) -> tuple[dict, dict]:
    """Read a run and its qrels with pytrec_eval; each query has its measures."""
    import pytrec_eval

    with (folder / "qrels.trec").open() as qrels, (folder / "run.trec").open() as file:
        run, relevant = pytrec_eval.parse_run(file), pytrec_eval.parse_qrel(qrels)
    return run, pytrec_eval.RelevanceEvaluator(relevant, {"success", "recip_rank", "ndcg_cut"}).evaluate(run)


@pytest.mark.parametrize("options", [[], ["--normalization=DualSoftmax"]])
@pytest.mark.parametrize("name", ["single", "multi"])
def test_pytrec_eval_computes_the_same_metrics_from_a_trec_run(folder, case, name, options, capsys):
    metrics = ("--metrics=mrr", "--metrics=ndcg@10", "--metrics=mrr")
    found = evaluated(f"{name}.npy", IDS[name], *options, *metrics, "--trec", "--name=My method")
    assert {"nDCG@10", "MRR"} <= set(capsys.readouterr().out.split())
    (file,) = folder.glob("runs/**/run.trec")
    run, measured = read_trec(file.parent)
    assert len(measured) == found["texts"]
    measures = {"success_1": "R@1", "success_5": "R@5", "ndcg_cut_10": "nDCG@10", "recip_rank": "MRR"}
    for measure, column in measures.items():
        mean = 100 * sum(row[measure] for row in measured.values()) / len(measured)
        assert found["text_to_video"][column] == pytest.approx(mean), column
        ends = found["intervals"]["text-to-video"][column]
        assert ends["low"] < mean < ends["high"], column
    lines = [line.split() for line in file.read_text().splitlines()]
    assert {(len(line), line[1], line[5]) for line in lines} == {(6, "Q0", "My-method")}
    assert [int(line[3]) for line in lines] == list(range(1, found["videos"] + 1)) * found["texts"]
    if not options:
        row = case[f"{name}.similarity"][3].tolist()
        assert run["3"] == pytest.approx({f"v{i}": score for i, score in enumerate(row)})


def test_a_trec_run_keeps_order_and_ties_of_double_precision(folder):
    row = [1.0, 1.0, 1.0 - 1e-12, 1.0 - 1e-9, 0.5, 1e-100, 1e-200, 0.0, -0.0, -1e-300, -1.0, -1.0 - 1e-12]
    scores = torch.tensor([row] * len(row), dtype=torch.float64)
    write_trec(folder, scores, pairs_of(VIDEOS[: len(row)], len(row)), "tag")
    run, _ = read_trec(folder)
    written = np.array([run["0"][f"v{i}"] for i in range(len(row))], dtype=np.float32)
    assert (np.sign(np.diff(written)) == np.sign(np.diff(row))).all()
    assert written == pytest.approx(row, abs=1e-6)


def test_a_trec_run_lists_scored_pairs_and_the_best_thousand_videos(folder, monkeypatch):
    monkeypatch.setattr("tvr_lightning.evaluation.scores_file.TREC_CHUNK", 4000)  # three texts at a time
    scores = torch.randn(8, 1200, generator=torch.Generator().manual_seed(0))
    videos = [f"clip {i}%.mp4" for i in range(1200)]
    scores[5, 100:] = float("-inf")
    write_trec(folder, scores, pairs_of(videos, 8), "tag")
    run, measured = read_trec(folder)
    assert [len(run[str(text)]) for text in range(8)] == [1000] * 5 + [100] + [1000] * 2
    assert min(run["0"].values()) == scores[0].sort(descending=True).values[999]
    assert run["2"]["clip%207%25.mp4"] == scores[2, 7]
    places = (scores > scores.diag()[:, None]).sum(1) + 1
    for text, place in enumerate(places.tolist()):
        assert measured[str(text)]["recip_rank"] == pytest.approx(1 / place if place <= 1000 else 0)
    assert [file.name for file in folder.glob("*.writing")] == []


def test_all_file_formats_give_the_same_results(folder, case, capsys):
    matrix = case["single.similarity"]
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randperm(60, generator=generator), torch.randperm(60, generator=generator)
    names = [f"v{int(i)}" for i in columns]
    np.savez("named.npz", scores=matrix[rows][:, columns].numpy(), video_ids=names, text_index=rows.numpy())
    torch.save({"similarity": matrix[:, columns], "video_ids": names}, "named.pt")
    torch.save(matrix, "bare.pt")
    table = pd.DataFrame({"text_index": np.repeat(np.arange(60), 60), "video_id": VIDEOS * 60})
    table.assign(score=matrix.flatten().numpy()).sample(frac=1, random_state=0).to_parquet("pairs.parquet")
    plain = evaluated(*SINGLE)
    assert "EXTERNAL SCORES: single.npy" in capsys.readouterr().out
    for file in ("named.npz", "named.pt", "bare.pt", "pairs.parquet"):
        found = evaluated(file, IDS["single"])
        for part in ("text_to_video", "video_to_text", "intervals", "texts", "videos", "warnings", "partial"):
            assert found[part] == plain[part], (file, part)


def test_large_whole_numbers_keep_their_order(folder):
    np.save("whole.npy", 2**24 + np.eye(60, dtype=np.int64))
    assert evaluated("whole.npy", IDS["single"])["text_to_video"]["R@1"] == 100.0


def test_a_bank_is_sorted_by_its_ids(folder, case):
    bank, generator = case["qbnorm.bank_similarity"].numpy(), torch.Generator().manual_seed(0)
    columns, rows = (torch.randperm(60, generator=generator).numpy() for _ in range(2))
    np.savez("bank_texts.npz", similarity=bank[:, columns], video_ids=[f"v{i}" for i in columns])
    np.save("bank_videos.npy", bank.T)
    np.savez("bank_videos.npz", similarity=bank.T[rows], text_index=rows)
    plain = evaluated(*QB_NORM, IDS["single"], "--bank_texts=bank.npy", "--bank_videos=bank_videos.npy")
    found = evaluated(*QB_NORM, IDS["single"], "--bank_texts=bank_texts.npz", "--bank_videos=bank_videos.npz")
    for part in ("text_to_video", "video_to_text", "intervals", "warnings"):
        assert found[part] == plain[part], part


def test_unlisted_pairs_rank_last_and_are_reported(folder):
    table = pd.DataFrame({"text_index": [0, 1, 1], "video_id": ["v0", "v0", "v1"], "score": [0.5, 0.9, 0.1]})
    table.to_parquet("few.parquet")
    (folder / "ids.csv").write_text("video_id\nv0\nv1\nv2\n")
    found = evaluated("few.parquet", "--ids=ids.csv")
    assert found["partial"]
    assert "6 of 9 pairs have no score" in found["warnings"][0]
    assert found["text_to_video"]["MnR"] == pytest.approx((1 + 2 + 2) / 3)  # the third text is at chance among three


def test_two_matrices_are_compared_on_the_same_queries(folder, case, capsys):
    single = case["single.similarity"]
    better = single + 0.5 * torch.eye(60, dtype=torch.float64) * single.std()
    better += 3 * single.std() * torch.arange(60)[:, None]  # worse in video-to-text: pairs are ordered by text-to-video
    np.save("better.npy", better.numpy())
    assert main(["evaluate", "single.npy", "better.npy", IDS["single"], "--metrics=mrr"]) == 0
    assert "better against single, t2v R@1: +" in capsys.readouterr().out
    table = pd.read_csv("runs/evaluated/report/tables/single-differences.csv")
    assert list(table["title"].unique()) == ["single test, texts of single.csv: 60 pairs; training unknown"]
    runs = [folder / f"runs/evaluated/{name}-single/version_0/results.json" for name in ("single", "better")]
    tables = [json.loads(path.read_text()) for path in runs]
    rows = differences("single").loc["better", "single", "t2v"]
    gain = tables[1]["text_to_video"]["R@1"] - tables[0]["text_to_video"]["R@1"]
    assert rows.loc["R@1", "difference"] == pytest.approx(gain)
    assert gain > 0
    assert rows.loc["MnR", "p"] < 0.05
    assert rows.loc["MRR", "difference"] > 0


def test_intervals_and_comparisons_take_captions_of_a_video_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    videos, captions, random = 80, 6, np.random.default_rng(0)
    video = np.arange(videos).repeat(captions)  # whose captions have almost the same scores
    matrices, found = {}, {}
    for name, strength in (("weak", 1.5), ("strong", 2.5)):
        per_video = random.normal(size=(videos, videos)) + strength * np.eye(videos)
        matrices[name] = per_video[video] + 0.01 * random.normal(size=(len(video), videos))
        np.save(f"{name}.npy", matrices[name])
    pd.DataFrame({"video_id": video}).to_csv("ids.csv", index=False)
    assert main(["evaluate", "weak.npy", "strong.npy", "--ids=ids.csv"]) == 0
    for name, matrix in matrices.items():
        (file,) = Path().glob(f"runs/evaluated/{name}-ids/version_0/results.json")
        own = matrix[np.arange(len(video)), video]
        found[name] = 100.0 * ((matrix > own[:, None]).sum(1) < 1)
        ends = json.loads(file.read_text())["intervals"]["text-to-video"]["R@1"]
        of_video = found[name].reshape(videos, captions).mean(1)
        expected = np.quantile(of_video[random.integers(0, videos, (5000, videos))].mean(1), [0.025, 0.975])
        assert [ends["low"], ends["high"]] == pytest.approx(expected, abs=1.5), (
            "independent texts would halve the interval"
        )
    row = differences("ids").loc["strong", "weak", "t2v", "R@1"]
    of_video = (found["strong"] - found["weak"]).reshape(videos, captions).mean(1)
    half = 1.96 * of_video.std() / videos**0.5
    assert row["difference"] == pytest.approx(of_video.mean())
    assert [row["low"], row["high"]] == pytest.approx([of_video.mean() - half, of_video.mean() + half], abs=2)


def test_predictions_of_a_method_give_its_test_results(synthetic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = synthetic("msvd", 8)
    evaluation = "--model.init_args.evaluation"
    more = ("--config=data/msvd", "--config=fixture", f"{evaluation}.audit=0", f"{evaluation}.top_k=1000")
    options = [*small_run(root, tmp_path / "runs", *more), f"--data.init_args.root={root}"]
    assert main(["test", *options]) == 0
    (written,) = tmp_path.glob("runs/*/*/results.json")
    tested = json.loads(written.read_text())
    assert main(["predict", *options]) == 0
    (predictions,) = tmp_path.glob("runs/*/*/predictions.parquet")
    found = evaluated(str(predictions), "--data=MSVD", f"--data.init_args.root={root}")
    same = ("text_to_video", "video_to_text", "sum_of_recalls", "intervals", "dataset", "split", "protocol", "texts")
    for part in (*same, "videos"):
        assert found[part] == tested[part], part
    assert found["texts"] > found["videos"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_numbers_are_video_ids_from_zero(folder, suffix):
    table = pd.DataFrame({"video_id": range(60)})
    write = {"jsonl": lambda file: table.to_json(file, orient="records", lines=True), "csv": table.to_csv}
    write.get(suffix, table.to_parquet)(f"numbers.{suffix}")
    names = torch.arange(60).flip(0)
    torch.save({"similarity": torch.eye(60).flip(1), "video_ids": names}, "named.pt")
    table.assign(text_index=range(60), score=1.0).to_parquet("pairs.parquet")
    for scores in ("named.pt", "pairs.parquet"):
        assert evaluated(scores, f"--ids=numbers.{suffix}")["text_to_video"]["R@1"] == 100


def test_unusable_scores_are_refused_in_one_line(folder, case, capsys):
    matrix, bank = case["single.similarity"].numpy(), case["qbnorm.bank_similarity"].numpy()
    np.save("small.npy", matrix[:59])
    np.save("nan.npy", np.where(np.arange(3600).reshape(60, 60) == 187, np.nan, matrix))
    np.save("objects.npy", np.array([[print]]), allow_pickle=True)
    np.save("narrow.npy", bank[:, :-1])
    (folder / "cut.npy").write_bytes((folder / "single.npy").read_bytes()[:1000])
    torch.save(torch.nn.Linear(2, 2), "code.pt")
    np.savez("strange.npz", similarity=matrix, video_ids=["w", *VIDEOS[1:]])
    np.savez("twice.npz", similarity=matrix, video_ids=["v0"] * 60)
    np.savez("short.npz", similarity=matrix[:, :59], video_ids=VIDEOS[:59])
    np.savez("few.npz", similarity=bank, video_ids=VIDEOS[:59])
    np.savez("first.npz", similarity=bank.T[:59], text_index=np.arange(59))
    np.savez("late.npz", similarity=bank.T, text_index=np.arange(1, 61))
    pd.DataFrame({"text_index": [0], "video_id": ["w"], "score": [1.0]}).to_parquet("alien.parquet")
    pd.DataFrame({"text_index": [0], "video_id": ["v0"], "score": ["high"]}).to_parquet("words.parquet")
    torch.save({"similarity": case["single.similarity"], "text_index": [i / 2 for i in range(60)]}, "halves.pt")
    torch.save({"similarity": case["single.similarity"], "video_ids": 7}, "one.pt")
    torch.save(case["single.similarity"].to_sparse(), "sparse.pt")
    texts, videos = (*QB_NORM, "--bank_texts"), (*QB_NORM, "--bank_videos")
    np.save("wide.npy", case["multi.similarity"].T.numpy())
    Path("title.csv").write_text("clip,sentence\nv0,a\n")
    Path("bad.trec").write_text("0 Q0 v0 1 0.5 x\n1 Q0 v1\n")
    Path("alien.run").write_text("0 Q0 w 1 0.5 x\n")
    Path("nan.run").write_text("0 Q0 v0 1 0.5 x\n1 Q0 v1 1 nan x\n")
    Path("long.run").write_text("0 Q0 v0 1 0.5 x\n1 Q0 v 1 1 0.5 x\n")
    for words, message in (
        (["small.npy"], "small.npy: 59 rows for the 60 texts of single.csv"),
        (["nan.npy"], "nan.npy: 1 of 3600 scores are NaN or infinite, the first in row 3, column 7"),
        (["strange.npz"], "strange.npz: column 0: video 'w' is not in single.csv"),
        (["twice.npz"], "twice.npz: column 1: video 'v0' occurs twice"),
        (["short.npz"], "short.npz: video 'v59' of single.csv is missing"),
        (["cut.npy"], "cut.npy: cannot be read"),
        (["objects.npy"], "objects.npy: cannot be read (Object arrays cannot be loaded"),
        (["code.pt"], "code.pt: cannot be read (it contains more than tensors"),
        (["gone.npy"], "gone.npy: no such file"),
        (["alien.parquet"], "video 'w' is not in single.csv"),
        (QB_NORM, "needs scores of training queries"),
        ([*texts, "few.npz"], "few.npz: 59 video IDs for 60 columns"),
        ([*texts, "narrow.npy"], "narrow.npy: 59 columns for the 60 videos of single.csv"),
        ([*videos, "first.npz"], "first.npz: text 59 of single.csv is missing"),
        ([*videos, "late.npz"], "late.npz: row 59: text 60 is not in single.csv"),
        (["words.parquet"], "words.parquet: the column score contains other values than numbers"),
        (["halves.pt"], "halves.pt: text_index contains other values than whole numbers"),
        (["one.pt"], "one.pt: 1 video IDs for 60 columns"),
        (["sparse.pt"], "sparse.pt: expected a dense matrix of numbers"),
        (["single.npy", "--name=../../x"], "--name is ../../x; expected a name without slashes"),
        (["single.npy", "--metrics=map"], "--metrics is map; expected ndcg@10 or mrr"),
        (["wide.npy", IDS["multi"]], "wide.npy is transposed: its 25 rows are the videos of multi.parquet"),
        (["single.npy", "--ids=title.csv"], "title.csv: header: the column with the ID of each text's video is"),
        (["bad.trec"], "bad.trec: not a run in TREC's format"),
        (["alien.run"], "alien.run: row 0: video 'w' is not in single.csv"),
        (["nan.run"], "nan.run: 1 of 2 scores are NaN or infinite, the first in row 1 (counted from 0)"),
        (["long.run"], "`text Q0 video rank score tag` (line 2 does not have 6 fields)"),
        ([*QB_NORM, "--bank=half", "--bank_texts=bank.npy"], "--bank_texts cannot be used with --bank half"),
        (["single.npy", "single.npy"], "Two files of scores are named single"),
        (["single.npy", "--published=gare-0"], "There is no table 'gare-0'"),
    ):
        ids = [] if any(word.startswith("--ids") for word in words) else [IDS["single"]]
        assert main(["evaluate", *words, *ids]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("tvr: ")
        assert message in line
    assert main(["evaluate", "single.npy"]) == 2
    assert "Give either a dataset" in capsys.readouterr().err
    assert not list(Path().glob("runs/**/results.json"))
    assert not list(folder.parent.glob("x-*"))


def test_a_table_of_texts_gives_the_order_of_rows_and_columns(folder, case, msrvtt):
    dataset = MSRVTT(root=str(msrvtt)).read_split("test")
    videos = [video.video_id for video in dataset.videos]
    count, generator = len(videos), torch.Generator().manual_seed(0)
    order = torch.randperm(count, generator=generator).tolist()
    matrix = torch.randn(count, count, generator=generator) + torch.eye(count)
    lines = [f'r{row},{videos[video]},"a text\nof {row}"' for row, video in enumerate(order)]
    Path("order.csv").write_text("\n".join(["key,vid,sentence", *lines]))
    np.save("plain.npy", matrix)
    np.save("shuffled.npy", matrix[order][:, order])
    rows = [
        f"r{row} Q0 {videos[column]} 1 {float(matrix[order[row], column])} x"
        for row in range(count)
        for column in range(count)
    ]
    Path("run.trec").write_text("\n".join(rows))
    data = ("--data=MSRVTT", f"--data.init_args.root={msrvtt}")
    plain = evaluated("plain.npy", *data)
    assert (plain["dataset"], plain["protocol"]) == ("synthetic MSR-VTT", "1k-A, one caption per video")
    for words in (["shuffled.npy", *data], ["run.trec", *data], ["shuffled.npy"], ["run.trec"]):
        found = evaluated(*words, "--ids=order.csv")
        for part in ("text_to_video", "video_to_text"):
            assert found[part] == pytest.approx(plain[part]), words
        assert (found["dataset"] == plain["dataset"]) == (len(words) > 1)
    ranks = [pd.read_parquet(file) for file in sorted(Path().glob("runs/evaluated/*synthetic*/*/ranks.parquet"))]
    assert len(ranks) == 3
    assert all(table[["index", "video", "query"]].equals(ranks[0][["index", "video", "query"]]) for table in ranks)
    alone = pd.read_parquet("runs/evaluated/shuffled-order/version_0/ranks.parquet").query(
        "direction == 'text-to-video'"
    )
    assert list(alone["query"]) == [f"a text of {row}" for row in range(count)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_trec_run_names_texts_by_numeric_ids_and_videos_by_any_word(folder, first):
    names = ["null", "NA", "nan"]
    rows = [f"{text + first},{video}" for text, video in enumerate(names)]
    Path("named.csv").write_text("\n".join(["text_id,video_id", *rows]))
    lines = [f"{text + first} Q0 {video} 1 1.0 None" for text, video in enumerate(names)]
    Path("named.trec").write_text("\n".join(lines))
    assert evaluated("named.trec", "--ids=named.csv")["text_to_video"]["R@1"] == 100.0
    assert main(["evaluate", "named.trec", "--ids=single.csv"]) == 2


def test_texts_of_several_captions_are_found_by_their_words(folder, synthetic):
    root = synthetic("msvd", 8)
    split = MSVD(root=str(root)).read_split("test")
    order = torch.randperm(len(split.texts), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [split.texts[text] for text in order]
    table = pd.DataFrame(
        {"video": [split.videos[text.video].video_id for text in texts], "caption": [t.text for t in texts]}
    )
    table.to_parquet("order.parquet")
    columns = list(dict.fromkeys(text.video for text in texts))
    matrix = np.random.default_rng(0).normal(size=(len(split.texts), len(split.videos)))
    np.save("plain.npy", matrix)
    np.save("shuffled.npy", matrix[order][:, columns])
    data = ("--data=MSVD", f"--data.init_args.root={root}")
    plain, found = evaluated("plain.npy", *data), evaluated("shuffled.npy", *data, "--ids=order.parquet")
    assert found["text_to_video"] == pytest.approx(plain["text_to_video"])
    assert found["video_to_text"] == pytest.approx(plain["video_to_text"])


@pytest.mark.parametrize(
    ("change", "marks"),
    [
        (lambda m: m, []),
        (lambda m: np.exp(m) / np.exp(m).sum(1, keepdims=True), ["softmax"]),
        (lambda m: np.where(m >= np.sort(m)[:, [-20]], m, 0), ["zeros"]),
        (lambda m: np.where(m >= np.sort(m)[:, [-20]], m, 0).T, ["zeros", "transposed?"]),
        (lambda m: np.round(m) + 0.5, ["ties", "ties"]),
        (lambda m: np.roll(m, 1, axis=0), ["chance"]),
        (lambda m: m + 20 * np.eye(len(m)), ["100.0", "100.0"]),
    ],
)
def test_scores_that_cannot_be_compared_are_marked_in_the_table(folder, change, marks):
    matrix = np.random.default_rng(0).normal(size=(200, 200)) + 3 * np.eye(200)
    np.save("scores.npy", change(matrix))
    pd.DataFrame({"video_id": range(200)}).to_csv("ids.csv", index=False)
    warnings = evaluated("scores.npy", "--ids=ids.csv")["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == marks
    shown = f"scores [{', '.join(['external', *dict.fromkeys(marks)])}]"
    page = Path("runs/evaluated/report/report.md").read_text()
    assert f"| {shown} |" in page
    assert page.splitlines()[2].endswith("| tied matches % here |")
    assert (float(page.splitlines()[4].split("|")[-2]) > 5) == ("ties" in marks)


def test_intervals_of_a_normalization_with_the_test_queries_are_marked(folder, capsys):
    for words, marked in (
        (("single.npy", "--normalization=DualSoftmax"), True),
        ((*QB_NORM, "--bank_texts=bank.npy"), False),
    ):
        evaluated(*words, IDS["single"])
        assert ("may be too narrow" in capsys.readouterr().out) == marked
        assert ("| single [external, transductive] |" in Path("runs/evaluated/report/report.md").read_text()) == marked


@pytest.mark.parametrize(
    ("dataset", "listed"), [("msrvtt", "MSRVTT"), pytest.param("didemo", "DiDeMo", marks=pytest.mark.slow)]
)
def test_real_matrices_give_the_recalls_of_a_plain_count(test_data, dataset, listed, tmp_path, monkeypatch):
    """Matrices of CLIP4Clip, InternVideo2, and VAST, and the texts in their rows."""
    monkeypatch.chdir(tmp_path)
    scores, annotations = test_data / "scores", test_data / "annotations"
    systems = [scores / f"{name}_{dataset}.npz" for name in ("clip4clip", "VAST", "InternVideo2")]
    ids = f"--ids={scores / f'descs_ret_test_{dataset}.csv'}"
    assert main(["evaluate", *map(str, systems), ids]) == 0
    for system in systems:
        (file,) = Path().glob(f"runs/evaluated/{system.stem.lower()}-*/version_0/results.json")
        found, matrix = json.loads(file.read_text()), np.load(system)["arr_0"]
        for direction, rows in (("text_to_video", matrix), ("video_to_text", matrix.T)):
            own = rows.diagonal()[:, None]
            better, tied = (rows > own).sum(1), (rows == own).sum(1)
            for k in (1, 5, 10):
                expected = 100 * np.clip((k - better) / tied, 0, 1).mean()
                assert found[direction][f"R@{k}"] == pytest.approx(expected, abs=0.01)
    assert len(differences(f"descs_ret_test_{dataset}")) == 3 * (2 * 5 + 1)
    assert main(["evaluate", str(systems[-1]), ids, f"--data={listed}", f"--data.init_args.root={annotations}"]) == 0
    (file,) = set(Path().glob(f"runs/evaluated/{systems[-1].stem.lower()}-*/*/results.json")) - {file}
    named = json.loads(file.read_text())
    assert named["text_to_video"] == found["text_to_video"]
    assert named["texts"] == found["texts"]
    assert named["partial"] == (dataset == "didemo"), "one text of DiDeMo is missing"
