"""Captions are tokenized in the workers and encoded as strings are."""

from pathlib import Path

import torch

from tvr_lightning.data.batch import TextBatch, Tokens
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import random_pairs, small

RECIPES = Path(__file__).parents[2] / "recipes"


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
