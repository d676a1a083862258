// The what-if page: controls whose every change is simulated; the address holds the whole state.

const CONTROLS = [   // setting, label, what it offers (numbers; the names come from the server)
  ['model', 'Model'], ['cluster', 'Machine'],
  ['gpus', 'GPUs', [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]],
  ['tp', 'Tensor parallel', [1, 2, 4, 8, 16, 32]],
  ['pp', 'Pipeline stages', [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40]],
  ['cp', 'Context parallel', [1, 2, 4, 8, 16, 32]], ['ep', 'Expert parallel', [1, 2, 4, 8, 16, 32, 64]],
  ['schedule', 'Schedule'], ['virtual_stages', 'Virtual stages', ['', 1, 2, 3, 4, 5, 6, 8, 10]],
  ['global_batch', 'Global batch', [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]],
  ['micro_batch', 'Micro-batch', [1, 2, 3, 4, 6, 8, 16, 32]],
  ['seq_len', 'Sequence length', [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]],
  ['sharding', 'Sharding'], ['recompute', 'Recompute'], ['precision', 'Precision'], ['price', '$ per GPU-hour'],
];

const plan = { settings: {}, pinned: null, choices: null, asking: false, again: false, drawn: '', round: 0 };

/** Build the controls from the address and show the first plan. */
async function startPlan() {
  plan.choices = await (await fetch('/plan/choices')).json();
  readAddress();
  $('#controls').replaceChildren(...CONTROLS.map(control));
  $('#pin').addEventListener('click', () => pin({ ...plan.settings }));
  $('#unpin').addEventListener('click', () => pin(null));
  $('#swap').addEventListener('click', () => { const a = plan.pinned; plan.pinned = plan.settings; plan.settings = a; changed(); });
  window.addEventListener('popstate', () => { readAddress(); fillControls(); ask(); });
  fillControls();
  await ask();
}

/** Take the settings from the address; what it leaves out is as the page begins. */
function readAddress() {
  const asked = new URLSearchParams(window.location.search);
  const from = query => Object.fromEntries(Object.entries(plan.choices.defaults).map(([name, value]) => [name, query.get(name) ?? value]));
  plan.settings = from(asked);
  plan.pinned = asked.has('a') ? from(new URLSearchParams(asked.get('a'))) : null;
}

/** Return the settings that are not as the page begins, as a query. */
function queryOf(settings) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(settings)) if (value !== plan.choices.defaults[name]) query.set(name, value);
  return query;
}

/** Return what is asked of the server: the plan, and the pinned one. */
function fullQuery() {
  const query = queryOf(plan.settings);
  if (plan.pinned) query.set('a', queryOf(plan.pinned));
  return query;
}

/** Return one control: a list for names, a slider for numbers, a field for the price. */
function control([name, label, numbers]) {
  const known = plan.choices.names[name];
  const id = `plan-${name}`;
  const field = known ? element('select', { id }, ...known.map(value => element('option', { value }, value)))
    : numbers ? element('input', { id, type: 'range', min: '0', step: '1' })
      : element('input', { id, type: 'number', min: '0', step: '0.1', placeholder: 'not known' });
  field.addEventListener('input', () => {
    plan.settings[name] = numbers ? String(offered(name, numbers)[Number(field.value)]) : field.value;
    changed();
  });
  return element('label', { class: 'control', for: id }, element('span', {}, label, ' ', element('output', { id: `${id}-value` })), field);
}

/** Return the values that a slider offers, with the one that is set among them. */
function offered(name, numbers) {
  const set = plan.settings[name];
  if (set === '' || numbers.some(value => String(value) === set) || !(Number(set) > 0)) return numbers;
  return [...numbers, Number(set)].sort((a, b) => a - b);
}

/** Show the settings in the controls. */
function fillControls() {
  for (const [name, , numbers] of CONTROLS) {
    const field = $(`#plan-${name}`);
    const set = plan.settings[name];
    if (numbers) {
      const values = offered(name, numbers).map(String);
      field.max = String(values.length - 1);
      field.value = String(Math.max(0, values.indexOf(set)));
      $(`#plan-${name}-value`).textContent = set === '' ? 'default' : Number(set).toLocaleString('en');
    } else field.value = set;
  }
  $('#plan-price').placeholder = plan.choices.prices[plan.settings.cluster] ?? 'not known';
  for (const id of ['#unpin', '#swap']) $(id).hidden = !plan.pinned;
  $('#pin').hidden = Boolean(plan.pinned);
  $('#command').replaceChildren('foretrace simulate', ...flagsOf(plan.settings).flatMap(flag => [' ', element('span', {}, flag)]));
}

/** Return the flags with which `foretrace simulate` answers the same. */
function flagsOf(settings) {
  return CONTROLS.filter(([name]) => name !== 'price' && settings[name] !== '').map(([name]) => `--${name.replaceAll('_', '-')} ${settings[name]}`);
}

function pin(settings) {
  plan.pinned = settings;
  changed();
}

/** Take over a change of the settings: show it, put it into the address, ask what it leads to. */
function changed() {
  fillControls();
  window.history.replaceState(null, '', `?${fullQuery()}`);
  ask();
}

/** Ask for the figures, then for the picture; changes that come meanwhile are asked for when this is done. */
async function ask() {
  if (plan.asking) { plan.again = true; return; }
  plan.asking = true;
  try {
    do {
      plan.again = false;
      await answer(fullQuery(), performance.now());
    } while (plan.again);
  } catch (error) {
    mistake(`the server does not answer: ${error.message}`);
  } finally {
    plan.asking = false;
    plan.round++;
    document.body.dataset.round = String(plan.round);
  }
}

/** Show the figures of a query and, if nothing has changed since, its picture. */
async function answer(query, began) {
  const figures = await (await fetch(`/plan/figures?${query}`)).json();
  mistake(figures.error || '');
  document.body.classList.toggle('stale', Boolean(figures.error));
  if (figures.error) { fillMisfit(null); $('#took').textContent = ''; return; }
  fillFigures(figures);
  const figuresMs = performance.now() - began;
  plan.figures = figures;
  if (plan.again) return;
  const [meta, bytes] = await fetchDocument(`/plan/picture?${query}`);
  showDocument(meta, bytes);
  $('#took').textContent = `figures in ${figuresMs.toFixed(0)} ms, picture in ${(performance.now() - began).toFixed(0)} ms · dp ${figures.dp} · ${figures.n_microbatches} micro-batches`;
}

function mistake(words) {
  $('#mistake').hidden = !words;
  $('#mistake').textContent = words;
}

/** Show the figures of a plan while its picture is on its way. */
function fillFigures(figures) {
  META = { ...META, ...figures, made: META.made || '' };
  if (RUNS.length) fillHead();
  fillMisfit(figures.misfit);
}

/** Say by how much a plan does not fit, and offer changes with which it would. */
function fillMisfit(misfit) {
  $('#misfit').hidden = !misfit;
  if (!misfit) return;
  const offers = misfit.remedies.map(({ change, peak, settings }) => {
    const button = element('button', { type: 'button' }, `${change}: ${peak}`);
    button.addEventListener('click', () => { Object.assign(plan.settings, settings); changed(); });
    return button;
  });
  $('#misfit').replaceChildren(element('b', {}, misfit.text), ' ', ...(offers.length ? ['· would fit with ', ...offers] : ['· nothing this page can change makes it fit']));
}
