// Drawing one lane of one row, at any zoom.
//
// Time becomes area in one place, `Columns`: each pixel column of the screen gets one colour, and each colour
// as many columns as is its share of the time. Cells of the compute lane come in three sizes: a micro-batch's
// pass, its layers, single spans. The largest size is drawn whose parts would be too small to see, its work
// first and behind it what it waited for: one after the other, as in time.

const MERGE_GAP_PX = 14;   // a gap narrower than this does not split a cell
const LAYER_PX = 20;       // draw layers once they are this wide on average
const BATCH_LAYER_PX = 46; // the same where a micro-batch has to be named too
const SPAN_PX = 28;        // and single spans within a layer at this width
const PIECE_PX = 5;        // within a cell, draw work and gaps where they were once they are this wide on average
const STRETCH_PX = 64;     // else put them together, work before gaps, in stretches of about this width
const EDGE_PX = 5;         // a narrower block of work has no edge: it might be that of a neighbour
const HATCH_PX = 4;        // a narrower area has the flat colour of its hatch
const PAIR = -1;           // kind of work that takes turns: several colours, one above the other

/** Paints one line of pixels: each column has one colour, and each colour as many as is its share of the time. */
class Columns {
  /** `paint(kind, x, width, look)` draws an area between the pixels `from` and `to` of the page. */
  constructor(from, to, paint) {
    this.ratio = pixelRatio();
    this.from = Math.round(from * this.ratio);
    this.to = Math.round(to * this.ratio);
    Object.assign(this, { paint, column: -1, used: 0, inColumn: [], owed: [], run: null });
  }

  /** Add the area of a kind from x0 to x1; what is added later lies further right. `look` is handed on to paint. */
  add(x0, x1, kind, look) {
    const a = Math.max(x0 * this.ratio, this.from);
    const b = Math.min(x1 * this.ratio, this.to);
    if (!(b > a)) return;
    const [first, last] = [Math.floor(a), Math.floor(b)];
    if (first !== this.column) this.flush();
    this.column = first;
    if (first === last) { this.put(kind, look, b - a); return; }
    this.put(kind, look, first + 1 - a);
    this.flush();
    this.extend(kind, look, first + 1, last);
    this.column = last;
    this.put(kind, look, b - last);
  }

  put(kind, look, share) {
    if (share <= 0) return;
    const known = this.inColumn.find(part => part.kind === kind);
    if (known) known.share += share; else this.inColumn.push({ kind, look, share });
    this.used += share;
  }

  /** Give the column to the kind in it that was painted least so far, compared to its time; to none where most is empty. */
  flush() {
    if (this.inColumn.length) {
      if (this.used < 1 - 1e-6) this.inColumn.push({ kind: null, share: 1 - this.used });
      let most = null;
      for (const part of this.inColumn) {
        part.debt = this.owed.find(debt => debt.kind === part.kind);
        if (!part.debt) this.owed.push(part.debt = { kind: part.kind, columns: 0 });
        part.debt.columns += part.share;
        if (!most || part.debt.columns > most.debt.columns) most = part;
      }
      most.debt.columns -= 1;
      if (most.kind !== null) this.extend(most.kind, most.look, this.column, this.column + 1);
    }
    this.inColumn = [];
    this.used = 0;
    this.column = -1;
  }

  extend(kind, look, from, to) {
    if (to <= from) return;
    const { run } = this;
    if (run && run.kind === kind && run.look === look && run.to === from) { run.to = to; return; }
    this.emit();
    this.run = { kind, look, from, to };
  }

  emit() {
    const { run } = this;
    if (run) this.paint(run.kind, run.from / this.ratio, (run.to - run.from) / this.ratio, run.look);
    this.run = null;
  }

  finish() {
    this.flush();
    this.emit();
  }
}

/** Return the columns of a lane of kinds: each is filled with its colour or hatch, unless it is hidden. */
function kindColumns(g, y, height, from = view.left, to = view.left + view.plot) {
  return new Columns(from, to, (kind, x, width, look) => {
    const parts = kind === PAIR ? look.parts : [{ kind, share: 1, dimmed: look }];
    let top = y;
    for (const part of parts) {
      const tall = height * part.share;
      if (!view.hide.has(part.kind)) {
        g.globalAlpha = part.dimmed ? 0.16 : 1;
        g.fillStyle = width < HATCH_PX ? flatColour(KINDS[part.kind]) : fillOf(g, KINDS[part.kind]);
        g.fillRect(x, top, width, tall);
      }
      top += tall;
    }
    g.globalAlpha = 1;
  });
}

/** Return the visible pixels of spans i..j: left edge and right edge. */
function extent(run, i, j) {
  return between(run.start[i], run.end[j]);
}

/** Return the visible pixels from one time to another. */
function between(from, to) {
  return [Math.max(view.left, toX(from)), Math.min(view.left + view.plot, toX(to))];
}

/** Return whether the micro-batch that is being followed is another one than that of span i. */
function isDimmed(slot, i) {
  const follow = view.follow;
  if (!follow || follow.microbatch === undefined) return false;
  return pipelineOf(slot) !== follow.pipeline || slot.run.microbatch[i] !== follow.microbatch;
}

/** Draw the compute lane of a row: cells of work, hatched idle time between them, and on top the words of both. */
function drawCompute(g, slot, y, height) {
  const { run, row } = slot;
  const [low, high] = laneRange(run, row, 0);
  const paint = { g, slot, run, y, height, columns: kindColumns(g, y, height), words: [] };
  let i = drawnFrom(run, firstEndingAfter(run, low, high, view.t0), low, high);
  while (i < high && run.start[i] < view.t1) {
    const until = wholePair(run, i, high);
    if (until >= i) { drawPair(paint, i, until); i = until + 1; continue; }
    if (isState(run.kind[i])) { drawState(paint, i); i++; continue; }
    const last = cellEnd(run, i, high);
    drawCell(paint, i, last, 0);
    i = last + 1;
  }
  paint.columns.finish();
  paint.words.forEach(write => write());
}

/**
 * Return the blocks that spans i..j are drawn as, in order: {kind, from, to} in nanoseconds; kinds of work that
 * take turns, if `turns`, as one block {kind: PAIR, from, to, parts}. Where work and gaps are too small to see,
 * those of a stretch stand together, work first.
 */
function blocksOf(run, i, j, turns) {
  const [begin, until] = [run.start[i], run.end[j]];
  const width = (until - begin) / (view.t1 - view.t0) * view.plot;
  if (!turns && (i === j || width / (j - i + 1) >= PIECE_PX)) {
    return Array.from({ length: j - i + 1 }, (_, k) => ({ kind: run.kind[i + k], from: run.start[i + k], to: run.end[i + k] }));
  }
  const blocks = [];
  const stretches = Math.max(1, Math.round(width / STRETCH_PX));
  let k = i;
  for (let n = 0; n < stretches; n++) {
    const edges = [n, n + 1].map(at => (at < stretches ? begin + (until - begin) * at / stretches : until));
    const [low, high] = [Math.max(edges[0], view.t0), Math.min(edges[1], view.t1)];   // what is in view is true for itself
    const ns = new Map();
    for (; k <= j; k++) {
      const length = Math.min(run.end[k], high) - Math.max(run.start[k], low);
      if (length > 0) ns.set(run.kind[k], (ns.get(run.kind[k]) || 0) + length);
      if (run.end[k] > edges[1]) break;
    }
    let from = low;
    const work = [...ns].filter(([kind]) => !isState(kind)).sort(([a], [b]) => isForwardKind(b) - isForwardKind(a));
    if (turns && work.length > 1) {
      const sum = work.reduce((all, [, length]) => all + length, 0);
      blocks.push({ kind: PAIR, from, to: from += sum, parts: work.map(([kind, length]) => ({ kind, share: length / sum })) });
    } else for (const [kind, length] of work) blocks.push({ kind, from, to: from += length });
    for (const [kind, length] of ns) if (isState(kind)) blocks.push({ kind, from, to: from += length });
  }
  return blocks;
}

const isForwardKind = kind => KINDS[kind].id === 'forward';

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

/** Draw spans i..j, all work of one kind, and the waiting within; the widest block of work has the label. */
function drawWork(paint, i, j, level) {
  const { g, run, slot, y, height, columns } = paint;
  const kind = run.kind[i];
  const dimmed = isDimmed(slot, i);
  let [widest, wide] = [null, 0];
  for (const block of blocksOf(run, i, j, false)) {
    columns.add(toX(block.from), toX(block.to), block.kind, dimmed);
    const [x0, x1] = between(block.from, block.to);
    if (block.kind !== kind || x1 - x0 < EDGE_PX) continue;
    if (x1 - x0 > wide) [widest, wide] = [[x0, x1], x1 - x0];
    if (!view.hide.has(kind)) paint.words.push(() => edgeWork(paint, i, x0, x1, y, height, dimmed));
  }
  if (widest && !dimmed && !view.hide.has(kind)) paint.words.push(() => drawWorkLabel(g, run, i, level, ...widest, y, height));
}

/** Set a block of work apart in shades of its own colour: an edge at its right, and a light band for a part of the model. */
function edgeWork({ g, run }, i, x0, x1, y, height, dimmed) {
  const [kind, pixel] = [KINDS[run.kind[i]], 1 / pixelRatio()];
  const colour = flatColour(kind);
  const snap = x => Math.round(x / pixel) * pixel;
  g.globalAlpha = dimmed ? 0.16 : 1;
  if (run.n_chunks > 1 && run.chunk[i] > 0) {
    g.fillStyle = mix(colour, '#ffffff', 0.55);
    g.fillRect(snap(x0), y, snap(x1) - snap(x0), Math.max(2, height * 0.2 * run.chunk[i] / (run.n_chunks - 1)));
  }
  g.fillStyle = mix(colour, '#000000', 0.3);
  if (kind.outline) {
    g.fillRect(snap(x0), y, snap(x1) - snap(x0), 0.8);
    g.fillRect(snap(x0), y + height - 0.8, snap(x1) - snap(x0), 0.8);
  }
  g.fillRect(snap(x1) - pixel, y, pixel, height);
  g.globalAlpha = 1;
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
function drawState({ g, run, y, height, columns, words }, i) {
  const kind = run.kind[i];
  columns.add(toX(run.start[i]), toX(run.end[i]), kind, false);
  const [x0, x1] = extent(run, i, i);
  if (x1 - x0 < 60 || height < 14 || view.hide.has(kind)) return;
  const said = `${KINDS[kind].short} ${formatTime(run.end[i] - run.start[i], 1)}`;
  g.font = `500 11.5px ${FONT}`;
  const width = widthOf(g, said);
  if (x1 - x0 < width + 16) return;
  words.push(() => {
    g.fillStyle = hatchOf(KINDS[kind]).back;
    g.fillRect((x0 + x1 - width) / 2 - 5, y + height / 2 - 8.5, width + 10, 17);
    text(g, said, (x0 + x1) / 2, y + height / 2 + 0.5, { align: 'center', weight: 500 });
  });
}
