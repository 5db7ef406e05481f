"""Smaller vocabularies: fewer tokens in a fast tokenizer, fewer rows in the embeddings of its model."""

from collab_compress.vocabulary.trim import VocabularyReport, trim_vocabulary_

__all__ = ["VocabularyReport", "trim_vocabulary_"]
