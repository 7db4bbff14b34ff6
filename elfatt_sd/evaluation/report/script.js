(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  for (const element of document.querySelectorAll(".js")) element.hidden = false;
  addEventListener("beforeprint", () => {
    for (const element of document.querySelectorAll("details")) element.open = true;
  });
  const stage = byId("compare-stage");
  if (!stage) return;
  const [index, left, right, range] = ["index", "left", "right", "range"].map((name) => byId(`compare-${name}`));
  const buttons = [...document.querySelectorAll(".grid button")];
  const source = (cell) => {
    const button = buttons.find((other) => other.dataset.cell === cell && other.dataset.index === index.value);
    return button ? button.querySelector("img").src : "";
  };
  const name = (select) => select.options[select.selectedIndex].text;
  const place = (image, select) => {
    const found = source(select.value);
    image.hidden = !found;
    if (found) image.src = found;
    else image.removeAttribute("src");
    image.alt = `${name(select)}, ${name(index)}`;
    return found ? "" : ` There is no image of ${name(select)}.`;
  };
  const slide = () => {
    stage.style.setProperty("--at", `${range.value}%`);
    range.setAttribute("aria-valuetext", `${range.value} % ${name(left)}`);
  };
  const show = () => {
    const gaps = place(byId("compare-before"), left) + place(byId("compare-after"), right);
    byId("compare-left-tag").textContent = name(left);
    byId("compare-right-tag").textContent = name(right);
    byId("compare-text").textContent =
      `${name(index)}. Left: ${name(left)}; right: ${name(right)}. Drag, or use the arrow keys.${gaps}`;
    slide();
  };
  range.addEventListener("input", slide);
  for (const select of [index, left, right]) select.addEventListener("change", show);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      index.value = button.dataset.index;
      if (button.dataset.cell !== left.value) right.value = button.dataset.cell;
      show();
      byId("compare").scrollIntoView({ block: "start" });
      range.focus({ preventScroll: true });
    });
  }
  show();
})();
