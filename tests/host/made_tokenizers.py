"""Byte-level tokenizers that are made for tests."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def trained(corpus: Sequence[str], special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """400 tokens, some of them several bytes."""
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def bytes_alone() -> tokenizers.Tokenizer:
    """Every token is a byte, but for <s> and </s>."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 257, "</s>": 258}
    backend = _byte_level(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
