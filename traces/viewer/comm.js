// Drawing the communication lanes of a row: a thin line while its rank waits for the others, then a bar for
// the transfer, pale where it hides behind compute and solid where it is exposed.

const PALE = 0.62;
const PARTS = 8;   // steps from a transfer that is exposed to one that is hidden

/** Return the colours of a lane: while it waits, and by how many eighths of a transfer are hidden. */
function tintsOf(colour) {
  const { bg } = surface();
  return { waiting: mix(colour, bg, 0.45), hidden: Array.from({ length: PARTS + 1 }, (_, n) => mix(colour, bg, n / PARTS * PALE)) };
}

/** Draw one communication lane of a row. */
function drawCommunication(g, slot, lane, y, height) {
  const { run, row } = slot;
  const [low, high] = laneRange(run, row, lane);
  const axis = run.lanes[lane].axis;
  if (low === high || view.hide.has(run.lanes[lane].kind)) return;
  const tints = tintsOf(axisColour(axis));
  const narrowSpans = new TransferColumns(g, y, height, tints);
  for (let i = firstEndingAfter(run, low, high, view.t0); i < high && run.start[i] < view.t1; i++) {
    const [x0, x1] = extent(run, i, i);
    if (x1 <= x0) continue;
    const dimmed = isDimmed(slot, i);
    if (x1 - x0 < SMALL_PX) { narrowSpans.add(x0, x1 - x0, run, i); continue; }
    narrowSpans.flush();
    g.globalAlpha = dimmed ? 0.2 : 1;
    drawTransfer(g, slot, i, tints, y, height);
    g.globalAlpha = 1;
  }
  narrowSpans.flush();
}

/** Draw one communication that is wide enough to see. */
function drawTransfer(g, slot, i, tints, y, height) {
  const { run, row } = slot;
  const right = view.left + view.plot;
  const clip = t => Math.max(view.left, Math.min(right, toX(t)));
  const moves = run.start[i] + run.waited[i] * run.tick_ns;
  const [x0, xm, x1] = [clip(run.start[i]), clip(moves), clip(run.end[i])];
  g.fillStyle = tints.waiting;
  if (xm - x0 > 0.5) {
    g.fillRect(x0, y + height / 2 - 0.5, xm - x0, 1);
    g.fillRect(x0, y, 1, height);
  }
  if (x1 <= xm) return;
  g.fillStyle = tints.hidden[PARTS];
  g.fillRect(xm, y, x1 - xm, height);
  g.fillStyle = tints.hidden[0];
  const [low, high] = laneRange(run, row, 0);
  for (let j = firstEndingAfter(run, low, high, moves); j < high && run.start[j] < run.end[i]; j++) {
    if (!isState(run.kind[j])) continue;
    const [a, b] = [Math.max(xm, toX(run.start[j])), Math.min(x1, toX(run.end[j]))];
    if (b > a) g.fillRect(a, y, b - a, height);
  }
  if (height >= 11 && x1 - xm > 26) drawTransferLabel(g, run, i, tints.hidden, xm, x1, y, height);
}

/** Write what is transferred into a bar that has room for it. */
function drawTransferLabel(g, run, i, hidden, x0, x1, y, height) {
  const operation = labelOf(run, i).operation.replaceAll('_', ' ');
  const layer = run.layer[i] >= 0 ? `L${run.layer[i]}` : run.microbatch[i] >= 0 ? String(run.microbatch[i]) : '';
  const initials = operation.split(' ').map(word => word[0]).join('');
  g.font = `500 ${height - 4}px ${FONT}`;
  const moving = run.end[i] - run.start[i] - run.waited[i] * run.tick_ns;
  const isPale = run.hidden[i] * run.tick_ns > moving / 2;
  for (const words of [`${operation} ${layer}`, `${initials} ${layer}`, layer]) {
    if (!words || widthOf(g, words) + 7 > x1 - x0) continue;
    const ink = isPale ? surface().ink : inkOn(hidden[0]);
    g.strokeStyle = hidden[isPale ? PARTS : 0];   // read it where pale meets solid
    g.lineWidth = 3;
    g.textAlign = 'left';
    g.textBaseline = 'middle';
    g.strokeText(words, x0 + 3, y + height / 2 + 0.5);
    text(g, words, x0 + 3, y + height / 2 + 0.5, { size: height - 4, weight: 500, colour: ink });
    return;
  }
}

/** Adds up transfers too narrow to draw; a column is as pale as most of it is hidden. */
class TransferColumns {
  constructor(g, y, height, tints) {
    Object.assign(this, { g, y, height, tints, column: -1, used: 0, hidden: 0 });
  }

  add(x, width, run, i) {
    const column = Math.floor(x);
    if (column !== this.column) { this.flush(); this.column = column; }
    const moving = run.end[i] - run.start[i] - run.waited[i] * run.tick_ns;
    this.used += width;
    this.hidden += moving > 0 ? width * Math.min(1, run.hidden[i] * run.tick_ns / moving) : 0;
  }

  flush() {
    if (this.column >= view.left && this.column < view.left + view.plot) {
      this.g.globalAlpha = Math.min(1, 0.3 + 0.7 * this.used);
      this.g.fillStyle = this.tints.hidden[Math.round(PARTS * this.hidden / this.used)];
      this.g.fillRect(this.column, this.y, 1, this.height);
      this.g.globalAlpha = 1;
    }
    this.column = -1;
    this.used = this.hidden = 0;
  }
}
