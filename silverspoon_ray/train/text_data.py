"""Text files as training samples, read and tokenised by Ray Data."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

if TYPE_CHECKING:
    import ray.data
    from transformers import PreTrainedTokenizerBase

BYTES_TOKENIZER = "bytes"
"""The name that stands for ByT5's tokenizer, which needs no files: one token per UTF-8 byte."""

IGNORED_LABEL = -100

PIECE_CHARACTERS = 1 << 16  # a text file is tokenised in pieces of whole lines of about this size
ROWS_PER_TASK = 64  # documents tokenised at once
SAMPLES_PER_BLOCK = 4096  # packed samples handed to Ray Data at once


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of that name.

    Args:
        name: a directory, a hub id, or ``"bytes"`` (``ByT5Tokenizer`` without its sentinels: 259 tokens). What is on
            this machine or in its Hugging Face cache is used as it is; the network is asked only for what is not.
    """
    import transformers

    if name == BYTES_TOKENIZER:
        return transformers.ByT5Tokenizer(extra_ids=0)
    try:
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    except OSError:
        return transformers.AutoTokenizer.from_pretrained(name)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What to pad with. Any token does, because padding is masked; some tokenizers have none of their own."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def document_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a document in packed text: EOS, or SEP for encoders; None if there is neither."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def text_dataset(
    files: Sequence[str | os.PathLike[str]],
    format: str,
    text_column: str,
    tokenizer_name: str,
    max_length: int,
    packing: bool,
) -> ray.data.Dataset:
    """Samples of ``input_ids``, ``attention_mask`` and ``labels`` (int64) from text files. Lazy: nothing is read yet.

    A document is a row of a Parquet or JSON Lines file, or a whole text file. Rows without text are left out. The
    order is that of the files and their rows, on every cluster.

    With ``packing``, documents are put one behind the other, each between the tokenizer's BOS (if it sets one) and its
    EOS, and cut into blocks of exactly ``max_length``. Only the tokens after the last full block of the whole data set
    are dropped. To make the cuts independent of the cluster, all tokens come together in one task: they must fit into
    one worker's memory, at about 30 bytes a token. Larger corpora should be packed beforehand.

    Without ``packing``, a document is a sample, cut off at ``max_length``; samples have different lengths, see
    :class:`PadCollator`. In a text file each line that is not blank is then a sample.

    Args:
        files: paths that every node can read.
        format: ``"parquet"``, ``"json"`` (one object per line) or ``"text"``. A file of the last two is UTF-8, and read
            whole by one worker.
        text_column: the column with the text; not used for ``"text"``.
        tokenizer_name: see :func:`load_tokenizer`; loaded once in every worker process.
        max_length: tokens per sample, at most; with ``packing`` exactly.
        packing: see above.

    Returns:
        the data set. ``labels`` are the input ids; models shift them themselves.
    """
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.raise_original_map_exception = True  # it names file and line; Ray's wrapper says that something failed
    with ray.data.DataContext.current(context):
        pieces = _read([os.fspath(file) for file in files], format, text_column, whole_files=packing)
        options: dict[str, Any] = {"batch_format": "pyarrow", "zero_copy_batch": True}
        if not packing:
            kwargs = {"tokenizer_name": tokenizer_name, "max_length": max_length}
            return pieces.map_batches(_tokenize_samples, fn_kwargs=kwargs, batch_size=ROWS_PER_TASK, **options)
        kwargs = {"tokenizer_name": tokenizer_name}
        tokens = pieces.map_batches(_tokenize_pieces, fn_kwargs=kwargs, batch_size=ROWS_PER_TASK, **options)
        one_block = tokens.repartition(1)
        return one_block.map_batches(_pack, fn_kwargs={"max_length": max_length}, batch_size=None, **options)


def _read(paths: list[str], format: str, text_column: str, whole_files: bool) -> ray.data.Dataset:
    """Rows of ``text``, and whether each is the ``first`` and the ``last`` piece of its document."""
    import ray.data

    # Every file that was asked for is read, whatever its ending and whatever directories look like `name=value`.
    options: dict[str, Any] = {"file_extensions": None, "partitioning": None}
    if format == "parquet":
        rows = ray.data.read_parquet(paths, columns=[text_column], **options)
        kwargs = {"text_column": text_column}
        return rows.map_batches(_documents, fn_kwargs=kwargs, batch_format="pyarrow", zero_copy_batch=True)
    files = ray.data.read_binary_files(paths, include_paths=True, **options)
    if format == "json":
        # Not read_json: it wants one type for every key, also of those nobody needs, and names no place in its errors.
        return files.flat_map(_file_rows, fn_kwargs={"text_column": text_column})
    return files.flat_map(_file_pieces if whole_files else _file_lines)


def _file_rows(row: Mapping[str, Any], text_column: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_decoded(row).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[text_column]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{row['path']}, line {number}: no object with {text_column!r} ({error})") from error
        if not isinstance(text, str | NoneType):
            raise ValueError(f"{row['path']}, line {number}: {text_column!r} is no text but {text!r}")
        rows.append({"text": text or "", "first": True, "last": True})
    return rows


def _decoded(row: Mapping[str, Any]) -> str:
    try:
        text: str = row["bytes"].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{row['path']}: no UTF-8 ({error.reason} at byte {error.start})") from error
    return text


def _file_pieces(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = _decoded(row)
    pieces: list[list[str]] = []
    room = 0
    for line in text.splitlines(keepends=True):
        if room <= 0:
            pieces.append([])
            room = PIECE_CHARACTERS
        pieces[-1].append(line)
        room -= len(line)
    last = len(pieces) - 1
    return [{"text": "".join(lines), "first": i == 0, "last": i == last} for i, lines in enumerate(pieces)]


def _file_lines(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = _decoded(row).splitlines()
    return [{"text": line, "first": True, "last": True} for line in lines if line.strip()]


def _documents(table: pa.Table, text_column: str) -> pa.Table:
    if text_column not in table.column_names:
        raise ValueError(f"no column {text_column!r} in a part of the data; there are {table.column_names}")
    text = table[text_column].cast(pa.large_string())
    yes = pa.array(np.ones(len(text), dtype=bool))
    return pa.table({"text": text, "first": yes, "last": yes})


def _tokenize_pieces(table: pa.Table, tokenizer_name: str) -> pa.Table:
    tokenizer = _tokenizer_of_this_process(tokenizer_name)
    begin, end = _document_frame(tokenizer)
    rows = [row for row in table.to_pylist() if row["text"]]
    encoded = _encode(tokenizer, [row["text"] for row in rows], add_special_tokens=False)
    tokens = [
        (begin if row["first"] else []) + ids + (end if row["last"] else [])
        for row, ids in zip(rows, encoded, strict=True)
    ]
    return pa.table({"tokens": pa.array(tokens, pa.large_list(pa.int32()))})


def _tokenize_samples(table: pa.Table, tokenizer_name: str, max_length: int) -> pa.Table:
    tokenizer = _tokenizer_of_this_process(tokenizer_name)
    texts = [text for text in table["text"].to_pylist() if text and text.strip()]
    ids = _encode(tokenizer, texts, truncation=True, max_length=max_length)
    column = pa.array(ids, pa.list_(pa.int64()))
    ones = pa.ListArray.from_arrays(column.offsets, pa.array(np.ones(len(column.values), dtype=np.int64)))
    return pa.table({"input_ids": column, "attention_mask": ones, "labels": column})


def _pack(table: pa.Table, max_length: int) -> Iterator[dict[str, np.ndarray]]:
    chunks = [chunk.flatten().to_numpy() for chunk in table["tokens"].chunks]
    tokens = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32)
    samples = len(tokens) // max_length
    ids = tokens[: samples * max_length].reshape(samples, max_length)
    for start in range(0, samples, SAMPLES_PER_BLOCK):
        block: np.ndarray = ids[start : start + SAMPLES_PER_BLOCK].astype(np.int64)
        yield {"input_ids": block, "attention_mask": np.ones_like(block), "labels": block.copy()}


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], **kwargs: Any) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **kwargs)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _document_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What goes before and after a document in packed text."""
    end = document_end(tokenizer)
    # What the tokenizer itself puts around nothing: BOS for Llama, CLS and SEP for BERT, EOS alone for T5.
    around: list[int] = tokenizer("")["input_ids"]
    begin = [token for token in around[:1] if token != end]
    return begin, [] if end is None else [end]


@functools.lru_cache(maxsize=2)
def _tokenizer_of_this_process(name: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(name)


@dataclass(frozen=True)
class PadCollator:
    """Batches samples of different lengths: pads on the right, to the longest of the batch.

    Padding has attention mask 0 and label -100, so that no loss counts it.

    Args:
        pad_token_id: the input id of padding.
    """

    pad_token_id: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """``input_ids``, ``attention_mask`` and ``labels``, each int64 ``[len(samples), longest]``."""
        padding = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED_LABEL}
        longest = max(len(sample["input_ids"]) for sample in samples)
        batch = {}
        for name, value in padding.items():
            rows = torch.full((len(samples), longest), value, dtype=torch.int64)
            for row, sample in zip(rows, samples, strict=True):
                given = np.array(sample[name], dtype=np.int64)  # a copy: Ray's arrays are read-only
                row[: len(given)] = torch.from_numpy(given)
            batch[name] = rows
        return batch
