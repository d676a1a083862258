// Finding spans by what they are called, and choosing the ranks that are shown.

const search = { words: '', hits: [], at: -1 };

/** Connect the search box. */
function wireSearch() {
  $('#search').addEventListener('input', () => { find($('#search').value); drawOverlay(); });
  $('#search').addEventListener('keydown', event => {
    if (event.key === 'Enter') nextHit(event.shiftKey ? -1 : 1);
    if (event.key === 'Escape') { $('#search').value = ''; find(''); $('#search').blur(); drawOverlay(); }
  });
}

/** Collect the spans on the screen whose words contain all of `words`, in the order of time. */
function find(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  search.words = words;
  search.hits = [];
  search.at = -1;
  if (wanted.length) {
    const matches = LABELS.map(([kind, name, , , , dtype, , operation]) => {
      const said = [KINDS[kind].label, NAMES[name], NAMES[dtype], NAMES[operation], NAMES[operation].replaceAll('_', ' ')].join(' ').toLowerCase();
      return wanted.every(word => said.includes(word));
    });
    for (const slot of view.slots) {
      for (let lane = 0; lane < slot.run.lanes.length; lane++) {
        const [low, high] = laneRange(slot.run, slot.row, lane);
        for (let i = low; i < high; i++) if (matches[slot.run.description[i]]) search.hits.push({ slot, lane, first: i, last: i });
      }
    }
    search.hits.sort((p, q) => p.slot.run.start[p.first] - q.slot.run.start[q.first]);
  }
  sayHits();
}

/** Say how many spans were found and how long they take together. */
function sayHits() {
  const total = search.hits.reduce((sum, { slot, first }) => sum + slot.run.end[first] - slot.run.start[first], 0);
  const many = search.hits.length.toLocaleString('en');
  $('#found').textContent = !search.words.trim() ? '' : search.hits.length
    ? `${search.at >= 0 ? `${search.at + 1} of ` : ''}${many} span${search.hits.length > 1 ? 's' : ''}, ${formatTime(total)} in all; Enter: next`
    : 'no span on these rows is called that';
}

/** Go to the next span that was found, as wide as a tenth of the screen. */
function nextHit(by) {
  const n = search.hits.length;
  if (!n) return;
  search.at = search.at < 0 && by < 0 ? n - 1 : (search.at + by + n) % n;
  const { slot, first } = search.hits[search.at];
  const [from, to] = [slot.run.start[first], slot.run.end[first]];
  const width = Math.max(200, (to - from) * 10);
  showWindow((from + to - width) / 2, (from + to + width) / 2);
  view.hover = search.hits[search.at];
  sayHits();
}

/** Mark what was found: a stroke under each span, at most one per pixel column and lane. */
function drawHits(g) {
  g.fillStyle = surface().limit;
  let drawn = '';
  for (const { slot, lane, first } of search.hits) {
    if (slot.run.end[first] < view.t0 || slot.run.start[first] > view.t1) continue;
    const index = view.slots.indexOf(slot);
    const [x0, x1] = extent(slot.run, first, first);
    const key = `${index}.${lane}.${Math.floor(x1)}`;
    if (index < 0 || key === drawn) continue;
    drawn = key;
    const [offset, height] = view.lanes[lane];
    g.fillRect(x0, rowTop(index) + offset + height - 2.5, Math.max(1.5, x1 - x0), 3);
  }
}

/** Offer the groups of ranks that can be shown together. */
function fillPicker() {
  const picks = META.picks || [];
  $('#picker').replaceChildren();
  if (picks.length < 2) return;
  const few = ranks => (ranks.length > 3 ? `${ranks[0]}, ${ranks[1]} … ${ranks[ranks.length - 1]}` : ranks.join(', '));
  const select = element('select', { 'aria-label': 'Ranks shown' },
    ...picks.map((ranks, index) => element('option', { value: String(index) }, `ranks ${few(ranks)}`)));
  select.value = String(view.pick);
  select.addEventListener('change', () => pickRows(Number(select.value)));
  $('#picker').replaceChildren(select);
}

/** Show the rows of a pick, `rank` among them; a page that is served asks for what it does not hold. */
function pickRows(pick, rank) {
  if (MODE === 'run' && META.windowed && META.picks[pick].some(shown => RUNS[0].row_of[shown] < 0)) {
    loadWindow(pick, stepOf(RUNS[0]).step, rank);
    return;
  }
  chooseRows(pick, rank);
  const missing = rank !== undefined && RUNS[0].row_of[rank] < 0;
  $('#overview-missing').textContent = missing ? ` · the spans of rank ${rank} are not on this page` : '';
  fillPicker();
  fillShares();
  fillPeaks();
  find(search.words);
  layoutView();
  requestDraw();
}
