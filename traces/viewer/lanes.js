// Drawing one lane of one row, at any zoom.
//
// Cells of the compute lane come in three sizes: a micro-batch's pass, its layers, single spans. The largest
// size is drawn whose parts would be too small to see. What is under about a pixel is added up per pixel
// column, and the kind that covers most of the column is painted as densely as the column is covered:
// nothing disappears and nothing is painted twice.

const MERGE_GAP_PX = 14;   // a gap narrower than this does not split a cell; it shows as a strip inside it
const LAYER_PX = 20;       // draw layers once they are this wide on average
const BATCH_LAYER_PX = 46; // the same where a micro-batch has to be named too
const SPAN_PX = 28;        // and single spans within a layer at this width
const SMALL_PX = 1.2;

/** Adds up spans too narrow to draw, one pixel column at a time. */
class Columns {
  constructor(g, y, height) {
    Object.assign(this, { g, y, height, column: -1, used: 0, cover: new Float64Array(KINDS.length) });
  }

  add(x, width, kind) {
    const column = Math.floor(x);
    if (column !== this.column) { this.flush(); this.column = column; }
    this.cover[kind] += width;
    this.used += width;
  }

  flush() {
    if (this.column < 0) return;
    let kind = 0;
    for (let k = 1; k < this.cover.length; k++) if (this.cover[k] > this.cover[kind]) kind = k;
    if (this.column >= view.left && this.column < view.left + view.plot) {
      this.g.globalAlpha = Math.min(1, 0.3 + 0.7 * this.used);
      this.g.fillStyle = fillOf(this.g, KINDS[kind]);
      this.g.fillRect(this.column, this.y, 1, this.height);
      this.g.globalAlpha = 1;
    }
    this.cover.fill(0);
    this.used = 0;
    this.column = -1;
  }
}

/** Return the visible pixels of spans i..j: left edge and right edge. */
function extent(run, i, j) {
  return [Math.max(view.left, toX(run.start[i])), Math.min(view.left + view.plot, toX(run.end[j]))];
}

/** Return whether the micro-batch that is being followed is another one than that of span i. */
function isDimmed(slot, i) {
  const follow = view.follow;
  if (!follow || follow.microbatch === undefined) return false;
  return pipelineOf(slot) !== follow.pipeline || slot.run.microbatch[i] !== follow.microbatch;
}

/** Draw the compute lane of a row: cells of work, and hatched idle time between them. */
function drawCompute(g, slot, y, height) {
  const { run, row } = slot;
  const [low, high] = laneRange(run, row, 0);
  const small = new Columns(g, y, height);
  const paint = { g, slot, run, y, height, small };
  let i = drawnFrom(run, firstEndingAfter(run, low, high, view.t0), low, high);
  while (i < high && run.start[i] < view.t1) {
    const until = wholePair(run, i, high);
    if (until >= i) { drawPair(paint, i, until); i = until + 1; continue; }
    if (isState(run.kind[i])) { drawState(paint, i); i++; continue; }
    const last = cellEnd(run, i, high);
    drawCell(paint, i, last, 0);
    i = last + 1;
  }
  small.flush();
}

/**
 * Return how spans i..j of one cell are cut at the current zoom: a function from a span to the part it
 * belongs to, or null where the cell is drawn as a whole.
 */
function cutOf(run, i, j, level) {
  if (i === j || level === 2) return null;
  const width = (run.end[j] - run.start[i]) / (view.t1 - view.t0) * view.plot;
  const layers = level === 0 ? layersIn(run, i, j) : 1;
  const wide = run.microbatch[i] >= 0 ? BATCH_LAYER_PX : LAYER_PX;
  if (layers > 1) return width / layers >= wide ? k => run.layer[k] : null;
  return width / (j - i + 1) >= SPAN_PX ? k => k : null;
}

/** Draw spans i..j as one cell, or its parts where they are large enough to see, with the idle time between. */
function drawCell(paint, i, j, level) {
  const { run } = paint;
  const key = cutOf(run, i, j, level);
  if (!key) { drawWork(paint, i, j, i === j ? 2 : level); return; }
  while (i <= j) {
    if (isState(run.kind[i])) { drawState(paint, i); i++; continue; }
    const last = partEnd(run, i, j, key);
    drawCell(paint, i, last, level + 1);
    i = last + 1;
  }
}

/** Return the last span of the part that begins with span i. */
function partEnd(run, i, j, key) {
  let last = i;
  for (let k = i + 1; k <= j; k++) {
    if (isState(run.kind[k])) continue;
    if (key(k) !== key(i)) break;
    last = k;
  }
  return last;
}

/** Return whether span k is a gap so short that the work around it may be one cell. */
function isShortGap(run, k) {
  return isState(run.kind[k]) && (run.end[k] - run.start[k]) / (view.t1 - view.t0) * view.plot < MERGE_GAP_PX;
}

/** Return the last span of the cell that begins with span i; longer gaps and other work end it. */
function cellEnd(run, i, high) {
  let last = i;
  for (let k = i + 1; k < high; k++) {
    if (!isState(run.kind[k]) && sameCell(run, i, k)) last = k;
    else if (!isShortGap(run, k)) break;
  }
  return last;
}

/** Return the first span of the cell that span i lies in, or i if it is idle time between cells. */
function cellStart(run, i, low, high) {
  if (i >= high) return i;
  let first = i;
  for (let k = i; k >= low; k--) {
    if (isState(run.kind[k])) {
      if (!isShortGap(run, k)) break;
    } else if (isState(run.kind[first]) || sameCell(run, first, k)) first = k;
    else break;
  }
  return isState(run.kind[first]) || cellEnd(run, first, high) < i ? i : first;
}

/** Return what is drawn where span i is: the first and last span of its cell or part, and the level. */
function drawnAround(run, row, i) {
  const [low, high] = laneRange(run, row, 0);
  const alone = { first: i, last: i, level: 2 };
  const from = pairStart(run, i, low);
  const until = wholePair(run, from, high);
  if (until >= from) return { first: from, last: until, level: 0, halves: halvesOf(run, from, until) };
  let first = cellStart(run, i, low, high);
  if (isState(run.kind[first])) return alone;
  let last = cellEnd(run, first, high);
  for (let level = 0; ; level++) {
    const key = cutOf(run, first, last, level);
    if (!key) return { first, last, level: first === last ? 2 : level };
    let part = first;
    while (part <= i && (isState(run.kind[part]) || partEnd(run, part, last, key) < i)) {
      part = isState(run.kind[part]) ? part + 1 : partEnd(run, part, last, key) + 1;
    }
    if (part > i) return alone;
    last = partEnd(run, part, last, key);
    first = part;
  }
}

/** Return how many layers the spans i..j pass through; what belongs to none counts as one more. */
function layersIn(run, i, j) {
  let [count, previous, outside] = [0, -1, 0];
  for (let k = i; k <= j; k++) {
    if (isState(run.kind[k]) || run.layer[k] === previous) continue;
    if (run.layer[k] < 0) { outside = 1; continue; }
    previous = run.layer[k];
    count++;
  }
  return count + outside;
}

/** Draw spans i..j, all work of one kind, as one rectangle; waiting inside it is a strip of the same area. */
function drawWork(paint, i, j, level) {
  const { g, run, slot, y, height, small } = paint;
  const kind = run.kind[i];
  if (view.hide.has(kind)) return;
  const [x0, x1] = extent(run, i, j);
  if (x1 - x0 < SMALL_PX) { if (x1 > x0) small.add(x0, x1 - x0, kind); return; }
  small.flush();
  const dimmed = isDimmed(slot, i);
  g.globalAlpha = dimmed ? 0.16 : 1;
  fillWork(paint, i, x0, x1);
  const solid = i < j ? drawStrip(paint, i, j, x0, x1) - y : height;
  if (x1 - x0 > 3) {
    g.fillStyle = surface().bg;
    g.fillRect(x1 - 0.7, y, 0.7, height);
  }
  if (KINDS[kind].outline) {
    g.fillStyle = mix(flatColour(KINDS[kind]), '#000000', 0.3);
    g.fillRect(x0, y, x1 - x0, 0.8);
    g.fillRect(x0, y + height - 0.8, x1 - x0, 0.8);
  }
  const room = solid >= 12 ? solid : solid >= height / 2 ? height : 0;   // words on a strip of waiting cannot be read
  if (!dimmed) drawWorkLabel(g, run, i, level, x0, x1, y, room);
  g.globalAlpha = 1;
}

/** Fill a cell with the colour of span i; a light band on top says which part of the model on this rank. */
function fillWork({ g, run, y, height }, i, x0, x1) {
  g.fillStyle = flatColour(KINDS[run.kind[i]]);
  g.fillRect(x0, y, x1 - x0, height);
  if (run.n_chunks <= 1 || run.chunk[i] <= 0) return;
  g.fillStyle = mix(flatColour(KINDS[run.kind[i]]), '#ffffff', 0.55);
  g.fillRect(x0, y, x1 - x0, Math.max(2, height * 0.2 * run.chunk[i] / (run.n_chunks - 1)));
}

/** Draw the idle time within a cell as hatched strips at its foot, each as tall as its share of the cell; return their top. */
function drawStrip({ g, run, y, height }, i, j, x0, x1) {
  const idle = new Map();
  for (let k = i; k <= j; k++) {
    if (isState(run.kind[k])) idle.set(run.kind[k], (idle.get(run.kind[k]) || 0) + run.end[k] - run.start[k]);
  }
  let foot = y + height;
  for (const [kind, ns] of idle) {
    const tall = height * ns / (run.end[j] - run.start[i]);
    foot -= tall;
    if (view.hide.has(kind)) continue;
    g.fillStyle = tall >= 3 ? fillOf(g, KINDS[kind]) : flatColour(KINDS[kind]);
    g.fillRect(x0, foot, x1 - x0, tall);
  }
  return foot;
}

/** Write the longest of a few labels that fits into a cell. */
function drawWorkLabel(g, run, i, level, x0, x1, y, height) {
  const room = x1 - x0 - 3;
  if (room < 6 || height < 11) return;
  const size = Math.min(13, Math.max(9, height * 0.5));
  g.fillStyle = inkOn(flatColour(KINDS[run.kind[i]]));
  g.textAlign = 'center';
  g.textBaseline = 'middle';
  for (const [text, scale, widest] of workLabels(run, i, level)) {
    g.font = `600 ${size * scale}px ${FONT}`;
    if (widthOf(g, widest || text) > room + (scale < 0.7 ? 1.5 : 0)) continue;
    g.fillText(text, (x0 + x1) / 2, y + height / 2 + 0.5);
    return;
  }
}

/** Return whether the micro-batch of span i tells it from others: not where a step has a single one. */
const isNumbered = (run, i) => run.microbatch[i] >= 0 && run.most_microbatch > 0;

/**
 * Return the labels of a cell from longest to shortest: text, size relative to the largest, and what must fit
 * if not the text itself, so that cells of one size are labelled alike whatever their number.
 */
function workLabels(run, i, level) {
  const kind = KINDS[run.kind[i]];
  const batch = run.microbatch[i];
  if (level === 0) {
    if (!isNumbered(run, i)) return [[kind.label, 1], [kind.letter, 1]];
    const widest = '0'.repeat(run.n_digits);
    return [[`${kind.letter} ${batch}`, 1, `${kind.letter} ${widest}`], [`${batch}`, 1, widest], [`${batch}`, 0.77, widest], [`${batch}`, 0.66, widest]];
  }
  const layer = run.layer[i] >= 0 ? `L${run.layer[i]}` : '';
  const name = level === 2 ? labelOf(run, i).name : '';
  if (!layer && !name) return workLabels(run, i, 0);
  const which = isNumbered(run, i) ? `${kind.letter} ${batch}` : kind.letter;
  const long = [layer && !name ? layer : '', name].filter(Boolean).join(' ');
  const short = name.split('.').filter(part => part && isNaN(part)).pop() || '';
  const labels = [[`${which} · ${long}`, 0.88], [long, 0.85]];
  if (layer) labels.push([`${layer} ${short}`.trim(), 0.85], [layer, 0.85], [layer, 0.7]);
  else if (short) labels.push([short, 0.85]);
  return labels;
}

/** Draw one interval in which nothing is computed, hatched by its cause. */
function drawState({ g, run, y, height, small }, i) {
  const kind = run.kind[i];
  if (view.hide.has(kind)) return;
  const [x0, x1] = extent(run, i, i);
  if (x1 - x0 < SMALL_PX) { if (x1 > x0) small.add(x0, x1 - x0, kind); return; }
  small.flush();
  g.fillStyle = fillOf(g, KINDS[kind]);
  g.fillRect(x0, y, x1 - x0, height);
  if (x1 - x0 < 60 || height < 14) return;
  const text = `${KINDS[kind].short} ${formatTime(run.end[i] - run.start[i], 1)}`;
  g.font = `500 11.5px ${FONT}`;
  const width = widthOf(g, text);
  if (x1 - x0 < width + 16) return;
  g.fillStyle = hatchOf(KINDS[kind]).back;
  g.fillRect((x0 + x1 - width) / 2 - 5, y + height / 2 - 8.5, width + 10, 17);
  g.fillStyle = surface().ink;
  g.textAlign = 'center';
  g.textBaseline = 'middle';
  g.fillText(text, (x0 + x1) / 2, y + height / 2 + 0.5);
}
