"""The colours of every picture: viridis for gamma, one fixed colour and dash for each baseline."""

# For each name its colour on a light and on a dark page. They stay apart from viridis and from each other for every
# kind of colour vision (after Okabe and Ito), and the dashes tell them apart without any.
COLOUR = {
    "SGDM": ("#d55e00", "#ff9248"),
    "AdamW": ("#b5287b", "#ff86cb"),
    "SGD": ("#8c510a", "#dfa76b"),
    "Adam": ("#000000", "#ffffff"),
    "AMSGrad": ("#7a7a7a", "#b0b0b0"),
    "AdaBelief": ("#e69f00", "#ffc658"),
    "RAdam": ("#a50026", "#ff7a85"),
    "Yogi": ("#e0708a", "#f7a8bb"),
    "AdaHessian": ("#5a3a22", "#c9a98c"),
    "AdaBound": ("#a89078", "#d8c7b4"),
    "AdaMomentum": ("#999933", "#d4d46a"),
}
DASH = {
    "SGDM": "dash",
    "AdamW": "dot",
    "SGD": "longdash",
    "Adam": "solid",
    "AMSGrad": "dashdot",
    "AdaBelief": "dash",
    "RAdam": "dashdot",
    "Yogi": "dot",
    "AdaHessian": "longdash",
    "AdaBound": "dashdot",
    "AdaMomentum": "longdash",
}


def viridis(gamma: float, dark: bool = False) -> float:
    """Where gamma, from -0.75 to 1.75, lies in viridis without the end that would drown in the background."""
    place = min(max((gamma + 0.75) / 2.5, 0.0), 1.0)
    return 0.25 + 0.75 * place if dark else 0.85 * place
