"""sweep.json: what a folder compares, so that a sweep can go on and be reported on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anon_lab.contenders import Contender
from anon_lab.files import write_json
from anon_lab.settings import Settings, difference
from anon_lab.study import Plan, without_password

KEPT = ("trials", "name", "storage", "together", "prune")
"""What of a plan is the sweep's and not the machine's."""


@dataclass(frozen=True)
class Sweep:
    """What is compared, and how."""

    base: Settings
    """Of every run, whatever the optimizer."""
    contenders: Sequence[Contender]
    plan: Plan
    data: Path | None = None
    """Where the task's files lie; None for the usual places."""


def keep(sweep: Sweep) -> Sweep:
    """Write it down and return it with the contenders that the folder has already.

    All get as many trials, so a later call may raise their number or add contenders, and change nothing else.
    """
    path = sweep.plan.out / "sweep.json"
    record = _record(sweep)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        _check(sweep.plan, record, before)
        record["contenders"] = before["contenders"] | record["contenders"]
    write_json(path, record)
    return replace(sweep, contenders=[Contender.from_json(each) for each in record["contenders"].values()])


def kept(out: Path) -> Sweep:
    """What `keep` wrote."""
    path = out / "sweep.json"
    if not path.exists():
        raise ValueError(f"{out} holds no sweep: run `anon sweep` first")
    record = json.loads(path.read_text(encoding="utf-8"))
    return Sweep(
        base=Settings.from_json(record["base"]),
        contenders=[Contender.from_json(each) for each in record["contenders"].values()],
        plan=Plan(out=out, **record["plan"]),
        data=None if record["data"] is None else Path(record["data"]),
    )


def _record(sweep: Sweep) -> dict[str, Any]:
    plan = {name: getattr(sweep.plan, name) for name in KEPT}
    return {
        "base": sweep.base.as_json(),
        "contenders": {each.label: each.as_json() for each in sweep.contenders},
        "plan": {**plan, "storage": without_password(sweep.plan.storage)},
        "data": None if sweep.data is None else str(sweep.data.absolute()),
    }


def _check(plan: Plan, record: dict[str, Any], before: dict[str, Any]) -> None:
    """Refuse what would not be the same comparison."""
    before = {**before, "base": Settings.from_json(before["base"]).as_json()}  # from before a field was added, too
    common = [label for label in record["contenders"] if label in before["contenders"]]
    for part, names in (("plan", ("name", "storage", "prune")), ("base", record["base"]), ("contenders", common)):
        now, was = ({name: each[part].get(name) for name in names} for each in (record, before))
        if (changed := difference(now, was)) is not None:
            raise ValueError(f"{plan.out} holds another sweep, in which {changed}: choose another --out")
    if plan.trials < before["plan"]["trials"]:
        raise ValueError(f"--trials must be at least the {before['plan']['trials']} of before, but is {plan.trials}")
