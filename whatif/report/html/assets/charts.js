// The charts of the page, drawn by Chart.js from plain numbers.
(() => {
  const specs = report.data("charts");
  const drawn = new Map();
  const still = { animation: false, responsive: true, maintainAspectRatio: false };

  const colors = () => ({
    series: Array.from({ length: 8 }, (_, at) => report.color(`--c${at}`)),
    text: report.color("--fg"),
    line: report.color("--line"),
  });

  // A thin line from the low to the high end of a bar's range.
  const ranges = {
    id: "ranges",
    afterDatasetsDraw(chart) {
      chart.data.datasets.forEach((dataset, at) => {
        if (!dataset.low?.length || !chart.isDatasetVisible(at)) return;
        const { ctx, scales } = chart;
        ctx.save();
        ctx.strokeStyle = report.color("--fg");
        ctx.lineWidth = 1.5;
        ctx.beginPath();
        chart.getDatasetMeta(at).data.forEach((bar, place) => {
          if (dataset.low[place] === null) return;
          const [low, high] = [dataset.low[place], dataset.high[place]].map((end) => scales.x.getPixelForValue(end));
          ctx.moveTo(low, bar.y);
          ctx.lineTo(high, bar.y);
          for (const end of [low, high]) {
            ctx.moveTo(end, bar.y - 4);
            ctx.lineTo(end, bar.y + 4);
          }
        });
        ctx.stroke();
        ctx.restore();
      });
    },
  };

  const axis = (title, palette, more = {}) => ({
    title: { display: Boolean(title), text: title, color: palette.text },
    ticks: { color: palette.text, ...more.ticks },
    grid: { color: palette.line },
    ...(more.type ? { type: more.type } : {}),
    ...(more.stacked ? { stacked: true } : {}),
    ...(more.bounds ?? {}),
  });

  const bars = (spec, palette) => {
    const stacked = spec.kind === "stacked";
    const ends = spec.series.flatMap((series) => [...series.low, ...series.high, ...series.values]);
    const least = Math.min(0, ...ends.filter((end) => end !== null));
    const most = Math.max(...ends.filter((end) => end !== null));
    return {
      type: "bar",
      data: {
        labels: spec.labels,
        datasets: spec.series.map((series) => ({
          label: series.name,
          data: series.values,
          low: series.low,
          high: series.high,
          backgroundColor: palette.series[series.color],
        })),
      },
      options: {
        ...still,
        indexAxis: "y",
        interaction: { mode: "index", axis: "y", intersect: false },
        scales: {
          x: axis(spec.x_title, palette, { stacked, bounds: stacked ? {} : { suggestedMin: least, suggestedMax: most } }),
          y: axis("", palette, { stacked, ticks: { autoSkip: false, callback: shortened } }),
        },
        plugins: {
          legend: { display: spec.series.length > 1, labels: { color: palette.text } },
          tooltip: { callbacks: { label: describePoint } },
        },
      },
      plugins: [ranges],
    };
  };

  // Labels leave most of the width to the bars.
  function shortened(value) {
    const label = this.getLabelForValue(value);
    const most = Math.max(14, Math.min(42, Math.floor(this.chart.width / 22)));
    if (label.length <= most) return label;
    const words = label.split(" ");
    let first = words.shift();
    while (words.length && first.length + words[0].length < most) first += ` ${words.shift()}`;
    const cut = (line) => (line.length <= most ? line : `${line.slice(0, most - 1)}…`);
    return words.length ? [cut(first), cut(words.join(" "))] : cut(first);
  }

  const describePoint = ({ dataset, dataIndex, formattedValue }) => {
    const [low, high] = [dataset.low?.[dataIndex], dataset.high?.[dataIndex]];
    const range = low === undefined || low === null ? "" : ` (${report.number(low, 2)} … ${report.number(high, 2)})`;
    return `${dataset.label}: ${formattedValue}${range}`;
  };

  const faded = (color) => `${color}33`; // the palette is written #rrggbb

  const lines = (spec, palette) => {
    const datasets = [];
    for (const series of spec.series) {
      const color = palette.series[series.color];
      const points = (values) => values.map((y, at) => ({ x: spec.x[at], y }));
      if (series.low.length) {
        const edge = { pointRadius: 0, borderWidth: 0, band: true };
        datasets.push({ ...edge, label: "low end", data: points(series.low) });
        datasets.push({ ...edge, label: "high end", data: points(series.high), fill: "-1", backgroundColor: faded(color) });
      }
      datasets.push({
        label: series.name,
        data: points(series.values),
        borderColor: color,
        backgroundColor: color,
        borderDash: series.dashed ? [6, 4] : [],
        pointRadius: series.dashed ? 0 : 3,
        borderWidth: 2,
      });
    }
    const plain = (value) => report.number(value, Number.isInteger(value) ? 0 : 2);
    const marks = spec.ticks.length ? spec.ticks : thinned(spec.x);
    const ticks = { callback: (value) => (marks.some((x) => Math.abs(x / value - 1) < 0.01) ? plain(value) : "") };
    const x = spec.logarithmic
      ? axis(spec.x_title, palette, { type: "logarithmic", bounds: { min: spec.x[0], max: spec.x.at(-1) } })
      : axis(spec.x_title, palette, { type: "linear" });
    x.afterBuildTicks = (scale) => {
      scale.ticks = marks.map((value) => ({ value }));
    };
    x.ticks.callback = ticks.callback;
    return {
      type: "line",
      data: { datasets },
      options: {
        ...still,
        interaction: { mode: "index", intersect: false },
        scales: {
          x,
          y: spec.both_logarithmic
            ? { ...axis(spec.y_title, palette, { type: "logarithmic", ticks: { callback: plain } }), afterBuildTicks: powers }
            : axis(spec.y_title, palette, { bounds: { beginAtZero: true } }),
        },
        plugins: {
          legend: { labels: { color: palette.text, filter: ({ text }) => !text.endsWith(" end") } },
          tooltip: { callbacks: { title: ([item]) => `${spec.x_title}: ${plain(item.parsed.x)}` } },
        },
      },
    };
  };

  // Ticks between powers of two or ten would stand on one another.
  const powers = (scale) => {
    const base = scale.max / scale.min > 300 ? 10 : 2;
    const [low, high] = [scale.min, scale.max].map((end) => Math.log(end) / Math.log(base));
    const first = Math.ceil(low - 1e-9);
    scale.ticks = Array.from({ length: Math.floor(high + 1e-9) - first + 1 }, (_, at) => ({ value: base ** (first + at) }));
  };

  const thinned = (values) => values.filter((_, at) => at % Math.ceil(values.length / 9) === 0);

  const area = (spec, palette) => ({
    type: "line",
    data: {
      labels: spec.labels,
      datasets: spec.series.map((series) => ({
        label: series.name,
        data: series.values,
        borderColor: palette.series[series.color],
        backgroundColor: palette.series[series.color],
        borderWidth: 0,
        pointRadius: 0,
        fill: true,
        stepped: "middle",
      })),
    },
    options: {
      ...still,
      interaction: { mode: "index", intersect: false },
      scales: {
        x: { ...axis(spec.x_title, palette, { ticks: { display: false } }), grid: { display: false } },
        y: axis(spec.y_title, palette, { stacked: true, bounds: { beginAtZero: true } }),
      },
      plugins: { legend: { labels: { color: palette.text } } },
    },
  });

  const kinds = { bars, stacked: bars, lines, area };

  const draw = () => {
    const palette = colors();
    for (const [id, spec] of Object.entries(specs)) {
      const canvas = document.getElementById(id);
      const place = canvas.parentElement;
      place.style.height = `${place.dataset.height}px`;
      drawn.get(id)?.destroy();
      drawn.set(id, new Chart(canvas, kinds[spec.kind](spec, palette)));
    }
  };
  draw();
  report.themed.push(draw);
  addEventListener("beforeprint", () => drawn.forEach((chart) => chart.resize()));
})();
