"""The tables as a picture: bars against the limit of the machine. Needs matplotlib."""

from table import NIXL

ENDINGS = (".png", ".svg")
COLOURS = {  # Told apart by those who see few colours, too.
    "kvferry": "#0072B2",
    "push": "#F0E442",
    "also": "#56B4E9",
    "NIXL": "#E69F00",
    "ZeroMQ": "#009E73",
    "Mooncake": "#CC79A7",
}
LIMIT_COLOUR = "#DDDDDD"
WHISKERS = {"elinewidth": 0.8, "ecolor": "#444444", "zorder": 4}
GROUP_WIDTH = 0.84  # Of the distance between two groups of bars.


def import_matplotlib():
    """ImportError says what is missing. Never opens a window."""
    import matplotlib

    matplotlib.use("agg")
    return matplotlib


def series(rows):
    """{name: its fastest operation in each row, None where it was not measured} of one part."""
    ours = {name: (name,) for name in ("kvferry", "push", "also")}
    systems = {**ours, "NIXL": NIXL, **rows[0].part.peers}
    found = {name: [row.fastest(names) for row in rows] for name, names in systems.items()}
    return {name: fastest for name, fastest in found.items() if any(fastest)}


def heights_and_whiskers(rows, fastest):
    """Of these operations the medians, and how far below and above them the runs went."""
    heights, below, above = [], [], []
    for row, name in zip(rows, fastest, strict=True):
        rate = row.rate(name) or 0
        low, high = row.spread(name) or (0, 0)
        heights.append(rate)
        below.append(rate - low)
        above.append(high - rate)
    return heights, [below, above]


def draw_bars(axes, rows):
    bars = series(rows)
    width = GROUP_WIDTH / max(1, len(bars))
    for index, (name, fastest) in enumerate(bars.items()):
        places = [i - GROUP_WIDTH / 2 + (index + 0.5) * width for i in range(len(rows))]
        heights, whiskers = heights_and_whiskers(rows, fastest)
        look = {"color": COLOURS[name], "error_kw": WHISKERS, "zorder": 3}
        drawn = axes.bar(places, heights, width, yerr=whiskers, label=name, **look)
        texts = [f"{height:.1f}" if height else "" for height in heights]
        axes.bar_label(drawn, texts, fontsize=6, padding=1, zorder=4)


def draw_limits(axes, rows):
    limits = [row.best_rate(row.part.limits) for row in rows]
    if not any(limits):
        return
    label = f"limit: fastest of {', '.join(rows[0].part.limits)}"
    heights = [limit or 0 for limit in limits]
    drawn = axes.bar(range(len(rows)), heights, 0.96, color=LIMIT_COLOUR, label=label, zorder=2)
    texts = [f"{limit:.1f}" if limit else "" for limit in limits]
    axes.bar_label(drawn, texts, fontsize=6, padding=1, color="#777777")


def draw_panel(axes, rows):
    draw_limits(axes, rows)
    draw_bars(axes, rows)
    names = [f"{row.shape_name}\n{row.fragmentation}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylabel("GB/s")
    axes.set_title(rows[0].part.title, fontsize=10, loc="left")
    axes.grid(axis="y", color="#EEEEEE", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=6, loc="lower right", bbox_to_anchor=(1, 1))


def write_picture(path, title, rows):
    """Writes path.png and path.svg: a panel for each part that has rows."""
    import_matplotlib()
    from matplotlib import pyplot

    parts = list({row.part.name: row.part for row in rows}.values())
    width = max(8.5, 2 + 0.85 * max(sum(row.part is part for row in rows) for part in parts))
    size = (width, 0.6 + 3.2 * len(parts))
    figure, panels = pyplot.subplots(len(parts), figsize=size, squeeze=False, layout="constrained")
    for part, axes in zip(parts, panels[:, 0], strict=True):
        draw_panel(axes, [row for row in rows if row.part is part])
    figure.suptitle(title, fontsize=8, x=0.01, ha="left")
    for ending in ENDINGS:
        figure.savefig(path.with_suffix(ending), dpi=160)
    pyplot.close(figure)
