// Brings a piece of the page to what the server says now, and leaves alone what the reader has done with it: focus,
// selection, open blocks, what is typed and ticked.

const policy = globalThis.trustedTypes
  ? trustedTypes.createPolicy("dl", { createHTML: (html) => html })
  : { createHTML: (html) => html };

/** The nodes of HTML that our own server has rendered; the one place where a text becomes nodes. */
export function nodesOf(html) {
  const template = document.createElement("template");
  template.innerHTML = policy.createHTML(html);
  return template.content;
}

/** Make `old` like `fresh`, an element of the same kind. */
export function patch(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.matches("time[data-ago]") && old.dateTime === fresh.dateTime) return;
  if (old.hasAttribute("data-keep")) return; // what a script has filled, such as lines of a log
  const isKept = (name) => name === "open" && old.tagName === "DETAILS"; // the reader opens and closes blocks
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value && !isKept(name)) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !isKept(name)) old.removeAttribute(name);
  }
  patchChildren(old, fresh);
}

/** Make the children of `old` like those of `fresh`; elements with an id keep their nodes, wherever they move. */
export function patchChildren(old, fresh) {
  const known = new Map();
  for (const child of old.children) if (child.id) known.set(child.id, child);
  const wantedIds = new Set([...fresh.children].map((child) => child.id));
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    // What is not wanted any more goes first: to move a node would take the focus away from it.
    while (at && (at.id ? !wantedIds.has(at.id) : !like(at, wanted) && hasLike(at, wanted))) at = removed(at);
    const found = wanted.id ? (known.get(wanted.id) ?? null) : at && like(at, wanted) ? at : null;
    if (found === null || found.nodeName !== wanted.nodeName) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else if (old.moveBefore) old.moveBefore(found, at);
    else old.insertBefore(found, at);
    if (found.nodeType === Node.ELEMENT_NODE) patch(found, wanted);
    else if (found.nodeValue !== wanted.nodeValue) found.nodeValue = wanted.nodeValue;
  }
  while (at) at = removed(at);
}

const like = (one, other) => !one.id && !other.id && one.nodeName === other.nodeName;

/** Whether one of the siblings behind `node` could become `wanted`. */
function hasLike(node, wanted) {
  for (let next = node.nextSibling; next; next = next.nextSibling) {
    if (wanted.id ? next.id === wanted.id : like(next, wanted)) return true;
  }
  return false;
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}
