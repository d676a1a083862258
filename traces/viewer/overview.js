// All ranks at once: one line of pixels per rank.

let overviewImage = null;

/** Return the height of the picture: whole pixels per rank, fewer where ranks only repeat each other. */
function overviewHeight() {
  const { order: { length: lines }, folded } = META.overview;
  const most = META.slowest ? 384 : folded ? 256 : 512;
  return Math.min(most, lines * Math.max(1, Math.floor(192 / lines)));
}

/** Draw the overview where it has changed, and mark in it what the schedule shows: most frames move that alone. */
function drawOverview() {
  if (!META.overview) return;
  const rows = shownLines();
  const image = imageOf(RUNS[0]);
  const drawn = [view.width, view.printing, window.devicePixelRatio, ...rows].join();
  if (image.drawn !== drawn) paintOverview(image.canvas, rows);
  image.drawn = drawn;
  placeWindow(rows);
}

/** Return which lines of the overview the rows of the schedule are. */
const shownLines = () => view.slots.map(slot => META.overview.order.indexOf(slot.rank)).filter(row => row >= 0);

/** Paint all of the overview but the window of time. */
function paintOverview(image, rows) {
  const run = RUNS[0];
  const height = overviewHeight();
  const g = sizeCanvas($('#overview'), view.width, height + GEOMETRY.axis + 4);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, view.width, height + GEOMETRY.axis + 4);
  g.imageSmoothingEnabled = false;
  g.drawImage(image, view.left, GEOMETRY.axis, view.plot, height);
  const line = height / META.overview.order.length;
  drawGroups(g, line);
  drawOverviewAxis(g, run);
  drawBusy(g, run, line, height);
  drawSlowest(g, line);
  drawPointers(g, rows, line);
}

/** Return the picture of a step, a line per rank and as wide as on the screen, and what it was last drawn for. */
function imageOf(run) {
  const width = Math.round(view.plot * pixelRatio());
  const key = [theme, run.step, width, ...view.hide].join();
  if (overviewImage?.key === key) return overviewImage;
  const { bins, order, pattern, n_patterns: patterns } = META.overview;
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = order.length;
  const g = canvas.getContext('2d');
  const image = g.createImageData(width, order.length);
  const pixels = new Uint32Array(image.data.buffer);
  const colour = KINDS.map((kind, number) => (view.hide.has(number) ? 0 : packed(flatColour(kind))));
  order.forEach((_, row) => {
    const columns = new Columns(0, width / pixelRatio(), (kind, x, wide) => {
      const from = row * width + Math.round(x * pixelRatio());
      pixels.fill(colour[kind] ?? 0, from, from + Math.round(wide * pixelRatio()));
    });
    const at = (run.step * patterns + pattern[row]) * bins;
    const scale = width / pixelRatio() / bins;
    for (let bin = 0, until; bin < bins; bin = until) {
      const kind = run.overviewBins[at + bin];
      for (until = bin + 1; until < bins && run.overviewBins[at + until] === kind; until++);
      columns.add(bin * scale, until * scale, kind);
    }
    columns.finish();
  });
  g.putImageData(image, 0, 0);
  overviewImage = { key, canvas, drawn: '' };
  return overviewImage;
}

/** Name the groups of ranks at the left and draw a line between them. */
function drawGroups(g, line) {
  let free = 0;
  for (const [from, to, label] of META.overview.groups) {
    const y = GEOMETRY.axis + (from + to) / 2 * line;
    if (y - 6 >= free) {
      text(g, label, view.left - 10, y, { align: 'right', size: 11 });
      free = y + 6;
    }
    g.fillStyle = surface().bg;
    if (from && (to - from) * line >= 6) g.fillRect(view.left, GEOMETRY.axis + from * line - 0.5, view.plot, 1);
  }
}

function drawOverviewAxis(g, run) {
  const far = stepOf(run).length_ns;
  const [ticks, step] = ticksBetween(0, far, Math.max(3, view.plot / 115));
  for (const t of ticks) {
    const x = view.left + t / far * view.plot;
    if (x < view.left + view.plot - 20) {
      text(g, tickLabel(t, step, far), Math.max(x, view.left + 18), GEOMETRY.axis / 2, { align: 'center', colour: surface().muted });
    }
  }
}

/** Draw beside each rank how much of the step it computes. */
function drawBusy(g, run, line, height) {
  if (narrow()) return;
  const left = view.left + view.plot + 12;
  const room = view.width - left - 8;
  const { order, pattern } = META.overview;
  text(g, 'compute, share of the step', left, GEOMETRY.axis / 2, { colour: surface().muted });
  g.fillStyle = surface().grid;
  g.fillRect(left, GEOMETRY.axis, room, height);
  g.fillStyle = colours().compute.forward;
  order.forEach((rank, row) => {
    g.fillRect(left, GEOMETRY.axis + row * line, room * stepOf(run).busy[pattern[row]], Math.max(line, 0.8));
  });
}

/** Point at the rank that is slower than its like. */
function drawSlowest(g, line) {
  const row = META.slowest && !narrow() ? META.overview.order.indexOf(META.slowest.rank) : -1;
  if (row < 0) return;
  const [x, y] = [view.left + view.plot + 12, GEOMETRY.axis + (row + 0.5) * line];
  const busy = (view.width - x - 8) * stepOf(RUNS[0]).busy[META.overview.pattern[row]];
  const words = `▲ rank ${META.slowest.rank} is slow`;
  g.font = `600 11px ${FONT}`;
  g.fillStyle = surface().bg;
  g.fillRect(x + 2, y + 4, widthOf(g, words) + 8, 15);
  text(g, words, x + 6, y + 12, { size: 11, weight: 600, colour: surface().limit });
  g.fillStyle = surface().limit;
  g.fillRect(x, y - 1.5, busy, 3);
}

/** Point at the rows that the schedule shows. */
function drawPointers(g, rows, line) {
  g.fillStyle = surface().ink;
  for (const row of rows) {
    const y = GEOMETRY.axis + (row + 0.5) * line;
    g.beginPath();
    g.moveTo(view.left - 2, y);
    g.lineTo(view.left - 8, y - 3);
    g.lineTo(view.left - 8, y + 3);
    g.fill();
  }
}

/** Frame the ranks and the time that the schedule shows; the frame is an element, to leave the pixels alone. */
function placeWindow(rows) {
  const { order, pattern } = META.overview;
  const frame = $('#overview-window');
  frame.hidden = !rows.length;
  if (!rows.length) return;
  const line = overviewHeight() / order.length;
  const far = stepOf(RUNS[0]).length_ns;
  const [x0, x1] = [view.t0, view.t1].map(t => view.left + Math.min(1, t / far) * view.plot);
  const shown = new Set(rows.map(row => pattern[row]));
  const all = pattern.every(one => shown.has(one));   // the rows stand for every rank
  const [first, last] = all ? [0, order.length] : [Math.min(...rows), Math.max(...rows) + 1];
  const [wide, tall] = [view.width / 100, (overviewHeight() + GEOMETRY.axis + 4) / 100];   // paper has another size
  const box = { left: (x0 - 1) / wide, width: (x1 - x0 + 2) / wide,
    top: (GEOMETRY.axis + first * line - 1) / tall, height: (Math.max(3, (last - first) * line) + 2) / tall };
  for (const [side, percent] of Object.entries(box)) frame.style[side] = `${percent}%`;
}

/** Let a click on a rank show the rows of its pipeline. */
function wireOverview() {
  $('#overview').addEventListener('pointerdown', event => {
    if (!META.overview) return;
    const { order, pick } = META.overview;
    const line = Math.floor((event.offsetY - GEOMETRY.axis) / overviewHeight() * order.length);
    const row = Math.max(0, Math.min(order.length - 1, line));
    pickRows(pick[row], order[row]);
  });
}
