"use strict";
// The charts of a report. All texts reach the page by textContent, never as markup; nothing is fetched.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const redraws = [];

// Elements

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const place = (name) => document.querySelector(`[data-chart="${name}"]`);
function choice(label, options, change) {
  const select = make("select", { onchange: () => change(select.value) },
    ...options.map(([value, text]) => make("option", { value }, text)));
  return { select, label: make("label", {}, label, select) };
}
const figure = (value) => value === null || value === undefined ? "-" : value.toFixed(3);
const signed = (value) => (value >= 0 ? "+" : "\u2212") + Math.abs(value).toFixed(3);
const plain = (value) => value === null ? "-" : Number(value.toPrecision(3)).toLocaleString("en");

// Colours: as in the pictures, lighter where the page is dark

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
}
function ink(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
  if (!isDark() || light > 0.45) return colour;
  return `rgb(${parts.map((part) => Math.round(part + (255 - part) * (0.75 - light))).join(",")})`;
}
// Without a prototype: a tier may be called "constructor".
const method = Object.assign(Object.create(null), Object.fromEntries((data.methods || []).map((one) => [one.name, one])));

// Scales

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(+value.toPrecision(12) + 0);  // -0 is shown as 0
  return found;
}
function range(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known), room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 0.05;
  return [low - room, high + room];
}
function frame(width, height, x, y, labels) {
  // The panel of a chart: axes, grid and labels; `at` turns values into places.
  const left = 64, right = 12, top = 10, bottom = 42;
  const at = {
    x: (value) => left + (value - x[0]) / (x[1] - x[0] || 1) * (width - left - right),
    y: (value) => height - bottom - (value - y[0]) / (y[1] - y[0] || 1) * (height - top - bottom),
  };
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": labels.about });
  for (const value of ticks(y[0], y[1], 5)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: at.y(value), y2: at.y(value) }),
      draw("text", { class: "faint", x: left - 6, y: at.y(value) + 4, "text-anchor": "end" }, plain(value)));
  }
  const given = labels.ticks || ticks(x[0], x[1], width < 500 ? 4 : 7).filter((value) => !labels.whole || value % 1 === 0);
  const every = Math.ceil(given.length * 38 / (width - left - right));  // labels of more ticks would touch
  for (const value of given.filter((_, k) => k % every === 0)) {
    svg.append(draw("text", { class: "faint", x: at.x(value), y: height - bottom + 16, "text-anchor": "middle" },
      labels.name ? labels.name(value) : plain(value)));
  }
  svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, labels.x),
    draw("text", { x: 11, y: (top + height - bottom) / 2, "text-anchor": "middle",
      transform: `rotate(-90 11 ${(top + height - bottom) / 2})` }, labels.y));
  return { svg, at };
}
function responsive(box, render) {
  let last = 0;
  const again = () => { last = box.clientWidth; if (last && box.isConnected) render(Math.max(280, last)); };
  new ResizeObserver(() => { if (Math.abs(box.clientWidth - last) > 8) again(); }).observe(box);
  redraws.push(again);
  again();
}
function legend(items) {
  return make("ul", { class: "legend" }, ...items.map(({ name, colour, dash, dot }) => {
    const mark = make("i", { class: dot ? "dot" : dash ? "dash" : null });
    mark.style.borderColor = colour;
    return make("li", {}, mark, name);
  }));
}

// A chart of lines: `lines` is [{name, colour, dash, x: [...], y: [...]}]; points can be pointed at and walked through

function lineChart(box, lines, labels) {
  const panel = make("div"), readout = make("p", { class: "readout", role: "status" });
  const keys = make("div");
  box.replaceChildren(panel, keys, readout);
  responsive(panel, (width) => {
    const height = Math.min(360, Math.max(240, width * 0.5));
    const shown = lines.filter((line) => line.x.length);
    const x = range(shown.flatMap((line) => line.x)), y = range(shown.flatMap((line) => line.y.concat(line.low || [], line.high || [])));
    if (labels.fromZero && (x[0] < 0.3 * x[1] || x[0] > 0.8 * x[1])) x[0] = Math.min(0, ...shown.flatMap((line) => line.x));
    const { svg, at } = frame(width, height, x, y, labels);
    const points = [];
    for (const line of shown) {
      const pairs = line.x.map((value, k) => [value, line.y[k], k]).filter((pair) => pair[0] !== null && pair[1] !== null);
      if (!pairs.length) continue;
      const colour = ink(line.colour);
      if (line.low) {
        const up = pairs.map(([a, , k]) => `${at.x(a)},${at.y(line.high[k])}`);
        const down = pairs.map(([a, , k]) => `${at.x(a)},${at.y(line.low[k])}`).reverse();
        svg.append(draw("polygon", { points: [...up, ...down].join(" "), fill: colour, opacity: 0.18 }));
      }
      const still = pairs.every((pair) => pair[0] === pairs[0][0]);
      if (still && pairs.length > 1 && labels.fromZero) {  // it costs nothing: a line at its final value
        const last = pairs[pairs.length - 1];
        svg.append(draw("line", { x1: at.x(x[0]), x2: at.x(x[1]), y1: at.y(last[1]), y2: at.y(last[1]), stroke: colour,
          "stroke-width": 2, "stroke-dasharray": "6 4" }));
        points.push({ line, value: last, px: at.x(last[0]), py: at.y(last[1]) });
        continue;
      }
      svg.append(draw("polyline", { points: pairs.map(([a, b]) => `${at.x(a)},${at.y(b)}`).join(" "), fill: "none",
        stroke: colour, "stroke-width": line.strong ? 2.6 : 1.8, "stroke-dasharray": line.dash || null, opacity: line.faint ? 0.5 : 1 }));
      for (const value of pairs) {
        if (pairs.length < 3 || (labels.mark && labels.mark(line, value[2]))) {
          svg.append(draw("circle", { cx: at.x(value[0]), cy: at.y(value[1]), r: labels.mark ? 6 : 4, fill: labels.mark ? "none" : colour, stroke: colour, "stroke-width": 2 }));
        }
        points.push({ line, value, px: at.x(value[0]), py: at.y(value[1]) });
      }
    }
    const spot = draw("circle", { r: 6, fill: "none", stroke: "currentColor", "stroke-width": 2, visibility: "hidden" });
    svg.append(spot);
    let now = -1;
    const show = (k) => {
      now = k;
      const { line, value, px, py } = points[k];
      fill(spot, { cx: px, cy: py, visibility: "visible" }, []);
      readout.textContent = `${line.name}: ${labels.y} ${labels.value ? labels.value(value[1]) : figure(value[1])} at ${labels.name ? labels.name(value[0]) : plain(value[0])} ${labels.unit || labels.x}`;
    };
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => {
      const area = svg.getBoundingClientRect(), scale = width / area.width;
      const mx = (event.clientX - area.left) * scale, my = (event.clientY - area.top) * scale;
      let best = -1, least = 40 ** 2;
      points.forEach((point, k) => {
        const far = (point.px - mx) ** 2 + (point.py - my) ** 2;
        if (far < least) { least = far; best = k; }
      });
      if (best >= 0) show(best);
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !points.length) return;
      event.preventDefault();
      show((now + step + points.length) % points.length);
    });
    panel.replaceChildren(svg);
    keys.replaceChildren(legend(shown.map((line) => ({ name: line.name, colour: ink(line.colour), dash: line.dash, dot: line.x.length === 1 }))));
  });
}

// All methods: how far the algorithm is ahead of each rival

function pairedChart(box) {
  const { rivals, over, axis } = data.paired, names = Object.keys(rivals);
  if (!names.length) return;
  const panel = make("div");
  box.append(panel, make("p", { class: "note" }, over === "seeds"
    ? "A dot is a seed, the diamond their mean, the line its 95% interval. An interval that leaves out zero is hardly chance."
    : "A dot is a client, the diamond their mean, the line its 95% interval over clients. One seed says little about others."));
  responsive(panel, (width) => {
    const row = 34, left = Math.min(150, width * 0.33), right = 14, height = row * names.length + 48;
    const values = names.flatMap((name) => [...rivals[name].each, rivals[name].low, rivals[name].high, 0]);
    const x = range(values), at = (value) => left + (value - x[0]) / (x[1] - x[0]) * (width - left - right);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": names.map((name) =>
      `${name}: ${signed(rivals[name].mean)}${rivals[name].low === null ? "" : `, from ${signed(rivals[name].low)} to ${signed(rivals[name].high)}`}`).join("; ") });
    for (const value of ticks(x[0], x[1], 5)) {
      svg.append(draw("line", { class: value === 0 ? "axis" : "grid", x1: at(value), x2: at(value), y1: 0, y2: height - 42 }),
        draw("text", { class: "faint", x: at(value), y: height - 26, "text-anchor": "middle" }, plain(value)));
    }
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, axis));
    names.forEach((name, k) => {
      const y = row * k + row / 2, one = rivals[name], colour = ink(method[name] ? method[name].colour : "#999999");
      svg.append(draw("text", { x: 0, y: y + 4 }, name));
      for (const value of one.each) svg.append(draw("circle", { cx: at(value), cy: y, r: over === "seeds" ? 4 : 2.5, fill: colour, opacity: 0.45 }));
      if (one.low !== null) svg.append(draw("line", { x1: at(one.low), x2: at(one.high), y1: y, y2: y, stroke: "currentColor", "stroke-width": 2 }));
      svg.append(draw("path", { d: `M${at(one.mean) - 6},${y}l6,-6l6,6l-6,6z`, fill: "currentColor" },
        draw("title", {}, `${signed(one.mean)}`)));
    });
    panel.replaceChildren(svg);
  });
}

// Tiers

function dotChart(box) {
  if (data.dots.length < 2) return;
  const panel = make("div"), names = data.methods.map((one) => one.name);
  const keys = make("div");
  box.append(panel, keys);
  responsive(panel, (width) => {
    keys.replaceChildren(legend(names.map((name) => ({ name, colour: ink(method[name].colour), dot: true }))));
    const spreads = data.dots.some((tier) => Object.values(tier.spread).some(Boolean));  // bars need lines of their own
    const row = Math.max(34, spreads ? 9 * names.length + 16 : 0), left = Math.min(190, width * 0.4), right = 14, height = row * data.dots.length + 48;
    const x = range(data.dots.flatMap((tier) => names.flatMap((name) => [tier.values[name], tier.values[name] === undefined ? null : tier.values[name] + (tier.spread[name] || 0),
      tier.values[name] === undefined ? null : tier.values[name] - (tier.spread[name] || 0)])));
    const at = (value) => left + (value - x[0]) / (x[1] - x[0]) * (width - left - right);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${data.metric} of every method by tier; the table above has the same figures` });
    for (const value of ticks(x[0], x[1], width < 500 ? 3 : 6)) {
      svg.append(draw("line", { class: "grid", x1: at(value), x2: at(value), y1: 0, y2: height - 42 }),
        draw("text", { class: "faint", x: at(value), y: height - 26, "text-anchor": "middle" }, plain(value)));
    }
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, `test ${data.metric}`));
    data.dots.forEach((tier, k) => {
      const y = row * k + row / 2, known = names.map((name) => tier.values[name]).filter((value) => value !== undefined);
      if (k) svg.append(draw("line", { class: "grid", x1: 0, x2: width - right, y1: row * k, y2: row * k }));
      svg.append(draw("text", { x: 0, y: y + 4 }, tier.label));
      if (known.length > 1 && !spreads) svg.append(draw("line", { class: "span", x1: at(Math.min(...known)), x2: at(Math.max(...known)), y1: y, y2: y }));
      names.forEach((name, m) => {
        const value = tier.values[name];
        if (value === undefined) return;
        const colour = ink(method[name].colour), dy = y + (m - (names.length - 1) / 2) * (spreads ? 9 : 0), spread = tier.spread[name];
        if (spread) svg.append(draw("line", { x1: at(value - spread), x2: at(value + spread), y1: dy, y2: dy, stroke: colour, "stroke-width": 2 }));
        svg.append(draw("circle", { cx: at(value), cy: dy, r: 4.5, fill: colour }, draw("title", {}, `${name}, ${tier.label}: ${figure(value)}`)));
      });
    });
    panel.replaceChildren(svg);
  });
}

function curvesChart(box) {
  const names = data.methods.map((one) => one.name).filter((name) => data.curves[name].length);
  if (!names.length) return;
  const every = names.flatMap((name) => data.curves[name]);
  const costs = Object.entries(data.costs).filter(([cost]) => every.some((one) => one[cost].some((value) => value !== null)));
  if (!costs.length) return;
  const tiers = data.tiers.filter((tier) => every.some((one) => one.by_tier[tier]));
  const state = { cost: costs[0][0], tier: "" };
  const chart = make("div");
  const tier = choice("of ", [["", "all clients"], ...(tiers.length > 1 ? [["*", `every tier (${names[0]})`], ...tiers.map((one, k) => [String(k), one])] : [])],
    (value) => { state.tier = value; show(); });
  const cost = choice("against ", costs, (value) => { state.cost = value; show(); });
  cost.select.id = "against"; tier.select.id = "tier";
  box.append(...document.getElementById("progress") ? [] : [make("h3", { id: "curves" }, "Progress")], make("div", { class: "controls" }, tier.label, cost.label), chart,
    make("p", { class: "note" }, `A dot is a method with a single point, such as one that is fine-tuned at the end. A dashed line is a method without that cost.${names.some((name) => name.startsWith("perm")) ? " The curve of PERM begins after its warm-up: before, clients have no models of their own." : ""}${every.length > names.length ? " A band is the range over seeds." : ""} Simulated seconds are those of the profile's devices and networks, at 10\u2079 multiply-adds a second; a round takes as long as its slowest host.`));
  function line(name, label, runs, pick, colour, dash) {
    const points = Math.min(...runs.map((run) => run.all.length));
    const over = (k, of) => runs.map((run) => of(run)[k]).filter((value) => value !== null && value !== undefined);
    const mean = (list) => list.length ? list.reduce((a, b) => a + b, 0) / list.length : null;
    const at = [...Array(points).keys()], several = runs.length > 1;
    return { name: label, colour, dash, strong: name === names[0], x: at.map((k) => mean(over(k, (run) => run[state.cost]))), y: at.map((k) => mean(over(k, pick))),
      low: several ? at.map((k) => Math.min(...over(k, pick))) : null, high: several ? at.map((k) => Math.max(...over(k, pick))) : null };
  }
  function show() {
    let lines;
    if (state.tier === "*") {
      const palette = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D1F", "#6A3D9A"];
      lines = tiers.map((one, k) => line("", one, data.curves[names[0]], (run) => run.by_tier[one] || [], palette[k % palette.length], k < palette.length ? null : "6 3"));
    } else {
      const one = state.tier === "" ? null : tiers[+state.tier];
      lines = names.map((name) => line(name, name, data.curves[name], (run) => one === null ? run.all : run.by_tier[one] || [], method[name].colour, null));
    }
    const what = data.costs[state.cost];
    lineChart(chart, lines, { x: what, y: `test ${data.metric}`, unit: what, fromZero: true, about: `test ${data.metric} against ${what}` });
  }
  show();
}

// Who learns from whom

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"]
  .map((text) => [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
function shade(part) {
  const at = Math.min(0.9999, Math.max(0, part)) * (VIRIDIS.length - 1), k = Math.floor(at);
  return VIRIDIS[k].map((low, channel) => low + (VIRIDIS[k + 1][channel] - low) * (at - k));
}
function mapChart(box) {
  if (!data.maps.length) return;
  const state = { map: data.maps[0], sort: null, at: null }, known = new Set(data.clients.map((client) => client.id));
  const canvas = make("canvas", { id: "alpha", tabindex: "0", role: "application", "aria-roledescription": "map",
    "aria-label": "Mixing weights: a row is a client, a column whom it learns from. Arrow keys move from cell to cell." });
  const readout = make("p", { class: "readout", id: "cell", role: "status" }, "Point at a cell, or use the arrow keys.");
  const open = make("span", { id: "open" }), spot = make("div", { class: "spot", hidden: "" }), blocks = make("div", { class: "blocks", "aria-hidden": "true" });
  const side = make("div");
  const orders = { group: "group, then tier", tier: "tier, then group", client: "client", alike: "similarity" };
  const sort = choice("Sort by ", [], (value) => { state.sort = value; show(); });
  sort.select.id = "sort";
  const seed = choice("Run ", data.maps.map((map, k) => [String(k), map.label]), (value) => { state.map = data.maps[+value]; options(); show(); });
  const controls = make("div", { class: "controls" }, data.maps.length > 1 ? seed.label : null, sort.label);
  box.append(controls, make("div", { class: "reading" }, readout, open), blocks, make("div", { class: "field" }, canvas, spot), side);
  function options() {
    const { map } = state, several = map.tiers && new Set(map.tiers).size > 1;
    const able = map.bin ? [] : ["group", "tier", "client", "alike"].filter((name) => (name !== "group" || map.groups) && (name !== "tier" || several));
    sort.label.hidden = !able.length;
    sort.select.replaceChildren(...able.map((value) => make("option", { value }, orders[value])));
    state.sort = able[0] || null;
    if (!map.groups && able.includes("alike")) sort.select.value = state.sort = "alike";
  }
  function order() {
    const { map, sort: by } = state, ids = [...map.rows.keys()];
    if (map.bin || by === "client") return ids;
    if (by === "alike") return map.alike;
    const group = (i) => map.groups ? map.groups[i] : 0, rank = (i) => data.tiers.indexOf(map.tiers[i]);
    const keys = by === "tier" ? [rank, group] : [group, rank];
    return ids.sort((a, b) => keys[0](a) - keys[0](b) || keys[1](a) - keys[1](b) || a - b);
  }
  function name(i) {
    const { map } = state;
    if (map.bin) return `clients ${map.order.slice(i * map.bin, (i + 1) * map.bin).slice(0, 3).join(", ")}, \u2026`;
    const about = [map.tiers && map.tiers[i], map.groups ? `group ${map.groups[i]}` : null].filter(Boolean).join(", ");
    return `client ${i}${about ? ` (${about})` : ""}`;
  }
  let ids = [], weights = [];
  function show() {
    const { map } = state, count = map.rows.length;
    ids = order();
    weights = map.rows.map(([columns, values]) => new Map(columns.map((j, k) => [j, values[k] / 10000])));
    const cell = Math.max(1, Math.floor(1200 / count));
    canvas.width = canvas.height = cell * count;
    const brush = canvas.getContext("2d");
    ids.forEach((i, row) => ids.forEach((j, column) => {
      brush.fillStyle = `rgb(${shade((weights[i].get(j) || 0) / (map.bright || 1)).map(Math.round).join(",")})`;
      brush.fillRect(column * cell, row * cell, cell, cell);
    }));
    const label = state.sort === "tier" ? (i) => map.tiers[i] : state.sort === "group" ? (i) => `group ${map.groups[i]}` : null;
    const sizes = new Map();
    if (label) ids.forEach((i) => sizes.set(label(i), (sizes.get(label(i)) || 0) + 1));
    blocks.replaceChildren(...(sizes.size > 12 ? [] : [...sizes].map(([text, size]) => {
      const block = make("span", { title: text }, text);
      block.style.flexGrow = size;
      return block;
    })));
    if (label) {
      brush.fillStyle = "#ffffff";
      const thick = Math.max(2, Math.round(canvas.width / 300));
      ids.forEach((i, row) => {
        if (row && label(i) !== label(ids[row - 1])) {
          brush.fillRect(0, row * cell - thick / 2, canvas.width, thick);
          brush.fillRect(row * cell - thick / 2, 0, thick, canvas.width);
        }
      });
    }
    canvas.dataset.order = ids.join(" ");
    state.at = null;
    spot.hidden = true;
    open.replaceChildren();
    const scale = make("div", { class: "scale" });
    scale.style.background = `linear-gradient(to right, ${VIRIDIS.map((c) => `rgb(${c.join(",")})`).join(",")})`;
    side.replaceChildren(make("p", { class: "note" }, `A row is a client, a column whom it learns from; both are in the same order. Dark is 0, yellow ${figure(map.bright)}${map.bright < map.largest ? ` and more (up to ${figure(map.largest)})` : ""}.`), scale,
      make("p", { class: "note" }, map.bin ? `${map.order.length} clients, ${map.bin} to a cell, by group and tier where they are known.`
        : `${label ? "White lines separate the blocks. " : ""}The section of each client lists the same weights.`));
  }
  function mark(row, column) {
    const count = ids.length;
    state.at = [row, column] = [Math.min(count - 1, Math.max(0, row)), Math.min(count - 1, Math.max(0, column))];
    const i = ids[row], j = ids[column], weight = weights[i].get(j) || 0;
    readout.textContent = `${name(i)} learns ${figure(weight)} from ${i === j && !state.map.bin ? "itself" : name(j)}`;
    canvas.dataset.cell = `${i} ${j} ${weight}`;
    spot.hidden = false;
    for (const [side, at] of [["left", column], ["top", row], ["width", 1], ["height", 1]]) spot.style[side] = `${100 * at / count}%`;
    if (ids.length && !state.map.bin && known.has(i)) open.replaceChildren(make("a", { href: `#client-${i}` }, `Open client ${i}`));
  }
  function point(event) {
    const area = canvas.getBoundingClientRect(), size = area.width / ids.length;
    mark(Math.floor((event.clientY - area.top) / size), Math.floor((event.clientX - area.left) / size));
  }
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);  // a finger does not move before it taps
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" && state.at && !state.map.bin) return go(ids[state.at[0]]);
    if (!step) return;
    event.preventDefault();
    const [row, column] = state.at || [0, 0];
    state.at ? mark(row + step[0], column + step[1]) : mark(0, 0);
  });
  // A tap only reads a cell; the link below the map opens the client.
  canvas.addEventListener("click", (event) => { if (event.pointerType !== "touch" && state.at && !state.map.bin) go(ids[state.at[0]]); });
  options();
  show();
}

function outlookChart(box) {
  if (!data.outlook.length) return;
  const shares = data.outlook[0].share, several = data.outlook.length > 1, chart = make("div");
  const name = (k) => k < 0 || k >= shares.length || k % 1 ? "" : shares[k] === 0 ? "alone" : shares[k] >= 1e6 ? "all" : String(shares[k]);
  const colours = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"];
  box.append(chart, make("p", { class: "note" }, "The mean loss on validation data after one step, minus the loss of learning alone: lower is better. The ring is what was chosen, the band the standard error over clients. This is the last look of the run."));
  lineChart(chart, data.outlook.map((one, k) => ({ name: several ? `seed ${one.seed}` : "loss minus that of learning alone", colour: colours[k % colours.length], chosen: one.chosen,
    x: shares.map((_, at) => at), y: one.gain, low: one.gain.map((gain, at) => gain - one.error[at]), high: one.gain.map((gain, at) => gain + one.error[at]) })),
  { x: "difference worth sharing, in units of noise", y: "loss minus alone", unit: "of sharing", about: "loss one step ahead against how much is shared", ticks: shares.map((_, k) => k), name,
    value: (value) => value.toFixed(4), mark: (line, k) => k === line.chosen });
}

// A section for each client, one at a time

let go = () => {};
function clientChart(box) {
  if (!data.clients.length) return;
  const ids = data.clients.map((client) => client.id), body = make("section", { id: "client", "aria-live": "polite" });
  const pick = choice("Client ", data.clients.map((client) => [String(client.id), `${client.id} (${[client.tier, client.group === null ? null : `group ${client.group}`].filter(Boolean).join(", ")})`]), (value) => show(+value));
  pick.select.id = "pick";
  const step = (by) => () => show(ids[(ids.indexOf(+pick.select.value) + by + ids.length) % ids.length]);
  box.append(make("div", { class: "controls" }, pick.label, make("button", { type: "button", onclick: step(-1) }, "previous"), make("button", { type: "button", onclick: step(1) }, "next")), body);
  const grouped = data.clients.some((client) => client.group !== null);
  const link = (file) => make("li", {}, make("a", { href: file.split("/").map(encodeURIComponent).join("/") }, file));
  function show(id) {
    const client = data.clients[ids.indexOf(id)];
    if (!client) return;
    pick.select.value = String(id);
    const facts = [...Object.entries(client.scores).map(([name, value]) => [`${data.metric} ${name}`, figure(value)]), ...client.facts];
    const most = client.partners.length ? client.partners[0][1] : 1, others = new Map(data.clients.map((one) => [one.id, one]));
    const rows = client.partners.map(([j, weight]) => {
      const bar = make("span", { class: "bar" }), other = others.get(j);
      bar.style.width = `${100 * weight / most}%`;
      return make("tr", {}, make("th", { scope: "row" }, make("a", { href: `#client-${j}` }, j === id ? `${j} (itself)` : String(j))),
        make("td", {}, other ? other.tier : "-"), grouped ? make("td", {}, other && other.group !== null ? String(other.group) : "-") : null, make("td", {}, figure(weight)), make("td", {}, bar));
    });
    const curve = make("div");
    body.replaceChildren(make("h3", { id: `client-${id}`, tabindex: "-1" }, `Client ${id}`),
      make("div", { class: "split" },
        make("div", {}, make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])),
          client.files.length ? make("p", {}, "Its model:") : null, client.files.length ? make("ul", {}, ...client.files.map(link)) : null),
        make("div", {}, rows.length ? make("p", {}, `Learns from ${client.learns_from} clients${client.learns_from > rows.length ? `, the first ${rows.length}` : ""}:`) : null,
          rows.length ? make("div", { class: "scroll" }, make("table", { class: "partners" }, make("thead", {}, make("tr", {}, ...["client", "tier", ...(grouped ? ["group"] : []), "weight"].map((name) => make("th", { scope: "col" }, name)), make("td", { "aria-hidden": "true" }))), make("tbody", {}, ...rows))) : null)),
      curve);
    if (client.curve.length > 1) {
      const main = data.methods[0], tier = (data.curves[main.name][0] || { by_tier: {} }).by_tier[client.tier];
      const epochs = (data.curves[main.name][0] || {}).epoch;
      lineChart(curve, [{ name: `client ${id}`, colour: main.colour, strong: true, x: data.epochs, y: client.curve },
        ...(tier ? [{ name: `mean of tier ${client.tier}`, colour: "#888888", dash: "5 4", x: epochs, y: tier }] : [])],
      { x: "epoch", y: `test ${data.metric}`, unit: "epochs", whole: true, about: `${data.metric} of client ${id} by epoch` });
    }
  }
  go = (id) => { location.hash = `client-${id}`; };
  function follow() {
    const found = /^#client-(\d+)$/.exec(location.hash);
    if (found && ids.includes(+found[1])) {
      show(+found[1]);
      const head = document.getElementById(`client-${found[1]}`);
      head.scrollIntoView();
      head.focus({ preventScroll: true });
    }
  }
  addEventListener("hashchange", follow);
  show(ids[0]);
  follow();
}

// Tables that can be sorted

function value(cell) {
  const text = cell.textContent.trim(), number = parseFloat(text.replace(/,/g, ""));
  if (/^\d+\/\d+$/.test(text)) return text.split("/").reduce((a, b) => a / b);
  return text === "-" ? -Infinity : Number.isNaN(number) ? text : number;
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button", onclick: () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a.cells[column]), value(b.cells[column])];
        const order = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1;
        return down ? -order : order;
      });
      body.append(...rows);
    } }, head.textContent);
    head.replaceChildren(button);
  });
}
if (data.clients && data.clients.length) {
  const known = new Set(data.clients.map((client) => String(client.id))), table = document.querySelector("#clients ~ .scroll table");
  if (table) for (const row of table.tBodies[0].rows) {
    const head = row.cells[0], id = head.textContent;
    if (known.has(id)) head.replaceChildren(make("a", { href: `#client-${id}` }, id));
  }
}

// The colour of a method stands before its name in tables, as in the charts

for (const head of document.querySelectorAll("main th")) {
  const one = method[head.textContent];
  if (!one) continue;
  const dot = make("i"), paint = () => { dot.style.background = ink(one.colour); };
  (head.querySelector("button, a") || head).prepend(dot);
  redraws.push(paint);
  paint();
}

// The section that is being read is marked in the list of sections

const links = [...document.querySelectorAll("nav a")], heads = links.map((link) => document.getElementById(link.hash.slice(1)));
function follow() {
  const now = heads.findLastIndex((head) => head && head.getBoundingClientRect().top < innerHeight / 3);
  links.forEach((link, k) => k === now ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"));
}
addEventListener("scroll", follow, { passive: true });
follow();

// Dark or light

const theme = make("button", { type: "button", id: "theme", "aria-label": "Dark page", "aria-pressed": String(isDark()), onclick: () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  repaint();
} }, "\u25D0");
function repaint() {
  theme.setAttribute("aria-pressed", String(isDark()));
  redraws.forEach((again) => again());
}
dark.addEventListener("change", repaint);
document.querySelector("nav").append(theme);

const CHARTS = { paired: pairedChart, dots: dotChart, curves: curvesChart, outlook: outlookChart, client: clientChart, map: mapChart };
for (const [name, chart] of Object.entries(CHARTS)) if (place(name)) chart(place(name));
function unfold() {  // a link to a part that is folded opens it
  const target = document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") target.open = true;
}
addEventListener("hashchange", unfold);
unfold();
root.dataset.ready = "true";
})();
