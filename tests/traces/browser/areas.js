// Areas of colours on rendered pixels, by kind: for test_areas.py.

/**
 * Add up columns of pixels by kind. Of a column those pixels count that have a colour of one kind: words have none,
 * and the lines of a hatch may be those of two. A column without any belongs to the kind on its left, unless it is all
 * of the colour of the ground: nothing is painted there.
 */
function areasIn({ data, width }, boxes, colours, ground) {
  const sums = colours.map(() => 0);
  const known = new Map();
  colours.forEach((own, kind) => own.forEach(colour => known.set(colour, !known.has(colour) || known.get(colour) === kind ? kind
    : colours[known.get(colour)]?.[0] === own[0] ? known.get(colour) : undefined)));
  for (const [left, top, right, bottom] of boxes) for (let x = left, before = -1; x < right; x++) {
    const found = new Map();
    let [all, empty] = [0, true];
    for (let y = top; y < bottom; y++) {
      const at = 4 * (y * width + x);
      const colour = data[at] << 16 | data[at + 1] << 8 | data[at + 2];
      const kind = known.get(colour);
      if (colour !== ground) empty = false;
      if (kind === undefined) continue;
      found.set(kind, (found.get(kind) || 0) + 1);
      all++;
    }
    if (empty) before = -1;
    if (!all && before >= 0) sums[before]++;
    for (const [kind, n] of found) { sums[kind] += n / all; before = kind; }
  }
  return sums;
}

/** Blend two #rrggbb colours, as a number. */
function shade(colour, other, share) {
  const [a, b] = [colour, other].map(one => parseInt(one.slice(1), 16));
  return [16, 8, 0].reduce((sum, s) => sum | Math.round((a >> s & 255) * (1 - share) + (b >> s & 255) * share) << s, 0);
}

const ground = () => parseInt(foretrace.meta().palette[document.documentElement.dataset.theme].surface.bg.slice(1), 16);

/** Return the areas on the schedule, and the times in the window that it shows: [kinds, areas, nanoseconds]. */
function schedule() {
  const { view, kinds, laneRange, rowTop, flatColour, hatchOf } = foretrace;
  const colours = kinds().map(kind => {
    if (!['compute', 'state'].includes(kind.group)) return [];
    const flat = flatColour(kind);
    if (kind.group === 'state') return [flat, hatchOf(kind).back, hatchOf(kind).line].map(one => shade(one, one, 0));
    return [shade(flat, flat, 0), shade(flat, '#000000', 0.3), shade(flat, '#ffffff', 0.55)];   // its edges, its band
  });
  const canvas = document.querySelector('#schedule');
  const ratio = canvas.width / view.width;
  const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const [offset, height] = view.lanes[0];
  const boxes = view.slots.map((_, row) => [view.left, rowTop(row) + offset, view.left + view.plot, rowTop(row) + offset + height].map(v => Math.round(v * ratio)));
  const stated = kinds().map(() => 0);
  for (const { run, row } of view.slots) {
    const [low, high] = laneRange(run, row, 0);
    for (let i = low; i < high; i++) stated[run.kind[i]] += Math.max(0, Math.min(run.end[i], view.t1) - Math.max(run.start[i], view.t0));
  }
  return [kinds().map(kind => kind.id), areasIn(image, boxes, colours, ground()), stated];
}

/** Return the areas in the picture of all ranks: [kinds, areas]. */
function overview() {
  const { kinds, flatColour, view } = foretrace;
  const canvas = document.querySelector('#overview');
  const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = kinds().map(kind => (['compute', 'state'].includes(kind.group) ? [parseInt(flatColour(kind).slice(1), 16)] : []));
  return [kinds().map(kind => kind.id), areasIn(image, [[view.left, 26, view.left + view.plot, canvas.height - 4]], colours, ground())];
}

/** Return the areas of the bars of plotly on a screenshot. */
async function plotted([shot, colours, behind]) {
  const rows = [];
  for (const { left, top, right, bottom } of [...document.querySelectorAll('.bars path')].map(path => path.getBoundingClientRect())) {
    const row = rows.find(one => top < one[3] && bottom > one[1]);
    if (!row) { rows.push([left, top, right, bottom]); continue; }
    row.splice(0, 4, Math.min(row[0], left), Math.min(row[1], top), Math.max(row[2], right), Math.max(row[3], bottom));
  }
  const image = new Image();
  image.src = 'data:image/png;base64,' + shot;
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.width, image.height];
  const g = canvas.getContext('2d');
  g.drawImage(image, 0, 0);
  return areasIn(g.getImageData(0, 0, canvas.width, canvas.height), rows.map(box => box.map(Math.round)), colours, behind);
}
