"""The image tasks: what they read, what they refuse, and that a batch is a function of seed and step alone."""

import gzip
import hashlib
import math
import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from anon_lab import tasks
from anon_lab.tasks import DataMissing, _cifar10, _image_folder, _images, cifar10, digits, fashion, imagenet
from anon_lab.tasks._image_folder import Reader, random_box

CPU = torch.device("cpu")
DATA = Path(os.environ.get("ANON_DATA", "nowhere")).absolute()  # read here, before the fixture below hides it
PIXELS = np.random.default_rng(1).integers(0, 256, (300, 3, 32, 32), np.uint8)
SPLITS = {"train": slice(0, 200), "test": slice(200, 300)}
# In each split the classes are of equal size.
LABELS = np.concatenate([np.random.default_rng(2).permutation(np.arange(n) % 10) for n in (200, 100)]).astype(np.uint8)


@pytest.fixture(autouse=True)
def nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANON_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


# CIFAR-10's formats, written as their makers describe them.


def pickled(pixels: np.ndarray, labels: np.ndarray, evil: bytes = b"") -> bytes:
    """A batch as Python 2's cPickle and NumPy 1 wrote it, protocol 2; the memo's instructions are there in part."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    data = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01"
        + (b"M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86")
        + b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + struct.pack("<i", len(data)) + data + b"tb")
    )
    numbers = b"]q\x04"
    for part in np.array_split(labels, 2):  # a long list is written in parts
        numbers += b"(" + b"".join(b"K" + bytes([n]) for n in part) + b"e"
    names = b"](" + b"".join(short(b"cat_s_%06d.png" % i) for i in range(len(labels))) + b"e"
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03",
            short(b"labels") + numbers,
            evil,
            short(b"data") + array,
            short(b"filenames") + names,
            b"u.",
        ]
    )


def write_python(folder: Path, monkeypatch: pytest.MonkeyPatch, evil: bytes = b"") -> None:
    folder.mkdir(parents=True)
    sums = {}
    for name, part in batch_parts():
        content = pickled(PIXELS[part], LABELS[part], evil)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(_cifar10, "CHECKSUMS", sums)


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, part in batch_parts():
        records = [bytes([label]) + image.tobytes() for image, label in zip(PIXELS[part], LABELS[part], strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))


def write_sheets(folder: Path, suffix: str) -> None:
    """Grids of 10 x 10 images."""
    folder.mkdir(parents=True)
    for split, part in SPLITS.items():
        np.save(folder / f"{split}_labels.npy", LABELS[part])
        for sheet, images in enumerate(np.split(PIXELS[part], len(PIXELS[part]) // 100)):
            grid = np.zeros((320, 320, 3), np.uint8)
            for place, image in enumerate(images):
                y, x = 32 * (place // 10), 32 * (place % 10)
                grid[y : y + 32, x : x + 32] = image.transpose(1, 2, 0)
            Image.fromarray(grid).save(folder / f"{split}_{sheet:02}.{suffix}", lossless=True)


def batch_parts() -> Iterator[tuple[str, slice]]:
    for i in range(5):
        yield f"data_batch_{i + 1}", slice(40 * i, 40 * (i + 1))
    yield "test_batch", SPLITS["test"]


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts that CIFAR-10 is checked by, for the 300 images of these tests."""
    train = PIXELS[SPLITS["train"]] / 255
    normal = _images.Normal(tuple(train.mean((0, 2, 3))), tuple(train.std((0, 2, 3))))
    monkeypatch.setattr(_cifar10, "NORMAL", normal)
    monkeypatch.setattr(_cifar10, "PER_CLASS", {"train": 20, "test": 10})
    monkeypatch.setattr(cifar10, "N_VALIDATION", 40)


@pytest.mark.parametrize("form", ["python", "torchvision", "binary", "webp", "png"])
def test_cifar10_reads_the_same_images_from_every_format(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_cifar: None
) -> None:
    if form == "python":
        write_python(tmp_path / "it", monkeypatch)
    elif form == "torchvision":
        write_python(tmp_path / "it" / "cifar-10-batches-py", monkeypatch)
    elif form == "binary":
        write_binary(tmp_path / "it" / "cifar-10-batches-bin")
    else:
        write_sheets(tmp_path / "it", form)
    for images, part in zip(_cifar10.load(tmp_path / "it"), SPLITS.values(), strict=True):
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert np.array_equal(images.pixels.numpy(), PIXELS[part])
        assert images.labels.tolist() == LABELS[part].tolist()


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_cifar: None) -> None:
    trace = tmp_path / "trace"
    evil = b"U\x04evilcos\nmkdir\n(U" + bytes([len(str(trace))]) + str(trace).encode() + b"tR"
    write_python(tmp_path / "it", monkeypatch, evil)
    assert len(_cifar10.load(tmp_path / "it")[0].labels) == 200
    assert not trace.exists()


def test_data_are_searched_under_the_variable_and_the_folder_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_cifar: None
) -> None:
    write_binary(tmp_path / "data" / "cifar10")
    assert tasks.load("cifar10").examples() == 200
    with pytest.raises(DataMissing, match=r"^CIFAR-10 was not found in elsewhere: put [^\n]*$"):
        tasks.load("cifar10", data=Path("elsewhere"))
    monkeypatch.setenv("ANON_DATA", str(tmp_path / "mine"))
    write_sheets(tmp_path / "mine" / "cifar10", "png")
    (tmp_path / "data" / "cifar10" / "data_batch_1.bin").write_bytes(b"broken")
    assert tasks.load("cifar10").examples() == 200


def test_damaged_cifar10_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_cifar: None
) -> None:
    def refusal(folder: str) -> str:
        with pytest.raises(DataMissing) as error:
            _cifar10.load(tmp_path / folder)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    write_python(tmp_path / "py", monkeypatch)
    path = tmp_path / "py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal("py") == (
        f"/py/data_batch_3 is not the official file: its MD5 is not {_cifar10.CHECKSUMS['data_batch_3']}"
    )
    path.unlink()
    assert refusal("py") == "/py/data_batch_3 is missing"

    write_binary(tmp_path / "bin")
    path = tmp_path / "bin" / "test_batch.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert refusal("bin") == "/bin/test_batch.bin holds 307299 bytes, which is no multiple of the 3073 of an image"
    path.write_bytes(whole[:-3073])
    assert "its test classes have" in refusal("bin")
    path.write_bytes(whole[:-3073] + b"\x0b" + whole[-3072:])
    assert "but should have 10 each" in refusal("bin")

    write_sheets(tmp_path / "png", "png")
    path = tmp_path / "png" / "train_01.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal("png").startswith("/png/train_01.png cannot be read as an image: ")
    path.unlink()
    assert refusal("png") == "/png has 100 train images in 1 sheets for 200 labels"
    Image.new("RGB", (320, 300)).save(path)
    assert "must be a square grid of 32 x 32 images, but has (300, 320) pixels" in refusal("png")
    np.save(tmp_path / "png" / "train_labels.npy", np.array([{}], dtype=object))
    assert refusal("png").startswith("/png/train_labels.npy cannot be read: ")
    np.save(tmp_path / "png" / "train_labels.npy", LABELS[:200] / 1)
    assert "must hold a row of integers, but holds float64 of shape (200,)" in refusal("png")

    monkeypatch.setattr(_cifar10, "NORMAL", _images.Normal((0.1, 0.1, 0.1), (0.2, 0.2, 0.2)))
    write_binary(tmp_path / "other")
    assert "the mean of its training pixels is 0.5" in refusal("other")


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason="needs $ANON_DATA/cifar10")
def test_real_cifar10_passes_its_checks() -> None:
    train, test = _cifar10.load(DATA / "cifar10")
    assert (train.pixels.shape, test.pixels.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))


# Fashion-MNIST's files.


def write_fashion(folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    sums = {}
    for name, split in (("train", "train"), ("t10k", "test")):
        images, labels = PIXELS[SPLITS[split], 0, :28, :28], LABELS[SPLITS[split]]
        for file, array in ((f"{name}-images-idx3-ubyte", images), (f"{name}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content = header + array.tobytes()
            sums[file] = hashlib.md5(content).hexdigest()
            if packed:
                (folder / f"{file}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / file).write_bytes(content)
    monkeypatch.setattr(fashion, "CHECKSUMS", sums)
    monkeypatch.setattr(fashion, "N_VALIDATION", 40)


@pytest.mark.parametrize(("below", "packed"), [("", True), ("", False), ("FashionMNIST/raw", True)])
def test_fashion_reads_idx_files(below: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "it" / below, packed, monkeypatch)
    for images, part in zip(fashion.read(fashion.find(tmp_path / "it")), SPLITS.values(), strict=True):
        assert np.array_equal(images.pixels.numpy(), PIXELS[part, :1, :28, :28])
        assert images.labels.tolist() == LABELS[part].tolist()
    assert fashion.load(tmp_path / "it").examples() == 200


def test_damaged_fashion_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        with pytest.raises(DataMissing) as error:
            fashion.load(tmp_path / "it")
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    assert refusal().startswith("Fashion-MNIST was not found in /it: put the four files of https://")
    write_fashion(tmp_path / "it", True, monkeypatch)
    path = tmp_path / "it" / "t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert refusal().startswith("/it/t10k-labels-idx1-ubyte.gz cannot be unpacked: ")
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    assert refusal() == "/it/t10k-labels-idx1-ubyte.gz holds 99 bytes after its header, but should hold 100"
    path.write_bytes(gzip.compress(b"\0" + gzip.decompress(whole)[1:-1] + b"\x63"))
    assert refusal().startswith("/it/t10k-labels-idx1-ubyte.gz is not the published file: its MD5 is not ")
    path.write_bytes(gzip.compress(b"some text"))
    assert refusal() == "/it/t10k-labels-idx1-ubyte.gz is no IDX file of bytes"
    path.unlink()
    assert refusal() == "/it holds neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"


@pytest.mark.skipif(not fashion.DEBIAN.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_debians_fashion_mnist_is_found() -> None:
    task = tasks.load("fashion", hold_out=True)
    assert task.examples() == 55_000


# Image folders.


def write_folder(root: Path, annotated: bool = False) -> Path:
    """Three classes of eight images to train on and two others; class k has 40 x (40 + 8 k) pixels."""
    rng = np.random.default_rng(5)
    lines = []
    for k, name in enumerate(("ant", "bee", "cow")):
        for split, count in (("train", 8), ("val", 2)):
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 256, (40, 40 + 8 * k, 3), np.uint8))
                path = root / split / name / f"{name}_{i}.JPEG"
                if annotated:
                    path = root / split / name / "images" / path.name
                    if split == "val":
                        path = root / split / "images" / path.name
                        lines.append(f"{path.name}\t{name}\t0\t0\t62\t62\n")
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    if annotated:
        (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


@pytest.mark.parametrize("annotated", [False, True])
def test_folder_gives_files_and_classes(annotated: bool, tmp_path: Path) -> None:
    classes, train, test = _image_folder.read_folder(write_folder(tmp_path / "it", annotated), partial=False)
    assert classes == ["ant", "bee", "cow"]
    for files, count in ((train, 8), (test, 2)):
        assert files.labels.tolist() == [k for k in range(3) for _ in range(count)]
        names = [Path(os.fsdecode(path)).name for path in files.paths]
        assert names == [f"{name}_{i}.JPEG" for name in classes for i in range(count)]


def test_incomplete_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    def refusal(root: Path) -> str:
        with pytest.raises(DataMissing) as error:
            imagenet.load(root)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    root = tmp_path / "it"
    assert refusal(root).startswith("no image folder was found in /it: put ImageNet")
    (root / "train" / "ant").mkdir(parents=True)
    assert refusal(root) == "/it/train/ant holds no images"
    (root / "train" / "ant" / "a.png").touch()
    assert refusal(root) == "/it/train must have a folder for each of two or more classes, but has 1"
    (root / "train" / "bee").mkdir()
    (root / "train" / "bee" / "b.png").touch()
    assert refusal(root) == "/it/val is missing"
    (root / "val").mkdir()
    assert refusal(root) == "/it/val holds no images"
    (root / "val" / "ant").mkdir()
    (root / "val" / "ant" / "a.png").touch()
    assert refusal(root) == "class bee has images in /it/train, but none in /it/val"

    tiny = tmp_path / "tiny"
    for name in (f"n{i:08}" for i in range(200)):
        for split in ("train", "val"):
            (tiny / split / name).mkdir(parents=True)
            (tiny / split / name / "a.png").touch()
    assert refusal(tiny) == (
        "/tiny holds 200 training and 200 validation images, but should hold 100000 and 10000; "
        "the option partial accepts what is there"
    )
    assert imagenet.load(tiny, partial=True).examples() == 200


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named(workers: int, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "it")
    path = root / "train" / "bee" / "bee_3.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    task = imagenet.load(root, image_size=16, workers=workers)
    with pytest.raises(DataMissing) as error:
        list(islice(task.stream(8, 0, 0, CPU), 3))
    assert str(error.value).startswith(f"{path} cannot be read as an image: ")
    assert "\n" not in str(error.value)


def test_evaluation_takes_the_centre() -> None:
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(60), np.arange(40)[:, None]
    whole = np.asarray(Reader(32, 40).centre(Image.fromarray(pixels)))
    assert np.array_equal(whole, pixels[4:36, 14:46])
    halved = Reader(16, 20).centre(Image.fromarray(pixels))
    expected = Image.fromarray(pixels).resize((30, 20), Image.Resampling.BILINEAR).crop((7, 2, 23, 18))
    assert np.array_equal(np.asarray(halved), np.asarray(expected))


def test_random_boxes_have_the_areas_and_shapes_asked_for() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(400, 300, rng) for _ in range(4000)])
    left, top, right, bottom = boxes.T
    assert left.min() == 0
    assert top.min() == 0
    assert right.max() == 400
    assert bottom.max() == 300
    width, height = right - left, bottom - top
    share = width * height / (400 * 300)
    assert share.min() > 0.075
    assert (width / height).min() > 0.74
    assert (width / height).max() < 1.36
    # A place is uniform between the walls: (left - 0) / room has mean 1/2, within four standard errors.
    room = 400 - width
    places = left[room > 50] / room[room > 50]
    assert abs(places.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(places))
    # Of small crops, which always fit, the area is uniform.
    small = share[share < 0.4]
    assert abs(small.mean() - 0.24) < 4 * (0.4 - 0.08) / math.sqrt(12 * len(small))


@pytest.mark.parametrize(("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))])
def test_images_too_long_for_any_box_give_their_middle(size: tuple[int, int], box: tuple[int, ...]) -> None:
    # The smallest area, 8 % of 10,000, is at least 24 pixels high and wide: no crop of an allowed shape fits.
    assert {random_box(*size, np.random.default_rng(seed)) for seed in range(20)} == {box}


def test_folder_images_are_mirrored_half_of_the_time() -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = 200
    image = Image.fromarray(pixels)
    reader = Reader(8, 8)
    crops = [np.asarray(reader.augmented(image, np.random.default_rng(seed)), int)[..., 0] for seed in range(1000)]
    steps = [crop[:, -1].mean() - crop[:, 0].mean() for crop in crops]
    seen = [step for step in steps if step]
    assert abs(np.mean(np.sign(seen))) < 4 / math.sqrt(len(seen))
    assert all(np.ptp(crop, axis=0).max() == 0 for crop in crops), "upright edges stay upright"


def test_folder_images_are_turned_by_up_to_15_degrees() -> None:
    image, reader = Image.new("RGB", (64, 64), "white"), Reader(64, 64, rotation=15.0)
    turned = [np.asarray(reader.augmented(image, np.random.default_rng(seed))) for seed in range(500)]
    black = np.array([(each == 0).mean() for each in turned])
    # A square turned by an angle covers 2 / (1 + sin + cos) of its old place.
    angles = np.radians(np.linspace(0, 15, 1001))
    bare = 1 - 2 / (1 + np.sin(angles) + np.cos(angles))
    assert bare.max() - 0.005 < black.max() < bare.max() + 0.005
    assert abs(black.mean() - bare.mean()) < 4 * bare.std() / math.sqrt(len(black))


# What every task promises.


@pytest.fixture(params=["digits", "fashion", "cifar10", "imagenet"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_cifar: None):
    """The task of that name on small data."""
    if name == "fashion":
        write_fashion(tmp_path / "data" / name, False, monkeypatch)
    elif name == "cifar10":
        write_binary(tmp_path / "data" / name)
    elif name == "imagenet":
        write_folder(tmp_path / "data" / name)
    options = {"image_size": 16, "workers": 0} if name == "imagenet" else {}
    return lambda hold_out=False: tasks.load(name, hold_out=hold_out, **options)


def equal(one: tasks.Batch, other: tasks.Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def take(task: tasks.Task, count: int, start: int = 0, seed: int = 7, size: int = 8, **ranks: int) -> list[tasks.Batch]:
    return list(islice(task.stream(size, seed, start, CPU, **ranks), count))


def test_a_batch_is_a_function_of_seed_and_step(load) -> None:
    task = load()
    an_epoch = task.examples() // 8
    state = torch.get_rng_state()
    whole = take(task, 2 * an_epoch + 2)
    for start in (1, an_epoch - 1, an_epoch, 2 * an_epoch):
        later = take(load(), 2, start=start)
        assert all(map(equal, later, whole[start:]))
    assert not equal(whole[0], whole[an_epoch]), "epochs differ"
    assert not equal(whole[0], take(task, 1, seed=8)[0]), "seeds differ"
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    assert all(task.units(batch) == 8 for batch in whole)


def test_ranks_share_a_batch(load) -> None:
    task = load()
    for step, batch in enumerate(take(task, 4)):
        shares = [take(task, 1, start=step, rank=rank, world=4)[0] for rank in range(4)]
        assert all(task.units(share) == 2 for share in shares)
        assert equal(batch, tuple(torch.cat(parts) for parts in zip(*shares, strict=True)))


def test_batch_sizes_that_cannot_be_are_refused_at_once(load) -> None:
    task = load()
    with pytest.raises(ValueError, match=rf"between 1 and the {task.examples()} training images, but is 2000"):
        task.stream(2000, 0, 0, CPU)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 3 processes, but is 8"):
        task.stream(8, 0, 0, CPU, rank=0, world=3)


def test_unknown_options_are_refused(name: str, load) -> None:
    with pytest.raises(ValueError, match=rf"^{name} takes .*, but was given depth, width$"):
        tasks.load(name, width=3, depth=2)


def test_validation_images_are_kept_from_training(name: str, load) -> None:
    with pytest.raises(ValueError, match=f"^{name} has no validation images unless they are held out"):
        load().evaluate(nn.Flatten(), "validation", CPU)
    whole, kept = load(), load(hold_out=True)
    held = whole.examples() - kept.examples()
    assert held == {"digits": 497, "fashion": 40, "cifar10": 40, "imagenet": 2}[name]
    assert sum(len(labels) for _, labels in kept.batches("validation", CPU)) == held
    if name == "imagenet":
        parts = [kept._train.paths, kept._evaluated["validation"].paths]
        assert sorted(np.concatenate(parts)) == sorted(whole._train.paths)
    else:
        parts = [kept._splits[split].pixels.flatten(1).tolist() for split in ("train", "validation")]
        assert sorted(parts[0] + parts[1]) == sorted(whole._splits["train"].pixels.flatten(1).tolist())
    assert all(map(equal, kept.batches("validation", CPU), load(hold_out=True).batches("validation", CPU)))


class Moody(nn.Module):
    """Ten of the pixels as logits, through modules whose mode matters."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(x.flatten(1)[:, :10]))


def test_evaluation_is_the_mean_over_the_split_and_leaves_modes_alone(name: str, load) -> None:
    task, net = load(hold_out=True), Moody()
    net.drop.eval()
    for split in ("validation", "test"):
        found = task.evaluate(net, split, CPU)
        assert found == task.evaluate(net, split, CPU)
        assert (net.training, net.drop.training, net.norm.training) == (True, False, True)
        net.eval()
        pixels, labels = (torch.cat(each) for each in zip(*task.batches(split, CPU), strict=True))
        logits = task.logits(net, pixels)
        net.train()
        net.drop.eval()
        losses = logits.double().logsumexp(1) - logits.double().gather(1, labels[:, None])[:, 0]
        assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
        assert found["accuracy"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())
        assert set(found) == {"loss", "accuracy"}
    assert task.metric.name in found
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.count_nonzero() == 0, "evaluation teaches the network nothing"


def test_loss_flows_through_the_tasks_own_network(load) -> None:
    task = load()
    torch.manual_seed(0)
    net = task.model()
    batch = take(task, 1)[0]
    loss = task.loss(net, batch)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(net, batch).item() == pytest.approx(loss.item(), rel=0.05)
        assert task.sampled_loss(net, batch).isfinite().all()


def test_pixels_are_normalised_inside_the_loss(name: str, load) -> None:
    task = load()
    pixels = take(task, 1)[0][0]
    seen = task.logits(nn.Identity(), pixels)
    mean, std = {
        "digits": ([0.0], [1 / 255]),
        "fashion": ([0.2860], [0.3530]),
        "cifar10": _cifar10.NORMAL,
        "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    }[name]
    for channel, (m, s) in enumerate(zip(mean, std, strict=True)):
        part = slice(None) if name == "digits" else channel
        expected = (pixels[:, part].double() / 255 - m) / s
        torch.testing.assert_close(seen[:, part].double(), expected, atol=1e-5, rtol=1e-5)
    assert seen.dtype == torch.float32


# Augmentation.


def test_folder_images_are_augmented_anew_in_every_epoch(tmp_path: Path) -> None:
    task = imagenet.load(write_folder(tmp_path / "it"), image_size=16, workers=0)
    batches = take(task, 6)
    first, second = (
        {image.numpy().tobytes() for pixels, _ in part for image in pixels} for part in (batches[:3], batches[3:])
    )
    assert len(first) == len(second) == task.examples()
    assert not first & second


def test_augmented_images_are_crops_of_the_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, pad, count = torch.from_numpy(PIXELS[:3]), 4, 6000
    order = np.arange(count) % 3
    moved = _images.augment(pixels, order, np.random.default_rng(0), pad, flip=True)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    frames = nn.functional.pad(pixels, (pad,) * 4)
    # Every crop there can be, by its bytes: an image of random pixels is known by them.
    known = {}
    for image, frame in enumerate(frames):
        for y in range(9):
            for x in range(9):
                crop = frame[:, y : y + 32, x : x + 32]
                known[crop.numpy().tobytes()] = (image, y, x, 0)
                known[crop.flip(2).numpy().tobytes()] = (image, y, x, 1)
    found = np.array([known[image.contiguous().numpy().tobytes()] for image in moved])
    assert np.array_equal(found[:, 0], order)
    assert abs(found[:, 3].mean() - 0.5) < 4 * math.sqrt(0.25 / count)
    cells = np.bincount(found[:, 1] * 9 + found[:, 2], minlength=81)
    chi2 = ((cells - count / 81) ** 2 / (count / 81)).sum()
    assert chi2 < 80 + 4 * math.sqrt(2 * 80), "all 81 places are equally likely"

    monkeypatch.setattr(_images, "CHUNK", 1000)
    assert torch.equal(moved, _images.augment(pixels, order, np.random.default_rng(0), pad, flip=True))


def test_augmentation_without_flip_or_pad() -> None:
    pixels = torch.from_numpy(PIXELS[:50])
    order = np.random.default_rng(0).permutation(50)
    assert torch.equal(_images.augment(pixels, order, np.random.default_rng(1), 0, flip=False), pixels[order])
    mirrored = _images.augment(pixels, order, np.random.default_rng(1), 0, flip=True)
    kinds = [torch.equal(a, b) + 2 * torch.equal(a, b.flip(2)) for a, b in zip(mirrored, pixels[order], strict=True)]
    assert set(kinds) == {1, 2}


def test_an_epoch_holds_every_image_once_with_its_own_label(load, name: str) -> None:
    task = load(hold_out=True)
    if name == "imagenet":
        labels = torch.cat([labels for _, labels in take(task, 11, size=2)])
        assert sorted(labels.tolist()) == sorted(task._train.labels.tolist())
        return
    train = task._splits["train"]
    images = task.epoch(3, 0, CPU)
    assert sorted(images.labels.tolist()) == sorted(train.labels.tolist())
    if name == "digits":
        both = [[*row, label] for row, label in zip(images.pixels.tolist(), images.labels.tolist(), strict=True)]
        want = [[*row, label] for row, label in zip(train.pixels.tolist(), train.labels.tolist(), strict=True)]
        assert sorted(both) == sorted(want)
        return
    # The middle of an image stays inside whatever crop is taken: its pixels name it.
    middles = {}
    for pixels, label in zip(train.pixels, train.labels.tolist(), strict=True):
        middles[tuple(pixels[0, 14, 12:18].tolist())] = label
        middles[tuple(pixels[0, 14, 12:18].flip(0).tolist())] = label
    for pixels, label in zip(images.pixels, images.labels.tolist(), strict=True):
        windows = pixels[0].unfold(1, 6, 1).reshape(-1, 6).tolist()
        assert label in {middles.get(tuple(window)) for window in windows}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sees_the_same_epoch(tmp_path: Path, small_cifar: None) -> None:
    write_binary(tmp_path / "it")
    task = cifar10.load(tmp_path / "it")
    on_gpu = task.epoch(0, 0, torch.device("cuda"))
    assert equal(tuple(each.cpu() for each in on_gpu), task.epoch(0, 0, CPU))


# Losses, recipes, models.


class Fixed(nn.Module):
    """The same logits for every image."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_sampled_labels_follow_the_networks_distribution() -> None:
    task = digits.load()
    p = torch.tensor([0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.006, 0.004])
    net, batch = Fixed(p.log()), (torch.zeros(40_000, 64), torch.zeros(40_000, dtype=torch.int64))
    torch.manual_seed(0)
    loss = task.sampled_loss(net, batch).mean()
    # Its mean is the entropy -sum p ln p; a label's surprise has variance sum p ln^2 p - entropy^2.
    entropy = -(p * p.log()).sum().item()
    variance = (p * p.log() ** 2).sum().item() - entropy**2
    assert abs(loss.item() - entropy) < 4 * math.sqrt(variance / 40_000)
    # The gradient by the logits is p minus the frequencies drawn.
    loss.backward()
    assert net.logits.grad is not None
    assert (net.logits.grad.abs() < 4 * (p * (1 - p) / 40_000).sqrt()).all()
    assert net.logits.grad.count_nonzero() == 10


def test_loss_is_cross_entropy() -> None:
    task = digits.load()
    batch = next(task.stream(100, 0, 0, CPU))
    assert task.loss(Fixed(torch.zeros(10)), batch).item() == pytest.approx(math.log(10), rel=1e-6)


def test_digits_are_learnt() -> None:
    task = tasks.load("digits", hold_out=True)
    torch.manual_seed(0)
    net = task.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for batch in islice(task.stream(100, 0, 0, CPU), 120):
        optimizer.zero_grad()
        task.loss(net, batch).backward()
        optimizer.step()
    assert task.evaluate(net, "validation", CPU)["accuracy"] > 90
    assert task.evaluate(net, "test", CPU)["accuracy"] == pytest.approx(
        100 * digits.accuracy(net, digits.data().test), abs=1e-4
    )
    assert task.examples() == digits.N_TRAIN
    assert tasks.load("digits").examples() == digits.N_TRAIN + digits.N_VALIDATION


def test_options_choose_model_and_recipe(tmp_path: Path, small_cifar: None) -> None:
    write_binary(tmp_path / "data" / "cifar10")
    write_folder(tmp_path / "data" / "imagenet")
    assert tasks.load("cifar10").recipe.epochs == 200
    vit = tasks.load("cifar10", model="vit")
    assert vit.recipe.decay_all is False
    assert type(vit.model()).__name__ == "ViT"
    with pytest.raises(ValueError, match="model must be one of resnet20, vit, but is 'resnet21'"):
        tasks.load("cifar10", model="resnet21")

    first = tasks.load("imagenet")
    assert (first.recipe.epochs, first.recipe.weight_decay, first.recipe.warmup) == (90, 1e-4, 0)
    assert first.recipe.milestones == (1 / 3, 2 / 3)
    other = tasks.load("imagenet", model="resnet50")
    assert (other.recipe.epochs, other.recipe.weight_decay, other.recipe.warmup) == (90, 5e-4, 1 / 90)
    assert tasks.load("imagenet", recipe="lookaround").recipe == other.recipe
    assert first.model().state_dict()["fc.weight"].shape == (3, 512)
    with pytest.raises(ValueError, match="recipe must be one of adabelief, lookaround, but is 'mine'"):
        tasks.load("imagenet", recipe="mine")
    with pytest.raises(ValueError, match="image_size must lie between 1 and resize, 32, but is 64"):
        tasks.load("imagenet", image_size=64, resize=32)


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "it")
    alone, helped = (imagenet.load(root, image_size=16, recipe="lookaround", workers=n) for n in (0, 2))
    assert all(map(equal, take(alone, 5), take(helped, 5)))
    assert all(map(equal, alone.batches("test", CPU), helped.batches("test", CPU)))
