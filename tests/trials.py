"""Small problems on which a default must prove itself: their data and models, nothing about optimizers."""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def reddi_gradient(t: int) -> float:
    """Gradient at step t >= 1 of the paper's online problem, eq. FunctionOfAMSGrad, with its vanishing noise.

    f_t(x) = 1010 x if t mod 101 = 1, else -10 x, on [-1, 1]: a period sums to +10 x, so the optimum is -1.
    """
    noise = 500.0 * math.exp(1 - t) * (1 if t % 2 else -1)
    return (1010.0 if t % 101 == 1 else -10.0) + noise


class Trial:
    """A model, the loss of its t-th minibatch (t from 1) and a score, the lower the better. A seed fixes all."""

    steps: int
    model: nn.Module

    def __init__(self, seed: int):
        self.rng = torch.Generator().manual_seed(seed)

    def loss(self, t: int) -> Tensor:
        raise NotImplementedError

    def score(self) -> float:
        raise NotImplementedError

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.rng) * std

    def linear(self, fan_in: int, fan_out: int) -> nn.Linear:
        layer = nn.Linear(fan_in, fan_out)
        with torch.no_grad():
            layer.weight.copy_(self.normal(fan_out, fan_in, std=fan_in**-0.5))
            layer.bias.zero_()
        return layer


class Digits(Trial):
    """An MLP 64-64-32-10 on scikit-learn's digits. Blank pixels and dead units have no gradient for long."""

    batch = 64
    epochs = 15

    def __init__(self, seed: int):
        super().__init__(seed)
        images, labels = digits()
        order = torch.randperm(len(images), generator=self.rng)
        self.test, self.train = order[:500], order[500:]
        self.images, self.labels = images, labels
        self.per_epoch = len(self.train) // self.batch
        self.steps = self.epochs * self.per_epoch
        sizes = [(64, 64), (64, 32), (32, 10)]
        first, second, third = (self.linear(*size) for size in sizes)
        self.model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def loss(self, t: int) -> Tensor:
        at = (t - 1) % self.per_epoch
        if at == 0:
            self.train = self.train[torch.randperm(len(self.train), generator=self.rng)]
        rows = self.train[at * self.batch : (at + 1) * self.batch]
        return F.cross_entropy(self.model(self.images[rows]), self.labels[rows])

    @torch.no_grad()
    def score(self) -> float:
        """Error on 500 held-out images, in percent; chance is 90."""
        return error(self.model(self.images[self.test]), self.labels[self.test])


class Bags(Trial):
    """Classify a bag of words by the sum of their hidden votes: an embedding whose rows see few gradients."""

    words: int
    classes: int
    length: int
    width = 16
    batch = 32

    def __init__(self, seed: int):
        super().__init__(seed)
        self.votes = self.normal(self.words, self.classes)
        embed = nn.EmbeddingBag(
            self.words, self.width, mode="sum", _weight=self.normal(self.words, self.width, std=0.1)
        )
        self.model = nn.Sequential(embed, self.linear(self.width, self.classes))

    def bags(self, frequencies: Tensor, count: int) -> tuple[Tensor, Tensor]:
        bags = torch.multinomial(frequencies, count * self.length, replacement=True, generator=self.rng)
        bags = bags.view(count, self.length)
        return bags, self.votes[bags].sum(1).argmax(1)

    def frequencies(self, t: int) -> Tensor:
        raise NotImplementedError

    def loss(self, t: int) -> Tensor:
        bags, labels = self.bags(self.frequencies(t), self.batch)
        return F.cross_entropy(self.model(bags), labels)

    @torch.no_grad()
    def error(self, frequencies: Tensor) -> float:
        bags, labels = self.bags(frequencies, 4000)
        return error(self.model(bags), labels)


class ZipfBags(Bags):
    """Word frequencies fall as 1/rank: most rows of the embedding are seen a few times in the whole run."""

    words, classes, length, steps = 1000, 4, 5, 1500

    def frequencies(self, t: int) -> Tensor:
        return 1.0 / torch.arange(1, self.words + 1)

    def score(self) -> float:
        """Error on fresh bags, in percent; chance is 75."""
        return self.error(self.frequencies(self.steps))


class LateRows(Bags):
    """Half of the words first appear at step 1100, when the last refresh (1024) is past and no other follows."""

    words, classes, length, steps = 400, 2, 5, 1400
    first_seen = 1100

    def frequencies(self, t: int) -> Tensor:
        late = torch.arange(self.words) >= self.words // 2
        return torch.where(late & (t < self.first_seen), 0.0, 1.0)

    def score(self) -> float:
        """Error on fresh bags of late words only, in percent; chance is 50."""
        return self.error((torch.arange(self.words) >= self.words // 2).float())


class TiedLanguageModel(Trial):
    """A 4-gram MLP with tied embeddings: rows of rare words first see only the faint pull of the softmax.

    A run of 250 steps ends just before a refresh (256), where the preconditioner is stalest.
    """

    words, width, batch, steps = 3000, 32, 256, 250
    chains, length, exponent = 512, 400, 1.4

    def __init__(self, seed: int):
        super().__init__(seed)
        text = markov_text(self.words, self.chains, self.length, self.exponent)
        held_out = self.chains // 32
        self.train = text[held_out:].unfold(1, 4, 1).reshape(-1, 4)
        self.valid = text[:held_out].unfold(1, 4, 1).reshape(-1, 4)
        embed = nn.Embedding(self.words, self.width, _weight=self.normal(self.words, self.width, std=self.width**-0.5))
        hidden, out = self.linear(3 * self.width, 4 * self.width), self.linear(4 * self.width, self.width)
        self.model = nn.Sequential(embed, nn.Flatten(), hidden, nn.ReLU(), out)

    def negative_log_likelihood(self, grams: Tensor) -> Tensor:
        return F.cross_entropy(self.model(grams[:, :3]) @ self.model[0].weight.T, grams[:, 3])

    def loss(self, t: int) -> Tensor:
        rows = torch.randint(len(self.train), (self.batch,), generator=self.rng)
        return self.negative_log_likelihood(self.train[rows])

    @torch.no_grad()
    def score(self) -> float:
        """Validation loss in nats."""
        return self.negative_log_likelihood(self.valid).item()


class LowRank(Trial):
    """Fine-tune a frozen layer W by a product B A whose B starts at zero, so A has no gradient at the first step."""

    inputs, outputs, rank, batch, steps = 48, 32, 8, 64, 60

    def __init__(self, seed: int):
        super().__init__(seed)
        std = self.inputs**-0.5
        self.frozen = self.normal(self.outputs, self.inputs, std=std)
        shift = self.normal(self.outputs, 4) @ self.normal(4, self.inputs, std=0.5 * std)
        self.target = self.frozen + shift
        self.model = nn.ParameterDict(
            {"A": self.normal(self.rank, self.inputs, std=std), "B": torch.zeros(self.outputs, self.rank)}
        )

    def mean_squared_error(self, count: int) -> Tensor:
        x = self.normal(count, self.inputs)
        weight = self.frozen + self.model["B"] @ self.model["A"]
        return F.mse_loss(torch.relu(x @ weight.T), torch.relu(x @ self.target.T))

    def loss(self, t: int) -> Tensor:
        return self.mean_squared_error(self.batch)

    @torch.no_grad()
    def score(self) -> float:
        """Mean squared error on fresh inputs."""
        return self.mean_squared_error(4096).item()


class FewWords(Bags):
    """Fine-tune a pretrained embedding on 60 words that changed their meaning; the other rows never appear."""

    words, classes, length, steps = 1000, 4, 5, 60
    used = 60

    def __init__(self, seed: int):
        super().__init__(seed)
        embed, head = self.model
        # What pretraining would have found: rows through which the head already speaks the old votes.
        with torch.no_grad():
            embed.weight.copy_(self.votes @ torch.linalg.pinv(head.weight).T)
        self.votes[: self.used] = self.normal(self.used, self.classes)

    def frequencies(self, t: int) -> Tensor:
        return (torch.arange(self.words) < self.used).float()

    @torch.no_grad()
    def score(self) -> float:
        """Loss on fresh bags of the words in use, in nats."""
        bags, labels = self.bags(self.frequencies(self.steps), 4000)
        return F.cross_entropy(self.model(bags), labels).item()


def error(logits: Tensor, labels: Tensor) -> float:
    return 100.0 * (logits.argmax(1) != labels).double().mean().item()


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


@lru_cache(maxsize=2)
def markov_text(words: int, chains: int, length: int, exponent: float) -> Tensor:
    """A text of `chains` lines: a Markov chain of 16 word classes, and Zipfian words within each class."""
    rng = torch.Generator().manual_seed(0)
    classes = 16
    frequency = (torch.arange(words, dtype=torch.float64) + 2.7) ** -exponent
    member = torch.randint(classes, (words,), generator=rng)
    share = torch.where(member == torch.arange(classes)[:, None], frequency, 0.0)
    moves = torch.randn(classes, classes, generator=rng, dtype=torch.float64).mul(2.0).exp() * share.sum(1)

    def draw(weights: Tensor, rows: Tensor) -> Tensor:
        # One sorted table for all rows: row k fills (k, k + 1], so a search replaces a loop over rows.
        table = (weights / weights.sum(1, keepdim=True)).cumsum(1) + torch.arange(len(weights))[:, None]
        aim = rows + torch.rand(rows.shape, generator=rng, dtype=torch.float64)
        return torch.searchsorted(table.flatten(), aim).clamp_(max=table.numel() - 1) % weights.shape[1]

    states = [torch.randint(classes, (chains,), generator=rng)]
    for _ in range(length - 1):
        states.append(draw(moves, states[-1]))
    return draw(share, torch.stack(states, 1))
