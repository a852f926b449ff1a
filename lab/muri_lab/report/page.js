// Plots follow the page's colors, and change with the reader's light or dark setting.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const paint = (element) => {
    const style = getComputedStyle(document.documentElement);
    const [text, line, card] = ["--text", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
    const change = {"font.color": text, "hoverlabel.bgcolor": card, "hoverlabel.font.color": text};
    for (const axis of Object.keys(element.layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      Object.assign(change, {[`${axis}.gridcolor`]: line, [`${axis}.linecolor`]: line, [`${axis}.tickcolor`]: line});
    }
    return Plotly.relayout(element, change);
  };
  const paintAll = () => Promise.all([...document.querySelectorAll(".plotly-graph-div")].map(paint));
  window.addEventListener("load", () => paintAll().then(() => document.body.setAttribute("data-drawn", "yes")));
  dark.addEventListener("change", paintAll);
})();
