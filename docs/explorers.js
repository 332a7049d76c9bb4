// The widgets of the notebooks without a kernel: each choice has its picture and its words.
for (const explorer of document.querySelectorAll(".explorer")) {
  const texts = JSON.parse(explorer.dataset.texts);
  const controls = [...explorer.querySelectorAll("select, input")];
  const update = () => {
    for (const slider of explorer.querySelectorAll("input"))
      slider.nextElementSibling.value = JSON.parse(slider.dataset.shown)[slider.value];
    const place = controls.map((control) => control.value).join("-");
    explorer.querySelector("pre").textContent = texts[place];
    const image = explorer.querySelector("img");
    image.src = `${explorer.dataset.folder}/${place}.png`;
    image.alt = texts[place];
  };
  for (const control of controls) control.addEventListener("input", update);
  update();
}
