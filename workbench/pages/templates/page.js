"use strict";
(() => {
  const all = (what, inside = document) => [...inside.querySelectorAll(what)];
  const make = (tag, kind, text) => Object.assign(document.createElement(tag), {className: kind || "", textContent: text || ""});
  const body = document.body.dataset;

  // --- where the reader was: kept in the tab's name, which also a page has that no storage is given, since it has no origin
  const mine = `report ${location.pathname}`;
  const key = (part) => {
    const place = part.closest("section") || document.body;
    return `${place.id}/${all(part.tagName, place).indexOf(part)}`;
  };
  let kept = {};
  try { kept = JSON.parse(window.name)[mine] || {}; } catch { /* another page's, or none */ }
  if (kept.open) for (const part of all("details")) if (key(part) in kept.open) part.open = kept.open[key(part)];
  const present = () => ({
    y: scrollY, step: chosen, open: Object.fromEntries(all("details").map((part) => [key(part), part.open])),
    strips: Object.fromEntries(all(".strip").map((strip) => [strip.parentNode.dataset.row, strip.scrollLeft])),
  });
  const remember = () => { window.name = JSON.stringify({[mine]: present()}); };

  // --- samples: the slider puts an image from the strip in the place of the newest one
  let chosen = kept.step === undefined ? null : kept.step;
  const cards = all(".card").map((card) => {
    const sides = all(".sides .shot[data-step]", card), between = all(".strip .shot", card);
    const side = sides.length > 1 ? sides[sides.length - 1] : null;
    const shots = [...sides.slice(0, 1), ...between, ...(side ? [side.cloneNode(true)] : [])];
    return {card, side, between, shots, every: [...shots, ...all(".sides .shot:not([data-step])", card)]};
  });
  const show = (step) => {
    for (const {side, between, shots} of cards) {
      if (!side) continue;
      const upTo = shots.filter((shot) => step === null || Number(shot.dataset.step) <= step);
      const shot = upTo[upTo.length - 1] || shots[0];
      const [from, to] = [shot.querySelector("img"), side.querySelector("img")];
      if (to.src !== from.src) to.src = from.src;
      to.alt = from.alt;
      side.querySelector("a").href = shot.querySelector("a").href;
      side.querySelector("figcaption").textContent = shot.querySelector("figcaption").textContent;
      for (const other of between) other.classList.toggle("on", step !== null && other === shot);
    }
  };
  for (const place of all(".slider")) {
    const steps = place.dataset.steps.split(" ").map(Number);
    const label = make("label", "", "Beside the first: "), said = make("output");
    const input = Object.assign(make("input"), {type: "range", min: 0, max: steps.length - 1, step: 1, id: "step"});
    label.htmlFor = "step";
    place.append(label, input, said);
    const tell = () => {
      const last = Number(input.value) === steps.length - 1, step = steps[input.value];
      chosen = last ? null : step;
      said.textContent = last ? `the newest, step ${step.toLocaleString("en")}` : step ? `step ${step.toLocaleString("en")}` : "before training";
      show(chosen);
    };
    const before = chosen === null ? -1 : steps.indexOf(chosen);
    input.value = before < 0 ? steps.length - 1 : before;
    input.addEventListener("input", () => { tell(); remember(); });
    tell();
  }

  // --- click to enlarge; arrows go through the steps of a prompt, and from prompt to prompt
  const box = make("dialog"), large = make("img"), said = make("span");
  let row = 0, place = 0;
  const enlarge = () => {
    const shots = cards[row = (row + cards.length) % cards.length].every;
    const shot = shots[place = (place + shots.length) % shots.length];
    const link = shot.querySelector("a"), image = shot.querySelector("img");
    large.onerror = () => { large.onerror = null; large.src = image.src; };
    large.src = "reduced" in link.dataset ? link.href : image.src;
    large.className = image.className;
    large.alt = said.textContent = image.alt;
  };
  const button = (text, title, act) => {
    const made = Object.assign(make("button", "", text), {type: "button", title});
    made.addEventListener("click", act);
    return made;
  };
  const turn = (by, prompts = 0) => { place += by; row += prompts; enlarge(); };
  const line = make("p");
  line.append(button("\u2190", "earlier", () => turn(-1)), button("\u2192", "later", () => turn(1)), said,
    button("Close", "Escape closes, too", () => box.close()));
  box.append(large, line);
  document.body.append(box);
  box.addEventListener("click", (event) => event.target === box && box.close());
  box.addEventListener("keydown", (event) => {
    const turns = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    if (turns) { event.preventDefault(); turn(...turns); }
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest(".shot a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    row = cards.findIndex(({card}) => card === link.closest(".card"));
    place = cards[row].every.findIndex((shot) => shot.querySelector("a").href === link.href);
    enlarge();
    box.showModal();
  });

  // --- the values of a chart at a step
  const number = (value) => Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 || value === 0 ?
    String(Number(value.toPrecision(3))) : value.toExponential(2);
  for (const plot of all(".plot")) {
    const [first, last, low, high, log] = JSON.parse(plot.dataset.axes);
    let lines = null, tip = null, rule = null;
    const leave = () => { if (tip) { tip.remove(); rule.remove(); tip = null; } };
    const look = (event) => {
      lines = lines || all("path[data-name]", plot).map((path) => ({
        name: path.dataset.name,
        points: [...path.getAttribute("d").matchAll(/(-?[\d.]+) (-?[\d.]+)/g)].map((found) => [Number(found[1]), Number(found[2])]),
      }));
      const frame = plot.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width)) * 1000;
      if (!tip) plot.append(rule = make("div", "rule"), tip = make("div", "tip"));
      const told = lines.map(({name, points}) => {
        const near = points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
        const up = 1 - near[1] / 1000;
        return {name, x: near[0], value: log ? low * Math.pow(high / low, up) : low + up * (high - low)};
      });
      const nearest = told.reduce((best, one) => Math.abs(one.x - x) < Math.abs(best.x - x) ? one : best).x;
      const step = Math.round(first + nearest / 1000 * (last - first));
      tip.replaceChildren(make("b", "", `step ${step.toLocaleString("en")}`),
        ...told.map(({name, value}) => make("div", "", `${name}: ${number(value)}`)));
      rule.style.left = `${nearest / 10}%`;
      const half = tip.offsetWidth / 2, at = nearest / 1000 * frame.width;
      tip.style.left = `${Math.min(frame.width - half, Math.max(half - 50, at))}px`;
    };
    plot.addEventListener("pointermove", look);
    plot.addEventListener("pointerdown", look);
    plot.addEventListener("pointerleave", leave);
  }

  // --- on paper everything is open
  let closed = [];
  addEventListener("beforeprint", () => { for (const part of closed = all("details:not([open])")) part.open = true; });
  addEventListener("afterprint", () => { for (const part of closed) part.open = false; });

  for (const time of all("time")) {
    const moment = new Date(time.dateTime);
    time.title = time.textContent;
    time.textContent = moment.toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
  }
  for (const strip of all(".strip")) strip.scrollLeft = (kept.strips || {})[strip.parentNode.dataset.row] || 0;
  if (kept.y !== undefined) {
    history.scrollRestoration = "manual";
    scrollTo(0, kept.y);
    addEventListener("load", () => scrollTo(0, kept.y));
  }
  let soon = 0;
  for (const act of ["scroll", "toggle"]) {  // a page without an origin that is being left keeps nothing any more
    addEventListener(act, () => { clearTimeout(soon); soon = setTimeout(remember, 100); }, true);
  }
  addEventListener("pagehide", remember);

  // --- while the run is alive: the newest page, and what to think where none comes
  if (!body.written) return;
  const state = document.getElementById("state"), told = state.textContent;
  const silence = () => {
    const seconds = Date.now() / 1000 - body.written;
    if (seconds < body.quiet) return;
    const since = seconds < 7200 ? `${Math.round(seconds / 60)} minutes` : `${Math.round(seconds / 3600)} hours`;
    state.className = "state lost";
    state.querySelector("span").textContent = `No sign of life for ${since}: the run draws or measures for long, or it was killed ` +
      `(--resume_from auto goes on), or this is a copy. It said last: ${told}`;
  };
  silence();
  const busy = () => document.hidden || box.open || String(getSelection()) || document.querySelector(".tip, input:active");
  setInterval(() => {
    silence();
    if (busy()) return;
    remember();
    location.reload();
  }, body.reload * 1000);
})();
