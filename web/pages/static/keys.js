// Shortcuts of single keys, which a reader can switch off: `g` and a letter lead to a subject, `/` to the filter, `p` pauses.

export function listenToKeys() {
  if (document.documentElement.dataset.shortcuts === "off") return;
  let going = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (going) {
      going = false;
      const link = document.querySelector(`.menu a[data-key="${CSS.escape(event.key)}"]`);
      if (link) link.click();
      return;
    }
    if (event.key === "g") {
      going = true;
      setTimeout(() => (going = false), 1500);
    } else if (event.key === "/") {
      const field = document.querySelector(".filters input, .filters select");
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
  list.className = "facts";
  const keys = [...document.querySelectorAll(".menu a[data-key]")].map((a) => [`g ${a.dataset.key}`, a.textContent]);
  for (const [key, text] of [...keys, ["/", "to the filter"], ["p", "pause or resume updates"], ["?", "this list"]]) {
    const term = document.createElement("dt");
    term.append(Object.assign(document.createElement("kbd"), { textContent: key }));
    list.append(term, Object.assign(document.createElement("dd"), { textContent: text }));
  }
  const close = Object.assign(document.createElement("button"), { textContent: "Close" });
  close.dataset.close = "";
  dialog.replaceChildren(title, list, close);
  dialog.showModal();
}
