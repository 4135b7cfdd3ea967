"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];

function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.hash === location.hash) reveal();  // an unchanged hash fires no hashchange
});

function sortable(table) {
  const heads = all("th[data-first]", table), body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const first = head.dataset.first, now = head.getAttribute("aria-sort");
    const way = now !== first ? first : first === "ascending" ? "descending" : "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (column ? a - b : a.localeCompare(b));
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));
}

all("table.sortable").forEach(sortable);
let opened = [];
addEventListener("beforeprint", () => {
  opened = all("details.print:not([open])");
  opened.forEach((one) => { one.open = true; });
});
addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
reveal();
