"use strict";
// Whatever comes from the training reaches the page as textContent or as numbers, never as HTML.

const PAUSE = 2000; // ms between questions
const QUIET = 120; // s without a line, after which a training may have stopped
const POINTS = 1500; // a curve is drawn with about so many
const COLUMNS = 300; // and a heat map
const EARLIER = 4; // lines of earlier validations

const seen = { train: [], validation: [], broken: 0, cursor: "", pictures: [], settings: undefined, last: null, changed: true };
const $ = (id) => document.getElementById(id);
const chart = (id) => $(id).querySelector(".chart");

// --- asking -------------------------------------------------------------------------------------------------------------------------------

async function ask() {
  const answer = await fetch(`/news?after=${encodeURIComponent(seen.cursor)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const news = await answer.json();
  seen.changed ||= news.again || news.records.length > 0;
  if (news.again) Object.assign(seen, { train: [], validation: [], broken: 0 });
  for (const record of news.records) seen[record.kind].push(record);
  seen.broken += news.broken;
  seen.cursor = news.cursor;
  seen.last = news;
  return news;
}

async function follow() {
  if (document.hidden) return setTimeout(follow, PAUSE);
  let news = null;
  try {
    news = await ask();
  } catch {
    status("lost", "no answer from noiseclock watch; trying again");
  }
  setTimeout(follow, news?.more ? 0 : PAUSE);
  if (news?.more) status("waiting", "reading the log");
  else if (news) show();
}

// --- numbers and words --------------------------------------------------------------------------------------------------------------------

const whole = (n) => Math.round(n).toLocaleString("en");
const short = (n) => (n === null || n === undefined ? "none" : Number(n.toPrecision(3)).toString());

function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

// Mean of the points around each one: of more points the longer the run, of fewer at its beginning, where the loss falls fast.
function smoothed(values) {
  const reach = Math.round(values.length / 60);
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value === null ? 0 : 1));
  }
  return values.map((_, i) => {
    const from = i - Math.min(reach, i), to = Math.min(values.length, i + Math.min(reach, i) + 1);
    const count = counts[to] - counts[from];
    return count ? (sums[to] - sums[from]) / count : null;
  });
}

function thinned(items, most = POINTS) {
  const every = Math.ceil(items.length / most);
  return every > 1 ? items.filter((_, i) => i % every === 0 || i === items.length - 1) : items;
}

// Images per second around each line of the log. The first one is left out: it has the start of the program in it.
function speeds(train) {
  const known = train.filter((r) => r.images !== null && r.seconds !== null);
  const reach = Math.max(4, Math.round(known.length / 100));
  return known.slice(1).map((r, i) => {
    const before = known[Math.max(0, i + 1 - reach)];
    const seconds = r.seconds - before.seconds;
    return { step: r.step, speed: seconds > 0 ? (r.images - before.images) / seconds : null };
  });
}

// --- drawing ------------------------------------------------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { size: 13 } }, gridcolor: colour("line"), linecolor: colour("edge"), zeroline: false, automargin: true,
    ticks: "outside", ticklen: 4, tickcolor: colour("edge"), nticks: 6, fixedrange: true, ...more,
  };
}

const updates = (more = {}) => axis("updates", { tickformat: ",d", ...more });
const levels = () => axis("time, from clean (0) to noise (1)", { range: [0, 1] });

function draw(id, traces, x, y, label, more = {}) {
  const place = chart(id);
  place.removeAttribute("data-empty");
  place.setAttribute("aria-label", label);
  const layout = {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("muted") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 8, b: 8 }, xaxis: x, yaxis: y,
    dragmode: false, hovermode: "x unified", showlegend: traces.some((t) => t.name),
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("edge"), font: { color: colour("ink") } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 }, itemclick: false, itemdoubleclick: false },
    ...more,
  };
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
}

function empty(id, text) {
  if (chart(id).data) Plotly.purge(chart(id));
  chart(id).setAttribute("data-empty", text);
  chart(id).setAttribute("aria-label", text);
}

// Ticks at 1, 2 and 5 where a logarithmic axis shows few decades, or it would have one label or none.
function logarithmic(title, values) {
  const positive = values.filter((v) => v > 0);
  if (!positive.length || positive.length < values.length) return axis(title);
  const decades = Math.log10(Math.max(...positive) / Math.min(...positive));
  return axis(title, { type: "log", dtick: decades < 2 ? "D2" : Math.ceil(decades / 8), tickformat: "~g" });
}

// One number of every line, faint, and its running mean.
function running(name, label, line) {
  const train = seen.train.filter((r) => r[name] !== null);
  const mean = smoothed(train.map((r) => r[name]));
  const rows = thinned(train.map((r, i) => ({ step: r.step, value: r[name], mean: mean[i] })));
  const x = rows.map((r) => r.step), y = rows.map((r) => r.value);
  const traces = [
    { x, y, mode: "lines", line: { color: colour(line), width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip" },
    { x, y: rows.map((r) => r.mean), mode: "lines", line: { color: colour(line), width: 2.2 }, name: label, hovertemplate: "%{y:.4g}" },
  ];
  return { traces, values: y, last: mean.at(-1) };
}

function drawLoss() {
  const { traces, values, last } = running("loss", "training", "first");
  if (!values.length) return empty("loss", "waiting for the first update");
  const checks = seen.validation.filter((r) => r.loss !== null);
  if (checks.length) {
    traces.push({
      x: checks.map((r) => r.step), y: checks.map((r) => r.loss), mode: checks.length > 50 ? "lines" : "lines+markers",
      line: { color: colour("second"), width: 1.6 },
      marker: { size: 6 }, name: "held out", hovertemplate: "%{y:.4g}",
    });
  }
  const label = `Loss over ${whole(lastStep())} updates, now ${short(last)} in training`;
  draw("loss", traces, updates(), logarithmic("loss", [...values, ...checks.map((r) => r.loss)]), label);
}

function drawNorm() {
  const { traces, values, last } = running("norm", "", "first");
  if (!values.length) return empty("norm", "waiting for the first update");
  const label = `Norm of the gradient over ${whole(lastStep())} updates, now ${short(last)}`;
  draw("norm", traces, updates(), logarithmic("norm of the gradient", values), label);
}

// The latest validation and some earlier ones, closer together towards the beginning, where more changes.
function chosen(checks) {
  if (!checks.length) return [];
  const last = checks.length - 1;
  const picks = new Set([last]);
  for (let i = 0; i < EARLIER; i++) picks.add(Math.min(last, Math.round((last + 1) ** (i / EARLIER)) - 1));
  return [...picks].sort((a, b) => a - b).map((i) => checks[i]);
}

function drawLevels() {
  const checks = chosen(seen.validation.filter((r) => r.loss_by_time));
  if (!checks.length) return empty("levels", "waiting for the first validation");
  const traces = checks.map((r, i) => {
    const latest = i === checks.length - 1;
    return {
      x: r.loss_by_time[0], y: r.loss_by_time[1], mode: "lines", name: `update ${whole(r.step)}`, hovertemplate: "%{y:.4g}",
      line: { color: colour("first"), width: latest ? 2.6 : 1.4 }, opacity: latest ? 1 : 0.25 + (0.45 * i) / checks.length,
    };
  });
  const all = checks.flatMap((r) => r.loss_by_time[1]).filter((v) => v !== null);
  const label = `Loss by noise level at ${checks.length} points of training, the latest after update ${whole(checks.at(-1).step)}`;
  draw("levels", traces, levels(), logarithmic("loss", all), label);
}

function drawDensity() {
  const checks = seen.validation.filter((r) => r.density);
  if (!checks.length) return empty("density", "waiting for the first validation");
  const { step, density: [time, p] } = checks.at(-1);
  const most = Math.max(...p.filter((v) => v !== null));
  const steep = most > 10; // a peak so high would press all the rest to the floor
  const traces = [
    {
      x: time, y: p, mode: "lines", line: { color: colour("first"), width: 2.4 }, fill: steep ? "none" : "tozeroy",
      fillcolor: `${colour("first")}2e`, name: `update ${whole(step)}`, hovertemplate: "%{y:.3g}",
    },
    { x: [0, 1], y: [1, 1], mode: "lines", line: { color: colour("muted"), width: 1.2, dash: "dot" }, name: "uniform", hoverinfo: "skip" },
  ];
  const title = "density, uniform = 1";
  const y = steep ? logarithmic(title, p.filter((v) => v > 0)) : axis(title, { range: [0, Math.max(1.3, 1.1 * most)] });
  const label = `Sampled density after update ${whole(step)}, highest at time ${short(time[p.indexOf(most)])}, ${short(most)} times uniform`;
  draw("density", traces, levels(), y, label);
}

function drawHistory() {
  const checks = seen.validation.filter((r) => r.density);
  if (!checks.length) return empty("history", "waiting for the first validation");
  const columns = thinned(checks, COLUMNS);
  const time = columns.at(-1).density[0];
  const same = columns.filter((r) => r.density[0].length === time.length);
  // as powers of two around uniform, cut off at 8 times more or less
  const powers = time.map((_, i) => same.map((r) => r.density[1][i]).map((p) => (p === null ? null : Math.log2(Math.max(p, 1e-9)))));
  const far = Math.max(...powers.flat().map(Math.abs));
  const end = Math.min(3, Math.max(1, Math.ceil(far)));
  const ticks = [-3, -2, -1, 0, 1, 2, 3].filter((power) => Math.abs(power) <= end);
  const trace = {
    type: "heatmap", x: [0, ...same.map((r) => r.step)], y: time.map((_, i) => (i + 0.5) / time.length), z: powers,
    customdata: time.map((_, i) => same.map((r) => [r.step, r.density[1][i]])),
    zmin: -end, zmax: end, colorscale: [[0, colour("less")], [0.5, colour("card")], [1, colour("more")]],
    colorbar: {
      title: { text: "density", font: { size: 12 } }, thickness: 12, outlinewidth: 0, tickvals: ticks,
      ticktext: ticks.map((power) => ({ "-3": "⅛", "-2": "¼", "-1": "½" })[power] ?? 2 ** power), len: 1, ypad: 0,
    },
    hovertemplate: "update %{customdata[0]:,}<br>time %{y:.2f}<br>%{customdata[1]:.3g} × uniform<extra></extra>",
  };
  const flat = far < 0.02;
  const label = `Sampled density over noise levels at ${same.length} points of training${flat ? ": uniform" : ""}`;
  const border = { showgrid: false, showline: true, mirror: true };
  const words = { text: "uniform throughout", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 13 } };
  draw("history", [trace], updates(border), axis("time", { range: [0, 1], ...border }), label, {
    hovermode: "closest", annotations: flat ? [words] : [],
  });
}

function drawSpeed() {
  const rows = thinned(speeds(seen.train).filter((r) => r.speed !== null));
  if (!rows.length) return empty("speed", "waiting for the second line of the log");
  const top = 1.15 * Math.max(...rows.map((r) => r.speed));
  const line = { color: colour("first"), width: 2 };
  const trace = { x: rows.map((r) => r.step), y: rows.map((r) => r.speed), mode: "lines", line, hovertemplate: "%{y:,.0f}" };
  const label = `Throughput, now ${whole(rows.at(-1).speed)} images per second`;
  draw("speed", [trace], updates(), axis("images per second", { range: [0, top], tickformat: "," }), label);
}

// --- the rest of the page -----------------------------------------------------------------------------------------------------------------

function status(state, text) {
  $("status").dataset.state = state;
  if ($("status").textContent !== text) $("status").textContent = text;
}

function showStatus() {
  const { age, updates } = seen.last;
  const step = lastStep();
  if (step === 0) return status("waiting", "waiting for the first update");
  if (updates !== null && step >= updates) return status("finished", "finished");
  if (age > QUIET) return status("lost", `nothing new for ${span(age)}`);
  status("running", "training");
}

function lastStep() {
  return Math.max(0, ...[seen.train.at(-1), seen.validation.at(-1)].filter(Boolean).map((r) => r.step));
}

function showTiles() {
  const { updates } = seen.last;
  const last = seen.train.at(-1), check = seen.validation.at(-1), step = lastStep();
  const recent = seen.train.filter((r) => r.seconds !== null).slice(-30);
  const pace = recent.length > 1 ? (recent.at(-1).seconds - recent[0].seconds) / (recent.at(-1).step - recent[0].step) : null;
  const speed = speeds(seen.train).at(-1)?.speed;
  const left = updates !== null && pace ? Math.max(0, updates - step) * pace : null;
  const tiles = [["updates", whole(step), updates === null ? "" : `of ${whole(updates)}`]];
  const losses = smoothed(seen.train.map((r) => r.loss));
  if (last) tiles.push(["training loss", short(losses.at(-1)), ""]);
  if (check) tiles.push(["held-out loss", short(check.loss), `update ${whole(check.step)}`]);
  if (speed) tiles.push(["images per second", whole(speed), ""]);
  if (last && last.seconds !== null) tiles.push(["training time", span(last.seconds), ""]);
  if (left > 0) tiles.push(["left, about", span(left), ""]);
  if (last?.sampler) tiles.push(["the sampler", last.sampler, ""]);
  if (last?.skipped) tiles.push(["updates skipped", whole(last.skipped), "not finite"]);
  $("tiles").hidden = step === 0;
  $("tiles").replaceChildren(...tiles.map(([name, value, note]) => {
    const tile = document.createElement("div"), term = document.createElement("dt"), figure = document.createElement("dd");
    term.textContent = name;
    figure.textContent = note ? `${value} ` : value;
    if (note) figure.append(Object.assign(document.createElement("small"), { textContent: note }));
    tile.append(term, figure);
    tile.className = value.length > 14 ? "wide" : "";
    return tile;
  }));
  $("progress").max = updates || Math.max(step, 1);
  $("progress").value = step;
}

function showNotice() {
  const lines = [];
  if (seen.broken) lines.push(`${whole(seen.broken)} ${seen.broken === 1 ? "line" : "lines"} of log.jsonl could not be read`);
  if (lastStep() > 0 && seen.last.settings === null) lines.push("config.json is missing or cannot be read, so the settings are not shown");
  $("notice").textContent = lines.join("; ");
  $("notice").hidden = !lines.length;
}

function showSettings() {
  const { settings, folder } = seen.last;
  const text = JSON.stringify([settings, folder]);
  if (text === seen.settings) return;
  seen.settings = text;
  document.title = `${folder} · Noiseclock`;
  $("name").textContent = folder;
  const method = settings && [settings.data, settings.sampler, settings.weighting === "constant" ? "" : settings.weighting, settings.schedule];
  $("method").textContent = method ? method.filter(Boolean).join(" · ") : "";
  document.querySelector("details").hidden = !settings;
  $("settings").replaceChildren(...Object.entries(settings || {}).map(([name, value]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
    head.scope = "row";
    head.textContent = name.replaceAll("_", " ");
    cell.textContent = value;
    row.append(head, cell);
    return row;
  }));
}

function showSamples() {
  const { pictures } = seen.last;
  const atEnd = Number($("which").value) >= seen.pictures.length - 1;
  if (JSON.stringify(pictures) === JSON.stringify(seen.pictures)) return;
  seen.pictures = pictures;
  $("which").max = Math.max(0, pictures.length - 1);
  if (atEnd) $("which").value = pictures.length - 1;
  showPicture();
}

function showPicture() {
  const picture = seen.pictures[Number($("which").value)];
  document.querySelector(".empty").hidden = Boolean(picture);
  $("grid").hidden = !picture;
  $("choice").hidden = seen.pictures.length < 2;
  if (!picture) return;
  const [name, step, written] = picture;
  $("when").textContent = `after update ${whole(step)}, by the averaged weights, always from the same noise`;
  $("grid").alt = `Grid of samples after update ${whole(step)}`;
  $("which").setAttribute("aria-valuetext", `update ${whole(step)}`);
  $("grid").src = `/samples/${name}?${written}`;
}

function drawAll() {
  for (const each of [drawLoss, drawLevels, drawDensity, drawHistory, drawSpeed, drawNorm]) each();
}

function show() {
  showSettings();
  showStatus();
  showTiles();
  showNotice();
  showSamples();
  if (seen.changed) drawAll();
  seen.changed = false;
}

$("which").addEventListener("input", showPicture);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => seen.last && drawAll());
follow();
