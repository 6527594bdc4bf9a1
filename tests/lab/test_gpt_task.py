"""The gpt task: text becomes the right tokens once, and the network is GPT-2."""

import base64
import gzip
import lzma
import math
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.progress import Progress
from torch.nn import functional as F

from anon_lab import tasks, text
from anon_lab.models import gpt as network
from anon_lab.models.gpt import GPT, Shape
from anon_lab.tasks import DataMissing, gpt

CPU = torch.device("cpu")
SENTENCES = [f"Number {n} is followed by {n + 1}, and that's all.\nIt ends.\n" for n in range(400)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ANON_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with 400 documents to train on and 100 others."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.txt").write_text("<|endoftext|>\n".join(SENTENCES))
    (folder / "val.txt").write_text("<|endoftext|>\n".join(reversed(SENTENCES[:100])))
    return folder


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A vocabulary of all bytes and three merges: "th", " th", " tha"."""
    path = tmp_path / "few.tiktoken"
    known = [bytes([n]) for n in range(256)] + [b"th", b" th", b" tha"]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(known)))
    return path


def read(path: Path) -> list[str]:
    with Progress(disable=True) as progress:
        return list(text.TextFile(path).documents(progress))


def test_documents_lie_between_separator_lines_however_packed(tmp_path: Path) -> None:
    content = "<|endoftext|>\none\n\nmore <|endoftext|> inside\n<|endoftext|>\n<|endoftext|>\nä two"
    want = ["one\n\nmore <|endoftext|> inside\n", "ä two"]
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(content.encode()))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    for suffix in text.SUFFIXES:
        assert read(tmp_path / f"a{suffix}") == want


def test_a_document_without_end_is_cut_at_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CALL", 5)
    assert list(text.split(["abc\n", "de\n", "f\n", "<|endoftext|>\n", "g"])) == ["abc\nde\n", "f\n", "g"]


def test_damaged_files_are_refused_and_leave_nothing_behind(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "cut.txt.xz").write_bytes(lzma.compress("".join(SENTENCES).encode())[:-40])
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress("".join(SENTENCES).encode())[:-40])
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"<|endoftext|>\n")
    for name, complaint in (("cut.txt.xz", "cut short"), ("cut.txt.gz", "cut short"), ("latin.txt", "UTF-8")):
        with pytest.raises(DataMissing, match=complaint):
            gpt.load(tmp_path / name, model="tiny")
    with pytest.raises(DataMissing, match="holds no text"):
        gpt.load(tmp_path / "empty.txt", model="tiny")
    assert list((cache / "tokens").iterdir()) == []


def test_byte_pairs_merge_by_rank_and_a_smaller_vocabulary_has_the_first_merges(ranks: Path) -> None:
    document = "the that's th"
    by_hand = [256, 101, 258, 116, 39, 115, 257]  # th e | " tha" t | ' s | " th"
    whole = text.BytePairs(ranks)
    assert whole.size == 260
    assert whole.encode([document])[0].tolist() == by_hand
    first = text.BytePairs(ranks, size=258)  # the bytes, "th" and the end
    assert first.encode([document])[0].tolist() == [256, 101, 32, 256, 97, 116, 39, 115, 32, 256]
    assert first.key() != whole.key()
    for size in (256, 261):
        with pytest.raises(ValueError, match=f"257 to 260 .* but is {size}"):
            text.BytePairs(ranks, size)


def test_tokens_are_every_document_and_its_end_encoded_once(corpus: Path, cache: Path) -> None:
    source = text.TextFile(corpus / "train.txt")
    want = [token for document in SENTENCES for token in (*document.encode(), 256)]
    assert text.tokens(source, text.Bytes()).tolist() == want
    (made,) = (cache / "tokens").iterdir()
    made.write_bytes(np.arange(3, dtype=np.uint16).tobytes())  # if it is made again, this is lost
    assert text.tokens(source, text.Bytes()).tolist() == [0, 1, 2]
    source.path.write_text("other")
    assert text.tokens(source, text.Bytes()).tolist() == [*b"other", 256]


def test_rows_of_the_hub_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list):
        _fingerprint = "1"

    def load_dataset(name: str, split: str) -> Rows:
        assert (name, split) == ("org/name", "train")
        return Rows({"text": sentence} for sentence in SENTENCES)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = gpt.load(Path("hf:org/name"), model="tiny")
    want = [token for document in SENTENCES for token in (*document.encode(), 256)]
    assert [*task.train, *task.test] == want


def test_an_interrupted_encoding_leaves_nothing(corpus: Path, cache: Path) -> None:
    class Interrupted(text.Bytes):
        def encode(self, documents: list[str]) -> list[np.ndarray]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text.tokens(text.TextFile(corpus / "train.txt"), Interrupted())
    assert list((cache / "tokens").iterdir()) == []


def test_splits(corpus: Path) -> None:
    train = [token for document in SENTENCES for token in (*document.encode(), 256)]
    held = len(train) // 20
    task = gpt.load(corpus, model="tiny", hold_out=True)
    assert task.train.tolist() == train[:-held]
    assert task.validation.tolist() == train[-held:]
    assert bytes(task.test[: len(SENTENCES[99])].tolist()).decode() == SENTENCES[99]
    assert gpt.load(corpus, model="tiny").train.tolist() == train
    alone = gpt.load(corpus / "train.txt", model="tiny", hold_out=True)
    assert [*alone.train, *alone.validation, *alone.test] == train
    assert len(alone.validation) == len(alone.test) == held
    assert len(gpt.load(corpus, model="tiny", hold_out=True, evaluated=100).validation) == 100


def test_a_fingerprint_tells_texts_apart_however_packed(corpus: Path, tmp_path: Path) -> None:
    def of(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return tasks.fingerprint(gpt.load(tmp_path / name, model="tiny"), CPU)

    whole = (corpus / "train.txt").read_bytes()
    assert of("a.txt", whole) == of("b.txt.xz", lzma.compress(whole))
    assert len({of("a.txt", whole), of("c.txt", whole[:-2000]), of("d.txt", whole[::-1])}) == 3


def test_data_is_found_in_the_usual_folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    with pytest.raises(DataMissing, match="ANON_DATA"):
        gpt.load(None)
    corpus.rename(corpus.with_name("gpt"))
    monkeypatch.setenv("ANON_DATA", str(corpus.parent))
    assert tasks.load("gpt", model="tiny").examples() > 100


def test_refusals_name_what_would_be_right(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"options model, block, .* but was given depth"):
        gpt.load(corpus, depth=3)
    with pytest.raises(ValueError, match="one of small, medium, 20m, 1m, tiny, but is 'huge'"):
        gpt.load(corpus, model="huge")
    with pytest.raises(ValueError, match="but is 'klingon'"):
        gpt.load(corpus, model="tiny", vocabulary="klingon")
    with pytest.raises(DataMissing, match="is not there"):
        gpt.load(tmp_path / "nowhere.txt")
    with pytest.raises(DataMissing, match=r"must hold train\.txt"):
        gpt.load(tmp_path)
    with pytest.raises(DataMissing, match="more tokens than block = 9000"):
        gpt.load(corpus, model="tiny", block=9000)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(DataMissing, match="pip install datasets"):
        gpt.load(Path("hf:openwebtext"), model="tiny")
    task = gpt.load(corpus, model="tiny")
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        task.stream(8, 0, 0, CPU, 0, 3)
    with pytest.raises(ValueError, match="load it with hold_out"):
        task.evaluate(task.model(), "validation", CPU)


def test_a_batch_is_a_function_of_seed_step_and_rank(corpus: Path) -> None:
    task = gpt.load(corpus, model="tiny", hold_out=True)
    first = list(islice(task.stream(8, 3, 0, CPU), 6))
    for (x, y), (late_x, late_y) in zip(first[4:], task.stream(8, 3, 4, CPU), strict=False):
        assert torch.equal(x, late_x)
        assert torch.equal(y, late_y)
    halves = [next(task.stream(8, 3, 5, CPU, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([x for x, _ in halves]), first[5][0])
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], next(task.stream(8, 4, 0, CPU))[0])
    x, y = first[0]
    assert x.shape == y.shape == (8, 32)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    windows = np.lib.stride_tricks.sliding_window_view(task.train, 32)
    assert all((windows == row.numpy()).all(1).any() for row in x)
    assert task.units(first[0]) == 256


@pytest.mark.parametrize("resident", [True, False])
def test_every_token_number_survives_the_way_to_the_device(resident: bool) -> None:
    tokens = np.arange(1 << 16, dtype=np.uint16)
    starts = np.array([0, 32_766, 50_256, 65_531])
    inputs, targets = gpt.Reader(tokens, 4, CPU, resident).batch(starts)
    assert inputs.tolist() == [list(range(start, start + 4)) for start in starts]
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize(("length", "block", "limit"), [(101, 10, 1000), (105, 10, 1000), (1000, 10, 95), (11, 10, 1)])
def test_evaluated_blocks_lie_evenly_and_apart(length: int, block: int, limit: int) -> None:
    places = gpt.spread(length, block, limit)
    assert len(places) == max(1, min((length - 1) // block, limit // block))
    assert places[0] == 0
    assert places[-1] + block + 1 <= length
    assert (np.diff(places) >= block).all()
    assert np.ptp(np.diff(places)) <= 1 if len(places) > 1 else True


def by_hand(net: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's formulas with explicit scores, masks and norms, in the order in which they are written."""
    shape, p = net.shape, dict(net.named_parameters())
    norm = lambda x, w: w * (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()  # noqa: E731
    d = shape.width // shape.heads
    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for i in range(shape.layers):
        h = norm(x, p[f"blocks.{i}.norm1.weight"]) @ p[f"blocks.{i}.attention.qkv.weight"].T
        q, k, v = h.split(shape.width, -1)
        heads = []
        for a in range(shape.heads):
            part = slice(a * d, (a + 1) * d)
            score = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d)
            if shape.depth_scaled:
                score = score / (i + 1)
            heads.append(score.masked_fill(future, -math.inf).softmax(-1) @ v[..., part])
        x = x + torch.cat(heads, -1) @ p[f"blocks.{i}.attention.out.weight"].T
        h = norm(x, p[f"blocks.{i}.norm2.weight"]) @ p[f"blocks.{i}.widen.weight"].T
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ p[f"blocks.{i}.out.weight"].T
    head = p["tokens.weight"] if shape.tied else p["head.weight"]
    return norm(x, p["norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth_scaled", [True, False])
def test_the_network_computes_gpt2(tied: bool, depth_scaled: bool) -> None:
    torch.manual_seed(0)
    net = GPT(Shape(3, 2, 16, 12, 64, tied=tied, depth_scaled=depth_scaled)).double()
    for parameter in net.parameters():  # large enough that attention is far from uniform
        parameter.data = parameter.data * 10
    tokens = torch.randint(64, (4, 10))
    torch.testing.assert_close(net(tokens), by_hand(net, tokens))


@pytest.mark.parametrize(
    ("name", "vocabulary", "million"), [("small", 50304, 124.4), ("medium", 50304, 354.6), ("20m", 8192, 23.3)]
)
def test_parameter_counts(name: str, vocabulary: int, million: float) -> None:
    preset = gpt.PRESETS[name]
    with torch.device("meta"):
        net = GPT(Shape(preset.layers, preset.heads, preset.width, preset.block, vocabulary))
    w = preset.width
    by_hand = (vocabulary + preset.block) * w + preset.layers * (12 * w * w + 2 * w) + w
    assert sum(p.numel() for p in net.parameters()) == by_hand
    assert round(by_hand / 1e6, 1) == million


def test_initial_weights() -> None:
    torch.manual_seed(0)
    net = GPT(Shape(8, 4, 256, 64, 1024, tied=False, bias=True))
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            want = 0.02 / math.sqrt(16) if name.endswith("out.weight") else 0.02
            assert parameter.std().item() == pytest.approx(want, rel=0.03), name


def test_the_loss_in_pieces_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = GPT(Shape(1, 2, 8, 16, 64)).double()
    inputs, targets = torch.randint(64, (2, 5, 16))
    want = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
    wanted = torch.autograd.grad(want, list(net.parameters()))
    for logits in (1 << 30, 64 * 30, 1):  # at once; pieces of 30, 30 and 20 rows; row by row
        monkeypatch.setattr(network, "LOGITS", logits)
        got = net(inputs, targets)
        # The sum is taken in float32 whatever the network's precision.
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.autograd.grad(got, list(net.parameters())), wanted, rtol=1e-5, atol=1e-8)


def test_a_uniform_network_costs_the_logarithm_of_the_vocabulary(corpus: Path) -> None:
    task = gpt.load(corpus, model="tiny", hold_out=True)
    net = task.model()
    torch.nn.init.zeros_(net.tokens.weight)  # tied: every logit is 0
    batch = next(task.stream(4, 0, 0, CPU))
    for loss in (task.loss(net, batch), task.sampled_loss(net, batch).mean()):
        assert loss.item() == pytest.approx(math.log(320), rel=1e-6)
    for split in ("validation", "test"):
        result = task.evaluate(net, split, CPU)
        assert result["loss"] == pytest.approx(math.log(320), rel=1e-6)
        assert result["perplexity"] == pytest.approx(320, rel=1e-5)


def test_sampled_targets_follow_the_network(corpus: Path) -> None:
    """The mean of -log p over labels drawn from p is p's entropy."""
    torch.manual_seed(0)
    task = gpt.load(corpus, model="tiny")
    net = task.model()
    net.tokens.weight.data *= 30
    batch = next(task.stream(64, 0, 0, CPU))
    with torch.no_grad():
        log_p = net(batch[0]).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        variance = (p * log_p**2).sum(-1) - entropy**2
        error = variance.sum().sqrt() / variance.numel()
        assert abs(task.sampled_loss(net, batch).mean() - entropy.mean()) < 4 * error
        assert abs(task.loss(net, batch) - entropy.mean()) > 20 * error


def test_evaluation_is_the_mean_over_its_blocks_and_keeps_the_mode(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "POSITIONS", 32 * 3)  # the last call is smaller than the others
    torch.manual_seed(0)
    task = gpt.load(corpus, model="tiny", evaluated=32 * 10)
    net = task.model()
    places = gpt.spread(len(task.test), 32, 320)
    rows = torch.tensor(np.stack([task.test[place : place + 33] for place in places]).astype(np.int64))
    want = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()
    assert task.evaluate(net, "test", CPU)["loss"] == pytest.approx(want, rel=1e-6)
    assert net.training
    net.eval()
    assert task.evaluate(net, "test", CPU) == task.evaluate(net, "test", CPU)
    assert not net.training


def test_it_learns(corpus: Path) -> None:
    torch.manual_seed(0)
    task = gpt.load(corpus, model="tiny", hold_out=True)
    net = task.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    before = task.evaluate(net, "validation", CPU)["loss"]
    for batch in islice(task.stream(16, 0, 0, CPU), 100):
        optimizer.zero_grad()
        task.loss(net, batch).backward()
        optimizer.step()
    assert before == pytest.approx(math.log(320), abs=0.1)
    assert task.evaluate(net, "validation", CPU)["loss"] < 1.5


def test_recipes_are_the_papers() -> None:
    small, medium = gpt.PRESETS["small"].recipe, gpt.PRESETS["medium"].recipe
    for recipe in (small, medium):
        assert recipe.batch_size * 1024 == 491_520  # the tokens a step that Sophia's configurations state
        assert (recipe.steps, recipe.warmup * 100_000, recipe.clip, recipe.weight_decay) == (100_000, 2_000, 1.0, 0.1)
    assert small.final_lr * 6e-4 == pytest.approx(3e-5)
    assert medium.final_lr * 7e-4 == pytest.approx(1e-5)
