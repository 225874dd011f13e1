// Choosing rows of a list: how many are chosen, all of the page, a span by shift; what is done to them opens as a dialog.

export function chooseRows() {
  const form = document.getElementById("jobs");
  const told = document.getElementById("chosen");
  if (!form || !told) return;
  const boxes = () => [...form.querySelectorAll("input[name=job]")];
  const bar = document.getElementById("bulk-bar");
  const every = form.querySelector("input[name=all]");
  const acts = [...form.querySelectorAll("button[name=action]:not(:disabled)")];
  let last = null;

  function tell() {
    const page = document.getElementById("choose-page");
    const all = boxes();
    const number = all.filter((box) => box.checked).length;
    told.textContent = every.checked ? "All that match" : `${number} selected`;
    bar.classList.toggle("is-on", number > 0 || every.checked);
    for (const act of acts) act.disabled = !number && !every.checked;
    if (page) {
      page.hidden = false;
      page.checked = number > 0 && number === all.length;
      page.indeterminate = number > 0 && number < all.length;
    }
  }

  form.addEventListener("click", (event) => {
    const box = event.target;
    if (box.id === "choose-page") {
      for (const one of boxes()) one.checked = box.checked;
    } else if (box.name === "job") {
      const all = boxes();
      if (event.shiftKey && last) {
        const [from, to] = [all.indexOf(last), all.indexOf(box)].sort((a, b) => a - b);
        if (from >= 0) for (const one of all.slice(from, to + 1)) one.checked = box.checked;
      }
      last = box;
    }
  });
  form.addEventListener("change", tell);
  document.addEventListener("dl:patched", tell);
  addEventListener("pageshow", tell);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = new FormData(form, event.submitter);
    if (every.checked) fields.delete("job");
    const link = document.createElement("a");
    // The buttons are called `action`, too.
    link.href = `${form.getAttribute("action")}?${new URLSearchParams(fields)}`;
    link.dataset.dialog = "";
    form.after(link);
    link.click();
    link.remove();
  });
  tell();
}
