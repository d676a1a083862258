// Mouse, touch and keyboard on the schedule.

/** Connect the schedule to the pointer and the keyboard. */
function wireTimeline() {
  const canvas = $('#schedule');
  const pointers = new Map();
  let drag = null;

  canvas.addEventListener('wheel', event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) pan(event.deltaX / view.plot * (view.t1 - view.t0));
    const changed = sideways || zoomAt(Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0016), clampX(event.offsetX));
    if (changed) event.preventDefault();   // zoomed out fully, the wheel scrolls the page again
  }, { passive: false });

  canvas.addEventListener('pointerdown', event => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    const selects = event.shiftKey || view.selecting;
    drag = { x: event.offsetX, row: rowAt(event), t0: view.t0, t1: view.t1, selects, moved: pointers.size > 1, gap: gapOf(pointers) };
  });

  canvas.addEventListener('pointermove', event => {
    view.pointer = placeOf(event);
    if (!drag) { pointAt(view.pointer); return; }
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event.offsetX);
    const dx = event.offsetX - drag.x;
    if (Math.abs(dx) > 3) drag.moved = true;
    if (pointers.size > 1) pinch(drag, pointers);
    else if (drag.selects && drag.moved) selectArea(drag, event);
    else if (drag.moved) showWindow(drag.t0 - dx / view.plot * (drag.t1 - drag.t0), drag.t1 - dx / view.plot * (drag.t1 - drag.t0));
  });

  canvas.addEventListener('pointerup', event => {
    pointers.delete(event.pointerId);
    if (drag && !drag.moved) {
      view.pointer = placeOf(event);
      select(hitAt(event.offsetX, event.offsetY));
    }
    if (!pointers.size) drag = null;
  });

  canvas.addEventListener('pointercancel', event => { pointers.delete(event.pointerId); drag = null; });
  canvas.addEventListener('pointerleave', () => { view.hover = view.pointer = null; showTip(null); drawOverlay(); });
  canvas.addEventListener('dblclick', resetWindow);
  document.addEventListener('keydown', onKey);
}

const clampX = x => Math.max(view.left, Math.min(view.left + view.plot, x));
const pan = ns => showWindow(view.t0 + ns, view.t1 + ns);

const placeOf = event => ({ x: event.offsetX, y: event.offsetY, clientX: event.clientX, clientY: event.clientY });
const rowAt = event => Math.max(0, Math.min(view.slots.length - 1, Math.floor((event.offsetY - GEOMETRY.axis) / view.rowHeight)));

/** Select what was clicked, and follow it; let go of what is clicked again, or of all if nothing was hit. */
function select(hit) {
  const before = view.follow;
  const again = hit && view.selected && hit.slot === view.selected.slot && hit.lane === view.selected.lane && hit.first === view.selected.first;
  toggleFollow(hit);
  if (before && view.follow && before.microbatch === view.follow.microbatch && before.sequence === view.follow.sequence) view.follow = null;
  view.selected = again ? null : hit;
  view.area = null;
  requestDraw();
}

/** Select the time and the rows from where a drag began to where the pointer is. */
function selectArea(drag, event) {
  const rows = [drag.row, rowAt(event)].sort((a, b) => a - b);
  view.area = { times: [toTime(clampX(drag.x)), toTime(clampX(event.offsetX))], rows };
  drawOverlay();
  requestPanel();
}

/** Point at what lies under a place of the pointer: outline it and say what it is. */
function pointAt({ x, y, clientX, clientY }) {
  const hit = hitAt(x, y);
  const same = hit && view.hover && hit.slot === view.hover.slot && hit.lane === view.hover.lane && hit.first === view.hover.first;
  view.hover = hit;
  showTip(hit, clientX, clientY);
  if (!same) drawOverlay();
}

const gapOf = pointers => {
  const [a, b] = [...pointers.values()];
  return b === undefined ? 0 : Math.max(12, Math.abs(a - b));
};

/** Zoom with two fingers: the time under their middle stays there. */
function pinch(drag, pointers) {
  const factor = drag.gap / gapOf(pointers);
  const [a, b] = [...pointers.values()];
  const share = ((a + b) / 2 - view.left) / view.plot;
  const t = drag.t0 + share * (drag.t1 - drag.t0);
  const width = Math.max(200, Math.min(view.far, (drag.t1 - drag.t0) * factor));
  showWindow(t - share * width, t + (1 - share) * width);
}

/** Zoom, pan, reset and let go from the keyboard. */
function onKey(event) {
  if ($('#keys').open && event.key !== '?') return;   // it closes itself
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.('input, select, textarea')) return;
  const middle = view.pointer ? clampX(view.pointer.x) : view.left + view.plot / 2;
  const step = (view.t1 - view.t0) * 0.15;
  const moves = {
    w: () => zoomAt(0.7, middle), '+': () => zoomAt(0.7, middle), '=': () => zoomAt(0.7, middle),
    s: () => zoomAt(1.4, middle), '-': () => zoomAt(1.4, middle),
    a: () => pan(-step), arrowleft: () => pan(-step), d: () => pan(step), arrowright: () => pan(step),
    c: togglePath, '?': toggleKeys, '/': () => $('#search').focus(),
    0: resetWindow, escape: () => { view.follow = view.area = view.selected = view.hover = null; showTip(null); requestDraw(); },
  };
  const move = moves[event.key.toLowerCase()];
  if (!move) return;
  move();
  event.preventDefault();
}
