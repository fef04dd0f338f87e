"use strict";
// Draw the figures in the colors of the page, and again when the color scheme changes.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displayModeBar: false, doubleClick: false, showTips: false };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const withLayoutColors = (layout) => {
    const copy = structuredClone(layout);
    const [ink, muted, grid, surface, line] = ["--ink", "--muted", "--grid", "--surface", "--line"].map(color);
    copy.paper_bgcolor = copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.font = { color: muted, size: 12, family: getComputedStyle(document.body).fontFamily };
    copy.hoverlabel = { bgcolor: surface, bordercolor: line, font: { color: ink }, align: "left" };
    for (const name of Object.keys(copy).filter((key) => /^[xy]axis/.test(key))) {
      Object.assign(copy[name], { gridcolor: grid, linecolor: line });
    }
    return copy;
  };

  const withTraceColors = (data) => {
    const copy = structuredClone(data);
    for (const trace of copy.filter((one) => one.type === "treemap")) {
      trace.pathbar = { ...trace.pathbar, textfont: { color: color("--ink") } };
      trace.marker.line = { color: color("--surface"), width: 1 };
    }
    return copy;
  };

  const draw = (figure) =>
    Plotly.react(figure.name, withTraceColors(figure.data), withLayoutColors(figure.layout), config);

  const drawAll = async () => {
    await Promise.all(figures.map(draw));
    document.documentElement.dataset.drawn = String(figures.length);
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
