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
    drag = { x: event.offsetX, t0: view.t0, t1: view.t1, measure: event.shiftKey, moved: pointers.size > 1, gap: gapOf(pointers) };
    if (event.shiftKey) view.measure = [toTime(event.offsetX), toTime(event.offsetX)];
  });

  canvas.addEventListener('pointermove', event => {
    if (!drag) { pointAt(event); return; }
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event.offsetX);
    const dx = event.offsetX - drag.x;
    if (Math.abs(dx) > 3) drag.moved = true;
    if (pointers.size > 1) pinch(drag, pointers);
    else if (drag.measure) { view.measure[1] = toTime(clampX(event.offsetX)); drawOverlay(); }
    else if (drag.moved) showWindow(drag.t0 - dx / view.plot * (drag.t1 - drag.t0), drag.t1 - dx / view.plot * (drag.t1 - drag.t0));
  });

  canvas.addEventListener('pointerup', event => {
    pointers.delete(event.pointerId);
    if (drag && !drag.moved && !drag.measure) {
      const hit = hitAt(event.offsetX, event.offsetY);
      const before = view.follow;
      toggleFollow(hit);
      if (before && view.follow && before.microbatch === view.follow.microbatch && before.sequence === view.follow.sequence) view.follow = null;
      view.measure = null;
      if (event.pointerType === 'touch') pointAt(event);
      requestDraw();
    }
    if (!pointers.size) drag = null;
  });

  canvas.addEventListener('pointercancel', event => { pointers.delete(event.pointerId); drag = null; });
  canvas.addEventListener('pointerleave', () => { view.hover = null; showTip(null); drawOverlay(); });
  canvas.addEventListener('dblclick', resetWindow);
  document.addEventListener('keydown', onKey);
}

const clampX = x => Math.max(view.left, Math.min(view.left + view.plot, x));
const pan = ns => showWindow(view.t0 + ns, view.t1 + ns);

/** Point at what lies under the pointer: outline it and say what it is. */
function pointAt(event) {
  const hit = hitAt(event.offsetX, event.offsetY);
  const same = hit && view.hover && hit.slot === view.hover.slot && hit.lane === view.hover.lane && hit.first === view.hover.first;
  view.hover = hit;
  showTip(hit, event.clientX, event.clientY);
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
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.('input, select, textarea')) return;
  const middle = view.left + view.plot / 2;
  const step = (view.t1 - view.t0) * 0.15;
  const moves = {
    w: () => zoomAt(0.7, middle), '+': () => zoomAt(0.7, middle), '=': () => zoomAt(0.7, middle),
    s: () => zoomAt(1.4, middle), '-': () => zoomAt(1.4, middle),
    a: () => pan(-step), arrowleft: () => pan(-step), d: () => pan(step), arrowright: () => pan(step),
    c: togglePath, '/': () => $('#search').focus(),
    0: resetWindow, escape: () => { view.follow = view.measure = view.hover = null; showTip(null); requestDraw(); },
  };
  const move = moves[event.key.toLowerCase()];
  if (!move) return;
  move();
  event.preventDefault();
}
