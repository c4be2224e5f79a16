"""The built-in corpus: Lewis Carroll, *Alice's Adventures in Wonderland* (1865), in the public domain.

The text is that of the Millennium Fulcrum edition 2.9, cut between paragraphs into documents of about a
kilobyte, which stand two blank lines apart in tiny.txt.
"""

from importlib import resources


def tiny_documents() -> list[bytes]:
    """The documents, in the order of the book."""
    text = resources.files(__name__).joinpath("tiny.txt").read_bytes()
    return [document.strip(b"\n") for document in text.split(b"\n\n\n")]
