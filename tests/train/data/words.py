"""Stands in for Hugging Face's `tokenizers`, as far as a WordLevel file needs it, where that is missing."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, final


@final
class Tokenizer:
    """Words and signs, by a vocabulary."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._vocabulary = vocabulary

    @staticmethod
    def from_buffer(data: bytes) -> Tokenizer:
        try:
            return Tokenizer(json.loads(data)["model"]["vocab"])
        except KeyError as error:
            raise Exception(f"missing field {error}") from None

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        return self._vocabulary

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        words = {number: word for word, number in self._vocabulary.items()}
        return " ".join(words[number] for number in ids if number != 7)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        words = [re.findall(r"\w+|[^\w\s]+", text) for text in texts]
        return [SimpleNamespace(ids=[self._vocabulary.get(word, 0) for word in found]) for found in words]
