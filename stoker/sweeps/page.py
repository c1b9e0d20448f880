"""The page of a sweep: its table, and a picture of all its jobs."""

import itertools
import math
from collections import Counter
from urllib.parse import quote

from markupsafe import Markup

from stoker.runs.page import render, safe
from stoker.trainer.readable import number

# Of the picture, in pixels: above and below the axes, their height, and the room for the letters of a value.
TOP, HEIGHT, BOTTOM, LETTER, LINE = 56, 320, 44, 7, 16
MOST_LETTERS = 24  # of a name in the picture; the whole of it is in its tooltip
MOST_AXES = 30
MOST_SPREAD = 12  # pixels between the lines of jobs with the same value and its place
ROOM = HEIGHT - 2 * MOST_SPREAD  # for the places
FAR = 10  # a number that is so many times another one wants a logarithmic scale


def of_sweep(sweep, counts, best, again, report=None):
    """The page of a stoker.sweeps.table.Sweep, with its `counts` in words, the commands of the best job and to go on, and
    the path of the best job's `report`."""
    ranked = sweep.name and sweep.compares
    better = (
        f", best first by {sweep.name} ({'higher' if sweep.high else 'lower'} is better)"
        if ranked
        else ""
    )
    return render(
        "sweep.html",
        swept=sweep.swept,
        title=f"{'Sweep' if sweep.swept else 'Runs in'} {sweep.folder.name}",
        about=f"{len(sweep.jobs)} {'jobs' if sweep.swept else 'runs'}: {counts}{better}",
        best=best,
        again=again,
        report=report,
        picture=picture(sweep) if sweep.compares else "",
        groups=of_groups(sweep),
        jobs=of_jobs(sweep),
    )


def of_groups(sweep):
    """The table of the jobs that are done, those that differ only in their seed in one row.

    Runs that are no sweep's may have little in common: their settings are one column. What decides stands first, where
    a phone has room.
    """
    from stoker.sweeps.jobs import typed_for
    from stoker.sweeps.table import groups, tests_of

    grouped = any(len(group) > 1 for group in sweep.groups)
    keys = [key for key in sweep.keys if not grouped or key != "seed"]
    tests, decides = tests_of(sweep), [sweep.name] * bool(sweep.name)
    rows = []
    for (names, count, value, *others), group in zip(
        groups(sweep, tests, "±"), sweep.groups, strict=True
    ):
        first = [*[value] * bool(sweep.name), *[count] * grouped]
        if sweep.swept:
            rows.append([*first, *(group[0].settings.get(key, "") for key in keys), *others, names])
        else:
            rows.append([names, *first, " ".join(typed_for(group[0], keys)), *others])
    header = [
        *decides,
        *["n"] * grouped,
        *(keys if sweep.swept else ["settings"]),
        *tests,
        "seconds",
    ]
    header = [*header, "jobs"] if sweep.swept else ["runs", *header]
    best = bool(sweep.name) and sweep.compares
    return {
        "header": header,
        "rows": rows,
        "numbers": [*decides, *tests, "seconds", "n"],
        "best": best,
    }


def of_jobs(sweep):
    """The table of all jobs, in their order; with a column of notes where there is one."""
    from stoker.sweeps.jobs import typed_for
    from stoker.sweeps.table import tests_of

    first, keys = ("job", sweep.keys) if sweep.swept else ("run", ["settings"])
    tests, rows, noted = tests_of(sweep), [], any(job.note for job in sweep.jobs)
    numbers = [sweep.name or "best", *tests, "seconds"]
    for job in sweep.jobs:
        best = "" if not job.best else number(job.best.value)
        other = job.best.name if job.best and sweep.value(job) is None else ""
        tested = [number(job.test[name]) if name in job.test else "" for name in tests]
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        settings = (
            [job.settings.get(key, "") for key in keys]
            if sweep.swept
            else [" ".join(typed_for(job, sweep.keys))]
        )
        note = [" ".join(job.note.split())] * noted
        rows.append(
            [
                linked(sweep, job),
                job.status,
                f"{other} {best}".strip(),
                *settings,
                *tested,
                seconds,
                *note,
            ]
        )
    header = [first, "status", numbers[0], *keys, *numbers[1:], *["note"] * noted]
    return {"header": header, "rows": rows, "numbers": numbers}


def linked(sweep, job):
    """The job's name, as a link to its report where there is one."""
    from stoker.runs.report import NAME

    place = sweep.folder / job.name
    if place.is_symlink() or not (place / NAME).is_file():  # a link may lead anywhere
        return job.name
    return Markup(f'<a href="{quote(job.name)}/{NAME}">{safe(job.name)}</a>')


def picture(sweep):
    """Parallel coordinates: an axis for each key and for the result, and a line for each job; '' where nothing differs.

    The colour is the rank among the jobs that are done, since one result far away would leave one colour for all else.
    """
    done = sorted(
        (job for job in sweep.of("done") if sweep.value(job) is not None), key=sweep.value
    )
    done = done if sweep.high else done[::-1]
    failed, pruned = sweep.of("failed"), sweep.of("pruned")
    keys = sweep.keys[:MOST_AXES]
    if not keys or not done + failed + pruned:
        return ""
    values = {job.name: sweep.value(job) for job in done}
    jobs = failed + pruned + done  # the best is drawn last
    axes = [axis([typed(job, key) for job in sweep.jobs]) for key in keys]
    places = [
        spread([y_of(scale(typed(job, key))) for job in jobs])
        for key, (scale, _) in zip(keys, axes, strict=True)
    ]
    result = number_axis([sweep.value(job) for job in done]) if done else (None, [])
    names = [*keys, sweep.name or "result"]
    step = max(
        130,
        min(260, 1000 // len(names)),
        *(LETTER * min(len(name), MOST_LETTERS) + 20 for name in names),
    )
    left = 20 + LETTER * min(len(names[0]), MOST_LETTERS) // 2
    width = left + step * len(keys) + max(90, LETTER * min(len(names[-1]), MOST_LETTERS) // 2 + 20)
    x = [left + step * i for i in range(len(names))]
    lines = []
    for i, job in enumerate(jobs):
        points = [(x[a], places[a][i]) for a in range(len(keys))]
        if job.name in values:
            height = result[0](values[job.name])
            points.append((x[-1], y_of(height if sweep.high else 1 - height)))
            better_than = (i - len(failed + pruned)) / (len(done) - 1) if len(done) > 1 else 1
            drawn = f'class="job{" best" * (i == len(jobs) - 1)}" style="--rank:{100 * better_than**2:.0f}"'
            what = f"{sweep.name} {number(values[job.name])}"
        else:
            points.append((x[-1], TOP + HEIGHT + (26 if job.status == "failed" else 12)))
            drawn, what = f'class="job {job.status}"', job.status
        shown = " ".join(f"{key}={job.settings[key]}" for key in sweep.keys if key in job.settings)
        title = f"<title>{safe(f'job {job.name}: {what}, {shown}')}</title>"
        lines.append(f'<path {drawn} d="{curve(points)}">{title}</path>')
    ticks = [shown for _, shown in axes]
    ticks.append([(height if sweep.high else 1 - height, text) for height, text in result[1]])
    lines += [part for i, name in enumerate(names) for part in drawn_axis(x[i], name, ticks[i])]
    if pruned:
        lines.append(f'<text class="cut" x="{x[-1] + 8}" y="{TOP + HEIGHT + 17}">pruned</text>')
    if failed:
        lines.append(f'<text class="cross" x="{x[-1] + 8}" y="{TOP + HEIGHT + 30}">✕ failed</text>')
    size = f'width="{width}" height="{TOP + HEIGHT + BOTTOM}"' + ' class="many"' * (len(jobs) > 60)
    more = (
        f" Of {len(sweep.keys)} keys the first {MOST_AXES} are drawn."
        if len(sweep.keys) > MOST_AXES
        else ""
    )
    what = f"A line for each {'job' if sweep.swept else 'run'}, through its settings to its {sweep.name or 'result'}"
    label = f"{what}: the stronger its colour, the better.{more}"
    return Markup(
        '<div class="wide">\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{safe(label)}">\n'
        + "\n".join(lines)
        + f'\n</svg>\n</div>\n<p class="soft">{safe(label)}</p>'
    )


def typed(job, key):
    return job.settings.get(key, "(default)")


def y_of(height):
    """The place on an axis of a height from 0, its foot, to 1: within its ends, as lines at one place lie around it."""
    return TOP + MOST_SPREAD + ROOM * (1 - height)


def curve(points):
    """An SVG path from axis to axis, which leaves each of them at a right angle."""
    parts = [f"M{points[0][0]:.0f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (x0 + x1) / 2
        parts.append(f"C{middle:.0f} {y0:.1f} {middle:.0f} {y1:.1f} {x1:.0f} {y1:.1f}")
    return "".join(parts)


def drawn_axis(x, name, ticks):
    """The SVG of an axis: its line, its name above it, and the ticks that have room."""
    short = name if len(name) <= MOST_LETTERS else f"{name[:9]}…{name[10 - MOST_LETTERS :]}"
    yield f'<line class="axis" x1="{x}" y1="{TOP}" x2="{x}" y2="{TOP + HEIGHT}"/>'
    yield (
        f'<text class="key" x="{x}" y="{TOP - 28}" text-anchor="middle">{safe(short)}<title>{safe(name)}</title></text>'
    )
    last = None
    for height, text in sorted(ticks):
        if last is None or (height - last) * ROOM >= LINE:
            short = safe(text if len(text) <= 18 else f"{text[:17]}…")
            place = f'x="{x + 7}" y="{y_of(height) + 4:.1f}"'
            yield f'<text class="tick" {place}>{short}<title>{safe(text)}</title></text>'
            last = height


def axis(values):
    """(a function from a value to its height, [(height, text)] of the ticks) for the values of a key, as typed.

    Numbers have their places on a linear or a logarithmic scale, all else the order in which it comes.
    """
    numbers = [as_number(value) for value in values]
    if None not in numbers:
        scale, ticks = number_axis(numbers, {as_number(value): value for value in values})
        return (lambda value: scale(as_number(value))), ticks
    names = list(dict.fromkeys(values))
    heights = {name: 1 - (i + 0.5) / len(names) for i, name in enumerate(names)}
    return heights.get, [(height, name) for name, height in heights.items()]


def spread(places):
    """The places of the jobs on an axis, in their order: those at the same place a little apart, later ones higher."""
    same = Counter(places)
    distinct = sorted(same)
    gap = min((b - a for a, b in itertools.pairwise(distinct)), default=ROOM)
    most, before, apart = min(MOST_SPREAD, 0.3 * gap), Counter(), []
    for place in places:
        apart.append(
            place + most * (1 - 2 * before[place] / (same[place] - 1)) if same[place] > 1 else place
        )
        before[place] += 1
    return apart


def as_number(text):
    """The number that was typed, None for what is none, or one that has no place on an axis."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e100 else None


def number_axis(values, texts=None):
    """(a function from a number to its height, the ticks) from the least of the values, at 0, to the most, at 1."""
    least, most = min(values), max(values)
    logarithmic = least > 0 and most / least >= FAR
    put = math.log if logarithmic else float
    low, high = put(least), put(most)

    def scale(value):
        return (put(value) - low) / (high - low) if high > low else 0.5

    distinct = sorted(set(values))
    if (
        texts is None or len(distinct) > 12
    ):  # round ones between the ends would say less than the ends themselves
        between = [low + (high - low) * i / 4 for i in range(1, 4)]
        between = [math.exp(value) if logarithmic else value for value in between]
        distinct = sorted({least, most, *(between if high > low else ())})
    shown = {value: text for value, text in (texts or {}).items() if len(text) <= 8}
    return scale, [(scale(value), shown.get(value) or f"{value:.4g}") for value in distinct]
