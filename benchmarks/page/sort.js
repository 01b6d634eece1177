// Sorts a table by the column whose button was pressed; empty cells stay last. Without this script the order is by difference.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.tHead.querySelectorAll("th").forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[place].dataset.value ?? row.cells[place].textContent.trim();
      const number = text => (text === "" ? NaN : Number(text));
      const rows = [...body.rows].sort((one, two) => {
        const [a, b] = [key(one), key(two)];
        if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
        const order = isNaN(number(a)) || isNaN(number(b)) ? a.localeCompare(b) : number(a) - number(b);
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
