// What is on the screen: the time window, the rows, what is hidden, selected and pointed at.

const view = {
  t0: 0, t1: 1,          // visible window, nanoseconds from the start of the step
  far: 1,                // end of the longest step shown
  slots: [],             // rows on the screen: {run, row, rank, label, sub}
  hide: new Set(),       // kinds switched off in the legend
  follow: null,          // {run, microbatch, pipeline} or {run, group, sequence}
  area: null,            // {times: [t, t], rows: [first, last]}: what was selected with a drag
  selected: null,        // what was clicked, as hover
  selecting: false,      // a drag selects an area, as it does with shift
  pointer: null,         // where the pointer is on the schedule: {x, y, clientX, clientY}
  hover: null,           // {slot, lane, index}
  path: false,           // whether the critical path is drawn
  pick: 0,               // which group of ranks the rows are
  printing: false,       // drawn for paper: of one width, with more pixels
};

const PRINTED = { width: 1180, ratio: 2.5 };   // pixels across a sheet on its side, and dots for each

const narrow = () => view.width < 720;
const GEOMETRY = { axis: 26, left: 134, right: 184 };

/** Recompute sizes from the width of the page. */
function layoutView() {
  view.width = view.printing ? PRINTED.width : Math.max(280, $('#schedule').parentElement.clientWidth);
  view.left = narrow() ? 74 : GEOMETRY.left;
  view.right = narrow() ? 6 : GEOMETRY.right;
  view.plot = view.width - view.left - view.right;
  const lanes = Math.max(...view.slots.map(slot => slot.run.lanes.length), 1) - 1;
  const target = Math.min(view.slots.length > 2 ? 104 : 124, Math.max(26, 620 / Math.max(1, view.slots.length)));
  const lane = Math.max(3, Math.min(15, Math.floor((target * 0.46) / Math.max(1, lanes)) - 1));
  const least = view.slots.some(slot => slot.run.pair) ? 30 : 16;   // a pair has two halves to read
  const compute = Math.max(least, Math.min(view.slots.length > 2 ? 42 : 58, Math.round(target - lanes * (lane + 1) - 6)));
  view.lanes = [[3, compute]];
  for (let l = 0; l < lanes; l++) view.lanes.push([3 + compute + 2 + l * (lane + 1), lane]);
  const words = compute + 8 + 13 * 3;   // three lines beside the row, where there is room for them
  view.rowHeight = Math.max(3 + compute + 2 + lanes * (lane + 1) + 4, Math.min(target, words));
  view.height = GEOMETRY.axis + view.rowHeight * view.slots.length + 2;
}

const toX = t => view.left + (t - view.t0) / (view.t1 - view.t0) * view.plot;
const toTime = x => view.t0 + (x - view.left) / view.plot * (view.t1 - view.t0);
const rowTop = index => GEOMETRY.axis + index * view.rowHeight;

/** Show [t0, t1), kept inside the step. */
function showWindow(t0, t1) {
  const width = Math.min(t1 - t0, view.far);
  view.t0 = Math.max(0, Math.min(t0, view.far - width));
  view.t1 = view.t0 + width;
  requestDraw();
}

/** Zoom by `factor` about the time under x. Returns false when nothing changes. */
function zoomAt(factor, x) {
  const width = view.t1 - view.t0;
  if ((factor < 1 && width * factor < 200) || (factor > 1 && width >= view.far)) return false;
  const t = toTime(x);
  showWindow(t - (t - view.t0) * factor, t + (view.t1 - t) * factor);
  return true;
}

/** Show the whole step. */
function resetWindow() {
  view.area = null;
  showWindow(0, view.far);
}

/** Show the ranks of a pick; where several are drawn with the same spans, one of them, `rank` if it is there. */
function chooseRows(pick, rank) {
  const ranks = META.picks[pick];
  view.pick = pick;
  const chosen = new Map();
  for (const shown of rank === undefined ? ranks : [rank, ...ranks]) {
    const rows = RUNS.map(run => run.row_of[shown]).join();
    if (!chosen.has(rows)) chosen.set(rows, shown);
  }
  const order = [...chosen.values()].sort((a, b) => ranks.indexOf(a) - ranks.indexOf(b));
  const slots = order.flatMap(shown => RUNS.filter(run => run.row_of[shown] >= 0).map(run => slotOf(run, shown)));
  if (slots.length) view.slots = slots;
  view.hover = view.follow = view.selected = view.area = null;
}

/** Return what one line of the schedule shows: a rank of a run, drawn with the spans that are stored for it. */
function slotOf(run, rank) {
  const row = run.row_of[rank];
  const stored = run.rows[row];
  const label = stored.label.startsWith('Rank ') ? `Rank ${rank}` : stored.label;
  const own = stored.rank === rank ? stored.sub : `rank ${rank}, like ${stored.rank}`;
  return { run, row, rank, label, sub: RUNS.length > 1 ? run.label : own };
}

/** Take the end of the longest step shown as the far end of the time axis. */
function fitSteps() {
  view.far = Math.max(...RUNS.map(run => stepOf(run).length_ns), 1);
  view.t0 = 0;
  view.t1 = view.far;
}

let frame = 0;
/** Draw before the next frame, once, however often it is asked for. */
function requestDraw() {
  if (!frame) frame = requestAnimationFrame(drawAll);
}

/** Return how many dots of the screen, or of paper, a pixel of the page is wide. */
const pixelRatio = () => (view.printing ? PRINTED.ratio : Math.max(1, window.devicePixelRatio || 1));

/** Set a canvas to a size in CSS pixels and return its context, scaled for the screen. */
function sizeCanvas(canvas, width, height) {
  const ratio = pixelRatio();
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = width + 'px';
    canvas.style.height = height + 'px';
  }
  const g = canvas.getContext('2d', { alpha: canvas.id === 'overlay' });   // the others are painted all over
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}
