"""ResNet-18 on ImageNet: top-1 accuracy of Anon at four gammas, SGDM, AMSGradW and AdaBelief."""

from anon_lab.tables._spec import Outcome, Row, Sheet, Size, Table
from anon_lab.tables._words import as_list, by_lr, judged, over_seeds

ANON = "Anon γ −0.1"
SIZES = {
    "full": Size(
        runs="resnet18",
        task="imagenet",
        says="ResNet-18 on ImageNet, 90 epochs, batches of 256, lr divided by 10 after 30 and 60 epochs.",
        options={"model": "resnet18"},
        evaluations=18,
    ),
    "small": Size(
        runs="resnet18",
        task="imagenet",
        says="ResNet-18 on the given folder of images at 64 x 64 pixels, 5 epochs, batches of 256, lr divided by 10 "
        "after a third and two thirds.",
        options={"model": "resnet18", "image_size": 64, "resize": 64, "partial": True},
        recipe={"epochs": 5},
    ),
    "tiny": Size(
        runs="resnet18",
        task="imagenet",
        says="ResNet-18 on the given folder of images at 16 x 16 pixels, 2 steps of 4 images.",
        options={"model": "resnet18", "image_size": 16, "resize": 16, "partial": True, "workers": 0},
        recipe={"steps": 2, "batch_size": 4},
        seeds=1,
        evaluations=1,
    ),
}


def rows(size: str) -> list[Row]:
    # The recipe's decay, 1e-4, is SGD's, and Anon's as it is coupled; AdaBelief's numbers are its authors'. The paper
    # does not say which decay AMSGradW has: here AdaBelief's.
    coupled = {"decoupled_weight_decay": False}
    return [
        Row(ANON, lrs=(1.0,), hyper={"gamma": -0.1, **coupled}, printed=(70.06,)),
        Row("Anon γ −0.05", lrs=(1.0,), hyper={"gamma": -0.05, **coupled}),
        Row("Anon γ 0", lrs=(1.0,), hyper={"gamma": 0.0, **coupled}),
        Row("Anon γ 0.05", lrs=(1.0,), hyper={"gamma": 0.05, **coupled}),
        Row("SGDM", "SGDM", (0.1,), printed=(69.94,)),
        Row("AMSGradW", "AMSGradW", (0.1, 0.01, 0.001), hyper={"weight_decay": 1e-2}, printed=(68.78,)),
        Row(
            "AdaBelief",
            "AdaBelief",
            (1e-3,),
            hyper={"weight_decay": 1e-2, "eps": 1e-8},
            recipe={"milestones": (70 / 90, 80 / 90)},
            printed=(69.42,),
        ),
        # The paper has these from elsewhere.
        Row("AdaBound", printed=(68.13,)),
        Row("MSVAG", printed=(68.23,)),
        Row("RAdam", printed=(67.62,)),
        Row("Yogi", printed=(66.54,)),
        Row("Adam", printed=(65.99,)),
    ]


def sheets(outcome: Outcome) -> list[Sheet]:
    return [as_list(over_seeds("top-1 accuracy", outcome), outcome), *by_lr("every learning rate", outcome)]


def remarks(outcome: Outcome) -> list[str]:
    gammas = [row.name for row in outcome.rows if row.name.startswith("Anon")]
    done = [trial for name in gammas if (trial := outcome.best(name))]
    best = max(done, key=lambda trial: sum(trial.values) / len(trial.values), default=None)
    amsgrad = outcome.best("AMSGradW")
    return [
        judged(outcome, ANON, "SGDM"),
        judged(outcome, ANON, "AdaBelief"),
        judged(outcome, ANON, "AMSGradW"),
        "In the paper γ −0.1 is the best of four; here "
        + (f"it is {best.row.name.removeprefix('Anon ')} by its mean." if best else "all diverged."),
        "In the paper 0.01 is AMSGradW's best lr of three; here "
        + (f"it is {amsgrad.lr:g}." if amsgrad else "all diverged."),
        "AdaBound, MSVAG, RAdam, Yogi and Adam are other authors' numbers in the paper too, and are not trained here.",
    ]


TABLE = Table("ResNet-18 on ImageNet", SIZES, rows, sheets, remarks)
