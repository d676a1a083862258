// The schedule: rows, time axis, what each row's step is made of, and what lies on top of it.

const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

/** Draw the whole schedule. */
function drawTimeline() {
  const g = sizeCanvas($('#schedule'), view.width, view.height);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, view.width, view.height);
  drawTimeAxis(g, GEOMETRY.axis - 6, view.height, GEOMETRY.axis / 2 - 1);
  view.slots.forEach((slot, index) => drawRow(g, slot, index));
  g.fillStyle = surface().line;
  g.fillRect(view.left - 1, GEOMETRY.axis - 6, 1, view.height);
  if (!narrow()) {
    g.fillRect(view.left + view.plot + 1, GEOMETRY.axis - 6, 1, view.height);
    text(g, 'share of the step', view.left + view.plot + 12, GEOMETRY.axis / 2 - 1, { colour: surface().muted });
  }
}

/** Write text; alignment, size, weight and colour are optional. */
function text(g, words, x, y, { align = 'left', size = 11.5, weight = 400, colour = surface().ink } = {}) {
  g.font = `${weight} ${size}px ${FONT}`;
  g.textAlign = align;
  g.textBaseline = 'middle';
  g.fillStyle = colour;
  g.fillText(words, x, y);
}

const widths = new Map();   // by font, then by words: measuring them is a large part of a frame

/** Return how wide words are in the font that is set, in pixels. */
function widthOf(g, words) {
  let known = widths.get(g.font);
  if (!known || known.size > 20000) widths.set(g.font, known = new Map());
  let width = known.get(words);
  if (width === undefined) known.set(words, width = g.measureText(words).width);
  return width;
}

/** Write text, cut with an ellipsis where it does not fit. */
function textWithin(g, words, x, y, room, style) {
  g.font = `${style.weight || 400} ${style.size || 11.5}px ${FONT}`;
  let shown = words;
  while (shown.length > 1 && widthOf(g, shown) > room) shown = shown.slice(0, -2).trimEnd() + '…';
  text(g, shown, x, y, style);
}

/** Draw vertical grid lines and their labels. */
function drawTimeAxis(g, top, bottom, labelY) {
  const [ticks, step] = ticksBetween(view.t0, view.t1, Math.max(3, view.plot / 115));
  const right = view.left + view.plot;
  for (const t of ticks) {
    const x = toX(t);
    if (x < view.left - 1 || x > right + 1) continue;
    g.fillStyle = surface().grid;
    g.fillRect(Math.round(x), top, 1, bottom - top);
    if (x > right - 26) continue;
    text(g, tickLabel(t, step, view.far), Math.max(x, view.left + 18), labelY, { align: 'center', colour: surface().muted });
  }
}

/** Draw one row: its name, its lanes and its share bar. */
function drawRow(g, slot, index) {
  const top = rowTop(index);
  const [offset, height] = view.lanes[0];
  const lanes = slot.run.lanes;
  const middle = top + offset + height / 2;
  const wide = view.rowHeight >= 34;
  const room = view.left - 14;
  const isSlow = META.slowest?.rank === slot.rank;
  const label = narrow() ? slot.label.replace(/^Stages /, 'St. ') : slot.label;
  const name = isSlow ? `${label} ◀${narrow() ? '' : ' slow'}` : label;
  textWithin(g, name, 8, wide ? top + offset + 7 : middle, room, { size: 12.5, weight: 600, colour: isSlow ? surface().limit : surface().ink });
  if (wide) textWithin(g, narrow() ? slot.sub.split(',')[0] : slot.sub, 8, top + offset + 23, narrow() ? room : room - 24, { size: 11, colour: surface().muted });
  drawCompute(g, slot, top + offset, height);
  for (let lane = 1; lane < lanes.length; lane++) (lanes[lane].stream ? drawStream : drawCommunication)(g, slot, lane, top + view.lanes[lane][0], view.lanes[lane][1]);
  if (!narrow()) drawLaneNames(g, lanes, top);
  const lastOfPair = index + 1 === view.slots.length || view.slots[index + 1].rank !== slot.rank;
  if (RUNS.length === 1 || lastOfPair) {
    g.fillStyle = RUNS.length > 1 ? surface().line : surface().grid;
    g.fillRect(0, top + view.rowHeight - 1, view.width, RUNS.length > 1 ? 2 : 1);
  }
  if (!narrow()) drawShares(g, slot, top + offset, height);
}

/** Name the lanes beside a row, those of one axis together where they are thin; no name covers another. */
function drawLaneNames(g, lanes, top) {
  const together = view.lanes.length > 1 && view.lanes[1][1] < 8;
  const same = (a, b) => lanes[a].label === lanes[b].label || (together && lanes[a].axis && lanes[a].axis === lanes[b].axis);
  const names = [];
  for (let first = 1, last; first < lanes.length; first = last + 1) {
    last = first;
    while (last + 1 < lanes.length && same(first, last + 1)) last++;
    const from = view.lanes[first][0];
    const tall = view.lanes[last][0] + view.lanes[last][1] - from;
    const { axis, label } = lanes[first];
    const named = axis !== 'world' && axis in colours().axes;
    const words = label === lanes[last].label ? label : label.split(' ')[0];
    names.push({ words, y: from + tall / 2 + 0.5, size: Math.max(7, Math.min(9, tall + 2)), colour: named ? axisColour(axis) : surface().muted });
  }
  let free = view.lanes[0][1];
  for (const name of names) free = (name.y = Math.max(name.y, free + name.size / 2)) + name.size / 2;
  free = view.rowHeight;
  for (const name of names.reverse()) {
    free = (name.y = Math.min(name.y, free - name.size / 2)) - name.size / 2;
    text(g, name.words, view.left - 5, top + name.y, { align: 'right', size: name.size, colour: name.colour });
  }
}

/** Draw what a row's step is made of; the parts fill the bar exactly. */
function drawShares(g, slot, y, height) {
  const share = stepOf(slot.run).rows[slot.row];
  const left = view.left + view.plot + 12;
  const room = view.width - left - 8;
  const widest = Math.max(...RUNS.map(run => Math.max(...stepOf(run).rows.map(r => r.window_ns))));
  const scale = room / widest;
  const columns = kindColumns(g, y, height, left, left + room);
  let x = left;
  for (const [kind, ns] of share.parts) columns.add(x, x += ns * scale, kind, false);
  columns.finish();
  const lines = Math.floor((view.rowHeight - height - 8) / 13);
  wrapped(g, share.words, room).slice(0, lines).forEach((line, n) =>
    text(g, line, left, y + height + 10 + 13 * n, { size: 11, colour: surface().muted }));
}

/** Join phrases into lines that fit. */
function wrapped(g, phrases, room) {
  g.font = `400 11px ${FONT}`;
  return phrases.reduce((lines, phrase) => {
    const longer = lines.length ? `${lines[lines.length - 1]} · ${phrase}` : phrase;
    const fits = widthOf(g, longer) <= room;
    return fits ? [...lines.slice(0, -1), longer] : [...lines, phrase];
  }, []);
}

/** Draw what lies on top and changes with every move of the pointer. */
function drawOverlay() {
  const isEmpty = !(view.path || view.follow || search.hits.length || view.hover || view.selected || view.area);
  $('#overlay').hidden = isEmpty || view.printing;   // an empty layer costs every frame as much as a full one
  if (isEmpty) return;
  const g = sizeCanvas($(view.printing ? '#schedule' : '#overlay'), view.width, view.height);
  if (!view.printing) g.clearRect(0, 0, view.width, view.height);
  g.save();
  g.beginPath();
  g.rect(view.left, GEOMETRY.axis - 2, view.plot, view.height);
  g.clip();
  if (view.path) drawCritical(g);
  if (view.follow) drawFollowed(g);
  if (search.hits.length) drawHits(g);
  if (view.selected) drawOutline(g, view.selected, 3);
  if (view.hover) drawOutline(g, view.hover, 2);
  g.restore();
  if (view.area) drawArea(g);
}

/** Outline what the pointer is on. */
function drawOutline(g, { slot, lane, first, last }, width) {
  const index = view.slots.indexOf(slot);
  if (index < 0) return;
  const [offset, height] = view.lanes[lane];
  const [x0, x1] = extent(slot.run, first, last);
  if (x1 < x0) return;
  g.strokeStyle = surface().ink;
  g.lineWidth = width;
  g.strokeRect(x0 - 0.5, rowTop(index) + offset - 0.5, Math.max(2, x1 - x0) + 1, height + 1);
}

/** Draw the area that is selected, with its length. */
function drawArea(g) {
  const { times, rows: [first, last] } = view.area;
  const [a, b] = times.map(toX).map(clampX).sort((p, q) => p - q);
  const [top, height] = [rowTop(first), (last - first + 1) * view.rowHeight - 1];
  g.fillStyle = surface().ink;
  g.globalAlpha = 0.1;
  g.fillRect(a, top, b - a, height);
  g.globalAlpha = 1;
  g.fillRect(a, top, 1, height);
  g.fillRect(b, top, 1, height);
  const words = 'Δ ' + formatTime(Math.abs(times[1] - times[0]), 3);
  g.font = `600 12px ${FONT}`;
  const width = g.measureText(words).width + 12;
  const x = Math.max(view.left, Math.min(view.left + view.plot - width, (a + b - width) / 2));
  g.fillRect(x, 2, width, 18);
  text(g, words, x + width / 2, 11.5, { align: 'center', size: 12, weight: 600, colour: surface().bg });
}
