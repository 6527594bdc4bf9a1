"""The folder of one run: its configuration, its log, its checkpoint and its result, all safe to interrupt."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anon_lab.files import finite, replacing, write_json


class RunFolder:
    """Files that are whole at any moment: a crash loses at most the steps since the last checkpoint.

    config.json says what is run; log.jsonl holds one JSON object a line; checkpoint.pt is where to go on; result.json
    is written last, so that its presence means that the run is over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path / "log.jsonl"
        self._checkpoint = path / "checkpoint.pt"
        self._result = path / "result.json"

    def open(self, config: dict[str, Any]) -> None:
        """Make this a run's folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "config.json", config)

    def config(self) -> dict[str, Any] | None:
        return _read(self.path / "config.json")

    def result(self) -> dict[str, Any] | None:
        return _read(self._result)

    def begun(self) -> bool:
        """Whether anything of the run is there beside its configuration."""
        return self._log.exists() or self._checkpoint.exists() or self._result.exists()

    def companions(self) -> list[str] | None:
        """Folders, as seen from here, of the runs that the checkpoint holds; None where there is none."""
        return _read(self.path / "together.json") if self._checkpoint.exists() else None

    def accompany(self, names: list[str]) -> None:
        """Note whose checkpoint this folder will hold."""
        write_json(self.path / "together.json", names)

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self._result, result)
        self._checkpoint.unlink(missing_ok=True)

    def log(self, record: dict[str, Any]) -> None:
        """Append one line and hand it to the system, so that a killed process loses none."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The log's lines; a last one that was cut off is left out."""
        if not self._log.exists():
            return
        for line in self._log.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step that will be run again, and what a killed process left half-written."""
        for rest in self.path.glob(".*.[0-9]*"):
            rest.unlink(missing_ok=True)
        kept = [record for record in self.records() if record["step"] <= step]
        with replacing(self._log) as file:
            file.write("".join(json.dumps(record) + "\n" for record in kept).encode())

    def save(self, state: dict[str, Any]) -> None:
        """Put the checkpoint in place of the last one."""
        with replacing(self._checkpoint) as file:
            torch.save(state, file)

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, or None where there is none."""
        if not self._checkpoint.exists():
            return None
        return torch.load(self._checkpoint, map_location="cpu", weights_only=True)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
