// Shows under each chart the value nearest to the pointer. The page also works without it.
for (const chart of document.querySelectorAll("svg.chart")) {
  const out = chart.parentElement.querySelector("output");
  const cursor = chart.querySelector(".cursor");
  const curves = [...chart.querySelectorAll("[data-readings]")].map(
    (curve) => [curve.dataset.label, JSON.parse(curve.dataset.readings)]);
  const said = out.textContent;
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const near = curves.map(([label, points]) => [label, points.reduce(
      (best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)]);
    const at = near.reduce((best, one) => Math.abs(one[1][0] - x) < Math.abs(best[1][0] - x) ? one : best)[1];
    const texts = near.map(([label, point]) =>
      `${label} ${point[2]}${chart.dataset.unit}` + (point[1] === at[1] ? "" : ` (${chart.dataset.axis} ${point[1]})`));
    out.textContent = `${chart.dataset.axis} ${at[1]}: ${texts.join(", ")}`;
    cursor.setAttribute("x1", at[0]);
    cursor.setAttribute("x2", at[0]);
    cursor.style.visibility = "visible";
  });
  chart.addEventListener("pointerleave", () => {
    out.textContent = said;
    cursor.style.visibility = "hidden";
  });
}
