// Opens a page that asks before it acts as a dialog. Without a script, or if it can't be fetched, the link leads there.

import { nodesOf } from "./patch.js";

export function openDialogs() {
  const dialog = document.getElementById("dialog");
  document.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-dialog]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    const address = new URL(link.href);
    address.searchParams.set("part", "dialog");
    try {
      const answer = await fetch(address, { signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(String(answer.status));
      dialog.replaceChildren(nodesOf(await answer.text()));
      dialog.showModal();
    } catch {
      location.assign(link.href);
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("[data-close]")) {
      event.preventDefault();
      dialog.close();
    }
  });
}
