"use strict";
// Draws the figures in the colours of the page, and again when the page turns dark or light.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displayModeBar: false, doubleClick: false, showTips: false };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const coloured = (layout) => {
    const made = structuredClone(layout);
    const [ink, muted, grid, surface, line] = ["--ink", "--muted", "--grid", "--surface", "--line"].map(colour);
    made.paper_bgcolor = made.plot_bgcolor = "rgba(0,0,0,0)";
    made.font = { color: muted, size: 12, family: getComputedStyle(document.body).fontFamily };
    made.hoverlabel = { bgcolor: surface, bordercolor: line, font: { color: ink }, align: "left" };
    for (const name of Object.keys(made).filter((key) => /^[xy]axis/.test(key))) {
      Object.assign(made[name], { gridcolor: grid, linecolor: line });
    }
    return made;
  };

  const grounded = (data) => {
    const made = structuredClone(data);
    for (const trace of made.filter((one) => one.type === "treemap")) {
      trace.pathbar = { ...trace.pathbar, textfont: { color: colour("--ink") } };
      trace.marker.line = { color: colour("--surface"), width: 1 };
    }
    return made;
  };

  const draw = (figure) =>
    Plotly.react(figure.name, grounded(figure.data), coloured(figure.layout), config);

  const drawAll = async () => {
    await Promise.all(figures.map(draw));
    document.documentElement.dataset.drawn = String(figures.length);
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
