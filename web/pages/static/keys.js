// Shortcuts of single keys, which a reader can switch off: `g` and a letter lead to a subject, `/` to the search, `f` to the
// filter, `p` pauses.

export function listenToKeys() {
  if (document.documentElement.dataset.shortcuts === "off") return;
  let going = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (going) {
      going = false;
      const link = document.querySelector(`.side a[data-key="${CSS.escape(event.key)}"]`);
      if (link) link.click();
      return;
    }
    if (event.key === "g") {
      going = true;
      setTimeout(() => (going = false), 1500);
    } else if (event.key === "/" || event.key === "f") {
      const field = document.querySelector(event.key === "/" ? "#find" : "#q, .filters input, .filters select");
      if (field) {
        event.preventDefault();
        field.focus();
      }
    } else if (event.key === "p") {
      document.getElementById("live-pause")?.click();
    } else if (event.key === "?") {
      showKeys();
    }
  });
}

function showKeys() {
  const dialog = document.getElementById("dialog");
  const title = document.createElement("h2");
  title.id = "dialog-title";
  title.textContent = "Shortcuts";
  const list = document.createElement("dl");
  list.className = "keys";
  const keys = [...document.querySelectorAll(".side a[data-key]")].map((a) => [`g ${a.dataset.key}`, a.title]);
  const others = [["/", "Search"], ["f", "Filter of the page"], ["p", "Pause or resume updates"], ["?", "This list"]];
  for (const [key, text] of [...keys, ...others]) {
    const term = document.createElement("dt");
    term.append(Object.assign(document.createElement("kbd"), { textContent: key }));
    list.append(term, Object.assign(document.createElement("dd"), { textContent: text }));
  }
  const close = Object.assign(document.createElement("button"), { textContent: "Close" });
  close.dataset.close = "";
  const box = document.createElement("div");
  box.className = "ask";
  const foot = document.createElement("footer");
  foot.append(close);
  box.append(title, list, foot);
  dialog.replaceChildren(box);
  dialog.showModal();
}
