"""Text files as training samples."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from silverspoon_ray.train import text_data
from silverspoon_ray.train.text_data import PadCollator, document_end, load_tokenizer, padding_token, text_dataset

EOS = 1


def as_tokens(text: str) -> list[int]:
    """ByT5's tokens are the bytes, after three special ones."""
    return [byte + 3 for byte in text.encode()]


def samples(files: Sequence[Path], format: str, max_length: int, packing: bool, column: str = "text") -> list[Any]:
    rows = text_dataset(files, format, column, "bytes", max_length, packing).take_all()
    for row in rows:
        assert set(row) == {"input_ids", "attention_mask", "labels"}
        assert all(np.asarray(value).dtype == np.int64 for value in row.values())
        assert list(row["labels"]) == list(row["input_ids"])
        assert list(row["attention_mask"]) == [1] * len(row["input_ids"])
    return [list(row["input_ids"]) for row in rows]


def blocks(tokens: list[int], length: int) -> list[list[int]]:
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]


def test_the_bytes_tokenizer() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "def f(x):\n\treturn 'é'  # <extra_id_0>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == as_tokens(text)
    assert (len(tokenizer), document_end(tokenizer), padding_token(tokenizer)) == (259, EOS, 0)
    assert pickle.loads(pickle.dumps(tokenizer))(text)["input_ids"] == [*as_tokens(text), EOS]


def test_a_file_is_cut_into_pieces_of_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "PIECE_CHARACTERS", 10)
    text = "\ufeffone\n\n  two\x0cand\u2028three\r\nwithout an end"
    pieces = text_data._file_pieces({"bytes": text.encode(), "path": "x"})
    assert "".join(piece["text"] for piece in pieces) == text.removeprefix("\ufeff")
    assert len(pieces) > 1
    assert [piece["first"] for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece["last"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert text_data._file_pieces({"bytes": b"", "path": "x"}) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n\n{"text": "b', "rows.jsonl, line 3"),
        (b'{"text": "a"}\n{"tex": "b"}', "rows.jsonl, line 2: no object with 'text'"),
        (b'{"text": "a"}\n[]', "rows.jsonl, line 2"),
        (b'{"text": 3}', "rows.jsonl, line 1: 'text' is no text but 3"),
        (b"caf\xe9", "rows.jsonl: no UTF-8"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        text_data._file_rows({"bytes": content, "path": "rows.jsonl"}, text_column="text")


def test_padding_is_marked() -> None:
    collator = pickle.loads(pickle.dumps(PadCollator(pad_token_id=7)))
    read_only = np.array([4, 5, 6])
    read_only.flags.writeable = False
    batch = collator(
        [
            {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2], "other": "ignored"},
            {"input_ids": read_only, "attention_mask": np.ones(3, dtype=np.int64), "labels": read_only},
        ]
    )
    assert {name: rows.tolist() for name, rows in batch.items()} == {
        "input_ids": [[1, 2, 7], [4, 5, 6]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "labels": [[1, 2, -100], [4, 5, 6]],
    }
    assert all(rows.dtype == torch.int64 for rows in batch.values())


@pytest.mark.cluster
def test_text_files_packed(ray_cluster: Any, tmp_path: Path) -> None:
    texts = [f"file {i}\n\n\tsome\x0clines\r\n" * (i % 5) + f"and the end of {i}" for i in range(12)]
    files = []
    for i, text in enumerate(texts):
        files.append(tmp_path / f"part=x{i}.log")
        files[-1].write_bytes(text.encode())
    files.append(tmp_path / "empty.txt")
    files[-1].write_bytes(b"")
    expected = blocks([token for text in texts for token in [*as_tokens(text), EOS]], 32)
    assert samples(files, "text", 32, packing=True) == expected
    assert samples(files, "text", 32, packing=True) == expected
    assert samples(files[:1], "text", 1000, packing=True) == []


@pytest.mark.cluster
def test_parquet_packed_over_files_and_row_groups(ray_cluster: Any, tmp_path: Path) -> None:
    texts: list[str | None] = [f"row {i} " * (i % 7) if i % 11 else None for i in range(300)]
    files = []
    for part in range(6):
        files.append(tmp_path / f"{5 - part}.parquet")  # the order asked for is not that of the names
        rows = texts[part * 50 : (part + 1) * 50]
        table = pa.table({"body": rows, "other": list(range(50))})
        pq.write_table(table, files[-1], row_group_size=10)
    expected = blocks([token for text in texts if text for token in [*as_tokens(text), EOS]], 16)
    assert samples(files, "parquet", 16, packing=True, column="body") == expected


@pytest.mark.cluster
def test_documents_as_samples(ray_cluster: Any, tmp_path: Path) -> None:
    texts = ["short", "", None, "a much longer document", "  ", "é"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "n": [i, {}][i % 2]}) for i, text in enumerate(texts)))
    # Cut off at max_length, with the tokenizer's own EOS.
    expected = [[*as_tokens("short"), EOS], [*as_tokens("a much"), EOS], [*as_tokens("é"), EOS]]
    assert samples([path], "json", 7, packing=False) == expected

    lines = tmp_path / "lines.txt"
    lines.write_text("short\n\n   \na much longer document\né")
    assert samples([lines], "text", 7, packing=False) == expected
