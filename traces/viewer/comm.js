// Drawing the lanes below the first of a row. Streams: what they compute, in its colours. Communication: a thin
// line while its rank waits for the others, then a bar for the transfer, pale where it hides behind compute and
// solid where it is exposed.

const PALE = 0.62;
const [WAITING, HIDDEN, EXPOSED] = [0, 1, 2];

/** Return the colours of a lane of communication, by what it does. */
const tintsOf = colour => [mix(colour, surface().bg, 0.45), mix(colour, surface().bg, PALE), colour];

/** Draw one lane of a further stream of the device. */
function drawStream(g, slot, lane, y, height) {
  const { run, row } = slot;
  const [low, high] = laneRange(run, row, lane);
  const columns = kindColumns(g, y, height);
  for (let i = firstEndingAfter(run, low, high, view.t0); i < high && run.start[i] < view.t1; i++) {
    columns.add(toX(run.start[i]), toX(run.end[i]), run.kind[i], isDimmed(slot, i));
  }
  columns.finish();
}

/** Draw one communication lane of a row. */
function drawCommunication(g, slot, lane, y, height) {
  const { run, row } = slot;
  const [low, high] = laneRange(run, row, lane);
  const axis = run.lanes[lane].axis;
  if (low === high || view.hide.has(run.lanes[lane].kind)) return;
  const { kind } = run.lanes[lane];
  const tints = KINDS[kind]?.group === 'host' ? Array(3).fill(cssFill(KINDS[kind])) : tintsOf(axisColour(axis));   // as in the legend
  const columns = new Columns(view.left, view.left + view.plot, (what, x, width, dimmed) => {
    g.globalAlpha = dimmed ? 0.2 : 1;
    g.fillStyle = tints[what];
    if (what === WAITING) g.fillRect(x, y + height / 2 - 0.5, width, 1); else g.fillRect(x, y, width, height);
    g.globalAlpha = 1;
  });
  const words = [];
  for (let i = firstEndingAfter(run, low, high, view.t0); i < high && run.start[i] < view.t1; i++) {
    const dimmed = isDimmed(slot, i);
    const moves = run.start[i] + run.waited[i] * run.tick_ns;
    columns.add(toX(run.start[i]), toX(moves), WAITING, dimmed);
    if (toX(run.end[i]) - toX(moves) < 2) addNarrow(columns, run, i, moves, dimmed);
    else addTransfer(columns, slot, i, moves, dimmed);
    const [x0, x1] = between(run.start[i], moves);
    if (x1 - x0 > 2) words.push(() => { g.fillStyle = tints[WAITING]; g.fillRect(x0, y, 1, height); });
    const [xm, x2] = between(moves, run.end[i]);
    if (height >= 11 && x2 - xm > 26 && !dimmed) words.push(() => drawTransferLabel(g, run, i, tints, xm, x2, y, height));
  }
  columns.finish();
  words.forEach(write => write());
}

/** Add a transfer that is too narrow to show when it was exposed: what was, then what was hidden. */
function addNarrow(columns, run, i, moves, dimmed) {
  const turn = run.end[i] - run.hidden[i] * run.tick_ns;
  columns.add(toX(moves), toX(turn), EXPOSED, dimmed);
  columns.add(toX(Math.max(moves, turn)), toX(run.end[i]), HIDDEN, dimmed);
}

/** Add a transfer, exposed where its rank computes nothing and hidden where it does. */
function addTransfer(columns, { run, row }, i, moves, dimmed) {
  const [low, high] = laneRange(run, row, 0);
  let done = moves;
  for (let j = firstEndingAfter(run, low, high, moves); j < high && run.start[j] < run.end[i]; j++) {
    if (!isState(run.kind[j])) continue;
    const [from, to] = [Math.max(done, run.start[j]), Math.min(run.end[i], run.end[j])];
    columns.add(toX(done), toX(from), HIDDEN, dimmed);
    columns.add(toX(from), toX(to), EXPOSED, dimmed);
    done = to;
  }
  columns.add(toX(done), toX(run.end[i]), HIDDEN, dimmed);
}

/** Write what is transferred into a bar that has room for it. */
function drawTransferLabel(g, run, i, tints, x0, x1, y, height) {
  const operation = labelOf(run, i).operation.replaceAll('_', ' ');
  const layer = run.layer[i] >= 0 ? `L${run.layer[i]}` : run.microbatch[i] >= 0 ? String(run.microbatch[i]) : '';
  const initials = operation.split(' ').map(word => word[0]).join('');
  g.font = `500 ${height - 4}px ${FONT}`;
  const moving = run.end[i] - run.start[i] - run.waited[i] * run.tick_ns;
  const isPale = run.hidden[i] * run.tick_ns > moving / 2;
  for (const words of [`${operation} ${layer}`, `${initials} ${layer}`, layer]) {
    if (!words || widthOf(g, words) + 7 > x1 - x0) continue;
    const ink = isPale ? surface().ink : inkOn(tints[EXPOSED]);
    g.strokeStyle = tints[isPale ? HIDDEN : EXPOSED];   // read it where pale meets solid
    g.lineWidth = 3;
    g.textAlign = 'left';
    g.textBaseline = 'middle';
    g.strokeText(words, x0 + 3, y + height / 2 + 0.5);
    text(g, words, x0 + 3, y + height / 2 + 0.5, { size: height - 4, weight: 500, colour: ink });
    return;
  }
}
