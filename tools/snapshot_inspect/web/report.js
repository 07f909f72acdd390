// Draws the figures of a report. Writes text and never markup; keeps what is searched in the address (#q=…).
"use strict";
const data = JSON.parse(document.getElementById("figures").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const KINDS = ["new", "reused", "regenerated"];

// ---- words ---------------------------------------------------------------------------------------------------------

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
const grouped = (n) => (n === null ? "?" : n.toLocaleString("en-US"));
function size(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.95 && unit < 4) { n /= 1000; unit += 1; }
  return unit ? `${n.toFixed(1)} ${units[unit]}` : `${n} B`;
}
function span(seconds) {
  const s = Math.abs(seconds);
  if (s < 100) return `${+s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h`;
}
const utc = (text) => (text === null ? "unknown" : `${text.slice(0, 10)} ${text.slice(11, 19)} UTC`);
const versionName = (i) => `${data.versions[i].lineage}/${data.versions[i].number}`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const mostLag = Math.max(1, ...data.versions.map((v) => v.lag));
const lagColour = (lag) => `hsl(${150 - (140 * lag) / mostLag} 52% 48%)`;
const versionColour = (i) => `hsl(${(205 + i * 47) % 360} 55% 52%)`;

function svg(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const tip = byId("tip");
function showTip(event, text) {
  tip.hidden = false;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };

// ---- time: what nobody ran in takes little room ----------------------------------------------------------------------

function makeScale() {
  const busy = [];
  for (const epoch of data.epochs) {
    const begin = Math.max(epoch.begin_s, busy.length ? busy[busy.length - 1][1] : 0);
    busy.push([begin, Math.max(begin, epoch.end_s)]);
  }
  const total = busy.reduce((sum, [a, b]) => sum + b - a, 0) || 1;
  const most = 0.03 * total;
  const points = [[busy[0][0], 0]];
  let at = 0;
  busy.forEach(([begin, end], i) => {
    if (i > 0) { at += Math.min(most, begin - busy[i - 1][1]); points.push([begin, at]); }
    at += end - begin;
    points.push([end, at]);
  });
  const whole = at || 1;
  return (seconds) => {
    if (seconds <= points[0][0]) return 0;
    for (let i = 1; i < points.length; i += 1) {
      const [t1, x1] = points[i];
      if (seconds <= t1) {
        const [t0, x0] = points[i - 1];
        return (x0 + (t1 > t0 ? ((x1 - x0) * (seconds - t0)) / (t1 - t0) : x1 - x0)) / whole;
      }
    }
    return 1;
  };
}
const place = makeScale();
const gaps = data.epochs.slice(1).map((epoch, i) => [data.epochs[i].end_s, Math.max(epoch.begin_s, data.epochs[i].end_s), data.epochs[i].killed]);

// ---- figures -----------------------------------------------------------------------------------------------------------

function cards() {
  const f = data.figures;
  const share = f.tokens ? ` (${((100 * f.tokens_reused) / f.tokens).toFixed(0)} %)` : "";
  const shown = [
    ["calls", f.calls, grouped(f.calls), `calls, ${grouped(f.ended)} ended`, "line"],
    ["open", f.open, grouped(f.open), "open calls", "new"],
    ["tokens", f.tokens, grouped(f.tokens), `tokens in ${grouped(f.chunks)} chunks`, "new"],
    ["tokens_reused", f.tokens_reused, grouped(f.tokens_reused), `tokens carried over from an earlier epoch${share}`, "reused"],
    ["tokens_regenerated", f.tokens_regenerated, grouped(f.tokens_regenerated), "tokens of calls that began again", "regenerated"],
    ["kills", f.kills, grouped(f.kills), f.kills === 1 ? "epoch ended without a last snapshot" : "epochs ended without a last snapshot", "kill"],
    ["snapshots", f.snapshots, grouped(f.snapshots), "snapshots", "line"],
    ["stored_nbytes", f.stored_nbytes, size(f.stored_nbytes), `stored, ${size(f.raw_nbytes)} raw`, "bytes"],
  ];
  for (const [name, value, big, small, edge] of shown) {
    const card = element("div", undefined, "card");
    card.style.setProperty("--edge", `var(--${edge})`);
    const number = element("b", big);
    number.dataset.figure = name;
    number.dataset.value = value;
    card.append(number, element("span", small));
    byId("cards").append(card);
  }
  byId("address").textContent = data.store;
  byId("when").textContent = `snapshot ${data.snapshot} · ${utc(data.begin_utc)} · ${span(data.duration_s)}`;
  document.title = `Rollout report · ${data.store}`;
  byId("notes").textContent = data.notes.join(" · ");
}

function legend(where, entries) {
  where.replaceChildren(...entries.map(([text, mark]) => {
    const entry = element("span", text);
    entry.style.setProperty("--mark", mark);
    return entry;
  }));
}

// ---- growth ------------------------------------------------------------------------------------------------------------

function growth() {
  const box = byId("growth");
  const width = Math.max(320, box.clientWidth), height = 220, left = 58, right = 66, top = 12, bottom = 26;
  const image = document.createElementNS(SVG, "svg");
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const inner = width - left - right, tall = height - top - bottom;
  const x = (s) => left + inner * place(s);
  const known = data.snapshots.filter((s) => s.tokens !== null && s.nbytes !== null);
  const mostTokens = Math.max(1, ...known.map((s) => s.tokens)), mostBytes = Math.max(1, ...known.map((s) => s.nbytes));
  const yTokens = (n) => top + tall * (1 - n / mostTokens), yBytes = (n) => top + tall * (1 - n / mostBytes);
  for (let i = 0; i <= 4; i += 1) {
    const y = top + (tall * i) / 4;
    svg(image, "line", { x1: left, x2: width - right, y1: y, y2: y, stroke: colour("grid") });
    svg(image, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short((mostTokens * (4 - i)) / 4));
    svg(image, "text", { x: width - right + 8, y: y + 4 }, size(Math.round((mostBytes * (4 - i)) / 4)));
  }
  marks(image, x, top, top + tall);
  if (known.length) {
    const line = (y, key) => known.map((s, i) => `${i ? "L" : "M"}${x(s.at_s).toFixed(1)} ${y(s[key]).toFixed(1)}`).join("");
    const area = `${line(yTokens, "tokens")}L${x(known[known.length - 1].at_s)} ${top + tall}L${x(known[0].at_s)} ${top + tall}Z`;
    svg(image, "path", { d: area, fill: colour("new"), opacity: 0.16 });
    svg(image, "path", { d: line(yTokens, "tokens"), fill: "none", stroke: colour("new"), "stroke-width": 2, "stroke-linejoin": "round" });
    svg(image, "path", { d: line(yBytes, "nbytes"), fill: "none", stroke: colour("bytes"), "stroke-width": 1.5, "stroke-dasharray": "5 3" });
    svg(image, "path", { d: known.map((s) => `M${x(s.at_s).toFixed(1)} ${top + tall}v5`).join(""), stroke: colour("soft"), fill: "none" });
  }
  if (data.versions.length > 1) data.versions.slice(0, 40).forEach((v, i) => {
    svg(image, "line", { x1: x(v.begin_s), x2: x(v.begin_s), y1: top, y2: top + tall, stroke: versionColour(i), "stroke-dasharray": "1 4", "stroke-width": 1.5 });
    if (data.versions.length <= 10) svg(image, "text", { x: x(v.begin_s) + 3, y: top + 10 }, versionName(i).slice(0, 12));
  });
  ticks(image, x, height - 8, width);
  image.addEventListener("mousemove", (event) => {
    if (!known.length) return;
    const at = ((event.clientX - image.getBoundingClientRect().left) * width) / image.getBoundingClientRect().width;
    const near = known.reduce((best, s) => (Math.abs(x(s.at_s) - at) < Math.abs(x(best.at_s) - at) ? s : best));
    showTip(event, `snapshot ${near.id} (${near.cause ?? "unknown"}), epoch ${near.epoch}\n+${span(near.at_s)}\n${grouped(near.tokens)} tokens, ${size(near.nbytes)}\n${grouped(near.calls)} calls, ${grouped(near.ended)} ended`);
  });
  image.addEventListener("mouseleave", hideTip);
  box.replaceChildren(image);
  legend(byId("growth-legend"), [["tokens", "var(--new)"], ["bytes of segments", "var(--bytes)"], ["end without a last snapshot", "var(--kill)"], ["snapshots (ticks)", "var(--soft)"]]);
}
function short(n) {
  if (n >= 1e9) return `${(n / 1e9).toFixed(1)}G`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)}M`;
  return n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : `${Math.round(n)}`;
}
function marks(image, x, y1, y2) {
  for (const [end, begin, killed] of gaps) {
    svg(image, "rect", { x: x(end), y: y1, width: Math.max(1, x(begin) - x(end)), height: y2 - y1, fill: colour("grid") });
    if (killed) svg(image, "line", { x1: x(end), x2: x(end), y1, y2, stroke: colour("kill"), "stroke-width": 1.5, "stroke-dasharray": "4 3" });
  }
}
function ticks(image, x, y, width) {
  const begin = data.epochs[0].begin_s, end = Math.max(...data.epochs.map((e) => e.end_s));
  const running = (s) => data.epochs.some((e) => s >= e.begin_s && s <= e.end_s);
  const at = data.epochs.map((e) => e.begin_s);
  for (const e of data.epochs) for (let i = 1; i <= 12; i += 1) at.push(e.begin_s + ((e.end_s - e.begin_s) * i) / 12);
  let last = -1e9;
  for (const s of at.filter((s) => s >= begin && s <= end && running(s)).sort((a, b) => a - b)) {
    const px = x(s), anchor = px < 30 ? "start" : px > width - 40 ? "end" : "middle";
    if (px - last < 92) continue;
    last = px;
    svg(image, "text", { x: px, y, "text-anchor": anchor }, `+${span(s)}`);
  }
}

// ---- calls -------------------------------------------------------------------------------------------------------------

const state = { query: "", order: "begin_s", colour: "kind", column: null, down: false, rows: data.calls };
const WORDS = {
  open: (call) => call.state === "open", ended: (call) => call.state === "ended",
  resumed: (call) => call.reused > 0, restarted: (call) => call.thrown_away > 0 || call.regenerated > 0,
};
const searched = data.calls.map((call) => `${call.rollout}\n${call.call_id}\n${call.finish_reason ?? ""}`.toLowerCase());
const natural = new Intl.Collator("en", { numeric: true });
const COMPARE = {
  begin_s: (a, b) => a.begin_s - b.begin_s || natural.compare(a.rollout, b.rollout),
  rollout: (a, b) => natural.compare(a.rollout, b.rollout) || a.turn - b.turn,
  tokens: (a, b) => b.tokens - a.tokens, thrown_away: (a, b) => b.thrown_away - a.thrown_away || b.reused - a.reused,
};

function choose() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (call, i) => words.every((word) => (WORDS[word] && WORDS[word](call)) || searched[i].includes(word));
  const rows = words.length ? data.calls.filter(fits) : [...data.calls];
  const column = COLUMNS.find((c) => c.key === state.column);
  rows.sort(column ? (a, b) => (state.down ? -1 : 1) * by(column, a, b) : COMPARE[state.order]);
  state.rows = rows;
  const tokens = rows.reduce((sum, call) => sum + call.tokens, 0);
  byId("count").textContent = `${grouped(rows.length)} of ${grouped(data.calls.length)} calls, ${grouped(tokens)} tokens`;
  byId("count").dataset.shown = rows.length;
  const address = new URLSearchParams();
  if (state.query) address.set("q", state.query);
  if (state.order !== "begin_s") address.set("order", state.order);
  if (state.colour !== "kind") address.set("colour", state.colour);
  history.replaceState(null, "", `#${address}`);
  drawLanes();
  drawTable(true);
}
const by = (column, a, b) => (column.number ? (a[column.key] ?? -1) - (b[column.key] ?? -1) : natural.compare(a[column.key] ?? "", b[column.key] ?? ""));

const lanes = byId("lanes"), canvas = byId("lanes-canvas");
let laneHeight = 8, labels = 0;
function drawLanes() {
  const n = state.rows.length;
  laneHeight = n <= 24 ? 17 : n <= 120 ? 11 : 7;
  labels = laneHeight >= 11 ? 110 : 0;
  const view = Math.min(420, Math.max(40, n * laneHeight + 8));
  lanes.style.height = `${view}px`;
  const width = lanes.clientWidth, ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(view * ratio);
  canvas.style.height = `${view}px`;
  byId("lanes-space").style.height = "0";
  canvas.style.marginBottom = `${Math.max(0, n * laneHeight + 8 - view)}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, view);
  const x = laneX(width), tall = Math.max(3, laneHeight - (laneHeight > 8 ? 4 : 2));
  for (const [end, begin] of gaps) { pen.fillStyle = colour("grid"); pen.fillRect(x(end), 0, Math.max(1, x(begin) - x(end)), view); }
  const colours = KINDS.map(colour), waiting = colour("waiting"), ink = colour("soft"), end = data.duration_s;
  pen.font = "10.5px ui-monospace, 'DejaVu Sans Mono', monospace";
  pen.textBaseline = "middle";
  const first = Math.floor(lanes.scrollTop / laneHeight), last = Math.min(n, first + Math.ceil(view / laneHeight) + 1);
  for (let i = first; i < last; i += 1) {
    const call = state.rows[i], y = i * laneHeight - lanes.scrollTop + 4;
    const until = call.state === "open" ? end : call.end_s;
    pen.fillStyle = waiting;
    pen.fillRect(x(call.begin_s), y + tall / 2 - 0.75, Math.max(1, x(until) - x(call.begin_s)), 1.5);
    for (const [begin, stop, , kind, version] of call.runs) {
      pen.fillStyle = state.colour === "kind" ? colours[kind] : runColour(version);
      pen.fillRect(x(begin), y, Math.max(1.5, x(stop) - x(begin)), tall);
    }
    if (call.state === "ended") { pen.fillStyle = ink; pen.fillRect(x(call.end_s), y - 0.5, 1.5, tall + 1); }
    if (labels) { pen.fillStyle = ink; pen.fillText(call.rollout.slice(0, 16), 4, y + tall / 2); }
  }
  pen.strokeStyle = colour("kill");
  pen.setLineDash([4, 3]);
  for (const [at, , killed] of gaps) if (killed) { pen.beginPath(); pen.moveTo(x(at), 0); pen.lineTo(x(at), view); pen.stroke(); }
  pen.setLineDash([]);
  const axis = document.createElementNS(SVG, "svg");
  axis.setAttribute("viewBox", `0 0 ${width} 22`);
  ticks(axis, x, 15, width);
  byId("axis").replaceChildren(axis);
  legend(byId("calls-legend"), LEGENDS[state.colour]());
}
const runColour = (version) => (state.colour === "lag" ? lagColour(data.versions[version].lag) : versionColour(version));
const LEGENDS = {
  kind: () => [["new", "var(--new)"], ["carried over from an earlier epoch", "var(--reused)"], ["generated again", "var(--regenerated)"], ["waiting", "var(--waiting)"], ["end without a last snapshot", "var(--kill)"]],
  version: () => data.versions.slice(0, 12).map((v, i) => [versionName(i), versionColour(i)]),
  lag: () => [...new Set(data.versions.map((v) => v.lag))].sort((a, b) => a - b).slice(0, 12).map((lag) => [`lag ${lag}`, lagColour(lag)]),
};
const laneX = (width) => (s) => labels + 6 + (width - labels - 24) * place(s);
function callAt(event) {
  const y = event.clientY - canvas.getBoundingClientRect().top;
  return state.rows[Math.floor((y - 2 + lanes.scrollTop) / laneHeight)];
}
function story(call) {
  const parts = [`${call.rollout}${call.turn ? `, turn ${call.turn}` : ""}`, `${call.state}${call.finish_reason ? ` (${call.finish_reason})` : ""}, ${grouped(call.tokens)} tokens`];
  if (call.reused) parts.push(`${grouped(call.reused)} carried over`);
  if (call.thrown_away) parts.push(`${grouped(call.thrown_away)} thrown away, ${grouped(call.regenerated)} generated again so far`);
  const seen = [...new Set(call.runs.map((run) => run[4]))].map(versionName);
  if (seen.length) parts.push(`policy ${seen.join(", ")}${call.lag ? `, lag ${call.lag}` : ""}`);
  parts.push(`+${span(call.begin_s)} to +${span(call.end_s)}`);
  return parts.join("\n");
}

// ---- table -------------------------------------------------------------------------------------------------------------

const COLUMNS = [
  { key: "rollout", name: "call" }, { key: "turn", name: "turn", number: true }, { key: "state", name: "state" },
  { key: "finish_reason", name: "ended by" }, { key: "tokens", name: "tokens", number: true }, { key: "reused", name: "reused", number: true },
  { key: "regenerated", name: "again", number: true }, { key: "thrown_away", name: "thrown away", number: true }, { key: "lag", name: "lag", number: true },
  { key: "begin_s", name: "began", number: true }, { key: "end_s", name: "newest", number: true }, { key: "call_id", name: "id" },
];
const ROW = 28;
function heads() {
  byId("heads").replaceChildren(...COLUMNS.map((column) => {
    const head = element("button", column.name + (state.column === column.key ? (state.down ? " ↓" : " ↑") : ""), column.number ? "number" : "");
    head.type = "button";
    head.addEventListener("click", () => {
      state.down = state.column === column.key ? !state.down : Boolean(column.number);
      state.column = column.key;
      heads();
      choose();
    });
    return head;
  }));
}
function cell(call, column) {
  const value = call[column.key];
  const text = column.key.endsWith("_s") ? `+${span(value)}` : column.number ? grouped(value) : value ?? "";
  const made = element("span", text, column.number ? "number" : column.key === "call_id" ? "mono" : column.key === "state" ? value : "");
  if (value === 0) made.classList.add("none");
  made.title = text;
  return made;
}
function drawTable(again) {
  const table = byId("table"), rows = byId("rows");
  if (again) { table.scrollTop = 0; rows.style.height = `${state.rows.length * ROW}px`; table.style.height = `${Math.min(420, (state.rows.length + 1) * ROW + 14)}px`; }
  const first = Math.max(0, Math.floor(table.scrollTop / ROW) - 4), last = Math.min(state.rows.length, first + 26);
  rows.replaceChildren(...state.rows.slice(first, last).map((call, i) => {
    const row = element("div", undefined, "row");
    row.style.top = `${(first + i) * ROW}px`;
    row.append(...COLUMNS.map((column) => cell(call, column)));
    return row;
  }));
}
function small(where, names, rows) {
  const table = element("table", undefined, "small"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const [name, className] of names) head.append(element("th", name, className));
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach(([text, className]) => row.append(element("td", text, className)));
  }
  where.replaceChildren(table);
}
function lists() {
  const n = "number";
  small(byId("epochs"), [["epoch", n], ["owner"], ["began", n], ["lasted", n], ["snapshots", n], ["ended by"]], data.epochs.map((e, i) => [
    [`${e.epoch}`, n], [e.owner || "unknown"], [`+${span(e.begin_s)}`, n], [span(e.end_s - e.begin_s), n], [`${e.snapshots}`, n],
    e.killed ? ["killed or fenced", "killed"] : [i < data.epochs.length - 1 ? "itself" : ""],
  ]));
  small(byId("versions"), [["version"], ["tokens", n], ["from", n], ["to", n], ["lag", n]], data.versions.map((v, i) => [
    [versionName(i)], [grouped(v.tokens), n], [`+${span(v.begin_s)}`, n], [`+${span(v.end_s)}`, n], [`${v.lag}`, n],
  ]));
}

// ---- begin -------------------------------------------------------------------------------------------------------------

function begin() {
  const asked = new URLSearchParams(location.hash.slice(1));
  state.query = asked.get("q") ?? "";
  if (COMPARE[asked.get("order")]) state.order = asked.get("order");
  if (LEGENDS[asked.get("colour")]) state.colour = asked.get("colour");
  byId("search").value = state.query;
  byId("order").value = state.order;
  byId("colour").value = state.colour;
  cards();
  lists();
  heads();
  growth();
  choose();
  byId("search").addEventListener("input", (event) => { state.query = event.target.value; lanes.scrollTop = 0; choose(); });
  byId("order").addEventListener("change", (event) => { state.order = event.target.value; state.column = null; heads(); choose(); });
  byId("colour").addEventListener("change", (event) => { state.colour = event.target.value; choose(); });
  lanes.addEventListener("scroll", () => requestAnimationFrame(drawLanes));
  byId("table").addEventListener("scroll", () => requestAnimationFrame(() => drawTable(false)));
  canvas.addEventListener("mousemove", (event) => { const call = callAt(event); if (call) showTip(event, story(call)); else hideTip(); });
  canvas.addEventListener("mouseleave", hideTip);
  const again = () => { growth(); drawLanes(); };
  addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.documentElement.dataset.ready = "yes";
}
begin();
