// A run's log: the lines of a block are fetched when it is opened, more of them when asked for, new ones as they come.

import { nodesOf } from "./patch.js";

const asking = new WeakSet();
const seen = new WeakMap(); // what `data-last` was when the lines were read

export function followLogs() {
  document.addEventListener("toggle", (event) => event.target.open && read(event.target), true);
  document.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const jump = event.target.closest("a.jump");
    if (jump && document.querySelector(jump.hash)) {
      event.preventDefault();
      if (location.hash === jump.hash) dispatchEvent(new HashChangeEvent("hashchange"));
      else location.hash = jump.hash;
    }
    const more = event.target.closest("a.more, .block .lines:not([data-read]) a");
    if (more) {
      event.preventDefault();
      fetchLines(more.closest("[data-log]"));
    }
  });
  document.addEventListener("dl:patched", follow);
  // A block that the server has opened has its lines already.
  for (const block of document.querySelectorAll("[data-log]")) {
    if (block.querySelector("[data-read]")) seen.set(block, block.dataset.last);
    else if (block.open) read(block);
  }
}

/** Lines that have come since, for blocks whose end is shown. */
function follow() {
  for (const block of document.querySelectorAll(".block[open], div.block")) {
    const isNew = block.dataset.last === "live" || block.dataset.last !== seen.get(block);
    if (isNew && block.querySelector(".log-end") && !block.querySelector(".more")) fetchLines(block);
  }
}

function read(block) {
  if (block.matches("[data-log]") && !block.querySelector("[data-read]")) fetchLines(block);
}

async function fetchLines(block) {
  if (asking.has(block)) return;
  asking.add(block);
  const into = block.querySelector(".lines");
  const address = new URL(location.href);
  address.hash = "";
  const behind = into.querySelector(".log-end")?.dataset.behind ?? "0";
  const given = { part: "lines", open: block.dataset.log, behind };
  for (const [name, value] of Object.entries(given)) address.searchParams.set(name, value);
  if (block.dataset.log === "all") address.searchParams.delete("open");
  const last = block.dataset.last;
  try {
    const answer = await fetch(address, { signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(await answer.text());
    const fresh = nodesOf(await answer.text());
    seen.set(block, last);
    const lines = into.querySelector(".log");
    if (lines && behind !== "0") {
      lines.append(...fresh.querySelector(".log").children);
      into.querySelector(".log-end").replaceWith(fresh.querySelector(".log-end"));
    } else {
      into.replaceChildren(fresh);
    }
    into.dataset.read = "";
  } catch (error) {
    const failed = into.querySelector(".failed") ?? into.appendChild(document.createElement("p"));
    failed.className = "failed error";
    failed.textContent = `The lines could not be read: ${error.message}`;
  } finally {
    asking.delete(block);
  }
}
