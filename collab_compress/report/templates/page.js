for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const column = [...row.children].indexOf(head), up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of row.children) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = line => line.children[column].dataset.value;
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
    return up ? order : -order;
  };
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
});
