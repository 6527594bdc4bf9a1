"""Which guards, refresh times and betas make Anon safe and good: screened on small tasks, settled on a language model,
confirmed on tasks that had no say. Chosen at gamma 1: at 0 no guard acts, and elsewhere they say the same of sigma."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from anon_lab.studies._candidates import CANDIDATES, WORST, Candidate, Cell, ordered, screened
from anon_lab.studies._grounds import BASELINES, Grounds, Rates, confirmed, settled
from anon_lab.studies._report import in_words
from anon_lab.studies._results import Results, always, report, search, tried, tuned, worth
from anon_lab.studies._spec import Contender, Job, Section, Stage, Study, anon_defaults
from anon_lab.tables._spec import Heat

GAMMA = 1.0
MULTIPLES = (0.5, 1.0, 2.0, 4.0)
"""Of the tuned AdamW's lr, at which candidates are screened."""
LAST_ROUNDS = ((2.0,), (1.0, 1.4, 4.0))
"""On the language model, whose runs are long."""
KEPT = (11, 1)
"""Candidates that go on after each of these."""
ALWAYS = ("base", "as printed")
"""Candidates that come along in any case: what the others change, and what there was before."""
TIE = 1.0
"""Lags less than this apart are the same."""


def baselines(rates: Rates) -> list[Contender]:
    """AdamW and SGDM, with equally many trials."""
    betas = ("betas", ((0.9, 0.99), (0.9, 0.95)))
    (adam, more_adam), (sgd, more_sgd) = rates.adam_decay, rates.sgd_decay
    return [
        Contender(
            "AdamW",
            "AdamW",
            (("lr", rates.adam), betas, ("weight_decay", (more_adam,))),
            {"betas": (0.9, 0.999), "weight_decay": adam},
        ),
        Contender("SGDM", "SGDM", (("lr", rates.sgd), ("weight_decay", (more_sgd,))), {"weight_decay": sgd}),
    ]


def anon(candidate: Candidate, gamma: float, rates: Rates, label: str | None = None) -> Contender:
    """The candidate at this gamma, with as many trials as the baselines; near 0 by SGD's recipe, above by AdamW's."""
    label = label or f"Anon γ {gamma:g}"
    betas = ("betas", tuple((0.9, beta2) for beta2 in (0.95, 0.99, 0.999) if beta2 != candidate.values["betas"][1]))
    if gamma > 0.5:
        decay, more = rates.adam_decay
        axes = (("lr", rates.adam), betas, ("weight_decay", (more,)))
        fixed = {**candidate.values, "gamma": gamma, "weight_decay": decay}
        if gamma != 1:  # then lr has AdamW's unit
            fixed["lr_scale"] = "tensor"
        return Contender(label, candidate.optimizer, axes, fixed)
    # Anon averages gradients where SGDM sums them: ten times its lr is the same step.
    decay, more = rates.sgd_decay
    axes = (("lr", tuple(10 * lr for lr in rates.sgd)), ("weight_decay", (more,)))
    coupled = {**candidate.values, "gamma": gamma, "weight_decay": decay, "decoupled_weight_decay": False}
    return Contender(label, candidate.optimizer, axes, coupled)


def anon_by_default(gamma: float, rates: Rates) -> Contender:
    """Anon as it is."""
    return anon(Candidate("default", anon_defaults()), gamma, rates)


@dataclass(frozen=True)
class Meeting:
    """Where candidates meet: a ground, and multiples of the lr that AdamW is tuned to there."""

    grounds: Grounds
    multiples: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.grounds.ground.name} at γ {GAMMA:g}, {', '.join(f'{each:g}' for each in self.multiples)} x lr"

    def cell(self, results: Results) -> Cell | None:
        """None before AdamW is tuned."""
        best = tuned(baselines(self.grounds.rates)[0], self.grounds.ground, results)
        if best is None:
            return None
        lrs = tuple(float(f"{best['lr'] * each:.6g}") for each in self.multiples)
        return Cell(self.grounds.ground, GAMMA, lrs, self.grounds.margin, self.grounds.seeds)


class Screening:
    """From all candidates to one, by the mean lag over the cells of the grounds that have a say, in rounds: all on the
    cheap grounds, whoever is not behind the base on the last one, and ever fewer there. In the end safety at high
    learning rates cannot make up for a worse optimum: the winner is level with the tuned AdamW, if anyone is."""

    def __init__(self, cheap: Sequence[Grounds], final: Grounds) -> None:
        self.final = final
        self.rounds = [
            [Meeting(each, MULTIPLES) for each in cheap],
            *([Meeting(final, each)] for each in LAST_ROUNDS),
        ]

    def cells(self, rounds: int, results: Results) -> list[Cell] | None:
        """Of the first rounds; None before they are known."""
        found = [meeting.cell(results) for each in self.rounds[:rounds] for meeting in each]
        return None if None in found else [cell for cell in found if cell]

    def order(self, rounds: int, results: Results) -> list[tuple[str, float]] | None:
        """Who took part in all of the first rounds, the best first; None before these are over."""
        where, alive = self.cells(rounds, results), self.alive(rounds - 1, results)
        return ordered(alive, where, results) if where and alive else None

    def alive(self, rounds: int, results: Results) -> list[Candidate]:
        """Who goes on after so many rounds; nobody before they are over."""
        return results.known(f"alive after {rounds}", lambda: self._alive(rounds, results))

    def _alive(self, rounds: int, results: Results) -> list[Candidate]:
        if rounds == 0:
            return list(CANDIDATES)
        order = self.order(rounds, results)
        if order is None:
            return []
        if rounds == len(self.rounds):
            level = {each.name for each in CANDIDATES if self.is_level(each, results)}
            order = [each for each in order if each[0] in level] or order
        if rounds == 1:
            names = [name for name, lag in order if lag < dict(order)[ALWAYS[0]] + TIE]
        else:
            names = [name for name, _ in order[: KEPT[rounds - 2]]]
        if rounds < len(self.rounds):
            names += ALWAYS
        return [each for each in CANDIDATES if each.name in names]

    def is_level(self, candidate: Candidate, results: Results) -> bool:
        """Whether its best on the last ground is no more than a margin behind the tuned AdamW's."""
        ground = self.final.ground
        trials = tried(baselines(self.final.rates)[0], ground, results)
        theirs = max(worth(record, ground.metric) for _, record in trials)
        cells = [meeting.cell(results) for meetings in self.rounds[1:] for meeting in meetings]
        ours = [found[0] for cell in cells if cell and (found := cell.found(candidate, results))]
        return max(ours, default=float("-inf")) >= theirs - self.final.margin

    def winner(self, results: Results) -> Candidate | None:
        """Who is left after the last round."""
        return next(iter(self.alive(len(self.rounds), results)), None)

    def stages(self) -> list[Stage]:
        def stage(number: int, meeting: Meeting) -> Stage:
            def jobs(results: Results) -> list[Job]:
                cell = meeting.cell(results)
                return screened(self.alive(number, results), [cell]) if cell else []

            return Stage(f"screen {meeting.name}", jobs)

        small, *later = [[stage(number, each) for each in meetings] for number, meetings in enumerate(self.rounds)]
        return [*small, *_baseline_searches([self.final]), *(each for stages in later for each in stages)]

    def field(self, grounds: Grounds, results: Results) -> list[Contender]:
        """Baselines, and the winner at the gammas that belong to the ground."""
        winner = self.winner(results)
        ours = [] if winner is None else [anon(winner, gamma, grounds.rates) for gamma in grounds.gammas]
        return [*_theirs(grounds), *ours]


def _theirs(grounds: Grounds) -> list[Contender]:
    return [each for each in baselines(grounds.rates) if each.label in grounds.baselines]


def _baseline_searches(all_grounds: Sequence[Grounds]) -> list[Stage]:
    """Before any candidate's turn, which needs AdamW's lr."""

    return [stage for each in all_grounds for stage in search(always(_theirs(each)), each.ground)]


def study(tiny: bool = False) -> Study:
    cheap, final = settled(tiny)
    screening = Screening(cheap, final)
    stages = [*_baseline_searches(cheap), *screening.stages()]
    for each in (*cheap, final, *confirmed(tiny)):
        field = partial(screening.field, each)
        stages += [*_missing_from(stages, search(field, each.ground)), report(field, each.ground)]
    return Study(
        "Anon's defaults",
        "Which clip, floor, growth, beta3, beta2, touch and brake are safe at four times AdamW's best lr, and as good "
        "as a tuned AdamW or SGDM at the best?",
        stages,
        references=BASELINES,
        sections=partial(_sections, screening),
        heats=partial(_heats, screening),
    )


def _missing_from(before: Sequence[Stage], stages: Sequence[Stage]) -> list[Stage]:
    """The same stages, told apart by name from those in which the baselines alone were tuned."""
    names = {stage.name for stage in before}
    return [Stage(f"{each.name}, all" if each.name in names else each.name, each.jobs) for each in stages]


def _sections(screening: Screening, results: Results) -> list[Section]:
    """The screening, round by round, the best candidates first, and the choice."""
    sections = []
    for rounds in range(1, len(screening.rounds) + 1):
        title = f"Round {rounds}: {'the small tasks' if rounds == 1 else screening.rounds[rounds - 1][0].name}"
        where, order = screening.cells(rounds, results), screening.order(rounds, results)
        if where is None or order is None:
            continue
        candidates = screening.alive(rounds - 1, results)
        named = {each.name: each for each in candidates}
        head = ["", "lag", *(cell.name for cell in where), "settings"]
        body = [
            [name, f"{lag:.2f}", *(cell.words(named[name], results) for cell in where), in_words(named[name].values)]
            for name, lag in order
        ]
        margins = "; ".join(dict.fromkeys(f"{cell.ground.name} {cell.margin:g}" for cell in where))
        text = (
            "Validation: the value at the best lr / at the highest. The lag is how far a candidate is behind the best "
            "one, the mean over the columns and over both numbers of log2(1 + x), where x is in units of what equal "
            f"ones may differ by ({margins}); {WORST:g} where it diverged. Less than {TIE:g} apart is a tie."
        )
        sections.append(Section(title, [head, *body], text))
    winner = screening.winner(results)
    if winner is not None:
        text = (
            f"The smallest lag of those whose best at γ 1 on “{screening.final.ground.name}” is no more than "
            f"{screening.final.margin:g} behind the tuned AdamW's; of all, if there is none."
        )
        sections.append(Section("The choice", [["", "settings"], [winner.name, in_words(winner.values)]], text))
    return sections


def _heats(screening: Screening, results: Results) -> dict[str, Heat]:
    """Lags on the small tasks."""
    where, order = screening.cells(1, results), screening.order(1, results)
    if where is None or order is None:
        return {}
    named = {each.name: each for each in CANDIDATES}
    lags = [dict(cell.lags(CANDIDATES, results) or ()) for cell in where]
    return {
        "screening": Heat(
            f"“{order[0][0]}” has the smallest lag on the small tasks, {order[0][1]:.2f}",
            "candidate",
            "value at the best lr / at the highest",
            [name for name, _ in order],
            [cell.name for cell in where],
            [[each[name] for each in lags] for name, _ in order],
            [[cell.words(named[name], results) for cell in where] for name, _ in order],
            "lag",
            higher_is_better=False,
        )
    }
