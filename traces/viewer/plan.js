// The what-if page: controls whose every change is simulated; the address holds the whole state.

const CONTROLS = [   // setting, label, what it offers (numbers; the names come from the server)
  ['model', 'Model'], ['cluster', 'Machine'],
  ['gpus', 'GPUs', [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]],
  ['dp', 'Data parallel', [1, 2, 4, 8, 16, 32, 64, 72, 96, 128, 256, 512, 1024]],
  ['tp', 'Tensor parallel', [1, 2, 4, 8, 16, 32]],
  ['pp', 'Pipeline stages', [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40]],
  ['cp', 'Context parallel', [1, 2, 4, 8, 16, 32]], ['ep', 'Expert parallel', [1, 2, 4, 8, 16, 32, 64]],
  ['expert_tp', 'Expert TP', ['', 1, 2, 4, 8]],
  ['schedule', 'Schedule'], ['virtual_stages', 'Virtual stages', ['', 1, 2, 3, 4, 5, 6, 8, 10]],
  ['global_batch', 'Global batch', [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]],
  ['micro_batch', 'Micro-batch', [1, 2, 3, 4, 6, 8, 16, 32]],
  ['seq_len', 'Sequence', [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]],
  ['sharding', 'Sharding'], ['recompute', 'Recompute'], ['precision', 'Precision'],
  ['framework', 'Framework'], ['price', '$ per GPU-hour'],
];

const plan = { settings: {}, pinned: null, choices: null, values: {}, asking: false, again: false, drawn: '', round: 0, searching: null };

/** Build the controls from the address and show the first plan. */
async function startPlan() {
  plan.choices = await (await fetch('/plan/choices')).json();
  readAddress();
  $('#controls').replaceChildren(...CONTROLS.map(control));
  $('#pin').addEventListener('click', () => pin({ ...plan.settings }));
  $('#unpin').addEventListener('click', () => pin(null));
  $('#best').addEventListener('click', findBest);
  $('#config').addEventListener('change', event => takeConfig(event.target.files[0]));
  window.addEventListener('dragover', event => event.preventDefault());
  window.addEventListener('drop', event => { event.preventDefault(); takeConfig(event.dataTransfer.files[0]); });
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

/** Return one control: a list for names, a slider and a field for numbers, a field for the price. */
function control([name, label, numbers]) {
  const known = plan.choices.names[name];
  const id = `plan-${name}`;
  const field = known ? element('select', { id }, ...known.map(value => element('option', { value }, value)))
    : numbers ? element('input', { id, type: 'range', min: '0', step: '1' })
      : element('input', { id, type: 'number', min: '0', step: '0.1', placeholder: 'not known' });
  field.addEventListener('input', () => set(name, numbers ? String(offered(name, numbers)[Number(field.value)]) : field.value));
  const typed = numbers ? [' ', element('input', { id: `${id}-value`, type: 'number', min: '1', step: '1', placeholder: 'auto', 'aria-label': `${label}, any number` })] : [];
  if (numbers) typed[1].addEventListener('change', () => set(name, typed[1].value));
  return element('div', { class: 'control' }, element('span', {}, element('label', { for: id }, label), ...typed), field);
}

/** Change a setting. Replicas are as many as the GPUs hold: so many more of them are so many more GPUs. */
function set(name, value) {
  const { settings } = plan;
  if (name === 'dp') {
    const gpus = Number(value) * modelRanks();
    if (gpus > 0) settings.gpus = String(gpus);
  } else settings[name] = value;
  if (name === 'model') settings.config = '';
  changed();
}

/** Return the ranks of one replica. */
const modelRanks = () => ['tp', 'pp', 'cp'].reduce((product, name) => product * (Number(plan.settings[name]) || 1), 1);

/** Return what a setting is at present, as text; replicas follow from the others, and are unknown where those leave a rest. */
function settingOf(name) {
  if (name !== 'dp') return plan.settings[name];
  const dp = Number(plan.settings.gpus) / modelRanks();
  return Number.isInteger(dp) && dp > 0 ? String(dp) : '';
}

/** Return the values that a slider offers: those of the case, as the last answer says, with the one that is set among them. */
function offered(name, numbers) {
  const now = settingOf(name);
  const values = plan.values[name] || numbers;
  if (now === '' || values.some(value => String(value) === now) || !(Number(now) > 0)) return values;
  return [...values, Number(now)].sort((a, b) => a - b);
}

/** Take a config.json as the model; long lists in it say nothing of its shape. */
async function takeConfig(file) {
  if (!file) return;
  try {
    const known = JSON.parse(await file.text());
    if (!known || typeof known !== 'object' || Array.isArray(known)) throw new Error('names and values are needed');
    const kept = Object.entries(known).filter(([, value]) => JSON.stringify(value).length < 1500);
    set('config', JSON.stringify(Object.fromEntries(kept)));
  } catch (error) {
    mistake(`${file.name} is no config.json: ${error.message}`);
  }
  $('#config').value = '';
}

/** Search for the best layout of this model, machine and batch, showing the best so far; a second click ends it. */
async function findBest() {
  if (plan.searching) { endSearch(); return; }
  const ours = plan.searching = {};
  $('#best').setAttribute('aria-pressed', 'true');
  $('#best').textContent = 'stop searching';
  const query = queryOf(plan.settings);
  try {
    for (let done = false; !done && plan.searching === ours;) {
      const found = await (await fetch(`/plan/best?${query}`)).json();
      if (plan.searching !== ours) return;
      if (found.error) mistake(found.error, found.ways); else showBest(found);
      ({ done } = found);
    }
  } catch (error) {
    mistake(`the server does not answer: ${error.message}`);
  }
  if (plan.searching === ours) endSearch();
}

function endSearch() {
  plan.searching = null;
  $('#best').setAttribute('aria-pressed', 'false');
  $('#best').textContent = 'find the best from here';
}

/** List the best layouts so far; a click takes one over. */
function showBest({ done, words, layouts }) {
  $('#found-best').hidden = false;
  $('#found-best').dataset.done = String(done);
  const line = ({ step_time_s: seconds, settings }) => {
    const button = element('button', { type: 'button' }, 'take');
    button.addEventListener('click', () => { endSearch(); Object.assign(plan.settings, settings); changed(); });
    const flags = Object.entries(settings).filter(([name, value]) => value !== '' && !(['cp', 'ep'].includes(name) && value === '1'));
    return element('tr', {}, element('th', { scope: 'row' }, formatTime(seconds * 1e9)), element('td', {}, flags.map(([name, value]) => `${name.replaceAll('_', '-')} ${value}`).join(' · ')), element('td', {}, button));
  };
  $('#found-best table').replaceChildren(element('caption', {}, `${done ? 'The best of all layouts that fit' : 'The best so far'}: ${words}`),
    element('tbody', {}, ...layouts.map(line)));
}

/** Show the settings in the controls. */
function fillControls() {
  for (const [name, , numbers] of CONTROLS) {
    const field = $(`#plan-${name}`);
    const now = settingOf(name);
    if (numbers) {
      const values = offered(name, numbers).map(String);
      field.max = String(values.length - 1);
      field.value = String(Math.max(0, values.indexOf(now)));
      $(`#plan-${name}-value`).value = now;
    } else field.value = now;
  }
  if (plan.settings.config) $('#plan-model').value = '';
  $('#plan-price').placeholder = plan.choices.prices[plan.settings.cluster] ?? 'not known';
  for (const id of ['#unpin', '#swap']) $(id).hidden = !plan.pinned;
  $('#pin').hidden = Boolean(plan.pinned);
  $('#command').replaceChildren('foretrace simulate', ...flagsOf(plan.settings).flatMap(flag => [' ', element('span', {}, flag)]));
}

/** Return the flags with which `foretrace simulate` answers the same. */
function flagsOf(settings) {
  const own = settings.config ? { ...settings, model: 'config.json' } : settings;
  return CONTROLS.filter(([name]) => !['price', 'dp'].includes(name) && own[name] !== '').map(([name]) => `--${name.replaceAll('_', '-')} ${own[name]}`);
}

function pin(settings) {
  plan.pinned = settings;
  changed();
}

/** Take over a change of the settings: show it, put it into the address, ask what it leads to. */
function changed() {
  endSearch();
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
    $('#took').textContent = '';
    mistake(`the server does not answer: ${error.message}`);
  } finally {
    plan.asking = false;
    plan.round++;
    document.body.dataset.round = String(plan.round);
  }
}

/** After which time without an answer the page says that it simulates. */
const SLOW_MS = 400;

/** Show the figures of a query and, if nothing has changed since, its picture. */
async function answer(query, began) {
  const slow = setTimeout(() => { $('#took').textContent = 'simulating …'; }, SLOW_MS);
  const figures = await fetch(`/plan/figures?${query}`).then(said => said.json()).finally(() => clearTimeout(slow));
  mistake(figures.error || '', figures.ways);
  document.body.classList.toggle('stale', Boolean(figures.error));
  if (figures.error) { fillMisfit(null); $('#took').textContent = ''; return; }
  plan.values = figures.values;
  fillControls();
  fillFigures(figures);
  const figuresMs = performance.now() - began;
  plan.figures = figures;
  if (plan.again) return;
  const [meta, bytes] = await fetchDocument(`/plan/picture?${query}`);
  showDocument(meta, bytes);
  $('#took').textContent = `figures in ${figuresMs.toFixed(0)} ms, picture in ${(performance.now() - began).toFixed(0)} ms · dp ${figures.dp} · ${figures.n_microbatches} micro-batches`;
}

/** Say what is wrong, and offer changes that would work. */
function mistake(words, ways = []) {
  $('#mistake').hidden = !words;
  const offers = ways.map(settings => {
    const [[name, value]] = Object.entries(settings);
    const button = element('button', { type: 'button' }, `${name.replaceAll('_', ' ')} ${value || 'auto'}`);
    button.addEventListener('click', () => { Object.assign(plan.settings, settings); changed(); });
    return button;
  });
  $('#mistake').replaceChildren(words, ...(offers.length ? [' · try ', ...offers.flatMap(offer => [offer, ' '])] : []));
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
