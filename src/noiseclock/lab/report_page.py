"""The page of a report: one HTML file that needs no network.

Names, settings and paths come from files that anyone may have written. All of them reach the page through `escape`, or as JSON that cannot end its
script element, and the page's Content-Security-Policy allows only the two scripts whose hashes it names.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs

from noiseclock.lab import statistics
from noiseclock.lab.ended_early import Early, ended_early
from noiseclock.lab.report_charts import COLOURS, charts
from noiseclock.lab.report_markdown import capital, command, facts, heading, many, shown
from noiseclock.lab.results import Results
from noiseclock.lab.statistics import BETTER, SAME, WORSE, Difference, Table

STEPS_OF_SAMPLES = 6  # sample grids of a method that the slider offers
MOST_BYTES = 20_000_000  # of all grids together


def page(results: Results) -> str:
    """The report as HTML."""
    data, problems = charts(results), [*results.problems]
    grids = _grids(results, problems)
    script, plotly = _asset("report.js"), get_plotlyjs()
    sections = [
        _answers(results, data), _ended_early(results, data), _qualities(data), _learning_rates(results, data), _sweeps(data),
        _samples(grids, data), _losses(data), _utilities(data), _densities(data), _overheads(data), _repeat(results), _problems(problems),
    ]  # fmt: skip
    first, _, rest = statistics.answer(results).partition(". ")
    hashes = " ".join(f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in (plotly, script))
    return Template(_asset("report.html")).substitute(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
        generator=f"noiseclock {version('noiseclock')}",
        title=escape(f"{results.recipe}: {many(len(results.methods), 'method')} compared"),
        palette=_palette(),
        style=_asset("report.css"),
        eyebrow="Noiseclock comparison",
        heading=escape(heading(results)),
        answer=_unbroken(escape(first.removesuffix(".") + ".")),
        more=f'<details class="more"><summary>All methods in words</summary><p>{_unbroken(escape(rest))}</p></details>' if rest else "",
        facts=" · ".join(escape(fact) for fact in facts(results)),
        warning=_warning(problems),
        controls=_controls(data),
        sections="\n".join(section for section in sections if section),
        footer=f"Written by noiseclock {escape(version('noiseclock'))} from the result files alone.",
        data=_island({**data, "steps": grids.steps}),
        plotly=plotly,
        script=script,
    )  # fmt: skip


def _warning(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    said = f"{many(len(problems), 'thing')} {'is' if len(problems) == 1 else 'are'} missing or damaged"
    return f'<p class="warning">The results are incomplete: <a href="#problems">{said}</a>. The rest is shown.</p>'


def _controls(data: dict[str, Any]) -> str:
    if not data["metrics"] and not data["methods"]:
        return ""
    options = "".join(f'<option value="{escape(key)}">{escape(metric["name"])}</option>' for key, metric in data["metrics"].items())
    choice = f'<label><span class="sr">Metric</span><select id="metric" aria-label="Metric">{options}</select></label>' if options else ""
    boxes = "".join(f'<label><input type="checkbox" value="{m}" checked>{_name(data, m)}</label>' for m in range(len(data["methods"])))
    return (
        f'<nav class="controls" aria-label="What is shown"><div class="page">{choice}'
        f'<fieldset class="methods"><legend class="sr">Methods shown in all charts</legend>{boxes}</fieldset></div></nav>'
    )


def _answers(results: Results, data: dict[str, Any]) -> str:
    """A table for each metric; the page shows that of the selected metric."""
    tables = [statistics.table(results, metric) for metric in data["metrics"]]
    content = "".join(_for_metric(t.metric, i, _table(t, data, ended_early(results, t)) + _notes(t)) for i, t in enumerate(tables))
    return _section("answer", "The numbers", "", content) if tables else ""


def _ended_early(results: Results, data: dict[str, Any]) -> str:
    tables = [statistics.table(results, metric) for metric in data["metrics"]]
    found = [(t, ended_early(results, t)) for t in tables]
    if not any(early for _, early in found):
        return ""
    content = "".join(_for_metric(t.metric, i, _table_of_early(t, early, results, data)) for i, (t, early) in enumerate(found))
    about = (
        f"Trainings without a value at the last update, at their own last evaluation, beside {results.baseline} at the same update, learning rate "
        "and seeds. Who leads there need not lead in the end."
    )
    return _section("early", "What ended early", about, content)


def _table_of_early(t: Table, found: Sequence[Early], results: Results, data: dict[str, Any]) -> str:
    if not found:
        return '<p class="footnote">None in this metric.</p>'
    several = len({early.lr for early in found} | {results.lr}) > 1
    heads = ["Learning rate"] * several + ["Updates", escape(t.title), f"{escape(t.baseline)} there", f"Difference to {escape(t.baseline)}", "Seeds"]
    head = '<th scope="col">Method</th>' + "".join(f'<th scope="col" class="number">{text}</th>' for text in heads)
    body = ""
    for early in found:
        lr, *rest = early.line
        cells = "".join(map(_number, [lr] * several + rest))
        body += f'<tr><th scope="row">{_name(data, results.methods.index(early.method))}</th>{cells}</tr>'
    return _scrolled(f"{escape(t.title)} of what ended early", head, body)


def _table(t: Table, data: dict[str, Any], elsewhere: Sequence[Early] = ()) -> str:
    """A table as HTML, with each interval drawn as well. elsewhere: methods that are left out unless they have a value here."""
    judged = [row.difference for row in t.rows if row.difference and row.verdict in (BETTER, WORSE, SAME)]
    means = [_ends(row.difference)[0] for row in t.rows if row.difference]
    # all means, but intervals of what was judged: two seeds that could not be may have intervals ten times as wide, and the others would be dots
    widest = max((abs(end) for end in (*means, *(end for d in judged for end in _ends(d)))), default=0.0)
    left_out = {early.method for early in elsewhere}
    direction = "higher" if t.higher_is_better else "lower"
    heads = [
        ("Method", ""), *([("Learning rate", "number")] if t.own_lr else []), (f"{escape(t.title)}<br>{direction}&nbsp;is&nbsp;better", "number"),
        ("Verdict<br>p, corrected", "verdict"), (f"Difference to {escape(t.baseline)}<br>95 % interval", "wide"), ("Speed-up<br>in time", "number"),
        ("Speed-up<br>in images", "number"), ("Time&nbsp;per<br>update", "number"), ("Seeds", "number"),
    ]  # fmt: skip
    head = "".join(f'<th scope="col" class="{kind}"{" colspan=2" if kind == "wide" else ""}>{text}</th>' for text, kind in heads)
    body = ""
    for m, (row, line) in enumerate(zip(t.rows, t.lines, strict=True)):
        if not row.final.n and row.method in left_out:
            continue
        _, lr, final, _, change, p, verdict, images, seconds, _, per_update, seeds = line
        kind = {BETTER: "is-better", WORSE: "is-worse"}.get(row.verdict, "")
        cells = [
            *([_number(lr)] if t.own_lr else []), _number(final),
            f'<td class="verdict"><span class="{kind}">{escape(verdict)}</span>{"" if p == "-" else f" <small>p = {escape(p)}</small>"}</td>',
            _number(change), f'<td class="drawn {kind}">{_drawn(row.difference, widest)}</td>',
            _number(seconds, "×"), _number(images, "×"), _number(per_update, "×"), _number(seeds),
        ]  # fmt: skip
        body += f'<tr><th scope="row">{_name(data, m)}</th>{"".join(cells)}</tr>'
    return _scrolled(escape(t.title), head, body)


def _scrolled(label: str, head: str, body: str) -> str:
    """A table that scrolls sideways on a narrow screen; all arguments are HTML already."""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def _drawn(difference: Difference | None, widest: float) -> str:
    """A difference and its interval on a line through zero."""
    if difference is None or not widest:
        return ""
    mean, *interval = (48 + 44 * max(-1.0, min(1.0, end / widest)) for end in _ends(difference))
    bar = '<line x1="{:.1f}" x2="{:.1f}" y1="9" y2="9" stroke="currentColor" stroke-width="1.5"/>'.format(*interval) if interval else ""
    return (
        '<svg width="96" height="18" aria-hidden="true"><line x1="48" x2="48" y1="-5" y2="23" stroke="currentColor" stroke-opacity="0.35"/>'
        f'{bar}<circle cx="{mean:.1f}" cy="9" r="3.5" fill="currentColor"/></svg>'
    )


def _ends(d: Difference) -> tuple[float, ...]:
    """The mean, and the ends of the interval if there is one."""
    return (d.mean, *(d.interval or ())) if d.relative is None else (d.relative, *(d.relative_interval or ()))


def _notes(t: Table) -> str:
    return f'<p class="footnote">{_unbroken(escape(" ".join(t.notes)))}</p>'


def _qualities(data: dict[str, Any]) -> str:
    if not data["metrics"]:
        return ""
    metrics, base = data["metrics"].values(), _baseline(data)
    seeds = [line["n"] for metric in metrics for line in metric["curves"] if line]
    one = all(n <= 1 for line in seeds for n in line)
    said = ["Each line is one training." if one else "Each line is the mean over seeds, and its band reaches from the lowest seed to the highest."]
    said += ["A line is dotted where only some of its seeds have a value."] if any(0 < n < max(line) for line in seeds for n in line) else []
    if any(metric["target"] is not None for metric in metrics):
        said.append(f"The dotted level is the best value of {base}: a method whose line crosses it has become as good.")
    said.append("Training time counts all that a sampler does, but no evaluations.")
    if any(metric["day"] is not None for metric in metrics):
        said.append(f"Its unit, 1D, is the time that {base} took to its best value.")
    if len({max(line) for line in seeds}) > 1:
        said.append("Methods have different numbers of seeds: the table compares them seed by seed, lines do not.")
    if any(look["early"] for look in data["methods"]):
        said.append("So many lines could not be told apart: methods that ended early are hidden until they are ticked above.")
    about = " ".join(said)
    pair = ""
    for by, what in (("images", "images"), ("seconds", "training time")):
        chart, label = f'data-chart="quality" data-by="{by}"', f"Line chart of quality against {what}, one line for each method"
        pair += _chart(f"{_titles(data)} against {what}", "", chart, label)
    return _section("quality", "Quality through training", about, f'<div class="pair">{pair}</div>')


def _learning_rates(results: Results, data: dict[str, Any]) -> str:
    if not results.tuned or not data["metrics"]:
        return ""
    tables = "".join(
        _for_metric(metric, i, _table(t := statistics.table(results, metric, own_lr=True), data) + _notes(t))
        for i, metric in enumerate(data["metrics"])
    )
    label = "Line chart of final quality against the learning rate"
    chart = _chart(f"{_titles(data)} in the end, against the learning rate", "", 'data-chart="lr"', label)
    about = f"Samplers change the size of a step, so each has its own best learning rate. Everything else on this page is at {results.lr:g}."
    return _section("learning-rate", "At the best learning rate of each", about, f"{tables}{chart}")


def _sweeps(data: dict[str, Any]) -> str:
    if not data["metrics"] or not data["sweeps"]:
        return ""
    content = ""
    for i, sweep in enumerate(data["sweeps"]):
        label, title = escape(sweep["label"]), escape(sweep["title"])
        option = "|S|" if label.startswith("|S|") else escape(sweep["option"])
        ends = {key: metric["sweeps"][i]["step"] for key, metric in data["metrics"].items()}
        when = "".join(_for_metric(key, j, f"after {step:,} updates" if step else "", "span") for j, (key, step) in enumerate(ends.items()))
        about = f"{title}, {when}"
        pair = _chart(f"{_titles(data)} against {option}", about, f'data-chart="sweep" data-index="{i}"', f"Chart of final quality against {label}")
        by = next(metric["sweeps"][i]["by"] for metric in data["metrics"].values())  # the same in all
        what = "images" if by == "images" else "training time"
        chart, drawn = f'data-chart="quality" data-by="{by}" data-index="{i}"', f"Line chart of quality against {what} for {title}"
        pair += _chart(f"{_titles(data)} against {what}", "these methods only, with the seeds that all have", chart, drawn)
        content += f'<div class="pair">{pair}</div>'
    return _section(
        "sweeps",
        "What an option changes",
        "Methods that differ in one option only: their quality at the last update that all of them reached, and through training.",
        content,
    )


def _losses(data: dict[str, Any]) -> str:
    if not data["loss"]:
        return ""
    pair = _chart("Loss by noise level", "logarithmic scale", 'data-chart="loss"', "Line chart of loss against noise level, one line for each method")
    if any(entry and "ratio" in entry for entry in data["loss"]["methods"]):
        chart = 'data-chart="loss" data-ratio="yes"'
        label = "Line chart of loss relative to the baseline, against noise level"
        pair += _chart(f"Relative to {escape(_baseline(data))}", "below 100 % is better", chart, label)
    behind = "" if all(data["loss"]["methods"]) else "; methods that did not get so far are left out"
    about = f"Unweighted loss on held-out images with the same noise for all methods, after {data['loss']['step']:,} updates{behind}."
    return _section("loss", "Where the loss is", about, f'<div class="pair">{pair}</div>')


def _utilities(data: dict[str, Any]) -> str:
    if not data["utility"]:
        return ""
    said = "Line chart of what an update at each noise level alone does for the loss, one line for each method"
    chart = _chart("What one update there would do", "decrease of the loss; above 0 helps, below hurts", 'data-chart="utility"', said)
    about = (
        f"Suppose that the next update, after {data['utility']['step']:,}, used samples of one noise level alone: by how much would it lower the "
        "unweighted loss of all levels together? The estimate is of first order, with the optimiser's own step sizes, on samples that the update has "
        "not seen. It overstates so long a step: trust the sign and the order, not the size."
    )
    return _section("utility", "Which noise levels help", about, chart)


def _densities(data: dict[str, Any]) -> str:
    if not data["density"]:
        return ""
    maps = "".join(
        _chart(_name(data, m), "", f'data-chart="density" data-method="{m}"', f"Heat map of the density of {escape(data['methods'][m]['name'])}", m)
        for m, entry in enumerate(data["density"]["methods"]) if entry
    )  # fmt: skip
    legend = f'<div class="legend"><span>0</span><i></i><span>{data["density"]["most"]:.2g} times as often as if uniform, or more</span></div>'
    about = "How often each noise level was drawn through training, on average over seeds. Loss weights are not part of it."
    return _section("density", "What was sampled", about, f'{legend}<div class="many wide">{maps}</div>')


def _overheads(data: dict[str, Any]) -> str:
    if not any(data["overhead"]):
        return ""
    chart = _chart("Time per update", "", 'data-chart="overhead"', "Bar chart of the time per update, relative to the baseline", kind="bars")
    about = f"Time per update relative to {_baseline(data)}. It counts all that a sampler does, but no evaluations."
    return _section("overhead", "What it costs", about, chart)


class Grids(NamedTuple):
    """Samples of all methods at one seed: the steps there are, and PNG files by method and step."""

    seed: int
    steps: list[int]
    files: dict[tuple[int, int], bytes]


def _grids(results: Results, problems: list[str]) -> Grids:
    """Sample grids of the seed that most methods have, at a few of their common steps; what cannot be shown is added to `problems`."""
    cells = [(m, cell) for m, method in enumerate(results.methods) for cell in results.of(method, results.lr) if cell.pictures]
    having = Counter(cell.seed for _, cell in cells)
    seed = max(sorted(having), key=lambda seed: having[seed], default=0)
    pictures = {m: cell.pictures for m, cell in cells if cell.seed == seed}
    common = sorted(set.intersection(*map(set, pictures.values())) or set().union(*pictures.values())) if pictures else []
    steps = {common[round(i * (len(common) - 1) / (STEPS_OF_SAMPLES - 1))] for i in range(STEPS_OF_SAMPLES)} if common else set()
    files: dict[tuple[int, int], bytes] = {}
    for step in sorted(steps, reverse=True):
        found = {m: _png(by_step[step]) for m, by_step in pictures.items() if step in by_step}
        if files and sum(map(len, files.values())) + sum(len(content) for content, _ in found.values()) > MOST_BYTES:
            break  # the last step matters; earlier ones are included while the page stays small
        files |= {(m, step): content for m, (content, wrong) in found.items() if not wrong}
        wrongs = [f"samples of {results.methods[m]}, seed {seed}, at update {step:,}: {wrong}; left out" for m, (_, wrong) in found.items() if wrong]
        problems.extend(wrongs)
    return Grids(seed, sorted({step for _, step in files}), files)


def _samples(grids: Grids, data: dict[str, Any]) -> str:
    if not grids.steps:
        return ""
    last, most = grids.steps[-1], len(grids.steps) - 1
    figures = ""
    for m in sorted({m for m, _ in grids.files}):
        images = ""
        for step in (step for step in grids.steps if (m, step) in grids.files):
            alt = escape(f"Samples from {data['methods'][m]['name']} after {step:,} updates, seed {grids.seed}")
            content = base64.b64encode(grids.files[m, step]).decode()
            images += f'<img src="data:image/png;base64,{content}" alt="{alt}" data-step="{step}"{"" if step == last else " hidden"}>'
        figures += f'<figure data-method="{m}"><figcaption><h3>{_name(data, m)}</h3></figcaption>{images}</figure>'
    slider = f'<input type="range" id="step" min="0" max="{most}" value="{most}" aria-valuetext="update {last:,}">'
    output = f'<output for="step" id="step-shown">update {last:,}</output>'
    choice = f'<div class="slider"><label for="step">Through training</label>{slider}{output}</div>'
    about = f"From the same noise for every method, with averaged weights, seed {grids.seed}{'' if most else f', after {last:,} updates'}."
    about += "" if len({m for m, _ in grids.files}) == len(data["methods"]) else " Methods without pictures are left out."
    return _section("samples", "Samples", about, f'{choice if most else ""}<div class="many">{figures}</div>')


def _png(path: Path) -> tuple[bytes, str]:
    """A picture, or what is wrong with it."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return b"", f"larger than {MOST_BYTES // 10**6} MB"
        content = path.read_bytes()
    except OSError as error:
        return b"", f"cannot be read ({error.strerror})"
    whole = content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"
    return (content, "") if whole else (b"", "not a whole PNG file")


def _repeat(results: Results) -> str:
    config, settings = results.config, results.config.get("settings", {})
    made = config.get("made with") or next((cell.made_with for cell in results.cells if cell.made_with), {})
    rest = {name: value for name, value in config.items() if name not in ("settings", "made with", "changed")}
    versions = made.get("versions") if isinstance(made.get("versions"), dict) else {}
    where = {**{name: value for name, value in made.items() if name != "versions"}, **(versions or {})}
    tables = [("The comparison", rest), (f"The recipe {results.recipe}", settings), ("Made with", where)]
    content = f"<pre><code>{escape(command(results))}</code></pre>"
    content += "".join(
        f'<details{" open" if i == 0 else ""}><summary>{escape(title)}</summary><div class="scroll settings">{_settings(values)}</div></details>'
        for i, (title, values) in enumerate(tables) if values
    )  # fmt: skip
    return _section("repeat", "To repeat it", "The command, and every setting.", content)


def _settings(values: dict[str, Any]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(shown(value))}</td></tr>' for name, value in values.items())
    return f"<table><tbody>{rows}</tbody></table>"


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return _section("problems", "What is missing or damaged", "Found in the result files; the page shows the rest.", f"<ul>{items}</ul>")


# --- pieces -------------------------------------------------------------------------------------------------------------------------------


def _section(name: str, title: str, about: str, content: str) -> str:
    said = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>{said}{content}</section>'


def _chart(title: str, about: str, chart: str, label: str, method: int | None = None, kind: str = "") -> str:
    """A figure that the script draws; all arguments are HTML already."""
    kind, of = ("small", f' data-method="{method}"') if method is not None else (kind, "")
    said = f"<p>{about}</p>" if about else ""
    drawing = f'<div class="chart {kind}" role="img" aria-label="{label}" {chart}></div>'
    return f"<figure{of}><figcaption><h3>{title}</h3>{said}</figcaption>{drawing}</figure>"


def _for_metric(metric: str, i: int, content: str, tag: str = "div") -> str:
    """Content that is shown while its metric is selected; the first metric is selected at the start."""
    return f'<{tag} data-metric="{escape(metric)}"{" hidden" if i else ""}>{content}</{tag}>'


def _titles(data: dict[str, Any]) -> str:
    """The name of the selected metric."""
    names = ((key, metric["name"]) for key, metric in data["metrics"].items())
    return "".join(_for_metric(key, i, escape(capital(name)), "span") for i, (key, name) in enumerate(names))


def _name(data: dict[str, Any], m: int) -> str:
    """A method's name beside its line."""
    look = data["methods"][m]
    style = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}[look["dash"]]
    swatch = f'<span class="swatch" style="--colour:var(--c{look["colour"]});border-top-style:{style}"></span>'
    breakable = re.sub("([:,+])", r"\1<wbr>", escape(look["name"]))
    return f'{swatch}<span class="name" title="{escape(look["name"])}">{breakable}</span>'


def _baseline(data: dict[str, Any]) -> str:
    """The name of the baseline."""
    return next((str(look["name"]) for look in data["methods"] if look["baseline"]), "the baseline")


def _unbroken(text: str) -> str:
    """Text in which no line ends between a number and its % or ±."""
    return re.sub(r"(?<=\d) (?=[%±])|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def _number(text: str, unit: str = "") -> str:
    """A cell of a table: a number with its unit, and the text in brackets on a line below; or words."""
    first, bracket, rest = text.replace("-", "\N{MINUS SIGN}" if text != "-" else "\N{EN DASH}").partition(" (")
    below = f"<br><small>{escape(rest.rstrip(')'))}</small>" if bracket else ""
    return f'<td class="number{" words" if first[:1].isalpha() else ""}">{escape(first)}{unit if first[:1].isdigit() else ""}{below}</td>'


def _palette() -> str:
    light, dark = ("".join(f"--c{i}:{pair[k]};" for i, pair in enumerate(COLOURS)) for k in (0, 1))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _island(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element, nor be read as anything but text."""
    text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return "".join(f"\\u{ord(c):04x}" if c in "<>&\u2028\u2029" else c for c in text)


def _finite(value: Any) -> Any:
    """Floats with six digits, more than a screen shows; None for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _asset(name: str) -> str:
    return files("noiseclock.lab").joinpath(name).read_text(encoding="utf-8")
