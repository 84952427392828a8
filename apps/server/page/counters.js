// Prometheus' text format, read as far as this page needs it.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Counters {
  constructor(text) {
    this.series = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (match) this.#add(match[1], labels(match[2] ?? ""), Number(match[3]));
    }
  }

  #add(name, found, value) {
    const rows = this.series.get(name) ?? [];
    rows.push({ labels: found, value });
    this.series.set(name, rows);
  }

  rows(name, wanted = {}) {
    const matches = (row) => Object.entries(wanted).every(([key, value]) => row.labels[key] === value);
    return (this.series.get(`mlx_spec_${name}`) ?? []).filter(matches);
  }

  // The sum over all labels; undefined where there is no such series.
  sum(name, wanted) {
    const rows = this.rows(name, wanted);
    return rows.length ? rows.reduce((total, row) => total + row.value, 0) : undefined;
  }

  // [i]: the sum at position i.
  positions(name) {
    const found = [];
    for (const row of this.rows(name)) {
      const at = Number(row.labels.position);
      if (Number.isInteger(at) && at >= 0) found[at] = (found[at] ?? 0) + row.value;
    }
    return Array.from(found, (value) => value ?? 0);
  }
}

function labels(text) {
  const found = {};
  for (const [, key, value] of text.matchAll(LABEL)) found[key] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
  return found;
}
