"use strict";
/* The page about runs. A page with data is a report; a page without data asks its server for updates each second.
   Every text of a run is inserted as text, never as HTML. The page uses no library and loads nothing. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const LIVE = DATA.state === null;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const GREY = "#8a9099";
const MARKED = 60; // most points of a curve whose points have marks
const RANKS = ["act now", "cannot be read", "watch", "too short to judge", "no verdict", "healthy"]; // words of a verdict
const COLOUR = { "act now": "bad", "cannot be read": "bad", watch: "warn", healthy: "good" };
const GRAVITY = Object.values(DATA.causes || {}).flat(); // names of alarms, the gravest first
const CODE = /(`[^`]+`|verl-precision [a-z]+(?: [^\s,;()]+)*|\+?[a-z_][\w.\/]*=[^\s,;)]+)/;
const dark = matchMedia("(prefers-color-scheme: dark)");
const page = { version: 0, runs: [], curves: {}, expected: [], missing: [] };
const hidden = new Set(); // curves that are not drawn
const figures = new Map(); // name of a panel -> its figure on the page
const drawn = {}; // part of the page -> the content from which it was made

const $ = (id) => document.getElementById(id);

/* ---- texts ---- */

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "colour") element.style.background = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/* Return a number with three digits, from 1000 to a million as an integer; as `number_text` in Python. */
function numberText(given, digits = 3) {
  const value = Number(given), size = Math.abs(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  if (size >= 999.5 && size < 1e6) return value.toFixed(0);
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  if (value === 0 || (exponent >= -4 && exponent < digits)) return String(Number(value.toPrecision(digits)));
  return `${Number(mantissa)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

function durationText(seconds) {
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60), hours = seconds / 3600;
  if (minutes < 100) return `${minutes} min`;
  if (hours < 48) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${Math.floor(hours % 24)} h`;
}

/* Make a part of the page again if its content has changed; the focus stays in its place. */
function fill(id, content, build) {
  const key = JSON.stringify([dark.matches, content]);
  if (drawn[id] === key) return;
  drawn[id] = key;
  const place = $(id), focus = place.contains(document.activeElement) ? document.activeElement.id : "";
  place.replaceChildren(...[build()].flat());
  if (focus && $(focus)) $(focus).focus();
}

const pathParts = (path) => path.split(/(?<=[\/_])/).flatMap((part) => [part, make("wbr")]);
const counted = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
const chip = (run) => make("i", { class: "chip", colour: inkOf(run.colour, dark.matches) });
const whole = (text) => text.split(/(\S*\de-\d\S*)/).map((part, at) => (at % 2 ? make("span", { class: "whole" }, part) : part)); // no line breaks in 1e-05
const inCode = (text) => text.split(CODE).map((part, at) => (at % 2 ? make("code", {}, part.replaceAll("`", "")) : part));
const explain = (run) => make("code", {}, `verl-precision explain --run ${shellText(run.path)}`);
const shellText = (path) => (/^[\w@%+=:,.\/-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`);

/* ---- verdicts, and the bars of numbers ---- */

const verdictOf = (run) => (run.standing.state === "unreadable" ? { word: "cannot be read", reason: run.problem, action: "" }
  : run.verdict || { word: "no verdict", reason: "this server is older than the verdict", action: "" });
const rank = (run) => RANKS.indexOf(verdictOf(run).word);
const sickFirst = () => [...page.runs].sort((one, other) => rank(one) - rank(other));
const badge = (run) => make("span", { class: `badge ${COLOUR[verdictOf(run).word] || ""}` }, verdictOf(run).word);

function showVerdicts() {
  const runs = sickFirst();
  fill("verdicts", runs.map((run) => [run.id, run.name, run.path, run.colour, verdictOf(run)]), () => runs.map((run) => {
    const { reason, action } = verdictOf(run);
    return make("li", {}, badge(run), make("a", { class: "name", href: `#run-${run.id}` }, chip(run), pathParts(run.name)),
      make("span", { class: "why" }, whole(reason), action ? [". ", make("b", {}, "Do: "), inCode(action), " ", copyButton(action)] : ""));
  }));
}

/* Return a button that copies the first code of a text; null if it has none. */
function copyButton(text) {
  const copied = text.split(CODE)[1]?.replaceAll("`", "");
  const copy = ({ target }) => navigator.clipboard.writeText(copied).then(() => { target.textContent = "copied"; }, (error) => { target.textContent = error.message; });
  return copied ? make("button", { class: "copy", title: copied, onclick: copy }, "copy") : null;
}

/* Return the bars of a metric `one or another`: those of every run, and the growth above its baseline that a run may have. */
function barsOf(metric, run) {
  const names = metric.split(" or ");
  const known = names.flatMap((name) => (DATA.limits || {})[name] || []), allowed = names.map((name) => run?.allowed?.[name]).find((value) => value !== undefined);
  return [...known, ...(allowed === undefined ? [] : [{ word: "growth", above: allowed, run }])];
}

const barAt = (bar) => Number(bar.above ?? bar.below ?? bar["down to"]);
const barText = (bar) => `${bar.word}: ${["above", "below", "down to"].find((side) => side in bar)} ${numberText(barAt(bar))}`;
const isBeyond = (bar, value) => (bar.above !== undefined ? value > barAt(bar) : bar.below !== undefined ? value < barAt(bar) : value <= barAt(bar));

function nowOf(run) {
  return Object.entries(DATA.now || {}).flatMap(([title, curves]) => {
    const curve = curves.find((each) => run.summary[each]), [name, label] = (curve || "").split(/\/(.*)/s);
    if (!curve) return [];
    const value = Number(run.summary[curve][2]), panel = DATA.panels.find((each) => each.name === name);
    return [[title, numberText(value), barsOf(panel.metrics[label], run).filter((bar) => isBeyond(bar, value)).map(barText).join(", ")]];
  });
}

/* ---- the top, alarms, tables ---- */

function showRuns() {
  const content = sickFirst().map((run) => ({ ...run, summary: nowOf(run), standing: { ...run.standing, age: 0 }, off: hidden.has(run.curve) }));
  fill("runs", content, () => (page.runs.length ? sickFirst().map(runCard) : make("p", {}, "There is no run yet.")));
  for (const run of page.runs) {
    const place = $(`age-${run.id}`);
    if (!place || run.standing.age === null) continue;
    const age = run.standing.age + (performance.now() - page.received) / 1000;
    place.textContent = `newest row ${durationText(Math.round(age))} ago`;
  }
}

function runCard(run) {
  const { state, step, total, step_seconds: each, seconds_left: left } = run.standing;
  const bad = state === "stopped growing" || state === "unreadable";
  const words = { waiting: "waiting to begin", unreadable: "" }[state] ?? state;
  const progress = [
    step === null ? "" : `step ${step}${total ? ` of ${total}` : ""}`,
    each === null ? "" : `${durationText(each)} a step`,
    left === null ? "" : `${durationText(left)} left`,
  ];
  const box = { type: "checkbox", id: `show-${run.id}`, checked: !hidden.has(run.curve), onchange: (event) => toggle(run, event.target.checked) };
  const alarms = run.alarms.map((alarm) => [" · ", make("a", { class: "bad", href: `#${alarmId(run, alarm)}` }, `${alarm.name} at step ${alarm.step}`)]);
  return make(
    "section", { class: "card", id: `run-${run.id}`, "data-state": state },
    make("div", { class: "head" },
      make("label", {}, make("input", box), " ", chip(run), make("b", {}, pathParts(run.name))),
      badge(run), make("span", { class: bad ? "bad" : "", id: `state-${run.id}` }, words)),
    total ? make("progress", { max: total, value: step, "aria-label": `steps of ${run.name}` }) : null,
    make("div", {}, make("span", { id: `progress-${run.id}` }, progress.filter(Boolean).join(" · ")), " ", LIVE && run.standing.age !== null ? make("small", { id: `age-${run.id}` }) : null),
    make("dl", {}, nowOf(run).map(([title, text, beyond]) => make("div", {}, make("dt", {}, title), make("dd", { "data-now": title, class: beyond ? "bad" : null }, text), beyond ? make("small", { class: "bad" }, whole(beyond)) : null))),
    make("div", {}, run.alarms.length ? [make("span", { class: "bad" }, `alarms: ${run.alarms.length}`), ...alarms.flat()] : step === null ? "" : make("span", { class: "good" }, "no alarm")),
    run.problem ? make("div", { class: "bad" }, run.problem) : null,
    make("small", {}, pathParts(run.path), run.notes.map((note) => [make("br"), note]).flat()),
  );
}

function toggle(run, shown) {
  if (shown) hidden.delete(run.curve);
  else hidden.add(run.curve);
  render();
}

const alarmId = (run, alarm) => `alarm-${run.id}-${alarm.name}-${alarm.step}`;

function showAlarms() {
  const content = page.runs.map((run) => [run.id, run.name, run.colour, run.alarms, run.baselineMissing, run.kept]);
  fill("alarms", content, () => {
    const cards = sickFirst().flatMap((run) => alarmGroups(run).map((group) => alarmCard(run, group)));
    const calm = page.runs.filter((run) => run.standing.step !== null && (run.baselineMissing > 0 || !run.alarms.length));
    return [
      make("div", { class: "grid" }, cards),
      make("ul", {}, calm.map((run) => make("li", {}, chip(run), make("b", {}, run.name), " ",
        run.alarms.length ? "" : make("b", { class: "good" }, "no alarm"), " ",
        run.baselineMissing > 0 ? make("small", {}, `the alarm did not look for growth: the mismatch was measured in ${DATA.baseline - run.baselineMissing} steps, and the baseline needs ${DATA.baseline}`) : ""))),
      make("p", {}, make("small", {}, "These are the alarms of the recorded metrics at the alarm's default settings. In the curves, a full vertical line with a mark is an alarm about that metric; a dotted vertical line is an alarm about another metric. Each line has the colour of its run.")),
    ];
  });
}

/* Return a run's alarms in groups of one cause, the gravest group and the gravest alarm first. */
function alarmGroups(run) {
  const causes = Object.values(DATA.causes || {}), groups = new Map();
  const gravity = (alarm) => (GRAVITY.includes(alarm.name) ? GRAVITY.indexOf(alarm.name) : GRAVITY.length);
  for (const alarm of [...run.alarms].sort((one, other) => gravity(one) - gravity(other) || one.step - other.step)) {
    const cause = causes.find((names) => names.includes(alarm.name)) || alarm.name;
    groups.set(cause, [...(groups.get(cause) || []), alarm]);
  }
  return [...groups.values()];
}

const alarmHead = (alarm) => [make("b", { class: "bad" }, alarm.name), ` at step ${alarm.step}, since step ${alarm.since_step}: `, make("code", {}, alarm.metric), ` = `, whole(`${numberText(alarm.seen)}; ${alarm.normal}`)];

function alarmCard(run, [gravest, ...others]) {
  const [first, ...more] = gravest.advice.try_first, step = gravest.step, began = gravest.since_step;
  return make(
    "section", { class: "card", id: alarmId(run, gravest) },
    make("div", {}, chip(run), make("b", {}, run.name)), make("div", {}, alarmHead(gravest)),
    make("p", {}, gravest.advice.meaning),
    first ? make("p", { class: "first" }, make("b", {}, "Do first: "), inCode(first)) : null,
    more.length ? make("details", {}, make("summary", {}, "Then, strongest first"), make("ol", { start: 2 }, more.map((fix) => make("li", {}, inCode(fix))))) : null,
    gravest.advice.mistake ? make("p", {}, make("b", {}, "The common mistake: "), gravest.advice.mistake) : null,
    others.length ? make("details", { open: others.length < 4 }, make("summary", {}, `${counted(others.length, "other alarm")} of the same cause`), make("ul", {}, others.map((alarm) => make("li", { id: alarmId(run, alarm) }, alarmHead(alarm))))) : null,
    make("p", {},
      run.kept !== null && LIVE ? [make("a", { href: `#tokens-${run.id}-${step}` }, `Tokens of step ${step}`), " · ", make("a", { href: `#tokens-${run.id}-${began}` }, `of step ${began}, where it began`), make("br")] : null,
      make("small", {}, "To find the cause of the gap: ", explain(run))),
  );
}

function showSummary() {
  const runs = page.runs.filter((run) => Object.keys(run.summary).length);
  fill("summary", runs.map((run) => [run.name, run.colour, run.summary]), () => {
    const heads = SUMMARY.map((name) => make("th", { scope: "col" }, name));
    const bodies = DATA.panels.flatMap((panel) => Object.keys(panel.metrics).map((label) => summaryRows(panel, label, runs))).filter(Boolean);
    return [
      make("div", { class: "wide" }, make("table", { class: "blocks" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "left run" }, "run"), heads)), bodies)),
      make("p", {}, make("small", {}, "Mean: over the run's steps, or layers. Ratio: the first run's mean divided by this run's mean. It is 10 if this run's mean is a tenth of the first run's. The ratio is left out if a mean is zero or not a number, or if the two means have different signs.")),
    ];
  });
}

const SUMMARY = ["mean", "ratio", "last", "first", "min", "max", "steps"];
const cell = (head, content, left) => make("td", { class: left ? "left" : null, "data-head": head }, content);

function summaryRows(panel, label, runs) {
  const key = `${panel.name}/${label}`, found = runs.filter((run) => run.summary[key]);
  if (!found.length) return null;
  const first = Number(found[0].summary[key][0]);
  const rows = found.map((run, number) => {
    const [mean, begin, last, low, high, steps] = run.summary[key], ratio = first / Number(mean);
    const cells = [mean, number && Number.isFinite(ratio) && ratio > 0 ? ratio : null, last, begin, low, high];
    return make("tr", {}, make("td", { class: "left run" }, chip(run), run.name),
      [...cells.map((value) => (value === null ? "" : numberText(value))), String(steps)].map((text, at) => cell(SUMMARY[at], text)));
  });
  return make("tbody", { "data-curve": key }, make("tr", {}, make("th", { scope: "rowgroup", class: "left", colspan: 8 }, Object.keys(panel.metrics).length > 1 ? `${panel.title}: ${label}` : panel.title, " ", make("small", {}, panel.unit))), rows);
}

/* ---- curves ---- */

const NS = "http://www.w3.org/2000/svg";

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* Return a colour that can also be seen on a dark background. */
function inkOf(colour, night) {
  if (!night) return colour;
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return "#" + parts.map((part) => Math.round(part + (255 - part) * 0.35).toString(16).padStart(2, "0")).join("");
}

function seriesOf(panel) {
  const names = [...new Set(page.runs.map((run) => run.curve))].filter((name) => !hidden.has(name) && page.curves[name]);
  return names.flatMap((name) => Object.keys(panel.metrics).flatMap((label, number) => {
    const found = page.curves[name][`${panel.name}/${label}`];
    if (!found) return [];
    const [steps, values, lows, highs] = found;
    const colour = page.runs.find((run) => run.curve === name).colour;
    return [{ name, label, colour, dash: DASHES[number], steps, values: values.map(Number), lows: lows && lows.map(Number), highs: highs && highs.map(Number) }];
  }));
}

function niceStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function linearTicks(low, high, count, whole) {
  const step = Math.max(niceStep(high - low || 1, count), whole ? 1 : 0);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, base) {
  const from = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), to = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  if (to - from < 1 && base === 10) {
    const ticks = linearTicks(low, high, 4, false).filter((tick) => tick >= low);
    if (ticks.length > 1) return ticks;
  }
  if (to - from < 2 && base === 10) {
    const ticks = [];
    for (let power = from - 1; power <= to; power++) for (const factor of [1, 2, 5]) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
    return ticks.filter((tick) => tick >= low && tick <= high);
  }
  const every = Math.max(1, Math.ceil((to - from) / 6));
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, n) => base ** (from + n * every));
}

function drawing(panel, width, height, night) {
  const series = seriesOf(panel);
  const reached = 1.15 * Math.max(...series.map((each) => each.steps[each.steps.length - 1])); // expected curves end here: a run that has just begun fills the plot
  const expected = panel !== DATA.panels[0] ? [] : page.expected.map((curve, number) => {
    const steps = curve.points[0].filter((step) => step <= reached);
    return { name: curve.name, colour: GREY, dash: DASHES[1 + (number % 3)], steps, values: curve.points[1].slice(0, steps.length).map(Number) };
  }).filter((curve) => curve.steps.length);
  const all = [...series, ...expected];
  const positive = series.some((each) => each.values.some((value) => value > 0));
  const log = panel.log > 0 && positive;
  const fits = (value) => Number.isFinite(value) && (!log || value > 0);
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const each of all) {
    left = Math.min(left, each.steps[0]);
    right = Math.max(right, each.steps[each.steps.length - 1]);
    for (const values of [each.values, each.lows, each.highs]) {
      for (const value of values || []) if (fits(value)) { if (value < low) low = value; if (value > high) high = value; }
    }
  }
  const bars = barsIn(panel), shown = bars.filter((bar) => !log || (barAt(bar) < high * 30 && barAt(bar) > low / 30));
  for (const at of low > high ? [] : shown.map(barAt)) { low = Math.min(low, at); high = Math.max(high, at); }
  if (low > high) [low, high] = [0, 1];
  if (!log && low === 0 && high === 0) high = 1;
  const scale = log ? Math.log : (value) => value;
  let [bottom, top] = [scale(low), scale(high)];
  const room = (top - bottom || Math.abs(top) * 0.1 || 1) * 0.06;
  top += room;
  if (log || low !== 0) bottom -= room;
  if (left === right) { left -= 1; right += 1; }
  const ink = night ? "#e6e6e6" : "#202124", line = night ? "#43464c" : "#e1e3e6";
  const frame = { x: 70, y: 14, width: width - 70 - 20, height: height - 14 - 40 };
  const x = (step) => frame.x + ((step - left) / (right - left)) * frame.width;
  const y = (value) => frame.y + (1 - (scale(value) - bottom) / (top - bottom)) * frame.height;
  const svg = shape("svg", { xmlns: NS, viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif", "font-size": 12, fill: ink });
  const unscale = log ? Math.exp : (value) => value;
  for (const tick of log ? logTicks(unscale(bottom), unscale(top), panel.log) : linearTicks(bottom, top, 6, false)) {
    svg.append(shape("line", { x1: frame.x, x2: frame.x + frame.width, y1: y(tick), y2: y(tick), stroke: line }),
      shape("text", { x: frame.x - 6, y: y(tick) + 4, "text-anchor": "end" }, numberText(tick, 6)));
  }
  for (const tick of linearTicks(left, right, Math.max(2, Math.floor(frame.width / 80)), true)) {
    svg.append(shape("line", { x1: x(tick), x2: x(tick), y1: frame.y, y2: frame.y + frame.height, stroke: line }),
      shape("text", { x: x(tick), y: frame.y + frame.height + 16, "text-anchor": "middle" }, String(tick)));
  }
  svg.append(shape("line", { x1: frame.x, x2: frame.x + frame.width, y1: frame.y + frame.height, y2: frame.y + frame.height, stroke: ink }),
    shape("text", { x: frame.x + frame.width / 2, y: frame.y + frame.height + 34, "text-anchor": "middle" }, panel.axis),
    shape("text", { x: 0, y: 0, transform: `translate(12 ${frame.y + frame.height / 2}) rotate(-90)`, "text-anchor": "middle" }, panel.unit));
  for (const run of panel.axis === "step" ? page.runs : []) {
    if (hidden.has(run.curve)) continue;
    for (const alarm of run.alarms) {
      const own = Object.values(panel.metrics).some((metric) => metric.split(" or ").includes(alarm.metric)), at = x(alarm.step);
      if (alarm.step < left || alarm.step > right) continue;
      const colour = inkOf(run.colour, night);
      svg.append(shape("line", { class: "alarm", x1: at, x2: at, y1: frame.y, y2: frame.y + frame.height, stroke: colour, "stroke-width": 1.4, "stroke-dasharray": own ? "" : "2 3", opacity: own ? 0.9 : 0.6 }));
      if (own) svg.append(shape("path", { d: `M${at - 5} ${frame.y - 8}h10l-5 8z`, fill: colour }));
    }
  }
  for (const bar of shown) {
    const colour = bar.run ? inkOf(bar.run.colour, night) : night ? "#ff8a80" : "#b3261e", at = y(barAt(bar)), under = at < frame.y + 14 || ("below" in bar && at < frame.y + frame.height - 14);
    svg.append(shape("line", { class: "limit", x1: frame.x, x2: frame.x + frame.width, y1: at, y2: at, stroke: colour, "stroke-dasharray": "7 4", opacity: 0.8 }),
      shape("text", { x: frame.x + 4, y: at + (under ? 12 : -4), fill: colour, class: "of-limit" }, (bar.run && page.runs.length > 1 ? `${bar.run.name} ` : "") + barText(bar)));
  }
  const longest = Math.max(0, ...series.map((each) => each.steps.length));
  for (const each of [...expected, ...series]) {
    const colour = each.colour === GREY ? GREY : inkOf(each.colour, night);
    if (each.lows) svg.append(shape("path", { class: "band", d: bandPath(each, x, y, fits), fill: colour, opacity: 0.2 }));
    let path = "", pen = false;
    each.values.forEach((value, at) => {
      if (!fits(value)) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(each.steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      const alone = !pen && !fits(each.values[at + 1]);
      if (alone || (longest <= MARKED && each.colour !== GREY)) svg.append(shape("circle", { cx: x(each.steps[at]).toFixed(1), cy: y(value).toFixed(1), r: 2, fill: colour }));
      pen = true;
    });
    svg.append(shape("path", { class: "curve", d: path, fill: "none", stroke: colour, "stroke-width": 1.6, "stroke-dasharray": each.dash, "stroke-linejoin": "round" }));
  }
  return { svg, all, x, y, fits, frame, left, right, log, series, unseen: bars.filter((bar) => !shown.includes(bar)) };
}

/* Return the bars of a panel, each once; of many runs, only the bars that a run's newest value is beyond. */
function barsIn(panel) {
  const found = new Map(), runs = page.runs.filter((run) => !hidden.has(run.curve));
  for (const run of runs) for (const [label, metric] of Object.entries(panel.metrics)) {
    const numbers = run.summary[`${panel.name}/${label}`];
    if (numbers) for (const bar of barsOf(metric, run)) if (!bar.run || runs.length < 4 || isBeyond(bar, Number(numbers[2]))) found.set(`${barText(bar)} ${bar.run?.id}`, bar);
  }
  return [...found.values()];
}

/* Return in words that each curve of a panel has one value at every step; null if one has not, or if an alarm is about it. */
function flatText(panel) {
  const series = seriesOf(panel);
  const still = ({ values, lows, highs }) => [values, lows || [], highs || []].every((row) => row.every((value) => value === values[0]));
  if (!series.length || !series.every(still) || (panel === DATA.panels[0] && page.expected.length)) return null;
  if (page.runs.some((run) => run.alarms.some((alarm) => Object.values(panel.metrics).some((metric) => metric.split(" or ").includes(alarm.metric))))) return null;
  const said = new Map(), several = new Set(series.map((each) => each.label)).size > 1;
  for (const { name, label, values } of series) {
    const counts = page.runs.filter((run) => run.curve === name).map((run) => run.summary[`${panel.name}/${label}`]?.[5] || 0), most = Math.max(...counts);
    const text = numberText(values[0]), { names, lengths } = said.get(text) || { names: [], lengths: [] };
    said.set(text, { names: [...names, several ? `${name} ${label}` : name], lengths: [...lengths, most] });
  }
  return [...said].map(([text, { names, lengths }]) => {
    const [fewest, most] = [Math.min(...lengths), Math.max(...lengths)], who = page.runs.length === 1 && !several ? "" : ` (${names.join(", ")})`;
    return `${text} ${most === 1 ? `in one ${panel.axis}` : `in all ${fewest < most ? `${fewest} to ` : ""}${most} ${panel.axis}s`}${who}`;
  }).join("; ");
}

function bandPath(each, x, y, fits) {
  let path = "", part = [];
  const close = () => {
    const there = part.map((at) => `${x(each.steps[at]).toFixed(1)} ${y(each.highs[at]).toFixed(1)}`);
    const back = part.map((at) => `${x(each.steps[at]).toFixed(1)} ${y(each.lows[at]).toFixed(1)}`).reverse();
    if (part.length) path += `M${[...there, ...back].join("L")}Z`;
    part = [];
  };
  each.steps.forEach((_, at) => (fits(each.lows[at]) && fits(each.highs[at]) ? part.push(at) : close()));
  close();
  return path;
}

function showCurves() {
  const bands = new Set(page.runs.map((run) => run.curve)).size < page.runs.length;
  const long = Object.values(page.curves).some((found) => Object.values(found).some((curve) => curve.length > 2));
  $("about").textContent = (bands || long ? `${bands ? "If an arm has several seeds" : "If a run has many steps"}, the line is a mean${bands ? "" : " over groups of steps"}, and the shade goes from the smallest to the largest value. If a value is not a number, the line has a gap. ` : "")
    + (page.expected.length ? `Grey lines are the expected reward: ${page.expected.map((curve) => `${curve.name} (${curve.path})`).join(", ")}.` : "");
  for (const panel of DATA.panels) {
    const there = Object.values(page.curves).some((found) => Object.keys(panel.metrics).some((label) => found[`${panel.name}/${label}`]));
    if (there && !figures.has(panel.name)) figures.set(panel.name, figureOf(panel));
    const figure = figures.get(panel.name);
    if (!figure) continue;
    figure.flat = there ? flatText(panel) : null;
    figure.element.classList.toggle("flat", figure.flat !== null);
    figure.plot.hidden = figure.flat !== null;
    Object.assign(figure, { stale: true }).element.hidden = !there;
  }
  const order = DATA.panels.map((panel) => figures.get(panel.name)).filter(Boolean).map((figure) => figure.element);
  if (order.some((element, at) => $("curves").children[at] !== element)) $("curves").replaceChildren(...order);
  drawNext();
}

/* Draw one figure at a time, the visible figures first, so that the page stays responsive. */
let drawingNow = false;
function drawNext() {
  if (drawingNow) return;
  const stale = [...figures.values()].filter((figure) => figure.stale && !figure.element.hidden);
  if (!stale.length) { performance.mark("drawn"); return; }
  const seen = stale.find((figure) => { const box = figure.element.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; });
  drawingNow = true;
  setTimeout(() => { drawingNow = false; drawFigure(seen || stale[0]); drawNext(); });
}

function figureOf(panel) {
  const plot = make("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${panel.title} (${panel.unit}) over ${panel.axis}s`, "aria-describedby": "keys" });
  const tip = make("div", { class: "tip", hidden: true }), notes = make("small", { class: "grow" });
  const figure = { panel, plot, tip, notes, stale: true, at: null };
  figure.element = make("figure", { id: `figure-${panel.name}` }, make("h3", {}, panel.title), plot, make("figcaption", { class: "bar" }, notes));
  plot.addEventListener("pointermove", (event) => point(figure, stepAt(figure, event)));
  plot.addEventListener("pointerleave", () => point(figure, null));
  plot.addEventListener("blur", () => point(figure, null));
  plot.addEventListener("click", (event) => { const step = stepAt(figure, event); if (step !== null) openTokens(figure, step, event); });
  plot.addEventListener("keydown", (event) => key(figure, event));
  new ResizeObserver(() => { if (figure.width && Math.abs(plot.clientWidth - figure.width) > 1) { figure.stale = true; drawNext(); } }).observe(plot);
  return figure;
}

function drawFigure(figure) {
  figure.stale = false;
  figure.width = figure.plot.clientWidth || 400;
  const made = drawing(figure.panel, figure.width, 260, dark.matches);
  figure.made = made;
  figure.steps = [...new Set(made.series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const zeros = made.series.filter((each) => each.values.every((value) => value === 0 || (made.log && value < 0)));
  const names = zeros.map((each) => (Object.keys(figure.panel.metrics).length > 1 ? `${each.name} ${each.label}` : each.name));
  const zero = zeros.some((each) => each.values.some((value) => value < 0)) ? "0 or less" : "0";
  const who = names.length === made.series.length && names.length > 1 ? "all" : names.join(", ");
  const labels = [...new Set(made.series.map((each) => each.label))], dashOf = (label) => made.series.find((each) => each.label === label).dash;
  const styles = labels.length < 2 ? [] : labels.map((label) => make("span", { class: "style" }, shape("svg", { width: 28, height: 8, "aria-hidden": true }, shape("line", { x1: 0, x2: 28, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dashOf(label) })), ` ${label} `));
  figure.notes.replaceChildren(...styles, [figure.panel.hint, names.length ? `${zero} at every ${figure.panel.axis}: ${who}` : "", ...made.unseen.map((bar) => `not in the picture: ${bar.run && page.runs.length > 1 ? `${bar.run.name} ` : ""}${barText(bar)}`)].filter(Boolean).join("; "));
  if (figure.flat !== null) figure.notes.replaceChildren(figure.flat);
  figure.plot.replaceChildren(made.svg, figure.tip);
  figure.plot.setAttribute("aria-valuemin", figure.steps[0] ?? 0);
  figure.plot.setAttribute("aria-valuemax", figure.steps[figure.steps.length - 1] ?? 0);
  point(figure, figure.at);
}

function nearest(steps, step) {
  let [from, to] = [0, steps.length - 1];
  while (to - from > 1) { const middle = (from + to) >> 1; if (steps[middle] < step) from = middle; else to = middle; }
  return Math.abs(steps[from] - step) <= Math.abs(steps[to] - step) ? from : to;
}

function stepAt(figure, event) {
  const { made, steps } = figure;
  if (!made || !steps.length) return null;
  const at = event.clientX - figure.plot.getBoundingClientRect().left;
  return steps[nearest(steps, made.left + ((at - made.frame.x) / made.frame.width) * (made.right - made.left))];
}

/* Show the values at a step; for null, show nothing. */
function point(figure, step) {
  figure.at = step;
  figure.plot.querySelector(".cursor")?.remove();
  figure.tip.hidden = step === null || !figure.made;
  if (figure.tip.hidden) return;
  const { made, panel } = figure, several = Object.keys(panel.metrics).length > 1, reach = (made.right - made.left) / 100;
  const cursor = shape("g", { class: "cursor" }, shape("line", { x1: made.x(step), x2: made.x(step), y1: made.frame.y, y2: made.frame.y + made.frame.height, stroke: GREY }));
  const lines = [];
  for (const each of made.all) {
    const place = nearest(each.steps, step), value = each.values[place];
    if (!each.steps.length || Math.abs(each.steps[place] - step) > reach) continue;
    const range = each.lows ? ` (${numberText(each.lows[place])} to ${numberText(each.highs[place])})` : "";
    lines.push([each, `${several && each.label ? `${each.name} · ${each.label}` : each.name}: ${numberText(value)}${range}`]);
    if (made.fits(value)) cursor.append(shape("circle", { cx: made.x(each.steps[place]), cy: made.y(value), r: 3.5, fill: inkOf(each.colour, dark.matches) }));
  }
  const alarms = page.runs.flatMap((run) => (hidden.has(run.curve) ? [] : run.alarms.filter((alarm) => Math.abs(alarm.step - step) <= reach).map((alarm) => `${run.name}: alarm ${alarm.name} at step ${alarm.step}`)));
  made.svg.append(cursor);
  figure.tip.replaceChildren(make("b", {}, `${panel.axis} ${step}`), ...lines.map(([each, text]) => make("div", {}, make("i", { class: "chip", colour: inkOf(each.colour, dark.matches) }), text)), ...alarms.map((text) => make("div", { class: "bad" }, text)));
  const onLeft = made.x(step) > made.frame.x + made.frame.width / 2;
  figure.tip.style.left = onLeft ? `${made.frame.x + 4}px` : "";
  figure.tip.style.right = onLeft ? "" : "18px";
  figure.plot.setAttribute("aria-valuenow", step);
  figure.plot.setAttribute("aria-valuetext", figure.tip.innerText.replaceAll("\n", ", "));
}

function key(figure, event) {
  const { steps } = figure;
  if (!steps?.length) return;
  const at = figure.at === null ? steps.length - 1 : nearest(steps, figure.at), far = Math.max(1, Math.round(steps.length / 20));
  const moves = { ArrowLeft: figure.at === null ? at : at - 1, ArrowRight: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: steps.length - 1 };
  if (event.key === "Enter" || event.key === " ") openTokens(figure, steps[at], null);
  else if (event.key === "Escape") point(figure, null);
  else if (event.key in moves) point(figure, steps[Math.min(steps.length - 1, Math.max(0, moves[event.key]))]);
  else return;
  event.preventDefault();
}

/* ---- tokens ---- */

const view = { run: null, step: null, response: null, chosen: null };

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

function openTokens(figure, step, event) {
  if (figure.panel.axis !== "step") return;
  const shown = page.runs.filter((run) => !hidden.has(run.curve));
  let run = shown.find((each) => each.kept !== null) || shown[0];
  if (event && figure.made) {
    const at = event.clientY - figure.plot.getBoundingClientRect().top;
    const away = (each) => { const value = each.values[nearest(each.steps, step)]; return figure.made.fits(value) ? Math.abs(figure.made.y(value) - at) : Infinity; };
    const [closest] = [...figure.made.series].sort((a, b) => away(a) - away(b));
    const own = shown.filter((each) => closest && each.curve === closest.name);
    run = own.find((each) => each.kept !== null) || own[0] || run;
  }
  if (run) location.hash = `tokens-${run.id}-${step}`;
}

function followHash() {
  const parts = /^#(tokens|response)-(\d+)-(\d+)$/.exec(location.hash);
  if (!parts || !page.runs.length) return;
  const [, what, run, number] = parts;
  view.run = Number(run);
  if (what === "tokens") { view.step = Number(number); showTokens(true).then(() => $("tokens").scrollIntoView()); }
  else openResponse(Number(number));
}

const runOfView = () => page.runs.find((run) => run.id === view.run);

let tokensAsked = ""; // the request whose answer the list shows or waits for
async function showTokens(anew) {
  const able = page.runs.filter((run) => run.kept !== null);
  if (!runOfView() && page.runs.length) view.run = (able[0] || page.runs[0]).id;
  const run = runOfView();
  const about = JSON.stringify([view.run, view.step, view.response?.offset, page.runs.map((each) => [each.id, each.name, each.kept])]);
  const inUse = $("tokens").contains(document.activeElement) && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (!anew && (inUse || tokensAsked === about)) return;
  tokensAsked = about;
  let found = null, problem = "";
  if (LIVE && run && run.kept !== null) {
    try {
      const step = view.step === null ? "" : `&step=${view.step}`;
      found = await (await ask(`responses?run=${run.id}${step}`)).json();
      problem = found.problem;
    } catch (error) { problem = error.message; }
    if (tokensAsked !== about) return; // another request was sent meanwhile
  }
  delete drawn.tokens;
  fill("tokens", about, () => (run ? tokensParts(run, found, problem) : make("p", {}, "There is no run yet.")));
}

function tokensParts(run, found, problem) {
  const change = (values) => { Object.assign(view, values); showTokens(true); };
  const select = (id, options, value, set) => make("select", { id, onchange: (event) => set(event.target.value) }, options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)));
  const bar = make("div", { class: "bar" },
    make("label", {}, "run ", select("tokens-run", page.runs.map((each) => [String(each.id), each.name]), String(view.run), (value) => change({ run: Number(value) }))),
    make("label", {}, "step ", make("input", { id: "tokens-step", type: "number", min: 0, size: 6, value: view.step === null ? "" : view.step, placeholder: "all", onchange: (event) => change({ step: event.target.value === "" ? null : Number(event.target.value) }) })));
  if (!LIVE) return [make("p", { id: "tokens-note" }, run.kept === null ? howToKeep(run) : [`${run.kept} responses were kept. To see them: `, make("code", {}, `verl-precision watch ${shellText(run.path)}`)])];
  if (run.kept === null) return [bar, make("p", { id: "tokens-note" }, howToKeep(run))];
  if (problem) return [bar, make("p", { id: "tokens-note", class: "bad" }, problem)];
  const all = `${counted(found.count, "response")}${found.rows.length < found.count ? `, of which ${found.rows.length} are shown` : ""}`;
  const said = view.step === null ? all : found.step === view.step ? `${counted(found.count, "response")} of step ${found.step}`
    : found.step === null ? "nothing is kept yet" : `nothing was kept at step ${view.step}; ${counted(found.count, "response")} of the nearest step, ${found.step}`;
  const heads = ["step", "", "damage", "lost tokens", "Σ log π - log μ", "largest gap", "reward", "tokens", "turns", "kept as"];
  const rows = found.rows.map((each) => make("tr", { "data-at": each.offset, class: each.offset === view.response?.offset ? "picked" : null },
    [each.step, make("a", { href: `#response-${run.id}-${each.offset}`, id: `see-${run.id}-${each.offset}` }, "tokens"), numberText(each.damage), each.lost, numberText(each.log_weight), numberText(each.largest_gap), each.reward === null ? "" : numberText(each.reward), each.length, each.turns, each.reason].map((content, at) => cell(heads[at], content instanceof Node ? content : String(content), at === 9))));
  return [bar, make("p", { id: "tokens-note" }, `${said}. Damage: how far estimator and mismatch have moved this response's gradient from the plain policy gradient. Lost tokens have an advantage and gave no gradient.`),
    make("div", { class: "wide" }, make("table", { id: "responses", class: "blocks" }, make("thead", {}, make("tr", {}, heads.map((text, at) => make("th", { scope: "col", class: at === 9 ? "left" : null }, text)))), make("tbody", {}, rows)))];
}

const howToKeep = (run) => [`${run.name} has kept no tokens. A run with `, make("code", {}, "mismatch.keep_tokens=16"), " keeps sixteen responses of each step with their tokens: those with the largest weight, those with the largest gap, and some at random."];

async function openResponse(offset) {
  const run = runOfView();
  if (!run) return;
  view.wanted = `${run.id}-${offset}`;
  const current = () => view.wanted === `${run.id}-${offset}`;
  try {
    const response = await (await ask(`response?run=${run.id}&at=${offset}`)).json();
    if (!current()) return;
    Object.assign(view, { response, chosen: null });
    showResponse(run);
    showTokens(false);
    $("response").scrollIntoView();
  } catch (error) {
    if (current()) $("response").replaceChildren(make("p", { class: "bad" }, error.message));
  }
}

function showResponse(run) {
  const response = view.response;
  const facts = [`step ${response.step}`, `kept as ${response.reason}`, response.version === null ? "" : `sampled by weight version ${response.version}`, `${response.behind} versions behind`, `Σ log π - log μ ${numberText(response.log_weight)}`, response.reward === null ? "" : `reward ${numberText(response.reward)}`, `damage ${numberText(response.damage)}`];
  const text = make("div", { id: "text", tabindex: 0, onclick: (event) => { const token = event.target.closest(".token"); if (token) chooseToken(Number(token.dataset.n)); } }, tokenSpans());
  $("response").replaceChildren(
    make("h3", {}, `Response ${response.identity}`), make("p", {}, facts.filter(Boolean).join(" · ")),
    make("details", {}, make("summary", {}, `prompt: ${response.prompt_ids.length} tokens`),
      make("div", { id: "prompt", tabindex: 0 }, response.prompt_text === null ? "The run kept no text." : response.prompt_text)),
    make("div", { class: "bar" }, make("span", {}, `decided by ${response.estimator}; colour: |log π - log μ|, 0 to 1 nat`), response.words.map((word, code) => (code === 1 ? null : make("span", { class: `token d${code}` }, word)))),
    make("div", { id: "token", role: "status" }, "Choose a token."), text,
    make("p", {}, make("small", {}, "To compute these tokens again: ", explain(run))));
}

function tokenSpans() {
  const { response } = view, parts = [];
  const several = response.turn.some((turn) => turn !== response.turn[0]);
  let place = null;
  response.token_ids.forEach((id, at) => {
    const turn = response.turn[at];
    if (at === 0 || turn !== response.turn[at - 1]) {
      place = make("div", { "data-turn": turn }, several ? make("h4", {}, turn === 0 ? "tool output, never counted" : `turn ${turn}`) : null);
      parts.push(place);
    }
    const text = response.texts === null ? `${id} ` : response.texts[at].replaceAll("\n", "⏎\n");
    const span = make("span", { class: `token d${response.decisions[at]}`, "data-n": at }, text || "∅");
    const gap = Number(response.gap[at]), strength = Number.isFinite(gap) ? Math.min(1, Math.sqrt(gap)) : 1;
    if (turn !== 0 && strength > 0.02) span.style.backgroundColor = `rgb(220 50 40 / ${(strength * 0.75).toFixed(2)})`;
    place.append(span);
  });
  return parts;
}

const tokens = () => document.querySelectorAll("#text .token");

function chooseToken(at) {
  const { response } = view, all = tokens();
  if (view.chosen !== null) all[view.chosen].classList.remove("chosen");
  view.chosen = at;
  all[at].classList.add("chosen");
  const text = response.texts === null ? "" : ` ${JSON.stringify(response.texts[at])}`;
  $("token").textContent = `token ${at + 1} of ${response.length}${text} (id ${response.token_ids[at]}) · log π ${numberText(response.log_probs[at])}, log μ ${numberText(response.rollout_log_probs[at])}, gap ${numberText(response.gap[at])} · advantage ${numberText(response.advantages[at])}, weight ${numberText(response.weights[at])} · ${response.words[response.decisions[at]]}`;
}

/* ---- updates ---- */

function showMissing() {
  fill("missing", [page.missing, page.runs.map((run) => [run.name, Object.keys(run.summary)])], () => {
    const begun = page.runs.filter((run) => Object.keys(run.summary).length), has = (run, panel) => Object.keys(run.summary).some((curve) => curve.startsWith(`${panel.name}/`));
    const some = DATA.panels.map((panel) => [panel.title, begun.filter((run) => !has(run, panel))]).filter(([, without]) => without.length && without.length < begun.length);
    const items = [page.missing.length ? `in no run: ${page.missing.join(", ")}` : "", ...some.map(([title, without]) => `${title}: not in ${without.map((run) => run.name).join(", ")}`)].filter(Boolean);
    return [make("summary", {}, `${counted(page.missing.length + some.length, "panel")} that a run does not have`), make("ul", {}, items.map((text) => make("li", {}, text)))];
  });
}

function render() {
  showVerdicts();
  showRuns();
  showAlarms();
  showCurves();
  showSummary();
  showMissing();
  showTokens(false);
  const alarms = page.runs.reduce((sum, run) => sum + run.alarms.length, 0);
  if (LIVE) document.title = `${alarms ? `(${alarms}) ` : ""}verl-precision: ${page.runs.map((run) => run.name).join(", ")}`;
}

function take(state) {
  const first = !page.version;
  Object.assign(page, state, { received: performance.now() });
  render();
  if (first) followHash();
}

async function poll() {
  let pause = 1000;
  try {
    if (!document.hidden || !page.version) {
      const answer = await ask(`state?since=${page.version}`);
      if (answer.status === 200) take(await answer.json());
      else showRuns();
      $("connection").textContent = "live: updated each second";
    }
  } catch (error) {
    pause = 2000;
    $("connection").textContent = `no connection to the server, so no updates: ${error.message}`;
  }
  setTimeout(poll, pause);
}

document.body.append(make("p", { id: "keys", hidden: true }, "Arrow keys move from step to step, Enter shows the tokens of the step."));
dark.addEventListener("change", render);
addEventListener("hashchange", followHash);
if (LIVE) poll();
else take(DATA.state);
