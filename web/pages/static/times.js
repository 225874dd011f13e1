// Shows timestamps as "3 s ago" and "in 3 s", by the server's clock, and keeps them current.

let ahead = 0; // milliseconds by which the server's clock is ahead of ours

export function noteServerTime(date) {
  if (!date) return;
  const seen = Date.parse(date) - Date.now();
  // The header has whole seconds: only a clock that is really another one matters.
  if (Math.abs(seen) > 2000) ahead = seen;
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function inWords(seconds) {
  for (const [unit, name] of UNITS) {
    if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name}`;
  }
  return "0 s";
}

/** A time that is `seconds` ago. What was planned for it is late only after some seconds. */
function inTime(seconds, isPlanned) {
  if (seconds <= -1) return `in ${inWords(-seconds)}`;
  if (seconds < (isPlanned ? 5 : 1)) return "now";
  return isPlanned ? `${inWords(seconds)} overdue` : `${inWords(seconds)} ago`;
}

export function showTimes() {
  const now = Date.now() + ahead;
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const seconds = (now - Date.parse(time.dateTime)) / 1000;
    const text = inTime(seconds, time.dataset.ago === "due");
    if (time.textContent !== text) time.textContent = text;
  }
}

export function keepTimes() {
  noteServerTime(document.querySelector("meta[name=server-time]")?.content);
  showTimes();
  setInterval(() => document.hidden || showTimes(), 1000);
}
