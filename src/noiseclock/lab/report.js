"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const phone = matchMedia("(max-width: 640px)"), dark = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
  const early = new Set(data.methods.map((_, m) => m).filter((m) => data.methods[m].early));
  const state = { metric: Object.keys(data.metrics)[0], hidden: new Set(early), printing: false };

  // --- words, numbers, colours ---------------------------------------------------------------------------------------------------------

  // Plotly reads tags, entities, %{templates} and $formulas$ in any text; a name is only ever text.
  const plain = (text) => text.replace(/[&<>{$]/g, (character) => `&#${character.charCodeAt(0)};`);
  const short = (text, most) => plain(text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const number = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));
  const units = [[86400, 172800, "days"], [3600, 7200, "h"], [60, 120, "min"], [1, 0, "s"]];
  const duration = (seconds) => { const [unit, , word] = units.find(([, from]) => seconds >= from); return `${number(seconds / unit)} ${word}`; };
  const beside = 24; // the most characters of a name beside its line
  const name = (m, most = 60) => short(data.methods[m].name, most);
  const bold = (m) => `<b>${name(m)}</b><br>`;
  const spread = (mean, low, high, n) => number(mean) + (n > 1 ? `, from ${number(low)} to ${number(high)} over ${n} seeds` : ", one seed");

  const colour = (token) => getComputedStyle(document.documentElement).getPropertyValue(token).trim();
  const of = (m) => colour(`--c${data.methods[m].colour}`);
  const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
  const shown = (only) => data.methods.map((_, m) => m).filter((m) => (only ? only.includes(m) : true) && (!state.hidden.has(m) || (only && early.has(m))));

  // --- every chart ---------------------------------------------------------------------------------------------------------------------

  const axis = (title, more) => ({
    title: { text: plain(title), font: { color: colour("--soft"), size: 13 }, standoff: 10 }, tickfont: { color: colour("--soft"), size: 12 },
    gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true, fixedrange: phone.matches, ...more,
  });
  const level = (value, ink) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: ink, width: 1.2, dash: "dot" } });

  function draw(element, traces, layout) {
    const small = element.classList.contains("small");
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") };
    Plotly.react(element, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, showlegend: false, hovermode: "closest",
      dragmode: phone.matches ? false : "zoom", margin: { l: 8, r: 12, t: 12, b: 8 }, autosize: !state.printing,
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font, align: "left", namelength: -1 },
      ...(state.printing ? { width: small ? 215 : 660, height: small ? 140 : 290 } : {}), ...layout,
    }, { displayModeBar: false, responsive: !state.printing });
  }

  // A series is {m, x, y, text, low?, high?, whole?}: a method, its points, what to say of each, their range over seeds, and if all seeds are in.
  function lines(element, series, { x, y, log, marks, also = [] }) {
    const scale = log ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
    const values = series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).concat(also);
    const heights = values.filter((v) => v !== null).map(scale).filter(Number.isFinite);
    const ends = heights.length ? [Math.min(...heights), Math.max(...heights)] : [0, 1];
    const room = (ends[1] - ends[0]) * 0.06 || Math.abs(ends[1]) * 0.05 || 0.5;
    const range = [ends[0] - room, ends[1] + room];
    const traces = [];
    for (const s of series) {
      const look = data.methods[s.m], ink = of(s.m);
      const banded = s.low ? s.x.map((_, i) => i).filter((i) => s.low[i] !== null && s.low[i] < s.high[i]) : [];
      if (banded.length > 1) {
        const back = [...banded].reverse();
        traces.push({
          x: [...banded, ...back].map((i) => s.x[i]), y: [...banded.map((i) => s.high[i]), ...back.map((i) => s.low[i])], meta: s.m,
          mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faint(ink, 0.14), hoverinfo: "skip",
        });
      }
      const part = (inside, dash) => traces.push({
        x: s.x, y: s.y.map((v, i) => (inside(i) ? v : null)), meta: s.m, hoverinfo: "text", hovertext: s.text, mode: marks ? "lines+markers" : "lines",
        line: { color: ink, dash, width: look.baseline ? 2.5 : 2 }, marker: { symbol: look.symbol, size: 7, color: ink },
      });
      const whole = (i) => s.whole?.[i] ?? true;
      part(whole, look.dash);
      if (s.whole && !s.whole.every(Boolean)) part((i) => !whole(i - 1) || !whole(i) || !whole(i + 1), "dot");
    }
    const names = phone.matches ? [] : labels(element, series, scale, range);
    draw(element, traces, {
      xaxis: axis(x.title, x.more), yaxis: axis("", { type: log ? "log" : "linear", range, nticks: 6, ...(log ? ticks(range) : {}), ...y }),
      annotations: names, shapes: also.map((value) => level(value, colour("--soft"))),
      margin: { l: 8, r: 26 + 7.4 * Math.max(0, ...names.map((label) => Math.min(data.methods[label.name].name.length, beside))), t: 12, b: 8 },
    });
  }

  // The name at the end of each line, pushed apart where lines end together.
  function labels(element, series, scale, [least, most]) {
    const height = (state.printing ? 290 : element.clientHeight) - 70, apart = 16;
    const last = (s) => s.y.findLastIndex((v) => v !== null && Number.isFinite(scale(v)));
    const ends = series.filter((s) => last(s) >= 0).map((s) => ({ m: s.m, at: ((scale(s.y[last(s)]) - least) / (most - least)) * height }));
    ends.sort((a, b) => a.at - b.at);
    for (let round = 0; round < 100; round++) {
      for (let k = 1; k < ends.length; k++) {
        const close = apart - (ends[k].at - ends[k - 1].at);
        if (close > 0) { ends[k].at += close / 2; ends[k - 1].at -= close / 2; }
      }
      // none below the axis, none above the top: there they would be cut off
      ends.forEach((end, k) => { end.at = Math.max(Math.min(end.at, height - (ends.length - 1 - k) * apart), k * apart - 8); });
    }
    return ends.map(({ m, at }) => ({
      xref: "paper", x: 1, xanchor: "left", xshift: 8, yref: "paper", y: at / height, yanchor: "middle", showarrow: false, captureevents: true,
      name: String(m), text: name(m, beside), font: { color: of(m), size: 12.5 },
    }));
  }

  // As many round numbers as a logarithmic axis has room for.
  function ticks([least, most]) {
    const wide = most - least, first = Math.floor(least);
    const fine = [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9];
    const steps = wide < 0.7 ? fine : wide < 1.3 ? [1, 2, 3, 4, 6, 8] : wide < 2.5 ? [1, 2, 5] : [1];
    const decades = Array.from({ length: Math.floor(most) - first + 1 }, (_, i) => 10 ** (first + i));
    const values = decades.flatMap((decade) => steps.map((step) => step * decade));
    const inside = values.filter((value) => Math.log10(value) >= least && Math.log10(value) <= most);
    return { tickvals: inside, ticktext: inside.map(number) };
  }

  // --- the charts ----------------------------------------------------------------------------------------------------------------------

  const charts = {
    quality(element) {
      const metric = data.metrics[state.metric], by = element.dataset.by, sweep = metric.sweeps[element.dataset.index];
      const day = by === "seconds" ? metric.day : null, { curves } = sweep ?? metric;
      const only = sweep && [...curves.keys()].filter((m) => curves[m]);
      const series = shown(only).filter((m) => curves[m]?.[by].some((v) => v !== null)).map((m) => {
        const c = curves[m], seeds = Math.max(...c.n);
        const cost = (i) => [c.images[i] !== null ? `${number(c.images[i])} images` : "", c.seconds[i] !== null ? duration(c.seconds[i]) : "",
          day && c.seconds[i] !== null ? `${number(c.seconds[i] / day)}D` : ""].filter(Boolean).join(" · ");
        return { m, x: c[by].map((v) => (v !== null && day ? v / day : v)), y: c.mean, low: c.low, high: c.high, whole: c.n.map((n) => n === seeds),
          text: c.mean.map((v, i) => (v === null ? "" : `${bold(m)}${spread(v, c.low[i], c.high[i], c.n[i])}<br>${cost(i)}`)) };
      });
      const title = by === "images" ? "images" : day ? `training time, 1D = ${duration(day)}` : "training time in seconds";
      const x = { title, more: { rangemode: "tozero", ticksuffix: day ? "D" : "" } };
      lines(element, series, { x, log: metric.log, marks: true, also: sweep || metric.target === null ? [] : [metric.target] });
    },
    lr(element) {
      const metric = data.metrics[state.metric];
      const series = shown().filter((m) => metric.lrs[m]).map((m) => {
        const c = metric.lrs[m];
        const text = c.mean.map((v, i) => `${bold(m)}learning rate ${number(c.lr[i])}<br>${spread(v, c.low[i], c.high[i], c.n[i])}`);
        return { m, x: c.lr, y: c.mean, low: c.low, high: c.high, text };
      });
      const rates = [...new Set(series.flatMap((s) => s.x))];
      const x = { title: "learning rate", more: { type: "log", tickvals: rates, ticktext: rates.map(number) } };
      lines(element, series, { x, log: metric.log, marks: true });
    },
    // A point with its range for each method, joined by a quiet line, and the baseline as a level.
    sweep(element) {
      const sweep = data.sweeps[element.dataset.index], finals = data.metrics[state.metric].sweeps[element.dataset.index].values;
      const visible = shown(sweep.points.map(([m]) => m));
      const points = sweep.points.filter(([m]) => visible.includes(m) && finals[m]).map(([m, value]) => ({ m, value, ...finals[m] }));
      const quiet = { color: colour("--soft"), width: 1.5 };
      const joined = { x: points.map((p) => p.value), y: points.map((p) => p.mean), mode: "lines", line: quiet, hoverinfo: "skip" };
      const dots = points.map((p) => ({
        x: [p.value], y: [p.mean], mode: "markers", marker: { color: of(p.m), symbol: data.methods[p.m].symbol, size: 10 }, meta: p.m,
        error_y: { type: "data", symmetric: false, array: [p.high - p.mean], arrayminus: [p.mean - p.low], color: of(p.m), thickness: 1.5, width: 4 },
        hoverinfo: "text", hovertext: [bold(p.m) + spread(p.mean, p.low, p.high, p.n)],
      }));
      const base = shown().filter((m) => data.methods[m].baseline && finals[m]);
      const tickvals = sweep.points.map(([, value]) => value), say = sweep.numeric ? number : (value) => short(value, 14);
      draw(element, [joined, ...dots], {
        xaxis: axis(sweep.label, { type: !sweep.numeric ? "category" : sweep.log ? "log" : "linear", tickvals, ticktext: tickvals.map(say) }),
        yaxis: axis("", { nticks: 6 }), shapes: base.map((m) => level(finals[m].mean, of(m))),
        annotations: base.map((m) => ({
          xref: "paper", x: 1, y: finals[m].mean, xanchor: "right", yanchor: "bottom", text: name(m, beside), showarrow: false,
          font: { color: of(m), size: 12.5 },
        })),
      });
    },
    loss(element) {
      const ratio = element.dataset.ratio === "yes", of = data.loss.methods;
      const series = shown().filter((m) => of[m] && (!ratio || of[m].ratio)).map((m) => {
        const y = ratio ? of[m].ratio : of[m].mean, said = (v) => (ratio ? `${number(100 * v)} % of the baseline's loss` : `loss ${number(v)}`);
        const text = y.map((v, i) => `${bold(m)}${said(v)}<br>at noise level ${number(of[m].time[i])}`);
        return { m, x: of[m].time, y, text, ...(ratio ? {} : { low: of[m].low, high: of[m].high }) };
      });
      const x = { title: "noise level: 0 clean, 1 pure noise", more: { range: [0, 1] } };
      lines(element, series, { x, y: ratio ? { tickformat: ".0%" } : {}, log: !ratio });
    },
    utility(element) {
      const of = data.utility.methods;
      const series = shown().filter((m) => of[m]).map((m) => {
        const text = of[m].mean.map((v, i) => `${bold(m)}${number(100 * v)} % of the loss<br>at noise level ${number(of[m].time[i])}`);
        return { m, x: of[m].time, y: of[m].mean, low: of[m].low, high: of[m].high, text };
      });
      lines(element, series, { x: { title: "noise level: 0 clean, 1 pure noise", more: { range: [0, 1] } }, y: { tickformat: ".3~%" }, also: [0] });
    },
    density(element) {
      const d = data.density.methods[element.dataset.method];
      const say = (v, i, j) => `density ${number(v)}<br>at noise level ${number(d.time[i])}, update ${number(d.step[j])}`;
      const map = {
        type: "heatmap", x: d.step, y: d.time, z: d.density, zmin: 0, zmax: data.density.most, showscale: false,
        colorscale: [0, 1, 2, 3, 4].map((i) => [i / 4, colour(`--scale-${i}`)]),
        hoverinfo: "text", hovertext: d.density.map((row, i) => row.map((v, j) => say(v, i, j))),
      };
      draw(element, [map], {
        xaxis: axis("updates", { showgrid: false, ...(d.step.length > 4 ? { nticks: 4 } : { tickvals: d.step }) }),
        yaxis: axis("noise level", { range: [0, 1], tickvals: [0, 0.5, 1], showgrid: false }),
      });
    },
    overhead(element) {
      const rows = shown().filter((m) => data.overhead[m]).reverse(), cost = data.overhead;
      const bars = {
        type: "bar", orientation: "h", x: rows.map((m) => cost[m].ratio), y: rows.map(String), width: 0.55,
        marker: { color: rows.map((m) => faint(of(m), 0.85)) }, text: rows.map((m) => cost[m].label), textposition: "outside", cliponaxis: false,
        hoverinfo: "text", hovertext: rows.map((m) => bold(m) + cost[m].text),
      };
      const names = { tickvals: rows.map(String), ticktext: rows.map((m) => name(m, phone.matches ? 18 : 40)) };
      draw(element, [bars], {
        height: 70 + 34 * rows.length, margin: { l: 8, r: 70, t: 4, b: 8 },
        xaxis: axis("time per update, the baseline = 1", { rangemode: "tozero", nticks: 6 }),
        yaxis: axis("", { type: "category", ...names, tickfont: { size: 13 }, showgrid: false }),
        shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: colour("--soft"), width: 1.2, dash: "dot" } }],
      });
    },
  };

  const redraw = () => all(".chart").filter((element) => !element.closest("[hidden]")).forEach((element) => charts[element.dataset.chart](element));

  // --- what the reader can change ------------------------------------------------------------------------------------------------------

  function mark(m, on) {
    if (on) state.hidden.delete(m); else state.hidden.add(m);
    for (const box of all(`.methods input[value="${m}"]`)) box.checked = on;
    for (const figure of all(`figure[data-method="${m}"]`)) figure.hidden = !on;
  }
  function show(m, on) {
    mark(m, on);
    redraw();
  }

  for (const box of all(".methods input")) box.addEventListener("change", () => show(Number(box.value), box.checked));
  for (const choice of all("#metric")) choice.addEventListener("change", () => {
    state.metric = choice.value;
    for (const part of all("[data-metric]")) part.hidden = part.dataset.metric !== state.metric;
    redraw();
  });
  for (const slider of all("#step")) slider.addEventListener("input", () => {
    const step = data.steps[slider.value], words = `update ${step.toLocaleString("en")}`;
    for (const picture of all("img[data-step]")) picture.hidden = Number(picture.dataset.step) !== step;
    document.getElementById("step-shown").textContent = words;
    slider.setAttribute("aria-valuetext", words);
  });

  // Paper is narrow and has no other metric, no closed part and no pointer.
  function printing(on) {
    if (on === state.printing) return;
    state.printing = on;
    for (const part of all("details")) {
      if (on) part.dataset.was = part.open;
      part.open = on || part.dataset.was === "true";
    }
    redraw();
  }

  // A browser keeps the boxes of a page that is loaded again.
  for (const box of all(".methods input")) mark(Number(box.value), !early.has(Number(box.value)));
  for (const choice of all("#metric")) choice.value = state.metric;
  for (const slider of all("#step")) slider.value = slider.max;
  redraw();
  const clicked = ({ annotation }) => annotation.name && show(Number(annotation.name), false);
  for (const element of all(".chart")) element.on?.("plotly_clickannotation", clicked); // a chart that is still hidden is a density, without names
  for (const media of [dark, phone]) media.addEventListener("change", redraw);
  paper.addEventListener("change", (event) => printing(event.matches));
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
})();
