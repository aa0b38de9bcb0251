"""Test suite that every method must pass, configured by its recipe."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tvr_lightning.audit.experiments import Features
from tvr_lightning.audit.run import audit_method
from tvr_lightning.config.recipe_files import read_recipe
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.features import TextFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.testing.processes import STEPS, Batches, comparable, of_two_processes, quiet_trainer, trained
from tvr_lightning.testing.small import random_pairs, small, small_encoder, synthetic_data, unconditioned
from tvr_lightning.training.options import flat_options, other_options


class MethodTestSuite:
    """Tests of one method, for a subclass whose name begins with `Test`.

    Attributes:
        recipe: Recipe of the method.
        together: Recipes whose methods are trained in the same two processes, because processes are slow to start.
    """

    recipe: Path
    together: Sequence[Path] = ()

    @pytest.fixture(autouse=True)
    def _slow_only_on_request(self, request: pytest.FixtureRequest) -> None:
        if request.node.get_closest_marker("slow") and "slow" not in request.config.option.markexpr:
            pytest.skip("slow; select it with -m slow")

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls) -> tuple[RetrievalModule, TextVideoDataModule]:
        """Return the recipe's method, small and with another memory budget, and its data."""
        return small(cls.recipe, "--model.init_args.evaluation.memory_gib=0.5")

    @pytest.fixture(scope="class")
    @classmethod
    def method(cls, built: tuple[RetrievalModule, TextVideoDataModule]) -> RetrievalModule:
        """Return the recipe's method, small, in evaluation mode and without gradients."""
        return built[0].eval().requires_grad_(False)

    @pytest.fixture
    def heads(self, method: RetrievalModule) -> list[PairHead]:
        """Return the parts of the method that score in blocks."""
        return [part for part in method.modules() if isinstance(part, PairHead)]

    @pytest.fixture(scope="class")
    @classmethod
    def stored(cls, method: RetrievalModule) -> Features:
        """Return features of 6 texts and 6 videos before the method's own layers; the second video has two frames."""
        text, video = unconditioned(method, random_pairs(method, 6))
        video.frame_mask[1, 2:] = False
        return text, video

    @pytest.fixture(scope="class")
    @classmethod
    def features(cls, method: RetrievalModule, stored: Features) -> Features:
        """Return features of 6 texts and 6 videos, as inputs of `score`."""
        return method.encode_text(stored[0]), method.encode_video(stored[1])

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[RetrievalModule, Path]:
        """Train the method for a few steps on the synthetic data, and return it with the saved checkpoint."""
        method, data = small(cls.recipe)
        path = tmp_path_factory.mktemp("contract") / "last.ckpt"
        trainer = quiet_trainer(max_steps=STEPS, limit_val_batches=0)
        trainer.fit(method, datamodule=data)
        assert trainer.global_step == STEPS
        trainer.save_checkpoint(path)
        return method.eval().requires_grad_(False), path

    def test_scores_depend_on_nothing_but_the_text_and_the_video(
        self, built: tuple[RetrievalModule, TextVideoDataModule]
    ) -> None:
        """Test that the audit finds no leak."""
        leaks = [finding for finding in audit_method(*built).findings if finding.leaks]
        assert not leaks, f"a score depends on more than its text and its video: {leaks}"

    def test_no_part_of_its_recipe_is_left_out(self, method: RetrievalModule) -> None:
        """Test that the tested method has all options of its recipe, apart from the size of its encoder."""
        given = read_recipe(self.recipe)["model"]["init_args"] | {"encoder": small_encoder(self.recipe)}
        found = dict(flat_options("model", dict(method.hparams)))
        left_out = [name for name, value in flat_options("model", given) if found.get(name, "nothing") != value]
        assert not left_out, f"the method was built without these options of its recipe: {', '.join(left_out)}"

    def test_its_parameters_can_be_sharded(self, method: RetrievalModule) -> None:
        """Test that no parameter is a scalar, since FSDP2 shards parameters along their first dimension."""
        scalars = [name for name, parameter in method.named_parameters() if not parameter.ndim]
        assert not scalars, f"FSDP2 cannot shard scalars: give {', '.join(scalars)} the shape (1,)"

    def test_a_pair_scores_alone_as_among_others(self, method: RetrievalModule, features: Features) -> None:
        """Test that the score of a pair does not depend on other pairs or their order."""
        text, video = features
        scores = method.score(text, video).similarity
        assert scores.shape == (len(text), len(video))
        for i, j in ((0, 0), (2, 1), (5, 3)):
            alone = method.score(text[i : i + 1], video[j : j + 1]).similarity
            close(alone, scores[i : i + 1, j : j + 1], f"text {i} and video {j} alone, which others must not change")
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        places = torch.tensor([5, 1, 0, 3])
        again = method.score(text[order], video[places]).similarity
        close(again, scores[order][:, places], "in another order, among fewer videos")

    @pytest.mark.parametrize("part", ["words", "frames"])
    def test_padding_changes_a_score_only_where_the_method_says_so(
        self, method: RetrievalModule, stored: Features, part: str
    ) -> None:
        """Test that the content and amount of padding affect no score, except for parts in `reads_padding`."""

        def scores(change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            """Return the scores after a change of each tensor, given the mask of its items."""
            text, video = stored
            if part == "words":
                words, mask = (change(tensor, text.word_mask) for tensor in (text.words, text.word_mask))
                text = TextFeatures(text.sentence, words, mask)
            else:
                video = video.apply(lambda tensor: change(tensor, video.frame_mask))
            return method.score(method.encode_text(text), method.encode_video(video)).similarity

        usual = scores(lambda tensor, mask: tensor)
        changed = [scores(filled)]
        with contextlib.suppress(ValueError, RuntimeError):  # the sizes of parameters may depend on the recipe
            changed.append(scores(lengthened))
        if part not in method.reads_padding:
            for found in changed:
                close(found, usual, f"scores depend on the padding of {part}: mask it, or name it in `reads_padding`")
        elif all(torch.allclose(found, usual) for found in changed):
            pytest.fail(f"reads_padding names {part}, but scores do not depend on its padding")

    def test_both_forms_of_pair_vectors_score_alike(
        self, method: RetrievalModule, heads: list[PairHead], features: Features, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Test that factorized pair vectors give the same scores as dense ones."""
        scores = []
        for form in (PairVectors, DensePairVectors):
            for head in heads:
                monkeypatch.setattr(head, "required_form", form)
            scores.append(method.score(*features).similarity)
        close(scores[0], scores[1])

    def test_a_small_memory_budget_changes_nothing(
        self, method: RetrievalModule, heads: list[PairHead], features: Features, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Test that the smallest blocks give the same scores, in the evaluation and in the method's heads."""
        whole = method.score(*features).similarity
        for head in heads:
            monkeypatch.setattr(head, "pair_numbers", lambda text, video: 2**20)
            monkeypatch.setattr(head, "memory_gib", 2**-6)
        found = torch.full_like(whole, float("nan"))
        for block in PairScores(method.score, *features, memory_budget_bytes=1).blocks():
            found[block.rows, block.columns] = block.values
        close(found, whole)

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
    def test_half_precision_on_the_way_in_is_scored_in_single_precision(
        self, method: RetrievalModule, heads: list[PairHead], features: Features, kind: torch.dtype
    ) -> None:
        """Test that heads do not round further; methods without a head get single precision."""
        if not heads:
            pytest.skip("the method has no head that scores in blocks")
        text = features[0].to(kind)
        video = features[1].to(kind)
        found = method.score(text, video).similarity
        assert found.dtype == torch.float32
        close(found, method.score(text.float(), video.float()).similarity)

    def test_no_text_or_no_video_gives_no_score_and_no_number_in_its_place(
        self, method: RetrievalModule, heads: list[PairHead], features: Features
    ) -> None:
        """Test that heads raise an error for empty inputs, and that other methods return an empty matrix."""
        text, video = features
        for texts, videos in ((text[:0], video), (text, video[:0]), (text[:0], video[:0])):
            with pytest.raises(ValueError, match="nothing to score") if heads else contextlib.nullcontext():
                assert method.score(texts, videos).similarity.shape == (len(texts), len(videos))

    def test_its_heads_have_the_memory_budget_of_the_evaluation(self, heads: list[PairHead]) -> None:
        """Test that `evaluation.memory_gib` is the only memory budget of a run."""
        budgets = {head.memory_gib for head in heads}
        assert budgets <= {0.5}, "build the head with .within(evaluation_config.memory_gib)"

    def test_compact_features_score_as_whole_ones(self, method: RetrievalModule, features: Features) -> None:
        """Test that the compact features in banks and queues give the same scores."""
        compact = method.compact_text(features[0]), method.compact_video(features[1])
        close(method.score(*compact).similarity, method.score(*features).similarity)

    def test_any_contrast_can_be_given_to_it(self) -> None:
        """Test that NCL changes only the logits of the loss, and that its queues contain all features for scoring."""
        contrast = ["--model.init_args.contrast=NCL", "--model.init_args.contrast.init_args.queue_size=8"]
        method = small(self.recipe, *contrast)[0].eval()
        without = ["--model.init_args.contrast=null", "--model.init_args.evaluation.normalization=null"]
        plain = small(self.recipe, *without)[0].eval()
        losses = []
        for each in (method, plain):
            pairs = each.pair_features(random_pairs(each, 6))
            torch.manual_seed(1)
            losses.append(each.contrast.terms(each.losses, pairs))
        assert losses[0].keys() == losses[1].keys()
        changed = [name for name, term in losses[0].items() if not torch.allclose(term, losses[1][name], rtol=1e-4)]
        assert changed, "no term of the loss sees the contrast: pass its logits through contrastive_logits"
        torch.stack([term.reshape(()) for term in losses[0].values()]).sum().backward()
        with torch.no_grad():
            for each in (method, plain):
                each.update_state(pairs.detach())
            scores = method.score(pairs.text, pairs.video).similarity
            close(scores, plain.score(pairs.text, pairs.video).similarity)
            bank = method.bank()
            close(method.score(bank.texts, bank.videos).similarity, scores)

    def test_a_checkpoint_brings_it_back(self, checkpoint: tuple[RetrievalModule, Path]) -> None:
        """Test that weights and options load without running code, and give the same scores as before saving."""
        method, path = checkpoint
        again = type(method).load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()
        assert other_options(dict(method.hparams), dict(again.hparams)) == []
        scores = []
        for each in (method, again):
            pairs = each.pair_features(random_pairs(each, 4))
            scores.append(each.score(pairs.text, pairs.video).similarity)
        assert torch.equal(scores[0], scores[1])

    def test_search_takes_its_checkpoint(self, checkpoint: tuple[RetrievalModule, Path]) -> None:
        """Test that a search reads a video and gives the same score as the method."""
        method, path = checkpoint
        trust = [type(part).__module__.partition(".")[0] for part in (method, method.encoder, method.tuning)]
        scorer = Scorer(ScorerSource(str(path)), trust=trust)
        video = next(Path(synthetic_data()).rglob("*.mp4"))
        videos = scorer.encode_videos(scorer.read(video).media)
        texts = scorer.encode_texts(["a red ball", "a dog"])
        scores = scorer.score(texts, videos)
        assert scores.shape == (2, 1)
        assert bool(scores.isfinite().all())
        assert torch.equal(scores, method.score(texts, videos).similarity)
        assert scorer.text_vectors(texts).shape[1] == scorer.video_vectors(videos).shape[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
    def test_two_processes_train_as_one(self, strategy: str) -> None:
        """Test that two processes give the same losses and weights as one, with full and with sharded weights."""
        method = comparable(small(self.recipe)[0])
        losses, weights = trained(method, Batches(method, STEPS))
        for rank, results in enumerate(of_two_processes(tuple(self.together) or (self.recipe,))):
            found = results[f"{strategy} {self.recipe}"]
            assert found[0] == pytest.approx(losses, rel=1e-6), f"process {rank}"
            for name, tensor in weights.items():
                if "queue" not in name:  # queues contain the same items in another order, that of gathering
                    close(found[1][name], tensor, f"process {rank}, {name}")


def filled(tensor: Tensor, mask: Tensor) -> Tensor:
    """Fill the padded items of features (N, L, ...) with another number, given the mask (N, L); keep masks."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.where(mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2)), 3)


def lengthened(tensor: Tensor, mask: Tensor) -> Tensor:
    """Append two padded items to each row of (N, L, ...)."""
    return torch.cat([tensor, tensor.new_zeros(len(tensor), 2, *tensor.shape[2:])], 1)


def close(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two tensors of any shape are equal up to rounding; `what` names them in the error."""
    rtol, atol = (1e-6, 1e-9) if expected.dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda said: f"{what}: {said}")
