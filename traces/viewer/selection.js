// The docked panel below the schedule: what is selected, or else what is in view, as text that can be copied.

const PANEL_MS = 120;   // after the last change of the view: sums of large runs take longer than a frame
let panelTimer = 0;

/** Fill the panel when the view has come to rest. */
function requestPanel() {
  clearTimeout(panelTimer);
  panelTimer = setTimeout(fillPanel, PANEL_MS);
}

/** Fill the panel with the selection: an area, a cell or a transfer, else the window of time that is shown. */
function fillPanel() {
  const lines = view.area ? sumsOf(view.area, 'Selected') : view.selected ? wordsOf(view.selected) : sumsOf(wholeView(), 'In view');
  const [title, rest] = [`${lines[0]}\n`, lines.slice(1).join('\n')];
  if ($('#selection').textContent === title + rest) return;   // what is marked of it stays so
  $('#selection').replaceChildren(element('b', {}, title), rest);
}

const wholeView = () => ({ times: [view.t0, view.t1], rows: [0, view.slots.length - 1] });

/** Return what the tooltip of a hit says, as lines. */
function wordsOf(hit) {
  const [title, lines, note] = describeHit(hit);
  const wide = Math.max(...lines.map(([what]) => what.length));
  return [title, ...lines.map(([what, value]) => `  ${what.padEnd(wide)}  ${value}`), ...(note ? [`  ${note}`] : [])];
}

/** Return the time of each kind within an area, its rows added up, as lines. */
function sumsOf({ times, rows: [first, last] }, title) {
  const [from, to] = [...times].sort((a, b) => a - b);
  const slots = view.slots.slice(first, last + 1);
  const [sums, hidden] = [new Map(), new Map()];
  let all = 0;
  for (const { run, row } of slots) {
    run.lanes.forEach((lane, number) => {
      if (lane.stream) return;
      const [low, high] = laneRange(run, row, number);
      for (let i = firstEndingAfter(run, low, high, from); i < high && run.start[i] < to; i++) {
        const length = Math.min(run.end[i], to) - Math.max(run.start[i], from);
        if (!number) { sums.set(run.kind[i], (sums.get(run.kind[i]) || 0) + length); all += length; continue; }
        const moves = Math.max(run.start[i] + run.waited[i] * run.tick_ns, from);
        const behind = lane.axis ? computedBetween(run, row, moves, Math.min(run.end[i], to)) : 0;
        if (behind > 0) hidden.set(lane.kind, (hidden.get(lane.kind) || 0) + behind);
      }
    });
  }
  const names = [...new Set(slots.map(slot => slot.label + (RUNS.length > 1 ? ` (${slot.run.label})` : '')))];
  const who = names.length > 3 ? `${names[0]} … ${names.at(-1)}, sum of ${slots.length} rows` : names.join(' + ');
  const parts = [...sums].filter(([, ns]) => ns > 0).sort(([a], [b]) => a - b).map(([kind, ns]) => [KINDS[kind].label, ns, formatShare(ns / all)]);
  const beside = [...hidden].map(([kind, ns]) => [`${KINDS[kind].label} hidden behind compute`, ns, 'beside']);
  const wide = Math.max(0, ...[...parts, ...beside].map(([label]) => label.length));
  return [`${title}: ${formatMoment(from)} to ${formatMoment(to)} (${formatTime(to - from, 3)}) · ${who}`,
    ...[...parts, ...beside].map(([label, ns, share]) => `  ${label.padEnd(wide)}  ${formatTime(ns, 3).padStart(11)}  ${share.padStart(8)}`)];
}

/** Return how long a row computes between two times. */
function computedBetween(run, row, from, to) {
  const [low, high] = laneRange(run, row, 0);
  let sum = 0;
  for (let i = firstEndingAfter(run, low, high, from); i < high && run.start[i] < to; i++) {
    if (!isState(run.kind[i])) sum += Math.min(run.end[i], to) - Math.max(run.start[i], from);
  }
  return sum;
}

/** Copy the text of the panel; where the page may not, mark it, ready to be copied. */
async function copySelection() {
  fillPanel();
  window.getSelection().selectAllChildren($('#selection'));
  try {
    await navigator.clipboard.writeText($('#selection').textContent);
    $('#copied').textContent = 'copied';
  } catch {
    $('#copied').textContent = 'marked: copy it with Ctrl+C';
  }
  setTimeout(() => { $('#copied').textContent = ''; }, 3000);
}

/** Save the schedule as it is shown as a picture, with its title and legend. */
function savePicture() {
  const ratio = pixelRatio();
  const legend = [...$('#legend').querySelectorAll('button[aria-pressed=true]')].map(button => [KINDS[Number(button.dataset.kind)], button.textContent.slice(button.firstChild.textContent.length)]);
  const canvas = document.createElement('canvas');
  canvas.width = Math.round(view.width * ratio);
  const g = canvas.getContext('2d');
  const font = `400 12px ${FONT}`;
  g.font = font;
  const places = [];
  let [x, y] = [8, 62];
  for (const [kind, label] of legend) {
    const wide = 28 + g.measureText(label).width + 16;
    if (x + wide > view.width && x > 8) [x, y] = [8, y + 20];
    places.push({ kind, label, x, y });
    x += wide;
  }
  const top = y + 18;
  canvas.height = Math.round((top + view.height) * ratio);
  g.scale(ratio, ratio);
  g.fillStyle = surface().bg;
  g.fillRect(0, 0, view.width, top + view.height);
  textWithin(g, META.title, 8, 16, view.width - 16, { size: 16, weight: 600 });
  textWithin(g, `${META.subtitle} · ${formatMoment(view.t0)} to ${formatMoment(view.t1)}`, 8, 38, view.width - 16, { size: 12, colour: surface().muted });
  for (const { kind, label, x: left, y: middle } of places) {
    g.fillStyle = fillOf(g, kind);
    g.fillRect(left, middle - 6.5, 22, 13);
    text(g, label, left + 28, middle, { size: 12 });
  }
  g.drawImage($('#schedule'), 0, top, view.width, view.height);
  if (!$('#overlay').hidden) g.drawImage($('#overlay'), 0, top, view.width, view.height);
  canvas.toBlob(blob => {
    const link = element('a', { href: URL.createObjectURL(blob), download: `${META.title.replace(/[^\p{L}\p{N}.-]+/gu, '-')}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

/** Show or close the list of keys. */
function toggleKeys() {
  const keys = $('#keys');
  if (keys.open) keys.close(); else keys.showModal();
}

/** Connect the buttons of the panel and the list of keys. */
function wireSelection() {
  $('#copy').addEventListener('click', copySelection);
  $('#png').addEventListener('click', savePicture);
  $('#help').addEventListener('click', toggleKeys);
  $('#keys').addEventListener('click', event => { if (event.target === $('#keys') || event.target.matches('button')) $('#keys').close(); });
  $('#area').addEventListener('click', () => {
    view.selecting = !view.selecting;
    $('#area').setAttribute('aria-pressed', String(view.selecting));
  });
}
