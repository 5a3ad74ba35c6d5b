// The columns of a step's tasks, as whatif/report/html/timeline.py packs them.
report.unpack = async (side, unit) => {
  const packed = Uint8Array.from(atob(side.columns), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new DataView(await new Response(stream).arrayBuffer());
  const column = (at) => Uint32Array.from({ length: side.n }, (_, row) => all.getUint32(4 * (at * side.n + row), true));
  const since = column(0);
  const start = new Float64Array(side.n);
  const threads = [];
  let first = 0;
  for (const thread of side.threads) {
    let time = 0;
    for (let row = first; row < first + thread.n; row++) {
      time += since[row] * unit;
      start[row] = time;
    }
    threads.push({ name: thread.name, first, end: first + thread.n });
    first += thread.n;
  }
  const length = Float64Array.from(column(1), (value) => value * unit);
  return { title: side.title, length_ns: side.length_ns, threads, start, length, name: column(2), layer: column(3), what: column(4) };
};

// What one number tells of a task.
report.what = (code) => ({
  kind: code & 15,
  family: ((code >> 4) & 63) - 1,
  phase: (code >> 10) & 7,
  change: (code >> 13) & 3,
  critical: Boolean((code >> 15) & 1),
});
