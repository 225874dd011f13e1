// What every page needs. All of it can be done without: see the pages with scripts switched off.

import { offerCopies } from "./copy.js";
import { openDialogs } from "./dialog.js";
import { listenToKeys } from "./keys.js";
import { startLive } from "./live.js";
import { followLogs } from "./runs.js";
import { chooseRows } from "./select.js";
import { keepTimes } from "./times.js";

keepTimes();
openDialogs();
offerCopies();
listenToKeys();
startLive();
followLogs();
chooseRows();

// A block that is jumped to is opened.
function openTarget() {
  const target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  const block = target?.closest("details");
  if (!block) return;
  block.open = true;
  (block.querySelector("summary") ?? block).focus();
  block.scrollIntoView();
}
addEventListener("hashchange", openTarget);
openTarget();

// On the page of the display: the browser's own zone.
const own = document.getElementById("own-zone");
if (own) {
  own.hidden = false;
  own.addEventListener("click", () => {
    document.getElementById("zone").value = Intl.DateTimeFormat().resolvedOptions().timeZone;
  });
}
