"""The zipf and ngram tasks, and growths that rise: laws that can be computed by hand, and the contract of a task."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from anon_lab import tasks
from anon_lab.growth import Rising
from anon_lab.run import Run
from anon_lab.settings import Settings
from anon_lab.tasks import Recipe, ngram, zipf
from anon_lab.train import drive

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "ahead"), [("zipf", zipf.AHEAD), ("ngram", ngram.AHEAD)])
def test_a_batch_follows_from_seed_and_step(name: str, ahead: int) -> None:
    task = tasks.load(name, hold_out=True)
    whole = list(islice(task.stream(8, 3, 0, CPU), ahead + 3))
    for start in (2, ahead, ahead + 1):  # within a chunk, at its end and in the next
        later = next(iter(task.stream(8, 3, start, CPU)))
        assert all(torch.equal(a, b) for a, b in zip(later, whole[start], strict=True))
    other = next(iter(task.stream(8, 4, 0, CPU)))
    assert not torch.equal(other[0], whole[0][0])
    assert not torch.equal(whole[0][0], whole[ahead][0])
    shares = [next(iter(task.stream(8, 3, 1, CPU, rank, 2))) for rank in (0, 1)]
    for number, part in enumerate(whole[1]):
        assert torch.equal(torch.cat([share[number] for share in shares]), part)
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        next(iter(task.stream(8, 3, 0, CPU, 0, 3)))


@pytest.mark.parametrize("name", ["zipf", "ngram"])
def test_evaluation_is_the_same_each_time_and_differs_by_split(name: str) -> None:
    task = tasks.load(name, hold_out=True)
    torch.manual_seed(0)
    net = task.model()
    first, again = (task.evaluate(net, "validation", CPU) for _ in range(2))
    assert first == again
    assert first != task.evaluate(net, "test", CPU)
    assert task.metric.name in first
    with pytest.raises(ValueError, match=f"{name} takes"):
        tasks.load(name, nonsense=1)


def test_words_fall_as_one_over_rank() -> None:
    words, labels = zipf.Zipf().bags(40_000, "train", 0, 0)
    share = np.bincount(words.numpy().ravel(), minlength=zipf.WORDS) / words.numel()
    law = 1 / np.arange(1, zipf.WORDS + 1)
    law /= law.sum()
    # 200,000 draws: three standard deviations of a share p are 3 sqrt(p (1 - p) / n).
    band = 3 * np.sqrt(law * (1 - law) / words.numel())
    assert np.mean(np.abs(share - law) <= band) > 0.99
    assert sorted(set(labels.tolist())) == list(range(zipf.CLASSES))


def test_the_classes_are_the_votes_of_the_words() -> None:
    task = zipf.Zipf()
    words, labels = task.bags(100, "test")
    votes = np.random.default_rng(0).standard_normal((zipf.WORDS, zipf.CLASSES))
    for bag, label in zip(words.tolist(), labels.tolist(), strict=True):
        assert label == max(range(zipf.CLASSES), key=lambda c, bag=bag: sum(votes[word][c] for word in bag))


def test_ngram_keeps_its_splits_apart() -> None:
    text = ngram.made_text()
    held, whole = tasks.load("ngram", hold_out=True), tasks.load("ngram")
    per_line, sixteenth = ngram.LENGTH - ngram.CONTEXT, ngram.CHAINS // 16
    assert held.examples() == (len(text) - sixteenth) * per_line
    assert whole.examples() == (len(text) - sixteenth // 2) * per_line
    with pytest.raises(ValueError, match="hold_out"):
        whole.evaluate(whole.model(), "validation", CPU)
    assert isinstance(held, ngram.Ngram)
    assert torch.equal(held._test[:per_line, 0].long(), text[0, :per_line].long())


def test_ngram_starts_near_the_uniform_loss_and_learns() -> None:
    """Random weights know nothing, ln(3000) = 8.0; the frequencies alone are worth more than a nat."""
    task = tasks.load("ngram", hold_out=True, evaluated=1024)
    recipe = task.recipe.changed(steps=40)
    run = Run(Settings("ngram", "AdamW", 8e-3, recipe, hold_out=True, evaluations=1), task, CPU)
    assert run.evaluate()["loss"] == pytest.approx(math.log(ngram.WORDS), abs=0.2)
    assert drive([run])[0]["evaluation"]["loss"] < math.log(ngram.WORDS) - 1


def test_ngram_on_a_given_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ngram, "GIVEN_VOCABULARY", "bytes")
    text = "abcdefgh" * 3000
    (tmp_path / "train.txt").write_text(text)
    task = tasks.load("ngram", tmp_path, hold_out=True)
    batch = next(iter(task.stream(16, 0, 0, CPU)))[0]
    assert all(bytes(row).decode() in text for row in batch.tolist())


def test_a_rising_growth() -> None:
    growth = Rising(1.25, 2.0, 10_000)
    assert growth(1) == 1.25
    assert growth(100) == pytest.approx(math.sqrt(1.25 * 2.0))  # half-way on the scale of ln t
    assert growth(10_000) == growth(10**9) == 2.0
    assert hash(growth) == hash(Rising(1.25, 2.0, 10_000))


def test_a_growth_in_json_trains_as_the_growth_itself() -> None:
    task = tasks.load("digits", hold_out=True)
    rising = {"start": 1.25, "end": 2.0, "by": 16}
    settings = Settings(
        "digits", "Anon", 0.01, Recipe(batch_size=50, steps=20), hyper={"growth": rising}, hold_out=True
    )
    from_json = Settings.from_json(settings.as_json())
    plain = Run(Settings("digits", "Anon", 0.01, settings.recipe, hyper={"growth": 2.0}, hold_out=True), task, CPU)
    run = Run(from_json, task, CPU)
    assert run.optimizer.param_groups[0]["growth"] == Rising(**rising)
    assert drive([run])[0]["loss"] != drive([plain])[0]["loss"]
