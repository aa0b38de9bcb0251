"""Token IDs of captions, truncation, and captions that are tokenized in the workers."""

import logging

import pytest
import torch

from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.data.batch import TextBatch, Tokens
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import random_pairs, small


@pytest.fixture(scope="module")
def tokenizer():
    return ClipTokenizer(77)


def test_ids_are_those_of_openai_clip(tokenizer):
    # the ids that OpenAI's clip.tokenize gives
    assert tokenizer.encode(["a photo of a cat"], 8).ids.tolist() == [[49406, 320, 1125, 539, 320, 2368, 49407, 0]]
    messy, clean = tokenizer.encode(["  A  PHOTO of\n a &lt;cat&gt; ", "a photo of a <cat>"], 16).ids
    assert torch.equal(messy, clean)
    # the ids of the released tokenizers of CLIP4Clip and X-Pool: open_clip's special tokens are text
    ids = tokenizer.encode(["<|endoftext|> in a caption", "<end_of_text> in a caption"], 16).ids
    assert ids[0, :6].tolist() == [49406, 49407, 530, 320, 11327, 49407]
    assert 49407 not in ids[1, 1:5]


def test_the_mask_ends_at_eot_even_if_a_token_has_the_pad_id(tokenizer):
    tokens = tokenizer.encode(["a cat", "!&", ""], 6)
    assert tokens.ids[1].tolist() == [49406, 0, 261, 49407, 0, 0]
    assert tokens.mask.tolist() == [[True] * 4 + [False] * 2, [True] * 4 + [False] * 2, [True] * 2 + [False] * 4]


def test_long_captions_are_truncated_and_the_first_is_reported(caplog):
    tokenizer = ClipTokenizer(77)
    with caplog.at_level(logging.WARNING):
        tokens = tokenizer.encode(["one two three four five", "a cat", "six seven eight nine ten"], 6)
        ids = tokens.ids
        assert tokens.needed == [7, 4, 7]
        tokenizer.report_truncated(tokenizer.encode(["one two three four"], 6))
        assert not caplog.records, "a caption that just fits is not reported"
        tokenizer.report_truncated(tokens)
    assert ids[0, -1] == ids[2, -1] == 49407
    assert torch.equal(ids[0, :5], tokenizer.encode(["one two three four"], 6).ids[0, :5])
    assert len(caplog.records) == 1
    assert "one two three four five" in caplog.text


@pytest.mark.parametrize(
    ("captions", "words", "message"),
    [(["a cat"], 2, "words is 2.*77"), (["a cat"], 78, "words is 78.*77"),
     (["a cat", float("nan")], 8, "caption 1 of the batch is nan")],
)  # fmt: skip
def test_impossible_lengths_and_missing_captions_are_refused(tokenizer, captions, words, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(captions, words)


def test_workers_use_the_tokenizer_of_the_encoder():
    method, data = small(RECIPES / "clip4clip.yaml", "--data.init_args.num_workers=1")
    batches = []
    method.on_train_batch_start = lambda batch, batch_idx: batches.append(batch)
    quiet_trainer(max_steps=2, limit_val_batches=1).fit(method, datamodule=data)
    assert len(batches) == 2
    for tokens in (batch.text.text for batch in batches):
        assert isinstance(tokens, Tokens)
        expected = method.encoder.tokenizer.encode(tokens.captions, method.words)
        assert torch.equal(tokens.ids, expected.ids)
        assert torch.equal(tokens.mask, expected.mask)
        assert tokens.needed == expected.needed
        assert list(tokens) == tokens.captions


def test_token_ids_are_encoded_like_strings():
    method, _ = small(RECIPES / "dpdv.yaml")
    method.eval()
    batch = random_pairs(method, 6)
    batch.extras["recover_captions"][2] = ["a ball", " ", "a ball rests"]
    tokenize = method.encoder.caption_tokens(method.words)
    tokens = TextBatch(tokenize(batch.text.text), batch.text.index)
    described = [tokenize(captions) for captions in batch.extras["recover_captions"]]
    with torch.no_grad():
        ours = method.pair_features(type(batch)(tokens, batch.video, {"recover_captions": described}))
        theirs = method.pair_features(batch)
    assert len(ours.tensors()) == len(theirs.tensors()) >= 5
    for our, their in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=0)
