// Reads the text of a PDF with pdf.js, which is loaded with the first one.

// Returns the text of a PDF, page by page.
export async function readPdf(data) {
  const base = new URL("vendor/", import.meta.url);
  const { getDocument, GlobalWorkerOptions } = await import("./vendor/pdf.min.mjs");
  GlobalWorkerOptions.workerSrc = new URL("pdf.worker.min.mjs", base).href;
  const loading = getDocument({ data, isEvalSupported: false, disableFontFace: true, useSystemFonts: false, verbosity: 0 });
  try {
    const file = await loading.promise;
    const pages = [];
    for (let number = 1; number <= file.numPages; number += 1) {
      const { items } = await (await file.getPage(number)).getTextContent();
      pages.push(items.map(({ str, hasEOL }) => (hasEOL ? `${str}\n` : str)).join(""));
    }
    return pages.join("\n\n");
  } finally {
    loading.destroy();
  }
}
