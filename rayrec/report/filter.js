// Shows the rows of the table that have all words of the box.
const rows = [...document.querySelectorAll("tbody tr")];
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
