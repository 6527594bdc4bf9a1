"""Text as tokens: documents are read from files, encoded once, and from then on mapped from the disk."""

import base64
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from rich.progress import Progress

from anon_lab.tasks import DataMissing

SEPARATOR = "<|endoftext|>"
SUFFIXES = (".txt", ".txt.xz", ".txt.gz")
RANKS = "gpt2.tiktoken"
"""The file of GPT-2's byte-pair ranks: a token in base64 and its rank on each line."""
# How GPT-2 cuts text into words before it merges bytes inside them; part of its vocabulary as much as the ranks.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CALL = 1 << 22
"""Characters encoded in one call: enough to keep every core busy, little enough that the bar moves."""


def cache_folder() -> Path:
    """Where derived files are kept: $ANON_CACHE, else ~/.cache/anon-lab."""
    return Path(os.environ.get("ANON_CACHE") or Path.home() / ".cache" / "anon-lab")


class Source(Protocol):
    """Documents with a key that changes when they do."""

    @property
    def name(self) -> str: ...

    def key(self) -> str: ...

    def documents(self, progress: Progress) -> Iterator[str]:
        """Each document once, in order, while a bar shows how far the reading is."""
        ...


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 file, plain or packed by xz or gzip, whose documents a line `<|endoftext|>` separates."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def key(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            for block in iter(partial(file.read, 1 << 20), b""):
                digest.update(block)
        return digest.hexdigest()

    def documents(self, progress: Progress) -> Iterator[str]:
        bar = progress.add_task(f"encoding {self.name}", total=self.path.stat().st_size)
        try:
            with (
                self.path.open("rb") as raw,
                _unpacked(raw, self.path.suffix) as file,
                io.TextIOWrapper(file, encoding="utf-8") as lines,
            ):
                for document in split(lines):
                    yield document
                    progress.update(bar, completed=raw.tell())
        except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
            raise DataMissing(f"{self.path} is damaged or cut short ({error}); fetch it again") from None
        except UnicodeDecodeError as error:
            raise DataMissing(f"{self.path} must be UTF-8 text, but byte {error.start} of a block is not") from None


@dataclass(frozen=True)
class HubDataset:
    """The column `text` of the training split of a dataset on the Hugging Face hub."""

    name: str

    def _rows(self) -> Any:
        try:
            from datasets import load_dataset  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise DataMissing(f"data 'hf:{self.name}' needs the package datasets: pip install datasets") from None
        return load_dataset(self.name, split="train")

    def key(self) -> str:
        return hashlib.sha256(f"{self.name} {self._rows()._fingerprint}".encode()).hexdigest()

    def documents(self, progress: Progress) -> Iterator[str]:
        rows = self._rows()
        for row in progress.track(rows, total=len(rows), description=f"encoding {self.name}"):
            yield row["text"]


def _unpacked(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".xz":
        return lzma.open(raw)  # pyright: ignore[reportReturnType]
    return gzip.open(raw) if suffix == ".gz" else raw  # pyright: ignore[reportReturnType]


def split(lines: Iterable[str]) -> Iterator[str]:
    """The documents between separator lines, without empty ones; one of more than CALL characters is cut at a line."""
    document: list[str] = []
    length = 0
    for line in lines:
        ends = line.rstrip("\r\n") == SEPARATOR
        if not ends:
            document.append(line)
            length += len(line)
        if document and (ends or length > CALL):
            yield "".join(document)
            document, length = [], 0
    if document:
        yield "".join(document)


class Vocabulary(Protocol):
    """What turns text into numbers below `size`; the last of them ends a document."""

    size: int

    def key(self) -> str: ...

    def encode(self, documents: list[str]) -> list[np.ndarray]:
        """The tokens of each document, as uint16, without the end."""
        ...


class Bytes:
    """UTF-8 bytes, and 256 for the end of a document."""

    size = 257

    def key(self) -> str:
        return "bytes"

    def encode(self, documents: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(document.encode(), np.uint8).astype(np.uint16) for document in documents]


class BytePairs:
    """GPT-2's byte-pair encoding, or what its first merges make of it.

    **Arguments:**
    - `ranks`: a file of ranks; None: tiktoken's own copy, which it downloads once.
    - `size`: tokens in all, the end of a document among them; None: every one that the ranks have.
    """

    def __init__(self, ranks: Path | None = None, size: int | None = None):
        from tiktoken import Encoding

        merges = sorted((_read_ranks(ranks) if ranks else _download_ranks()).items(), key=lambda item: item[1])
        self.size = len(merges) + 1 if size is None else size
        if not 257 <= self.size <= len(merges) + 1:
            raise ValueError(
                f"vocabulary must be a size from 257 to {len(merges) + 1} (single bytes to every merge, and the end "
                f"of a document), but is {self.size}"
            )
        # A merge only joins tokens of lower rank, so that the first ranks are a vocabulary by themselves.
        self._ranks = dict(merges[: self.size - 1])
        self._encoding = Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens={})

    def key(self) -> str:
        digest = hashlib.sha256(PATTERN.encode())
        for token, rank in self._ranks.items():
            digest.update(b"%d %s\n" % (rank, base64.b64encode(token)))
        return digest.hexdigest()

    def encode(self, documents: list[str]) -> list[np.ndarray]:
        threads = os.cpu_count() or 1
        return [np.array(t, np.uint16) for t in self._encoding.encode_ordinary_batch(documents, num_threads=threads)]


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except FileNotFoundError:
        raise DataMissing(f"{path}, the file of GPT-2's ranks, is not there") from None
    except ValueError:
        raise DataMissing(f"{path} must hold a token in base64 and its rank on each line, but does not") from None


def _download_ranks() -> dict[bytes, int]:
    import tiktoken

    try:
        return tiktoken.get_encoding("r50k_base")._mergeable_ranks
    except OSError as error:  # what every failed connection is
        raise DataMissing(
            f"GPT-2's ranks could not be downloaded ({type(error).__name__}): put the file {RANKS} beside the text, "
            "or choose vocabulary='bytes'"
        ) from None


def tokens(source: Source, vocabulary: Vocabulary) -> np.ndarray:
    """All tokens of the source, mapped from a file in the cache folder that is made when it is not there."""
    key = hashlib.sha256(f"{source.key()} {vocabulary.key()}".encode()).hexdigest()[:16]
    path = cache_folder() / "tokens" / f"{key}.bin"
    if not path.exists():
        _encode(source, vocabulary, path)
    return np.memmap(path, np.uint16, mode="r")


def _encode(source: Source, vocabulary: Vocabulary, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    end = np.array([vocabulary.size - 1], np.uint16)
    try:
        # Written piece by piece, since the tokens of a large corpus do not fit into memory, and named when whole.
        with part.open("wb") as file, Progress(transient=True) as progress:
            for batch in _batches(source.documents(progress)):
                for encoded in vocabulary.encode(batch):
                    file.write(encoded.tobytes())
                    file.write(end.tobytes())
            file.flush()
            os.fsync(file.fileno())
        if part.stat().st_size == 0:
            raise DataMissing(f"{source.name} holds no text")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents gathered to about CALL characters."""
    batch: list[str] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(document)
        if length >= CALL:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
