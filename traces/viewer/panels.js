// Everything around the canvases: key figures, warnings, legend, tables. Built from text, never from markup.

/** Fill the head of the page. */
function fillHead() {
  $('#title').textContent = META.title;
  $('#subtitle').textContent = META.subtitle;
  $('#story').replaceChildren(META.story || '', META.slowest ? element('b', {}, ` ${META.slowest.text}`) : '');
  $('#schedule-title').textContent = META.schedule_title;
  $('#headline').replaceChildren(...META.headline.map(({ name, value, note, tone, was, likely }) =>
    element('div', { class: 'figure ' + (tone || '') }, element('span', {}, name), element('b', {}, value),
      ...[['likely', likely], ['was', was], ['', note || '']].map(([about, words]) => (words === undefined ? null : element('i', { class: about }, unbroken(words)))))));
  $('#warnings').hidden = !META.warnings.length;
  $('#warnings').replaceChildren(element('b', {}, META.warnings.length === 1 ? 'Warning' : `${META.warnings.length} warnings`),
    element('ul', {}, ...META.warnings.map(warning => element('li', {}, warning))));
  $('#made').textContent = META.made;
}

/** Offer the steps of each run that has several. */
function fillSteps() {
  if (META.windowed) { $('#steps').replaceChildren(servedSteps()); return; }
  const several = RUNS.filter(run => run.steps.length > 1);
  $('#steps').replaceChildren(...several.map(run => {
    const select = element('select', { 'aria-label': `Step of the ${run.label} run` },
      ...run.steps.map((step, index) => element('option', { value: String(index) }, `step ${step.step}: ${formatTime(Math.max(...step.rows.map(row => row.window_ns)))}${index === run.default_step ? ' (median)' : ''}`)));
    select.value = String(run.step);
    select.addEventListener('change', () => {
      run.step = Number(select.value);
      view.follow = view.hover = null;
      fitSteps();
      refreshAll();
    });
    return element('label', {}, RUNS.length > 1 ? `${run.label} ` : '', select);
  }));
}

/** Return the choice of a step of a run that is served in parts. */
function servedSteps() {
  const select = element('select', { 'aria-label': 'Step' },
    ...META.all_steps.map(([step, ns]) => element('option', { value: String(step) }, `step ${step}: ${formatTime(ns)}`)));
  select.value = String(stepOf(RUNS[0]).step);
  select.addEventListener('change', () => loadWindow(view.pick, Number(select.value)));
  return element('label', {}, select);
}

/** Draw the legend: what is there, in groups; a click hides or shows a kind. */
function fillLegend() {
  const present = new Set(RUNS.flatMap(run => [...stepOf(run).rows.flatMap(row => row.parts.map(part => part[0])), ...run.lanes.slice(1).filter(lane => !lane.stream).map(lane => lane.kind)]));
  const groups = [['Working', 'compute'], ['Not computing', 'state'], ['Communication', 'communication'], ['Host', 'host']];
  const children = [];
  for (const [title, group] of groups) {
    const kinds = [...present].sort((a, b) => a - b).filter(kind => KINDS[kind].group === group);
    if (!kinds.length) continue;
    children.push(element('span', { class: 'group' }, title), ...kinds.map(legendButton));
  }
  if (RUNS.some(run => run.pair)) children.push(pairLegend());
  children.push(element('span', { class: 'note' }, META.legend_note + (RUNS.some(run => run.n_chunks > 1) ? ' A light band on top of a cell: a later part of the model on the same rank.' : '')));
  $('#legend').replaceChildren(...children);
}

/** Return the entry of the legend for cells that are split in two. */
function pairLegend() {
  const [above, below] = ['forward', 'backward'].map(name => colours().compute[name]);
  const swatch = element('span', { class: 'swatch', style: { background: `linear-gradient(${above} 50%, ${below} 50%)` } });
  return element('span', { class: 'pair' }, swatch, 'Pair: forward above, backward below, computed in turns');
}

function legendButton(kind) {
  const swatch = element('span', { class: 'swatch', style: { background: cssFill(KINDS[kind]) } });
  if (KINDS[kind].letter) {
    swatch.textContent = KINDS[kind].letter;
    swatch.style.color = inkOn(flatColour(KINDS[kind]));
  }
  const button = element('button', { type: 'button', 'aria-pressed': String(!view.hide.has(kind)), 'data-kind': String(kind), title: KINDS[kind].meaning || '' }, swatch, KINDS[kind].label);
  button.addEventListener('click', () => {
    if (!view.hide.delete(kind)) view.hide.add(kind);
    button.setAttribute('aria-pressed', String(!view.hide.has(kind)));
    requestDraw();
  });
  return button;
}

/** Fill the table of where the step goes: a bar and its numbers for each row; every line adds up to 100 %. */
function fillShares() {
  const used = new Set(RUNS.flatMap(run => stepOf(run).rows.flatMap(row => row.parts.map(part => part[0]))));
  const kinds = [...used].sort((a, b) => a - b);
  const axes = [...new Set(RUNS.flatMap(run => stepOf(run).rows.flatMap(row => Object.keys(row.hidden))))];
  const head = element('tr', {}, element('th', {}, 'row'), RUNS.length > 1 ? element('th', {}, 'run') : null,
    element('th', { class: 'bar' }, 'where the step goes'), element('th', {}, 'step'),
    ...kinds.map(kind => element('th', {}, element('span', { class: 'swatch', style: { background: cssFill(KINDS[kind]) } }), KINDS[kind].short)),
    ...axes.map(axis => element('th', { class: 'beside' }, `${axis} hidden`)));
  const rows = shareRows().map(({ run, row }) => shareLine(run, row, kinds, axes));
  $('#shares').replaceChildren(
    element('caption', {}, 'Share of each row’s step; working and not computing add up to 100 %. Hidden communication runs beside compute and is not part of the sum.'),
    element('thead', {}, head), element('tbody', {}, ...rows));
}

/** Return the rows of the table: those on the screen, each stored row once. */
function shareRows() {
  const seen = new Set();
  return view.slots.filter(({ run, row }) => {
    const key = run.key + row;
    return !seen.has(key) && seen.add(key);
  });
}

function shareLine(run, row, kinds, axes) {
  const share = stepOf(run).rows[row];
  const of = Object.fromEntries(share.parts);
  const bar = element('div', { class: 'stack', 'aria-hidden': 'true' }, ...share.parts.map(([kind, ns]) =>
    element('span', { title: `${KINDS[kind].label}: ${formatTime(ns)}`, style: { width: `${100 * ns / share.window_ns}%`, background: cssFill(KINDS[kind]) } })));
  return element('tr', {}, element('th', { scope: 'row' }, run.rows[row].label, element('small', {}, run.rows[row].sub)),
    RUNS.length > 1 ? element('td', {}, run.label) : null, element('td', { class: 'bar' }, bar), element('td', {}, formatTime(share.window_ns)),
    ...kinds.map(kind => element('td', { title: formatTime(of[kind] || 0) }, of[kind] ? formatShare(of[kind] / share.window_ns) : '–')),
    ...axes.map(axis => element('td', { class: 'beside', title: formatTime(share.hidden[axis] || 0) }, share.hidden[axis] ? formatShare(share.hidden[axis] / share.window_ns) : '–')));
}

/** Fill the tables of kernels, copies, collectives and launches. */
function fillTables() {
  const known = META.tables || [];
  $('#tables-section').hidden = !known.length;
  $('#tables').replaceChildren(...known.map(({ head, rows, note }) => element('div', { class: 'scroll' },
    element('table', { class: 'numbers' }, note ? element('caption', {}, note) : null,
      element('thead', {}, element('tr', {}, ...head.map(name => element('th', {}, name)))),
      element('tbody', {}, ...rows.map(([first, ...others]) => element('tr', {},
        element('th', { scope: 'row' }, first), ...others.map(cell => element('td', {}, cell)))))))));
}

/** Fill what the figures rest on; a long section is folded, its title says what is in it. */
function fillBasis() {
  $('#basis').replaceChildren(...META.basis.map(({ title, notes, lines }) => element('details', { open: notes.length + lines.length <= 12 },
    element('summary', {}, title),
    notes.length ? element('ul', {}, ...notes.map(note => element('li', {}, note))) : null,
    element('table', {}, ...lines.map(([what, value, source]) => element('tr', {},
      element('th', { scope: 'row' }, what), element('td', {}, value, source ? element('small', {}, source) : null)))))));
}
