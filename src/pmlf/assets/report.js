"use strict";
// Draws every figure[data-chart] as SVG: lines over a number, or dots over categories. No library, no network.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const make = (name, attributes, parent) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  };
  const text = (content, attributes, parent) => { make("text", attributes, parent).textContent = content; };
  const shown = (value) => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(1) : String(+value.toFixed(Math.abs(value) < 1 ? 3 : 2));

  function ticks(low, high, count) {
    const raw = (high - low) / count, magnitude = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * magnitude).find((s) => s >= raw);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
    return found;
  }
  function decades(low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), skip = Math.ceil((last - first) / 6);
    const found = [];
    for (let power = first; power <= last; power += skip) found.push(10 ** power);
    return found;
  }
  function padded(values, share) {
    const low = Math.min(...values), high = Math.max(...values), gap = (high - low || Math.abs(high) || 1) * share;
    return [low - gap, high + gap];
  }

  function draw(figure) {
    const chart = JSON.parse(figure.dataset.chart);
    const hidden = new Set();
    const base = chart.series.filter((s) => !s.paper).map((s) => s.colour);
    const colourOf = (s) => `var(--s${s.colour % 8})`;
    const holder = document.createElement("div");
    const tip = document.createElement("div");
    tip.className = "tip";
    const legend = document.createElement("div");
    legend.className = "legend";
    figure.append(legend, holder, tip);
    for (const series of chart.series) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const dot = document.createElement("i");
      dot.style.borderColor = colourOf(series);
      if (!series.paper) dot.style.background = colourOf(series);
      button.append(dot, series.name);
      button.addEventListener("click", () => {
        hidden.has(series.name) ? hidden.delete(series.name) : hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
        render();
      });
      legend.append(button);
    }
    const point = (node, series, at, label) => {
      const [, y, low, high] = at;
      const show = () => {
        const spread = high > low ? ` (${shown(low)} to ${shown(high)})` : "";
        tip.textContent = `${series.name} · ${label}: ${shown(y)}${spread}`;
        const box = node.getBoundingClientRect(), outer = figure.getBoundingClientRect();
        tip.style.opacity = 1;
        const left = box.left - outer.left + 10;
        tip.style.left = `${Math.max(0, Math.min(left, outer.width - tip.offsetWidth - 4))}px`;
        tip.style.top = `${box.top - outer.top - 34}px`;
      };
      node.setAttribute("tabindex", "0");
      for (const event of ["pointerenter", "focus"]) node.addEventListener(event, show);
      for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => { tip.style.opacity = 0; });
    };

    function lines(svg, visible, width) {
      const height = 270, left = 48, right = 12, top = 10, bottom = 38;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const all = visible.flatMap((s) => s.points);
      if (!all.length) return;
      const xs = all.map((p) => p[0]);
      const log = chart.logarithmic;
      const ys = all.flatMap((p) => [p[1], p[2], p[3]]).filter((y) => !log || y > 0);
      const [x0, x1] = Math.min(...xs) === Math.max(...xs) ? padded(xs, .5) : [Math.min(...xs), Math.max(...xs)];
      const [y0, y1] = log ? [Math.min(...ys) / 1.4, Math.max(...ys) * 1.4] : padded(ys, .08);
      const scale = log ? Math.log10 : (value) => value;
      const X = (x) => left + 6 + (x - x0) / (x1 - x0) * (width - left - right - 12);
      const Y = (y) => height - bottom - (scale(y) - scale(y0)) / (scale(y1) - scale(y0)) * (height - top - bottom);
      for (const y of log ? decades(y0, y1) : ticks(y0, y1, 5)) {
        if (y < y0 || y > y1) continue;
        make("line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }, svg);
        text(log ? y.toExponential(0) : shown(y), { x: left - 7, y: Y(y) + 4, "text-anchor": "end" }, svg);
      }
      const whole = xs.every(Number.isInteger);
      for (const x of ticks(x0, x1, Math.min(8, Math.max(2, Math.floor(width / 70)))).filter((t) => !whole || Number.isInteger(t)))
        text(shown(x), { x: X(x), y: height - bottom + 17, "text-anchor": "middle" }, svg);
      text(chart.x, { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg);
      text(chart.y, { x: 0, y: 0, transform: `translate(11 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, svg);
      const ours = visible.filter((series) => !series.paper);
      for (const series of visible) {
        const stroke = colourOf(series), points = series.points.filter((p) => !log || p[1] > 0);
        const dense = points.length > 60;
        const wider = dense ? 0 : Math.min(3, ours.length - 1 - ours.indexOf(series)); // seen under what is drawn over it
        if (!series.paper && points.length > 2 && points.some((p) => p[3] > p[2])) {
          const edge = [...points.map((p) => [p[0], p[3]]), ...points.map((p) => [p[0], p[2]]).reverse()];
          make("polygon", { points: edge.map(([x, y]) => `${X(x)},${Y(log ? Math.max(y, y0) : y)}`).join(" "), fill: stroke, opacity: .13 }, svg);
        }
        if (!series.paper && points.length > 1)
          make("polyline", { class: "mark", points: points.map((p) => `${X(p[0])},${Y(p[1])}`).join(" "), fill: "none", stroke, "stroke-width": 1.6 + wider, "stroke-linejoin": "round" }, svg);
        for (const p of points) {
          if (points.length <= 2 && p[3] > p[2])
            make("line", { x1: X(p[0]), x2: X(p[0]), y1: Y(p[2]), y2: Y(p[3]), stroke, "stroke-width": 2, opacity: .5 }, svg);
          const mark = make("circle", { class: "mark", cx: X(p[0]), cy: Y(p[1]), r: series.paper ? 5 : dense ? 1 : 2.4 + wider, fill: series.paper ? "none" : stroke, stroke, "stroke-width": 2 }, svg);
          if (!dense) point(mark, series, p, `${chart.x} ${shown(p[0])}`);
        }
      }
    }

    function dots(svg, visible, width) {
      const left = Math.min(190, width * .42), right = 16, top = 6, row = 30, bottom = 40;
      const height = top + row * chart.categories.length + bottom;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const all = visible.flatMap((s) => s.points);
      if (!all.length) return;
      const [x0, x1] = padded(all.flatMap((p) => [p[2], p[3]]), .06);
      const X = (value) => left + (value - x0) / (x1 - x0) * (width - left - right);
      for (const x of ticks(x0, x1, Math.max(2, Math.floor((width - left) / 75)))) {
        make("line", { class: "grid", x1: X(x), x2: X(x), y1: top, y2: height - bottom }, svg);
        text(shown(x), { x: X(x), y: height - bottom + 16, "text-anchor": "middle" }, svg);
      }
      chart.categories.forEach((name, index) => text(name, { x: left - 10, y: top + row * (index + .5) + 4, "text-anchor": "end" }, svg));
      text(chart.x, { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg);
      const groups = base.length;
      for (const series of visible) {
        const stroke = colourOf(series), slot = base.indexOf(series.colour);
        for (const p of series.points) {
          const y = top + row * (p[0] + .5) + (slot - (groups - 1) / 2) * Math.min(6, 20 / groups);
          if (p[3] > p[2]) make("line", { x1: X(p[2]), x2: X(p[3]), y1: y, y2: y, stroke, "stroke-width": 2, opacity: .45 }, svg);
          const mark = make("circle", { class: "mark", cx: X(p[1]), cy: y, r: 4, fill: series.paper ? "var(--card)" : stroke, stroke, "stroke-width": 2 }, svg);
          point(mark, series, p, chart.categories[p[0]]);
        }
      }
    }

    function render() {
      const width = Math.max(280, holder.clientWidth || 480);
      const svg = document.createElementNS(NS, "svg");
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", chart.title);
      const visible = chart.series.filter((s) => !hidden.has(s.name) && s.points.length);
      (chart.kind === "dots" ? dots : lines)(svg, visible, width);
      holder.replaceChildren(svg);
      figure.dataset.drawn = String(svg.querySelectorAll(".mark").length);
    }
    render();
    let width = holder.clientWidth;
    new ResizeObserver(() => { if (holder.clientWidth !== width) { width = holder.clientWidth; render(); } }).observe(holder);
  }

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.querySelectorAll("button")];
    const choose = (chosen) => buttons.forEach((button) => {
      button.setAttribute("aria-selected", String(button === chosen));
      document.getElementById(button.dataset.panel).hidden = button !== chosen;
    });
    buttons.forEach((button) => button.addEventListener("click", () => choose(button)));
    choose(buttons[0]);
  }
  document.querySelectorAll("figure[data-chart]").forEach(draw);
  const toggle = document.getElementById("theme");
  toggle.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  const wanted = new URLSearchParams(location.hash.slice(1)).get("theme");
  if (wanted) document.documentElement.dataset.theme = wanted;
})();
