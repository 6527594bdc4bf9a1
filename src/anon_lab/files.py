"""Files that are there whole or not at all, and JSON that any reader can parse."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def unfit(folder: Path) -> str | None:
    """What a folder would have to be so that files can be written into it, and is not; None where all is well."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        return f"a folder, but {nearest} is a file"
    try:
        with tempfile.TemporaryFile(dir=nearest):  # tried out, since permissions alone promise root everything
            return None
    except OSError:
        return f"a folder that can be written to, but {nearest} cannot"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name with one rename at the end: no reader and no interruption ever meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the new name on an empty file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> Path:
    with replacing(path) as file:
        file.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same with None where JSON has no number: inf and nan."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
