// Takes the files of a message: pasted, dropped or chosen. Pictures are scaled to the server's limits and shown as thumbnails.
import { announce, byId, element } from "./dom.js";

const MOST = 20; // pictures in a prompt, the server's limit
const EXACT_CHARS = 1_500_000; // of a PNG's data URL: twenty fit the server's limit of 32 MiB for a body
const SIDE = 2048; // pixels of a picture's longer side: models read fewer

export const thumbnails = (urls) => urls.map((url, i) => element("img", { src: url, alt: `Picture ${i + 1}` }));

// Returns pictures as Markdown: references, and the definitions with their data, for the end of the document.
export function markdown(urls, first) {
  const names = urls.map((_, i) => `picture-${first + i}`);
  return [names.map((name, i) => `![Picture ${first + i}][${name}]`), names.map((name, i) => `[${name}]: ${urls[i]}`)];
}

// Returns a picture upright, on white, as a data URL: PNG, but JPEG for photos and if the PNG would be large.
async function dataUrl(file) {
  const picture = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  const exact = /jpe?g|hei[cf]/.test(file.type) ? "" : canvas.toDataURL("image/png");
  return exact && exact.length <= EXACT_CHARS ? exact : canvas.toDataURL("image/jpeg", 0.92);
}

export class Pictures {
  // `sees` returns true if the chosen model reads pictures. `addFiles` takes all other files, and returns a problem or "".
  constructor(sees, addFiles) {
    Object.assign(this, { sees, addFiles, urls: [] });
    byId("add-file").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", async ({ target }) => {
      await this.add([...target.files]);
      target.value = "";
    });
    document.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); // else a drop leaves the page
    });
    document.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  #take(event, data) {
    const files = [...(data?.files ?? [])];
    const isText = event.type === "paste" && data?.types.includes("text/html") && data.types.includes("text/plain");
    if (!files.length || isText) return; // text that is copied from a document may come with a picture of itself
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";
    const problem = await this.addFiles(files.filter((file) => !isPicture(file)));
    this.#say(problem || (await this.#addPictures(files.filter(isPicture))));
    byId("message").focus();
  }

  async #addPictures(files) {
    if (files.length && !this.sees()) return "This model reads no pictures.";
    for (const file of files) {
      if (this.urls.length >= MOST) return `A message has at most ${MOST} pictures.`;
      try {
        this.urls.push(await dataUrl(file));
      } catch {
        return `${file.name} cannot be read: take a JPEG or PNG.`;
      }
      this.draw();
    }
    return "";
  }

  // Returns the pictures of the message that is sent now.
  take() {
    const taken = this.urls;
    this.urls = [];
    this.#say("");
    this.draw();
    return taken;
  }

  draw() {
    byId("pictures").hidden = !this.urls.length;
    byId("pictures").replaceChildren(...thumbnails(this.urls).map((image, i) => {
      const button = element("button", { type: "button", class: "quiet", "aria-label": `Remove picture ${i + 1}` }, image);
      button.addEventListener("click", () => {
        this.urls.splice(i, 1);
        this.draw();
      });
      return button;
    }));
  }

  #say(text) {
    byId("file-problem").textContent = text;
    if (text) announce(text);
  }
}
