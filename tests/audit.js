// What a reader of the page sees. bad: every text that is too small, or has too little contrast with what is behind it
// (WCAG 2.2, 1.4.3), or says that a number is none; labels of a chart that lie over each other or stick out of its frame; a
// line with a place that is no number. charts: of each the points of its shortest line. Opens all details.
(() => {
  for (const part of document.querySelectorAll('details')) part.open = true;
  const numbers = (text) => {
    const found = text.match(/[\d.]+/g).map(Number);
    return [...found.slice(0, 3), found[3] ?? 1];
  };
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    const mix = (under, over) => under.map((c, i) => over[i] * over[3] + c * (1 - over[3]));
    return layers.reverse().reduce(mix, [255, 255, 255]);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, style = getComputedStyle(element);
    const range = document.createRange();
    range.selectNodeContents(node);
    if (!node.data.trim() || !range.getClientRects().length || style.visibility === 'hidden') continue;
    texts += 1;
    const [a, b] = [light(numbers(style.color).slice(0, 3)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const said = `${node.data.trim().slice(0, 40)} (${element.tagName}.${element.className})`;
    if (parseFloat(style.fontSize) < 12) bad.push(`${style.fontSize}: ${said}`);
    if (contrast < 4.5) bad.push(`contrast ${contrast.toFixed(2)}: ${said}`);
    if (!element.closest('pre, code') && /\b(nan|inf|infinity|undefined|none|null)%?\b(?! of)/i.test(node.data)) bad.push(`no number: ${said}`);
  }
  for (const chart of document.querySelectorAll('.chart')) {
    const name = chart.querySelector('b').textContent, frame = chart.getBoundingClientRect();
    const labels = [...chart.querySelectorAll('.plot > span, .rail > span')].filter((label) => label.getClientRects().length);
    const boxes = labels.map((label) => ({said: `${name}: ${label.textContent}`, box: label.getBoundingClientRect()}));
    boxes.forEach(({said, box}, place) => {
      if (box.left < frame.left || box.right > frame.right) bad.push(`sticks out: ${said}`);
      for (const other of boxes.slice(place + 1)) {
        const apart = box.right <= other.box.left || other.box.right <= box.left || box.bottom <= other.box.top ||
          other.box.bottom <= box.top;
        if (!apart) bad.push(`overlap: ${said} and ${other.said}`);
      }
    });
    for (const path of chart.querySelectorAll('path')) {
      if (!/^[MLHVh\d .-]*$/.test(path.getAttribute('d'))) bad.push(`no number in a line: ${name}: ${path.dataset.name}`);
    }
  }
  const points = (path) => [...path.getAttribute('d').matchAll(/[ML]/g)].length;
  const charts = Object.fromEntries([...document.querySelectorAll('.chart')].map((chart) =>
    [chart.querySelector('b').textContent, Math.min(...[...chart.querySelectorAll('path[data-name]')].map(points))]));
  const pictures = [...document.images].filter((image) => image.getClientRects().length);
  const page = document.documentElement;
  return {
    texts, bad, charts, width: page.clientWidth, scroll: page.scrollWidth, pictures: pictures.length,
    broken: pictures.filter((image) => image.complete && !image.naturalWidth).length,
  };
})()
