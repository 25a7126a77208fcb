"""Sentences that every Python carries: the documentation of its standard library."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def load_sentences() -> tuple[list[str], list[str]]:
    """Sentences to learn from, and a tenth that is held out.

    What two sentences have in common is judged by their letters alone, and these decide on which side they are.
    """
    found: dict[str, str] = {}
    for text in documentation():
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z].*[a-z)\"'][.!?]", sentence) and 5 <= len(sentence.split()) <= 25:
                    found.setdefault(re.sub("[^a-z]", "", sentence.lower()), sentence)
    train: list[str] = []
    held_out: list[str] = []
    for letters, sentence in found.items():
        is_held_out = hashlib.sha256(letters.encode()).digest()[0] < 256 // 10
        (held_out if is_held_out else train).append(sentence)
    return train, held_out


def documentation() -> Iterator[str]:
    """Python's language topics, and the docstrings of the standard library; nothing is imported for them."""
    from pydoc_data.topics import topics

    yield from topics.values()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
