// How full the links were: a line per way, on the time axis of the schedule.

const linkPixels = { image: null, key: '' };

const RAMP = [[0, 0], [0.05, 0.14], [0.5, 0.55], [0.9, 0.8], [1, 1]];   // share in use to strength of colour

/** Return the tiers of links of all runs: {run, ...group}. */
const linkGroups = () => RUNS.flatMap(run => (run.links ? run.links.groups.map(group => ({ ...group, run })) : []));

/** Return the height of one line and where each tier begins. */
function linkGeometry(groups) {
  const lines = groups.reduce((sum, group) => sum + group.n_lines, 0);
  const line = Math.max(1, Math.min(9, Math.floor(220 / lines)));
  let y = GEOMETRY.axis;
  const tops = groups.map(group => { const top = y + 16; y = top + group.n_lines * line + 8; return top; });
  return { line, tops, height: y + 4 };
}

/** Draw the links, if a run holds any; only the window of time that is shown. */
function drawLinks() {
  const groups = linkGroups();
  $('#links-section').hidden = !groups.length;
  if (!groups.length) return;
  const { line, tops, height } = linkGeometry(groups);
  const g = sizeCanvas($('#links'), view.width, height);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, view.width, height);
  drawTimeAxis(g, GEOMETRY.axis - 6, height, GEOMETRY.axis / 2 - 1);
  const image = linksImage(groups);
  g.imageSmoothingEnabled = false;
  g.save();
  g.beginPath();
  g.rect(view.left, 0, view.plot, height);
  g.clip();
  let from = 0;
  groups.forEach((group, number) => {
    const far = stepOf(group.run).length_ns;
    g.drawImage(image, 0, from, image.width, group.n_lines, toX(0), tops[number], toX(far) - toX(0), group.n_lines * line);
    from += group.n_lines;
    drawNarrow(g, group, tops[number], line);
  });
  g.restore();
  groups.forEach((group, number) => drawTier(g, group, tops[number], line));
}

/** Frame each link while it had less than its width, and say what was left of it, once for both directions. */
function drawNarrow(g, group, top, line) {
  for (const { row, from_ns, to_ns, left } of group.narrow) {
    const [x0, x1, y] = [toX(from_ns), toX(to_ns), top + row * line];
    g.strokeStyle = surface().limit;
    g.lineWidth = 1.5;
    g.strokeRect(x0, y - 1, Math.max(x1 - x0, 3), Math.max(line, 3) + 2);
    const [, name, direction] = group.names[row].match(/^(.*) (\w+)$/);
    if (direction === 'out' || direction === 'up') continue;
    const words = `${name}: ${left ? `${formatShare(left)} of its width` : 'down'}`;
    const from = Math.max(x0, view.left) + 4;
    g.font = `600 11px ${FONT}`;
    const width = widthOf(g, words);
    if (x1 - from < width + 6) continue;
    g.fillStyle = surface().bg;
    g.fillRect(from - 3, y - 15, width + 6, 13);
    text(g, words, from, y - 8, { size: 11, weight: 600, colour: surface().limit });
  }
}

/** Return what was left of the width of a line at a time, 1 if all of it. */
const leftOf = (group, row, ns) =>
  group.narrow.reduce((left, part) => (part.row === row && part.from_ns <= ns && ns < part.to_ns ? Math.min(left, part.left) : left), 1);

/** Name a tier and say how full it was. */
function drawTier(g, group, top, line) {
  text(g, RUNS.length > 1 ? `${group.label}, ${group.run.label}` : group.label, view.left + 4, top - 8, { size: 11.5, weight: 600 });
  const ways = group.n_ways > group.n_lines ? `${group.n_ways} ways, the fullest of each few` : `${group.n_ways} ways`;
  textWithin(g, ways, 8, top + 6, view.left - 12, { size: 11, colour: surface().muted });
  if (narrow()) return;
  const left = view.left + view.plot + 12;
  const room = view.width - left - 8;
  [`mean ${formatShare(group.mean)}`, `fullest: ${group.fullest.name}, ${formatShare(group.fullest.mean)}`]
    .forEach((words, i) => textWithin(g, words, left, top + 6 + 14 * i, room, { size: 11, colour: i ? surface().muted : surface().ink }));
}

/** Return the picture of all lines, one pixel per line and slice. */
function linksImage(groups) {
  if (linkPixels.image && linkPixels.key === theme) return linkPixels.image;
  const runs = [...new Set(groups.map(group => group.run))];
  const { bins, full } = runs[0].links;
  const lines = groups.reduce((sum, group) => sum + group.n_lines, 0);
  const canvas = document.createElement('canvas');
  canvas.width = bins;
  canvas.height = lines;
  const g = canvas.getContext('2d');
  const image = g.createImageData(bins, lines);
  const pixels = new Uint32Array(image.data.buffer);
  const table = Array.from({ length: full + 1 }, (_, used) => packed(linkColour(used / full)));
  let at = 0;
  for (const { linksUsed } of runs) for (let i = 0; i < linksUsed.length; i++) pixels[at++] = table[Math.min(full, linksUsed[i])];
  g.putImageData(image, 0, 0);
  [linkPixels.image, linkPixels.key] = [canvas, theme];
  return canvas;
}

/** Return the colour of a link of which a share is in use: pale to strong, and red where it is full. */
function linkColour(share) {
  const upper = RAMP.findIndex(([at]) => at >= share);
  const [[a, p], [b, q]] = upper > 0 ? [RAMP[upper - 1], RAMP[upper]] : [RAMP[0], RAMP[0]];
  const strength = b > a ? p + (q - p) * (share - a) / (b - a) : p;
  const base = share > 0.9 ? mix(colours().compute.forward, surface().limit, (share - 0.9) * 10) : colours().compute.forward;
  return mix(surface().grid, base, strength);
}

/** Return a #rrggbb colour as the 32 bits of a pixel. */
function packed(colour) {
  const n = parseInt(colour.slice(1), 16);
  return (0xff000000 | (n & 255) << 16 | (n >> 8 & 255) << 8 | n >> 16) >>> 0;
}

/** Say what lies under the pointer. */
function wireLinks() {
  $('#links').addEventListener('pointermove', event => {
    const groups = linkGroups();
    if (!groups.length) return;
    const { line, tops } = linkGeometry(groups);
    let said = null;
    groups.forEach((group, number) => {
      const { bins, full } = group.run.links;
      const row = Math.floor((event.offsetY - tops[number]) / line);
      const bin = Math.floor(toTime(event.offsetX) / stepOf(group.run).length_ns * bins);
      if (row < 0 || row >= group.n_lines || bin < 0 || bin >= bins) return;
      const before = groups.slice(0, number).filter(other => other.run === group.run).reduce((sum, other) => sum + other.n_lines, 0);
      const used = group.run.linksUsed[(before + row) * bins + bin] / full;
      const left = leftOf(group, row, toTime(event.offsetX));
      const lost = left < 1 ? [['width left', left ? formatShare(left) : 'none, it is down']] : [];
      said = [`${group.names[row]}, ${group.label}`, [['in use', formatShare(used)], ...lost, ['time', formatMoment(toTime(event.offsetX))]]];
    });
    showWords(said, event.clientX, event.clientY);
  });
  $('#links').addEventListener('pointerleave', () => showWords(null));
}
