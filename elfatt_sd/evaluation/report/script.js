(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  for (const element of document.querySelectorAll(".js")) element.hidden = false;
  addEventListener("beforeprint", () => {
    for (const element of document.querySelectorAll("details")) element.open = true;
  });
  for (const range of document.querySelectorAll(".slider input")) {
    range.addEventListener("input", () => range.parentElement.style.setProperty("--at", `${range.value}%`));
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.closest(".code").querySelector("code");
      getSelection().selectAllChildren(code);
      const copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
      button.textContent = copied ? "Copied" : "Selected: copy it";
    });
  }
  const stage = byId("compare-stage");
  if (!stage) return;
  const [index, left, right, range] = ["index", "left", "right", "range"].map((name) => byId(`compare-${name}`));
  const buttons = [...document.querySelectorAll(".grid button")];
  const chosen = (select) =>
    buttons.find((button) => button.dataset.cell === select.value && button.dataset.index === index.value);
  const name = (select) => select.options[select.selectedIndex].text;
  const place = (image, source, alt) => {
    image.hidden = !source;
    if (source) image.src = source;
    else image.removeAttribute("src");
    image.alt = alt;
  };
  const slide = () => {
    stage.style.setProperty("--at", `${range.value}%`);
    range.setAttribute("aria-valuetext", `${range.value} % ${name(left)}`);
  };
  const show = () => {
    let gaps = "";
    for (const [side, select] of [["before", left], ["after", right]]) {
      const button = chosen(select);
      place(byId(`compare-${side}`), button?.querySelector("img").src, `${name(select)}, ${name(index)}`);
      if (!button) gaps += ` There is no image of ${name(select)}.`;
    }
    byId("compare-left-tag").textContent = name(left);
    byId("compare-right-tag").textContent = name(right);
    const figure = byId("compare-change");
    const change = chosen(right)?.dataset.change;
    figure.hidden = !change;
    place(figure.querySelector("img"), change, `Difference of ${name(right)} to untouched, ${name(index)}`);
    figure.querySelector("figcaption").textContent = `${name(right)}: difference to untouched, ${figure.dataset.text}`;
    byId("compare-text").textContent =
      `${name(index)}. Left: ${name(left)}; right: ${name(right)}. Drag, or use the arrow keys.${gaps}`;
    slide();
  };
  if (left.value === right.value && right.options.length > 1) right.selectedIndex = 1;
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
