"use strict";
// Recomputes a plan from its table as the sliders move. No library, no network.
(() => {
  const sweep = JSON.parse(document.getElementById("sweep").textContent);
  const unique = (name) => [...new Set(sweep.points.map((point) => point[name]))].sort((a, b) => a - b);
  const lists = { epsilon: unique("target_epsilon"), epochs: unique("epochs"), batch: unique("batch_size") };
  const node = (id) => document.getElementById(id);
  const digits = (value, count = 3) => Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });

  const find = (epsilon, epochs, batch) =>
    sweep.points.find((p) => p.target_epsilon === epsilon && p.epochs === epochs && p.batch_size === batch);
  const chosen = () => find(...["epsilon", "epochs", "batch"].map((name) => lists[name][+node(name).value]));

  function values(point, clip, rate) {
    const perStep = point.noise_multiplier / point.batch_size;
    const shown = [
      [digits(point.epsilon, 4), `epsilon at delta ${sweep.delta}, by PLD`],
      [digits(point.noise_multiplier, 4), "noise multiplier z"],
      [digits(point.steps, 7), "steps"],
      [`${digits(Math.sqrt(sweep.parameters) * perStep * clip)}`, "norm of the noise in a mean gradient"],
      [digits(rate * clip * perStep * Math.sqrt(point.steps)), "noise accumulated in each parameter"],
      [digits(point.path_over_noise), "path over noise"],
    ];
    for (const [method, hours] of Object.entries(point.hours)) shown.push([digits(hours), `hours of ${method} on this machine`]);
    node("values").replaceChildren(...shown.map(([value, name]) => {
      const box = document.createElement("div"), strong = document.createElement("b"), small = document.createElement("span");
      strong.textContent = value;
      small.textContent = name;
      box.append(strong, small);
      return box;
    }));
  }

  function make(name, attributes, content) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (content !== undefined) made.textContent = content;
    return made;
  }

  function chart(point) {
    const points = sweep.points.filter((p) => p.target_epsilon === point.target_epsilon);
    const log = (v) => Math.log(v), [left, right, top, bottom] = [56, 704, 12, 262];
    const range = (list) => { const low = Math.min(...list), high = Math.max(...list); return [log(low), log(high) - log(low) || 1]; };
    const [x0, xs] = range(lists.batch), [y0, ys] = range(points.map((p) => p.path_over_noise));
    const x = (v) => left + ((log(v) - x0) / xs) * (right - left), y = (v) => bottom - ((log(v) - y0) / ys) * (bottom - top);
    const drawn = [];
    for (const batch of lists.batch) {
      drawn.push(make("line", { class: "grid", x1: x(batch), x2: x(batch), y1: top, y2: bottom }));
      drawn.push(make("text", { x: Math.min(x(batch), right - 14), y: 282, "text-anchor": "middle" }, digits(batch, 4)));
    }
    for (const part of [0, 0.5, 1]) {
      const value = Math.exp(y0 + part * ys);
      drawn.push(make("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
      drawn.push(make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, digits(value)));
    }
    for (const epochs of lists.epochs) {
      const line = points.filter((p) => p.epochs === epochs);
      const path = line.map((p, index) => `${index ? "L" : "M"}${x(p.batch_size)} ${y(p.path_over_noise)}`).join("");
      drawn.push(make("path", { class: epochs === point.epochs ? "curve now" : "curve", d: path }));
      drawn.push(make("text", { x: left + 6, y: Math.max(y(line[0].path_over_noise) - 12, top + 12) }, `${epochs} epochs`));
    }
    drawn.push(make("circle", { class: "dot", r: 6, cx: x(point.batch_size), cy: y(point.path_over_noise) }));
    node("chart").replaceChildren(...drawn);
    node("chart").dataset.drawn = drawn.length;
  }

  function table(point) {
    const row = (cells, tag, now) => {
      const made = document.createElement("tr");
      made.className = now ? "now" : "";
      made.append(...cells.map((cell) => { const one = document.createElement(tag); one.textContent = cell; return one; }));
      return made;
    };
    const rows = sweep.points.filter((p) => p.target_epsilon === point.target_epsilon).map((p) => row([
      p.epochs, digits(p.batch_size, 7), digits(p.steps, 7), digits(p.noise_multiplier, 4), digits(p.path_over_noise),
      p.learning_rate, p.hours.dpsgd === undefined ? "-" : digits(p.hours.dpsgd),
    ], "td", p === point));
    node("table").replaceChildren(row(["epochs", "batch size", "steps", "noise multiplier", "path over noise", "rate to start with", "hours"], "th"), ...rows);
  }

  function update() {
    const point = chosen(), clip = 10 ** +node("clip").value, rate = 10 ** +node("rate").value;
    node("epsilon-shown").textContent = point.target_epsilon;
    node("epochs-shown").textContent = point.epochs;
    node("batch-shown").textContent = digits(point.batch_size, 7);
    node("clip-shown").textContent = digits(clip);
    node("rate-shown").textContent = digits(rate);
    values(point, clip, rate);
    chart(point);
    table(point);
  }

  const first = sweep.recommendations[0];
  const start = { epsilon: first.point.target_epsilon, epochs: first.point.epochs, batch: first.point.batch_size };
  for (const [name, list] of Object.entries(lists)) {
    node(name).max = list.length - 1;
    node(name).value = list.indexOf(start[name]);
  }
  node("clip").value = Math.log10(sweep.clip_norm);
  node("rate").value = Math.log10(first.point.learning_rate);
  for (const name of ["epsilon", "epochs", "batch", "clip", "rate"]) node(name).addEventListener("input", update);
  const asked = new URLSearchParams(location.hash.slice(1)); // #epsilon=8&batch=4000 opens the page there
  for (const [name, value] of asked) if (lists[name]) node(name).value = lists[name].indexOf(+value);
  update();
})();
