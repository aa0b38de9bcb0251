"""Test suite that every method must pass, configured by its recipe."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tvr_lightning.audit.run import audit_method
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.testing.processes import QUIET, STEPS, Batches, comparable, of_two_processes, trained
from tvr_lightning.testing.small import (
    behind_masks,
    encoded,
    padded,
    random_pairs,
    small,
    synthetic_data,
    unconditioned,
)
from tvr_lightning.training.options import other_options

WITHOUT_NORMALIZATION = "--model.init_args.evaluation.normalization=null"


class MethodTestSuite:
    """Tests of one method, for a subclass whose name begins with `Test`.

    Attributes:
        recipe: Recipe of the method.
        together: Recipes whose methods are trained in the same two processes, because processes are slow to start.
    """

    recipe: Path
    together: Sequence[Path] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def method(cls) -> RetrievalModule:
        """Return the recipe's method, small, in evaluation mode."""
        return small(cls.recipe)[0].eval()

    @pytest.fixture(scope="class")
    @classmethod
    def stored(cls, method: RetrievalModule) -> tuple[TextFeatures, VideoFeatures]:
        """Return features of texts and videos before the method's own layers; the second video has two frames."""
        with torch.no_grad():
            text, video = unconditioned(method, random_pairs(method, 6))
        video.frame_mask[1, 2:] = False
        return text, video

    @pytest.fixture(scope="class")
    @classmethod
    def features(
        cls, method: RetrievalModule, stored: tuple[TextFeatures, VideoFeatures]
    ) -> tuple[TextFeatures, VideoFeatures]:
        """Return features of 6 texts and 6 videos, as inputs of `score`."""
        with torch.no_grad():
            return encoded(method, *stored)

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[RetrievalModule, Path]:
        """Train the method for a few steps on the synthetic data, and return it with the saved checkpoint."""
        method, data = small(cls.recipe)
        path = tmp_path_factory.mktemp("contract") / "last.ckpt"
        trainer = pl.Trainer(max_steps=STEPS, limit_val_batches=0, num_sanity_val_steps=0, **QUIET)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            trainer.fit(method, datamodule=data)
        assert trainer.global_step == STEPS
        trainer.save_checkpoint(path)
        return method.eval(), path

    def test_scores_depend_on_nothing_but_the_text_and_the_video(self) -> None:
        """Test that the audit finds no leak."""
        audit = audit_method(*small(self.recipe))
        found = [finding for finding in audit.findings if finding.leaks]
        said = [f"  {each.experiment}" + (f": {each.change:.1e} deviations" if each.change else "") for each in found]
        assert not found, "a score changed, or could, with what is neither its text nor its video:\n" + "\n".join(said)

    def test_its_parameters_can_be_sharded(self, method: RetrievalModule) -> None:
        """Test that no parameter is a scalar, since FSDP2 shards parameters along their first dimension."""
        scalars = [name for name, parameter in method.named_parameters() if not parameter.ndim]
        assert not scalars, f"FSDP2 cannot shard scalars: give {', '.join(scalars)} the shape (1,)"

    @torch.no_grad()
    def test_a_pair_scores_alone_as_among_others(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures]
    ) -> None:
        """Test that the score of a pair does not depend on other pairs or their order."""
        (text, video), scores = features, method.score(*features).similarity
        assert scores.shape == (len(text), len(video))
        for i, j in ((0, 0), (2, 1), (5, 3)):
            alone = method.score(text[i : i + 1], video[j : j + 1]).similarity[0, 0]
            close(alone, scores[i, j], f"text {i} and video {j} alone, which others must not change")
        order, places = torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor([5, 1, 0, 3])
        again = method.score(text[order], video[places]).similarity
        close(again, scores[order][:, places], "in another order, among fewer videos")

    @torch.no_grad()
    @pytest.mark.parametrize("part", ["words", "frames"])
    def test_padding_changes_a_score_only_where_the_method_says_so(
        self, method: RetrievalModule, stored: tuple[TextFeatures, VideoFeatures], part: str
    ) -> None:
        """Test that the content and amount of padding affect no score, except for parts in `reads_padding`."""

        def scores(text: TextFeatures, video: VideoFeatures) -> Tensor:
            return method.score(*encoded(method, text, video)).similarity

        text, video = stored
        found = [scores(*behind_masks(text, video, part, 3.0))]
        with contextlib.suppress(ValueError, RuntimeError):  # the sizes of parameters may depend on the recipe
            found.append(scores(*padded(text, video, part)))
        usual = scores(text, video)
        if part not in method.reads_padding:
            for other in found:
                close(other, usual, f"scores depend on the padding of {part}: mask it, or name it in `reads_padding`")
        elif all(torch.allclose(other, usual) for other in found):
            pytest.fail(f"reads_padding names {part}, but scores do not depend on its padding")

    @torch.no_grad()
    def test_both_forms_of_pair_vectors_score_alike(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures]
    ) -> None:
        """Test that factorized pair vectors give the same scores as dense ones."""
        heads: list[Any] = [part for part in method.modules() if hasattr(part, "required_form")]
        if not heads:
            pytest.skip("the method builds no pair vectors")
        found = []
        for form in (PairVectors, DensePairVectors):
            for head in heads:
                head.required_form = form
            found.append(method.score(*features).similarity)
        for head in heads:
            head.required_form = None
        close(found[0], found[1])

    @torch.no_grad()
    def test_a_small_memory_budget_changes_nothing(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures]
    ) -> None:
        """Test that the smallest blocks give the same scores, in the evaluation and in the method's heads."""
        budgets: list[Any] = [part for part in method.modules() if hasattr(part, "memory_gib")]
        before = [part.memory_gib for part in budgets]
        whole = method.score(*features).similarity
        for part in budgets:
            part.memory_gib = 2**-30
        blocks = PairScores(method.score, *features, memory_budget_bytes=1)
        found = torch.full_like(whole, float("nan"))
        for block in blocks.blocks():
            found[block.rows, block.columns] = block.values
        for part, budget in zip(budgets, before, strict=True):
            part.memory_gib = budget
        close(found, whole)

    @torch.no_grad()
    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
    def test_half_precision_on_the_way_in_is_scored_in_single_precision(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures], kind: torch.dtype
    ) -> None:
        """Test that heads do not round further; methods without a head get single precision."""
        if not any(hasattr(part, "memory_gib") for part in method.modules()):
            pytest.skip("the method has no head that scores in blocks")
        text, video = features[0].to(kind), features[1].to(kind)
        found = method.score(text, video).similarity
        assert found.dtype == torch.float32
        close(found, method.score(text.float(), video.float()).similarity)

    @torch.no_grad()
    def test_no_text_or_no_video_gives_no_score_and_no_number_in_its_place(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures]
    ) -> None:
        """Test that heads raise an error for empty inputs, and that other methods return an empty matrix."""
        text, video = features
        heads = any(hasattr(part, "memory_gib") for part in method.modules())
        for texts, videos in ((text[:0], video), (text, video[:0]), (text[:0], video[:0])):
            with pytest.raises(ValueError, match="nothing to score") if heads else contextlib.nullcontext():
                assert method.score(texts, videos).similarity.shape == (len(texts), len(videos))

    def test_its_heads_have_the_memory_budget_of_the_evaluation(self) -> None:
        """Test that `evaluation.memory_gib` is the only memory budget of a run."""
        method = small(self.recipe, "--model.init_args.evaluation.memory_gib=0.5")[0]
        heads: list[Any] = [part for part in method.modules() if hasattr(part, "memory_gib")]
        if not heads:
            pytest.skip("the method has no head that scores in blocks")
        assert all(head.memory_gib == 0.5 for head in heads), (
            "build the head with .within(evaluation_config.memory_gib)"
        )

    @torch.no_grad()
    def test_compact_features_score_as_whole_ones(
        self, method: RetrievalModule, features: tuple[TextFeatures, VideoFeatures]
    ) -> None:
        """Test that the compact features in banks and queues give the same scores."""
        compact = method.compact_text(features[0]), method.compact_video(features[1])
        close(method.score(*compact).similarity, method.score(*features).similarity)

    def test_any_contrast_can_be_given_to_it(self, stored: tuple[TextFeatures, VideoFeatures]) -> None:
        """Test that NCL changes only the logits of the loss, and that its queues contain all features for scoring."""
        contrast = ["--model.init_args.contrast=NCL", "--model.init_args.contrast.init_args.queue_size=8"]
        method = small(self.recipe, *contrast)[0].eval()
        plain = small(self.recipe, "--model.init_args.contrast=null", WITHOUT_NORMALIZATION)[0].eval()
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
            scores = method.score(pairs.text, pairs.video).similarity
            close(scores, plain.score(pairs.text, pairs.video).similarity)
            method.update_state(pairs.detach())
            bank = method.bank()
            close(method.score(bank.texts, bank.videos).similarity, scores)

    @torch.no_grad()
    def test_a_checkpoint_brings_it_back(self, checkpoint: tuple[RetrievalModule, Path]) -> None:
        """Test that weights and options load without running code, and give the same scores as before saving."""
        method, path = checkpoint
        again = type(method).load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()
        assert other_options(dict(method.hparams), dict(again.hparams)) == []
        pairs = method.pair_features(random_pairs(method, 4))
        same = again.pair_features(random_pairs(again, 4))
        assert torch.equal(
            again.score(same.text, same.video).similarity, method.score(pairs.text, pairs.video).similarity
        )

    @torch.no_grad()
    def test_search_takes_its_checkpoint(self, checkpoint: tuple[RetrievalModule, Path]) -> None:
        """Test that a search reads a video and gives the same score as the method."""
        method, path = checkpoint
        scorer = Scorer(ScorerSource(str(path)), trust=[type(method).__module__.partition(".")[0]])
        video = next(Path(synthetic_data().name).rglob("*.mp4"))
        videos, texts = scorer.encode_videos(scorer.read(video).media), scorer.encode_texts(["a red ball", "a dog"])
        scores = scorer.score(texts, videos)
        assert scores.shape == (2, 1)
        assert bool(scores.isfinite().all())
        assert torch.equal(scores, method.score(texts, videos).similarity)
        assert scorer.text_vectors(texts).shape[1] == scorer.video_vectors(videos).shape[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
    def test_two_processes_train_as_one(self, strategy: str) -> None:
        """Test that two processes give the same losses and weights as one, with full and with sharded weights."""
        together = tuple(self.together) or (self.recipe,)
        method = comparable(small(self.recipe)[0])
        losses, weights = trained(method, Batches.of(method, STEPS))
        for rank, found in enumerate(of_two_processes(together)):
            of_two, weights_of_two = found[f"{strategy} {self.recipe}"]
            assert of_two == pytest.approx(losses, rel=1e-6), f"process {rank}"
            for name, tensor in weights.items():
                # Queues contain the same items in another order, that of gathering.
                if "queue" not in name:
                    close(weights_of_two[name], tensor, f"process {rank}, {name}")


def close(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two tensors of any shape are equal up to rounding; `what` names them in the error."""
    rtol, atol = (1e-6, 1e-9) if expected.dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda said: f"{what}: {said}".lstrip(": "))
