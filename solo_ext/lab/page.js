// Draws each chart from the specification beside it. `ast` interprets its expressions, so that the
// page's policy need not allow `eval`.
for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(place.nextElementSibling.textContent);
  vegaEmbed(place, spec, { actions: false, ast: true, renderer: "svg", tooltip: { theme: "custom" } })
    .then(() => place.classList.add("drawn"))
    .catch((error) => console.error(error));
}
